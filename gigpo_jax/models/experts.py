"""A mixture of experts: each token is routed to a few of many MLPs.

No token is dropped: tokens are sorted by expert, and one ragged product applies
all experts. If experts are sharded, each device gathers the tokens of the other
devices along the mesh axis `expert`, applies its own experts, and the outputs
are summed and scattered back.

Shapes: **T** tokens, **X** experts, **A** experts per token, **D** width, **F**
width of an expert, **S** = T * A pairs of token and expert.
"""

import functools

import jax
import jax.numpy as jnp

from gigpo_jax import mesh

_EXPERT, _TENSOR = mesh.RULES['experts'], mesh.RULES['mlp']


def apply_experts(
  x_BLD: jax.Array,
  router_DX: jax.Array,
  gate_XDF: jax.Array,
  up_XDF: jax.Array,
  down_XFD: jax.Array,
  *,
  per_token: int,
  normalized: bool,
) -> jax.Array:
  """Returns the weighted sum of its experts' outputs for each token, [B, L, D].

  The output of an expert is y = down(silu(gate x) * up x).

  Args:
    x_BLD: tokens.
    router_DX: router matrix; a softmax of its product with a token weights the
      experts.
    gate_XDF: gate projection of each expert.
    up_XDF: up projection of each expert.
    down_XFD: down projection of each expert.
    per_token: A, the number of experts with the largest weights to use.
    normalized: whether the weights of the chosen experts are normalized to sum
      to one.
  """
  rows = mesh.row_axes(x_BLD)
  columns = (_EXPERT, None, _TENSOR)
  return mesh.shard_map(
    functools.partial(_on_device, per_token=per_token, normalized=normalized),
    (rows, (), columns, columns, (_EXPERT, _TENSOR)),
    rows,
  )(x_BLD, router_DX, gate_XDF, up_XDF, down_XFD)


def route(
  x_TD: jax.Array, router_DX: jax.Array, *, per_token: int, normalized: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns the weights (float32) and indices of each token's experts, [T, A].

  Args:
    x_TD: tokens.
    router_DX: router matrix.
    per_token: A, experts per token.
    normalized: whether the weights of a token sum to one.
  """
  logits_TX = jnp.dot(x_TD, router_DX, preferred_element_type=jnp.float32)
  weights_TA, experts_TA = jax.lax.top_k(
    jax.nn.softmax(logits_TX, axis=-1), per_token
  )
  if normalized:
    weights_TA /= jnp.sum(weights_TA, axis=-1, keepdims=True)
  return weights_TA, experts_TA


def _on_device(
  x_BLD, router_DX, gate_XDF, up_XDF, down_XFD, *, per_token, normalized
):
  b, length, d = x_BLD.shape
  sharded = mesh.axis_size(_EXPERT) > 1
  if sharded:
    x_BLD = jax.lax.all_gather(x_BLD, _EXPERT, axis=0, tiled=True)
  x_TD = x_BLD.reshape(-1, d)
  weights_TA, experts_TA = route(
    x_TD, router_DX, per_token=per_token, normalized=normalized
  )
  first = 0
  if sharded:
    first = jax.lax.axis_index(_EXPERT) * gate_XDF.shape[0]
  y_TD = _apply(
    x_TD, weights_TA, experts_TA - first, gate_XDF, up_XDF, down_XFD
  )
  y_BLD = y_TD.reshape(-1, length, d)
  if mesh.axis_size(_TENSOR) > 1:
    y_BLD = jax.lax.psum(y_BLD, _TENSOR)
  if sharded:
    y_BLD = jax.lax.psum_scatter(
      y_BLD, _EXPERT, scatter_dimension=0, tiled=True
    )
  return y_BLD.reshape(b, length, d)


def _apply(
  x_TD, weights_TA, experts_TA, gate_XDF, up_XDF, down_XFD
) -> jax.Array:
  """Returns the weighted sums of the outputs of this device's experts, [T, D].

  Args:
    x_TD: tokens.
    weights_TA: weights of each token's experts.
    experts_TA: indices of each token's experts; an index outside of [0, X) is
      an expert of another device and adds nothing.
    gate_XDF: gate projections of this device's experts.
    up_XDF: up projections of this device's experts.
    down_XFD: down projections of this device's experts.
  """
  t, a = experts_TA.shape
  x = gate_XDF.shape[0]
  indices = experts_TA.reshape(-1)
  # Experts of other devices sort last and belong to no group.
  indices = jnp.where((indices >= 0) & (indices < x), indices, x)
  order = jnp.argsort(indices)
  sizes = jnp.bincount(indices, length=x + 1)[:x].astype(jnp.int32)
  sorted_SD = x_TD[order // a]
  gate_SF = jax.lax.ragged_dot(sorted_SD, gate_XDF, sizes)
  up_SF = jax.lax.ragged_dot(sorted_SD, up_XDF, sizes)
  y_SD = jax.lax.ragged_dot(jax.nn.silu(gate_SF) * up_SF, down_XFD, sizes)
  is_local_S1 = (jnp.arange(t * a) < jnp.sum(sizes))[:, None]
  y_TAD = jnp.where(is_local_S1, y_SD, 0)[jnp.argsort(order)].reshape(t, a, -1)
  # Weights are cast to the type of the tokens, as in transformers.
  return jnp.einsum('TAD,TA->TD', y_TAD, weights_TA.astype(x_TD.dtype))
