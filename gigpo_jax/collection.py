"""What an iteration trains on: episodes, and which of their groups.

Plays groups, drops those that teach nothing by their returns, and plays others
in their place, a bounded number of times. Counts what was spent on it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from gigpo_jax import tasks, trajectory

# Where in the stream of tasks refills begin: behind all iterations.
_REFILLS = 1 << 20


@dataclasses.dataclass
class Spent:
  """What a run's training episodes have cost so far, evaluations left out.

  Attributes:
    episodes: played for training, those that were dropped among them.
    env_steps: turns of these.
    tokens: sampled for these.
  """

  episodes: int = 0
  env_steps: int = 0
  tokens: int = 0

  def add(self, trajectories: Sequence[trajectory.Trajectory]) -> None:
    """Adds episodes."""
    steps = [step for t in trajectories for step in t.steps]
    self.episodes += len(trajectories)
    self.env_steps += len(steps)
    self.tokens += sum(len(step.completion_ids) for step in steps)

  def metrics(self) -> dict[str, float]:
    """Returns it, names 'spent/...'."""
    return {f'spent/{k}': float(v) for k, v in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Filter:
  """Which groups are trained on (dynamic sampling, DAPO, arXiv:2503.14476).

  Attributes:
    without_spread: whether groups whose episodes all got the same reward are
      dropped.
    warmup_iterations: iterations before any is.
    max_refills: how often as many groups again are played, at most, where too
      few are left.
  """

  without_spread: bool = False
  warmup_iterations: int = 0
  max_refills: int = 2

  def positions(self, iteration: int) -> list[int]:
    """Returns places in the stream of tasks that an iteration may take.

    The first is the iteration's own, so that runs with and without a filter
    begin with the same tasks.
    """
    refills = self.max_refills if self.without_spread else 0
    first = _REFILLS + iteration * refills
    return [iteration, *range(first, first + refills)]

  def active(self, iteration: int) -> bool:
    """Whether groups may be dropped."""
    return self.without_spread and iteration >= self.warmup_iterations


@dataclasses.dataclass(frozen=True)
class Collected:
  """The episodes of an iteration.

  Attributes:
    played: all of them, their groups numbered from 0 on.
    kept: those to train on, their groups numbered anew; none if the filter
      leaves no group.
    places: of each one in `kept`, its place in `played`.
    metrics: names 'filter/...'; empty without a filter.
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
  """Plays groups until there are enough to train on, or refills are used up.

  Args:
    play: takes tasks and a place in the stream; returns their episodes.
    stream: of tasks.
    chosen: which groups count.
    groups: how many are wanted; what is over is dropped.
    iteration: number of the iteration.
  """
  played, kept, whole, plays = [], [], [], 0
  for place in chosen.positions(iteration):
    found = play(stream.at(place), place)
    if not chosen.active(iteration):
      return Collected(found, found, list(range(len(found))), {})
    parts = [[] for _ in range(1 + max(t.group for t in found))]
    for t in found:
      parts[t.group].append(len(played))
      played.append(dataclasses.replace(t, group=len(whole) + t.group))
    whole, plays = whole + parts, plays + 1
    kept += [part for part in parts if spread([played[n] for n in part])]
    if len(kept) >= groups:
      break
  metrics = {
    'filter/refills': float(plays - 1),
    'filter/groups_kept': float(min(len(kept), groups)),
    'filter/groups_with_spread_share': len(kept) / len(whole),
  }
  kept = kept[:groups]
  numbered = [
    dataclasses.replace(played[n], group=number)
    for number, part in enumerate(kept)
    for n in part
  ]
  return Collected(
    played, numbered, [n for part in kept for n in part], metrics
  )


def spread(part: Sequence[trajectory.Trajectory]) -> bool:
  """Whether the episodes of a group differ in their reward."""
  rewards = [t.reward for t in part if not t.failure]
  return bool(rewards) and not math.isclose(min(rewards), max(rewards))


def horizon(schedule: Sequence[tuple[int, int]], iteration: int) -> int | None:
  """Returns the most turns of an iteration's episodes; None: as many as can be.

  Args:
    schedule: (iteration from which on, turns), rising; () is no limit.
    iteration: number of the iteration.
  """
  limits = [turns for start, turns in schedule if start <= iteration]
  return limits[-1] if limits else None
