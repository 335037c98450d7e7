"""Tests the parts of GiGPO's advantages: returns and normalization."""

import jax.numpy as jnp
import numpy as np

from gigpo_jax import advantages, arrays


def test_discounted_returns_keep_more_than_float32():
  # 0.95^k * 10 for k = 0..199, within 1e-12 of float64.
  zeros = np.zeros(200)
  zeros[-1] = 10
  (high, low), sums = advantages.discounted_returns(
    arrays.two_float(zeros),
    jnp.arange(200) > 0,
    jnp.arange(200),
    arrays.two_float(0.95),
  )
  np.testing.assert_array_equal(sums[0], 10)
  expected = 10 * 0.95 ** np.arange(199, -1, -1, dtype=np.float64)
  actual = np.asarray(high, np.float64) + np.asarray(low, np.float64)
  np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_group_normalize_by_hand():
  # Segment 0: entries 1, 3 (row 2 does not enter): mean 2, std sqrt(2).
  # Row 2, 5: (5 - 2) / sqrt(2) = 2.12132. Segment 3: one entry.
  normalize = lambda **kwargs: advantages.group_normalize(  # noqa: E731
    arrays.two_float(np.array([1.0, 3.0, 5.0, 4.0])),
    jnp.array([0, 0, 0, 3]),
    jnp.array([True, True, False, True]),
    **kwargs,
  )
  expected = [-0.70711, 0.70711, 2.12132, 0]
  np.testing.assert_allclose(normalize(norm='mean_std'), expected, atol=2e-5)
  mean = normalize(norm='mean', keep_singletons=True)
  np.testing.assert_array_equal(mean, [-1, 1, 3, 4])
