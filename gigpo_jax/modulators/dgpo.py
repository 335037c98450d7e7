"""DGPO (arXiv:2601.20614): groups of hard tasks weigh more.

DGPO is the objective of MathForge. With p the share of a group's episodes that
succeed, 1 if none does, each group with different returns gets the weight

    all tokens / tokens of these groups * n softmax(-p / temperature),

where n is the number of these groups. The first factor keeps the mean over
tokens independent of groups without a signal. Other groups keep the weight 1.
Selectors drop tokens later; the released code does so before.
The preset also divides by the mean absolute deviation (`algorithm.norm`).
Formula: released code, AMAP-ML/MathForge.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, options, plugins, row_stats

PRESETS = {'dgpo': {'algorithm.norm': 'mean_abs'}}


@dataclasses.dataclass(frozen=True)
class Modulator:
  """A w, w = tokens / tokens with a signal * n softmax(-success / T).

  Attributes:
    accuracy_temperature: T, the temperature of the softmax over groups; 2 in
      the released code.
  """

  needs: ClassVar[tuple[str, ...]] = ()
  needs_group: ClassVar[bool] = True
  reads_success: ClassVar[bool] = True

  accuracy_temperature: float = options.number(2.0, above=0)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns the weighted advantages."""
    episodes = row_stats.episodes(rows, signals.invalid_penalty)
    spread = episodes.has_spread()
    if not spread.any():
      return advantages
    rates = episodes.group_means(episodes.success)
    # A response that several episodes share (`branching`) is trained on once.
    own = rows.completion_mask.sum(axis=1) * ~rows.repeated
    tokens = np.bincount(episodes.groups, weights=episodes.sum(own))
    weights = group_weights(rates[spread], self.accuracy_temperature)
    factors = np.ones(len(spread))
    factors[spread] = weights * tokens.sum() / max(tokens[spread].sum(), 1)
    return row_stats.scale(advantages, episodes.groups_to_rows(factors))


def group_weights(rates: np.ndarray, temperature: float) -> np.ndarray:
  """Returns n softmax(-rate / temperature); a rate of 0 counts as 1."""
  weights = np.exp(-np.where(rates == 0, 1, rates) / temperature)
  return len(rates) * weights / weights.sum()
