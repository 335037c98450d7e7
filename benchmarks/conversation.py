"""Benchmark conversations: the cache across turns against other loops.

    python benchmarks/conversation.py                # a small model, measured
    python benchmarks/conversation.py --what parked  # counts without a model

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
import statistics
import time

import jax
import models
import numpy as np
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


def count_parked(options: argparse.Namespace, lengths: Lengths) -> None:
  """Prints the prefilled tokens of more conversations than slots."""
  count, slots = options.groups * options.members, options.slots
  print(
    f'{count} episodes in groups of {options.members}, {_TURNS} turns, '
    f'{slots} slots, {lengths}. Scheduling without a model.\n'
  )
  print('| parked slots | prefilled tokens | reused tokens |')
  print('|---' * 3 + '|')
  for parked in (None, 0, count - slots, count):
    reuse = {'reuse': 'prompts', 'parked': parked}
    with virtual_device.installed(
      virtual_device.Clock(), virtual_device.Costs()
    ):
      engine = virtual_device.make_sampler(
        prompt_buckets=(_longest(lengths),),
        batch_buckets=(slots,),
        max_completion_tokens=_MAX_RESPONSE,
        **({} if parked is None else reuse),
      )
    episodes = _episodes('all', options.groups, options.members, lengths)
    stats = play(engine, {}, episodes)
    name = 'no reuse' if parked is None else parked
    print(f'| {name} | {stats.prefill_tokens:,} | {stats.reused_tokens:,} |')


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=('forms', 'parked'), default='forms')
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
  {'forms': measure, 'parked': count_parked}[options.what](options, lengths)


if __name__ == '__main__':
  main()
