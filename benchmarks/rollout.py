"""The rollout engine: asynchronous against lockstep, and what a step costs.

    python benchmarks/rollout.py                     # both schedules
    python benchmarks/rollout.py --what steps --plot steps.png

A random model of 4.2M parameters (4 layers of width 256, 4,096 tokens), on
whatever devices there are. Schedules: prompts of 96 to 128 tokens; responses
of 1 to 256 tokens, exponentially distributed with a mean of a quarter of the
maximum; environments in worker processes that sleep, a lognormal time with a
deviation of 1. Everything is a function of the request, so that both schedules
do the same work, token for token; medians over alternating rounds.
"""

import argparse
import statistics
import time
import zlib

import jax
import numpy as np

from envs import base
from gigpo_jax import env_pool, mesh, rollout, sampler
from gigpo_jax.models import qwen

MODEL = qwen.QwenConfig(
  vocab_size=4096,
  hidden_size=256,
  intermediate_size=1024,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  dtype='float32',
  remat=False,
)
_MOST = 256  # tokens of a response
_PROMPT = 128
_MEMBERS = 8
_STEPS = 6  # of an episode


def make_sampler(slots: int, decode_tokens: int) -> sampler.Sampler:
  """Returns a sampler of the model with one batch and one prompt bucket."""
  return sampler.Sampler(
    MODEL,
    mesh.make_mesh(1, -1, 1),
    seed=0,
    prompt_buckets=(_PROMPT,),
    batch_buckets=(slots,),
    max_completion_tokens=_MOST,
    stop_ids=(),
    vocab_size=MODEL.vocab_size,
    decode_tokens=decode_tokens,
  )


class Spread:
  """A sampler whose responses have the lengths of the workload."""

  def __init__(self, inner: sampler.Sampler):
    self._inner = inner

  def __getattr__(self, name: str):
    return getattr(self._inner, name)

  def submit(self, request: sampler.Request) -> int:
    """Submits it with a limit that is a function of its stream."""
    drawn = np.random.default_rng(request.stream).exponential(_MOST / 4)
    limit = int(np.clip(drawn, 1, _MOST))
    return self._inner.submit(
      sampler.Request(request.prompt_ids, request.stream, max_tokens=limit)
    )


class Numbers:
  """A tokenizer without text: prompts to as many ids as they would have."""

  def fit(self, prompts, short_prompts, *, max_tokens, policy):
    """Returns ids that are a function of the prompt."""
    del short_prompts, policy
    found = []
    for prompt in prompts:
      rng = np.random.default_rng(zlib.crc32(prompt.encode()))
      size = rng.integers(96, max_tokens + 1)
      ids = rng.integers(2, MODEL.vocab_size, size).astype(np.int32)
      found.append((ids, False))
    return found

  def decode(self, ids):
    """Returns a text that differs where the ids do."""
    return [str(zlib.crc32(row.tobytes())) for row in ids]


def schedules(options: argparse.Namespace) -> None:
  """Prints a table row for each schedule, and their ratio."""
  engine = make_sampler(options.slots, options.decode_tokens)
  params = qwen.init(MODEL, jax.random.key(0))
  engine.warm_up(params)
  compiled = engine.compilations
  tasks = [base.Task('train', n) for n in range(options.groups)]
  taken: dict[str, list[float]] = {name: [] for name in rollout.SCHEDULES}
  told: dict[str, dict] = {}
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
        roller = rollout.Roller(
          pool, Spread(engine), Numbers(), _PROMPT, 'error', name
        )
        begin = time.monotonic()
        found = roller.collect(
          params,
          tasks,
          episodes_per_group=_MEMBERS,
          stream=(rollout.TRAIN, 0),
          sampling=sampler.Sampling(),
          kind=str,
        )
        taken[name].append(len(found) / (time.monotonic() - begin))
        told[name] = roller.metrics() | {
          'stats': roller.stats,
          'clock': roller.clock,
        }
        tokens[name] = [s.completion_ids for t in found for s in t.steps]
  print(
    f'{len(found)} episodes of {_STEPS} steps, {options.slots} slots, '
    f'{options.envs} environments, steps of {options.step_secs:g} s on average'
  )
  print('| schedule | episodes/s | tokens/s | slots used | waiting for envs |')
  print('|---|---|---|---|---|')
  for name in rollout.SCHEDULES:
    print(
      f'| {name} | {statistics.median(taken[name]):.2f} '
      f'| {told[name]["rollout/decode_tokens_per_sec"]:,.0f} '
      f'| {told[name]["rollout/slot_occupancy"]:.0%} '
      f'| {told[name]["rollout/env_wait_share"]:.0%} |'
    )
  import pprint

  for n in told:
    told[n]['stats'].spans = []
    pprint.pprint(told[n])
  one, other = (statistics.median(taken[name]) for name in rollout.SCHEDULES)
  pairs = list(zip(*tokens.values(), strict=True))
  same = sum(np.array_equal(a, b) for a, b in pairs)
  print(
    f'async / lockstep: {one / other:.2f}; equal responses: {same} of '
    f'{len(pairs)}; compiled after the warm-up: '
    f'{engine.compilations - compiled}'
  )


def steps(options: argparse.Namespace) -> None:
  """Prints and plots what decoding a token costs."""
  params = qwen.init(MODEL, jax.random.key(0))
  by_slots, by_fill = {}, {}
  for slots in (8, 16, 32, 64, 128):
    by_slots[slots] = _step_ms(make_sampler(slots, 8), params, slots)
  for fill in (128, 256, 512, 1024, 2048):
    engine = sampler.Sampler(
      MODEL,
      mesh.make_mesh(1, -1, 1),
      seed=0,
      prompt_buckets=(128, 256, 512, 1024, 2048),
      batch_buckets=(16,),
      max_completion_tokens=_MOST,
      stop_ids=(),
      vocab_size=MODEL.vocab_size,
    )
    by_fill[fill] = _step_ms(engine, params, 16, fill)
  for name, found in (('slots', by_slots), ('prompt tokens', by_fill)):
    print(f'| {name} | ms a step |\n|---|---|')
    for size, value in found.items():
      print(f'| {size} | {value:.2f} |')
  if options.plot:
    _plot(options.plot, by_slots, by_fill)


def _step_ms(engine, params, slots: int, prompt: int = _PROMPT) -> float:
  """Returns the median time of a decoding step with all slots taken."""
  rng = np.random.default_rng(0)

  def seconds(limit: int) -> float:
    requests = [
      sampler.Request(
        rng.integers(2, MODEL.vocab_size, prompt).astype(np.int32),
        (0, 0, 0, n, 0),
        max_tokens=limit,
      )
      for n in range(slots)
    ]
    begin = time.perf_counter()
    engine.generate(params, requests)
    return time.perf_counter() - begin

  seconds(16)
  short, long = 8, 72
  differences = [seconds(long) - seconds(short) for _ in range(5)]
  return 1e3 * statistics.median(differences) / (long - short)


def _plot(path: str, by_slots: dict, by_fill: dict) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=False)
  for axis, found, title in (
    (axes[0], by_slots, f'slots (prompts of {_PROMPT} tokens)'),
    (axes[1], by_fill, 'tokens in the cache (16 slots)'),
  ):
    axis.plot(list(found), list(found.values()), 'o-')
    axis.set(xlabel=title, ylabel='ms a decoding step', ylim=(0, None))
    axis.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=120)


_WHAT = {'schedules': schedules, 'steps': steps}


def main() -> None:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--what', choices=('schedules', 'steps'), default='schedules'
  )
  parser.add_argument('--slots', type=int, default=32)
  parser.add_argument('--envs', type=int, default=64)
  parser.add_argument('--workers', type=int, default=16)
  parser.add_argument('--groups', type=int, default=12)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--step_secs', type=float, default=0.1)
  parser.add_argument('--decode_tokens', type=int, default=8)
  parser.add_argument('--plot', help='picture to write')
  options = parser.parse_args()
  _WHAT[options.what](options)


if __name__ == '__main__':
  main()
