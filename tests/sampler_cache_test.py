"""Tests of the size of the sampler's cache, without a model."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny_learner

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import prefix_cache
from gigpo_jax.programs import sampler_cache


class Programs:
  """Moves rows of one number per position."""

  model = tiny_learner.CONFIG
  size_of = staticmethod(jnp.shape)

  def new_slots(self, rows: int, length: int) -> jax.Array:
    return jnp.zeros((rows, length))

  def take(
    self, slots: jax.Array, indices: jax.Array, *, is_own: bool
  ) -> jax.Array:
    assert is_own
    return slots[indices]

  def put(
    self, slots: jax.Array, rows: jax.Array, indices: jax.Array, *, is_own: bool
  ) -> jax.Array:
    assert is_own
    length = min(slots.shape[1], rows.shape[1])
    return slots.at[indices, :length].set(rows[:, :length], mode='drop')

  def extend(self, params: dict, *inputs: jax.Array) -> jax.Array:
    *_, rows = inputs
    return rows


def _make(num_parked: int = 0, chunk: int = 0) -> sampler_cache.SlotCache:
  return sampler_cache.SlotCache(
    Programs(),
    mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
    num_slots=4,
    num_parked=num_parked,
    max_length=16,
    prefill_sizes=((1, 8), (2, 8)),
    reuse='prompts',
    chunk=chunk,
  )


def _size(cache: sampler_cache.SlotCache) -> tuple[int, int]:
  assert cache.slots.shape == (cache.rows, cache.length)
  return cache.rows, cache.length


def test_the_cache_grows_at_once_and_shrinks_after_four_steps():
  cache = _make()
  cache.fit(2, 8)
  assert _size(cache) == (2, 8)
  # One dimension grows, the other does not shrink.
  cache.fit(1, 16)
  assert _size(cache) == (2, 16)
  for rows, length, size in (
    *[(2, 8, (2, 16))] * 3,
    (2, 16, (2, 16)),  # A step that needs all starts the count again.
    *[(2, 8, (2, 16))] * 3,
    (1, 8, (1, 8)),
    *[(1, 4, (1, 8))] * 3,
    (4, 4, (4, 8)),  # So does growth.
    *[(1, 4, (4, 8))] * 3,
    (1, 4, (1, 4)),
  ):
    cache.fit(rows, length)
    assert _size(cache) == size


def test_clearing_starts_the_count_again():
  cache = _make()
  cache.fit(2, 8)
  for _ in range(3):
    cache.fit(1, 8)
  cache.clear()
  for _ in range(3):
    cache.fit(1, 8)
    assert _size(cache) == (2, 8)


def test_rows_that_hold_tokens_keep_them():
  cache = _make(num_parked=3)
  cache.fit(3, 8)
  parked = cache._parked
  assert parked.shape == (3, 16)
  # The last one waits for the fourth row.
  for n, conversation in enumerate('abcd'):
    prompt = np.arange(3, dtype=np.int32) + 10 * n
    assert cache.prefixes.place(prompt, conversation) == (n, 0)
  cache.slots = jnp.arange(1.0, 4)[:, None] * jnp.ones((3, 8))
  # More rows are held than move together.
  cache.fit(4, 16)
  expected = np.zeros((4, 16))
  expected[:3, :8] = [[1], [2], [3]]
  np.testing.assert_array_equal(cache.slots, expected)
  assert cache._parked is parked
  # Nothing is left of a cache that was released.
  cache.release()
  cache.fit(1, 4)
  np.testing.assert_array_equal(cache.slots, np.zeros((1, 4)))


def test_chunks_of_rows_with_similar_lengths_are_prefilled_together():
  cache = _make(chunk=8)
  cache.fit(4, 16)
  moves = [
    prefix_cache.Move(row, None, 0, np.ones(length, np.int32), 0)
    for row, length in enumerate((1, 16, 1, 16))
  ]
  # Two rows move together: two chunks of the long ones, one of the others.
  assert cache.fill({}, moves) == (2 + 1) * 2 * 8
