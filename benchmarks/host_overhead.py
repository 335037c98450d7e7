"""Measure the host's time per step and turn with a device that answers at once.

    python benchmarks/host_overhead.py --slots 128 1024

Plays generated ALFWorld games of full size in worker processes with the paper's
prompts and a real tokenizer. The sampler is real, except for its compiled
programs: virtual ones answer at once, with responses of forced lengths. Actions
are drawn from the admissible ones. Prints CPU time of the main thread by part,
without the virtual programs, and below the table its share of a simulated step
of an H100.
"""

import argparse
import collections
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import device_costs
import forced
import jax
import jax.numpy as jnp
import numpy as np
import virtual_device

from envs import base
from gigpo_jax import env_pool, mesh, rollout, sampler, tokenizer
from gigpo_jax.models import kv_cache, parameters, published, qwen_config

_TOKENIZER = 'configs/warm_starts/alfworld_tiny'
_PROMPT_BUCKETS = (512, 1024, 2048)
_MAX_COMPLETION, _CHUNK = 512, 8
# A simulated step of an H100: its measured costs, and tokens of a response that
# are in the cache on average.
_H100 = pathlib.Path(__file__).parent / 'results/h100.json'
_RESPONSE = 40
# Parts, and the methods whose time they are.
_DEVICE = 'virtual device'


class Stopwatch:
  """CPU time of this thread by part; nested parts exclude each other."""

  def __init__(self):
    self.secs: dict[str, float] = collections.defaultdict(float)
    self._parts: list[str] = []
    self._last = time.thread_time()

  @contextlib.contextmanager
  def measure(self, part: str) -> Iterator[None]:
    """Adds the time of a block to a part, and not to the enclosing part."""
    self._switch()
    self._parts.append(part)
    try:
      yield
    finally:
      self._switch()
      self._parts.pop()

  def _switch(self) -> None:
    now = time.thread_time()
    if self._parts:
      self.secs[self._parts[-1]] += now - self._last
    self._last = now

  def wrap(self, part: str, function: Callable) -> Callable:
    """Returns a function whose time is added to a part."""

    def timed(*args, **kwargs) -> Any:
      with self.measure(part):
        return function(*args, **kwargs)

    return timed


class ActingPool(forced.Pool):
  """Environments that take random admissible actions."""

  def __init__(self, inner: env_pool.EnvPool, turns: Callable):
    super().__init__(inner, turns)
    self._rng = np.random.default_rng(0)
    self._actions: dict[int, tuple[str, ...]] = {}

  def receive(self, timeout_secs: float | None = None) -> list[tuple]:
    """Returns replies, and keeps their actions."""
    replies = super().receive(timeout_secs)
    for env, reply in replies:
      if isinstance(reply, base.StepResult):
        reply = reply.observation
      if isinstance(reply, base.Observation):
        self._actions[env] = reply.actions
    return replies

  def step(self, env: int, response: str, turn: Any = None) -> None:
    """Takes an action; the response was sampled by no model."""
    del turn
    action = self._rng.choice(self._actions[env])
    thought = response[:400].replace('<', ' ')
    self._inner.step(env, f'<think>{thought}</think><action>{action}</action>')


@dataclasses.dataclass(frozen=True)
class Measurement:
  """Times of a rollout.

  Attributes:
    secs: CPU seconds of the main thread by part.
    chunks: dispatched steps.
    turns: turns of all episodes.
    prompt_tokens: mean tokens of a prompt.
  """

  secs: dict[str, float]
  chunks: int
  turns: int
  prompt_tokens: float


def measure(slots: int, turns: int, workers: int, seed: int) -> Measurement:
  """Plays an episode of `turns` turns for each slot.

  Args:
    slots: slots, environments and episodes.
    turns: turns of an episode.
    workers: processes of environments.
    seed: first task.
  """
  watch = Stopwatch()
  lengths = forced.Lengths()
  text = tokenizer.Tokenizer(
    str(pathlib.Path(__file__).parents[1] / _TOKENIZER)
  )
  with (
    virtual_device.installed(
      virtual_device.Clock(), virtual_device.Costs(), transfers=True
    ),
    env_pool.EnvPool(
      'alfworld',
      {'engine': 'native', 'prompt_style': 'paper'},
      num_envs=slots,
      num_workers=workers,
      step_timeout_secs=120,
      reset_timeout_secs=600,
      envs_per_group=8,
    ) as pool,
  ):
    engine = virtual_device.make_sampler(
      prompt_buckets=_PROMPT_BUCKETS,
      batch_buckets=(slots,),
      max_completion_tokens=_MAX_COMPLETION,
      decode_tokens=_CHUNK,
    )
    runner = rollout.EpisodeRunner(
      ActingPool(pool, lambda task, member: turns),
      forced.Sampler(engine, lengths.response),
      text,
      _PROMPT_BUCKETS[-1],
      'truncate_left',
    )
    with _timed(watch), watch.measure('loop of episodes'):
      trajectories = runner.run(
        {},
        [base.Task('train', seed + n) for n in range(slots // 8)],
        episodes_per_group=8,
        stream=(rollout.TRAIN, 0),
        sampling=sampler.Sampling(),
      )
  failures = [t.failure for t in trajectories if t.failure]
  assert not failures, failures[0]
  steps = [step for t in trajectories for step in t.steps]
  return Measurement(
    dict(watch.secs),
    runner.stats.slot_steps // slots // _CHUNK,
    len(steps),
    float(np.mean([len(step.prompt_ids) for step in steps])),
  )


def dispatch_secs(repeats: int = 200) -> float:
  """Returns the CPU seconds to start a program with 1.5B's parameters.

  The program does nothing, but takes as many arrays as a decoding step.
  """
  model = published.SHAPES['Qwen2.5-1.5B']
  model = dataclasses.replace(
    model, **qwen_config.platform_fields(model, 'gpu')
  )

  def inputs() -> tuple:
    params = parameters.init(model, jax.random.key(0))
    params = parameters.unstack_layers(model, params)
    return params, kv_cache.new(model, 1, 1)

  params = jax.tree.map(lambda _: jnp.zeros(1), jax.eval_shape(inputs))
  program = jax.jit(lambda params, x: x + 1)
  x = program(params, jnp.zeros(1))
  start = time.thread_time()
  for _ in range(repeats):
    x = program(params, x)
  return (time.thread_time() - start) / repeats


@contextlib.contextmanager
def _timed(watch: Stopwatch) -> Iterator[None]:
  """Measures the parts of a rollout."""
  methods = [
    ('tokenize prompts', tokenizer.Tokenizer, 'fit'),
    ('decode responses', tokenizer.Tokenizer, 'decode'),
    ('sampler: submit', sampler.Sampler, 'submit'),
    ('sampler: step', sampler.Sampler, 'step'),
    ('transfers', mesh, 'place_rows'),
  ]
  methods += [
    ('messages to environments', ActingPool, name)
    for name in ('reset', 'step', 'receive')
  ]
  methods += [
    (_DEVICE, virtual_device.Programs, name)
    for name in ('new_slots', 'prefill', 'extend', 'take', 'put', 'decode')
  ]
  with contextlib.ExitStack() as stack:
    for part, owner, name in methods:
      function = watch.wrap(part, getattr(owner, name))
      # A function is a method of its class.
      stack.enter_context(mock.patch.object(owner, name, function))
    yield


def _print(results: dict[int, Sequence[Measurement]]) -> None:
  """Prints a column per number of slots; medians of the repeats."""
  parts = {
    part for runs in results.values() for run in runs for part in run.secs
  }
  print('| | ' + ' | '.join(f'{slots:,} slots' for slots in results) + ' |')
  print('|---' * (1 + len(results)) + '|')

  def row(name: str, value: Callable[[int, Measurement], float]) -> None:
    cells = [
      f'{np.median([value(slots, run) for run in runs]):.2f}'
      for slots, runs in results.items()
    ]
    print(f'| {name} | ' + ' | '.join(cells) + ' |')

  for part in sorted(parts - {_DEVICE}):
    row(
      f'{part}, ms per turn',
      lambda _, run, part=part: 1e3 * run.secs.get(part, 0.0) / run.turns,
    )
  start = dispatch_secs()
  row('all, ms per turn', lambda _, run: 1e3 * _host_secs(run) / run.turns)
  row('all, ms per step', lambda _, run: 1e3 * _host_secs(run) / run.chunks)
  row('start of a program, ms', lambda *_: 1e3 * start)
  row('prompt tokens', lambda _, run: run.prompt_tokens)
  row('turns per step', lambda _, run: run.turns / run.chunks)
  shares = [
    f'{1e3 * _device_secs(slots):.0f} ms with {slots:,} slots, host '
    f'{np.median([_host_share(slots, run) for run in runs]):.0%}'
    for slots, runs in results.items()
  ]
  print(f'\nSimulated steps of an H100 with 1.5B: {"; ".join(shares)}')


def _host_secs(run: Measurement) -> float:
  return sum(secs for part, secs in run.secs.items() if part != _DEVICE)


def _host_share(slots: int, run: Measurement) -> float:
  return _host_secs(run) / run.chunks / _device_secs(slots)


def _device_secs(slots: int) -> float:
  """Returns the simulated seconds of a step of an H100 with 1.5B."""
  secs = device_costs.decode_secs(
    device_costs.load(str(_H100)),
    published.SHAPES['Qwen2.5-1.5B'],
    rows=slots,
    positions=slots * (1024 + _RESPONSE),
  )
  return _CHUNK * secs


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--slots', type=int, nargs='+', default=[128, 1024])
  parser.add_argument('--turns', type=int, default=4)
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--repeats', type=int, default=3)
  flags = parser.parse_args()
  results = {
    slots: [
      measure(slots, flags.turns, flags.workers, seed=100 * n)
      for n in range(flags.repeats)
    ]
    for slots in flags.slots
  }
  _print(results)


if __name__ == '__main__':
  main()
