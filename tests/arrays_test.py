from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import arrays

SEGMENTS = jnp.array([2, 0, 2, 0, 2])
MASK = jnp.array([True, True, False, True, True])


def test_segment_reductions():
  values = jnp.array([1.0, 2.0, jnp.nan, 3.0, 6.0])
  # Segment 2: rows 0 and 4 of 0, 2, 4; segment 0: rows 1 and 3.
  sums = arrays.segment_sum(values, SEGMENTS, MASK)
  np.testing.assert_array_equal(sums, [7, 5, 7, 5, 7])
  counts = arrays.segment_count(SEGMENTS, MASK)
  np.testing.assert_array_equal(counts, [2, 2, 2, 2, 2])
  first = arrays.segment_first(
    SEGMENTS, jnp.array([False, True, True, True, True])
  )
  np.testing.assert_array_equal(first, [2, 1, 2, 1, 2])


def test_segment_ids_increase_with_the_keys():
  a = jnp.array([5, -1, 5, 3, 5])
  b = jnp.array([9, 0, 1, 9, 9])
  # Sorted pairs: (-1, 0), (3, 9), (5, 1), (5, 9), (5, 9).
  np.testing.assert_array_equal(arrays.segment_ids(a, b), [3, 0, 2, 1, 3])
  np.testing.assert_array_equal(arrays.segment_ids(a), [2, 0, 2, 1, 2])
  # Differences that overflow int32.
  far = jnp.array([-(2**31), 2**31 - 1, 0])
  np.testing.assert_array_equal(arrays.segment_ids(far), [0, 2, 1])


def exact(two_float):
  high, low = (np.asarray(part, np.float64).tolist() for part in two_float)
  return [Fraction(a) + Fraction(b) for a, b in zip(high, low, strict=True)]


@pytest.mark.parametrize('wrap', [jax.jit, lambda f: f], ids=['jit', 'eager'])
def test_two_float_arithmetic_against_fractions(wrap):
  rng = np.random.default_rng(0)
  a, b = (arrays.two_float(rng.normal(size=1000)) for _ in range(2))
  for function, operation in (
    (arrays.two_add, lambda x, y: x + y),
    (arrays.two_multiply, lambda x, y: x * y),
  ):
    actual = exact(wrap(function)(a, b))
    for x, y, z in zip(exact(a), exact(b), actual, strict=True):
      scale = abs(x) + abs(y) if function is arrays.two_add else abs(x * y)
      # 24 + 24 bits minus a few; float32 alone would be off by 2^-24.
      assert abs(z - operation(x, y)) <= scale * Fraction(1, 2**44)


def test_two_power():
  base = arrays.two_float(0.95)
  exponents = jnp.array([0, 1, 2, 3, 50, 1000])
  actual = arrays.two_power(base, exponents)
  for value, exponent in zip(exact(actual), exponents.tolist(), strict=True):
    assert float(value) == pytest.approx(0.95**exponent, rel=2e-11)
  zero = arrays.two_power(arrays.two_float(0.0), jnp.array([0, 1, 2]))
  np.testing.assert_array_equal(zero[0], [1, 0, 0])


def test_ids32():
  np.testing.assert_array_equal(
    arrays.ids32([7, -1, 7], padding=True), [1, -1, 1]
  )
  wide = [2**63 + 5, -1, 2**63]
  np.testing.assert_array_equal(arrays.ids32(wide, padding=True), [2, -1, 1])
  pairs = np.array([[1, 2], [1, 3], [1, 2]], np.uint64)
  for padding in (False, True):
    ids = arrays.ids32(pairs, padding=padding)
    np.testing.assert_array_equal(ids, [0, 1, 0])
  padded = np.array([[-1, 7], [-1, -1], [-1, 7]])
  np.testing.assert_array_equal(arrays.ids32(padded, padding=True), [1, -1, 1])
  assert arrays.ids32(np.array([4, 5], np.int32)).dtype == jnp.int32


def test_typechecked_rejects_wrong_shapes():
  with pytest.raises(Exception, match='Type-check error'):
    arrays.segment_count(jnp.zeros(3, int), jnp.zeros(4, bool))
