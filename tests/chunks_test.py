"""Tests of functions of chunks whose backward pass recomputes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax.models import chunks


def _score(parameter, chunk, scale, data):
  """Returns two outputs of a chunk, [rows] each."""
  products = jnp.tanh(chunk @ parameter) * scale
  return jnp.sum(products * data[:, None], axis=1), jnp.max(products, axis=1)


def _arrays(num_chunks=5, rows=3, width=4, columns=6):
  keys = jax.random.split(jax.random.key(0), 3)
  parameter = jax.random.normal(keys[0], (width, columns))
  parts = jax.random.normal(keys[1], (num_chunks, rows, width))
  data = jax.random.normal(keys[2], (num_chunks, rows))
  return parameter, parts, data


def _loss(outputs):
  first, second = outputs
  return jnp.sum(first**2) + jnp.sum(jnp.sin(second))


@pytest.mark.parametrize('count', [0, 1, 3, 5])
def test_outputs_and_gradients_are_those_of_the_first_chunks(count):
  parameter, parts, data = _arrays()
  scale = jnp.float32(0.7)

  def by_chunks(parameter, parts, count):
    outputs = chunks.map_chunks(
      _score, parameter, parts, (scale,), (data,), count
    )
    return _loss(outputs), outputs

  def directly(parameter, parts):
    used = [
      _score(parameter, parts[n], scale, data[n]) for n in range(count)
    ] + [(jnp.zeros(3), jnp.zeros(3))] * (5 - count)
    outputs = tuple(map(jnp.stack, zip(*used, strict=True)))
    return _loss(outputs), outputs

  grads, outputs = jax.jit(jax.grad(by_chunks, argnums=(0, 1), has_aux=True))(
    parameter, parts, count
  )
  expected, expected_outputs = jax.grad(directly, argnums=(0, 1), has_aux=True)(
    parameter, parts
  )
  for a, b in zip(
    (*outputs, *grads), (*expected_outputs, *expected), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_holds_one_chunk_and_no_copies_of_the_parameter():
  parameter, parts, data = _arrays(num_chunks=64, width=128, columns=512)

  def loss(parameter, parts, count):
    return _loss(
      chunks.map_chunks(
        _score, parameter, parts, (jnp.float32(1),), (data,), count
      )
    )

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
  compiled = gradient.lower(parameter, parts, 7).compile()
  # The sum of gradients, that of one chunk, and a transposed parameter.
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * parameter.nbytes
