"""Attention in sequences of several texts that skips blocks without pairs.

Queries and keys are divided into blocks. A block of queries is compared only
with the blocks of keys that contain a token which one of the queries attends
to. The number of these depends on the data, so this is a loop in XLA, without
unrolling: it compiles fast and stores no scores. It suits CPUs, where a
dynamic loop costs little. The algorithm is FlashAttention-2 (arXiv:2307.08691).

Shapes: **T** = B * N blocks of all sequences, **N** blocks of a sequence, **S**
tokens of a block, **X** = Q * S queries of a block, of all query heads of a
key/value head; further letters as in `attention`.
"""

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# Largest number of tokens of a block.
_BLOCK = 128

# Score of a masked pair, and a smaller bound on the scores of other pairs.
_MASKED, _LOWEST = -1e30, -1e20


@flax.struct.dataclass
class _Plan:
  """Which blocks of keys a block of queries is compared with.

  Attributes:
    keys: indices of blocks of keys in [0, T), the ones to compare with first,
      [T, N].
    count: number of blocks of keys to compare with, [T].
    starts: index in its sequence of the first token of each block, [T].
    ends: `attention.Segments.ends` of the tokens of each block, [T, S].
  """

  keys: jax.Array
  count: jax.Array
  starts: jax.Array
  ends: jax.Array


def attend(
  q_BLHE: jax.Array, k_BLKE: jax.Array, v_BLKE: jax.Array, ends_BL: jax.Array
) -> jax.Array:
  """Returns causal grouped-query attention of packed texts, [B, L, H, E].

  Args:
    q_BLHE: queries.
    k_BLKE: keys.
    v_BLKE: values.
    ends_BL: see `attention.Segments`.
  """
  b, length, h, e = q_BLHE.shape
  k = k_BLKE.shape[2]
  n = -(-length // _BLOCK)
  s = -(-length // n)

  def to_blocks(x_BLKQE: jax.Array) -> jax.Array:
    x_BLKQE = jnp.pad(
      x_BLKQE, ((0, 0), (0, n * s - length), (0, 0), (0, 0), (0, 0))
    )
    x_TSKQE = x_BLKQE.reshape(b * n, s, *x_BLKQE.shape[2:])
    return x_TSKQE.transpose(0, 2, 3, 1, 4).reshape(b * n, k, -1, e)

  # Tokens that are added at the end attend to themselves only.
  added = jnp.broadcast_to(jnp.arange(length, n * s) + 1, (b, n * s - length))
  plan = _make_plan(jnp.concatenate([ends_BL, added], axis=1), n)
  out_TKXE = _attend(
    to_blocks(q_BLHE.reshape(b, length, k, h // k, e)),
    to_blocks(k_BLKE[:, :, :, None]),
    to_blocks(v_BLKE[:, :, :, None]),
    plan,
  )
  out_TKQSE = out_TKXE.reshape(b * n, k, h // k, s, e)
  out_BLHE = out_TKQSE.transpose(0, 3, 1, 2, 4).reshape(b, n * s, h, e)
  return out_BLHE[:, :length]


def _make_plan(ends_BL: jax.Array, n: int) -> _Plan:
  b = ends_BL.shape[0]
  ends_BNS = ends_BL.reshape(b, n, -1)
  block = jnp.arange(n)
  starts = block * ends_BNS.shape[2]
  reaches_BNN = jnp.max(ends_BNS, axis=2)[:, None] > starts[:, None]
  seen_BNN = reaches_BNN & (block <= block[:, None])
  # A stable sort: the block itself is the last of those that are seen.
  order_BNN = jnp.argsort(~seen_BNN, axis=2)
  keys_BNN = order_BNN + n * jnp.arange(b)[:, None, None]
  return _Plan(
    keys_BNN.reshape(b * n, n).astype(jnp.int32),
    jnp.sum(seen_BNN, axis=2, dtype=jnp.int32).reshape(-1),
    jnp.tile(starts, b),
    ends_BNS.reshape(b * n, -1),
  )


def _scores(
  q_KXE: jax.Array, k_TKSE: jax.Array, plan: _Plan, t: jax.Array, u: jax.Array
) -> jax.Array:
  """Returns the scaled scores of a block of queries and one of keys, float32.

  Args:
    q_KXE: the queries.
    k_TKSE: keys of all blocks.
    plan: the plan.
    t: index of the queries' block in [0, T).
    u: index of the keys' block in [0, T), of the same sequence.
  """
  tokens_S = np.arange(k_TKSE.shape[2])
  queries = q_KXE.shape[1] // len(tokens_S)
  query_X = _at(plan.starts, t) + np.tile(tokens_S, queries)
  key_S = _at(plan.starts, u) + tokens_S
  seen_XS = (key_S <= query_X[:, None]) & (query_X[:, None] < _at(plan.ends, u))
  scores_KXS = jnp.einsum(
    'KXE,KSE->KXS', q_KXE, _at(k_TKSE, u), preferred_element_type=jnp.float32
  )
  return jnp.where(seen_XS, scores_KXS * q_KXE.shape[-1] ** -0.5, _MASKED)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns x[index] for an index in range."""
  return jax.lax.dynamic_index_in_dim(
    x, index, keepdims=False, allow_negative_indices=False
  )


def _add_at(x: jax.Array, index: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x.at[index].add(y) for an index in range."""
  return jax.lax.dynamic_update_index_in_dim(
    x, _at(x, index) + y, index, 0, allow_negative_indices=False
  )


def _loop(plan: _Plan, t: jax.Array, body: Callable, start: tuple) -> tuple:
  """Runs body(block of keys, carry) for the blocks that queries attend to."""
  keys_N = _at(plan.keys, t)
  return jax.lax.fori_loop(
    0, _at(plan.count, t), lambda i, x: body(_at(keys_N, i), x), start
  )


def _forward(q_TKXE, k_TKSE, v_TKSE, plan: _Plan):
  dtype = v_TKSE.dtype

  def attend_block(args: tuple) -> tuple[jax.Array, jax.Array]:
    t, q_KXE = args

    def add(u: jax.Array, carry: tuple) -> tuple:
      out_KXE, largest_KX, total_KX = carry
      scores_KXS = _scores(q_KXE, k_TKSE, plan, t, u)
      new_KX = jnp.maximum(largest_KX, jnp.max(scores_KXS, axis=2))
      weights_KXS = jnp.exp(scores_KXS - new_KX[..., None])
      decay_KX = jnp.exp(largest_KX - new_KX)
      product_KXE = jnp.einsum(
        'KXS,KSE->KXE',
        weights_KXS.astype(dtype),
        _at(v_TKSE, u),
        preferred_element_type=jnp.float32,
      )
      return (
        out_KXE * decay_KX[..., None] + product_KXE,
        new_KX,
        total_KX * decay_KX + jnp.sum(weights_KXS, axis=2),
      )

    zeros_KX = jnp.zeros(q_KXE.shape[:2], jnp.float32)
    start = jnp.zeros(q_KXE.shape, jnp.float32), zeros_KX + _LOWEST, zeros_KX
    out_KXE, largest_KX, total_KX = _loop(plan, t, add, start)
    out_KXE = (out_KXE / total_KX[..., None]).astype(dtype)
    return out_KXE, largest_KX + jnp.log(total_KX)

  blocks = jnp.arange(q_TKXE.shape[0])
  out_TKXE, lse_TKX = jax.lax.map(attend_block, (blocks, q_TKXE))
  return out_TKXE, (q_TKXE, k_TKSE, v_TKSE, plan, out_TKXE, lse_TKX)


def _backward(saved: tuple, grad_TKXE: jax.Array) -> tuple:
  q_TKXE, k_TKSE, v_TKSE, plan, out_TKXE, lse_TKX = saved
  dtype, scale = q_TKXE.dtype, q_TKXE.shape[-1] ** -0.5
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  mean_TKX = jnp.sum(
    grad_TKXE.astype(jnp.float32) * out_TKXE.astype(jnp.float32), axis=-1
  )

  def differentiate_block(carry: tuple, args: tuple) -> tuple:
    t, q_KXE, grad_KXE, lse_KX, mean_KX = args

    def add(u: jax.Array, carry: tuple) -> tuple:
      dq_KXE, dk_TKSE, dv_TKSE = carry
      scores_KXS = _scores(q_KXE, k_TKSE, plan, t, u)
      weights_KXS = jnp.exp(scores_KXS - lse_KX[..., None])
      dweights_KXS = dot('KXE,KSE->KXS', grad_KXE, _at(v_TKSE, u))
      dscores_KXS = weights_KXS * (dweights_KXS - mean_KX[..., None]) * scale
      dscores_KXS = dscores_KXS.astype(dtype)
      dk_KSE = dot('KXS,KXE->KSE', dscores_KXS, q_KXE)
      dv_KSE = dot('KXS,KXE->KSE', weights_KXS.astype(dtype), grad_KXE)
      return (
        dq_KXE + dot('KXS,KSE->KXE', dscores_KXS, _at(k_TKSE, u)),
        _add_at(dk_TKSE, u, dk_KSE),
        _add_at(dv_TKSE, u, dv_KSE),
      )

    start = jnp.zeros(q_KXE.shape, jnp.float32), *carry
    dq_KXE, *carry = _loop(plan, t, add, start)
    return tuple(carry), dq_KXE.astype(dtype)

  zeros_TKSE = jnp.zeros(k_TKSE.shape, jnp.float32)
  blocks = jnp.arange(q_TKXE.shape[0])
  (dk_TKSE, dv_TKSE), dq_TKXE = jax.lax.scan(
    differentiate_block,
    (zeros_TKSE, zeros_TKSE),
    (blocks, q_TKXE, grad_TKXE, lse_TKX, mean_TKX),
  )
  return dq_TKXE, dk_TKSE.astype(dtype), dv_TKSE.astype(dtype), None


@jax.custom_vjp
def _attend(q_TKXE, k_TKSE, v_TKSE, plan: _Plan) -> jax.Array:
  return _forward(q_TKXE, k_TKSE, v_TKSE, plan)[0]


_attend.defvjp(_forward, _backward)
