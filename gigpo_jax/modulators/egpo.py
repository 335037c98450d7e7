"""EGPO (RLFC, arXiv:2508.05118): a bonus for the entropy of a response.

A + min(weight H, |A| / bound), with H the mean entropy of the tokens of a
response, in nats. With a bound above 1, the sign of A stays.

# Differs from the paper: it applies the bonus to the thought of a single tool
call and does not publish its scale and clip. Form and constants are those of
the entropy-shaped advantage of arXiv:2506.14758, and H is over the response.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, options, plugins, row_stats


@dataclasses.dataclass(frozen=True)
class Modulator:
  """A + min(weight H, |A| / bound), H the mean entropy of the response.

  Attributes:
    entropy_bonus: weight of the entropy.
    entropy_bound: bound; the bonus is at most |A| over it.
  """

  needs: ClassVar[tuple[str, ...]] = ('entropies',)
  needs_group: ClassVar[bool] = False

  entropy_bonus: float = options.number(0.4, low=0)
  entropy_bound: float = options.number(2.0, above=1)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns the advantages with the bonus."""
    entropies = row_stats.token_means(
      signals.outputs['entropies'], rows.completion_mask
    )
    bonus = row_stats.like(self.entropy_bonus * entropies, advantages)
    bound = np.abs(advantages) / self.entropy_bound
    return advantages + np.minimum(bonus, bound)
