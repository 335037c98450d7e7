"""Benchmark the learner: speed, padding and memory.

`benchmarks/peers/rounds.py` runs `--what train` and other frameworks in turn:
an update of a full batch with prompts of 256 tokens, completions of 64,
clipped ratio, KL, entropy and AdamW.

    PYTHONPATH=benchmarks/peers:. python benchmarks/learner.py --batch 16

The other measurements are:

- `--what spread`: rows of various lengths, on average a third of the maximum,
  packed and padded to the maximum.
- `--what prompts`: rows of which eight share a prompt, with and without
  prompt sharing.
- `--what memory`: peak memory of an update of Qwen2.5-0.5B with rematerialized
  layers, and of PyTorch with gradient checkpointing, each in its own process.

benchmarks/accelerator.py measures updates on an accelerator.
"""

import argparse
import dataclasses
import functools
import resource
import statistics
import subprocess
import sys
import time

import jax
import models
import numpy as np
import torch_peer

from gigpo_jax import batch, learner, losses, mesh, optimizer
from gigpo_jax.models import published, qwen, qwen_config
from gigpo_jax.runtime import hardware

QWEN = dataclasses.replace(
  published.SHAPES['Qwen2.5-0.5B'],
  num_layers=4,
  dtype='float32',
  remat='none',
)
SHAPES = {'tiny': models.TINY, 'qwen05b_4l': QWEN}


def choose_shape(name: str) -> qwen.QwenConfig:
  """Returns a shape with the options that a run would choose."""
  shape = dataclasses.replace(SHAPES[name], dtype='float32')
  fields = qwen_config.platform_fields(shape, jax.default_backend())
  return dataclasses.replace(shape, **fields)


def make_learner(
  model: qwen.QwenConfig, buckets: tuple[int, ...], completion: int, **kwargs
) -> learner.Learner:
  """Returns a learner on one device."""
  return learner.Learner(
    model,
    mesh.make_mesh(1, -1, 1),
    loss=losses.PolicyGradient(kl_weight=0.04),
    optimizer=optimizer.AdamW(1e-6).make(),
    length_buckets=buckets,
    max_completion_tokens=completion,
    **kwargs,
  )


def make_rows(prompts: list, completions: list, longest: int) -> batch.Rows:
  """Returns rows of these tokens, with a sampler log-prob of -8 each."""
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
    devices = mesh.make_mesh(1, -1, 1)
    self._state = subject.init(models.random_params(model, devices))
    self._advantages = np.random.default_rng(0).normal(size=len(rows.groups))

  def __call__(self) -> dict[str, float]:
    """Runs the update and returns its metrics."""
    log_probs = self._rows.sampler_log_probs
    columns = {
      'advantages': self._advantages,
      'old_log_probs': log_probs,
      'ref_log_probs': log_probs,
      'importance': 1.0,
    }
    self._state, metrics = self._subject.update(
      self._state,
      self._rows,
      iteration=0,
      **{name: columns[name] for name in self._subject.columns},
    )
    jax.block_until_ready(self._state)
    return metrics

  def log_probs(self) -> np.ndarray:
    """Returns the log-probs of the rows."""
    return self._subject.log_probs(self._state.params, self._rows)


def train(options: argparse.Namespace) -> None:
  """Times an update for the comparison in benchmarks/peers."""
  import shapes

  model = choose_shape(options.shape)
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
    microbatch_tokens=min(options.microbatch, options.batch)
    * (shapes.PROMPT + shapes.NEW),
  )
  step = Step(subject, model, rows)
  rate = models.core_matmul_rate()
  warm, runs = shapes.timed(step, options.repeats)
  rate = (rate + models.core_matmul_rate()) / 2
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
  row = shapes.rates(row, options.batch, shapes.PROMPT, shapes.NEW, runs)
  # Floating-point operations of a token, forward and backward.
  length = shapes.PROMPT + shapes.NEW
  flops = 3 * models.forward_flops(model, length, shapes.NEW) / length
  share = row['train_tok_per_cpu_s'] * flops / rate
  shapes.emit(**row, train_matmul_share=share)


def _alternate(steps: dict[str, Step], repeats: int) -> dict[str, float]:
  """Returns the median CPU seconds of each step, in alternating rounds."""
  secs: dict[str, list[float]] = {name: [] for name in steps}
  for step in steps.values():
    step()
  for _ in range(repeats):
    for name, step in steps.items():
      start = time.process_time()
      step()
      secs[name].append(time.process_time() - start)
  return {name: statistics.median(times) for name, times in secs.items()}


def spread(options: argparse.Namespace) -> None:
  """Compares length buckets with padding to the maximum."""
  model, longest, completion = choose_shape(options.shape), 1024, 128
  rng = np.random.default_rng(0)
  rows = 8 * options.batch
  lengths = np.clip(rng.gamma(2.0, longest / 6, rows), 48, longest).astype(int)
  answers = np.clip(rng.gamma(2.0, 20, rows), 4, completion).astype(int)
  draw = functools.partial(rng.integers, 2, model.vocab_size)
  completions = [draw(size=c) for c in answers]
  packed = make_rows(
    [draw(size=max(n - c, 1)) for n, c in zip(lengths, answers, strict=True)],
    completions,
    longest,
  )
  padded = make_rows(
    [draw(size=longest) for _ in completions], completions, longest
  )
  total = longest + completion
  steps = {
    name: Step(
      make_learner(
        model,
        buckets,
        completion,
        minibatch_rows=rows,
        microbatch_tokens=options.microbatch * total,
      ),
      model,
      some_rows,
    )
    for name, some_rows, buckets in (
      ('packed', packed, (256, 384, 512, 768, total)),
      ('padded', padded, (total,)),
    )
  }
  secs = _alternate(steps, options.repeats)
  mean = packed.lengths.mean()
  print(
    f'{rows} rows of {mean:.0f} tokens on average, longest {longest}: '
    + ', '.join(f'{k} {packed.lengths.sum() / s:.0f}' for k, s in secs.items())
    + f' tokens per CPU second; {secs["padded"] / secs["packed"]:.2f} times'
  )


def prompts(options: argparse.Namespace) -> None:
  """Compares shared prompts with separate ones, eight rows per prompt."""
  model = choose_shape(options.shape)
  rng = np.random.default_rng(0)
  draw = functools.partial(rng.integers, 2, model.vocab_size)
  prompt_ids = [draw(size=rng.integers(200, 320)) for _ in range(options.batch)]
  packed = make_rows(
    [p for p in prompt_ids for _ in range(8)],
    [draw(size=rng.integers(16, 64)) for _ in range(8 * options.batch)],
    320,
  )
  steps = {
    name: Step(
      make_learner(
        model,
        (640,),
        64,
        minibatch_rows=len(packed.groups),
        microbatch_tokens=options.microbatch * 640,
        share_prompts=share,
      ),
      model,
      packed,
    )
    for name, share in (('shared', True), ('apart', False))
  }
  saved = steps['shared']()['packs/shared_tokens'] / packed.lengths.sum()
  secs = _alternate(steps, options.repeats)
  print(
    f'{len(packed.groups)} rows, eight per prompt: {saved:.0%} of the tokens '
    f'saved; {secs["apart"] / secs["shared"]:.2f} times as fast'
  )


def memory(options: argparse.Namespace) -> None:
  """Compares peak memory of an update of a 0.5B model with PyTorch's."""
  if options.framework:
    one_update(options.framework, options.batch, options.microbatch)
    return
  for framework in ('gigpo_jax', 'transformers'):
    done = subprocess.run(
      [sys.executable, *sys.argv, '--framework', framework],
      check=True,
      capture_output=True,
      text=True,
    )
    print(done.stdout.splitlines()[-1], flush=True)


def one_update(framework: str, batch_rows: int, microbatch_rows: int) -> None:
  """Runs two updates on rows of 1,024 tokens; prints the peak memory."""
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
      microbatch_tokens=microbatch_rows * 1024,
    )
    step = Step(subject, model, rows)
  else:
    step = torch_peer.make_update(model, ids, microbatch_rows)
  times = []
  for _ in range(2):
    start = time.process_time()
    step()
    times.append(time.process_time() - start)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(
    f'{framework}: {batch_rows} rows of 1,024 tokens, {microbatch_rows} at a '
    f'time: {peak:.1f} GiB, {times[-1]:.0f} CPU seconds'
  )


_MEASURES = {
  'spread': spread,
  'prompts': prompts,
  'memory': memory,
}


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--shape', default='tiny', choices=SHAPES)
  parser.add_argument('--what', default='train', choices=('train', *_MEASURES))
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--microbatch', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--threads', type=int, default=1)
  parser.add_argument('--framework', help=argparse.SUPPRESS)
  options = parser.parse_args()
  hardware.keep_freed_memory()
  _MEASURES.get(options.what, train)(options)


if __name__ == '__main__':
  main()
