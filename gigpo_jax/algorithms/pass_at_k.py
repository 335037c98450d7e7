"""Pass@k training (arXiv:2508.10751): credit for the best of k episodes.

Of the n episodes of a group, f fail. A set of k episodes has the reward 1 if
one of them succeeds. Over all sets, the mean reward is m = 1 - C(f, k) / C(n,
k), with the standard deviation s = sqrt(m (1 - m)). The advantage of an episode
is the mean over the sets with it of (reward - m) / s:

    (1 - m) / s for a success, (1 - m - C(f - 1, k - 1) / C(n - 1, k - 1)) / s
    for a failure,

and 0 if all sets have the same reward, so that s is 0, also in a group that
failures of environments leave with k members. k = 1 is GRPO on success, with
the standard deviation of the population. Rewards other than success, and
penalties, do not matter.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import (
  algorithms,
  batch,
  options,
  reward_functions,
  row_stats,
)


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for a single set, with advantages of 0, and for rewards."""
  k, members = config.algorithm.set_size, config.rollout.episodes_per_group
  if k >= members:
    yield (
      f'algorithm.set_size={k}: a group has rollout.episodes_per_group='
      f'{members} episodes; must be below that'
    )
  yield from reward_functions.refuse_success_only(config)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = mean over sets of k episodes of (any success - mean) / std.

  Attributes:
    set_size: k, the episodes of a set.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True
  reads_success: ClassVar[bool] = True

  set_size: int = options.number(2, low=1)

  def __post_init__(self):
    options.check(self)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding."""
    episodes = row_stats.episodes(rows)
    sizes = np.bincount(episodes.groups)
    failures = np.bincount(episodes.groups, weights=~episodes.success)
    by_group = np.array(
      [
        set_advantages(int(n), int(f), self.set_size)
        for n, f in zip(sizes, failures, strict=True)
      ]
    ).reshape(-1, 2)
    right, wrong = by_group[episodes.groups].T
    advantages = episodes.to_rows(np.where(episodes.success, right, wrong))
    return algorithms.make_output(advantages, rows)


def set_advantages(n: int, failures: int, k: int) -> tuple[float, float]:
  """Returns the advantages of a success and of a failure.

  Args:
    n: number of episodes of the group; with fewer than k, both are 0.
    failures: number of failed episodes.
    k: number of episodes of a set.
  """
  if n < k:
    return 0.0, 0.0
  mean = 1 - math.comb(failures, k) / math.comb(n, k)
  deviation = math.sqrt(mean * (1 - mean))
  if not deviation:
    return 0.0, 0.0
  lost = math.comb(failures - 1, k - 1) / math.comb(n - 1, k - 1)
  return (1 - mean) / deviation, (1 - mean - lost) / deviation
