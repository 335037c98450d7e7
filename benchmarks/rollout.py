"""Benchmark rollouts: asynchronous against lock-step, and cost of a step.

    python benchmarks/rollout.py                     # both schedules
    python benchmarks/rollout.py --what steps --plot steps.png
    python benchmarks/rollout.py --what shares
    python benchmarks/rollout.py --what differences

Uses a random model of 5.0M parameters (4 layers of width 256, 4,096 tokens) on
the available devices.

schedules: prompts of 96 to 128 tokens. Response lengths are exponential with a
mean of a quarter of the maximum, clipped to 1 to 256 tokens. Environments in
worker processes sleep for a lognormal time with sigma 1. Everything is a
function of the request, so both schedules do the same work, token for token.
Reports medians over alternating rounds.

steps: time of a decode step by number of slots and by cache length.

shares: operations per CPU second of decode and prefill, and their share of the
matmul rate of the same core. Pin the process to one core.

differences: number of tokens that change with the batch they are decoded in.

benchmarks/accelerator.py measures decode and prefill on an accelerator.
"""

import argparse
import dataclasses
import functools
import statistics
import time
import zlib
from collections.abc import Callable

import forced
import jax
import models
import numpy as np

from envs import base
from gigpo_jax import env_pool, mesh, rollout, sampler
from gigpo_jax.models import parameters, qwen

_MAX_RESPONSE = 256  # Tokens.
_PROMPT = 128
_MEMBERS = 8
_STEPS = 6  # Steps of an episode.


def make_sampler(
  slots: int,
  model: qwen.QwenConfig = models.TINY,
  prompt_buckets: tuple[int, ...] = (_PROMPT,),
  **kwargs,
) -> sampler.Sampler:
  """Returns a sampler with one batch size."""
  return sampler.Sampler(
    model,
    mesh.make_mesh(1, -1, 1),
    seed=0,
    prompt_buckets=prompt_buckets,
    batch_buckets=(slots,),
    max_completion_tokens=_MAX_RESPONSE,
    stop_ids=(),
    vocab_size=model.vocab_size,
    **kwargs,
  )


def response_tokens(stream: tuple[int, ...]) -> int:
  """Returns the length of a response of the workload."""
  drawn = np.random.default_rng(stream).exponential(_MAX_RESPONSE / 4)
  return int(np.clip(drawn, 1, _MAX_RESPONSE))


class Numbers:
  """A fake tokenizer that maps prompts to ids of realistic lengths."""

  def fit(self, prompts, short_prompts, *, max_tokens, policy):
    """Returns ids that are a function of the prompt."""
    del short_prompts, policy
    encoded = []
    for prompt in prompts:
      rng = np.random.default_rng(zlib.crc32(prompt.encode()))
      size = rng.integers(96, max_tokens + 1)
      ids = rng.integers(2, models.TINY.vocab_size, size).astype(np.int32)
      encoded.append((ids, False))
    return encoded

  def decode(self, ids):
    """Returns a text that is a function of the ids."""
    return [str(zlib.crc32(row.tobytes())) for row in ids]


def schedules(options: argparse.Namespace) -> None:
  """Prints a table row per schedule, and the ratio of their speeds."""
  engine = make_sampler(options.slots, decode_tokens=options.decode_tokens)
  params = parameters.init(models.TINY, jax.random.key(0))
  engine.warm_up(params)
  warm_compilations = engine.compilations
  tasks = [base.Task('train', n) for n in range(options.groups)]
  speeds: dict[str, list[float]] = {name: [] for name in rollout.SCHEDULES}
  metrics: dict[str, dict[str, float]] = {}
  tokens: dict[str, list] = {}
  kwargs = {
    'max_steps': _STEPS,
    'rooms': 50,
    'step_secs': options.step_secs,
    'step_tail': 1.0,
  }
  with env_pool.EnvPool(
    'toy',
    kwargs,
    num_envs=options.envs,
    num_workers=options.workers,
    step_timeout_secs=60,
    reset_timeout_secs=60,
  ) as pool:
    for _ in range(options.rounds):
      for name in rollout.SCHEDULES:
        runner = rollout.EpisodeRunner(
          pool,
          forced.Sampler(engine, response_tokens),
          Numbers(),
          _PROMPT,
          'error',
          name,
        )
        start = time.monotonic()
        episodes = runner.run(
          params,
          tasks,
          episodes_per_group=_MEMBERS,
          stream=(rollout.TRAIN, 0),
          sampling=sampler.Sampling(),
        )
        speeds[name].append(len(episodes) / (time.monotonic() - start))
        metrics[name] = runner.metrics()
        tokens[name] = [s.completion_ids for t in episodes for s in t.steps]
  print(
    f'{len(episodes)} episodes of {_STEPS} steps, {options.slots} slots, '
    f'{options.envs} environments, steps of {options.step_secs:g} s on average'
  )
  _print_schedules(speeds, metrics, tokens)
  print(
    f'compilations after warm-up: {engine.compilations - warm_compilations}'
  )


def _print_schedules(
  speeds: dict[str, list[float]],
  metrics: dict[str, dict[str, float]],
  tokens: dict[str, list],
) -> None:
  """Prints a table row per schedule, and a comparison of both."""
  print('| schedule | episodes/s | tokens/s | slots used | waiting for envs |')
  print('|---|---|---|---|---|')
  for name in rollout.SCHEDULES:
    print(
      f'| {name} | {statistics.median(speeds[name]):.2f} '
      f'| {metrics[name]["rollout/decode_tokens_per_sec"]:,.0f} '
      f'| {metrics[name]["rollout/slot_occupancy"]:.0%} '
      f'| {metrics[name]["rollout/env_wait_share"]:.0%} |'
    )
  one, other = (statistics.median(speeds[name]) for name in rollout.SCHEDULES)
  pairs = list(zip(*tokens.values(), strict=True))
  same = sum(np.array_equal(a, b) for a, b in pairs)
  print(
    f'async / lockstep: {one / other:.2f}; equal responses: {same} of '
    f'{len(pairs)}'
  )


def steps(options: argparse.Namespace) -> None:
  """Prints and plots the time of a decode step."""
  params = parameters.init(models.TINY, jax.random.key(0))
  by_slots = {
    slots: step_and_prefill_secs(make_sampler(slots), params, slots, _PROMPT)[0]
    for slots in (8, 16, 32, 64, 128)
  }
  fills = (128, 256, 512, 1024, 2048)
  by_fill = {
    fill: step_and_prefill_secs(
      make_sampler(16, prompt_buckets=fills), params, 16, fill
    )[0]
    for fill in fills
  }
  for name, secs_by_size in (('slots', by_slots), ('prompt tokens', by_fill)):
    print(f'| {name} | ms/step |\n|---|---|')
    for size, value in secs_by_size.items():
      print(f'| {size} | {1e3 * value:.2f} |')
  if options.plot:
    _plot(options.plot, by_slots, by_fill)


def shares(options: argparse.Namespace) -> None:
  """Prints the operations per CPU second of decode and prefill."""
  del options
  params, steps = parameters.init(models.TINY, jax.random.key(0)), 64
  print('| slots | path | GFLOP/CPU s | share of matmul |\n|---|---|---|---|')
  for slots in (8, 32, 128):
    before = models.core_matmul_rate()
    step, prefill = step_and_prefill_secs(
      make_sampler(slots), params, slots, _PROMPT, steps, time.process_time
    )
    rate = (before + models.core_matmul_rate()) / 2
    # The measured steps start after 8 others.
    decode = models.decode_flops(models.TINY, _PROMPT + 8 + steps // 2) / step
    fill = models.forward_flops(models.TINY, _PROMPT, 1) / prefill
    for path, flops in (('decode', slots * decode), ('prefill', slots * fill)):
      print(f'| {slots} | {path} | {flops / 1e9:.1f} | {flops / rate:.0%} |')


def step_and_prefill_secs(
  engine: sampler.Sampler,
  params: dict,
  slots: int,
  prompt: int,
  steps: int = 64,
  clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
  """Returns the median seconds of a decode step and of the prefill."""

  def measure(limit: int) -> float:
    start = clock()
    sample(engine, params, slots, prompt, limit)
    return clock() - start

  short, long = 8, 8 + steps
  measure(long)
  rounds = [(measure(short), measure(long)) for _ in range(5)]
  step = statistics.median((b - a) / steps for a, b in rounds)
  return step, statistics.median(a for a, _ in rounds) - short * step


def sample(
  engine: sampler.Sampler, params: dict, slots: int, prompt: int, tokens: int
) -> None:
  """Fills all slots with random prompts and samples some tokens of each."""
  rng, vocab_size = np.random.default_rng(0), params['embed'].shape[0]
  requests = [
    sampler.Request(
      rng.integers(2, vocab_size, prompt).astype(np.int32),
      (0, 0, 0, n, 0),
      max_tokens=tokens,
    )
    for n in range(slots)
  ]
  engine.generate(params, requests)


def differences(options: argparse.Namespace) -> None:
  """Prints how many tokens depend on the batch, by dtype and weights."""
  del options
  params = parameters.init(models.TINY, jax.random.key(0))
  rng = np.random.default_rng(0)
  draw = functools.partial(rng.integers, 2, models.TINY.vocab_size)
  requests = [
    sampler.Request(
      draw(size=rng.integers(96, 129), dtype=np.int32),
      (0, 0, 0, n, 0),
      max_tokens=int(rng.integers(1, _MAX_RESPONSE + 1)),
    )
    for n in range(128)
  ]
  print('| compute | weights | tokens | differing | log-prob, mean and max |')
  print('|---|---|---|---|---|')
  for dtype, weights in (
    ('float32', 'model'),
    ('bfloat16', 'model'),
    ('bfloat16', 'int8'),
  ):
    model = dataclasses.replace(models.TINY, dtype=dtype)
    together, few = (
      make_sampler(slots, model, weights=weights).generate(params, requests)
      for slots in (64, 3 * jax.device_count())
    )
    tokens, differing, log_probs = 0, 0, []
    for a, b in zip(together, few, strict=True):
      same = int(np.cumprod(a.ids == b.ids).sum())
      tokens, differing = tokens + len(a.ids), differing + len(a.ids) - same
      log_probs.append(np.abs(a.log_probs[:same] - b.log_probs[:same]))
    all_differences = np.concatenate(log_probs)
    print(
      f'| {dtype} | {weights} | {tokens:,} | {differing / tokens:.2%} '
      f'| {all_differences.mean():.1e}, {all_differences.max():.1e} |'
    )


def _plot(path: str, by_slots: dict, by_fill: dict) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=False)
  for axis, secs_by_size, title in (
    (axes[0], by_slots, f'slots (prompts of {_PROMPT} tokens)'),
    (axes[1], by_fill, 'tokens in the cache (16 slots)'),
  ):
    axis.plot(
      list(secs_by_size), [1e3 * x for x in secs_by_size.values()], 'o-'
    )
    axis.set(xlabel=title, ylabel='ms per decode step', ylim=(0, None))
    axis.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=120)


_MEASUREMENTS = {
  'schedules': schedules,
  'steps': steps,
  'shares': shares,
  'differences': differences,
}


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--what', choices=tuple(_MEASUREMENTS), default='schedules'
  )
  parser.add_argument('--slots', type=int, default=32)
  parser.add_argument('--envs', type=int, default=64)
  parser.add_argument('--workers', type=int, default=16)
  parser.add_argument('--groups', type=int, default=12)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--step_secs', type=float, default=0.1)
  parser.add_argument('--decode_tokens', type=int, default=8)
  parser.add_argument('--plot', help='path for the plot')
  options = parser.parse_args()
  _MEASUREMENTS[options.what](options)


if __name__ == '__main__':
  main()
