"""Rows of a sampler's slots on the devices: new rows, their size, their moves.

Each copy of the model, a shard, holds an equal part of the rows. Rows that move
within a shard are not exchanged between devices. For others, there are separate
programs, whose exchange grows with the number of all rows that move together.

Shapes: **B** slots, **R** rows that move together.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import kv_cache, qwen

# Keys and values, and the fields of `sampler_programs.STATE`, [B, X].
Slots = tuple[kv_cache.Cache, jax.Array]

# Mesh axes of the arrays of a cache, and of the state.
_CACHE, _STATE = (None, mesh.BATCH, mesh.RULES['kv_heads']), (mesh.BATCH,)


def new_slots(
  config: qwen.QwenConfig, num_fields: int, rows: int, length: int
) -> Slots:
  """Returns empty slots whose state has a number of fields."""
  state_BX = jnp.zeros((rows, num_fields), jnp.int32)
  return kv_cache.new(config, rows, length), state_BX


def resize(slots: Slots, rows: int, length: int) -> Slots:
  """Pads or truncates the slots of each shard to its part of a size."""
  cache, state_BX = slots
  own = rows // _num_shards()

  def resize_state(state_BX: jax.Array) -> jax.Array:
    padding = max(0, own - state_BX.shape[0])
    return jnp.pad(state_BX[:own], ((0, padding), (0, 0)))

  def resize_cache(cache: kv_cache.Cache) -> kv_cache.Cache:
    return kv_cache.resize(cache, own, length)

  return (
    _on_shards(resize_cache, _CACHE)(cache),
    _on_shards(resize_state, _STATE)(state_BX),
  )


def take(
  row_size: tuple[int, int], is_own: bool, slots: Slots, indices_R: jax.Array
) -> Slots:
  """Returns copies of some rows.

  Args:
    row_size: number and length of the rows that move together.
    is_own: whether each row stays in its shard; static.
    slots: the slots.
    indices_R: indices of the rows.
  """
  cache, state_BX = slots
  each = () if not is_own else (mesh.BATCH,)
  fetch = functools.partial(
    _take_own if is_own else _take_any, _rows_of_shard(slots)
  )
  rows = (
    _on_shards(fetch, _CACHE, each)(cache, indices_R),
    _on_shards(fetch, (None, *_STATE), each)(state_BX[None], indices_R)[0],
  )
  return resize(rows, *row_size)


def _take_own(size: int, arrays, indices_R: jax.Array):
  """Returns rows of this shard from a tree of arrays [N, B, ..]."""
  return kv_cache.take_rows(arrays, indices_R - _first_row(size))


def _take_any(size: int, arrays, indices_R: jax.Array):
  """Returns this shard's part of rows of all shards; see `_take_own`.

  A sum of zeros and one row moves it. The layers are moved one by one, because
  each shard holds all R rows until they are added up.
  """
  if _num_shards() == 1:
    return _take_own(size, arrays, indices_R)
  index_R = indices_R - _first_row(size)
  is_here_R = (index_R >= 0) & (index_R < size)
  index_R = jnp.clip(index_R, 0, size - 1)

  def take_layer(x: jax.Array) -> jax.Array:
    is_here = is_here_R.reshape(-1, *[1] * (x.ndim - 1))
    rows = jnp.where(is_here, x[index_R], jnp.zeros((), x.dtype))
    return jax.lax.psum_scatter(
      rows, mesh.BATCH, scatter_dimension=0, tiled=True
    )

  return jax.tree.map(lambda x: jax.lax.map(take_layer, x), arrays)


def put(is_own: bool, slots: Slots, rows: Slots, indices_R: jax.Array) -> Slots:
  """Writes rows into slots.

  Args:
    is_own: whether each row stays in its shard; static.
    slots: the slots.
    rows: the rows; positions beyond the length of the slots are dropped.
    indices_R: the slot of each row; rows for slots past the end are dropped.
  """
  (cache, state_BX), (new_rows, new_RX) = slots, rows
  size = _rows_of_shard(slots)

  def insert(function: Callable, axes: tuple, old, new):
    if not is_own:
      return function(old, new, indices_R)

    def insert_own(old, new, indices_R):
      return function(old, new, indices_R - _first_row(size))

    return _on_shards(insert_own, axes, axes, (mesh.BATCH,))(
      old, new, indices_R
    )

  return (
    insert(kv_cache.insert, _CACHE, cache, new_rows),
    insert(_insert_state, _STATE, state_BX, new_RX),
  )


def _insert_state(
  state_BX: jax.Array, new_RX: jax.Array, indices_R: jax.Array
) -> jax.Array:
  return state_BX.at[indices_R].set(new_RX, mode='drop')


def size_of(slots: Slots) -> tuple[int, int]:
  """Returns the number of rows of slots, and their length."""
  cache, state_BX = slots
  return state_BX.shape[0], kv_cache.slots(cache)


def _num_shards() -> int:
  return math.prod(map(mesh.axis_size, mesh.BATCH))


def _rows_of_shard(slots: Slots) -> int:
  return size_of(slots)[0] // _num_shards()


def _first_row(size: int) -> jax.Array | int:
  """Returns the first row of this shard, of shards of a size."""
  if _num_shards() == 1:
    return 0
  return jax.lax.axis_index(mesh.BATCH) * size


def _on_shards(function: Callable, *inputs: tuple) -> Callable:
  """Maps a function over shards; its result is sharded like its first input."""
  if _num_shards() == 1:
    return function
  return mesh.shard_map(function, inputs, inputs[0])
