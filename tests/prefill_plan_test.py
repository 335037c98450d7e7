"""Tests of the division of prompts into batches that are prefilled."""

import functools
import itertools

import numpy as np
import pytest

from gigpo_jax.programs import sampler_cache

BUCKETS = (8, 12, 16, 32)


def _cost(rows, length):
  return rows * length + sampler_cache._PREFILL_COST


def _best(lengths, sizes):
  """Returns the lowest cost of all divisions of ascending lengths."""

  @functools.cache
  def best(start):
    if start == len(lengths):
      return 0
    return min(
      _cost(rows, length) + best(start + n)
      for rows, length in sizes
      for n in range(1, min(rows, len(lengths) - start) + 1)
      if length >= lengths[start + n - 1]
    )

  return best(0)


@pytest.mark.parametrize('cost', [0, 5, 100])
@pytest.mark.parametrize(
  'sizes',
  [
    *(
      tuple(itertools.product(rows, BUCKETS))
      for rows in [(1,), (1, 4), (2, 8), (1, 2, 4)]
    ),
    ((1, 16), (1, 32), *((4, length) for length in BUCKETS)),
  ],
)
def test_batches_have_the_least_padding(monkeypatch, sizes, cost):
  monkeypatch.setattr(sampler_cache, '_PREFILL_COST', cost)
  rng = np.random.default_rng(0)
  for count in (0, 1, 3, 9):
    lengths = sorted(rng.integers(1, 33, count).tolist())
    total = start = 0
    for stop, size in sampler_cache.plan_batches(lengths, sizes):
      assert size in sizes
      assert start < stop <= start + size[0]
      assert max(lengths[start:stop]) <= size[1]
      total += _cost(*size)
      start = stop
    assert start == count
    assert total == _best(lengths, sizes)


def test_batches_by_hand(monkeypatch):
  monkeypatch.setattr(sampler_cache, '_PREFILL_COST', 10)
  sizes = tuple(itertools.product((1, 4), BUCKETS))
  # Four of 8 cost 42; a single one of 8 costs 18 and of 32 costs 42.
  plan = sampler_cache.plan_batches([3, 4, 5, 30], sizes)
  assert plan == [(3, (4, 8)), (4, (1, 32))]
  plan = sampler_cache.plan_batches([3, 30], sizes)
  assert plan == [(1, (1, 8)), (2, (1, 32))]
  assert sampler_cache.plan_batches([8], sizes) == [(1, (1, 8))]


def test_accelerators_have_three_quarters_of_the_first_bucket():
  sizes = sampler_cache.prefill_sizes
  assert sizes((192, 320), 1, 16, 'cpu') == (
    (1, 192),
    (1, 320),
    (4, 192),
    (4, 320),
  )
  assert sizes((1024, 2048), 2, 128, 'gpu') == (
    (2, 768),
    (2, 1024),
    (2, 2048),
    (8, 768),
    (8, 1024),
    (8, 2048),
  )
  assert sizes((1,), 1, 3, 'tpu') == ((1, 1), (3, 1))
  assert sizes((1,), 1, 16, 'tpu') == ((1, 1), (8, 1))
