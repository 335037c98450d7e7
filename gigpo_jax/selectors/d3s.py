"""D3S (arXiv:2509.22115): rows of large variance, tokens of large |A| H.

Keeps the n rows whose advantages have the largest variance, of each group or of
all rows, then the tokens with the largest |A| H, where H is the entropy of the
token. n and the number of tokens grow linearly over the run.

# Differs from the paper: the shares were not found; the defaults are this
project's.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np
from jaxtyping import Bool, Float

from gigpo_jax import batch, options, plugins, row_stats, selectors

SCOPES = ('batch', 'group')


def _shares(default: tuple[float, float]) -> tuple[float, float]:
  return options.field(
    default,
    lambda pair: len(pair) == 2 and all(0 < share <= 1 for share in pair),
    'must be two shares above 0 and at most 1, at the start and end of a run',
  )


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the loss is one of whole rows."""
  yield from selectors.refuse_row_loss(config, 'd3s')


@dataclasses.dataclass(frozen=True)
class Selector:
  """Keeps the subset with the largest variance of A, then large |A| H.

  Attributes:
    variance_scope: batch or group, in which rows are compared.
    variance_rows: share of the rows, rounded up, in the first iteration and
      after the last one; not published.
    variance_tokens: share of these rows' tokens, likewise; not published.
  """

  needs: ClassVar[tuple[str, ...]] = ('entropies',)
  needs_group: ClassVar[bool] = False

  variance_scope: str = options.choice('batch', SCOPES)
  variance_rows: tuple[float, float] = _shares((0.25, 0.5))
  variance_tokens: tuple[float, float] = _shares((0.2, 0.5))

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns True for the chosen tokens."""
    mask = rows.completion_mask
    tokens = row_stats.per_token(advantages, mask)
    row_values = row_stats.token_means(tokens, mask)
    share, token_share = (
      np.interp(signals.progress, (0, 1), pair)
      for pair in (self.variance_rows, self.variance_tokens)
    )
    ids = rows.groups if self.variance_scope == 'group' else rows.groups * 0
    kept = np.zeros(len(ids), bool)
    for value in np.unique(ids[rows.real]):
      members = np.flatnonzero(rows.real & (ids == value))
      count = row_stats.share_count(share, len(members))
      kept[members] = largest_variance(row_values[members], count)
    mask &= kept[:, None]
    weights = np.where(mask, np.abs(tokens) * signals.outputs['entropies'], -1)
    count = row_stats.share_count(token_share, int(mask.sum()))
    chosen = np.zeros(mask.size, bool)
    chosen[np.argsort(-weights, axis=None, kind='stable')[:count]] = True
    return chosen.reshape(mask.shape)


def largest_variance(
  values: Float[np.ndarray, ' N'], count: int
) -> Bool[np.ndarray, ' N']:
  """Returns the subset of a size with the largest variance.

  It consists of the k largest and the count - k smallest values, for some k.
  Of equal variances, the one with the fewest large values is chosen.
  """
  order = np.argsort(values, kind='stable')
  ordered = values[order].astype(np.float64)
  sums, squares = (
    np.concatenate([[0], np.cumsum(x)]) for x in (ordered, ordered**2)
  )
  k = np.arange(count + 1)

  def total(prefix: np.ndarray) -> np.ndarray:
    return prefix[count - k] + prefix[-1] - prefix[len(values) - k]

  variances = total(squares) - total(sums) ** 2 / count
  # Relative to the squares: rounding errors do not depend on the scale.
  best = int(np.argmax(np.round(variances / max(squares[-1], 1e-300), 9)))
  chosen = np.zeros(len(values), bool)
  chosen[order[: count - best]] = True
  chosen[order[len(values) - best :]] = True
  return chosen
