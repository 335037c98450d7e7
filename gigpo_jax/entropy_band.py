"""A penalty on entropies outside a band around their past mean (EPO)."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gigpo_jax import options, token_batch

# Columns of a batch that the penalty reads.
COLUMNS = ('entropy_low', 'entropy_high', 'entropy_band_weight')


@dataclasses.dataclass(frozen=True)
class EntropyBand:
  """The entropy penalty of EPO (arXiv:2509.22576).

  In iteration k of K, the loss of a token with entropy H increases by
  `losses.PolicyGradient.entropy_weight` times

      weight * (1 + exp(-decay k / floor(K / 2)))
        * (relu(low * m - H) + relu(H - high * m)).

  m is the mean over the previous iterations of their mean token entropy, in
  nats. The first iteration has no penalty.

  Differs from the paper: follows its formula, not its code, in which the
  penalty is a constant without a gradient.

  Attributes:
    weight: weight of the penalty, relative to `entropy_weight`; 0 disables it.
    low: lower end of the band, as a share of the mean entropy m of earlier
      iterations.
    high: upper end of the band, as a share of m.
    decay: rate at which the weight decays over the run.
  """

  weight: float = options.number(0.0, low=0, note='0 is off')
  low: float = options.number(0.8, low=0)
  high: float = options.number(1.2, low=0)
  decay: float = options.number(1.0, low=0)

  def __post_init__(self):
    options.check(self, 'entropy_band.')
    if self.weight and self.low > self.high:
      raise ValueError(
        f'entropy_band.low={self.low}: above entropy_band.high={self.high}; '
        'must be at most that'
      )

  def make_columns(
    self, entropies: Sequence[float], iteration: int, num_iterations: int
  ) -> dict[str, float]:
    """Returns the columns of an iteration, one number for all tokens each.

    Args:
      entropies: mean token entropy of each previous iteration; without any the
        weight is 0.
      iteration: k.
      num_iterations: K.
    """
    mean = float(np.mean(entropies)) if entropies else 0.0
    weight = self.weight * self.weight_factor(iteration, num_iterations)
    columns = self.low * mean, self.high * mean, weight if entropies else 0.0
    return dict(zip(COLUMNS, columns, strict=True))

  def weight_factor(self, iteration: int, num_iterations: int) -> float:
    """Returns beta_k = 1 + exp(-decay k / floor(K / 2))."""
    half = max(num_iterations // 2, 1)
    return 1 + float(np.exp(-self.decay * iteration / half))

  def penalty(
    self, entropies: Float[Array, 'S T'], tokens: token_batch.TokenBatch
  ) -> Float[Array, 'S T']:
    """Returns the weighted distance of each token's entropy from the band."""
    low, high, weight = (tokens.extras[name] for name in COLUMNS)
    below = jax.nn.relu(low - entropies)
    distance = below + jax.nn.relu(entropies - high)
    return jnp.where(tokens.mask, weight * distance, 0)
