"""ADORA (arXiv:2602.10019): less weight where success is not longer.

A group keeps its advantages if its longest successful episode is longer than
the mean of its failed episodes, or if none failed. Otherwise, and if none
succeeded, they are multiplied by a small weight. Episodes with a truncated
response do not count. Formula: released code, ShadeCloak/ADORA.

# Differs from the paper: the length of an episode is its number of turns, not
of tokens, by default.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, options, plugins, row_stats

UNITS = ('turns', 'tokens')


@dataclasses.dataclass(frozen=True)
class Modulator:
  """A w, w = 1 if max length(right) > mean length(wrong), else 0.1.

  Attributes:
    short_weight: weight of a group whose successful episodes are not longer;
      0.1 in the released code.
    length_unit: unit of length, turns or tokens.
  """

  needs: ClassVar[tuple[str, ...]] = ()
  needs_group: ClassVar[bool] = True
  reads_success: ClassVar[bool] = True

  short_weight: float = options.number(0.1, low=0)
  length_unit: str = options.choice('turns', UNITS)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns the weighted advantages."""
    del signals
    episodes = row_stats.episodes(rows)
    lengths = getattr(episodes, self.length_unit)
    factors = np.array(
      [
        self._weight(
          lengths[members & episodes.success],
          lengths[members & ~episodes.success],
        )
        for group in range(episodes.num_groups)
        for members in [(episodes.groups == group) & ~episodes.truncated]
      ]
    )
    return row_stats.scale(advantages, episodes.groups_to_rows(factors))

  def _weight(self, right: np.ndarray, wrong: np.ndarray) -> float:
    """Returns the weight of a group, given the lengths of its episodes."""
    if not len(right):
      return self.short_weight
    if not len(wrong) or right.max() > wrong.mean():
      return 1.0
    return self.short_weight
