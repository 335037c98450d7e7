"""AdamW with warm-up, decay and a clip of the global gradient norm."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gigpo_jax import options

MU_DTYPES = ('bfloat16', 'float32')
DECAYS = ('linear', 'cosine')


@dataclasses.dataclass(frozen=True)
class AdamW:
  """Options of the optimizer: `config.optimizer`.

  Attributes:
    learning_rate: learning rate after the warm-up.
    warmup_updates: number of warm-up updates; update k, from 1, uses
      k / warmup_updates of the learning rate. 0 disables the warm-up.
    warmup_ratio: number of warm-up updates as a share of decay_updates, rounded
      up; 0 uses warmup_updates.
    decay_updates: number of updates after which the learning rate reaches
      final_rate; 0 keeps it constant.
    decay: linear, from the first update on; or cosine, after the warm-up.
    final_rate: share of the learning rate that remains after the decay.
    b1: decay rate of the gradient's mean.
    b2: decay rate of the squared gradient's mean.
    eps: added to the root of the squared gradient's mean.
    weight_decay: decay of parameters per update, relative to the learning rate.
    no_decay: parameters whose name, such as layers.norm.mlp, contains one of
      these words do not decay.
    max_grad_norm: larger gradients are scaled down to this global norm.
    mu_dtype: dtype of the gradient's mean.
  """

  learning_rate: float = options.number(1e-6, low=0)
  warmup_updates: int = options.number(0, low=0)
  warmup_ratio: float = options.number(0.0, low=0, high=1)
  decay_updates: int = options.number(0, low=0, note='0 keeps it constant')
  decay: str = options.choice('linear', DECAYS)
  final_rate: float = options.number(0.0, low=0, high=1)
  b1: float = options.number(0.9, low=0, below=1)
  b2: float = options.number(0.999, low=0, below=1)
  eps: float = options.number(1e-8, low=1e-30)  # above 0 in float32
  weight_decay: float = options.number(0.01, low=0)
  no_decay: tuple[str, ...] = options.texts()
  max_grad_norm: float = options.number(1.0, above=0)
  mu_dtype: str = options.choice('float32', MU_DTYPES)

  def __post_init__(self):
    options.check(self)
    if self.warmup_ratio and self.warmup_updates:
      raise ValueError(
        f'warmup_ratio={self.warmup_ratio}: warmup_updates='
        f'{self.warmup_updates} sets the warm-up; one of them must be 0'
      )

  @property
  def num_warmup_updates(self) -> int:
    """The number of warm-up updates."""
    # The subtraction absorbs the rounding of the product.
    share = math.ceil(self.warmup_ratio * self.decay_updates - 1e-9)
    return self.warmup_updates or max(share, 0)

  def schedule(self, count: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Returns the learning rate of the update after `count` updates.

    A count on the host gives a rate on the host, which compiles nothing.
    """
    warmup_updates = self.num_warmup_updates
    xp = jnp if isinstance(count, jax.Array) else np
    warmup = xp.minimum(1, (count + 1) / (warmup_updates or 1))
    rate = self.learning_rate * warmup
    if not self.decay_updates:
      return rate
    if self.decay == 'linear':
      remaining = xp.maximum(0, 1 - count / self.decay_updates)
    else:
      length = max(self.decay_updates - warmup_updates, 1)
      done = xp.clip((count - warmup_updates) / length, 0, 1)
      remaining = (1 + xp.cos(xp.pi * done)) / 2
    if self.final_rate:
      remaining = self.final_rate + (1 - self.final_rate) * remaining
    return rate * remaining

  def make(self) -> optax.GradientTransformation:
    """Returns AdamW after a clip of the global gradient norm."""

    def clip(grads, params=None):
      # optax's clip divides each element; XLA then keeps a copy of all
      # gradients.
      del params
      factor = jnp.minimum(1, self.max_grad_norm / optax.tree.norm(grads))
      return jax.tree.map(lambda x: x * factor, grads)

    def decay(updates, params):
      # optax.adamw's, whose mask would make the state depend on `no_decay`.
      return jax.tree.map(
        lambda u, p, decays: u + self.weight_decay * p if decays else u,
        updates,
        params,
        self.decays(params),
      )

    return optax.chain(
      optax.stateless(clip),
      optax.chain(
        optax.scale_by_adam(
          b1=self.b1, b2=self.b2, eps=self.eps, mu_dtype=self.mu_dtype
        ),
        optax.stateless(decay),
        optax.scale_by_learning_rate(self.schedule),
      ),
    )

  def decays(self, params: optax.Params) -> optax.Params:
    """Returns whether each parameter decays."""

    def decays(path, _):
      name = jax.tree_util.keystr(path, simple=True, separator='.')
      return not any(word in name for word in self.no_decay)

    return jax.tree_util.tree_map_with_path(decays, params)
