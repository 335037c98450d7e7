"""Tests of token sampling: truncation, proportions, unused ids."""

import jax
import numpy as np
import pytest

from gigpo_jax import sampling

_sample = jax.jit(
  sampling.sample_tokens,
  static_argnames=('vocab_size', 'truncated', 'greedy'),
)


@pytest.mark.parametrize('top_k', [0, 3])
def test_static_options_do_not_change_tokens(top_k):
  # One row is greedy; two rows may use top-k.
  logits = jax.random.normal(jax.random.key(0), (4, 30))
  floats = np.array([[1, 1, 0], [0, 1, 0], [0.5, 1, 0], [2, 1, 0]], np.float32)
  results = [
    _sample(
      jax.random.split(jax.random.key(1), 4),
      np.arange(4),
      floats,
      np.array([top_k, 0, 0, top_k]),
      logits,
      vocab_size=29,
      truncated=truncated,
      greedy=greedy,
    )
    for truncated, greedy in ((None, None), (top_k > 0, True))
  ]
  for expected, actual in zip(*results, strict=True):
    np.testing.assert_array_equal(expected, actual)


def test_keys_fold_in_each_integer_of_the_stream_in_order():
  streams = np.uint32([[0, 1, 2, 3, 4], [0, 1, 2, 4, 3], [5, 0, 2, 2**31, 3]])
  keys = sampling.row_keys(np.uint32(7), streams)
  for key, stream in zip(keys, streams, strict=True):
    expected = jax.random.key(7)
    for integer in stream:
      expected = jax.random.fold_in(expected, integer)
    assert key == expected
  assert keys[0] != keys[1]


def test_the_smallest_temperature_is_not_greedy():
  # Divided by the temperature, the logits are 0 and 1.
  ids, log_probs, _ = _sample(
    jax.random.split(jax.random.key(0), 32),
    np.zeros(32, np.int32),
    np.tile(np.float32([sampling.MIN_TEMPERATURE, 1, 0]), (32, 1)),
    np.zeros(32, np.int32),
    np.tile(np.float32([0, 1e-3]), (32, 1)),
    vocab_size=2,
  )
  assert set(ids.tolist()) == {0, 1}
  expected = np.where(ids == 1, 0, -1) - np.log1p(np.exp(-1.0))
  np.testing.assert_allclose(log_probs, expected, atol=1e-6)


def _truncated_by_sorting(logits, top_k, top_p, min_p):
  order = np.argsort(-logits, kind='stable')
  kept = logits >= logits[order[min(top_k or len(logits), len(logits)) - 1]]
  probs = np.where(kept, np.exp(logits - logits.max()), 0)
  probs /= probs.sum()
  ahead = np.array([probs[logits > x].sum() for x in logits])
  kept &= (ahead < top_p) | (top_p >= 1)
  relative = np.exp(logits - logits.max())
  return kept & (relative >= min_p)


def test_truncation_equals_sorting():
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (200, 50)).astype(np.float32)
  logits[:50] = np.round(logits[:50])  # with ties
  logits[0] = 0
  top_k = rng.integers(0, 60, 200)
  top_p = np.where(rng.random(200) < 0.3, 1, rng.random(200))
  min_p = np.where(rng.random(200) < 0.5, 0, rng.random(200))
  kept = np.asarray(
    sampling.truncate(
      logits,
      np.ones(logits.shape, bool),
      top_k.astype(np.int32),
      top_p.astype(np.float32),
      min_p.astype(np.float32),
    )
  )
  for row in range(200):
    expected = _truncated_by_sorting(
      logits[row].astype(np.float64), top_k[row], top_p[row], min_p[row]
    )
    np.testing.assert_array_equal(kept[row], expected, err_msg=str(row))


@pytest.mark.parametrize(
  'options', [(1, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.5)], ids=str
)
def test_unused_ids_do_not_count_for_truncation(options):
  # Of the ids in use, 0 has a probability of 0.93.
  logits = np.float32([[5, 9, 1, 2]])
  usable = np.array([[True, False, True, True]])
  top_k, top_p, min_p = (np.array([x]) for x in options)
  kept = sampling.truncate(
    logits, usable, top_k, top_p.astype('f4'), min_p.astype('f4')
  )
  np.testing.assert_array_equal(kept, [[True, False, False, False]])


def test_tokens_that_have_exactly_the_mass_of_top_p_are_sufficient():
  logits = np.float32([[1, 3, 2]])
  top_p = jax.nn.softmax(logits).max(axis=-1)
  zero = np.zeros(1, np.int32)
  kept = sampling.truncate(
    logits, np.ones((1, 3), bool), zero, top_p, zero.astype('f4')
  )
  np.testing.assert_array_equal(kept, [[False, True, False]])


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({'temperature': 0.0}, False),
    ({'top_k': 1}, True),
    ({'top_p': 0.99}, True),
    ({'min_p': 0.01}, True),
  ],
  ids=str,
)
def test_some_options_exclude_tokens(options, expected):
  assert sampling.Sampling(**options).truncates == expected


def test_sample_index_by_hand():
  weights = np.float32([[0, 2, 0, 1, 0]] * 4)
  # log 2 + noise against log 1 + noise; others have no weight.
  noise = np.float32(
    [[9, 0, 9, 0, 9], [9, 0, 9, 0.6, 9], [9, 0, 9, 0.7, 9], [9, -5, 9, -4, 9]]
  )
  indices = sampling.sample_index(weights, noise)
  np.testing.assert_array_equal(indices, [1, 1, 3, 3])


def test_indices_without_weight_are_not_sampled():
  rng = np.random.default_rng(0)
  weights = rng.random((256, 1187), np.float32) * (
    rng.random((256, 1187)) < 0.05
  )
  weights[0], weights[0, 3] = 0, 1
  noise = jax.random.gumbel(jax.random.key(0), weights.shape)
  indices = np.asarray(sampling.sample_index(jax.numpy.asarray(weights), noise))
  assert (np.take_along_axis(weights, indices[:, None], axis=1) > 0).all()


def test_tokens_are_sampled_in_proportion():
  # Three blocks, the last not full; ids from 290 are unused.
  rng = np.random.default_rng(0)
  logits = (2 * rng.normal(size=300)).astype(np.float32)
  probs = np.exp(logits[:290].astype(np.float64))
  probs /= probs.sum()
  n, rounds = 4096, 16
  counts = np.zeros(300)
  sample = jax.jit(sampling.sample_tokens, static_argnames='vocab_size')
  for index in range(rounds):
    ids, _, _ = sample(
      jax.random.split(jax.random.key(1), n),
      np.full(n, index, np.int32),
      np.tile(np.float32([1, 1, 0]), (n, 1)),
      np.zeros(n, np.int32),
      np.tile(logits, (n, 1)),
      vocab_size=290,
    )
    counts += np.bincount(ids, minlength=300)
  assert not counts[290:].any()
  expected = probs * n * rounds
  distance = np.sum((counts[:290] - expected) ** 2 / expected)
  # Chi-square of 289 degrees of freedom: mean 289, standard deviation 24.
  assert distance < 289 + 4 * 24


@pytest.mark.parametrize('temperature', [0, 1])
def test_unused_ids_do_not_hide_other_tokens(temperature):
  logits = np.full((1, 300), -100, np.float32)
  logits[0, 137], logits[0, 299] = -90, 0
  ids, log_probs, sampled = _sample(
    jax.random.split(jax.random.key(0), 1),
    np.zeros(1, np.int32),
    np.array([[temperature, 1, 0]], np.float32),
    np.zeros(1, np.int32),
    jax.numpy.asarray(logits),
    vocab_size=299,
  )
  assert ids.tolist() == [137]
  # e^-90 among all rows of the embedding; almost 1 among the tokens in use.
  np.testing.assert_allclose(log_probs, [-90], rtol=1e-6)
  np.testing.assert_allclose(
    sampled, [-np.log1p(298 * np.exp(-10.0))], atol=1e-5
  )


@pytest.mark.parametrize('temperature', [0, 1])
def test_logits_that_are_no_numbers_give_an_id_in_use(temperature):
  ids, *_ = _sample(
    jax.random.split(jax.random.key(0), 1),
    np.zeros(1, np.int32),
    np.array([[temperature, 1, 0]], np.float32),
    np.zeros(1, np.int32),
    np.full((1, 300), np.nan, np.float32),
    vocab_size=300,
  )
  assert 0 <= ids[0] < 300
