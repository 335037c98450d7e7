"""Tokens trained a second, beside other frameworks, and what padding costs.

Joins a run of a harness that alternates frameworks on one core, as
benchmarks/generate.py does: an update of a whole batch, prompts of 256 tokens
and completions of 64, clipped ratio, KL and entropy, AdamW.

    PYTHONPATH=HARNESS:. python benchmarks/learner.py --shape tiny --batch 16

`--what spread` needs no harness: rows whose lengths are spread, a third of the
longest on average, against the same rows padded to the longest; `--what
prompts`: rows of which eight have the same prompt, shared or not. `--what
memory` is an update of Qwen2.5-0.5B's shape, layers recomputed in the backward
pass, in two processes one after the other: ours, and PyTorch's with gradient
checkpointing. `--what limits`, for an accelerator, is an update of a whole
Qwen2.5 beside the device's rate of matrix products, and PyTorch's of the same
rows where it has the device, too.
"""

import argparse
import dataclasses
import functools
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import models
import numpy as np

from gigpo_jax import batch, hosts, learner, losses, mesh, sampler
from gigpo_jax.models import published, qwen

QWEN = dataclasses.replace(
  published.SHAPES['Qwen2.5-0.5B'], num_layers=4, dtype='float32', remat='none'
)
SHAPES = {'tiny': models.TINY, 'qwen05b_4l': QWEN}


def make_learner(
  model: qwen.QwenConfig, buckets: tuple[int, ...], completion: int, **kwargs
) -> learner.Learner:
  """Returns a learner of one device."""
  return learner.Learner(
    model,
    mesh.make_mesh(1, -1, 1),
    loss=functools.partial(losses.policy_gradient, kl_weight=0.04),
    optimizer=learner.adamw(1e-6),
    length_buckets=buckets,
    max_completion_tokens=completion,
    **kwargs,
  )


def make_rows(prompts: list, completions: list, longest: int) -> batch.Rows:
  """Returns rows of these tokens, sampled with a log-prob of -8 each."""
  rows = batch.pack(
    prompts,
    completions,
    max_prompt_tokens=longest,
    max_completion_tokens=max(len(c) for c in completions),
    row_multiple=len(prompts),
  )
  rows.sampler_log_probs[rows.completion_mask] = -8
  return rows


class Step:
  """An update that can be repeated."""

  def __init__(self, subject: learner.Learner, model, rows: batch.Rows):
    self._subject, self._rows = subject, rows
    self._state = subject.init(qwen.init(model, jax.random.key(0)))
    self._advantages = np.random.default_rng(0).normal(size=len(rows.groups))

  def __call__(self) -> dict[str, float]:
    """Takes it once; returns its metrics."""
    log_probs = self._rows.sampler_log_probs
    self._state, metrics = self._subject.update(
      self._state,
      self._rows,
      self._advantages.astype(np.float32),
      old_log_probs=log_probs,
      ref_log_probs=log_probs,
      iteration=0,
    )
    jax.block_until_ready(self._state)
    return metrics


def beside(options: argparse.Namespace) -> None:
  """Joins a run of the harness."""
  import shapes

  model = SHAPES[options.shape]
  ids = shapes.prompts(
    shapes.SHAPES[options.shape], options.batch, shapes.PROMPT + shapes.NEW
  )
  rows = make_rows(
    list(ids[:, : shapes.PROMPT]), list(ids[:, shapes.PROMPT :]), shapes.PROMPT
  )
  subject = make_learner(
    model,
    (shapes.PROMPT + shapes.NEW,),
    shapes.NEW,
    minibatch_rows=options.batch,
    microbatch_rows=min(options.microbatch, options.batch),
  )
  step = Step(subject, model, rows)
  warm, runs = shapes.timed(step, options.repeats)
  row = {
    'framework': 'gigpo_jax',
    'version': '',
    'shape': options.shape,
    'what': 'train',
    'batch': options.batch,
    'prompt': shapes.PROMPT,
    'new': shapes.NEW,
    'threads': options.threads,
    **shapes.warm_fields(warm),
  }
  shapes.emit(
    **shapes.rates(row, options.batch, shapes.PROMPT, shapes.NEW, runs)
  )


def _alternate(steps: dict[str, Step], repeats: int) -> dict[str, float]:
  """Returns median CPU seconds of each, in alternating rounds."""
  found: dict[str, list[float]] = {name: [] for name in steps}
  for step in steps.values():
    step()
  for _ in range(repeats):
    for name, step in steps.items():
      begin = time.process_time()
      step()
      found[name].append(time.process_time() - begin)
  return {name: statistics.median(times) for name, times in found.items()}


def spread(options: argparse.Namespace) -> None:
  """Rows of spread lengths, in buckets and padded to the longest."""
  model, longest, completion = SHAPES[options.shape], 1024, 128
  rng = np.random.default_rng(0)
  rows = 8 * options.batch
  lengths = np.clip(rng.gamma(2.0, longest / 6, rows), 48, longest).astype(int)
  answers = np.clip(rng.gamma(2.0, 20, rows), 4, completion).astype(int)
  draw = functools.partial(rng.integers, 2, model.vocab_size)
  made = make_rows(
    [draw(size=max(n - c, 1)) for n, c in zip(lengths, answers, strict=True)],
    [draw(size=c) for c in answers],
    longest,
  )
  total = longest + completion
  steps = {
    name: Step(
      make_learner(
        model,
        buckets,
        completion,
        minibatch_rows=rows,
        microbatch_rows=options.microbatch,
      ),
      model,
      made,
    )
    for name, buckets in (
      ('buckets', (*range(128, total, 128), total)),
      ('padded', (total,)),
    )
  }
  secs = _alternate(steps, options.repeats)
  mean = made.lengths.mean()
  print(
    f'{rows} rows of {mean:.0f} tokens on average, longest {longest}: '
    + ', '.join(f'{k} {made.lengths.sum() / s:.0f}' for k, s in secs.items())
    + f' tokens per CPU second; {secs["padded"] / secs["buckets"]:.2f} times'
  )


def prompts(options: argparse.Namespace) -> None:
  """Rows of which eight have the same prompt, shared or each by itself."""
  model = SHAPES[options.shape]
  rng = np.random.default_rng(0)
  draw = functools.partial(rng.integers, 2, model.vocab_size)
  given = [draw(size=rng.integers(200, 320)) for _ in range(options.batch)]
  made = make_rows(
    [p for p in given for _ in range(8)],
    [draw(size=rng.integers(16, 64)) for _ in range(8 * options.batch)],
    320,
  )
  steps = {
    name: Step(
      make_learner(
        model,
        (256, 320, 384, 512, 640),
        64,
        minibatch_rows=len(made.groups),
        microbatch_rows=options.microbatch,
        share_prompts=share,
      ),
      model,
      made,
    )
    for name, share in (('shared', True), ('apart', False))
  }
  saved = steps['shared']()['packs/shared_tokens'] / made.lengths.sum()
  secs = _alternate(steps, options.repeats)
  print(
    f'{len(made.groups)} rows, eight with a prompt: {saved:.0%} of the tokens '
    f'not computed; {secs["apart"] / secs["shared"]:.2f} times as fast'
  )


def memory(options: argparse.Namespace) -> None:
  """Peak memory of an update of a whole 0.5B network, ours and PyTorch's."""
  if options.framework:
    one_update(options.framework, options.batch, options.microbatch)
    return
  for framework in ('gigpo_jax', 'transformers'):
    found = subprocess.run(
      [sys.executable, *sys.argv, '--framework', framework],
      check=True,
      capture_output=True,
      text=True,
    )
    print(found.stdout.splitlines()[-1], flush=True)


def one_update(framework: str, batch_rows: int, microbatch_rows: int) -> None:
  """Takes two updates of rows of 1,024 tokens; prints the peak memory."""
  model = dataclasses.replace(
    published.SHAPES['Qwen2.5-0.5B'], dtype='float32', remat='layer'
  )
  rng = np.random.default_rng(0)
  ids = rng.integers(2, model.vocab_size, (batch_rows, 1024), np.int32)
  if framework == 'gigpo_jax':
    rows = make_rows(list(ids[:, :896]), list(ids[:, 896:]), 896)
    subject = make_learner(
      model,
      (1024,),
      128,
      minibatch_rows=batch_rows,
      microbatch_rows=microbatch_rows,
    )
    step = Step(subject, model, rows)
  else:
    step = _torch_step(model, ids, microbatch_rows)
  times = []
  for _ in range(2):
    begin = time.process_time()
    step()
    times.append(time.process_time() - begin)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(
    f'{framework}: {batch_rows} rows of 1,024 tokens, {microbatch_rows} at a '
    f'time: {peak:.1f} GiB, {times[-1]:.0f} CPU seconds'
  )


def limits(options: argparse.Namespace) -> None:
  """Prints what an update is beside the device's rate of matrix products."""
  product = models.matmul_rate('bfloat16', 8192)
  model = published.SHAPES[f'Qwen2.5-{options.size}']
  embedded = model.vocab_size * model.hidden_size
  matrices = sampler.parameter_bytes(model, 'model') / 2 - embedded
  # Multiplications and additions, forwards and twice backwards; of attention
  # half, for it is causal. Logits of the completion's tokens only.
  mixed = model.num_layers * model.num_heads * model.head_dim * 1024
  flops = 6 * (matrices + mixed + embedded * 128 / 1024)
  rows, tokens = options.batch, options.batch * 1024
  print(
    f'{jax.devices()[0].device_kind}: {product / 1e12:.0f} TFLOP/s in bfloat16;'
    f' Qwen2.5-{options.size}, updates of {rows} rows of 896 + 128 tokens'
  )
  print('| what | rows at once | tokens/s | of matmul |\n|---|---|---|---|')

  def tell(name: str, microbatch: int, step: Callable[[], object]) -> None:
    step()
    times = []
    for _ in range(options.repeats):
      begin = time.perf_counter()
      step()
      times.append(time.perf_counter() - begin)
    rate = tokens / statistics.median(times)
    share = rate * flops / product
    print(f'| {name} | {microbatch} | {rate:,.0f} | {share:.0%} |', flush=True)

  ids = np.random.default_rng(0).integers(
    2, model.vocab_size, (rows, 1024), np.int32
  )
  made = make_rows(list(ids[:, :896]), list(ids[:, 896:]), 896)
  best = qwen.suited(jax.default_backend())
  for remat, microbatch in options.limit_settings:
    subject = make_learner(
      dataclasses.replace(model, remat=remat, **best),
      (1024,),
      128,
      minibatch_rows=rows,
      microbatch_rows=microbatch,
    )
    try:
      tell(f'gigpo_jax, remat {remat}', microbatch, Step(subject, model, made))
    except jax.errors.JaxRuntimeError as error:
      print(
        f'| gigpo_jax, remat {remat} | {microbatch} | {str(error)[:60]} | |'
      )
    del subject
  try:
    import torch
  except ImportError:
    return
  if not torch.cuda.is_available():
    return
  for microbatch in sorted({m for _, m in options.limit_settings}):
    step = _torch_step(model, ids, microbatch, 'cuda')
    tell('transformers, gradient checkpointing', microbatch, step)


def _setting(text: str) -> tuple[str, int]:
  remat, _, microbatch = text.partition(':')
  return remat, int(microbatch)


def _torch_step(
  model: qwen.QwenConfig,
  ids: np.ndarray,
  microbatch_rows: int,
  device: str = 'cpu',
) -> Callable[[], None]:
  import torch

  with torch.device(device):
    network = models.hugging_face(model)
  network.gradient_checkpointing_enable()
  network.train()
  optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
  tokens = torch.tensor(ids, dtype=torch.long, device=device)

  def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    for part in tokens.split(microbatch_rows):
      with torch.autocast(device, torch.bfloat16, model.dtype == 'bfloat16'):
        logits = network(part, logits_to_keep=129, use_cache=False).logits
      log_probs = torch.log_softmax(logits[:, :-1].float(), -1)
      chosen = log_probs.gather(-1, part[:, 896:, None])[..., 0]
      ratio = torch.exp(chosen - chosen.detach())
      (-ratio.sum() / (128 * len(tokens))).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    if device == 'cuda':
      torch.cuda.synchronize()

  return step


_MEASURES = {
  'spread': spread,
  'prompts': prompts,
  'memory': memory,
  'limits': limits,
}


def main() -> None:
  """Measures."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--shape', default='tiny', choices=SHAPES)
  parser.add_argument('--what', default='train', choices=('train', *_MEASURES))
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--microbatch', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--threads', type=int, default=1)
  parser.add_argument('--size', choices=('0.5B', '1.5B'), default='1.5B')
  parser.add_argument(
    '--limit_settings',
    type=_setting,
    nargs='+',
    default=[('layer', 8), ('layer', 16), ('matrices', 8)],
    help='what is computed again, and rows at once: layer:8 ..',
  )
  parser.add_argument('--framework', help=argparse.SUPPRESS)
  options = parser.parse_args()
  hosts.keep_memory()
  _MEASURES.get(options.what, beside)(options)


if __name__ == '__main__':
  main()
