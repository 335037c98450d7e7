"""EMPG (arXiv:2509.09265): confident steps learn more, and clarity is rewarded.

H is the mean entropy of the tokens of a step, scaled to [0, 1] between the
smallest and the largest of the iteration. Then

    A' = A exp(-k H) / mean of exp(-k H) + zeta exp(-k' H of the next step),

where the last step of an episode has no second term, and the mean of A' over
all steps is subtracted. A step that branches share counts once.

# Differs from the paper: zeta (`clarity_weight`) was not found; 0.1 is this
project's.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, options, plugins, row_stats


@dataclasses.dataclass(frozen=True)
class Modulator:
  """A exp(-k H) / mean + zeta exp(-k' H of the next step), centred.

  Attributes:
    confidence_rate: k, the rate of the factor of A; not published.
    clarity_rate: k', the rate of the bonus; not published.
    clarity_weight: zeta, the weight of the bonus; not published.
  """

  needs: ClassVar[tuple[str, ...]] = ('entropies',)
  needs_group: ClassVar[bool] = False

  confidence_rate: float = options.number(1.0, low=0)
  clarity_rate: float = options.number(1.0, low=0)
  clarity_weight: float = options.number(0.1, low=0)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns the changed advantages."""
    mask = rows.completion_mask
    entropies = row_stats.token_means(signals.outputs['entropies'], mask)
    gains, clarity = self.factors(entropies, rows)
    changed = row_stats.add(
      row_stats.scale(advantages, gains), self.clarity_weight * clarity, mask
    )
    means = (
      changed if changed.ndim == 1 else row_stats.token_means(changed, mask)
    )
    weights = row_stats.response_weights(rows)
    centre = np.full(len(mask), -np.average(means, weights=weights))
    return row_stats.add(changed, centre, mask)

  def factors(
    self, entropies: np.ndarray, rows: batch.Rows
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factor of each advantage, and the next step's clarity."""
    real = rows.real
    low, high = entropies[real].min(), entropies[real].max()
    scaled = (entropies - low) / (high - low) if high > low else 0 * entropies
    gains = np.exp(-self.confidence_rate * scaled)
    following = row_stats.next_rows(rows)
    clarity = np.exp(-self.clarity_rate * scaled[following])
    mean = np.average(gains, weights=row_stats.response_weights(rows))
    return gains / mean, np.where(following >= 0, clarity, 0)
