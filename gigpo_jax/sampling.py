"""Token choice on the device: temperature, top-k, top-p, min-p, random keys.

All functions are pure.

Shapes: **B** rows, **V** vocabulary, **N** blocks of the vocabulary, **I**
tokens of a block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import options

# Logit of a token that is never sampled.
_MASKED = -1e30
# Tokens of a block of the vocabulary.
_BLOCK_SIZE = 128
# Smallest temperature above 0, at which log-probs are still finite.
MIN_TEMPERATURE = 1e-3


def temperature_field(default: float) -> Any:
  """Returns a field for a temperature, or 0, which is greedy."""
  return options.field(
    default,
    lambda value: value == 0 or MIN_TEMPERATURE <= value < float('inf'),
    f'out of range; must be at least {MIN_TEMPERATURE}, or 0, which is greedy',
  )


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Options of sampling.

  Attributes:
    temperature: divides the logits; 0 is greedy.
    top_k: number of most likely tokens to sample from; 0: all tokens.
    top_p: minimum probability mass of the most likely tokens to sample from; 1:
      all tokens. It applies to the distribution after top_k.
    min_p: minimum probability of a token relative to the most likely token.
  """

  temperature: float = temperature_field(1.0)
  top_k: int = options.number(0, low=0)
  top_p: float = options.number(1.0, above=0, high=1)
  min_p: float = options.number(0.0, low=0, high=1)

  def __post_init__(self):
    options.check(self)

  @property
  def truncates(self) -> bool:
    """Returns whether top_k, top_p or min_p exclude tokens."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def row_keys(seed: np.uint32, streams: jax.Array) -> jax.Array:
  """Returns a key for each row: the seed with its stream folded in."""

  def fold(key: jax.Array, integer: jax.Array) -> tuple[jax.Array, None]:
    return jax.random.fold_in(key, integer), None

  def key(stream: jax.Array) -> jax.Array:
    # A loop, because a fold takes long to compile.
    return jax.lax.scan(fold, jax.random.key(seed), stream)[0]

  return jax.vmap(key)(streams)


def sample_tokens(
  keys_B: jax.Array,
  counts_B: jax.Array,
  floats_BX: jax.Array,
  top_k_B: jax.Array,
  logits_BV: jax.Array,
  *,
  vocab_size: int,
  truncated: bool | None = None,
  greedy: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Samples the next token of each row.

  Args:
    keys_B: key of each row.
    counts_B: index of the token in its completion.
    floats_BX: temperature, top_p and min_p of each row.
    top_k_B: see `Sampling`.
    logits_BV: float32 logits.
    vocab_size: this and larger ids are not sampled.
    truncated: whether any row may use top-k, top-p or min-p; None: the program
      decides at run time.
    greedy: whether any row may be greedy; None: the program decides at run
      time.

  Returns:
    (ids [B], log-probs before truncation [B], log-probs after it [B]).
  """
  b, v = logits_BV.shape
  temperature_B, top_p_B, min_p_B = floats_BX.T
  greedy_B = temperature_B == 0
  scaled_BV = logits_BV * (1 / jnp.where(greedy_B, 1.0, temperature_B))[:, None]
  usable_BV = jnp.broadcast_to(jnp.arange(v) < vocab_size, (b, v))
  max_B1 = jnp.max(
    jnp.where(usable_BV, scaled_BV, _MASKED), axis=-1, keepdims=True
  )
  weights_BV = jnp.where(usable_BV, jnp.exp(scaled_BV - max_B1), 0.0)
  total_B = max_B1[:, 0] + jnp.log(jnp.sum(weights_BV, axis=-1))
  if vocab_size < v:
    # The learner's distribution includes all rows of the embedding.
    rest_B = jax.nn.logsumexp(scaled_BV[:, vocab_size:], axis=-1)
    total_B = jnp.logaddexp(total_B, rest_B)
  kept_BV = _cond(
    truncated,
    jnp.any((top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0)),
    lambda: truncate(scaled_BV, usable_BV, top_k_B, top_p_B, min_p_B),
    lambda: usable_BV,
  )
  weights_BV = jnp.where(kept_BV, weights_BV, 0.0)
  ids_B, kept_weight_B = _sample_by_blocks(keys_B, counts_B, weights_BV)
  kept_total_B = max_B1[:, 0] + jnp.log(kept_weight_B)
  ids_B = _cond(
    greedy,
    jnp.any(greedy_B),
    lambda: jnp.where(greedy_B, _first_argmax(scaled_BV, kept_BV), ids_B),
    lambda: ids_B,
  )
  chosen_B = jnp.take_along_axis(scaled_BV, ids_B[:, None], axis=-1)[:, 0]
  return ids_B, chosen_B - total_B, chosen_B - kept_total_B


def _sample_by_blocks(
  keys_B: jax.Array, counts_B: jax.Array, weights_BV: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Samples a token of each row; returns (ids [B], sums of the weights [B]).

  First samples a block of the vocabulary, then a token of the block. This needs
  noise for each block and each token of one block, instead of each token of the
  vocabulary.

  Args:
    keys_B: key of each row.
    counts_B: index of the token in its completion.
    weights_BV: nonnegative weight of each token.
  """
  b, v = weights_BV.shape
  size = min(_BLOCK_SIZE, v)
  weights_BNI = jnp.pad(weights_BV, ((0, 0), (0, -v % size))).reshape(
    b, -1, size
  )
  sums_BN = jnp.sum(weights_BNI, axis=-1)
  num_blocks = sums_BN.shape[1]

  def noise(key: jax.Array, count: jax.Array) -> jax.Array:
    return jax.random.gumbel(
      jax.random.fold_in(key, count), (num_blocks + size,)
    )

  noise_BX = jax.vmap(noise)(keys_B, counts_B)
  block_B = sample_index(sums_BN, noise_BX[:, :num_blocks])
  weights_BI = jnp.take_along_axis(weights_BNI, block_B[:, None, None], axis=1)[
    :, 0
  ]
  ids_B = block_B * size + sample_index(weights_BI, noise_BX[:, num_blocks:])
  return ids_B, jnp.sum(sums_BN, axis=-1)


def _as_integer(x: jax.Array) -> jax.Array:
  """Maps float32 to int32 monotonically."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def _smallest_true(
  holds: Callable[[jax.Array], jax.Array], rows: int
) -> jax.Array:
  """Returns the smallest int32 of each row that satisfies a predicate, [B].

  Uses bisection: 32 evaluations over a distribution are cheaper than a sort.

  Args:
    holds: monotone predicate; takes integers [B, 1] and returns booleans [B].
      True for the largest integer, and for all integers above a true one.
    rows: B.
  """

  def halve(_, ends: tuple[jax.Array, jax.Array]):
    low_B, high_B = ends
    # The floor of the mean, without the overflow of a sum.
    middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)
    holds_B = holds(middle_B[:, None])
    return jnp.where(holds_B, low_B, middle_B + 1), jnp.where(
      holds_B, middle_B, high_B
    )

  limits = jnp.iinfo(jnp.int32)
  ends = jnp.full(rows, limits.min), jnp.full(rows, limits.max)
  return jax.lax.fori_loop(0, 32, halve, ends)[1]


def truncate(
  scaled_BV: jax.Array,
  usable_BV: jax.Array,
  top_k_B: jax.Array,
  top_p_B: jax.Array,
  min_p_B: jax.Array,
) -> jax.Array:
  """Returns the mask of tokens that top-k, then top-p, and min-p keep, [B, V].

  Args:
    scaled_BV: logits divided by the temperature.
    usable_BV: mask of tokens that may be sampled at all.
    top_k_B: see `Sampling`.
    top_p_B: see `Sampling`.
    min_p_B: see `Sampling`.
  """
  b, v = scaled_BV.shape
  scaled_BV = jnp.where(usable_BV, scaled_BV, _MASKED)
  order_BV = _as_integer(scaled_BV)
  k_B = jnp.where(top_k_B > 0, top_k_B, v)
  # Fewer than k logits are larger than the k-th largest.
  kth_B = _smallest_true(
    lambda at_B1: jnp.sum(order_BV > at_B1, axis=-1) < k_B, b
  )
  kept_BV = usable_BV & (order_BV >= kth_B[:, None])
  mass_BV = jax.nn.softmax(jnp.where(kept_BV, scaled_BV, _MASKED), axis=-1)
  # A token is kept if the mass of more likely tokens is below top_p, so the
  # most likely token is always kept.
  nucleus_B = _smallest_true(
    lambda at_B1: (
      (jnp.sum(jnp.where(order_BV > at_B1, mass_BV, 0.0), axis=-1) < top_p_B)
      | (top_p_B >= 1)
    ),
    b,
  )
  min_logit_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True) + jnp.log(
    jnp.maximum(min_p_B, 1e-30)[:, None]
  )
  return (
    kept_BV & (order_BV >= nucleus_B[:, None]) & (scaled_BV >= min_logit_B1)
  )


def sample_index(weights_BN: jax.Array, noise_BN: jax.Array) -> jax.Array:
  """Samples an index of each row in proportion to its weight, [B].

  Uses Gumbel noise. Rounding differences of a weight rarely change the sample.
  Inverting the cumulative sum would be cheaper, but there a difference in one
  weight shifts all later indices.

  Args:
    weights_BN: nonnegative weights, not normalized.
    noise_BN: Gumbel noise.
  """
  return _first_argmax(jnp.log(weights_BN) + noise_BN, weights_BN > 0)


def _cond(
  static: bool | None,
  dynamic: jax.Array,
  true_fn: Callable[[], jax.Array],
  false_fn: Callable[[], jax.Array],
) -> jax.Array:
  """Returns the result of one of two functions.

  Args:
    static: the condition, if it is known while tracing; None: not known.
    dynamic: the condition at run time, used if `static` is None.
    true_fn: called if the condition is true.
    false_fn: called if the condition is false.
  """
  if static is None:
    return jax.lax.cond(dynamic, true_fn, false_fn)
  return true_fn() if static else false_fn()


def _first_argmax(scaled_BV: jax.Array, kept_BV: jax.Array) -> jax.Array:
  """Returns the first index of the largest kept value of each row, [B].

  `jnp.argmax` takes five times as long on a CPU. The default of v - 1 keeps the
  result within bounds if a row is all NaN.
  """
  v = scaled_BV.shape[-1]
  scaled_BV = jnp.where(kept_BV, scaled_BV, _MASKED)
  largest_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
  indices_BV = jnp.where(scaled_BV == largest_B1, jnp.arange(v), v - 1)
  return jnp.min(indices_BV, axis=-1).astype(jnp.int32)
