"""Tests of drafts: what they propose, and that they change no sample."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import tiny_sampler
from tiny_sampler import CONFIG

from gigpo_jax import drafts, mesh, sampler
from gigpo_jax.models import qwen_config

STOP = 5
LIMIT = 17
HOT = sampler.Sampling(temperature=3.0)


@pytest.fixture(name='params', scope='module')
def fixture_params():
  return tiny_sampler.params()


@functools.cache
def _sampler(draft_tokens: int, **kwargs) -> sampler.Sampler:
  defaults = {
    'seed': 0,
    'prompt_buckets': (8,),
    'batch_buckets': (4,),
    'max_completion_tokens': LIMIT,
    'stop_ids': (STOP,),
    'vocab_size': 24,
    'decode_tokens': 3,
  }
  devices = mesh.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  return sampler.Sampler(
    CONFIG, devices, draft_tokens=draft_tokens, **defaults | kwargs
  )


def _requests(count: int) -> list[sampler.Request]:
  rng = np.random.default_rng(count)
  return [
    sampler.Request(
      rng.integers(8, 24, 1 + n % 8).astype(np.int32),
      (0, 1, 2, n, 3),
      sampler.Sampling(top_p=(1.0, 0.9)[n % 2]),
      max_tokens=(None, 4, 9)[n % 3],
    )
    for n in range(count)
  ]


def test_a_draft_continues_the_newest_repetition():
  texts = np.array(
    [
      [-1, 3, 4, 8, 3, 4, 9, 6],  # The second 3 4.
      [3, 4, 8, 1, 2, 1, 3, 4],  # A repetition at the end has no next token.
      [-1, -1, -1, -1, -1, 3, 5, 4],
      [4, 4, 4, 7, 4, 1, 2, 3],  # Part of another repetition.
      [-1, -1, -1, -1, -1, -1, -1, -1],
    ],
    np.int32,
  )
  previous, last = np.array([3, 3, 3, 4, -2]), np.array([4, 4, 4, 4, 4])
  result = drafts.propose(texts, previous, last, 3)
  assert result.tolist() == [
    [9, 6, -1],
    [-1, -1, -1],
    [-1, -1, -1],
    [7, 4, 1],
    [-1, -1, -1],
  ]
  assert drafts.propose(texts, previous, last, 0).shape == (5, 0)


def _slow_draft(text: list[int], last: list[int], count: int) -> list[int]:
  for end in range(len(text), 1, -1):
    if text[end - 2 : end] == last:
      return (text[end : end + count] + count * [-1])[:count]
  return count * [-1]


def test_drafts_equal_a_search_from_the_end():
  rng = np.random.default_rng(0)
  texts = rng.integers(3, size=(200, 12)).astype(np.int32)
  texts[np.arange(12) < rng.integers(13, size=(200, 1))] = -1
  last = rng.integers(3, size=(200, 2)).astype(np.int32)
  last[:20, 0] = drafts.NO_TOKEN
  result = drafts.propose(texts, *last.T, 4)
  assert result.tolist() == [
    _slow_draft(text.tolist(), end.tolist(), 4)
    for text, end in zip(texts, last, strict=True)
  ]
  assert np.mean(np.asarray(result) >= 0) > 0.1


def test_tokens_after_a_right_draft_are_accepted():
  # A right draft, a wrong one, one that is right again after a wrong token, one
  # past the end of the completion, and an inactive slot.
  active = np.array([True, True, True, True, False])
  proposed = np.array([[4, 6], [3, 6], [3, 6], [4, 6], [4, 6]])
  ids = np.array([[4, 6, 8]] * 5)
  ends = np.zeros((5, 3), bool)
  ends[3, 0] = True
  result = drafts.accept(active, proposed, ids, ends)
  assert np.asarray(result, int).tolist() == [
    [1, 1, 1],
    [1, 0, 0],
    [1, 0, 0],
    [1, 0, 0],
    [0, 0, 0],
  ]
  assert drafts.accept(active, proposed[:, :0], ids[:, :1], ends[:, :1])[
    :, 0
  ].tolist() == [True] * 4 + [False]


def test_a_group_has_its_newest_responses():
  texts = drafts.Texts(9)
  prompt = np.array([1, 2, 3, 4], np.int32)
  texts.add('a', prompt, np.array([5, 6], np.int32))
  texts.add('b', prompt[:1], np.array([7], np.int32))
  assert texts.of('a').tolist() == [3, 4, 5, 6]
  assert texts.of('b').tolist() == [1, 7]
  assert not len(texts.of('c'))
  texts.add('a', prompt, np.array([8, 9, 10, 11], np.int32))
  assert texts.of('a').tolist() == [4, 5, 6, 3, 4, 8, 9, 10, 11]
  nothing = drafts.Texts(0)
  nothing.add('a', prompt, prompt)
  assert not len(nothing.of('a'))


def test_size_of_a_text():
  assert drafts.text_size(0, 512) == 0
  assert drafts.text_size(4, 512) == 2048
  assert drafts.text_size(4, 30) == 16 * 32


def _with_texts(requests, completions, rng) -> list[sampler.Request]:
  """Returns requests with texts: right, partly right, of another, or none."""
  result = []
  for n, (request, completion) in enumerate(
    zip(requests, completions, strict=True)
  ):
    ids = completion.ids.copy()
    if n % 4 == 1:
      ids[rng.integers(len(ids))] = rng.integers(8, 24)
    elif n % 4 == 2:
      ids = rng.permutation(ids)
    text = np.concatenate([request.prompt_ids[-2:], ids, [9, 9]])
    if n % 4 == 3:
      text = text[:0]
    result.append(dataclasses.replace(request, text=text.astype(np.int32)))
  return result


@pytest.mark.parametrize(
  ('draft_tokens', 'options'),
  [
    (3, {}),
    pytest.param(1, {}, marks=pytest.mark.slow),
    pytest.param(16, {'decode_tokens': 1}, marks=pytest.mark.slow),
    pytest.param(3, {'weights': 'int8'}, marks=pytest.mark.slow),
    pytest.param(3, {'reuse': 'all', 'parked': 2}, marks=pytest.mark.slow),
    pytest.param(3, {'stop_ids': ()}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_drafts_change_no_sample(params, draft_tokens, options):
  requests = _requests(24)
  expected = _sampler(0, **options).generate(params, requests)
  engine = _sampler(draft_tokens, **options)
  rng = np.random.default_rng(0)
  drafted = _with_texts(requests, expected, rng)
  engine.take_stats()
  results = [engine.generate(params, drafted)]
  stats = engine.take_stats()
  assert stats.decode_tokens > 1.05 * stats.active_steps
  results.append(engine.generate(params, requests))
  stats = engine.take_stats()
  assert stats.decode_tokens == stats.active_steps
  results.append(engine.generate(params, drafted[::-1])[::-1])
  for n, completions in enumerate(results):
    for a, b, c in zip(expected, completions, results[0], strict=True):
      np.testing.assert_array_equal(a.ids, b.ids)
      assert a.finish_reason == b.finish_reason
      np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
      np.testing.assert_allclose(
        a.sampled_log_probs, b.sampled_log_probs, atol=1e-5
      )
      # One program: not even the last bits depend on what a draft guessed.
      np.testing.assert_array_equal(b.log_probs, c.log_probs, err_msg=str(n))


def test_a_right_draft_saves_passes(params):
  engine = _sampler(3, stop_ids=())
  requests = [
    sampler.Request(np.array([8, 9], np.int32), (0, 0, 0, n, 0), HOT)
    for n in range(20)
  ]
  completions = engine.generate(params, requests)
  texts = [np.concatenate([[8, 9], c.ids]) for c in completions]
  # A draft continues each pair of tokens as the completion does.
  request, text = next(
    (request, text)
    for request, text in zip(requests, texts, strict=True)
    if len(set(itertools.pairwise(text))) == LIMIT + 1
  )
  engine.take_stats()
  engine.generate(params, [dataclasses.replace(request, text=text)])
  stats = engine.take_stats()
  assert (stats.decode_tokens, stats.active_steps) == (LIMIT, -(-LIMIT // 4))


def test_a_network_with_a_state_has_no_drafts():
  config = dataclasses.replace(
    CONFIG,
    delta=qwen_config.Delta(2, 4, key_size=4, value_size=4, joined=True),
    delta_layers=(0,),
  )
  with pytest.raises(ValueError, match=r'^rollout.draft_tokens=2: the model'):
    sampler.Sampler(
      config,
      mesh.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
      seed=0,
      prompt_buckets=(8,),
      batch_buckets=(4,),
      max_completion_tokens=LIMIT,
      stop_ids=(),
      vocab_size=24,
      draft_tokens=2,
    )
