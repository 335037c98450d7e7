"""PPO (arXiv:1707.06347) with a critic and generalized advantage estimation.

The units of an episode are the tokens, or the turns, of all its rows in order.
Unit k has the reward r_k and the value V_k; V is 0 after the last unit. Its
advantage is A_k = delta_k + discount lambda A_{k+1} with delta_k = r_k +
discount V_{k+1} - V_k (arXiv:1506.02438, Eq. 16).

Level `token`: a unit is a token. Its value is the critic's value before the
token, and a turn's reward is given at its last token. Level `turn`: a unit is
a turn (arXiv:2512.17008). Its value is the critic's value before its first
token, and its tokens share an advantage.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np
from jaxtyping import Bool, Float

from gigpo_jax import algorithms, batch, losses, options, row_stats

LEVELS = ('token', 'turn')

PRESETS = {
  # PPO compares no episodes of a task: every episode gets its own task, and
  # there are as many groups as there were episodes (configs/variants.py).
  'ppo': {'rollout.episodes_per_group': 1},
  'reference_code': {},
}


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the loss is one of rows but tokens have advantages."""
  if config.algorithm.gae_level == 'token':
    yield from losses.refuse_rows(
      config.loss,
      'each token of a row has its own advantage',
      accepted='needs algorithm.gae_level=turn',
    )


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = r + discount V' - V + discount lambda A'.

  V' and A' are those of the next unit. Episodes of a group are not compared.

  Attributes:
    gae_level: unit of the estimation, token or turn.
    gae_discount: discount per unit; 1 in the paper.
    gae_lambda: lambda; 1, as in the paper, gives the return minus the value.
    whiten_advantages: whether to normalize advantages to mean 0 and standard
      deviation 1 over the tokens of the batch, as most implementations do.
    invalid_penalty: subtracted from the reward of an invalid turn.
  """

  needs_values: ClassVar[bool] = True
  needs_group: ClassVar[bool] = False

  gae_level: str = options.choice('token', LEVELS)
  gae_discount: float = options.number(1.0, low=0, high=1)
  gae_lambda: float = options.number(1.0, low=0, high=1)
  whiten_advantages: bool = True
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  def _units(self, rows: batch.Rows) -> Bool[np.ndarray, 'R C']:
    """Returns True at the first position of each unit."""
    mask = rows.completion_mask
    is_start = np.arange(mask.shape[1]) == 0
    return mask & is_start if self.gae_level == 'turn' else mask

  credit = algorithms.credit

  def compute_advantages(
    self, rows: batch.Rows, values: Float[np.ndarray, 'R C'] | None = None
  ) -> algorithms.AlgorithmOutput:
    """Returns advantages of tokens and regression targets of the critic.

    Raises:
      ValueError: if values is None.
    """
    if values is None:
      raise ValueError('values=None: ppo needs the values of a critic')
    mask, units = rows.completion_mask, self._units(rows)
    advantages = row_stats.generalized_advantages(
      rows,
      row_stats.penalized_rewards(rows, self.invalid_penalty),
      values.astype(np.float64),
      units,
      discount=self.gae_discount,
      decay=self.gae_lambda,
    )
    targets = np.where(units, advantages + values, 0)
    errors = advantages[units]
    variance = targets[units].var()
    metrics = {
      'critic/value_mean': values[units].mean(),
      'critic/explained': 1 - errors.var() / variance if variance else 0.0,
    }
    if self.gae_level == 'turn':
      advantages = np.where(mask, advantages[:, :1], 0)
    if self.whiten_advantages:
      advantages = row_stats.whiten_tokens(advantages, mask)
    metrics['advantage/abs_mean'] = np.abs(advantages[mask]).mean()
    return algorithms.AlgorithmOutput(
      advantages.astype(np.float32),
      {name: float(value) for name, value in metrics.items()},
      value_targets=targets.astype(np.float32),
      value_mask=units,
    )
