"""The key/value cache of a network: rows of slots, one slot per position.

Shapes: **B** rows, **S** slots of a row, **P** prompt tokens, **K** key/value
heads, **E** head size, **N** layers of a stack.
"""

import functools

import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import parameters
from gigpo_jax.models.qwen_config import QwenConfig

# model: the model's compute type. int8: keys and values with a scale for each
# token and head.
TYPES = ('model', 'int8')

# Keys and values of the layers: stacks of {'k': [N, B, K, E, S], 'v': [N, B, K,
# S, E]}, the layouts in which a decoding step multiplies them. With int8 also
# {'k_scale': [N, B, K, S], 'v_scale': [N, B, K, S]}.
Cache = tuple[dict[str, jax.Array], ...]

# Dimension of the slots of each array.
_SLOTS = {'k': 4, 'v': 3, 'k_scale': 3, 'v_scale': 3}


def new(config: QwenConfig, num_rows: int, length: int) -> Cache:
  """Returns an empty cache of `num_rows` rows with `length` slots each."""
  size = parameters.layers_per_stack(config)
  tokens = jax.ShapeDtypeStruct(
    (size, num_rows, length, config.num_kv_heads, config.head_dim), config.dtype
  )
  shapes = jax.eval_shape(
    functools.partial(from_tokens, config), tokens, tokens
  )
  stack = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
  return tuple(stack for _ in range(0, config.num_layers, size))


def token_bytes(config: QwenConfig) -> int:
  """Returns the bytes of one token in the cache of all layers."""
  cache = jax.eval_shape(lambda: new(config, 1, 1))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def from_tokens(
  config: QwenConfig, k_NBPKE: jax.Array, v_NBPKE: jax.Array
) -> dict[str, jax.Array]:
  """Returns the stack of the keys and values of tokens, from slot 0 on."""
  arrays = {'k': k_NBPKE, 'v': v_NBPKE}
  if config.cache == 'int8':
    arrays = _quantize(arrays)
  return {name: jnp.moveaxis(x, 2, _SLOTS[name]) for name, x in arrays.items()}


def _quantize(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns keys and values [.., E] as int8, and their scales [..]."""
  quantized = {}
  for name, x in arrays.items():
    x32 = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x32), axis=-1), 1e-30) / 127
    quantized[name] = jnp.round(x32 / scale[..., None]).astype(jnp.int8)
    quantized[name + '_scale'] = scale
  return quantized


def write(
  stack: dict,
  layer: jax.Array,
  positions_B1: jax.Array,
  k_B1KE: jax.Array,
  v_B1KE: jax.Array,
  *,
  by_head: bool = False,
) -> dict[str, jax.Array]:
  """Returns a stack with one token of each row written into a layer.

  Args:
    stack: keys and values of several layers.
    layer: index of the layer in the stack.
    positions_B1: slot to write in each row.
    k_B1KE: keys of the tokens.
    v_B1KE: values of the tokens.
    by_head: whether the heads are written one by one. A TPU does this in place
      if each head's slots are adjacent in memory.
  """
  arrays = {'k': k_B1KE[:, 0], 'v': v_B1KE[:, 0]}
  if 'k_scale' in stack:
    arrays = _quantize(arrays)
  token, slots_B = (mesh.BATCH, mesh.RULES['kv_heads']), positions_B1[:, 0]
  cache, written = (None, *token), {}
  for name, x in arrays.items():
    put = functools.partial(_put_token, _SLOTS[name], by_head)
    if by_head:
      put = mesh.shard_map(put, (cache, (), token[:1], token), cache)
    written[name] = put(stack[name], layer, slots_B, x)
  return written


def _put_token(
  dimension: int,
  by_head: bool,
  cache: jax.Array,
  layer: jax.Array,
  slots_B: jax.Array,
  token_BK: jax.Array,
) -> jax.Array:
  """Writes one token of each row into an array of the cache.

  Each row writes at its own position. XLA does this scatter in place; a slice
  update at a traced layer would copy the cache.

  Args:
    dimension: dimension of the slots.
    by_head: see `write`.
    cache: array of the cache.
    layer: see `write`.
    slots_B: slot to write in each row.
    token_BK: the new values, [B, K] or [B, K, E].
  """
  rows_B, each = jnp.arange(slots_B.shape[0]), slice(None)
  if not by_head:
    where = (layer, rows_B, *[each] * (dimension - 2), slots_B)
  else:
    heads = jnp.arange(token_BK.shape[1])
    between = [each] * (dimension - 3)
    where = (layer, rows_B[:, None], heads, *between, slots_B[:, None])
  return cache.at[where].set(token_BK)


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
      name: resize_axis(resize_axis(x, 1, num_rows), _SLOTS[name], length)
      for name, x in stack.items()
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

  def put(name: str, x: jax.Array, new: jax.Array) -> jax.Array:
    each = (slice(None),) * (_SLOTS[name] - 2)
    new = jax.lax.slice_in_dim(new, 0, length, axis=_SLOTS[name])
    return x.at[:, slots_B, *each, :length].set(new, mode='drop')

  return tuple(
    {name: put(name, x, new[name]) for name, x in stack.items()}
    for stack, new in zip(cache, rows, strict=True)
  )


def take_rows(cache: Cache, slots_B: jax.Array) -> Cache:
  """Returns some rows of the cache."""
  return tuple(
    {name: x[:, slots_B] for name, x in stack.items()} for stack in cache
  )
