"""A mixture of experts: each token goes to a few of many MLPs.

No token is dropped: tokens are sorted by expert, and one product of a ragged
batch does all experts. Where experts are cut over devices, each device gets
the tokens of its neighbours along `expert`, computes what its own experts say
to them, and gives back the sums.

Shapes. **T** tokens, **X** experts, **A** experts of a token, **D** width,
**F** width of an expert.
"""

import functools

import jax
import jax.numpy as jnp

from gigpo_jax import mesh

_EXPERT, _TENSOR = mesh.RULES['experts'], mesh.RULES['mlp']


def mix(
  x_BLD: jax.Array,
  router_DX: jax.Array,
  gate_XDF: jax.Array,
  up_XDF: jax.Array,
  down_XFD: jax.Array,
  *,
  per_token: int,
  normalized: bool,
) -> jax.Array:
  """Returns the weighted sum of what its experts say to each token, [B, L, D].

  Args:
    x_BLD: tokens.
    router_DX: its product with a token, and a softmax, weigh the experts.
    gate_XDF: of each expert, y = down(silu(gate x) * up x).
    up_XDF: the same.
    down_XFD: the same.
    per_token: A, how many of the likeliest are taken.
    normalized: whether the weights of those that are taken add up to one.
  """
  rows = mesh.row_axes(x_BLD)
  columns = (_EXPERT, None, _TENSOR)
  return mesh.on_each_device(
    functools.partial(_on_device, per_token=per_token, normalized=normalized),
    (rows, (), columns, columns, (_EXPERT, _TENSOR)),
    rows,
  )(x_BLD, router_DX, gate_XDF, up_XDF, down_XFD)


def route(
  x_TD: jax.Array, router_DX: jax.Array, *, per_token: int, normalized: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns weights, float32, and numbers of each token's experts, [T, A]."""
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
  spread = mesh.parts(_EXPERT) > 1
  if spread:
    x_BLD = jax.lax.all_gather(x_BLD, _EXPERT, axis=0, tiled=True)
  x_TD = x_BLD.reshape(-1, d)
  weights_TA, experts_TA = route(
    x_TD, router_DX, per_token=per_token, normalized=normalized
  )
  first = 0
  if spread:
    first = jax.lax.axis_index(_EXPERT) * gate_XDF.shape[0]
  y_TD = _apply(
    x_TD, weights_TA, experts_TA - first, gate_XDF, up_XDF, down_XFD
  )
  y_BLD = y_TD.reshape(-1, length, d)
  if mesh.parts(_TENSOR) > 1:
    y_BLD = jax.lax.psum(y_BLD, _TENSOR)
  if spread:
    y_BLD = jax.lax.psum_scatter(
      y_BLD, _EXPERT, scatter_dimension=0, tiled=True
    )
  return y_BLD.reshape(b, length, d)


def _apply(
  x_TD, weights_TA, experts_TA, gate_XDF, up_XDF, down_XFD
) -> jax.Array:
  """Returns the weighted sums of these experts' answers; others add nothing.

  Args:
    x_TD: tokens.
    weights_TA: of the experts of a token.
    experts_TA: their numbers; such as are not in [0, X) are elsewhere.
    gate_XDF: of the experts that are here.
    up_XDF: the same.
    down_XFD: the same.
  """
  t, a = experts_TA.shape
  x = gate_XDF.shape[0]
  places = experts_TA.reshape(-1)
  # Those of experts elsewhere come last, and belong to no group.
  places = jnp.where((places >= 0) & (places < x), places, x)
  order = jnp.argsort(places)
  sizes = jnp.bincount(places, length=x + 1)[:x].astype(jnp.int32)
  sorted_SD = x_TD[order // a]
  gate_SF = jax.lax.ragged_dot(sorted_SD, gate_XDF, sizes)
  up_SF = jax.lax.ragged_dot(sorted_SD, up_XDF, sizes)
  y_SD = jax.lax.ragged_dot(jax.nn.silu(gate_SF) * up_SF, down_XFD, sizes)
  here_S1 = (jnp.arange(t * a) < jnp.sum(sizes))[:, None]
  y_TAD = jnp.where(here_S1, y_SD, 0)[jnp.argsort(order)].reshape(t, a, -1)
  # The weights in the type of the tokens, as the original has them.
  return jnp.einsum('TAD,TA->TD', y_TAD, weights_TA.astype(x_TD.dtype))
