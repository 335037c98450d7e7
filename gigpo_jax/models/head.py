"""The product of hidden states with the matrix of the vocabulary.

Shapes: **N** rows, **D** width, **V** vocabulary.
"""

import math

import jax
import jax.numpy as jnp

from gigpo_jax import mesh

# Maximum number of rows and minimum vocabulary for which the logits are
# computed transposed on a CPU.
_FEW_ROWS, _LARGE_VOCABULARY = 32, 2**15


@jax.custom_vjp
def multiply(
  rows_ND: jax.Array, matrix_VD: jax.Array, parameter_VD: jax.Array
) -> jax.Array:
  """Returns rows times the transposed matrix, float32 [N, V].

  The gradient of the parameter is summed in float32 over rows and devices, and
  each device receives its own shard of the sum only.

  Args:
    rows_ND: hidden states.
    matrix_VD: the parameter in the compute type; it gets no gradient.
    parameter_VD: the parameter.
  """
  del parameter_VD
  # With few rows and a large matrix, the transposed product is twice as fast on
  # a CPU.
  few_rows = rows_ND.shape[0] <= _FEW_ROWS
  if few_rows and matrix_VD.shape[0] >= _LARGE_VOCABULARY:
    return jax.lax.platform_dependent(
      rows_ND, matrix_VD, cpu=_multiply_transposed, default=_multiply
    )
  return _multiply(rows_ND, matrix_VD)


def _multiply(rows_ND: jax.Array, matrix_VD: jax.Array) -> jax.Array:
  return jnp.einsum(
    'ND,VD->NV', rows_ND, matrix_VD, preferred_element_type=jnp.float32
  )


def _multiply_transposed(rows_ND: jax.Array, matrix_VD: jax.Array) -> jax.Array:
  flat_VN = jnp.einsum(
    'VD,ND->VN', matrix_VD, rows_ND, preferred_element_type=jnp.float32
  )
  # Without the barrier, XLA would undo the transposition.
  return jax.lax.optimization_barrier(flat_VN).T


def _forward(rows_ND, matrix_VD, parameter_VD):
  product = multiply(rows_ND, matrix_VD, parameter_VD)
  return product, (rows_ND, matrix_VD, jnp.zeros(0, parameter_VD.dtype))


def _backward(saved: tuple, grad_NV: jax.Array) -> tuple:
  rows_ND, matrix_VD, like_parameter = saved
  # Otherwise a GPU would multiply in float32.
  grad_NV = grad_NV.astype(rows_ND.dtype)
  grad_ND = jnp.einsum(
    'NV,VD->ND', grad_NV, matrix_VD, preferred_element_type=jnp.float32
  )
  grad_VD = _sum_outer_products(grad_NV, rows_ND).astype(like_parameter.dtype)
  return grad_ND.astype(rows_ND.dtype), None, grad_VD


multiply.defvjp(_forward, _backward)


def _sum_outer_products(grad_NV: jax.Array, rows_ND: jax.Array) -> jax.Array:
  """Returns the sum over rows of products, float32 [V, D], sharded.

  Each device sums its own rows. The reduce-scatter is explicit, because XLA
  would send the entire sum to all devices.
  """

  def sum_own(grad_NV: jax.Array, rows_ND: jax.Array) -> jax.Array:
    return jnp.einsum(
      'NV,ND->VD', grad_NV, rows_ND, preferred_element_type=jnp.float32
    )

  def sum_all(grad_NV: jax.Array, rows_ND: jax.Array) -> jax.Array:
    shard_VD = jax.lax.psum_scatter(
      sum_own(grad_NV, rows_ND), embed, scatter_dimension=1, tiled=True
    )
    return jax.lax.psum(shard_VD, [axis for axis in rows if axis != embed])

  vocab, embed = mesh.RULES['vocab'], mesh.RULES['embed']
  rows = (*mesh.BATCH, 'sequence')
  shards = math.prod(map(mesh.axis_size, rows))
  if shards == 1 or rows_ND.shape[0] % shards:
    return mesh.constrain(sum_own(grad_NV, rows_ND), (vocab, embed))
  return mesh.shard_map(sum_all, ((rows, vocab), (rows, None)), (vocab, embed))(
    grad_NV, rows_ND
  )
