"""Tests of the sampler: streams, other requests, stops, log-probs, memory."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import reference
import tiny_sampler
from tiny_sampler import CONFIG

from configs import alfworld
from gigpo_jax import builders, sampler
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import kv_cache, lora, parameters, quantization
from gigpo_jax.programs import sampler_cache, sampler_programs
from gigpo_jax.run import model_builders
from gigpo_jax.tools import tpu_compile

STOP = 7


@pytest.fixture(name='params', scope='module')
def fixture_params():
  return tiny_sampler.params()


def _new_sampler(**kwargs) -> sampler.Sampler:
  options = {
    'seed': 0,
    'prompt_buckets': (8, 16),
    'batch_buckets': (8, 16),
    'max_completion_tokens': 12,
    'stop_ids': (STOP,),
    'vocab_size': 30,
  }
  mesh = kwargs.pop('mesh', None) or mesh_lib.make_mesh(1, -1, 1)
  return sampler.Sampler(CONFIG, mesh, **(options | kwargs))


# Tests that look only at completions share samplers and so their programs.
_sampler = functools.cache(_new_sampler)


def _requests(count: int, length: int = 5, **sampling) -> list[sampler.Request]:
  rng = np.random.default_rng(count)
  return [
    sampler.Request(
      rng.integers(8, 30, length + i % 7).astype(np.int32),
      (0, 1, 2, i, 3),
      sampler.Sampling(**sampling),
    )
    for i in range(count)
  ]


def test_other_requests_do_not_change_tokens(params):
  engine = _sampler()
  requests = _requests(21)
  together = engine.generate(params, requests)
  backwards = engine.generate(params, requests[::-1])[::-1]
  alone = [engine.generate(params, [request])[0] for request in requests]
  for a, b, c in zip(together, backwards, alone, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.ids, c.ids)
    np.testing.assert_allclose(a.log_probs, c.log_probs, atol=1e-5)


def test_tokens_depend_on_the_first_token_of_the_prompt(params):
  """Otherwise no test of this file would notice a wrong cache."""
  requests = _requests(16)
  others = []
  for request in requests:
    prompt = request.prompt_ids.copy()
    prompt[0] = 37 - prompt[0]  # From 8 to 29.
    others.append(dataclasses.replace(request, prompt_ids=prompt))
  pairs = zip(
    _sampler().generate(params, requests),
    _sampler().generate(params, others),
    strict=True,
  )
  assert sum(a.ids.tolist() != b.ids.tolist() for a, b in pairs) > 8


@pytest.mark.parametrize('position', range(5))
def test_each_integer_of_the_stream_changes_tokens(params, position: int):
  (request,) = _requests(1)
  stream = list(request.stream)
  stream[position] += 2**30
  other = sampler.Request(request.prompt_ids, tuple(stream))
  first, second = _sampler().generate(params, [request, other])
  assert first.ids.tolist() != second.ids.tolist()


def test_tokens_depend_on_the_seed_and_not_on_the_call(params):
  requests = _requests(4)
  engine = _sampler()
  first = [c.ids.tolist() for c in engine.generate(params, requests)]
  second = [c.ids.tolist() for c in engine.generate(params, requests)]
  other = [c.ids.tolist() for c in _sampler(seed=1).generate(params, requests)]
  assert first == second
  assert first != other


def test_log_probs_equal_the_models_at_the_temperature(params):
  temperature = 0.3
  requests = _requests(8, temperature=temperature, top_k=5)
  completions = _sampler().generate(params, requests)
  for request, completion in zip(requests, completions, strict=True):
    tokens = np.concatenate([request.prompt_ids, completion.ids])
    padded = np.zeros((1, 40), np.int32)
    padded[0, : len(tokens)] = tokens
    log_probs, _ = reference.completion_log_probs(
      CONFIG,
      params,
      padded,
      np.array([len(request.prompt_ids)]),
      max_completion=12,
      temperature=temperature,
    )
    count = len(completion.ids)
    np.testing.assert_allclose(
      log_probs[0, :count], completion.log_probs, atol=1e-4
    )


def test_stop_token_ends_a_completion(params):
  completions = _sampler(max_completion_tokens=30).generate(
    params, _requests(32)
  )
  reasons = {completion.finish_reason for completion in completions}
  assert reasons == {'stop', 'length'}
  for completion in completions:
    assert (completion.ids[-1] == STOP) == (completion.finish_reason == 'stop')
    assert STOP not in completion.ids[:-1]
    assert len(completion.ids) == len(completion.log_probs) <= 30


def test_unused_ids_are_never_sampled(params):
  completions = _sampler(stop_ids=()).generate(
    params, _requests(64, temperature=5.0)
  )
  assert max(completion.ids.max() for completion in completions) < 30


def test_narrowest_truncations_are_greedy(params):
  engine = _sampler()
  greedy = engine.generate(params, _requests(8, temperature=0.0))
  for narrow in ({'top_k': 1}, {'top_p': 1e-6}, {'min_p': 1.0}):
    completions = engine.generate(params, _requests(8, **narrow))
    for a, b in zip(greedy, completions, strict=True):
      np.testing.assert_array_equal(a.ids, b.ids)


@pytest.mark.parametrize(
  'narrow',
  [
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({'top_k': 4}, marks=pytest.mark.slow),
    pytest.param({'top_p': 0.7}, marks=pytest.mark.slow),
    {'top_k': 6, 'top_p': 0.7},
  ],
)
def test_frequencies_match_the_distribution(params, narrow: dict):
  count = 4096
  prompt = _requests(1)[0].prompt_ids
  sampling = sampler.Sampling(**narrow)
  requests = [
    sampler.Request(prompt, (0, 0, 0, i, 0), sampling) for i in range(count)
  ]
  completions = _sampler(
    max_completion_tokens=1, batch_buckets=(1024,)
  ).generate(params, requests)
  frequencies = (
    np.bincount([a.ids[0] for a in completions], minlength=32) / count
  )
  hidden = reference.hidden_states(CONFIG, params, prompt[None])
  logits = np.array(reference.logits(CONFIG, params, hidden)[0, -1], np.float64)
  logits[30:] = -np.inf
  probs = np.exp(logits - logits.max())
  order = np.argsort(-probs)
  probs[order[narrow.get('top_k', 32) :]] = 0
  probs /= probs.sum()
  ahead = np.cumsum(probs[order]) - probs[order]
  probs[order[ahead >= narrow.get('top_p', 1.1)]] = 0
  probs /= probs.sum()
  assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(probs))
  # Five standard errors of a frequency.
  error = 5 * np.sqrt(probs * (1 - probs) / count) + 1e-9
  assert (np.abs(frequencies - probs) <= error).all()


def test_nothing_compiles_after_warm_up(params):
  engine = _new_sampler()
  engine.warm_up(params)
  before = engine.compilations
  assert before == len(engine.lowerings(params, {}))
  for count in (1, 3, 9, 40):
    engine.generate(params, _requests(count, length=3))
    engine.generate(params, _requests(count, length=9, temperature=0.3))
  assert engine.compilations == before


def _on_platform(function, platform, *args):
  """Calls a function with a platform instead of its last argument."""
  return function(*args[:-1], platform)


@pytest.mark.parametrize(
  ('platform', 'kernel', 'lengths', 'devices'),
  [
    ('cpu', 'xla', 2, 1),
    ('gpu', 'xla', 2, 1),
    ('gpu', 'triton', 1, 1),
    ('gpu', 'triton', 1, 8),
    ('tpu', 'xla', 2, 1),
    ('tpu', 'xla', 2, 8),
  ],
)
def test_the_papers_config_needs_few_programs(
  monkeypatch, platform, kernel, lengths, devices
):
  if platform == 'gpu':
    monkeypatch.setattr(sampler, '_HOST_SELECTS', ('cpu',))
  sizes = functools.partial(_on_platform, sampler_cache.prefill_sizes, platform)
  monkeypatch.setattr(sampler_cache, 'prefill_sizes', sizes)
  prefills = 4 if platform == 'cpu' else 6
  # The reference's bfloat16 parameters need a program of their own.
  model = dataclasses.replace(CONFIG, decode_attention=kernel, dtype='bfloat16')
  config = alfworld.get_config()
  mesh = mesh_lib.make_mesh(1, -1, 1, devices=jax.devices()[:devices])
  engine = tpu_compile.make_sampler(config, model, mesh, 1)
  bundle = model_builders.ModelBundle(model, mesh, None, None, None)
  learner = builders.make_learner(config, bundle, builders.make_loss(config))
  state, base = learner.abstract_state()
  sampled = engine.lowerings(state.params, base)
  # Three numbers of slots, and four programs for each size of the cache.
  assert len(sampled) == 1 + 3 * lengths * 4 + prefills
  assert len(sampled) + len(learner.lowerings(reference=True)) <= 40


def test_a_sampler_without_truncation_samples_the_same_tokens(params):
  requests = _requests(5) + _requests(3, temperature=0.0)
  expected = _sampler().generate(params, requests)
  engine = _sampler(truncates=False)
  for a, b in zip(expected, engine.generate(params, requests), strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
  with pytest.raises(ValueError, match='truncates=True'):
    engine.generate(params, _requests(1, top_k=3))


def test_greedy_reports_log_probs_at_temperature_one(params):
  (request,) = _requests(1, temperature=0.0)
  (completion,) = _sampler().generate(params, [request])
  tokens = np.concatenate([request.prompt_ids, completion.ids])[None]
  length = len(request.prompt_ids)
  log_probs, _ = reference.completion_log_probs(
    CONFIG,
    params,
    tokens,
    np.array([length]),
    max_completion=len(completion.ids),
  )
  np.testing.assert_allclose(log_probs[0], completion.log_probs, atol=1e-4)


def test_any_of_several_stop_ids_ends_a_completion(params):
  stops = (7, 11, 13, 20)
  completions = _sampler(stop_ids=stops, max_completion_tokens=30).generate(
    params, _requests(64)
  )
  last = {int(a.ids[-1]) for a in completions if a.finish_reason == 'stop'}
  assert last <= set(stops) and len(last) > 1
  for completion in completions:
    assert not np.isin(completion.ids[:-1], stops).any()


@pytest.mark.parametrize(
  ('sizes', 'tensor'),
  [((8, 1, 1), 0), ((2, 2, 2), 0), ((1, 4, 2), 1), ((1, 8, 1), 2)],
)
def test_mesh_does_not_change_tokens(params, sizes, tensor):
  requests = _requests(11)
  expected = _sampler().generate(params, requests)
  mesh = mesh_lib.make_mesh(*sizes)
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, parameters.logical_axes(CONFIG))
  )
  engine = _sampler(mesh=mesh, tensor=tensor)
  for a, b in zip(expected, engine.generate(placed, requests), strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


@pytest.mark.parametrize('tensor', [1, 2])
def test_cache_layout_on_a_tpu(monkeypatch, tensor):
  monkeypatch.setattr(mesh_lib, 'on_tpu', lambda _: True)
  cache = {
    name: jax.ShapeDtypeStruct(shape, np.float32)
    for name, shape in (('k', (2, 4, 2, 8, 16)), ('v', (2, 4, 2, 16, 8)))
  }
  formats = mesh_lib.cache_formats(mesh_lib.make_mesh(1, -1, tensor), cache)
  # Two heads on each device, or engine.
  order = formats['k'].layout.major_to_minor
  assert order == {1: (0, 1, 4, 2, 3), 2: (2, 0, 1, 4, 3)}[tensor]
  order = formats['v'].layout.major_to_minor
  assert order == {1: (0, 1, 3, 2, 4), 2: (2, 0, 1, 3, 4)}[tensor]


@pytest.mark.parametrize(
  ('heads', 'order'), [(1, (0, 1, 2, 4, 3)), (2, (0, 1, 2, 4, 3)), (4, None)]
)
def test_a_tpu_pads_no_heads_of_an_int8_cache(monkeypatch, heads, order):
  monkeypatch.setattr(mesh_lib, 'on_tpu', lambda _: True)
  cache = {'k': jax.ShapeDtypeStruct((2, 4, heads, 8, 16), np.int8)}
  mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  layout = mesh_lib.cache_formats(mesh, cache)['k'].layout
  assert layout.major_to_minor == (order or (0, 1, 4, 2, 3))
  # Heads that are apart are written one by one.
  rng = np.random.default_rng(heads)
  tokens = rng.integers(-127, 128, (4, 3, heads, 8)).astype(np.int8)
  slots = np.arange(3) + np.arange(4)[:, None]
  empty = np.zeros((2, 4, heads, 8, 16), np.int8)
  together, apart = (
    kv_cache._put_heads(4, by_head, jax.numpy.asarray(empty), 1, slots, tokens)
    for by_head in (False, True)
  )
  np.testing.assert_array_equal(together, apart)
  assert np.count_nonzero(together) == np.count_nonzero(tokens)


# Slow: jaxlib sometimes crashes on a CPU while it runs such programs.
@pytest.mark.slow
@pytest.mark.parametrize('tensor', [1, 2])
def test_cache_layout_does_not_change_tokens(monkeypatch, params, tensor):
  requests, mesh = _requests(9), mesh_lib.make_mesh(1, -1, tensor)
  expected = _new_sampler(mesh=mesh).generate(params, requests)
  monkeypatch.setattr(mesh_lib, 'on_tpu', lambda _: True)
  engine = _new_sampler(mesh=mesh)
  engine.warm_up(params)
  compilations = engine.compilations
  completions = engine.generate(params, requests)
  assert engine.compilations == compilations
  order = engine._cache.slots[0][0]['k'].format.layout.major_to_minor
  assert order == {1: (0, 1, 4, 2, 3), 2: (2, 0, 1, 4, 3)}[tensor]
  for a, b in zip(completions, expected, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)


def test_released_memory_is_allocated_again(params):
  engine, requests = _new_sampler(prompt_buckets=(16,)), _requests(5)
  engine.warm_up(params)
  before = sum(x.nbytes for x in jax.live_arrays())
  compilations = engine.compilations
  first = engine.generate(params, requests)
  assert sum(x.nbytes for x in jax.live_arrays()) > before
  engine.release()
  assert sum(x.nbytes for x in jax.live_arrays()) == before
  second = engine.generate(params, requests)
  assert [c.ids.tolist() for c in second] == [c.ids.tolist() for c in first]
  assert engine.compilations == compilations


def test_without_room_for_two_caches_there_is_one_size(params, monkeypatch):
  expected = _sampler().generate(params, _requests(5))
  engine, allocated = _new_sampler(), []
  new_slots = engine._programs.new_slots

  def allocate(*size):
    if allocated and size != allocated[0]:
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: too much')
    allocated.append(size)
    return new_slots(*size)

  monkeypatch.setattr(engine._programs, 'new_slots', allocate)
  engine.warm_up(params)
  assert allocated == [(16, 28)]
  actual = engine.generate(params, _requests(5))
  assert set(allocated) == {(16, 28)}
  for one, other in zip(actual, expected, strict=True):
    assert one.ids.tolist() == other.ids.tolist()


def test_another_error_of_a_second_cache_is_raised(monkeypatch):
  def fail(*size):
    raise jax.errors.JaxRuntimeError(f'INTERNAL: {size}')

  engine = _sampler()
  monkeypatch.setattr(engine._programs, 'new_slots', fail)
  with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
    engine._can_resize()


def test_parameters_are_prepared_once():
  engine, calls = _new_sampler(), []
  engine._programs.prepare = lambda *args: calls.append(args) or {}
  params, other = {'w': np.ones(1)}, {'w': np.zeros(1)}
  for loaded in (
    (params, None),
    (params, None),
    (params, other),
    (other, other),
  ):
    engine.load(*loaded)
  assert calls == [(params, {}), (params, other), (other, other)]
  engine.release()
  engine.load(other, other)
  assert len(calls) == 4


def test_the_cache_grows_at_once_and_shrinks_after_four_steps():
  cache, sizes = _new_sampler()._cache, []

  def allocate(rows, length):
    sizes.append((rows, length))
    cache.rows, cache.length, cache.slots = rows, length, ()

  cache.allocate = allocate
  few = (8, 28), (16, 20), (8, 20)
  for needed in ((8, 20), (16, 20), (8, 28), *few, (16, 28), *few):
    cache.fit(*needed)
  cache.clear()
  for needed in few:
    cache.fit(*needed)
  assert sizes == [(8, 20), (16, 20), (16, 28)]
  for needed in ((8, 20), (8, 28), (16, 20), *few):
    cache.fit(*needed)
  assert sizes[3:] == [(8, 20), (8, 28), (16, 28)]


def test_no_requests_give_no_completions(params):
  assert _sampler().generate(params, []) == []


def test_too_long_prompt_raises(params):
  request = sampler.Request(np.zeros(17, np.int32), (0,) * 5)
  with pytest.raises(ValueError, match='a prompt has 17 tokens; at most 16'):
    _sampler().generate(params, [request])


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    ({'prompt_ids': np.zeros(0, np.int32)}, 'a prompt has 0 tokens'),
    (
      {'prompt_ids': np.array([0, CONFIG.vocab_size])},
      'prompt_ids: from 0 to .*; must be between 0 and .* of the model',
    ),
    ({'prompt_ids': np.array([-1, 0])}, 'prompt_ids: from -1 to 0; must be'),
    ({'prompt_ids': [1.0]}, r'prompt_ids: of shape \(1,\) and type float64'),
    ({'prompt_ids': [[1]]}, r'prompt_ids: of shape \(1, 1\) and type int64'),
    ({'stream': (0, 0, 0, 0)}, 'must be 5 integers'),
    ({'stream': (0, 0, 0, 0, 2**31)}, 'must be 5 integers'),
    ({'stream': (0, 0, 0, 0, -1)}, 'must be 5 integers'),
    ({'agent': 1}, 'agent=1: must be the index'),
    ({'agent': -1}, 'agent=-1: must be the index'),
  ],
)
def test_unusable_requests_are_refused(changes, problem):
  (request,) = _requests(1)
  with pytest.raises(ValueError, match=problem):
    _sampler().submit(dataclasses.replace(request, **changes))


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('parked', -1),
    ('decode_tokens', 0),
    ('prefill_chunk', -3),
    ('seed', -1),
    ('seed', 2**31),
    ('max_completion_tokens', 0),
  ],
)
def test_unusable_arguments_are_refused(field, value):
  with pytest.raises(ValueError, match=f'{field}={value}: must be'):
    _sampler(**{field: value})


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('temperature', -1.0),
    ('temperature', 0.0009),
    ('temperature', float('inf')),
    ('temperature', float('nan')),
    ('top_p', 0.0),
    ('top_p', 1.5),
    ('top_k', -1),
    ('min_p', -0.5),
    ('min_p', 1.5),
  ],
)
def test_unusable_options_of_sampling_are_refused(field, value):
  with pytest.raises(ValueError, match=f'{field}={value}: '):
    sampler.Sampling(**{field: value})


@pytest.mark.parametrize(
  ('field', 'value'),
  [('temperature', 0.001), ('top_p', 1.0), ('min_p', 0.0), ('min_p', 1.0)],
)
def test_limits_of_the_options_of_sampling_are_accepted(field, value):
  assert getattr(sampler.Sampling(**{field: value}), field) == value


def test_an_unknown_reuse_is_refused():
  with pytest.raises(
    ValueError, match='rollout.reuse_cache=al: unknown; must be one of'
  ):
    _sampler(reuse='al')


def test_a_chunk_is_at_most_the_longest_prompt():
  engine = _sampler(prefill_chunk=1_000_000)
  assert ('extend', 16, 16) in engine._program_keys()


def test_parked_rows_are_a_multiple_of_the_model_copies():
  engine = _sampler(reuse='prompts', parked=17)
  assert ('new', 24, 28) in engine._program_keys()


def test_slots_must_be_a_multiple_of_the_model_copies():
  with pytest.raises(ValueError, match='8 copies of the model share the slots'):
    _sampler(batch_buckets=(12,))


def test_parameter_bytes():
  # Matrices: 32 x 32 + 2 layers of 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48.
  # Others: biases and norms of 64 + 64 per layer, and a norm of 32.
  matrices = 32 * 32 + 2 * (2 * 1024 + 2 * 512 + 3 * 1536)
  others = 2 * (32 + 2 * 16 + 64) + 32
  assert sampler.parameter_bytes(CONFIG, 'model') == 4 * (matrices + others)
  # A float32 scale for each output channel.
  scales = 32 + 2 * (32 + 2 * 16 + 32 + 2 * 48 + 32)
  assert sampler.parameter_bytes(CONFIG, 'int8') == matrices + 4 * (
    others + scales
  )
  # Merged adapters take no memory; one of rank 2 has 2 * (32 + 32) numbers.
  adapters = lora.Lora(rank=2, targets=('q',))
  config = dataclasses.replace(CONFIG, adapters=adapters)
  for weights, added in (('model', 0), ('adapters', 2 * 2 * 64)):
    assert sampler.parameter_bytes(config, weights) == 4 * (
      matrices + others + added
    )


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    (
      {'prompt_buckets': (16, 8)},
      r'prompt_buckets=\(16, 8\): must be ascending',
    ),
    ({'batch_buckets': ()}, r'batch_buckets=\(\): must be ascending'),
    ({'prompt_buckets': (8, 8)}, r'prompt_buckets=\(8, 8\): must be'),
    ({'prompt_buckets': (0, 8)}, r'prompt_buckets=\(0, 8\): must be'),
    ({'vocab_size': 0}, 'vocab_size=0: the model embeds 32 tokens'),
    ({'vocab_size': 33}, 'vocab_size=33: the model embeds 32 tokens'),
  ],
)
def test_invalid_sizes_raise(kwargs: dict, message: str):
  with pytest.raises(ValueError, match=message):
    _sampler(**kwargs)


def test_empty_prompt_raises(params):
  request = sampler.Request(np.zeros(0, np.int32), (0,) * 5)
  with pytest.raises(ValueError, match='a prompt has 0 tokens'):
    _sampler().generate(params, [request])


def test_time_and_slot_of_a_request_do_not_change_tokens(params):
  requests = _requests(30)
  engine = _sampler(decode_tokens=3)
  expected = [engine.generate(params, [request])[0] for request in requests]
  rng = np.random.default_rng(0)
  engine.load(params)
  completions, indices, left = {}, {}, list(rng.permutation(len(requests)))
  while left or engine.busy:
    # Submit a few at a time, so that other slots are free for each request.
    for _ in range(min(len(left), rng.integers(0, 5))):
      index = left.pop()
      indices[engine.submit(requests[index])] = index
    for request_id, completion in engine.step():
      completions[indices[request_id]] = completion
  for index, completion in enumerate(expected):
    np.testing.assert_array_equal(completions[index].ids, completion.ids)
    np.testing.assert_allclose(
      completions[index].log_probs, completion.log_probs, atol=1e-5
    )
    assert completions[index].finish_reason == completion.finish_reason


@pytest.mark.parametrize(
  'decode_tokens',
  [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 12, 100))],
)
def test_decode_tokens_does_not_change_tokens(params, decode_tokens):
  requests = _requests(11)
  expected = _sampler().generate(params, requests)
  completions = _sampler(decode_tokens=decode_tokens).generate(params, requests)
  for a, b in zip(expected, completions, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)


def test_identical_prompts_share_one_prefill(params):
  engine = _new_sampler()
  first, second = _requests(2)
  copies = [
    dataclasses.replace(first, stream=(0, 0, 0, member, 0))
    for member in range(5)
  ]
  completions = engine.generate(params, [first, second, *copies])
  assert engine.stats.prefill_tokens == sum(
    len(request.prompt_ids) for request in (first, second)
  )
  assert engine.stats.reused_tokens == 5 * len(first.prompt_ids)
  for request, completion in zip(copies, completions[2:], strict=True):
    (alone,) = engine.generate(params, [request])
    np.testing.assert_array_equal(alone.ids, completion.ids)


def test_prompt_of_a_finished_request_is_reused(params):
  engine = _new_sampler()
  engine.load(params)
  (request,) = _requests(1)
  completions = []
  for _ in range(3):
    engine.submit(request)
    while engine.busy:
      completions += [completion for _, completion in engine.step()]
  assert engine.stats.prefill_tokens == len(request.prompt_ids)
  for completion in completions:
    np.testing.assert_array_equal(completion.ids, completions[0].ids)
  # Other parameters need another prefill of the prompt.
  engine.generate(params | {'norm': 2 * params['norm']}, [request])
  assert engine.stats.prefill_tokens == 2 * len(request.prompt_ids)


def test_requests_have_their_own_sampling_and_limit(params):
  all_options = [
    {'temperature': 0.0},
    {'temperature': 0.7, 'top_k': 3},
    {'top_p': 0.5},
    {'min_p': 0.3},
    {},
  ]
  requests = [
    dataclasses.replace(
      request, sampling=sampler.Sampling(**options), max_tokens=limit
    )
    for request in _requests(3)
    for options in all_options
    for limit in (1, 4, None)
  ]
  engine = _sampler()
  together = engine.generate(params, requests)
  for request, completion in zip(requests, together, strict=True):
    (alone,) = engine.generate(params, [request])
    np.testing.assert_array_equal(alone.ids, completion.ids)
    assert len(completion.ids) <= (request.max_tokens or 12)
    if len(completion.ids) == request.max_tokens and completion.ids[-1] != STOP:
      assert completion.finish_reason == 'length'


# Slow: jaxlib has crashed in such a run once.
@pytest.mark.slow
def test_programs_without_conditionals_sample_the_same_tokens(
  params, monkeypatch
):
  all_options = [{}, {'temperature': 0.0}, {'temperature': 0.7, 'top_k': 3}]
  plain, mixed = (
    [
      dataclasses.replace(request, sampling=sampler.Sampling(**options))
      for request in _requests(7)
      for options in chosen
    ]
    for chosen in (all_options[:1], all_options)
  )
  device = _new_sampler()
  monkeypatch.setattr(sampler, '_HOST_SELECTS', ('cpu',))
  host = _new_sampler()
  host.warm_up(params)
  before = host.compilations
  choices = [
    engine.lower(params, {})['decode']
    .compile()
    .as_text()
    .count(' conditional(')
    for engine in (device, host)
  ]
  # One conditional for truncation and one for greedy rows.
  assert choices == [2, 0]
  for requests in (plain, mixed):
    for actual, expected in zip(
      host.generate(params, requests),
      device.generate(params, requests),
      strict=True,
    ):
      np.testing.assert_array_equal(actual.ids, expected.ids)
      for name in ('log_probs', 'sampled_log_probs'):
        a, b = getattr(actual, name), getattr(expected, name)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
  assert host.compilations == before


@pytest.mark.parametrize('limit', [0, 13])
def test_invalid_max_tokens_raises(params, limit):
  (request,) = _requests(1)
  with pytest.raises(ValueError, match=f'max_tokens={limit}: must be between'):
    _sampler().generate(
      params, [dataclasses.replace(request, max_tokens=limit)]
    )


def test_find_stop_ends_completions(params):
  plain = _sampler().generate(params, _requests(20))

  def stop(ids: np.ndarray, new: int) -> int | None:
    # The second of two tokens that are above 20.
    for end in range(max(len(ids) - new, 1), len(ids)):
      if ids[end - 1] > 20 and ids[end] > 20:
        return end + 1
    return None

  for decode_tokens in (1, 4):
    engine = _sampler(find_stop=stop, decode_tokens=decode_tokens)
    for full, stopped in zip(
      plain, engine.generate(params, _requests(20)), strict=True
    ):
      expected = stop(full.ids, len(full.ids)) or len(full.ids)
      np.testing.assert_array_equal(stopped.ids, full.ids[:expected])
      assert len(stopped.log_probs) == expected
      assert len(stopped.sampled_log_probs) == expected
      if expected < len(full.ids):
        assert stopped.finish_reason == 'stop'


def test_a_completion_may_keep_no_token():
  (request,) = _requests(1)
  entry = sampler.Entry(1, request, 12, None)
  entry.outputs.append(tuple(np.ones((3, 2))))
  completion = entry.completion(2, True, frozenset(), lambda ids, new: 0)
  assert completion.finish_reason == 'stop' and not len(completion.ids)


def test_a_stop_token_may_be_the_only_token():
  (request,) = _requests(1)
  entry = sampler.Entry(1, request, 12, None)
  entry.outputs.append(tuple(np.full((3, 1), STOP)))
  completion = entry.completion(1, False, frozenset({STOP}), None)
  assert completion.finish_reason == 'stop' and len(completion.ids) == 1


@pytest.mark.parametrize('reuse', ['none', 'prompts'])
def test_prompts_are_prefilled_by_their_agents(params, monkeypatch, reuse):
  mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  engine, seen = _sampler(reuse=reuse, mesh=mesh), []
  cache, programs = engine._cache, engine._programs
  monkeypatch.setattr(cache, '_put', lambda rows, moves: None)
  monkeypatch.setattr(cache, '_take', lambda moves: None)
  # The agents are the third argument after the parameters, or the fourth.
  monkeypatch.setattr(
    programs, 'prefill', lambda _, *args: seen.append(args[2])
  )
  monkeypatch.setattr(programs, 'extend', lambda _, *args: seen.append(args[3]))
  engine.load(params)
  for n, agent in enumerate((1, 0, 2)):
    request = sampler.Request(
      np.full(4, n + 8, np.int32), (n,) * 5, agent=agent
    )
    engine._waiting.append(sampler.Entry(n, request, 12, None))
  entries = engine._admit()
  engine.release()
  (agents,) = seen
  assert agents[:3].tolist() == [1, 0, 2] and not np.asarray(agents)[3:].any()
  integers, _ = sampler._step_inputs(entries, 4)
  names = sampler_programs.INTEGERS
  assert integers[:, names.index('agent')].tolist() == [1, 0, 2, 0]


def test_slots_without_a_request_exclude_no_tokens():
  _, floats = sampler._step_inputs([], 2)
  for temperature, top_p, min_p in floats:
    options = sampler.Sampling(temperature, top_p=top_p, min_p=min_p)
    assert options.temperature == 1 and not options.truncates


def test_sampled_log_probs_by_hand(params):
  (request,) = _requests(1, top_k=4)
  (completion,) = _sampler(max_completion_tokens=1).generate(params, [request])
  hidden = reference.hidden_states(CONFIG, params, request.prompt_ids[None])
  logits = np.asarray(
    reference.logits(CONFIG, params, hidden)[0, -1], np.float64
  )
  best = np.sort(logits[:30])[-4:]
  chosen = logits[completion.ids[0]]
  np.testing.assert_allclose(
    completion.sampled_log_probs[0],
    chosen - np.log(np.exp(best).sum()),
    atol=1e-4,
  )
  np.testing.assert_allclose(
    completion.log_probs[0], chosen - np.log(np.exp(logits).sum()), atol=1e-4
  )


def test_int8_weights_are_close_and_sharded(params):
  requests = _requests(24, temperature=0.0)
  quantized = jax.jit(quantization.quantize, static_argnums=0)(CONFIG, params)
  matrix = params['layers']['mlp']['down']
  integers = quantized['layers']['mlp']['down']
  scale = quantized['layers']['mlp']['down_scale']
  assert integers.dtype == np.int8 and scale.shape == (2, 1, 32)
  # Half a step; a step is the channel's largest weight over 127.
  error = np.abs(integers * np.asarray(scale) - matrix)
  assert (error <= 0.5001 * np.asarray(scale)).all()
  assert (np.abs(integers).max(axis=1) == 127).all()
  mesh = mesh_lib.make_mesh(2, 2, 2)
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, parameters.logical_axes(CONFIG))
  )
  expected = _sampler().generate(params, requests)
  rounded = _sampler(weights='int8').generate(params, requests)
  sharded = _sampler(weights='int8', mesh=mesh).generate(placed, requests)
  for a, b, c in zip(expected, rounded, sharded, strict=True):
    assert np.abs(a.log_probs[0] - b.log_probs[0]) < 0.2
    np.testing.assert_array_equal(b.ids, c.ids)
  pairs = zip(expected, rounded, strict=True)
  assert any(a.log_probs[0] != b.log_probs[0] for a, b in pairs)
  with pytest.raises(
    ValueError, match='rollout.weights=int4: unknown; must be one of'
  ):
    _sampler(weights='int4')
