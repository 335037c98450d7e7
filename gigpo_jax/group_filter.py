"""Collection of the episodes of an iteration, with filtering of groups.

Runs groups of episodes, optionally drops groups whose episodes all got the
same reward, and replaces them by further groups, a bounded number of times.
Counts the episodes, steps and tokens that were used.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from gigpo_jax import carry_over, options, tasks, trajectory

# Position in the stream of tasks where refills start, beyond all iterations.
_FIRST_REFILL = 1 << 20


@dataclasses.dataclass(frozen=True)
class SampleCounts:
  """Total cost of a run's training episodes; evaluations are not included.

  Attributes:
    episodes: number of training episodes, including dropped ones.
    env_steps: number of their turns, and of those of `continuations`,
      including replayed ones.
    tokens: number of tokens sampled for them.
  """

  episodes: int = 0
  env_steps: int = 0
  tokens: int = 0

  @classmethod
  def of(cls, trajectories: Sequence[trajectory.Trajectory]) -> 'SampleCounts':
    """Returns the cost of episodes."""
    sampled = [step for t in trajectories for step in t.steps[t.num_repeated :]]
    return cls(
      len(trajectories),
      sum(len(t.steps) for t in trajectories),
      sum(len(step.completion_ids) for step in sampled),
    )

  def __add__(self, other: 'SampleCounts') -> 'SampleCounts':
    """Returns the sum of two costs."""
    return SampleCounts(
      self.episodes + other.episodes,
      self.env_steps + other.env_steps,
      self.tokens + other.tokens,
    )

  def metrics(self) -> dict[str, float]:
    """Returns the counts as metrics named 'spent/...'."""
    return {f'spent/{k}': float(v) for k, v in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class GroupFilter:
  """Selects groups to train on (dynamic sampling, DAPO, arXiv:2503.14476).

  Attributes:
    drop_zero_variance: whether to drop groups whose episodes all got the same
      reward.
    warmup_iterations: number of first iterations in which no group is dropped.
    max_refills: maximum number of further batches of G groups per iteration,
      run while fewer than G groups are kept.
  """

  drop_zero_variance: bool = False
  warmup_iterations: int = options.number(0, low=0)
  max_refills: int = options.number(2, low=0)

  def __post_init__(self):
    options.check(self)

  def refills(self, iteration: int) -> range:
    """Returns the positions of an iteration's refills in the stream of tasks.

    Groups start at the position of the iteration, with and without a filter.
    """
    refills = self.max_refills if self.drop_zero_variance else 0
    first = _FIRST_REFILL + iteration * refills
    return range(first, first + refills)

  def is_active(self, iteration: int) -> bool:
    """Returns whether groups may be dropped."""
    return self.drop_zero_variance and iteration >= self.warmup_iterations


@dataclasses.dataclass(frozen=True)
class CollectedGroups:
  """The episodes of an iteration.

  Attributes:
    episodes: all episodes; group indices start at 0.
    kept: the episodes to train on, with new group indices; empty if the filter
      drops every group.
    indices: for each episode of `kept`, its index in `episodes`.
    metrics: metrics named 'filter/...'; empty without a filter.
    waiting: groups that continue in the next iteration.
    further: cost of what was sampled besides `episodes`.
  """

  episodes: list[trajectory.Trajectory]
  kept: list[trajectory.Trajectory]
  indices: list[int]
  metrics: dict[str, float]
  waiting: tuple[carry_over.WaitingGroup, ...] = ()
  further: SampleCounts = SampleCounts()

  @property
  def outcomes(self) -> list[tasks.Outcome]:
    """Outcome of each episode whose environment did not fail."""
    return [
      tasks.Outcome(
        t.task, t.success, tuple(step.result.action for step in t.steps)
      )
      for t in self.episodes
      if not t.failure
    ]


def collect(
  first: list[trajectory.Trajectory],
  refills: Iterable[list[trajectory.Trajectory]],
  group_filter: GroupFilter,
  *,
  groups: int,
  iteration: int,
) -> CollectedGroups:
  """Runs groups until enough are kept or all refills are used.

  Args:
    first: the episodes of the groups with which the iteration starts.
    refills: runs further groups; yields the episodes of a refill.
    group_filter: selects the groups to keep.
    groups: G, the number of groups to keep; any excess is dropped.
    iteration: index of the iteration.
  """
  if not group_filter.is_active(iteration):
    return CollectedGroups(first, first, list(range(len(first))), {})
  episodes: list[trajectory.Trajectory] = []
  all_groups: list[list[int]] = []  # Indices into `episodes`.
  kept: list[list[int]] = []
  num_batches = 0
  for batch in itertools.chain([first], refills):
    new_groups = [[] for _ in range(1 + max(t.group for t in batch))]
    for t in batch:
      new_groups[t.group].append(len(episodes))
      group = len(all_groups) + t.group
      episodes.append(dataclasses.replace(t, group=group))
    all_groups += new_groups
    num_batches += 1
    kept += [g for g in new_groups if has_variance([episodes[n] for n in g])]
    if len(kept) >= groups:
      break
  metrics = {
    'filter/refills': float(num_batches - 1),
    'filter/groups_kept': float(min(len(kept), groups)),
    'filter/nonzero_variance_share': len(kept) / len(all_groups),
  }
  kept = kept[:groups]
  return CollectedGroups(
    episodes=episodes,
    kept=[
      dataclasses.replace(episodes[n], group=group)
      for group, indices in enumerate(kept)
      for n in indices
    ],
    indices=[n for indices in kept for n in indices],
    metrics=metrics,
  )


def has_variance(group: Sequence[trajectory.Trajectory]) -> bool:
  """Returns whether the episodes of a group have different rewards.

  Penalties for invalid responses are not part of the rewards, as in DAPO.
  Episodes whose environment failed do not count. With several agents, the
  rewards of one of them must differ, its own or those that it shares.
  """
  totals: dict[tuple[bool, str], list[float]] = {}
  for t in group:
    if not t.failure:
      for is_team, rewards in enumerate((t.own_rewards, t.team_rewards)):
        for agent, reward in t.by_agent(rewards).items():
          totals.setdefault((bool(is_team), agent), []).append(reward)
  return not all(map(trajectory.are_equal, totals.values()))


def max_turns(
  schedule: Sequence[tuple[int, int]], iteration: int
) -> int | None:
  """Returns an iteration's limit of turns per episode; None for no limit.

  Args:
    schedule: (first iteration, limit of turns), by increasing iteration; () is
      no limit.
    iteration: index of the iteration.
  """
  limits = [turns for start, turns in schedule if start <= iteration]
  return limits[-1] if limits else None
