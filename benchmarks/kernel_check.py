"""Compares kernels of attention with plain attention in float32.

An error is the norm of the difference, relative to that of the plain result.
In bfloat16, 2e-3 to 3e-3 are rounding.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax.models import attention, decode_attention, kv_cache, published


def measure(platform: str) -> Iterator[tuple[str, list[float]]]:
  """Yields the name of each kernel and case, and its errors.

  They are those of the output and, for the update's attention, of the gradients
  of queries, keys and values.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'; the platform of this process.
  """
  kernel = attention.default_implementation(platform, 'bfloat16', 128)
  for name, tree in (('texts', False), ('branches', True)):
    yield f'{kernel}, {name}', _attention_errors(kernel, tree=tree)
  for kernel, on_platform in decode_attention.PLATFORMS.items():
    types = kv_cache.TYPES if kernel == 'triton' else ('model',)
    for cache in types if on_platform == platform else ():
      yield f'{kernel}, cache {cache}', [_decode_error(kernel, cache)]


def _draw(seed: int, *shape: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _error(actual: jax.Array, expected: jax.Array) -> float:
  """Returns the norm of the difference, relative to that of `expected`."""
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def _attention_errors(kernel: str, *, tree: bool) -> list[float]:
  """Returns the errors of the output and of three gradients."""
  length, third = 1536, 512
  arrays = [
    _draw(n, 2, length, heads, 128) for n, heads in enumerate((12, 2, 2))
  ]
  weights = _draw(3, 2, length, 12, 128)
  # Two texts, or a prompt with two completions; a text and padding.
  ends = np.full((2, length), length, np.int32)
  ends[0, : 2 * third] = 2 * third
  if tree:
    ends[0, :third] = length
  ends[1, :700] = 700
  segments = attention.Segments(jnp.asarray(ends), tree=tree)

  def outputs(kernel: str, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
      output = attention.self_attention(
        *arrays, segments, implementation=kernel
      )
      return jnp.sum(output.astype(jnp.float32) * weights), output

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    gradients, output = gradient(*arrays)
    return [output, *gradients]

  with jax.default_matmul_precision('highest'):
    expected = outputs('xla', [x.astype(jnp.float32) for x in arrays])
  actual = outputs(kernel, arrays)
  return [_error(a, e) for a, e in zip(actual, expected, strict=True)]


def _decode_error(kernel: str, cache: str) -> float:
  """Returns the error of a kernel that reads a cache."""
  model = dataclasses.replace(published.SHAPES['Qwen2.5-1.5B'], cache=cache)
  rows, length, heads = 16, 1280, model.num_kv_heads
  k, v = (_draw(n, 2, rows, length, heads, model.head_dim) for n in range(2))
  positions = jnp.linspace(0, length - 1, rows).astype(jnp.int32)[:, None]
  q = _draw(2, rows, 1, model.num_heads, model.head_dim)
  stack = kv_cache.from_tokens(model, k, v)

  def attend(q: jax.Array, kernel: str) -> jax.Array:
    return jax.jit(
      functools.partial(decode_attention.attend, implementation=kernel)
    )(q, stack, jnp.int32(1), positions)

  with jax.default_matmul_precision('highest'):
    expected = attend(q.astype(jnp.float32), 'xla')
  return _error(attend(q, kernel), expected)
