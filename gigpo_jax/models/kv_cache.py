"""The key/value cache of a network: rows of slots, one slot per position.

Shapes: **B** rows, **S** slots of a row, **P** prompt tokens, **L** new tokens
of a row, **T** = B L, **K** key/value heads, **E** head size, **N** layers of a
stack.
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
  positions_BL: jax.Array,
  k_BLKE: jax.Array,
  v_BLKE: jax.Array,
  *,
  by_head: bool = False,
) -> dict[str, jax.Array]:
  """Returns a stack with L tokens of each row written into a layer.

  Args:
    stack: keys and values of several layers.
    layer: index of the layer in the stack.
    positions_BL: slots to write in each row; slots past the end are dropped.
    k_BLKE: keys of the tokens.
    v_BLKE: values of the tokens.
    by_head: whether the heads are written one by one. A TPU does this in place
      if each head's slots are adjacent in memory.
  """
  arrays = {'k': k_BLKE, 'v': v_BLKE}
  if 'k_scale' in stack:
    arrays = _quantize(arrays)
  tokens = (mesh.BATCH, None, mesh.RULES['kv_heads'])
  cache, written = (None, mesh.BATCH, mesh.RULES['kv_heads']), {}
  for name, x in arrays.items():
    put = functools.partial(_put_tokens, _SLOTS[name], by_head)
    if by_head:
      put = mesh.shard_map(put, (cache, (), tokens[:1], tokens), cache)
    written[name] = put(stack[name], layer, positions_BL, x)
  return written


def _put_tokens(
  dimension: int,
  by_head: bool,
  cache: jax.Array,
  layer: jax.Array,
  slots_BL: jax.Array,
  tokens_BLK: jax.Array,
) -> jax.Array:
  """Writes L tokens of each row into an array of the cache.

  Each row writes at its own positions. XLA does this scatter in place; a slice
  update at a traced layer would copy the cache.

  Args:
    dimension: dimension of the slots.
    by_head: see `write`.
    cache: array of the cache.
    layer: see `write`.
    slots_BL: slots to write in each row.
    tokens_BLK: the new values, [B, L, K] or [B, L, K, E].
  """
  # All tokens of all rows, in one list.
  slots_T, each = slots_BL.reshape(-1), slice(None)
  tokens_TK = tokens_BLK.reshape(-1, *tokens_BLK.shape[2:])
  rows_T = jnp.arange(slots_T.shape[0]) // slots_BL.shape[1]
  if not by_head:
    where = (layer, rows_T, *[each] * (dimension - 2), slots_T)
  else:
    heads = jnp.arange(tokens_TK.shape[1])
    between = [each] * (dimension - 3)
    where = (layer, rows_T[:, None], heads, *between, slots_T[:, None])
  return cache.at[where].set(tokens_TK)


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
