"""Drops what sampler and learner disagree on (rejection sampling of verl).

With rho the probability ratio of learner to sampler, before the update, a unit
is kept if low <= rho <= high. The unit is a token (IcePop), the product over a
row's tokens, or their geometric mean.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import batch, options, plugins, row_stats, selectors

PRESETS = {'mismatch': {'loss.old_log_probs': 'learner'}}
LEVELS = ('token', 'row', 'row_mean')


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line without the learner's log-probs, or if rows are trained."""
  if config.filter.mismatch_level == 'token':
    yield from selectors.refuse_row_loss(config, 'mismatch')
  if config.loss.old_log_probs != 'learner':
    yield (
      f'loss.old_log_probs={config.loss.old_log_probs}: mismatch compares with '
      "the learner's; must be learner"
    )


@dataclasses.dataclass(frozen=True)
class Selector:
  """Keeps low <= pi_learner / pi_sampler <= high.

  Attributes:
    mismatch_level: unit that is kept: token; row, by the product of its
      tokens' ratios; or row_mean, by their geometric mean.
    mismatch_low: low, the smallest kept ratio.
    mismatch_high: high, the largest kept ratio.
  """

  needs: ClassVar[tuple[str, ...]] = ('log_probs',)
  needs_group: ClassVar[bool] = False

  mismatch_level: str = options.choice('token', LEVELS)
  mismatch_low: float = options.number(0.5, low=0, high=1)
  mismatch_high: float = options.number(2.0, low=1)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns True for the kept rows or tokens."""
    del advantages
    mask = rows.completion_mask
    log_ratios = signals.outputs['log_probs'] - rows.sampler_log_probs
    log_ratios = np.where(mask, log_ratios, 0)
    if self.mismatch_level == 'row':
      log_ratios = log_ratios.sum(axis=1)
    elif self.mismatch_level == 'row_mean':
      log_ratios = row_stats.token_means(log_ratios, mask)
    with np.errstate(over='ignore'):  # An infinite ratio is too large.
      ratios = np.exp(log_ratios)
    return (self.mismatch_low <= ratios) & (ratios <= self.mismatch_high)
