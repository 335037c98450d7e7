"""Keeps the groups with the most signal (RAGEN-2, arXiv:2604.06268).

The signal of a group is the standard deviation of its episodes' returns. A
share of the groups with the largest ones is trained on. Unlike
`filter.drop_zero_variance`, it plays no further groups.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, options, plugins, row_stats


@dataclasses.dataclass(frozen=True)
class Selector:
  """Keeps the groups with the largest standard deviation of returns.

  Attributes:
    group_share: share of the groups to keep, rounded up.
  """

  needs: ClassVar[tuple[str, ...]] = ()
  needs_group: ClassVar[bool] = True
  by_reward: ClassVar[bool] = True

  group_share: float = options.number(0.25, above=0, high=1)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns True for the rows of the kept groups."""
    del advantages
    penalty = signals.invalid_penalty
    episodes = row_stats.episodes(rows, penalty)
    returns = row_stats.whole_returns(episodes, signals.rows, penalty)
    means = episodes.group_means(returns)[episodes.groups]
    deviations = np.sqrt(episodes.group_means((returns - means) ** 2))
    count = row_stats.share_count(self.group_share, len(deviations))
    kept = np.zeros(len(deviations), bool)
    kept[np.argsort(-deviations, kind='stable')[:count]] = True
    return episodes.groups_to_rows(kept) > 0
