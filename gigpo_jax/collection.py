"""Collection of the episodes of an iteration, with filtering of groups.

Runs groups of episodes, optionally drops groups whose episodes all got the
same reward, and replaces them by further groups, a bounded number of times.
Counts the episodes, steps and tokens that were used.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from gigpo_jax import tasks, trajectory

# Position in the stream of tasks where refills start, beyond all iterations.
_FIRST_REFILL = 1 << 20


@dataclasses.dataclass
class Spent:
  """Total cost of a run's training episodes; evaluations are not included.

  Attributes:
    episodes: number of training episodes, including dropped ones.
    env_steps: number of their turns.
    tokens: number of tokens sampled for them.
  """

  episodes: int = 0
  env_steps: int = 0
  tokens: int = 0

  def add(self, trajectories: Sequence[trajectory.Trajectory]) -> None:
    """Adds the cost of these episodes."""
    steps = [step for t in trajectories for step in t.steps]
    self.episodes += len(trajectories)
    self.env_steps += len(steps)
    self.tokens += sum(len(step.completion_ids) for step in steps)

  def metrics(self) -> dict[str, float]:
    """Returns the counts as metrics named 'spent/...'."""
    return {f'spent/{k}': float(v) for k, v in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Filter:
  """Selects groups to train on (dynamic sampling, DAPO, arXiv:2503.14476).

  Attributes:
    without_spread: whether to drop zero-variance groups: all of their episodes
      got the same reward.
    warmup_iterations: number of first iterations in which no group is dropped.
    max_refills: maximum number of further batches of G groups per iteration,
      run while fewer than G groups are kept.
  """

  without_spread: bool = False
  warmup_iterations: int = 0
  max_refills: int = 2

  def positions(self, iteration: int) -> list[int]:
    """Returns the positions in the stream of tasks that an iteration may use.

    The first position is the iteration itself, so runs with and without a
    filter start with the same tasks.
    """
    refills = self.max_refills if self.without_spread else 0
    first = _FIRST_REFILL + iteration * refills
    return [iteration, *range(first, first + refills)]

  def active(self, iteration: int) -> bool:
    """Whether groups may be dropped."""
    return self.without_spread and iteration >= self.warmup_iterations


@dataclasses.dataclass(frozen=True)
class Collected:
  """The episodes of an iteration.

  Attributes:
    played: all episodes; group indices start at 0.
    kept: the episodes to train on, with new group indices; empty if the filter
      drops every group.
    places: for each episode of `kept`, its index in `played`.
    metrics: metrics named 'filter/...'; empty without a filter.
  """

  played: list[trajectory.Trajectory]
  kept: list[trajectory.Trajectory]
  places: list[int]
  metrics: dict[str, float]


def collect(
  play: Callable[[list, int], list[trajectory.Trajectory]],
  stream: tasks.TaskSampler,
  chosen: Filter,
  *,
  groups: int,
  iteration: int,
) -> Collected:
  """Runs groups until enough are kept or all refills are used.

  Args:
    play: runs the tasks at a position of the stream; returns their episodes.
    stream: the stream of tasks.
    chosen: selects the groups to keep.
    groups: G, the number of groups to keep; any excess is dropped.
    iteration: index of the iteration.
  """
  played, kept, all_groups, num_batches = [], [], [], 0
  for position in chosen.positions(iteration):
    episodes = play(stream.at(position), position)
    if not chosen.active(iteration):
      return Collected(episodes, episodes, list(range(len(episodes))), {})
    new_groups = [[] for _ in range(1 + max(t.group for t in episodes))]
    for t in episodes:
      new_groups[t.group].append(len(played))
      played.append(dataclasses.replace(t, group=len(all_groups) + t.group))
    all_groups, num_batches = all_groups + new_groups, num_batches + 1
    kept += [
      indices for indices in new_groups if spread([played[n] for n in indices])
    ]
    if len(kept) >= groups:
      break
  metrics = {
    'filter/refills': float(num_batches - 1),
    'filter/groups_kept': float(min(len(kept), groups)),
    'filter/groups_with_spread_share': len(kept) / len(all_groups),
  }
  kept = kept[:groups]
  renumbered = [
    dataclasses.replace(played[n], group=group)
    for group, indices in enumerate(kept)
    for n in indices
  ]
  return Collected(
    played,
    renumbered,
    [n for indices in kept for n in indices],
    metrics,
  )


def spread(part: Sequence[trajectory.Trajectory]) -> bool:
  """Returns whether the episodes of a group have different rewards.

  Episodes whose environment failed do not count.
  """
  rewards = [t.reward for t in part if not t.failure]
  return bool(rewards) and not math.isclose(min(rewards), max(rewards))


def horizon(schedule: Sequence[tuple[int, int]], iteration: int) -> int | None:
  """Returns an iteration's limit of turns per episode; None for no limit.

  Args:
    schedule: (first iteration, limit of turns), by increasing iteration; () is
      no limit.
    iteration: index of the iteration.
  """
  limits = [turns for start, turns in schedule if start <= iteration]
  return limits[-1] if limits else None
