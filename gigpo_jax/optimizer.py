"""AdamW with warm-up, linear decay and a clip of the global gradient norm."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from gigpo_jax import options

MU_DTYPES = ('bfloat16', 'float32')


@dataclasses.dataclass(frozen=True)
class AdamW:
  """Options of the optimizer: `config.optimizer`.

  Attributes:
    learning_rate: learning rate after the warm-up.
    warmup_updates: number of warm-up updates; update k, from 1, uses
      k / warmup_updates of the learning rate. 0 disables the warm-up.
    decay_updates: number of updates after which the learning rate reaches 0
      by linear decay; 0 keeps it constant.
    b1: decay rate of the gradient's mean.
    b2: decay rate of the squared gradient's mean.
    weight_decay: decay of all parameters per update, relative to the learning
      rate.
    max_grad_norm: larger gradients are scaled down to this global norm.
    mu_dtype: dtype of the gradient's mean.
  """

  learning_rate: float = options.number(1e-6, low=0)
  warmup_updates: int = options.number(0, low=0)
  decay_updates: int = options.number(0, low=0, note='0 keeps it constant')
  b1: float = options.number(0.9, low=0, below=1)
  b2: float = options.number(0.999, low=0, below=1)
  weight_decay: float = options.number(0.01, low=0)
  max_grad_norm: float = options.number(1.0, above=0)
  mu_dtype: str = options.choice('float32', MU_DTYPES)

  def __post_init__(self):
    options.check(self)

  def schedule(self, count: jax.Array) -> jax.Array:
    """Returns the learning rate of the update after `count` updates."""
    warmup = jnp.minimum(1, (count + 1) / (self.warmup_updates or 1))
    rate = self.learning_rate * warmup
    if self.decay_updates:
      rate *= jnp.maximum(0, 1 - count / self.decay_updates)
    return rate

  def make(self) -> optax.GradientTransformation:
    """Returns AdamW after a clip of the global gradient norm."""

    def clip(grads, params=None):
      # optax's clip divides each element; XLA then keeps a copy of all
      # gradients.
      del params
      factor = jnp.minimum(1, self.max_grad_norm / optax.global_norm(grads))
      return jax.tree.map(lambda x: x * factor, grads)

    return optax.chain(
      optax.stateless(clip),
      optax.adamw(
        self.schedule,
        b1=self.b1,
        b2=self.b2,
        weight_decay=self.weight_decay,
        mu_dtype=self.mu_dtype,
      ),
    )
