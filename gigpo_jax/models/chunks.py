"""A function of the chunks of an array whose backward pass recomputes it."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

# Maps a parameter, a chunk, constants and the chunk's data to float32 arrays.
ChunkFunction = Callable[..., Sequence[jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def map_chunks(
  function: ChunkFunction,
  parameter: jax.Array,
  chunks: jax.Array,
  constants: tuple[jax.Array, ...],
  data: tuple[jax.Array, ...],
  count: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns the function's outputs for the first chunks, stacked; then zeros.

  Intermediate values exist for one chunk at a time, in the backward pass too.
  A scan with a condition would do the same, but its backward pass would read a
  copy of the parameter for each chunk.

  Args:
    function: called with `parameter`, a chunk, the constants, and the data of
      the chunk.
    parameter: gets a gradient, the sum over the chunks.
    chunks: get gradients; [number of chunks, ...].
    constants: get no gradients.
    data: get no gradients; arrays [number of chunks, ...].
    count: number of leading chunks to compute.
  """

  def add(n: jax.Array, outputs: list[jax.Array]) -> list[jax.Array]:
    values = _for_chunk(function, constants, data, n)(parameter, chunks[n])
    return [o.at[n].set(v) for o, v in zip(outputs, values, strict=True)]

  shapes = jax.eval_shape(
    _for_chunk(function, constants, data, 0), parameter, chunks[0]
  )
  zeros = [jnp.zeros((len(chunks), *s.shape), s.dtype) for s in shapes]
  return tuple(jax.lax.fori_loop(0, count, add, zeros))


def _for_chunk(
  function: ChunkFunction, constants: tuple, data: tuple, n: jax.Array | int
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]:
  """Returns the function of the parameter and of the n-th chunk."""

  def call(parameter: jax.Array, chunk: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(
      function(parameter, chunk, *constants, *(array[n] for array in data))
    )

  return call


def _forward(function, *args):
  return map_chunks(function, *args), args


def _backward(function, saved: tuple, grads: tuple[jax.Array, ...]) -> tuple:
  parameter, chunks, constants, data, count = saved

  def add(step: jax.Array, sums: tuple) -> tuple:
    n = count - 1 - step
    of_chunk = _for_chunk(function, constants, data, n)
    _, vjp = jax.vjp(of_chunk, parameter, chunks[n])
    grad, chunk_grad = vjp(tuple(g[n] for g in grads))
    return sums[0] + grad, sums[1].at[n].set(chunk_grad)

  zeros = (jnp.zeros_like(parameter), jnp.zeros_like(chunks))
  grad, chunk_grads = jax.lax.fori_loop(0, count, add, zeros)
  return grad, chunk_grads, None, None, None


map_chunks.defvjp(_forward, _backward)
