"""Int8 weights for inference: symmetric, one scale per output channel.

A quantized tree has the structure of the parameters, and next to each matrix
NAME its scales as NAME_scale.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gigpo_jax.models import parameters
from gigpo_jax.models.qwen_config import QwenConfig

# Suffix of the name of a quantized array's scales.
SCALE = '_scale'


def _map_quantized(
  tree: dict,
  matrix: Callable,
  other: Callable,
  depth: int = 0,
  group: str = '',
) -> dict:
  """Returns a tree with the structure of quantized parameters.

  Args:
    tree: parameters, or their logical axes.
    matrix: maps a matrix and its contracted dimensions to (leaf, its scales).
    other: maps any other leaf to its new leaf.
    depth: number of leading dimensions for layers, 0 or 1.
    group: key of `tree` in its parent.
  """
  quantized = {}
  for name, leaf in tree.items():
    if isinstance(leaf, dict):
      quantized[name] = _map_quantized(
        leaf, matrix, other, int(name == 'layers') or depth, name
      )
    elif name in ('embed', 'unembed'):
      quantized[name], quantized[name + SCALE] = matrix(leaf, (1,))
    elif (group, name) in parameters.CONTRACTED:
      axes = tuple(axis + depth for axis in parameters.CONTRACTED[group, name])
      quantized[name], quantized[name + SCALE] = matrix(leaf, axes)
    else:
      quantized[name] = other(leaf)
  return quantized


def quantize(config: QwenConfig, params: dict) -> dict:
  """Returns parameters with int8 matrices, for inference.

  Quantization is symmetric, of weights only, with one scale per output channel:
  w = scale * q with q in [-127, 127]. Norms and biases are cast to the compute
  type.
  """

  def matrix(
    w: jax.Array, axes: tuple[int, ...]
  ) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(jnp.abs(w), axis=axes, keepdims=True)
    scale = jnp.maximum(largest.astype(jnp.float32), 1e-30) / 127
    return jnp.round(w / scale).astype(jnp.int8), scale

  return _map_quantized(params, matrix, lambda x: x.astype(config.dtype))


def quantized_axes(config: QwenConfig) -> dict:
  """Returns the logical axes of the parameters that `quantize` returns."""

  def matrix(names: tuple, axes: tuple[int, ...]) -> tuple[tuple, tuple]:
    kept = (None if n in axes else name for n, name in enumerate(names))
    return names, tuple(kept)

  return _map_quantized(
    parameters.logical_axes(config), matrix, lambda names: names
  )


def matmul(
  x_NI: jax.Array, matrix_IO: jax.Array, scale: jax.Array | None
) -> jax.Array:
  """Returns a product in the type of `x_NI`.

  Columns are scaled after the product: a GPU would write a scaled matrix to
  memory and read it again.

  Args:
    x_NI: rows.
    matrix_IO: a matrix, cast to the compute type.
    scale: the scales of its columns if it is quantized, else None.
  """
  if scale is None:
    return x_NI @ matrix_IO
  y_NO = jnp.matmul(x_NI, matrix_IO, preferred_element_type=jnp.float32)
  return (y_NO * scale.reshape(-1)).astype(x_NI.dtype)


def dequantize_all(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the arrays of a group, cast to the compute type, with scales."""
  return {
    name: dequantize(x, arrays.get(name + SCALE), x.dtype)
    for name, x in arrays.items()
    if not name.endswith(SCALE)
  }


def dequantize(
  array: jax.Array, scale: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
  """Returns an array, dequantized if it has a scale, in the compute type."""
  if scale is None:
    return array.astype(dtype)
  return array.astype(dtype) * scale.astype(dtype)
