"""Tests of what devices exchange when rows of the sampler's cache move."""

import collections
import functools

import jax
import numpy as np
import pytest
import tiny_sampler
from tiny_sampler import CONFIG

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import prefix_cache, sampler
from gigpo_jax.models import parameters
from gigpo_jax.tools import hlo

SHARDS, SLOTS, LENGTH = 4, 16, 28
# Rows that move together, and the bytes of their keys and values.
ROWS = 4 * SHARDS
BYTES = 2 * CONFIG.num_layers * ROWS * LENGTH * 2 * CONFIG.head_dim * 4


@pytest.fixture(name='params', scope='module')
def fixture_params():
  return tiny_sampler.params()


def _engine(**kwargs) -> sampler.Sampler:
  mesh = mesh_lib.make_mesh(1, -1, 1, devices=jax.devices()[:SHARDS])
  return sampler.Sampler(
    CONFIG,
    mesh,
    seed=0,
    prompt_buckets=(16,),
    batch_buckets=(SLOTS,),
    max_completion_tokens=12,
    stop_ids=(7,),
    vocab_size=30,
    **kwargs,
  )


def _received(engine: sampler.Sampler, params: dict) -> dict[tuple, float]:
  """Returns the bytes that a device receives, by program."""
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
  )
  return {
    key: sum(hlo.exchange_bytes(lower().compile().as_text()).values())
    for key, lower in engine.lowerings(shapes, {}).items()
    if key[0] in ('put', 'take', 'extend', 'prefill')
  }


def test_rows_of_other_shards_are_received_once(params):
  received = _received(_engine(), params)
  for move in ('put', 'take'):
    # With their state.
    rows = received[move, SLOTS, LENGTH, False]
    assert BYTES * (1 - 1 / SHARDS) <= rows < 1.01 * BYTES, move
  # Prefills of one and of four rows per shard.
  prefills = [x for key, x in received.items() if key[0] == 'prefill']
  assert len(prefills) > 1
  assert not any(prefills)


def test_conversations_exchange_nothing(params):
  received = _received(_engine(reuse='prompts', parked=4), params)
  assert received['take', SLOTS, LENGTH, True] == 0
  # Rows are put from their own shard.
  assert not any(key[0] == 'put' and not key[-1] for key in received)
  assert not any(x for key, x in received.items() if key[-1] is not False)


@pytest.mark.parametrize('draft_tokens', [0, 3])
def test_a_step_exchanges_its_outputs_only(params, draft_tokens):
  engine = _engine(draft_tokens=draft_tokens)
  (decode,) = [
    lower
    for key, lower in engine.lowerings(params, {}).items()
    if key[0] == 'decode'
  ]
  text = decode().compile().as_text()
  # Three arrays [K, L, B], one [K, B] and one [B]; and whether any is active.
  outputs = 8 * SLOTS * (3 * (1 + draft_tokens) + 1) * 4 + SLOTS
  exchanged = sum(hlo.exchange_bytes(text).values())
  assert exchanged < outputs * (1 - 1 / SHARDS) + 200


@pytest.mark.parametrize('reuse', ['none', 'prompts'])
def test_rows_of_conversations_stay_in_their_shards(params, reuse, monkeypatch):
  engine = _engine(reuse=reuse)
  requests = [
    sampler.Request(np.arange(5 + n % 7, dtype=np.int32) + n, (0, 0, 0, n, 0))
    for n in range(SLOTS)
  ]
  moved, programs = collections.Counter(), engine._programs

  def count(move, *args, is_own):
    moved[move.__name__, is_own] += 1
    return move(*args, is_own=is_own)

  for move in (programs.take, programs.put):
    counting = functools.partial(count, move)
    monkeypatch.setattr(programs, move.__name__, counting)
  alone = sampler.Sampler(
    CONFIG,
    mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
    seed=0,
    prompt_buckets=(16,),
    batch_buckets=(SLOTS,),
    max_completion_tokens=12,
    stop_ids=(7,),
    vocab_size=30,
    reuse=reuse,
  )
  expected = alone.generate(params, requests)
  placed = jax.device_put(
    params,
    mesh_lib.shardings(engine._mesh, parameters.logical_axes(CONFIG)),
  )

  def assert_equal(completions, expected):
    for a, b in zip(completions, expected, strict=True):
      np.testing.assert_array_equal(a.ids, b.ids)
      np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)

  assert_equal(engine.generate(placed, requests), expected)
  # All slots at once: four prompts for each shard.
  assert moved['put', reuse == 'prompts'] == 1
  assert {is_own for _, is_own in moved} == {reuse == 'prompts'}
  # A smaller prefill, whose rows are not those that move together.
  assert_equal(engine.generate(placed, requests[:3]), expected[:3])


@pytest.mark.parametrize('size', [8, 16, 32])
@pytest.mark.parametrize('is_own', [True, False])
def test_moved_rows_equal_those_of_numpy(is_own, size):
  engine, rng = _engine(), np.random.default_rng(size)
  programs, to_device = engine._programs, engine._cache._place

  def fill(slots):
    def values(x):
      return rng.integers(1, 99, x.shape).astype(x.dtype)

    return jax.tree.map(lambda x: jax.device_put(values(x), x.sharding), slots)

  # Rows 0, 4, 8 and 12 are the first of a shard each.
  first = np.arange(ROWS) // 4 * (size // SHARDS) if is_own else 0
  count = size // SHARDS if is_own else size
  sources = (first + rng.integers(count, size=ROWS)).astype(np.int32)
  # Two targets of each shard, and padding.
  targets = np.full(ROWS, size, np.int32)
  targets[1::4] = np.arange(SHARDS) * (size // SHARDS)
  targets[2::4] = targets[1::4] + 1
  if not is_own:
    targets = rng.permutation(targets)

  slots = fill(programs.new_slots(size, LENGTH))
  with jax.set_mesh(engine._mesh):
    rows = programs.take(slots, to_device(sources), is_own=is_own)
  cache, state = jax.device_get(slots)
  taken, taken_state = jax.device_get(rows)
  np.testing.assert_array_equal(taken_state, state[sources])
  expected = jax.tree.map(lambda x: x[:, sources], cache)
  jax.tree.map(np.testing.assert_array_equal, taken, expected)

  other = fill(programs.new_slots(size, LENGTH))
  kept = targets < size
  cache, state = jax.tree.map(np.array, jax.device_get(other))
  with jax.set_mesh(engine._mesh):
    changed = programs.put(other, rows, to_device(targets), is_own=is_own)
  state[targets[kept]] = taken_state[kept]

  def write(x, moved):
    x[:, targets[kept]] = moved[:, kept]

  jax.tree.map(write, cache, taken)
  jax.tree.map(np.testing.assert_array_equal, changed, (cache, state))


def test_parked_rows_move_between_shards():
  engine = _engine(reuse='prompts', parked=8)
  cache, nothing = engine._cache, np.zeros(0, np.int32)

  # Parked rows follow the slots. A shard has four slots and two parked rows.
  moves = [
    *((SLOTS + 5, 3), (SLOTS, 15), (SLOTS + 3, 4)),
    *((9, SLOTS + 7), (0, SLOTS + 1)),
    *((1, 14), (2, 13), (8, 5)),
  ]
  with jax.set_mesh(engine._mesh):
    cache.allocate(SLOTS, LENGTH)
    cache.slots = tiny_sampler.enumerate_rows(cache.slots, 0)
    cache._parked = tiny_sampler.enumerate_rows(cache._parked, SLOTS)
    before = np.arange(SLOTS + 8)
    cache.fill({}, [prefix_cache.Move(*m, 0, nothing, 0) for m in moves])
  expected = before.copy()
  for row, source in moves:
    expected[row] = before[source]
  moved = [x[1][:, 0] for x in (cache.slots, cache._parked)]
  np.testing.assert_array_equal(np.concatenate(moved), expected)
