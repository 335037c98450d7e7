"""Groups that grow by branches: episodes that share their first turns.

A group of N episodes starts with fewer, its roots. A branch repeats the first
turns of another episode of its group: their responses are replayed in the
environment, and none of their tokens is sampled again. From there on, the
policy plays with random numbers of its own, which are a function of the seed,
the iteration, the task, the member, the turn and the token, as in any episode.

The roots run to their end. Then branches start in rounds:

1. The algorithm orders the turns of the episodes of the last round. The order
   is a function of an episode and of one uniform random number per turn.
2. Each group branches before the first of these turns, until it has N episodes:
   once before each, or as often as the algorithm says. Ties go to earlier
   members.
3. A group without a turn to branch at gets further roots.

The order of the turns, not time or scheduling, decides which episodes branch. A
branch is a member of its group like any other. Its first turns share responses
with its parent (`Rows.responses`). Each response is trained on once, with the
mean advantage of the episodes that contain it (`merge`).

Cost: `spent/env_steps` has all steps of branches, because the environment
executes the replayed ones too, as for `continuations`; `spent/tokens` has the
new tokens only.

Input and output: trajectories and rows. This module does not use devices.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import ml_collections
import numpy as np
from jaxtyping import Float

from gigpo_jax import batch, rollout, row_stats, selectors, trajectory

# Component of the seed of the random numbers of turns.
_DRAWS = 0xB4A2C4


class Rule(Protocol):
  """The part of an algorithm that decides where episodes branch.

  Attributes:
    root_share: share of a group's episodes that are roots.

  With an attribute `branches_per_turn`, each chosen turn has that many branches
  instead of one.
  """

  root_share: float

  def branch_order(
    self, episode: trajectory.Trajectory, draws: Float[np.ndarray, ' T']
  ) -> Float[np.ndarray, ' T']:
    """Returns the rank of each turn, lowest first; inf: no branch.

    A branch at turn t repeats the turns before t, so turn 0 has none.

    Args:
      episode: an episode that is over, with T turns.
      draws: uniform random numbers in [0, 1).
    """


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option that excludes replayed episodes."""
  if config.rollout.carry_over > 0:
    yield (
      f'rollout.carry_over={config.rollout.carry_over}: '
      f'{config.algorithm.name} needs episodes of a single policy; must be 0'
    )
  if config.reward.functions:
    yield (
      f'reward.functions={tuple(config.reward.functions)}: '
      f'{config.algorithm.name} replays the rewards of the environment; must '
      'be ()'
    )


def random_order(
  episode: trajectory.Trajectory, draws: Float[np.ndarray, ' T']
) -> Float[np.ndarray, ' T']:
  """Returns a `branch_order` in which all turns with a branch are equal.

  The order is a turn's rank among those of the episode, plus its number, so
  every episode of a round gets a branch before any gets the next one.

  Args:
    episode: an episode that is over, with T turns.
    draws: uniform random numbers in [0, 1).
  """
  order = np.full(len(draws), np.inf)
  own = draws[episode.num_repeated + 1 :]
  order[episode.num_repeated + 1 :] = np.argsort(np.argsort(own)) + own
  return order


def grow(
  roots: Sequence[trajectory.Trajectory],
  rule: Rule,
  like: rollout.EpisodeBatch,
  *,
  members: int,
  seed: int,
  play: Callable[[rollout.EpisodeBatch], list[trajectory.Trajectory]],
) -> list[trajectory.Trajectory]:
  """Returns groups with their branches, ordered by group and member.

  Args:
    roots: the episodes with which the groups start, by group and member.
    rule: where episodes branch.
    like: the batch in which the roots were played.
    members: N, the episodes of a group.
    seed: seed of the run.
    play: plays the episodes of a batch, in the order of `paused`.
  """
  episodes, newest = list(roots), list(roots)
  position = like.stream[1]
  while starts := next_starts(
    episodes, newest, rule, members=members, seed=(seed, position)
  ):
    newest = play(dataclasses.replace(like, tasks=(), paused=starts))
    episodes += newest
  return sorted(episodes, key=lambda e: (e.group, e.member))


def next_starts(
  episodes: Sequence[trajectory.Trajectory],
  newest: Sequence[trajectory.Trajectory],
  rule: Rule,
  *,
  members: int,
  seed: tuple[int, int],
) -> list[trajectory.Trajectory]:
  """Returns the episodes of the next round, paused where they start.

  Args:
    episodes: all episodes so far.
    newest: those of the last round.
    rule: where episodes branch.
    members: N, the episodes of a group.
    seed: seed of the run, and position in the stream of tasks.
  """
  sizes: dict[int, int] = {}
  for episode in episodes:
    sizes[episode.group] = sizes.get(episode.group, 0) + 1
  first = {episode.group: episode for episode in reversed(episodes)}
  turns: dict[int, list[tuple]] = {group: [] for group in sizes}
  for episode in newest:
    turns[episode.group] += _ordered_turns(episode, rule, seed)
  starts, count = [], getattr(rule, 'branches_per_turn', 1)
  for group, size in sizes.items():
    chosen = sorted(turns[group], key=lambda turn: turn[:3])
    parents = [(parent, t) for *_, t, parent in chosen for _ in range(count)]
    parents = parents[: members - size]
    # Without a turn to branch at, the rest of the group are roots.
    parents = parents or [(first[group], 0)] * (members - size)
    starts += [
      _pause(parent, t, size + n) for n, (parent, t) in enumerate(parents)
    ]
  return starts


def _ordered_turns(
  episode: trajectory.Trajectory, rule: Rule, seed: tuple[int, int]
) -> list[tuple]:
  """Returns (order, member, turn, episode) of turns with a branch.

  An episode has no branch if its environment failed, and none at the turns that
  it repeats or at the first one of its own.
  """
  if episode.failure:
    return []
  keys = *seed, _DRAWS, episode.task.index, episode.member
  rng = np.random.Generator(np.random.Philox(list(keys)))
  order = rule.branch_order(episode, rng.random(len(episode.steps)))
  return [
    (float(order[t]), episode.member, t, episode)
    for t in range(episode.num_repeated + 1, len(episode.steps))
    if np.isfinite(order[t])
  ]


def _pause(
  parent: trajectory.Trajectory, t: int, member: int
) -> trajectory.Trajectory:
  """Returns a new member that repeats the first t turns of an episode."""
  return dataclasses.replace(
    parent,
    member=member,
    steps=parent.steps[:t],
    failure='',
    is_paused=True,
    parent=parent.member if t else None,
    num_repeated=t,
  )


def merge(
  advantages: Float[np.ndarray, ' R'] | Float[np.ndarray, 'R C'],
  rows: batch.Rows,
) -> Float[np.ndarray, ' R'] | Float[np.ndarray, 'R C']:
  """Returns the mean advantage over the rows with the same response.

  Args:
    advantages: advantages of all rows, 0 for padding.
    rows: rows of whole episodes.
  """
  real = rows.real
  _, index = np.unique(rows.responses[real], return_inverse=True)
  sums = np.zeros((len(index), *advantages.shape[1:]))
  np.add.at(sums, index, advantages[real].astype(np.float64))
  counts = np.bincount(index)[index]
  merged = np.zeros_like(advantages)
  merged[real] = sums[index] / row_stats.like(counts, advantages)
  return merged


def drop_repeated(rows: batch.Rows) -> batch.Rows:
  """Returns rows in which each response occurs once; others are padding."""
  repeated = rows.repeated
  return selectors.keep(rows, ~repeated) if repeated.any() else rows


def metrics(episodes: Sequence[trajectory.Trajectory]) -> dict[str, float]:
  """Returns metrics of the episodes of an iteration, 'branching/...'."""
  repeated = np.array([e.num_repeated for e in episodes])
  branches = repeated[repeated > 0]
  values = {
    'branches_share': np.mean(repeated > 0),
    'turn_mean': branches.mean() if len(branches) else 0.0,
    'repeated_steps': repeated.sum(),
    'new_steps': sum(len(e.steps) for e in episodes) - repeated.sum(),
  }
  return {f'branching/{name}': float(x) for name, x in values.items()}
