"""The cache of a network: rows of slots, one slot per position.

A layer with attention has the keys and values of each position. A layer with a
`delta_net` has a state of fixed size instead: the current one, and the one
before the last token of the prompt. The prompt's is what other rows may copy
and what the next turn of a conversation continues, because a state cannot be
cut back to an earlier position.

Shapes: **B** rows, **S** slots of a row, **P** prompt tokens, **L** new tokens
of a row, **T** = B L, **K** key/value heads, **E** head size, **N** layers of a
stack.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import delta_net, layer_runs, parameters
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

# Prefix of the names of the prompt's state.
_PROMPT = 'prompt_'


def new(config: QwenConfig, num_rows: int, length: int) -> Cache:
  """Returns an empty cache of `num_rows` rows with `length` slots each."""
  size = parameters.layers_per_stack(config)
  stacks = []
  for n in range(0, config.num_layers, size):
    shapes = _stack_shapes(
      layer_runs.config_of(config, n), size, num_rows, length
    )
    stacks.append({k: jnp.zeros(x.shape, x.dtype) for k, x in shapes.items()})
  return tuple(stacks)


def _stack_shapes(
  config: QwenConfig, size: int, num_rows: int, length: int
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of a stack of equal layers."""
  if config.delta:
    kept = {
      name: jax.ShapeDtypeStruct((size, *x.shape), x.dtype)
      for name, x in delta_net.state_shapes(
        config.delta, num_rows, config.dtype
      ).items()
    }
  else:
    tokens = jax.ShapeDtypeStruct(
      (size, num_rows, length, config.num_kv_heads, config.head_dim),
      config.dtype,
    )
    kept = {'k': tokens, 'v': tokens}
  return jax.eval_shape(functools.partial(from_kept, config), kept)


def has_state(config: QwenConfig) -> bool:
  """Returns whether rows have a state besides keys and values."""
  return config.delta is not None


def reuse_problem(config: QwenConfig, reuse: str) -> str | None:
  """Returns why rows cannot be reused in a way; None: they can.

  Args:
    config: shape of the network.
    reuse: one of `prefix_cache.REUSE`.
  """
  if not has_state(config) or reuse != 'all':
    return None
  return (
    'rollout.reuse_cache=all: the model has layers with a state, which is kept '
    'for prompts only; must be prompts or none'
  )


def draft_problem(config: QwenConfig, draft_tokens: int) -> str | None:
  """Returns why drafts cannot be decoded; None: they can.

  Args:
    config: shape of the network.
    draft_tokens: tokens of a draft; 0: no drafts.
  """
  if not has_state(config) or not draft_tokens:
    return None
  return (
    f'rollout.draft_tokens={draft_tokens}: the model has layers with a state, '
    'which cannot be cut back after a wrong draft; must be 0'
  )


def slots(cache: Cache) -> int:
  """Returns the number of slots of a row."""
  return next(
    x.shape[_SLOTS[name]]
    for stack in cache
    for name, x in stack.items()
    if name in _SLOTS
  )


def token_bytes(config: QwenConfig) -> int:
  """Returns the bytes of one token in the cache of all layers."""
  return _bytes(config, 2) - _bytes(config, 1)


def state_bytes(config: QwenConfig) -> int:
  """Returns the bytes of a row that do not depend on its length."""
  return _bytes(config, 1) - token_bytes(config)


def _bytes(config: QwenConfig, length: int) -> int:
  cache = jax.eval_shape(lambda: new(config, 1, length))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def from_kept(
  config: QwenConfig, kept: dict[str, jax.Array]
) -> dict[str, jax.Array]:
  """Returns a stack of the prompts that a prefill computed.

  Args:
    config: shape of a network of such layers.
    kept: {'k', 'v'} of the tokens, see `from_tokens`; or the state [N, B, ..]
      before the last token.
  """
  if config.delta:
    return kept | {_PROMPT + name: x for name, x in kept.items()}
  return from_tokens(config, kept['k'], kept['v'])


def read_state(stack: dict, layer: jax.Array) -> dict[str, jax.Array]:
  """Returns the current state of a layer of a stack."""
  return {name: stack[name][layer] for name in delta_net.STATE}


def write_state(
  stack: dict, layer: jax.Array, state: dict[str, jax.Array]
) -> dict[str, jax.Array]:
  """Returns a stack with another current state of a layer."""
  return stack | {
    name: _set(stack[name], (layer,), x.astype(stack[name].dtype))
    for name, x in state.items()
  }


def start(cache: Cache, rows_B: jax.Array | None = None) -> Cache:
  """Returns the cache with the prompt's state as the current one.

  Args:
    cache: the cache.
    rows_B: whether to change each row; None: all.
  """

  def choose(x: jax.Array, prompt: jax.Array) -> jax.Array:
    if rows_B is None:
      return prompt
    chosen = rows_B.reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(chosen, prompt, x)

  return _map_states(
    cache,
    lambda stack, name: {name: choose(stack[name], stack[_PROMPT + name])},
  )


def keep_prompt(cache: Cache) -> Cache:
  """Returns the cache with the current state as the prompt's."""
  return _map_states(cache, lambda stack, name: {_PROMPT + name: stack[name]})


def _map_states(cache: Cache, change: Callable) -> Cache:
  """Returns the cache with arrays change(stack, name) of each state's array."""
  stacks = []
  for stack in cache:
    changed = {}
    for name in delta_net.STATE:
      if name in stack:
        changed |= change(stack, name)
    stacks.append(stack | changed)
  return tuple(stacks)


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
    # Otherwise each device could gather the tokens of all devices.
    put = mesh.shard_map(
      functools.partial(_put_tokens, _SLOTS[name], by_head),
      (cache, (), tokens[:1], tokens),
      cache,
    )
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
  heads = tokens_BLK.shape[2]
  if not by_head and mesh.heads_are_padded(heads, cache.dtype):
    put = functools.partial(_put_heads, dimension)
    apart, together = (functools.partial(put, x) for x in (True, False))
    return jax.lax.platform_dependent(
      cache, layer, slots_BL, tokens_BLK, tpu=apart, default=together
    )
  return _put_heads(dimension, by_head, cache, layer, slots_BL, tokens_BLK)


def _put_heads(
  dimension: int,
  by_head: bool,
  cache: jax.Array,
  layer: jax.Array,
  slots_BL: jax.Array,
  tokens_BLK: jax.Array,
) -> jax.Array:
  """Writes the heads of tokens together or one by one; see `_put_tokens`."""
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
  return _set(cache, where, tokens_TK)


def _set(
  x: jax.Array, where: tuple, new: jax.Array, mode: str | None = None
) -> jax.Array:
  """Returns x.at[where].set(new).

  A CPU would convert a whole bfloat16 array to float32 and back for a scatter,
  so that it moves the bits. A TPU would copy the array to get at its bits.
  """

  def put(x: jax.Array, new: jax.Array) -> jax.Array:
    return x.at[where].set(new, mode=mode)

  def put_bits(x: jax.Array, new: jax.Array) -> jax.Array:
    x_bits, new_bits = (y.view(jnp.uint16) for y in (x, new.astype(x.dtype)))
    return put(x_bits, new_bits).view(x.dtype)

  if x.dtype != jnp.bfloat16:
    return put(x, new)
  return jax.lax.platform_dependent(x, new, cpu=put_bits, default=put)


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

  def resize_array(name: str, x: jax.Array) -> jax.Array:
    x = resize_axis(x, 1, num_rows)
    return resize_axis(x, _SLOTS[name], length) if name in _SLOTS else x

  return tuple(
    {name: resize_array(name, x) for name, x in stack.items()}
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
  length = min(slots(cache), slots(rows))

  def put(name: str, x: jax.Array, new: jax.Array) -> jax.Array:
    if name not in _SLOTS:
      return _set(x, (slice(None), slots_B), new, mode='drop')
    each = (slice(None),) * (_SLOTS[name] - 2)
    new = jax.lax.slice_in_dim(new, 0, length, axis=_SLOTS[name])
    where = (slice(None), slots_B, *each, slice(length))
    return _set(x, where, new, mode='drop')

  return tuple(
    {name: put(name, x, new[name]) for name, x in stack.items()}
    for stack, new in zip(cache, rows, strict=True)
  )


def take_rows(cache: Cache, slots_B: jax.Array) -> Cache:
  """Returns some rows of the cache.

  Slices, because a TPU would copy the entire cache for a gather.
  """

  def take(x: jax.Array) -> jax.Array:
    rows = [jax.lax.dynamic_index_in_dim(x, row, axis=1) for row in slots_B]
    return jnp.concatenate(rows, axis=1)

  return jax.tree.map(take, cache)
