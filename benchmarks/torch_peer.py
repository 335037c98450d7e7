"""Hugging Face transformers on PyTorch, for comparisons on the same device."""

import statistics
import time
from collections.abc import Callable, Iterator

import models
import numpy as np

from gigpo_jax.models import qwen

_PROMPT = 1024


def measure(model: qwen.QwenConfig) -> Iterator[tuple[str, dict]]:
  """Yields (name, results) of `generate` and of updates on a CUDA device.

  Yields nothing without PyTorch or a CUDA device.
  """
  try:
    import torch
    import transformers  # noqa: F401
  except ImportError:
    return
  if not torch.cuda.is_available():
    return
  yield from _generate(model, (64, 128))
  ids = np.random.default_rng(0).integers(2, model.vocab_size, (64, 1024))
  for microbatch_rows in (8, 16):
    step = make_update(model, ids, microbatch_rows, 'cuda')
    step()
    start = time.perf_counter()
    step()
    secs = time.perf_counter() - start
    yield (
      f'update, gradient checkpointing, {microbatch_rows} rows at a time',
      {'tokens_per_sec': ids.size / secs},
    )


def _generate(
  model: qwen.QwenConfig, sizes: tuple[int, ...]
) -> Iterator[tuple[str, dict]]:
  import torch

  with torch.device('cuda'):
    network = models.hugging_face(model).to(torch.bfloat16)
  network.eval()
  for size in sizes:
    ids = torch.randint(2, model.vocab_size, (size, _PROMPT), device='cuda')

    def run(limit: int, ids=ids) -> float:
      torch.cuda.synchronize()
      start = time.perf_counter()
      network.generate(
        ids,
        do_sample=True,
        top_k=0,  # 50 by default, which is further work.
        min_new_tokens=limit,
        max_new_tokens=limit,
      )
      torch.cuda.synchronize()
      return time.perf_counter() - start

    run(9)
    prefill = statistics.median(run(1) for _ in range(3))
    step = (statistics.median(run(65) for _ in range(3)) - prefill) / 64
    yield f'prefill, {size} prompts', {'tokens_per_sec': ids.numel() / prefill}
    yield f'decode, {size} prompts', {'tokens_per_sec': size / step}


def make_update(
  model: qwen.QwenConfig,
  ids: np.ndarray,
  microbatch_rows: int,
  device: str = 'cpu',
) -> Callable[[], None]:
  """Returns an update of rows whose last 128 tokens are the completion."""
  import torch

  with torch.device(device):
    network = models.hugging_face(model)
  network.gradient_checkpointing_enable()
  network.train()
  optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
  tokens = torch.tensor(ids, dtype=torch.long, device=device)

  def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    for microbatch in tokens.split(microbatch_rows):
      with torch.autocast(device, torch.bfloat16, model.dtype == 'bfloat16'):
        logits = network(microbatch, logits_to_keep=129, use_cache=False).logits
      log_probs = torch.log_softmax(logits[:, :-1].float(), -1)
      chosen = log_probs.gather(-1, microbatch[:, 896:, None])[..., 0]
      ratio = torch.exp(chosen - chosen.detach())
      (-ratio.sum() / (128 * len(tokens))).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    if device == 'cuda':
      torch.cuda.synchronize()

  return step
