"""Benchmark conversations: the cache across turns against other loops.

    python benchmarks/conversation.py  # a small model, measured
    python benchmarks/conversation.py --what parked  # counts without a model
    python benchmarks/conversation.py --what simulated  # virtual time

Groups of episodes of 10 turns. The first prompt of a group is shared. A turn
adds a response and the observation that follows it, of random tokens and of
lengths that depend on the stream only, so all forms do the same turns. Forms:

history: a fresh prompt per turn of the task, the last two turns and the
observation, which is the default form of prompts.
whole: growing prompts, prefilled again in every turn, by the same programs.
chunks: the same with `rollout.prefill_chunk`.
prompts, all: the same with `rollout.reuse_cache`.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import device_costs
import jax
import models
import numpy as np
import simulate
import virtual_device

from gigpo_jax import mesh, sampler
from gigpo_jax.models import parameters

_TURNS = 10
_HISTORY = 2  # Earlier turns in a prompt of the form history.
_ACTION = 8  # Tokens of an action in such a prompt.
_MAX_RESPONSE = 64


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Tokens of a prompt.

  Attributes:
    first: tokens of the system message, the tools and the task.
    observation: mean tokens of an observation; uniform, half to three halves.
    response: mean tokens of a response, the same.
  """

  first: int
  observation: int
  response: int

  def draw(self, *stream: int) -> tuple[int, np.ndarray]:
    """Returns the tokens of a response, and the observation after it."""
    rng = np.random.default_rng(stream)
    response, observation = (
      int(rng.integers(mean // 2, mean + mean // 2 + 1))
      for mean in (self.response, self.observation)
    )
    return response, _ids(rng, observation)


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
  return rng.integers(2, models.TINY.vocab_size, count).astype(np.int32)


class Episode:
  """A conversation with random observations.

  Args:
    group: its task.
    member: its position in the group.
    lengths: tokens of its parts.
    grows: whether prompts are the conversation so far, instead of a history.

  Attributes:
    conversation: its id.
    turn: number of turns taken.
    completions: the responses.
  """

  def __init__(self, group: int, member: int, lengths: Lengths, grows: bool):
    self.conversation = (0, 0, group, member)
    self._lengths, self._grows = lengths, grows
    rng = np.random.default_rng(group)
    self._first = _ids(rng, lengths.first)
    self._last, self._parts, self.turn = _ids(rng, lengths.observation), [], 0
    self.completions: list[sampler.Completion] = []

  def request(self) -> sampler.Request:
    """Returns the request of the next turn."""
    parts = self._parts if self._grows else self._parts[-2 * _HISTORY :]
    response, self._next = self._lengths.draw(*self.conversation, self.turn)
    return sampler.Request(
      np.concatenate([self._first, *parts, self._last]),
      (*self.conversation, self.turn),
      max_tokens=response,
      conversation=self.conversation,
    )

  def reply(self, completion: sampler.Completion) -> bool:
    """Takes a turn; returns whether the episode continues."""
    ids = completion.ids if self._grows else completion.ids[-_ACTION:]
    self._parts += [self._last, ids]
    self._last = self._next
    self.completions.append(completion)
    self.turn += 1
    return self.turn < _TURNS


def play(
  engine: sampler.Sampler, params: dict, episodes: list[Episode]
) -> sampler.Stats:
  """Plays episodes to their end; environments reply at once."""
  engine.load(params)
  engine.take_stats()
  pending = {engine.submit(e.request()): e for e in episodes}
  while engine.busy:
    for request_id, completion in engine.step():
      episode = pending.pop(request_id)
      if episode.reply(completion):
        pending[engine.submit(episode.request())] = episode
      else:
        engine.end_conversation(episode.conversation)
  return engine.take_stats()


# Arguments of the sampler of each form.
FORMS = {
  'history': {},
  'whole': {},
  'chunks': {'prefill_chunk': 64},
  'prompts': {'reuse': 'prompts'},
  'all': {'reuse': 'all'},
}


def _episodes(
  form: str, groups: int, members: int, lengths: Lengths
) -> list[Episode]:
  return [
    Episode(group, member, lengths, form != 'history')
    for group in range(groups)
    for member in range(members)
  ]


def _longest(lengths: Lengths) -> int:
  """Returns the largest number of tokens of a prompt."""
  turn = 3 * (lengths.observation + lengths.response) // 2
  return lengths.first + _TURNS * turn


def measure(options: argparse.Namespace, lengths: Lengths) -> None:
  """Prints a table row per form, and how far their samples agree."""
  longest = _longest(lengths)
  engines = {
    form: sampler.Sampler(
      models.TINY,
      mesh.make_mesh(1, -1, 1),
      seed=0,
      prompt_buckets=(longest // 2, longest),
      batch_buckets=(options.slots,),
      max_completion_tokens=_MAX_RESPONSE,
      stop_ids=(),
      vocab_size=models.TINY.vocab_size,
      truncates=False,
      **kwargs,
    )
    for form, kwargs in FORMS.items()
  }
  params = parameters.init(models.TINY, jax.random.key(0))
  for engine in engines.values():
    engine.warm_up(params)
  secs = {form: [] for form in FORMS}
  stats, played = {}, {}
  for _ in range(options.rounds):
    for form, engine in engines.items():
      episodes = _episodes(form, options.groups, options.members, lengths)
      start = time.monotonic()
      stats[form] = play(engine, params, episodes)
      secs[form].append(time.monotonic() - start)
      played[form] = [c for e in episodes for c in e.completions]
  count = options.groups * options.members
  print(
    f'{count} episodes in groups of {options.members}, {_TURNS} turns, '
    f'{options.slots} slots, {lengths}. Medians of {options.rounds} rounds.\n'
  )
  _print_forms(secs, stats, count)
  _print_differences(played)


def _print_forms(
  secs: dict[str, list[float]], stats: dict[str, sampler.Stats], count: int
) -> None:
  print(
    '| form | prefilled tokens | reused tokens | `whole` / this '
    '| episodes/s (rounds) | this / history | this / whole |'
  )
  print('|---' * 7 + '|')
  speeds = {form: [count / s for s in rounds] for form, rounds in secs.items()}
  medians = {form: statistics.median(speeds[form]) for form in speeds}
  for form, counters in stats.items():
    ratio = stats['whole'].prefill_tokens / counters.prefill_tokens
    rounds = ', '.join(f'{speed:.2f}' for speed in speeds[form])
    print(
      f'| {form} | {counters.prefill_tokens:,} | {counters.reused_tokens:,} '
      f'| {ratio:.1f} | {medians[form]:.2f} ({rounds}) '
      f'| {medians[form] / medians["history"]:.2f} '
      f'| {medians[form] / medians["whole"]:.2f} |'
    )


def _print_differences(played: dict[str, list[sampler.Completion]]) -> None:
  print('\n| compared with chunks | equal responses | largest log-prob |')
  print('|---' * 3 + '|')
  for form in ('whole', 'prompts', 'all'):
    pairs = list(zip(played['chunks'], played[form], strict=True))
    same = [(a, b) for a, b in pairs if np.array_equal(a.ids, b.ids)]
    largest = max(np.abs(a.log_probs - b.log_probs).max() for a, b in same)
    print(f'| {form} | {len(same)} of {len(pairs)} | {largest:.1e} |')


def run_virtual(
  options: argparse.Namespace,
  lengths: Lengths,
  form: str,
  costs: virtual_device.Costs | None = None,
  **kwargs,
) -> tuple[sampler.Stats, float]:
  """Returns counters and seconds of a form in virtual time."""
  clock, longest = virtual_device.Clock(), _longest(lengths)
  with virtual_device.installed(clock, costs or virtual_device.Costs()):
    engine = virtual_device.make_sampler(
      prompt_buckets=(longest // 2, longest),
      batch_buckets=(options.slots,),
      max_completion_tokens=3 * lengths.response // 2,
      **(FORMS[form] | kwargs),
    )
    episodes = _episodes(form, options.groups, options.members, lengths)
    stats = play(engine, {}, episodes)
  clock.wait(clock.free)
  return stats, clock.now


def _print_setting(options: argparse.Namespace, lengths: Lengths) -> None:
  print(
    f'{options.groups * options.members} episodes in groups of '
    f'{options.members}, {_TURNS} turns, {options.slots} slots, {lengths}.\n'
  )


def count_parked(options: argparse.Namespace, lengths: Lengths) -> None:
  """Prints the prefilled tokens of more conversations than slots."""
  _print_setting(options, lengths)
  print('| parked slots | prefilled tokens | reused tokens |')
  print('|---' * 3 + '|')
  others = options.groups * options.members - options.slots
  cases = {'no reuse': ('chunks', 0)} | {
    str(parked): ('prompts', parked)
    for parked in (0, others, others + options.slots)
  }
  for name, (form, parked) in cases.items():
    stats, _ = run_virtual(options, lengths, form, parked=parked)
    print(f'| {name} | {stats.prefill_tokens:,} | {stats.reused_tokens:,} |')


def simulate_forms(options: argparse.Namespace, lengths: Lengths) -> None:
  """Prints the simulated episodes/s of the forms with 1.5B on an H100."""
  _print_setting(options, lengths)
  setting = simulate.SETTINGS['1.5b-h100']
  costs = simulate.make_costs(
    setting, device_costs.DEVICES[setting.device], simulate.Options(), 1
  )
  run = functools.partial(run_virtual, options, lengths, costs=costs)
  results = {form: run(form) for form in FORMS}
  for chunk in (128, 256):
    name = f'prompts, chunks of {chunk}'
    results[name] = run('prompts', prefill_chunk=chunk)
  print('| form | prefilled tokens | episodes/s | / history | / whole |')
  print('|---' * 5 + '|')
  for form, (stats, secs) in results.items():
    speed = options.groups * options.members / secs
    ratios = (results[name][1] / secs for name in ('history', 'whole'))
    cells = ' | '.join(f'{ratio:.2f}' for ratio in ratios)
    print(f'| {form} | {stats.prefill_tokens:,} | {speed:.2f} | {cells} |')


_MEASUREMENTS = {
  'forms': measure,
  'parked': count_parked,
  'simulated': simulate_forms,
}


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=tuple(_MEASUREMENTS), default='forms')
  for name, default in (
    ('slots', 16),
    ('groups', 4),
    ('members', 4),
    ('rounds', 3),
    ('first', 256),
    ('observation', 40),
    ('response', 40),
  ):
    parser.add_argument(f'--{name}', type=int, default=default)
  options = parser.parse_args()
  lengths = Lengths(options.first, options.observation, options.response)
  _MEASUREMENTS[options.what](options, lengths)


if __name__ == '__main__':
  main()
