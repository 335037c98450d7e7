"""VinePPO (arXiv:2410.01679): advantages from continuations, without a critic.

The value V of the state in which a turn is taken is the mean return of K
episodes that the policy plays from there on (`gigpo_jax.continuations`). With
the reward r of the turn and its next state s',

    A_t = r + discount V(s') - V(s),                          Section 4, Eq. (8)

where V is 0 after the last turn. All tokens of a turn share its advantage.

# Differs from the paper: a step is a turn of an episode, not a line of a
solution.
"""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from gigpo_jax import algorithms, batch, continuations, options, row_stats

PRESETS = {'vineppo': {'algorithm.discount': 1.0}}
conflicts = continuations.conflicts


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = r + discount V of the next state - V.

  Episodes of a group are not compared.

  Attributes:
    continuations: K, the episodes that are played from each state; 9 in the
      paper.
    discount: discount per turn; 1 in the paper.
    invalid_penalty: subtracted from the reward of an invalid response.
    whiten_advantages: whether to normalize advantages to mean 0 and standard
      deviation 1 over the tokens of the iteration.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = False

  continuations: int = options.number(9, low=1, high=10_000)
  discount: float = options.number(0.95, low=0, high=1)
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)
  whiten_advantages: bool = True

  def __post_init__(self):
    options.check(self)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row; 0 for padding and for unknown values."""
    differences = value_differences(
      rows,
      row_stats.penalized_rewards(rows, self.invalid_penalty),
      self.discount,
    )
    known = np.isfinite(differences)
    advantages = np.where(known, differences, 0)
    mask = rows.completion_mask & known[:, None]
    if self.whiten_advantages:
      by_token = np.where(mask, advantages[:, None], 0)
      advantages = row_stats.whiten_tokens(by_token, mask)[:, 0]
    mean = float(np.abs(advantages).sum() / max(known.sum(), 1))
    return algorithms.AlgorithmOutput(
      advantages.astype(np.float32), {'advantage/abs_mean': mean}
    )


def value_differences(
  rows: batch.Rows, rewards: Float[np.ndarray, ' R'], discount: float
) -> Float[np.ndarray, ' R']:
  """Returns A_t of each row in reward units, float64.

  NaN for padding, and where the value of the state or of the next one is
  unknown.

  Args:
    rows: all steps of each episode.
    rewards: reward of each row.
    discount: discount per step.
  """
  index, values = row_stats.next_rows(rows), row_stats.known_state_values(rows)
  following = np.where(index >= 0, values[index], 0)
  differences = rewards + discount * following - values
  return np.where(rows.real, differences, np.nan)
