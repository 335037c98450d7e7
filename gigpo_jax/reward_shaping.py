"""Changes of rewards before advantages: a KL penalty, a penalty on length."""

import dataclasses
from collections.abc import Iterator

import ml_collections
import numpy as np
from jaxtyping import Float, Int

from gigpo_jax import batch, kl, options
from gigpo_jax.run import config_fields

# Options that change the rewards of rows after the rollout.
_LATER = ('reward.kl_weight', 'reward.overlong_buffer', 'reward.scored')


@dataclasses.dataclass(frozen=True)
class RewardShaping:
  """Options of rewards, `config.reward`.

  Attributes:
    kl_weight: weight of the KL to the reference policy that is subtracted from
      the reward of a row: the sum over its tokens of the estimates for the
      policy before the update. 0 disables it.
    kl_estimator: one of `kl.ESTIMATORS`.
    overlong_buffer: number of tokens before the limit of a response in which
      the penalty grows; 0 disables it. See `overlong`.
    overlong_penalty: the largest penalty, in reward units.
    agents: one of `batch.AGENT_REWARDS`.
  """

  kl_weight: float = options.number(0.0, low=0, note='0 is off')
  kl_estimator: str = options.choice('k1', kl.ESTIMATORS)
  overlong_buffer: int = options.number(0, low=0, note='0 is off')
  overlong_penalty: float = options.number(1.0, above=0)
  agents: str = options.choice('team', batch.AGENT_REWARDS)

  def __post_init__(self):
    options.check(self)

  @property
  def needs_reference(self) -> bool:
    """Whether there is a KL penalty."""
    return self.kl_weight > 0

  def shape(
    self,
    rows: batch.Rows,
    log_probs: Float[np.ndarray, 'R C'],
    ref_log_probs: Float[np.ndarray, 'R C'] | None,
    kl_factor: float = 1.0,
  ) -> tuple[batch.Rows, dict[str, float]]:
    """Returns rows with the final rewards, and metrics.

    Args:
      rows: rows with the rewards of the environment.
      log_probs: log-probs before the update.
      ref_log_probs: log-probs under the reference; None without a KL penalty.
      kl_factor: factor of the KL's weight.
    """
    rewards, metrics = rows.rewards, {}
    mask = rows.completion_mask
    if self.needs_reference:
      estimates = kl.estimate(log_probs, ref_log_probs, self.kl_estimator)
      estimates = np.where(mask, estimates, 0)
      weight = self.kl_weight * kl_factor
      rewards = rewards - weight * estimates.sum(axis=1)
      # The estimates assume samples of the current policy.
      fresh = mask & (rows.ages == 0)[:, None]
      if fresh.any():
        metrics['reward/kl'] = float(estimates[fresh].mean())
    if self.overlong_buffer:
      lengths, limit = mask.sum(axis=1), mask.shape[1]
      penalties = overlong(lengths, limit, self.overlong_buffer)
      rewards = rewards - self.overlong_penalty * penalties
      metrics['reward/overlong'] = float(penalties[rows.real].mean())
    if rewards is rows.rewards:
      return rows, metrics
    return dataclasses.replace(rows, rewards=rewards), metrics


def refuse_later(
  config: ml_collections.ConfigDict, reason: str
) -> Iterator[str]:
  """Yields a line for each option that changes rewards after the rollout.

  Args:
    config: the experiment.
    reason: why the algorithm does not support it.
  """
  for field, value, default in config_fields.non_default(config, _LATER):
    yield f'{field}={value}: {reason}; must be {default}'


def overlong(
  lengths: Int[np.ndarray, ' R'], limit: int, buffer: int
) -> Float[np.ndarray, ' R']:
  """Returns DAPO's soft over-length punishment (arXiv:2503.14476, Eq. 13).

  0 up to limit - buffer tokens, then growing linearly to 1 at the limit.
  """
  return np.clip((lengths - (limit - buffer)) / buffer, 0, 1)
