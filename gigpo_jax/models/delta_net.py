"""Gated DeltaNet: a layer's mixing of tokens by a convolution and a state.

The queries, keys and values of a token are mixed with those of the tokens just
before it by a short convolution, and then enter the gated delta rule
(`delta_rule`). A gate of the token multiplies the normalized output.

What a layer knows of earlier tokens has a fixed size: the state of the rule and
the inputs of the last tokens, the window of the convolution. A token at
position 0 starts a text: nothing before it reaches it.

Shapes: **B** rows, **L** tokens, **K** key heads, **R** value heads of one key
head, **E** size of a key, **V** size of a value, **W** = 2 E + R V inputs of
the convolution for one key head, **T** tokens of the window.
"""

import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import delta_rule, normalization
from gigpo_jax.models.qwen_config import Delta

# Added to the squared length of queries and keys.
_EPS = 1e-6

# Names of the arrays of a state.
STATE = ('state', 'window')

# Mesh axes of arrays [B, L, K, ..]: the recurrence needs all tokens of a row.
_HEADS = (mesh.BATCH, None, mesh.RULES['heads'])


def state_shapes(
  delta: Delta, num_rows: int, dtype: str
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the state of rows: {'state': [B, K, R, E, V], 'window': ..}.

  The window is [B, K, T, W] in the compute type, the state float32.

  Args:
    delta: shape of the layer.
    num_rows: B.
    dtype: compute type.
  """
  heads = (num_rows, delta.key_heads)
  state = (*heads, delta.ratio, delta.key_size, delta.value_size)
  window = (*heads, delta.kernel - 1, delta.mixed_size)
  return {
    'state': jax.ShapeDtypeStruct(state, jnp.float32),
    'window': jax.ShapeDtypeStruct(window, dtype),
  }


def mix(
  delta: Delta,
  w: dict[str, jax.Array],
  projected: tuple[jax.Array, jax.Array],
  positions_BL: jax.Array,
  *,
  eps: float,
  counts_B: jax.Array | None = None,
  state: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns (the heads' outputs [B, L, K, R * V], the new state).

  Args:
    delta: shape of the layer.
    w: 'conv' [T + 1, K, W], 'log_rate' and 'step_bias' [K, R] of the decay,
      'norm' [V].
    projected: products of the tokens with the matrices 'qkvz' [B, L, K, W + R
      V] and 'ba' [B, L, K, 2 R].
    positions_BL: position of each token in its text, [B, L] or [1, L].
    eps: see `normalization.rms_norm`.
    counts_B: number of leading tokens that change the state; the outputs of
      others have no meaning. None: all.
    state: state before the first token, see `state_shapes`; None: a text starts
      there. With a state, the result does not depend on how tokens are divided
      into calls.
  """
  qkvz, ba = (mesh.constrain(x, _HEADS) for x in projected)
  dtype, r = qkvz.dtype, delta.ratio
  positions_BL = jnp.broadcast_to(positions_BL, qkvz.shape[:2])
  new, z = jnp.split(qkvz, [delta.mixed_size], axis=-1)
  if state is None:
    first = state_shapes(delta, qkvz.shape[0], dtype)
    window = jnp.zeros(first['window'].shape, dtype)
  else:
    window = state['window']
  inputs = jnp.concatenate([window.swapaxes(1, 2), new], axis=1)
  mixed = jax.nn.silu(_convolve(inputs, w['conv'], positions_BL)).astype(dtype)
  q, k, v = jnp.split(mixed, [delta.key_size, 2 * delta.key_size], axis=-1)
  b, a = jnp.split(ba, 2, axis=-1)
  tokens = delta_rule.Tokens(
    _unit(q) * delta.key_size**-0.5,
    _unit(k),
    v.reshape(*v.shape[:3], r, delta.value_size),
    -jnp.exp(w['log_rate'].astype(jnp.float32))
    * jax.nn.softplus(a.astype(jnp.float32) + w['step_bias']),
    jax.nn.sigmoid(b).astype(jnp.float32),
    positions_BL == 0,
  )
  if counts_B is not None:
    counted = (jnp.arange(qkvz.shape[1]) < counts_B[:, None])[..., None, None]
    tokens = tokens._replace(
      log_decay=jnp.where(counted, tokens.log_decay, 0),
      rate=jnp.where(counted, tokens.rate, 0),
    )
  if state is None:
    out, end = delta_rule.by_chunks(tokens, delta_rule.zero_state(tokens))
  else:
    out, end = delta_rule.scan(tokens, state['state'])
  gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
  out = normalization.rms_norm(out.astype(dtype), w['norm'], eps)
  out = (out * gate).astype(dtype).reshape(*z.shape[:3], -1)
  return out, {'state': end, 'window': _last(inputs, counts_B, delta.kernel)}


def _unit(x: jax.Array) -> jax.Array:
  """Returns vectors of length 1, in float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _convolve(
  inputs: jax.Array, w: jax.Array, positions_BL: jax.Array
) -> jax.Array:
  """Returns the convolution of L tokens, float32 [B, L, K, W].

  y_i = sum over d of w_{T-d} x_{i-d}, for 0 <= d <= min(T, position of i).

  Args:
    inputs: x of the window and of the tokens, [B, T + L, K, W].
    w: one weight for each distance and channel, [T + 1, K, W].
    positions_BL: position of each token in its text.
  """
  length, far = positions_BL.shape[1], w.shape[0] - 1
  total = 0.0
  for n, weights in enumerate(w.astype(jnp.float32)):
    x = inputs[:, n : n + length].astype(jnp.float32)
    in_text = (positions_BL >= far - n)[..., None, None]
    total += jnp.where(in_text, x * weights, 0)
  return total


def _last(
  inputs: jax.Array, counts_B: jax.Array | None, kernel: int
) -> jax.Array:
  """Returns the window after the counted tokens, [B, K, T, W].

  Args:
    inputs: x of the window and of the tokens, [B, T + L, K, W].
    counts_B: see `mix`.
    kernel: T + 1.
  """
  far = kernel - 1
  if counts_B is None:
    return inputs[:, inputs.shape[1] - far :].swapaxes(1, 2)
  index = counts_B[:, None] + jnp.arange(far)
  last = jnp.take_along_axis(inputs, index[..., None, None], axis=1)
  return last.swapaxes(1, 2)
