"""Tests of the head's product: its gradient is summed in float32, sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import head

V, D = 12, 16


@pytest.mark.parametrize(
  ('axes', 'rows'),
  [
    ({}, 5),
    ({'fsdp': 8}, 64),
    ({'fsdp': 8}, 5),  # Rows that do not divide into equal shards.
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, 64),
    ({'fsdp': 2, 'sequence': 4}, 64),
  ],
  ids=str,
)
def test_gradients_are_sums_in_float32(axes, rows):
  rng = np.random.default_rng(0)
  rows_ND = jnp.asarray(rng.normal(size=(rows, D)), jnp.bfloat16)
  matrix_VD = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
  grad_NV = jnp.asarray(rng.normal(size=(rows, V)), jnp.bfloat16)

  def loss(rows_ND, matrix_VD):
    product = head.multiply(rows_ND, matrix_VD.astype(jnp.bfloat16), matrix_VD)
    assert product.dtype == jnp.float32
    return jnp.sum(product * grad_NV.astype(jnp.float32))

  sizes = {'data': 1, 'fsdp': 1, 'tensor': 1} | axes
  count = int(np.prod(list(sizes.values())))
  mesh = mesh_lib.make_mesh(**sizes, devices=jax.devices()[:count])
  with jax.set_mesh(mesh):
    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(rows_ND, matrix_VD)
  rows_64, grad_64 = (np.asarray(x, np.float64) for x in (rows_ND, grad_NV))
  matrix_64 = np.asarray(matrix_VD.astype(jnp.bfloat16), np.float64)
  # A sum in bfloat16 would differ by up to 1e-1.
  np.testing.assert_allclose(grads[1], grad_64.T @ rows_64, atol=1e-5)
  assert (grads[0].dtype, grads[1].dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(
    np.asarray(grads[0], np.float64), grad_64 @ matrix_64, atol=0.1, rtol=0.01
  )
  shard = V // sizes['tensor'], D // sizes['fsdp']
  assert grads[1].sharding.shard_shape((V, D)) == shard
