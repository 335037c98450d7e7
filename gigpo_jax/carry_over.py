"""Groups that continue in the next iteration: `rollout.carry_over`.

An iteration waits for its longest episodes. With `carry_over` of c turns, it
runs each episode for at most c turns. Unfinished episodes pause and continue in
the next iteration, with its policy. The rule depends on counts of turns only,
never on time or scheduling:

1. An iteration starts G new groups, minus the complete groups that wait.
2. A group is complete when all of its episodes are over.
3. The iteration trains on the G oldest complete groups. Fewer than G / 2 wait
   for the next iteration, which adds others.
4. A group that was carried `max_staleness` times runs to its end and is trained
   on, however few groups there are.

At most G groups start in an iteration, and the oldest are trained on first, so
no turn is older than `max_staleness` iterations when it is trained on. The
first iterations have few complete groups. Groups that wait after the last
iteration are dropped.

Input and output: groups of trajectories. This module does not use devices.
"""

import base64
import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from envs import base, messages
from gigpo_jax import options, trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class WaitingGroup:
  """A group that waits for the next iteration.

  Attributes:
    iteration: iteration in which the group started.
    episodes: its episodes by member. Those that are over wait for the others.
  """

  iteration: int
  episodes: tuple[trajectory.Trajectory, ...]

  @property
  def paused(self) -> list[trajectory.Trajectory]:
    """The episodes that continue in the next iteration."""
    return [t for t in self.episodes if t.is_paused]

  def continued(
    self, played: Iterable[trajectory.Trajectory]
  ) -> 'WaitingGroup':
    """Returns the group after an iteration.

    The turns of earlier iterations are one iteration older.

    Args:
      played: yields, for each of `paused` in order, the continued episode.
    """
    played = iter(played)
    return dataclasses.replace(
      self,
      episodes=tuple(
        _aged(next(played) if t.is_paused else t, len(t.steps))
        for t in self.episodes
      ),
    )


def _aged(episode: trajectory.Trajectory, count: int) -> trajectory.Trajectory:
  """Returns an episode whose first `count` turns are an iteration older."""
  aged = tuple(
    dataclasses.replace(step, age=step.age + 1)
    for step in episode.steps[:count]
  )
  return dataclasses.replace(episode, steps=aged + episode.steps[count:])


@dataclasses.dataclass(frozen=True)
class CarryOver:
  """The rule of this module; options of `config.rollout`.

  Attributes:
    carry_over: c, the turns of an episode in an iteration; 0: all, so that no
      group waits.
    max_staleness: largest number of iterations between sampling a turn and
      training on it.
  """

  carry_over: int = options.number(0, low=0, note='0 is off')
  max_staleness: int = options.number(4, low=1)

  def __post_init__(self):
    options.check(self)

  def turns(self, age: int) -> int | None:
    """Returns the turns of an episode in this iteration; None: all.

    Args:
      age: iterations since its group started.
    """
    is_limited = self.carry_over and age < self.max_staleness
    return self.carry_over if is_limited else None

  def num_new(self, waiting: Sequence[WaitingGroup], groups: int) -> int:
    """Returns how many groups start in the next iteration.

    Args:
      waiting: the groups that wait, after an iteration.
      groups: G.
    """
    return max(0, groups - sum(not group.paused for group in waiting))

  def select(
    self, played: Sequence[WaitingGroup], groups: int, iteration: int
  ) -> tuple[list[WaitingGroup], tuple[WaitingGroup, ...]]:
    """Returns the groups to train on, and those that wait.

    Args:
      played: all groups, oldest first.
      groups: G.
      iteration: index of the iteration.
    """
    complete = [n for n, group in enumerate(played) if not group.paused]
    is_due = any(
      iteration - played[n].iteration >= self.max_staleness for n in complete
    )
    enough = 2 * len(complete) >= groups or is_due
    chosen = complete[:groups] if enough else []
    waiting = [group for n, group in enumerate(played) if n not in chosen]
    return [played[n] for n in chosen], tuple(waiting)

  def metrics(
    self,
    trained: Sequence[trajectory.Trajectory],
    waiting: Sequence[WaitingGroup],
  ) -> dict[str, float]:
    """Returns metrics named 'carry/...'; none if `carry_over` is off.

    Args:
      trained: the episodes to train on.
      waiting: the groups that wait.
    """
    if not self.carry_over:
      return {}
    steps = [step for t in trained if not t.failure for step in t.steps]
    ages = np.array([step.age for step in steps] or [0])
    return {
      'carry/waiting_groups': float(len(waiting)),
      'carry/paused_episodes': float(sum(len(g.paused) for g in waiting)),
      'carry/staleness_mean': float(ages.mean()),
      'carry/staleness_max': float(ages.max()),
      'carry/stale_share': float((ages > 0).mean()),
    }


def paused_episodes(
  waiting: Sequence[WaitingGroup],
) -> dict[int, list[trajectory.Trajectory]]:
  """Returns the episodes that continue, by the iteration of their start.

  Args:
    waiting: groups, oldest first.
  """
  episodes: dict[int, list[trajectory.Trajectory]] = {}
  for group in waiting:
    if group.paused:
      episodes.setdefault(group.iteration, []).extend(group.paused)
  return episodes


def merge(
  waiting: Sequence[WaitingGroup],
  played: Sequence[Sequence[trajectory.Trajectory]],
  iteration: int,
) -> list[WaitingGroup]:
  """Returns all groups after an iteration, oldest first.

  Args:
    waiting: the groups of earlier iterations.
    played: the trajectories of each value of `paused_episodes(waiting)`, then
      those of the groups that started in the iteration.
    iteration: index of the iteration.
  """
  *continued, new = played
  episodes = itertools.chain.from_iterable(continued)
  groups = [group.continued(episodes) for group in waiting]
  for _, members in itertools.groupby(new, key=lambda t: t.group):
    groups.append(WaitingGroup(iteration, tuple(members)))
  return groups


def assign_group_indices(
  groups: Sequence[WaitingGroup],
) -> list[trajectory.Trajectory]:
  """Returns the episodes of complete groups, with indices of groups from 0."""
  return [
    dataclasses.replace(episode, group=index)
    for index, group in enumerate(groups)
    for episode in group.episodes
  ]


def without_long_turns(
  groups: Sequence[WaitingGroup],
  *,
  max_prompt_tokens: int,
  max_completion_tokens: int,
) -> tuple[WaitingGroup, ...]:
  """Returns the groups whose turns fit into rows.

  Others were played with larger limits, before a resumed run changed these.

  Args:
    groups: the groups.
    max_prompt_tokens: limit of a prompt.
    max_completion_tokens: limit of a completion.
  """

  def fits(step: trajectory.Step) -> bool:
    return (
      len(step.prompt_ids) <= max_prompt_tokens
      and len(step.completion_ids) <= max_completion_tokens
    )

  return tuple(
    group
    for group in groups
    if all(fits(step) for t in group.episodes for step in t.steps)
  )


def encode(groups: Sequence[WaitingGroup]) -> str:
  """Returns groups as compressed text for a checkpoint."""
  text = json.dumps([_plain(group) for group in groups])
  return base64.b64encode(zlib.compress(text.encode())).decode()


def decode(text: str) -> tuple[WaitingGroup, ...]:
  """Returns the groups that `encode` wrote.

  Raises:
    ValueError, KeyError or TypeError: if the text is damaged.
  """
  try:
    data = zlib.decompress(base64.b64decode(text, validate=True))
  except zlib.error as error:
    raise ValueError(f'waiting groups: {error}') from error
  return tuple(
    WaitingGroup(
      int(group['iteration']), tuple(map(_episode, group['episodes']))
    )
    for group in json.loads(data)
  )


def _plain(value: Any) -> Any:
  """Returns a tree of dataclasses and arrays as plain values."""
  if dataclasses.is_dataclass(value):
    fields = [field.name for field in dataclasses.fields(value)]
    return {name: _plain(getattr(value, name)) for name in fields}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  if isinstance(value, np.ndarray):
    data = base64.b64encode(value.tobytes()).decode()
    return {'dtype': value.dtype.str, 'data': data}
  return value.item() if isinstance(value, np.generic) else value


def _episode(plain: dict[str, Any]) -> trajectory.Trajectory:
  first = plain['first_observation']
  return trajectory.Trajectory(
    **plain
    | {
      'task': base.Task(**plain['task']),
      'steps': tuple(map(_step, plain['steps'])),
      'first_observation': first and messages.make_observation(first),
    }
  )


def _step(plain: dict[str, Any]) -> trajectory.Step:
  arrays = {
    name: np.frombuffer(
      base64.b64decode(plain[name]['data']), plain[name]['dtype']
    )
    for name in ('prompt_ids', 'completion_ids', 'log_probs')
  }
  result = dict(plain['result'])
  if result['observation'] is not None:
    result['observation'] = messages.make_observation(result['observation'])
  return trajectory.Step(
    **plain | arrays | {'result': base.StepResult(**result)}
  )
