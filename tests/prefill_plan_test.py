"""Tests of the division of prompts into batches that are prefilled."""

import functools

import numpy as np
import pytest

from gigpo_jax.programs import sampler_cache

BUCKETS = (8, 12, 16, 32)


def _cost(batches, sizes):
  """Returns the cost of (number of prompts, length) of each batch."""
  return sum(
    sampler_cache.bucket(sizes, count) * length + sampler_cache._PREFILL_COST
    for count, length in batches
  )


def _best(lengths, sizes):
  """Returns the lowest cost of all divisions of ascending lengths."""

  @functools.cache
  def best(start):
    if start == len(lengths):
      return 0
    return min(
      _cost([(n, sampler_cache.bucket(BUCKETS, lengths[start + n - 1]))], sizes)
      + best(start + n)
      for n in range(1, min(sizes[-1], len(lengths) - start) + 1)
    )

  return best(0)


@pytest.mark.parametrize('cost', [0, 5, 100])
@pytest.mark.parametrize('sizes', [(1,), (1, 4), (2, 8), (1, 2, 4)])
def test_batches_have_the_least_padding(monkeypatch, sizes, cost):
  monkeypatch.setattr(sampler_cache, '_PREFILL_COST', cost)
  rng = np.random.default_rng(0)
  for count in (0, 1, 3, 9):
    lengths = sorted(rng.integers(1, 33, count).tolist())
    batches, start = [], 0
    for stop, length in sampler_cache.plan_batches(lengths, sizes, BUCKETS):
      assert start < stop <= start + sizes[-1]
      assert max(lengths[start:stop]) <= length
      batches.append((stop - start, length))
      start = stop
    assert start == count
    assert _cost(batches, sizes) == _best(lengths, sizes)


def test_batches_by_hand(monkeypatch):
  monkeypatch.setattr(sampler_cache, '_PREFILL_COST', 10)
  # Four of 8 cost 42; a single one of 8 costs 18 and of 32 costs 42.
  plan = sampler_cache.plan_batches([3, 4, 5, 30], (1, 4), BUCKETS)
  assert plan == [(3, 8), (4, 32)]
  assert sampler_cache.plan_batches([3, 30], (1, 4), BUCKETS) == [
    (1, 8),
    (2, 32),
  ]


def test_accelerators_have_lengths_between_the_buckets():
  assert sampler_cache.prefill_lengths((192, 320), 'cpu') == (192, 320)
  lengths = sampler_cache.prefill_lengths((1024, 2048), 'gpu')
  assert lengths == (768, 1024, 1536, 2048)
  assert sampler_cache.prefill_lengths((1,), 'tpu') == (1,)
