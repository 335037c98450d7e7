"""Keeps the best and the worst episodes of each group (PODS, arXiv:2504.13818).

Half of the kept episodes have the largest returns of the group, half the
smallest. For returns of success and failure, this is the subset with the
largest variance.

# Differs from the paper: advantages are those within the entire group, not
within the kept episodes.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import batch, options, plugins, row_stats


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if groups have no more episodes than are kept."""
  kept, members = config.filter.kept_episodes, config.rollout.episodes_per_group
  if kept >= members:
    yield (
      f'filter.kept_episodes={kept}: keeps all episodes of a group; must be '
      f'below rollout.episodes_per_group={members}'
    )


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
    """Returns True for the rows of the kept episodes.

    The turns that a branch shares with its parent are rows of the parent. They
    are kept if either of them is.
    """
    del advantages
    penalty = signals.invalid_penalty
    episodes = row_stats.episodes(rows, penalty)
    returns = row_stats.whole_returns(episodes, signals.rows, penalty)
    kept = np.zeros(len(returns), bool)
    worst = self.kept_episodes // 2
    for group in range(episodes.num_groups):
      members = np.flatnonzero(episodes.groups == group)
      order = members[np.argsort(returns[members], kind='stable')]
      kept[order[:worst]] = True
      kept[order[worst - self.kept_episodes :]] = True
    own = episodes.to_rows(kept) > 0
    whole = rows if signals.rows is None else signals.rows
    index = row_stats.episodes(whole).index
    responses = whole.responses[np.isin(index, index[own])]
    return rows.real & np.isin(rows.responses, responses)
