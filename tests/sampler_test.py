"""Laws of the sampler: streams, neighbours, truncation, stops, log-probs."""

import jax
import numpy as np
import pytest

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import sampler
from gigpo_jax.models import qwen

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
  remat=False,
)
STOP = 7


@pytest.fixture(name='params', scope='module')
def fixture_params():
  params = qwen.init(CONFIG, jax.random.key(0))
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


def _requests(number: int, length: int = 5) -> list[sampler.Request]:
  rng = np.random.default_rng(number)
  return [
    sampler.Request(
      rng.integers(8, 30, length + i % 7).astype(np.int32), (0, 1, 2, i, 3)
    )
    for i in range(number)
  ]


def test_neighbours_order_and_batch_size_change_no_token(params):
  one = _sampler()
  requests = _requests(21)
  together = one.generate(params, requests)
  backwards = one.generate(params, requests[::-1])[::-1]
  alone = [one.generate(params, [request])[0] for request in requests]
  for a, b, c in zip(together, backwards, alone, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.ids, c.ids)
    np.testing.assert_allclose(a.log_probs, c.log_probs, atol=1e-5)


@pytest.mark.parametrize('place', range(5))
def test_every_number_of_the_stream_matters(params, place: int):
  (request,) = _requests(1)
  stream = list(request.stream)
  stream[place] += 1
  other = sampler.Request(request.prompt_ids, tuple(stream))
  one, two = _sampler().generate(params, [request, other])
  assert one.ids.tolist() != two.ids.tolist()


def test_the_seed_matters_and_the_call_does_not(params):
  requests = _requests(4)
  first = [c.ids.tolist() for c in _sampler().generate(params, requests)]
  again = [c.ids.tolist() for c in _sampler().generate(params, requests)]
  other = [c.ids.tolist() for c in _sampler(seed=1).generate(params, requests)]
  assert first == again
  assert first != other


def test_log_probs_are_those_of_the_model_at_the_temperature(params):
  requests = _requests(8)
  temperature = 0.6
  answers = _sampler(top_k=5).generate(
    params, requests, temperature=temperature
  )
  for request, answer in zip(requests, answers, strict=True):
    tokens = np.concatenate([request.prompt_ids, answer.ids])
    padded = np.zeros((1, 40), np.int32)
    padded[0, : len(tokens)] = tokens
    log_probs, _ = qwen.completion_log_probs(
      CONFIG,
      params,
      padded,
      np.array([len(request.prompt_ids)]),
      np.array([len(tokens)]),
      max_completion=12,
      temperature=temperature,
    )
    count = len(answer.ids)
    np.testing.assert_allclose(
      log_probs[0, :count], answer.log_probs, atol=1e-4
    )


def test_stop_ends_a_completion_and_is_its_last_token(params):
  answers = _sampler(max_completion_tokens=30).generate(params, _requests(32))
  reasons = {answer.finish_reason for answer in answers}
  assert reasons == {'stop', 'length'}
  for answer in answers:
    assert (answer.ids[-1] == STOP) == (answer.finish_reason == 'stop')
    assert STOP not in answer.ids[:-1]
    assert len(answer.ids) == len(answer.log_probs) <= 30


def test_ids_without_a_token_are_never_sampled(params):
  answers = _sampler(stop_ids=()).generate(
    params, _requests(64), temperature=5.0
  )
  assert max(answer.ids.max() for answer in answers) < 30


def test_top_k_of_one_is_greedy(params):
  requests = _requests(8)
  greedy = _sampler().generate(params, requests, temperature=0.0)
  for narrow in ({'top_k': 1}, {'top_p': 1e-6}):
    found = _sampler(**narrow).generate(params, requests)
    for a, b in zip(greedy, found, strict=True):
      np.testing.assert_array_equal(a.ids, b.ids)


@pytest.mark.parametrize(
  'narrow', [{}, {'top_k': 4}, {'top_p': 0.7}, {'top_k': 6, 'top_p': 0.7}]
)
def test_frequencies_are_the_distribution(params, narrow: dict):
  number = 4096
  prompt = _requests(1)[0].prompt_ids
  requests = [sampler.Request(prompt, (0, 0, 0, i, 0)) for i in range(number)]
  answers = _sampler(
    max_completion_tokens=1, batch_buckets=(1024,), **narrow
  ).generate(params, requests)
  found = np.bincount([a.ids[0] for a in answers], minlength=32) / number
  hidden = qwen.hidden_states(
    CONFIG, params, prompt[None], np.array([len(prompt)])
  )
  logits = np.array(qwen.logits(CONFIG, params, hidden)[0, -1], np.float64)
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


def test_nothing_compiles_after_the_warm_up(params):
  one = _sampler()
  one.warm_up(params)
  before = one.compilations
  assert before == 4
  for number in (1, 3, 9, 40):
    one.generate(params, _requests(number, length=3))
    one.generate(params, _requests(number, length=9), temperature=0.3)
  assert one.compilations == before


def test_greedy_reports_log_probs_at_temperature_one(params):
  (request,) = _requests(1)
  (answer,) = _sampler().generate(params, [request], temperature=0.0)
  tokens = np.concatenate([request.prompt_ids, answer.ids])[None]
  length = len(request.prompt_ids)
  log_probs, _ = qwen.completion_log_probs(
    CONFIG,
    params,
    tokens,
    np.array([length]),
    np.array([tokens.shape[1]]),
    max_completion=len(answer.ids),
  )
  np.testing.assert_allclose(log_probs[0], answer.log_probs, atol=1e-4)


def test_any_of_several_stop_ids_ends_a_completion(params):
  stops = (7, 11, 13, 20)
  answers = _sampler(stop_ids=stops, max_completion_tokens=30).generate(
    params, _requests(64)
  )
  last = {int(a.ids[-1]) for a in answers if a.finish_reason == 'stop'}
  assert last <= set(stops) and len(last) > 1
  for answer in answers:
    assert not np.isin(answer.ids[:-1], stops).any()


@pytest.mark.parametrize('sizes', [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_the_mesh_changes_no_token(params, sizes):
  requests = _requests(11)
  expected = _sampler().generate(params, requests)
  mesh = mesh_lib.make_mesh(*sizes)
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, qwen.logical_axes(CONFIG))
  )
  one = _sampler(mesh=mesh)
  for a, b in zip(expected, one.generate(placed, requests), strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def test_no_requests_give_no_completions(params):
  assert _sampler().generate(params, []) == []


def test_a_prompt_past_the_last_bucket_is_refused(params):
  request = sampler.Request(np.zeros(17, np.int32), (0,) * 5)
  with pytest.raises(ValueError, match='a prompt has 17 tokens; at most 16'):
    _sampler().generate(params, [request])


def test_batches_must_divide_over_the_mesh():
  with pytest.raises(ValueError, match='must be multiples of 8'):
    _sampler(batch_buckets=(12,))


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    ({'prompt_buckets': (16, 8)}, r'prompt_buckets=\(16, 8\): must be rising'),
    ({'batch_buckets': ()}, r'batch_buckets=\(\): must be rising'),
    ({'vocab_size': 33}, 'vocab_size=33: the model embeds 32 tokens'),
  ],
)
def test_wrong_sizes_are_refused(kwargs: dict, message: str):
  with pytest.raises(ValueError, match=message):
    _sampler(**kwargs)


def test_an_empty_prompt_is_refused(params):
  request = sampler.Request(np.zeros(0, np.int32), (0,) * 5)
  with pytest.raises(ValueError, match='a prompt has 0 tokens'):
    _sampler().generate(params, [request])
