"""A mixture of experts: each token is routed to a few of many MLPs.

No token is dropped: tokens are sorted by expert, and one ragged product applies
all experts. If experts are sharded, each device gathers the tokens of the other
devices along the mesh axis `expert`, applies its own experts, and the outputs
are summed and scattered back.

Shapes: **T** tokens, **X** experts, **A** experts per token, **D** width, **F**
width of an expert, **S** = T * A pairs of token and expert, **R** rank of an
adapter.
"""

import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import lora

_EXPERT, _TENSOR = mesh.RULES['experts'], mesh.RULES['mlp']

# Mesh axes of each array; the matrices and their adapters are of all experts.
_COLUMNS = (_EXPERT, None, _TENSOR)
_AXES = {
  'router': (),
  'gate': _COLUMNS,
  'gate' + lora.A: (_EXPERT,),
  'gate' + lora.B: _COLUMNS,
  'up': _COLUMNS,
  'up' + lora.A: (_EXPERT,),
  'up' + lora.B: _COLUMNS,
  'down': (_EXPERT, _TENSOR),
  'down' + lora.A: (_EXPERT, _TENSOR),
  'down' + lora.B: (_EXPERT,),
}


def apply_experts(
  x_BLD: jax.Array,
  w: dict[str, jax.Array],
  *,
  per_token: int,
  normalized: bool,
  adapters: lora.Lora | None = None,
  agents_BL: jax.Array | None = None,
) -> jax.Array:
  """Returns the weighted sum of its experts' outputs for each token, [B, L, D].

  The output of an expert is y = down(silu(gate x) * up x).

  Args:
    x_BLD: tokens.
    w: 'router' [D, X], of which a softmax of the product with a token weights
      the experts; their projections 'gate' [X, D, F], 'up' [X, D, F] and 'down'
      [X, F, D]; and adapters of these, see `lora`, [X, .., R] and [X, R, ..].
    per_token: A, the number of experts with the largest weights to use.
    normalized: whether the weights of the chosen experts are normalized to sum
      to one.
    adapters: shape of the adapters; None: there are none.
    agents_BL: agent of each token; None without adapters of agents.
  """
  rows, names = mesh.row_axes(x_BLD), [name for name in _AXES if name in w]
  tokens = (x_BLD,) if agents_BL is None else (x_BLD, agents_BL)

  def on_device(*arrays: jax.Array) -> jax.Array:
    local = dict(zip(names, arrays[len(tokens) :], strict=True))
    own = arrays[: len(tokens)]
    return _on_device(own, local, per_token, normalized, adapters)

  axes = (*(rows for _ in tokens), *(_AXES[name] for name in names))
  arrays = (*tokens, *(w[name] for name in names))
  return mesh.shard_map(on_device, axes, rows)(*arrays)


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


def _on_device(tokens, w: dict, per_token, normalized, adapters):
  """Returns the outputs [B, L, D] of (x_BLD,) or of (x_BLD, agents_BL)."""
  b, length, d = tokens[0].shape
  sharded = mesh.axis_size(_EXPERT) > 1
  if sharded:
    tokens = [
      jax.lax.all_gather(x, _EXPERT, axis=0, tiled=True) for x in tokens
    ]
  x_TD = tokens[0].reshape(-1, d)
  agents_T = tokens[1].reshape(-1) if tokens[1:] else None
  weights_TA, experts_TA = route(
    x_TD, w['router'], per_token=per_token, normalized=normalized
  )
  first = 0
  if sharded:
    first = jax.lax.axis_index(_EXPERT) * w['gate'].shape[0]
  chosen = weights_TA, experts_TA - first
  y_TD = _apply(x_TD, chosen, w, adapters, agents_T)
  y_BLD = y_TD.reshape(-1, length, d)
  if mesh.axis_size(_TENSOR) > 1:
    y_BLD = jax.lax.psum(y_BLD, _TENSOR)
  if sharded:
    y_BLD = jax.lax.psum_scatter(
      y_BLD, _EXPERT, scatter_dimension=0, tiled=True
    )
  return y_BLD.reshape(b, length, d)


def _apply(
  x_TD: jax.Array,
  chosen: tuple[jax.Array, jax.Array],
  w: dict,
  adapters: lora.Lora | None,
  agents_T: jax.Array | None,
) -> jax.Array:
  """Returns the weighted sums of the outputs of this device's experts, [T, D].

  Args:
    x_TD: tokens.
    chosen: weights and indices of each token's experts, [T, A]; an index
      outside of [0, X) is an expert of another device and adds nothing.
    w: arrays of this device's experts.
    adapters: shape of the adapters.
    agents_T: agent of each token.
  """
  weights_TA, experts_TA = chosen
  t, a = experts_TA.shape
  x = w['gate'].shape[0]
  indices = experts_TA.reshape(-1)
  # Experts of other devices sort last and belong to no group.
  indices = jnp.where((indices >= 0) & (indices < x), indices, x)
  order = jnp.argsort(indices)
  sizes = jnp.bincount(indices, length=x + 1)[:x].astype(jnp.int32)

  def project(name: str, x_SI: jax.Array) -> jax.Array:
    y_SO = jax.lax.ragged_dot(x_SI, w[name], sizes)
    if name + lora.A not in w:
      return y_SO
    low_SR = jax.lax.ragged_dot(x_SI, w[name + lora.A], sizes)
    low_SR = lora.select(adapters, low_SR, agents_S)
    return y_SO + adapters.scale * jax.lax.ragged_dot(
      low_SR, w[name + lora.B], sizes
    )

  sorted_SD = x_TD[order // a]
  agents_S = None if agents_T is None else agents_T[order // a]
  gate_SF, up_SF = project('gate', sorted_SD), project('up', sorted_SD)
  y_SD = project('down', jax.nn.silu(gate_SF) * up_SF)
  is_local_S1 = (jnp.arange(t * a) < jnp.sum(sizes))[:, None]
  y_TAD = jnp.where(is_local_S1, y_SD, 0)[jnp.argsort(order)].reshape(t, a, -1)
  # Weights are cast to the type of the tokens, as in transformers.
  return jnp.einsum('TAD,TA->TD', y_TAD, weights_TA.astype(x_TD.dtype))
