"""Keeps the best and the worst episodes of each group (PODS, arXiv:2504.13818).

Half of the kept episodes have the largest returns of the group, half the
smallest. For returns of success and failure, this is the subset with the
largest variance.

# Differs from the paper: advantages are those within the entire group, not
within the kept episodes.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, options, plugins, row_stats


@dataclasses.dataclass(frozen=True)
class Selector:
  """Keeps the n / 2 episodes with the largest and the smallest returns.

  Attributes:
    kept_episodes: n, per group; with an odd n, one more of the best.
  """

  needs: ClassVar[tuple[str, ...]] = ()
  needs_group: ClassVar[bool] = True

  kept_episodes: int = options.number(4, low=2)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns True for the rows of the kept episodes."""
    del advantages
    episodes = row_stats.episodes(rows)
    returns = row_stats.whole_returns(episodes, signals.rows)
    kept = np.zeros(len(returns), bool)
    worst = self.kept_episodes // 2
    for group in range(episodes.num_groups):
      members = np.flatnonzero(episodes.groups == group)
      order = members[np.argsort(returns[members], kind='stable')]
      kept[order[:worst]] = True
      kept[order[worst - self.kept_episodes :]] = True
    return episodes.to_rows(kept) > 0
