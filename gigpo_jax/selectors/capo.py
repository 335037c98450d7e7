"""CAPO (arXiv:2510.00819): drops tokens whose own step is too curved.

Not the CAPO that assigns credit. The model of a step is a softmax regression:
only the head W changes. For a token y that was drawn with probabilities p, with
the advantage A and the last hidden state x, divided by the temperature, the
surrogate is J(W) = A p_W(y) / p(y), and a step with the learning rate eta is
D = eta dJ/dW = eta A v x^T, with v = e_y - p. To second order, J changes by the
gain m_H, and the policy by m_F,

    m_H = g.D + D.H.D / 2 = eta A^2 n s + A (eta A n)^2 (s^2 - c) / 2,
    m_F = D.F.D / 2 = (eta A n s)^2 / 2,

where H is the Hessian of J, F = f f^T with f = d log p_W(y) / dW, n = x.x,
s = v.v and c = v.(diag(p) - p p^T).v. m_F is half the squared change of the
token's log-prob, a sample of the KL. A token is kept if gain_low <= m_H <=
gain_high and m_F <= fisher_high. s and c need p_y and the sums S_k of p^k only:

    s = 1 - 2 p_y + S_2,   c = p_y - 2 p_y^2 + S_3 - (p_y - S_2)^2,
    S_k = exp(k l - l_k), l_k the log-prob of y at 1/k of the temperature.

Formulas and levels: released code, luckeciano/stable-pg-llm. Levels (gain_high,
fisher_high) are (1e-2, 1e-4) for GRPO, (5e-4, 1e-3) for Dr. GRPO and
(1e-1, 1e-5) for REINFORCE; with its switch, gain_low is -gain_high.

# Differs from the paper: the step is that of SGD, an option of the released
code. Its default, Adam, needs two moments for each weight of the head, and D
then depends on all of x. Sums are over all logits, not over the 50 largest. All
tokens are measured once, before the first update of the iteration.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np
from jaxtyping import Float

from gigpo_jax import batch, options, plugins, row_stats, selectors

_SQUARES, _CUBES = f'log_probs@{1 / 2}', f'log_probs@{1 / 3}'


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the loss is one of whole rows."""
  yield from selectors.refuse_row_loss(config, 'capo')


@dataclasses.dataclass(frozen=True)
class Selector:
  """Keeps low <= g.D + D.H.D / 2 <= high, D.F.D / 2 <= f.

  Attributes:
    gain_low: low, the smallest gain m_H of a token's own step; a negative level
      is for symmetric bounds.
    gain_high: high, the largest gain, in units of the advantage. Large bounds
      only measure.
    fisher_high: f, the largest m_F, the KL of a token's own step, in nats.
  """

  needs: ClassVar[tuple[str, ...]] = (
    'log_probs',
    _SQUARES,
    _CUBES,
    'feature_squares',
  )
  needs_group: ClassVar[bool] = False

  gain_low: float = options.number(0.0)
  gain_high: float = options.number(1e-2, above=0)
  fisher_high: float = options.number(1e-4, above=0)

  def __post_init__(self):
    options.check(self)
    if self.gain_low > self.gain_high:
      raise ValueError(
        f'gain_low={self.gain_low}: chooses no token with gain_high='
        f'{self.gain_high}; must be at most that'
      )

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns True for the kept tokens."""
    gain, fisher = measure(advantages, rows, signals)
    in_range = (self.gain_low <= gain) & (gain <= self.gain_high)
    return rows.completion_mask & in_range & (fisher <= self.fisher_high)

  def metrics(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> dict[str, float]:
    """Returns mean and maximum of m_F over tokens; {} without tokens."""
    values = measure(advantages, rows, signals)[1][rows.completion_mask]
    if not values.size:
      return {}
    return {
      'filter/fisher_mean': float(values.mean()),
      'filter/fisher_max': float(values.max()),
    }


def measure(
  advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
) -> tuple[Float[np.ndarray, 'R C'], Float[np.ndarray, 'R C']]:
  """Returns m_H and m_F of each token, float64; 0 for padding."""
  mask = rows.completion_mask
  log_probs, squares, cubes, norms = (
    np.where(mask, signals.outputs[name], 0).astype(np.float64)
    for name in Selector.needs
  )
  prob = np.exp(log_probs)
  sum_2 = np.exp(2 * log_probs - squares)
  sum_3 = np.exp(3 * log_probs - cubes)
  # Rounding errors must not change signs: 0 <= c <= s / 2.
  s = np.maximum(1 - 2 * prob + sum_2, 0)
  c = prob - 2 * prob**2 + sum_3 - (prob - sum_2) ** 2
  c = np.clip(c, 0, s / 2)
  advantages = row_stats.per_token(advantages, mask)
  step = signals.learning_rate * advantages * norms
  gain = advantages * (step * s + step**2 * (s**2 - c) / 2)
  return np.where(mask, gain, 0), np.where(mask, (step * s) ** 2 / 2, 0)
