"""Tests of the key/value cache across turns: equal samples, fewer tokens."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_sampler
from tiny_sampler import CONFIG

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import prefix_cache, sampler
from gigpo_jax.models import parameters

MEMBERS, TURNS = 6, 4
# Prompts of all turns of a conversation that shares its first prompt.
FIRST, NEW, MAX_COMPLETION = 9, 3, 6


@pytest.fixture(name='params', scope='module')
def fixture_params():
  return tiny_sampler.params()


def _sampler(mesh=None, config=CONFIG, **kwargs) -> sampler.Sampler:
  options = {
    'seed': 0,
    'prompt_buckets': (16, 40),
    'batch_buckets': (4,),
    'max_completion_tokens': MAX_COMPLETION,
    'stop_ids': (7,),
    'vocab_size': 30,
    'decode_tokens': 4,
    'truncates': False,
    'prefill_chunk': 8,
  }
  if mesh is None:
    mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  return sampler.Sampler(config, mesh, **(options | kwargs))


def _first_prompts(seed: int) -> dict[int, np.ndarray]:
  """Returns the first prompt of each member: two groups of identical ones."""
  rng = np.random.default_rng(seed)
  prompts = [rng.integers(8, 30, FIRST + n).astype(np.int32) for n in range(2)]
  return {member: prompts[member % 2] for member in range(MEMBERS)}


def _request(member: int, turn: int, prompt: np.ndarray) -> sampler.Request:
  stream = (0, 1, 2, member, turn)
  return sampler.Request(prompt, stream, conversation=stream[:-1])


def _reply(
  seed: int, member: int, turn: int, prompt: np.ndarray, ids: np.ndarray
) -> np.ndarray:
  """Returns the next prompt: everything so far, then the environment's ids."""
  rng = np.random.default_rng((seed, member, turn))
  return np.concatenate([prompt, ids, rng.integers(8, 30, NEW)]).astype(
    np.int32
  )


def _separate_turns(engine, params, seed: int = 0) -> dict:
  """Returns the completions by (member, turn) if nothing survives a turn."""
  prompts, completions = _first_prompts(seed), {}
  for turn in range(TURNS):
    requests = [_request(m, turn, prompt) for m, prompt in prompts.items()]
    for m, done in enumerate(engine.generate(params, requests)):
      completions[m, turn] = done
      prompts[m] = _reply(seed, m, turn, prompts[m], done.ids)
  return completions


def _conversations(engine, params, seed: int = 0, schedule: int = 0) -> dict:
  """Returns the same completions of overlapping conversations.

  Args:
    engine: the sampler.
    params: parameters of the policy.
    seed: decides the prompts.
    schedule: decides how long each environment takes.
  """
  rng = np.random.default_rng(schedule)
  prompts, completions, pending = _first_prompts(seed), {}, {}
  engine.load(params)
  # The turn of each member, and the step at which its environment replies.
  turns = dict.fromkeys(prompts, 0)
  replies = {m: int(rng.integers(3)) for m in prompts}
  step = 0
  while replies or engine.busy:
    for m in [m for m, at in replies.items() if at <= step]:
      del replies[m]
      if turns[m] == TURNS:
        engine.end_conversation(_request(m, 0, prompts[m]).conversation)
      else:
        request = _request(m, turns[m], prompts[m])
        pending[engine.submit(request)] = m
    for request_id, done in engine.step():
      m = pending.pop(request_id)
      completions[m, turns[m]] = done
      prompts[m] = _reply(seed, m, turns[m], prompts[m], done.ids)
      turns[m] += 1
      replies[m] = step + int(rng.integers(4))
    step += 1
  return completions


def _assert_equal(actual: dict, expected: dict, atol: float = 0.0) -> None:
  assert len(expected) == MEMBERS * TURNS
  for key, completion in expected.items():
    np.testing.assert_array_equal(actual[key].ids, completion.ids)
    for name in ('log_probs', 'sampled_log_probs'):
      np.testing.assert_allclose(
        getattr(actual[key], name), getattr(completion, name), rtol=0, atol=atol
      )


@pytest.fixture(name='chunks', scope='module')
def fixture_chunks() -> sampler.Sampler:
  """Returns a sampler that reuses nothing of earlier turns."""
  return _sampler()


@pytest.fixture(name='prompts', scope='module')
def fixture_prompts() -> sampler.Sampler:
  return _sampler(reuse='prompts')


@pytest.mark.parametrize('seed', range(3))
def test_reuse_changes_no_bit_of_ids_and_log_probs(
  params, chunks, prompts, seed
):
  expected = _separate_turns(chunks, params, seed)
  without = chunks.take_stats()
  # Six conversations and four slots: some are evicted.
  actual = _conversations(prompts, params, seed, schedule=seed)
  reusing = prompts.take_stats()
  _assert_equal(actual, expected)
  assert reusing.prefill_tokens < 0.8 * without.prefill_tokens
  assert reusing.reused_tokens > without.reused_tokens


def test_order_slots_and_parking_change_no_bit(params, prompts):
  expected = _separate_turns(prompts, params)
  prompts.take_stats()
  parked = _sampler(reuse='prompts', parked=3)
  parked.warm_up(params)
  compilations = parked.compilations
  counts = []
  for schedule in range(3):
    _assert_equal(_conversations(prompts, params, 0, schedule), expected)
    _assert_equal(_conversations(parked, params, 0, schedule), expected)
    counts.append([x.take_stats().prefill_tokens for x in (prompts, parked)])
  assert parked.compilations == compilations
  evicting, parking = np.sum(counts, axis=0)
  assert parking < evicting


def test_rows_are_copied_between_slots_and_parked_rows():
  cache = _sampler(reuse='prompts', parked=3)._cache
  cache.allocate(4, 46)
  cache.slots = tiny_sampler.enumerate_rows(cache.slots, 0)
  cache._parked = tiny_sampler.enumerate_rows(cache._parked, 10)
  nothing = np.zeros(0, np.int32)
  cache.fill(
    {},
    [
      prefix_cache.Move(row, source, 0, nothing, 0)
      for row, source in ((6, 0), (1, 2), (3, 4))
    ],
  )
  assert cache.slots[1][:, 0].tolist() == [0, 2, 2, 10]
  assert cache._parked[1][:, 0].tolist() == [10, 11, 0]
  cache.release()
  assert cache.slots is None and cache._parked is None


def test_a_cache_of_another_size_holds_the_same_rows():
  cache = _sampler(batch_buckets=(2, 6, 9))._cache
  cache.allocate(6, 22)
  cache.slots = tiny_sampler.enumerate_rows(cache.slots, 1)
  prompts = [np.array([n, 8, 9], np.int32) for n in range(6)]
  for n, prompt in enumerate(prompts):
    assert cache.prefixes.place(prompt) == (n, 0)
  # More rows than move together.
  cache.fit(9, 46)
  assert cache.slots[1][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0]
  for n in range(6):
    cache.prefixes.finish(n, np.array([7], np.int32))
  for _ in range(4):
    cache.fit(2, 22)
  assert cache.slots[1][:, 0].tolist() == [1, 2]
  # The row of the last prompt is lost.
  assert cache.prefixes.place(prompts[1]) == (0, 3)
  assert cache.prefixes.place(prompts[5]) == (1, 0)


def test_reuse_of_completions_keeps_the_tokens(params, prompts):
  engine = _sampler(reuse='all', parked=MEMBERS)
  for seed in range(3):
    expected = _separate_turns(prompts, params, seed)
    prompts.take_stats()
    actual = _conversations(engine, params, seed)
    _assert_equal(actual, expected, atol=1e-5)
    # Two prompts are prefilled once each, then what the environments add: a
    # turn's last sampled token and its new ids, whose last is decoded.
    assert engine.take_stats().prefill_tokens == (
      2 * FIRST + 1 - 2 + MEMBERS * (TURNS - 1) * NEW
    )


def test_whole_prompts_give_the_same_tokens(params, prompts):
  whole = _sampler(prefill_chunk=0)
  expected = _separate_turns(whole, params)
  _assert_equal(_conversations(prompts, params), expected, atol=1e-5)


@pytest.mark.slow
def test_an_int8_cache_is_reused(params):
  config = dataclasses.replace(CONFIG, cache='int8')
  engine = _sampler(config=config, reuse='prompts')
  expected = _separate_turns(engine, params)
  _assert_equal(_conversations(engine, params), expected)


@pytest.mark.slow
def test_a_mesh_does_not_change_tokens(params, prompts):
  mesh = mesh_lib.make_mesh(1, 2, 2, devices=jax.devices()[:4])
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, parameters.logical_axes(CONFIG))
  )
  engine = _sampler(mesh, reuse='prompts', parked=1)
  actual = _conversations(engine, placed)
  _assert_equal(actual, _separate_turns(prompts, params), atol=1e-4)


def test_a_wrong_conversation_changes_nothing(params, prompts):
  first = _first_prompts(0)
  requests = [_request(m, 0, prompt) for m, prompt in first.items()]
  expected = prompts.generate(params, requests)
  wrong = [dataclasses.replace(r, conversation='same') for r in requests]
  for a, b in zip(prompts.generate(params, wrong), expected, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)


def test_nothing_is_reused_after_a_load(params, prompts):
  request = _request(1, 0, _first_prompts(0)[1])
  prompts.take_stats()
  prompts.generate(params, [request])
  before = prompts.take_stats().prefill_tokens
  other = params | {'norm': 2 * params['norm']}
  (actual,) = prompts.generate(other, [request])
  stats = prompts.take_stats()
  assert (stats.prefill_tokens, stats.reused_tokens) == (before, 0)
  # Two chunks of 8 tokens, of four rows.
  assert (before, stats.padded_tokens) == (FIRST, 2 * 4 * 8)
  (expected,) = _sampler(reuse='prompts').generate(other, [request])
  np.testing.assert_array_equal(actual.log_probs, expected.log_probs)
  prompts.release()
  prompts.generate(params, [request])
  assert prompts.take_stats().reused_tokens == 0


def test_counters_and_spans_by_hand(params, prompts):
  prompt, steps = _first_prompts(0)[0], 0
  prompts.load(params, trace=True)
  prompts.take_stats()
  for member in range(2):
    prompts.submit(_request(member, 0, prompt))
  completions = []
  while prompts.busy:
    completions += prompts.step()
    steps += prompts._in_flight is not None
  stats = prompts.take_stats()
  assert stats.decode_tokens == sum(len(done.ids) for _, done in completions)
  # Steps of four tokens and four slots. The second prompt is a copy.
  assert stats.slot_steps == 4 * 4 * steps
  assert {span[:2] for span in stats.spans} == {
    (0, 'prefill'),
    (0, 'decode'),
    (1, 'decode'),
  }
  assert all(start <= end for *_, start, end in stats.spans)
  prompts.generate(params, [_request(0, 0, prompt)])
  assert not prompts.take_stats().spans


def test_a_load_drops_unfinished_requests(params, prompts):
  first = _first_prompts(0)
  requests = [_request(m, 0, prompt) for m, prompt in first.items()]
  (expected,) = prompts.generate(params, requests[:1])
  prompts.load(params)
  for request in requests:
    prompts.submit(request)
  prompts.step()  # Four have a slot, two wait.
  prompts.submit(requests[0])
  prompts.load(params)
  assert not prompts.busy
  request_id = prompts.submit(requests[0])
  finished = []
  while prompts.busy:
    finished += prompts.step()
  ((returned, actual),) = finished
  assert returned == request_id
  np.testing.assert_array_equal(actual.ids, expected.ids)


def test_a_conversation_waits_in_a_cache_for_its_longest_prompt(
  params, chunks, prompts
):
  long = np.arange(8, 38).astype(np.int32) % 30
  longer = np.concatenate([long, long[:5]])
  (expected,) = chunks.generate(params, [_request(0, 1, longer)])
  prompts.generate(params, [_request(0, 0, long)])
  # Steps of short requests, in which the cache might become shorter.
  finished = []
  for request in (
    *[sampler.Request(long[:3], (0, 0, 0, n, 0)) for n in range(5)],
    _request(0, 1, longer),
  ):
    prompts.submit(request)
    while prompts.busy:
      finished += prompts.step()
  _, actual = finished[-1]
  np.testing.assert_array_equal(actual.ids, expected.ids)
  np.testing.assert_array_equal(actual.log_probs, expected.log_probs)


def test_a_row_that_is_copied_next_is_not_dropped(params):
  engine = _sampler(reuse='prompts', batch_buckets=(2, 4))
  requests = [
    sampler.Request(np.arange(n, n + 9, dtype=np.int32), (0, 0, 0, n, 0))
    for n in range(4)
  ]
  *_, expected = engine.generate(params, requests)
  engine.submit(requests[3])
  engine._cache._oversized_steps = 3  # The next step may shrink the cache.
  finished = []
  while engine.busy:
    finished += engine.step()
  ((_, actual),) = finished
  np.testing.assert_array_equal(actual.ids, expected.ids)
  np.testing.assert_array_equal(actual.log_probs, expected.log_probs)


def test_an_ended_conversation_frees_its_slot(params):
  engine = _sampler(reuse='prompts', batch_buckets=(2, 4))
  engine.load(params)
  first = _first_prompts(0)
  for m in range(4):
    engine.submit(_request(m, 0, first[m]))
  while engine.busy:
    engine.step()
  assert engine._cache.prefixes.needed()[0] == 4
  for m in (1, 2, 3):
    engine.end_conversation(_request(m, 0, first[m]).conversation)
  engine.step()
  assert engine._cache.prefixes.needed()[0] == 1
  # A conversation that ends before its last request has a slot.
  engine.submit(_request(4, 0, first[4]))
  engine.end_conversation(_request(4, 0, first[4]).conversation)
  while engine.busy:
    engine.step()
  assert engine._cache.prefixes.needed()[0] == 1
