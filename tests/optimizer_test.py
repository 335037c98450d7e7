import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gigpo_jax import learner, optimizer


def test_adamw_by_hand():
  # Gradient (3, 4), norm 5, clipped to (.6, .8). Adam's first step is the sign
  # of each, times 0.1; decay subtracts 0.1 * 0.01 * 2 from a weight of 2.
  adamw = optimizer.AdamW(0.1, weight_decay=0.01).make()
  weights = jnp.array([2.0, 2.0])
  state = adamw.init(weights)
  changes, _ = adamw.update(jnp.array([3.0, 4.0]), state, weights)
  np.testing.assert_allclose(changes, [-0.102, -0.102], rtol=1e-5)
  # First of 4 warm-up updates: a quarter.
  adamw = optimizer.AdamW(0.1, warmup_updates=4, weight_decay=0.0).make()
  changes, _ = adamw.update(weights, adamw.init(weights), weights)
  np.testing.assert_allclose(changes, [-0.025, -0.025], rtol=1e-5)
  # A gradient of norm 0.5 is not clipped: its mean is a tenth of it.
  adamw = optimizer.AdamW(0.1, mu_dtype='bfloat16').make()
  gradient = jnp.array([0.3, 0.4])
  _, state = adamw.update(gradient, adamw.init(weights), weights)
  mean = optax.tree_utils.tree_get(state, 'mu')
  assert mean.dtype == jnp.bfloat16
  np.testing.assert_allclose(mean.astype('float32'), gradient / 10, rtol=4e-3)


def test_the_state_does_not_depend_on_what_decays():
  params = {'dense': jnp.array([2.0]), 'norm': jnp.array([2.0])}
  plain, other = (
    optimizer.AdamW(0.1, weight_decay=0.01, no_decay=words).make()
    for words in ((), ('norm',))
  )
  state = plain.init(params)
  assert jax.tree.structure(state) == jax.tree.structure(other.init(params))
  # Adam's first step is 0.1; decay subtracts 0.1 * 0.01 * 2.
  changes, _ = other.update(params, state, params)
  np.testing.assert_allclose(changes['dense'], [-0.102], rtol=1e-5)
  np.testing.assert_allclose(changes['norm'], [-0.1], rtol=1e-5)


def test_linear_decay_by_hand():
  adamw = optimizer.AdamW(0.5, warmup_updates=2, decay_updates=4)
  rates = [float(adamw.schedule(jnp.array(k))) for k in range(7)]
  # Warm-up 1/2, 1, 1, ..; decay 1, 3/4, 1/2, 1/4, 0, 0, 0.
  assert rates == [0.25, 0.375, 0.25, 0.125, 0, 0, 0]


def test_cosine_decay_by_hand():
  # The warm-up takes 2 of 6 updates; then 1 + cos of 0, pi/4, pi/2, 3 pi/4, pi.
  adamw = optimizer.AdamW(
    1.0, warmup_ratio=0.3, decay_updates=6, decay='cosine', final_rate=0.5
  )
  rates = [float(adamw.schedule(jnp.array(k))) for k in range(8)]
  expected = [0.5, 1, 1, 0.926777, 0.75, 0.573223, 0.5, 0.5]
  np.testing.assert_allclose(rates, expected, atol=1e-5)
  # 0.07 * 100 is 7.000000000000001.
  adamw = optimizer.AdamW(warmup_ratio=0.07, decay_updates=100)
  assert adamw.num_warmup_updates == 7


def test_a_learning_rate_on_the_host_compiles_nothing():
  adamw = optimizer.AdamW(
    3e-6, warmup_updates=7, decay_updates=11, decay='cosine'
  )
  rates = [adamw.schedule(np.asarray(k)) for k in range(12)]
  assert not any(isinstance(rate, jax.Array) for rate in rates)
  on_device = [float(adamw.schedule(jnp.array(k))) for k in range(12)]
  np.testing.assert_allclose(rates, on_device, atol=1e-12)


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'b1': 1.0}, 'b1=1.0: .* at least 0, below 1'),
    ({'mu_dtype': 'float16'}, 'mu_dtype=float16: unknown; must be one of'),
  ],
)
def test_rejected_options(values, message):
  with pytest.raises(ValueError, match=message):
    optimizer.AdamW(**values)


def test_the_old_function_warns():
  with pytest.warns(DeprecationWarning, match='use optimizer.AdamW'):
    old = learner.adamw(0.1, b1=0.5)
  weights = jnp.array([2.0, 2.0])
  state = old.init(weights)
  expected = optimizer.AdamW(0.1, b1=0.5).make().init(weights)
  np.testing.assert_array_equal(state[1][0].mu, expected[1][0].mu)
