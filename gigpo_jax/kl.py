"""Estimates of the KL to a reference policy, and an adaptive weight.

The estimators are those of http://joschu.net/blog/kl-approx.html. With d the
log-prob under the reference minus that under the policy, of a sample of the
policy:

- k1 = -d: unbiased; negative for some samples;
- k2 = d^2 / 2: biased, but its mean gradient is that of the KL;
- k3 = exp(d) - d - 1: unbiased, non-negative; GRPO (arXiv:2402.03300, Eq. 4);
- abs = |d|.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, Float

from gigpo_jax import options
from gigpo_jax.arrays import typechecked

ESTIMATORS = ('k1', 'k2', 'k3', 'abs')

# Largest relative error of the KL that changes its weight.
_MAX_ERROR = 0.2

Tokens = Float[Array, '...'] | Float[np.ndarray, '...']


@typechecked
def estimate(
  log_probs: Tokens,
  ref_log_probs: Tokens,
  estimator: str = 'k3',
  clamp: float | None = None,
) -> Tokens:
  """Returns an estimate of KL(policy || reference) per token, in nats.

  Accepts numpy and jax arrays.

  Args:
    log_probs: log-probs under the policy.
    ref_log_probs: log-probs under the reference.
    estimator: one of ESTIMATORS.
    clamp: upper bound of the estimate. Above it the gradient is 0. None
      disables the bound.
  """
  options.check_choice('estimator', estimator, ESTIMATORS)
  difference = ref_log_probs - log_probs
  xp = difference.__array_namespace__()
  if estimator == 'k3':
    if clamp is not None:
      # |d| > clamp + 2 implies an estimate above the clamp. Clipping d avoids
      # an infinite exp(d), whose gradient would be NaN.
      difference = xp.clip(difference, -clamp - 2, clamp + 2)
    values = xp.expm1(difference) - difference
  elif estimator == 'k2':
    values = difference**2 / 2
  else:
    values = abs(difference) if estimator == 'abs' else -difference
  return values if clamp is None else xp.minimum(values, clamp)


@dataclasses.dataclass(frozen=True)
class Control:
  """Adapts the weight of the KL to a target (arXiv:1909.08593, Section 2.2).

  After an update on n rows with a mean KL of k per token, the weight is
  multiplied by 1 + clip(k / target - 1, -0.2, 0.2) min(n / horizon, 1), which
  is positive for any number of rows.

  Attributes:
    kl_target: target of the mean KL, in nats per token, to which the weight of
      the KL in the loss, or in the reward, adapts. None: a constant weight.
    kl_horizon: horizon of the adaptation, in rows.
  """

  kl_target: float | None = options.number(None, above=0, note='None is off')
  kl_horizon: int = options.number(10_000, low=1)

  def __post_init__(self):
    options.check(self)

  def next_factor(self, factor: float, kl: float | None, rows: int) -> float:
    """Returns the factor of the weight after an update.

    Args:
      factor: the factor before.
      kl: mean estimate of the KL per token; None if it was not computed, NaN
        after a skipped update.
      rows: number of rows of the update.
    """
    if self.kl_target is None or kl is None or math.isnan(kl):
      return factor
    error = kl / self.kl_target - 1
    error = min(max(error, -_MAX_ERROR), _MAX_ERROR)
    # More rows than the horizon could change the sign of the weight.
    return factor * (1 + error * min(rows / self.kl_horizon, 1))

  def next_metrics(
    self, factor: float, metrics: Mapping[str, float], rows: int
  ) -> dict[str, float]:
    """Returns the factor of the next iteration as a metric; {} if constant.

    Args:
      factor: the factor of this iteration.
      metrics: metrics of the update, with the KL to the reference policy.
      rows: number of rows of the update.
    """
    if self.kl_target is None:
      return {}
    kl = metrics.get('reward/kl', metrics.get('loss/kl'))
    return {'update/next_kl_factor': self.next_factor(factor, kl, rows)}
