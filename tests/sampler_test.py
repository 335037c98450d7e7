"""Laws of the sampler: streams, other requests, stops, log-probs, memory."""

import dataclasses

import jax
import numpy as np
import pytest
import reference

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import sampler
from gigpo_jax.models import parameters, quantization, qwen

CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  dtype='float32',
  remat='none',
)
STOP = 7


@pytest.fixture(name='params', scope='module')
def fixture_params():
  params = reference.init(CONFIG, jax.random.key(0))
  # Large enough that the distribution is neither flat nor a spike.
  return params | {'embed': 12 * params['embed']}


def _sampler(**kwargs) -> sampler.Sampler:
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


def _requests(
  number: int, length: int = 5, **sampling
) -> list[sampler.Request]:
  rng = np.random.default_rng(number)
  return [
    sampler.Request(
      rng.integers(8, 30, length + i % 7).astype(np.int32),
      (0, 1, 2, i, 3),
      sampler.Sampling(**sampling),
    )
    for i in range(number)
  ]


def test_other_requests_do_not_change_tokens(params):
  one = _sampler()
  requests = _requests(21)
  together = one.generate(params, requests)
  backwards = one.generate(params, requests[::-1])[::-1]
  alone = [one.generate(params, [request])[0] for request in requests]
  for a, b, c in zip(together, backwards, alone, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.ids, c.ids)
    np.testing.assert_allclose(a.log_probs, c.log_probs, atol=1e-5)


@pytest.mark.parametrize('position', range(5))
def test_each_integer_of_the_stream_changes_tokens(params, position: int):
  (request,) = _requests(1)
  stream = list(request.stream)
  stream[position] += 1
  other = sampler.Request(request.prompt_ids, tuple(stream))
  one, two = _sampler().generate(params, [request, other])
  assert one.ids.tolist() != two.ids.tolist()


def test_tokens_depend_on_the_seed_and_not_on_the_call(params):
  requests = _requests(4)
  one = _sampler()
  first = [c.ids.tolist() for c in one.generate(params, requests)]
  again = [c.ids.tolist() for c in one.generate(params, requests)]
  other = [c.ids.tolist() for c in _sampler(seed=1).generate(params, requests)]
  assert first == again
  assert first != other


def test_log_probs_equal_the_models_at_the_temperature(params):
  temperature = 0.6
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
  one = _sampler()
  greedy = one.generate(params, _requests(8, temperature=0.0))
  for narrow in ({'top_k': 1}, {'top_p': 1e-6}, {'min_p': 1.0}):
    found = one.generate(params, _requests(8, **narrow))
    for a, b in zip(greedy, found, strict=True):
      np.testing.assert_array_equal(a.ids, b.ids)


@pytest.mark.parametrize(
  'narrow', [{}, {'top_k': 4}, {'top_p': 0.7}, {'top_k': 6, 'top_p': 0.7}]
)
def test_frequencies_match_the_distribution(params, narrow: dict):
  number = 4096
  prompt = _requests(1)[0].prompt_ids
  sampling = sampler.Sampling(**narrow)
  requests = [
    sampler.Request(prompt, (0, 0, 0, i, 0), sampling) for i in range(number)
  ]
  completions = _sampler(
    max_completion_tokens=1, batch_buckets=(1024,)
  ).generate(params, requests)
  found = np.bincount([a.ids[0] for a in completions], minlength=32) / number
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
  assert set(np.flatnonzero(found)) <= set(np.flatnonzero(probs))
  # Five standard errors of a frequency.
  error = 5 * np.sqrt(probs * (1 - probs) / number) + 1e-9
  assert (np.abs(found - probs) <= error).all()


def test_nothing_compiles_after_warm_up(params):
  one = _sampler()
  counted = []
  one.warm_up(params, on_compiled=lambda: counted.append(1))
  assert len(counted) == one.num_programs
  before = one.compilations
  for number in (1, 3, 9, 40):
    one.generate(params, _requests(number, length=3))
    one.generate(params, _requests(number, length=9, temperature=0.3))
  assert one.compilations == before


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
  one = _sampler(mesh=mesh, tensor=tensor)
  for a, b in zip(expected, one.generate(placed, requests), strict=True):
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
  # Two heads on each device, or one.
  order = formats['k'].layout.major_to_minor
  assert order == {1: (0, 1, 4, 2, 3), 2: (2, 0, 1, 4, 3)}[tensor]
  order = formats['v'].layout.major_to_minor
  assert order == {1: (0, 1, 3, 2, 4), 2: (2, 0, 1, 3, 4)}[tensor]


# Slow: jaxlib sometimes crashes on a CPU while it runs such programs.
@pytest.mark.slow
@pytest.mark.parametrize('tensor', [1, 2])
def test_cache_layout_does_not_change_tokens(monkeypatch, params, tensor):
  requests, mesh = _requests(9), mesh_lib.make_mesh(1, -1, tensor)
  expected = _sampler(mesh=mesh).generate(params, requests)
  monkeypatch.setattr(mesh_lib, 'on_tpu', lambda _: True)
  one = _sampler(mesh=mesh)
  one.warm_up(params)
  compilations = one.compilations
  found = one.generate(params, requests)
  assert one.compilations == compilations
  order = one._cache.arrays[0]['k'].format.layout.major_to_minor
  assert order == {1: (0, 1, 4, 2, 3), 2: (2, 0, 1, 4, 3)}[tensor]
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)


def test_released_memory_is_allocated_again(params):
  one, requests = _sampler(), _requests(5)
  one.warm_up(params)
  before = sum(x.nbytes for x in jax.live_arrays())
  compilations = one.compilations
  found = one.generate(params, requests)
  assert sum(x.nbytes for x in jax.live_arrays()) > before
  one.release()
  assert sum(x.nbytes for x in jax.live_arrays()) == before
  again = one.generate(params, requests)
  assert [c.ids.tolist() for c in again] == [c.ids.tolist() for c in found]
  assert one.compilations == compilations


def test_no_requests_give_no_completions(params):
  assert _sampler().generate(params, []) == []


def test_too_long_prompt_raises(params):
  request = sampler.Request(np.zeros(17, np.int32), (0,) * 5)
  with pytest.raises(ValueError, match='a prompt has 17 tokens; at most 16'):
    _sampler().generate(params, [request])


def test_slots_must_be_a_multiple_of_the_model_copies():
  with pytest.raises(ValueError, match='8 copies of the model share the slots'):
    _sampler(batch_buckets=(12,))


def test_parameter_bytes():
  # Of 32 x 32 + 2 layers of 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48, biases
  # and norms of 64 + 64, and a norm of 32.
  matrices = 32 * 32 + 2 * (2 * 1024 + 2 * 512 + 3 * 1536)
  others = 2 * (32 + 2 * 16 + 64) + 32
  assert sampler.parameter_bytes(CONFIG, 'model') == 4 * (matrices + others)
  # A float32 scale for each output channel.
  scales = 32 + 2 * (32 + 2 * 16 + 32 + 2 * 48 + 32)
  assert sampler.parameter_bytes(CONFIG, 'int8') == matrices + 4 * (
    others + scales
  )


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    (
      {'prompt_buckets': (16, 8)},
      r'prompt_buckets=\(16, 8\): must be ascending',
    ),
    ({'batch_buckets': ()}, r'batch_buckets=\(\): must be ascending'),
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
  one = _sampler(batch_buckets=(8, 16), decode_tokens=3)
  expected = [one.generate(params, [request])[0] for request in requests]
  rng = np.random.default_rng(0)
  one.load(params)
  found, positions, left = {}, {}, list(rng.permutation(len(requests)))
  while left or one.busy:
    # Submit a few at a time, so that each request finds other slots free.
    for _ in range(min(len(left), rng.integers(0, 5))):
      position = left.pop()
      positions[one.submit(requests[position])] = position
    for request_id, completion in one.step():
      found[positions[request_id]] = completion
  for position, completion in enumerate(expected):
    np.testing.assert_array_equal(found[position].ids, completion.ids)
    np.testing.assert_allclose(
      found[position].log_probs, completion.log_probs, atol=1e-5
    )
    assert found[position].finish_reason == completion.finish_reason


@pytest.mark.parametrize('decode_tokens', [1, 5, 12, 100])
def test_decode_tokens_does_not_change_tokens(params, decode_tokens):
  requests = _requests(11)
  expected = _sampler().generate(params, requests)
  found = _sampler(decode_tokens=decode_tokens).generate(params, requests)
  for a, b in zip(expected, found, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)


def test_equal_prompts_share_one_prefill(params):
  one = _sampler()
  first, second = _requests(2)
  again = [
    dataclasses.replace(first, stream=(0, 0, 0, member, 0))
    for member in range(5)
  ]
  completions = one.generate(params, [first, second, *again])
  assert one.stats.prefill_tokens == sum(
    len(request.prompt_ids) for request in (first, second)
  )
  assert one.stats.shared_tokens == 5 * len(first.prompt_ids)
  for request, completion in zip(again, completions[2:], strict=True):
    (alone,) = one.generate(params, [request])
    np.testing.assert_array_equal(alone.ids, completion.ids)


def test_prompt_of_a_finished_request_is_reused(params):
  one = _sampler()
  one.load(params)
  (request,) = _requests(1)
  completions = []
  for _ in range(3):
    one.submit(request)
    while one.busy:
      completions += [completion for _, completion in one.step()]
  assert one.stats.prefill_tokens == len(request.prompt_ids)
  for completion in completions:
    np.testing.assert_array_equal(completion.ids, completions[0].ids)
  # Other parameters, other keys and values.
  one.generate(params | {'norm': 2 * params['norm']}, [request])
  assert one.stats.prefill_tokens == 2 * len(request.prompt_ids)


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
  one = _sampler()
  together = one.generate(params, requests)
  for request, completion in zip(requests, together, strict=True):
    (alone,) = one.generate(params, [request])
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
  device = _sampler()
  monkeypatch.setattr(sampler, '_HOST_SELECTS', ('cpu',))
  host = _sampler()
  host.warm_up(params)
  before = host.compilations
  choices = [
    one.lower(params, {})['decode'].compile().as_text().count(' conditional(')
    for one in (device, host)
  ]
  # Whether tokens are truncated, and whether a row is greedy.
  assert choices == [2, 0]
  for requests in (plain, mixed):
    for one, other in zip(
      host.generate(params, requests),
      device.generate(params, requests),
      strict=True,
    ):
      np.testing.assert_array_equal(one.ids, other.ids)
      for name in ('log_probs', 'sampled_log_probs'):
        a, b = getattr(one, name), getattr(other, name)
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
  plain = _sampler(max_completion_tokens=12).generate(params, _requests(20))

  def stop(ids: np.ndarray, new: int) -> int | None:
    # The second of two tokens that are above 20.
    for end in range(max(len(ids) - new, 1), len(ids)):
      if ids[end - 1] > 20 and ids[end] > 20:
        return end + 1
    return None

  for decode_tokens in (1, 4, 12):
    one = _sampler(find_stop=stop, decode_tokens=decode_tokens)
    for whole, cut in zip(
      plain, one.generate(params, _requests(20)), strict=True
    ):
      expected = stop(whole.ids, len(whole.ids)) or len(whole.ids)
      np.testing.assert_array_equal(cut.ids, whole.ids[:expected])
      assert len(cut.log_probs) == len(cut.sampled_log_probs) == expected
      if expected < len(whole.ids):
        assert cut.finish_reason == 'stop'


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
  found = quantized['layers']['mlp']['down']
  scale = quantized['layers']['mlp']['down_scale']
  assert found.dtype == np.int8 and scale.shape == (2, 1, 32)
  # Half a step of the largest weight of the channel, over 127.
  error = np.abs(found * np.asarray(scale) - matrix)
  assert (error <= 0.5001 * np.asarray(scale)).all()
  mesh = mesh_lib.make_mesh(2, 2, 2)
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, parameters.logical_axes(CONFIG))
  )
  expected = _sampler().generate(params, requests)
  one = _sampler(weights='int8').generate(params, requests)
  other = _sampler(weights='int8', mesh=mesh).generate(placed, requests)
  for a, b, c in zip(expected, one, other, strict=True):
    assert np.abs(a.log_probs[0] - b.log_probs[0]) < 0.2
    np.testing.assert_array_equal(b.ids, c.ids)
  pairs = zip(expected, one, strict=True)
  assert any(a.log_probs[0] != b.log_probs[0] for a, b in pairs)
  with pytest.raises(ValueError, match='rollout.weights=int4: must be one of'):
    _sampler(weights='int4')
