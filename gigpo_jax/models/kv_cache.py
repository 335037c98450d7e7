"""The key/value cache of a network: rows of slots, one slot per position.

Shapes: **B** rows, **S** slots of a row, **K** key/value heads, **E** head
size, **N** layers of a stack.
"""

import jax
import jax.numpy as jnp

from gigpo_jax.models import parameters
from gigpo_jax.models.qwen_config import QwenConfig

# Keys and values of the layers: stacks of {'k': [N, B, K, E, S], 'v': [N, B, K,
# S, E]}, the layouts in which a decoding step multiplies them.
Cache = tuple[dict[str, jax.Array], ...]


def new(config: QwenConfig, num_rows: int, length: int) -> Cache:
  """Returns an empty cache of `num_rows` rows with `length` slots each."""
  size = parameters.layers_per_stack(config)
  shape = (size, num_rows, config.num_kv_heads)
  k = jnp.zeros((*shape, config.head_dim, length), config.dtype)
  v = jnp.zeros((*shape, length, config.head_dim), config.dtype)
  return tuple({'k': k, 'v': v} for _ in range(0, config.num_layers, size))


def write(
  stack: dict,
  layer: jax.Array,
  positions_B1: jax.Array,
  k_B1KE: jax.Array,
  v_B1KE: jax.Array,
) -> dict[str, jax.Array]:
  """Returns a stack with one token of each row written into a layer.

  Args:
    stack: keys and values of several layers.
    layer: index of the layer in the stack.
    positions_B1: slot to write in each row.
    k_B1KE: keys of the tokens.
    v_B1KE: values of the tokens.
  """
  # Each row writes at its own position. XLA does this scatter in place; a slice
  # update at a traced layer would copy the cache.
  rows, slots = jnp.arange(k_B1KE.shape[0]), positions_B1[:, 0]
  return {
    'k': stack['k'].at[layer, rows, :, :, slots].set(k_B1KE[:, 0]),
    'v': stack['v'].at[layer, rows, :, slots].set(v_B1KE[:, 0]),
  }


def resize(cache: Cache, num_rows: int, length: int) -> Cache:
  """Returns the cache padded or truncated to another number of rows and slots.

  Args:
    cache: keys and values.
    num_rows: new number of rows.
    length: new number of slots of a row.
  """

  def resize_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    if size <= x.shape[axis]:
      return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)

  return tuple(
    {
      'k': resize_axis(resize_axis(stack['k'], 1, num_rows), 4, length),
      'v': resize_axis(resize_axis(stack['v'], 1, num_rows), 3, length),
    }
    for stack in cache
  )


def insert(cache: Cache, rows: Cache, slots_B: jax.Array) -> Cache:
  """Returns the cache with rows written into some of its rows.

  Args:
    cache: keys and values.
    rows: B rows to write, possibly of another length; positions beyond the
      length of the cache are dropped.
    slots_B: row of the cache for each of `rows`; rows past the end are dropped.
  """
  length = min(cache[0]['k'].shape[-1], rows[0]['k'].shape[-1])
  return tuple(
    {
      'k': stack['k']
      .at[:, slots_B, :, :, :length]
      .set(new['k'][..., :length], mode='drop'),
      'v': stack['v']
      .at[:, slots_B, :, :length]
      .set(new['v'][:, :, :, :length], mode='drop'),
    }
    for stack, new in zip(cache, rows, strict=True)
  )


def copy_rows(cache: Cache, sources_B: jax.Array, slots_B: jax.Array) -> Cache:
  """Returns the cache with rows copied; slots past the end are dropped."""
  rows = tuple(
    {name: x[:, sources_B] for name, x in stack.items()} for stack in cache
  )
  return insert(cache, rows, slots_B)
