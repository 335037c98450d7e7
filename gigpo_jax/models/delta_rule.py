"""The gated delta rule: attention of linear cost by a state of fixed size.

Gated DeltaNet (arXiv:2412.06464). A head has a matrix S as its state, which
maps keys to values. With decay exp(g_t) and rate b_t, token t replaces a part
of what S holds for its key k_t by its value v_t, and reads S by its query q_t:

    S_t = exp(g_t) S_{t-1}                        decay, Eq. (10)
    u_t = b_t (v_t - S_t^T k_t)                   error of the prediction
    S_t = S_t + k_t u_t^T
    o_t = S_t^T q_t

The state before a token that starts a text is 0. `scan` computes one token
after another; its results do not depend on how tokens are divided into calls.
`by_chunks` computes the same by matmuls over chunks of tokens. Both
compute in float32.

Shapes: **B** rows, **L** tokens, **K** key heads, **R** value heads of one key
head, **E** size of a key, **V** size of a value, **N** chunks, **C** tokens of
a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Tokens of a chunk. A longer chunk has fewer steps and larger matmuls.
CHUNK = 64


class Tokens(NamedTuple):
  """The inputs of the rule for each token.

  Attributes:
    q: queries [B, L, K, E].
    k: keys [B, L, K, E], of length 1.
    v: values [B, L, K, R, V].
    log_decay: g, at most 0, [B, L, K, R].
    rate: b in [0, 1], [B, L, K, R]. A token with g = 0 and b = 0 leaves the
      state unchanged.
    starts: whether a token starts a text, [B, L].
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  log_decay: jax.Array
  rate: jax.Array
  starts: jax.Array


def zero_state(tokens: Tokens) -> jax.Array:
  """Returns the state before the first token, float32 [B, K, R, E, V]."""
  b, _, k, r, v = tokens.v.shape
  return jnp.zeros((b, k, r, tokens.k.shape[-1], v), jnp.float32)


def scan(tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Applies the rule token by token.

  Args:
    tokens: the inputs.
    state: S before the first token, [B, K, R, E, V].

  Returns:
    (outputs float32 [B, L, K, R, V], state after the last token).
  """

  def step(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    q, k = (x.astype(jnp.float32)[:, :, None, :, None] for x in token[:2])
    keep = jnp.where(token.starts[:, None, None], 0, jnp.exp(token.log_decay))
    state = state * keep[..., None, None]
    error = token.v - jnp.sum(state * k, axis=-2)
    state = state + k * (token.rate[..., None] * error)[..., None, :]
    return state, jnp.sum(state * q, axis=-2)

  if tokens.starts.shape[1] == 1:  # A loop would copy the state.
    state, out = step(state, Tokens(*(x[:, 0] for x in tokens)))
    return out[:, None], state
  by_token = Tokens(*(jnp.moveaxis(x, 1, 0) for x in tokens))
  state, out = jax.lax.scan(step, state, by_token)
  return jnp.moveaxis(out, 0, 1), state


def by_chunks(
  tokens: Tokens, state: jax.Array, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
  """Applies the rule by chunks of tokens; see `scan`.

  With G_i the sum of g from the start of the chunk to token i, the errors u of
  a chunk solve the triangular system (I + A) u = b (v - exp(G) S^T k), where
  A_ij = b_i exp(G_i - G_j) k_i . k_j for j < i, and S is the state before the
  chunk. Then o_i = exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j)
  (q_i . k_j) u_j, Section 3.3 of the paper. Where a text starts between two
  tokens, or between the start of the chunk and a token, the factor exp is 0.

  Args:
    tokens: the inputs.
    state: S before the first token, [B, K, R, E, V].
    chunk: tokens of a chunk.

  Returns:
    (outputs float32 [B, L, K, R, V], state after the last token).
  """
  length = tokens.starts.shape[1]
  chunk = min(chunk, length)
  # The dimension of a chunk's tokens follows those of the heads.
  q, k, v = (_split(x, chunk, -2) for x in tokens[:3])
  log_decay, rate, starts = (_split(x, chunk, -1) for x in tokens[3:])
  total = jnp.cumsum(log_decay, axis=-1)
  # Index of the text of each token within the chunk; 0 continues the state.
  text = jnp.cumsum(starts, axis=-1)[:, :, None, None]
  index = jnp.arange(chunk)
  same = text[..., :, None] == text[..., None, :]
  between = total[..., :, None] - total[..., None, :]
  seen = same & (index <= index[:, None])
  decay = jnp.exp(jnp.where(seen, between, -jnp.inf))
  from_state = jnp.exp(jnp.where(text == 0, total, -jnp.inf))[..., None]
  to_state = decay[..., -1, :, None]

  keys = _product('NBKIE,NBKJE->NBKIJ', k, k)[:, :, :, None]
  queries = _product('NBKIE,NBKJE->NBKIJ', q, k)[:, :, :, None] * decay
  system = jnp.where(index < index[:, None], rate[..., None] * keys * decay, 0)
  k, q = k[:, :, :, None], q[:, :, :, None]
  right = rate[..., None] * jnp.concatenate(
    [v, jnp.broadcast_to(k * from_state, (*v.shape[:-1], k.shape[-1]))], axis=-1
  )
  solved = jax.lax.linalg.triangular_solve(
    system, right, left_side=True, lower=True, unit_diagonal=True
  )
  values, reads = jnp.split(solved, [v.shape[-1]], axis=-1)

  def step(state: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
    values, reads, queries, q, k, keep = inputs
    errors = values - _product('BKRCE,BKREV->BKRCV', reads, state)
    out = _product('BKRCE,BKREV->BKRCV', q, state)
    out += _product('BKRIJ,BKRJV->BKRIV', queries, errors)
    state = keep[..., None] * state
    state += _product('BKRCE,BKRCV->BKREV', k, errors)
    return state, out

  inputs = (
    values,
    reads,
    queries,
    q * from_state,
    k * to_state,
    from_state[..., -1, :],
  )
  state, out_NBKRCV = jax.lax.scan(step, state, inputs)
  out_BNCKRV = out_NBKRCV.transpose(1, 0, 4, 2, 3, 5)
  b, n, c, *heads = out_BNCKRV.shape
  return out_BNCKRV.reshape(b, n * c, *heads)[:, :length], state


def _split(x: jax.Array, chunk: int, axis: int) -> jax.Array:
  """Returns [B, L, ..] as chunks [N, B, ..] in float32.

  Args:
    x: an input of each token; tokens of zeros without effect follow the last.
    chunk: tokens of a chunk.
    axis: dimension of the tokens of a chunk in the result.
  """
  padding = [(0, 0)] * x.ndim
  padding[1] = (0, -x.shape[1] % chunk)
  x = jnp.pad(x.astype(jnp.float32), padding)
  x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
  return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, axis)


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns an einsum in float32; a TPU would otherwise round to bfloat16."""
  return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)
