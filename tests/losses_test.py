import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import losses


def test_k3_by_hand():
  # d = 0: 0. d = ln 2: 2 - ln 2 - 1 = 0.306853. d = -1: 1/e + 1 - 1 = 0.367879.
  log_probs = jnp.array([-1.0, -1.0, -1.0])
  reference = jnp.array([-1.0, -1.0 + math.log(2), -2.0])
  actual = losses.k3(log_probs, reference)
  np.testing.assert_allclose(actual, [0, 0.306853, 0.367879], atol=1e-6)
  # Gradient 1 - exp(d): 0, 1 - 2, 1 - 1/e.
  gradient = jax.grad(lambda x: jnp.sum(losses.k3(x, reference)))(log_probs)
  np.testing.assert_allclose(gradient, [0, -1, 0.632121], atol=1e-6)


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'options', 'loss', 'slope'),
  [
    # Slope: d loss / d log ratio, that is -rho A where nothing is clipped.
    pytest.param(1.1, 2.0, {}, -2.2, -2.2, id='inside'),
    pytest.param(1.5, 2.0, {}, -2.4, 0.0, id='too-high'),
    pytest.param(
      1.25, 2.0, {'clip_epsilon_high': 0.28}, -2.5, -2.5, id='higher'
    ),
    pytest.param(0.5, 2.0, {}, -1.0, -1.0, id='low-but-good'),
    pytest.param(0.5, -2.0, {}, 1.6, 0.0, id='too-low'),
    pytest.param(1.5, -2.0, {}, 3.0, 3.0, id='high-but-bad'),
    pytest.param(5.0, -2.0, {}, 10.0, 10.0, id='no-dual'),
    pytest.param(5.0, -2.0, {'dual_clip': 3.0}, 6.0, 0.0, id='dual'),
    pytest.param(5.0, 2.0, {'dual_clip': 3.0}, -2.4, 0.0, id='dual-not-good'),
  ],
)
def test_clipped_surrogate(ratio, advantage, options, loss, slope):
  def value(log_ratio):
    return losses.clipped_surrogate(log_ratio, jnp.array(advantage), **options)

  point = jnp.array(math.log(ratio))
  assert float(value(point)) == pytest.approx(loss, rel=1e-5)
  assert float(jax.grad(value)(point)) == pytest.approx(slope, rel=1e-5)


def arguments(**changes):
  """Two rows of two tokens; the last one is not sampled."""
  log_probs = jnp.log(jnp.array([[0.5, 0.25], [0.2, 0.1]]))
  ratios = jnp.array([[1.0, 1.5], [0.5, 7.0]])
  return {
    'log_probs': log_probs,
    'entropies': jnp.array([[0.3, 0.4], [0.5, 9.0]]),
    'old_log_probs': log_probs - jnp.log(ratios),
    'ref_log_probs': log_probs + jnp.log(jnp.array([[1.0, 2.0], [1.0, 1.0]])),
    'advantages': jnp.array([[1.0], [-1.0]]),
    'importance': jnp.ones((2, 2)),
    'mask': jnp.array([[True, True], [True, False]]),
  } | changes


def test_importance_by_hand():
  # The surrogates of the test below, each times its weight.
  weights = jnp.array([[0.5, 2.0], [0.25, 9.0]])
  loss, _ = losses.policy_gradient(
    **arguments(importance=weights), kl_weight=0.0, entropy_weight=0.0
  )
  np.testing.assert_allclose(loss, [[-0.5, -2.4], [0.2, 0]], atol=1e-6)
  ours = np.log(np.array([[0.5, 0.2]], np.float32))
  sampled = np.log(np.array([[0.1, 0.4]], np.float32))
  np.testing.assert_allclose(
    losses.truncated_importance(ours, sampled, 2.0), [[2.0, 0.5]], rtol=1e-6
  )


def test_policy_gradient_by_hand():
  loss, metrics = losses.policy_gradient(
    **arguments(), kl_weight=0.1, entropy_weight=0.01
  )
  # Surrogate: -1; -1.2 (clipped high); 0.8 (clipped low). k3: 0, .306853, 0.
  # Entropy: .3, .4, .5.
  expected = [[-1.003, -1.2 + 0.0306853 - 0.004], [0.8 - 0.005, 0]]
  np.testing.assert_allclose(loss, expected, atol=1e-6)
  policy = [[-1, -1.2], [0.8, 0]]
  np.testing.assert_allclose(metrics['loss/policy'], policy, atol=1e-6)
  np.testing.assert_array_equal(metrics['ratio/clipped_high'], [[0, 1], [0, 0]])
  np.testing.assert_array_equal(metrics['ratio/clipped_low'], [[0, 0], [1, 0]])


@pytest.mark.parametrize('name', ['policy_gradient', 'supervised'])
def test_gradient_agrees_with_finite_differences(name):
  rng = np.random.default_rng(0)
  draw = lambda: jnp.asarray(rng.normal(-1, 0.05, (3, 4)), jnp.float32)  # noqa: E731
  fixed = {
    'entropies': draw(),
    'old_log_probs': draw(),
    'ref_log_probs': draw(),
    'advantages': jnp.array([[1.0], [-1.0], [0.5]]),
    'importance': jnp.exp(draw()),
    'mask': jnp.asarray(rng.random((3, 4)) < 0.8),
  }
  function = getattr(losses, name)
  if name == 'policy_gradient':
    function = functools.partial(function, clip_epsilon=0.5, kl_weight=0.5)

  def total(log_probs):
    return jnp.sum(function(log_probs=log_probs, **fixed)[0])

  point, h = draw(), 1e-2
  gradient = np.asarray(jax.grad(total)(point))
  for index in np.ndindex(3, 4):
    up, down = (total(point.at[index].add(s * h)) for s in (1, -1))
    assert gradient[index] == pytest.approx(
      float(up - down) / (2 * h), abs=2e-3
    )
  np.testing.assert_array_equal(gradient[~np.asarray(fixed['mask'])], 0)


def test_masked_tokens_may_hold_anything():
  bad = jnp.array([[0, 0], [0, jnp.inf]])
  inputs = arguments(old_log_probs=arguments()['old_log_probs'] - bad)

  def total(log_probs):
    loss, _ = losses.policy_gradient(**inputs | {'log_probs': log_probs})
    return jnp.sum(loss)

  value, gradient = jax.value_and_grad(total)(inputs['log_probs'])
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  assert gradient[1, 1] == 0


def test_entropy_bonus_raises_entropy():
  def total(entropies):
    inputs = arguments(entropies=entropies)
    return jnp.sum(losses.policy_gradient(**inputs, entropy_weight=0.2)[0])

  gradient = jax.grad(total)(arguments()['entropies'])
  np.testing.assert_allclose(gradient, [[-0.2, -0.2], [-0.2, 0]])


def test_no_reference_without_kl():
  loss, metrics = losses.policy_gradient(
    **arguments(ref_log_probs=None), kl_weight=0.0, entropy_weight=0.0
  )
  np.testing.assert_allclose(loss, [[-1, -1.2], [0.8, 0]], atol=1e-6)
  assert 'loss/kl' not in metrics


def test_refusals():
  with pytest.raises(ValueError, match='kl_weight=0.01: needs ref_log_probs'):
    losses.policy_gradient(**arguments(ref_log_probs=None))
  with pytest.raises(ValueError, match='dual_clip=1.0: must be above 1'):
    losses.policy_gradient(**arguments(), dual_clip=1.0)
  with pytest.raises(
    ValueError, match='aggregation=x: unknown; must be one of'
  ):
    losses.row_weights(np.array([1]), 4, 'x')


def test_supervised_is_the_negative_log_likelihood():
  loss, metrics = losses.supervised(**arguments(ref_log_probs=None))
  expected = [[math.log(2), math.log(4)], [math.log(5), 0]]
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(
    metrics['loss/entropy'], [[0.3, 0.4], [0.5, 0]], rtol=1e-6
  )


@pytest.mark.parametrize(
  ('aggregation', 'expected'),
  [
    # Completions of 3, 1 and 0 tokens, at most 5; losses 1 1 1 and 5.
    pytest.param('token_mean', 8 / 4, id='token_mean'),  # (3 + 5) / 4
    pytest.param('sequence_mean', (1 + 5) / 2, id='sequence_mean'),
    pytest.param('fixed_length', (3 / 5 + 5 / 5) / 2, id='fixed_length'),
  ],
)
def test_aggregation_by_hand(aggregation, expected):
  lengths = np.array([3, 1, 0])
  weights = losses.row_weights(lengths, 5, aggregation)
  sums = np.array([3.0, 5.0, 100.0])
  assert float(np.sum(weights * sums)) == pytest.approx(expected, rel=1e-6)
  assert weights[2] == 0
