"""Tests of the KL, its estimators and its adaptive weight, and of rewards."""

import math

import algorithm_rows
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import alfworld
from gigpo_jax import config as config_lib
from gigpo_jax import kl, reward_shaping


def test_estimators_by_hand():
  # d = ln 2, -1: k1 is -d, k2 d^2 / 2, k3 e^d - d - 1, abs |d|.
  log_probs = np.array([-1.0, -1.0])
  reference = np.array([-1 + math.log(2), -2.0])
  expected = {
    'k1': [-0.693147, 1],
    'k2': [0.240227, 0.5],
    'k3': [0.306853, 0.367879],
    'abs': [0.693147, 1],
  }
  assert tuple(expected) == kl.ESTIMATORS
  for name, values in expected.items():
    for array in (np.asarray, jnp.asarray):
      actual = kl.estimate(array(log_probs), array(reference), name)
      np.testing.assert_allclose(actual, values, atol=1e-6)
    clamped = kl.estimate(log_probs, reference, name, clamp=0.3)
    np.testing.assert_allclose(clamped, np.minimum(values, 0.3), atol=1e-6)


def test_k3_by_hand():
  # d = 0: 0. d = ln 2: 2 - ln 2 - 1 = 0.306853. d = -1: 1/e + 1 - 1 = 0.367879.
  log_probs = jnp.array([-1.0, -1.0, -1.0])
  reference = jnp.array([-1.0, -1.0 + math.log(2), -2.0])
  actual = kl.estimate(log_probs, reference)
  np.testing.assert_allclose(actual, [0, 0.306853, 0.367879], atol=1e-6)
  # Gradient 1 - exp(d): 0, 1 - 2, 1 - 1/e.
  gradient = jax.grad(lambda x: jnp.sum(kl.estimate(x, reference)))(log_probs)
  np.testing.assert_allclose(gradient, [0, -1, 0.632121], atol=1e-6)


def test_clamped_k3_by_hand():
  # d = 8.5: e^8.5 - 9.5 = 4905.27, slope 1 - e^8.5 = -4913.77. d = 2: e^2 - 3 =
  # 4.38906, slope 1 - e^2. d = -12: 11 + e^-12. The others would overflow.
  log_probs = jnp.array([-9.0, -3.0, -0.5, -200.0, -0.5])
  reference = jnp.array([-0.5, -1.0, -12.5, -0.5, -500.0])

  def total(x, clamp):
    values = kl.estimate(x, reference, clamp=clamp)
    return jnp.sum(values), values

  gradient_of = jax.grad(total, has_aux=True)
  gradient, values = gradient_of(log_probs, 10.0)
  np.testing.assert_allclose(values, [10, 4.38906, 10, 10, 10], rtol=1e-5)
  np.testing.assert_allclose(gradient, [0, -6.38906, 0, 0, 0], rtol=1e-5)
  # The first token without a clamp.
  values = kl.estimate(log_probs[:1], reference[:1])
  gradient = jax.grad(lambda x: kl.estimate(x, reference[0]))(log_probs[0])
  np.testing.assert_allclose(values, [4905.27], rtol=1e-5)
  np.testing.assert_allclose(gradient, -4913.77, rtol=1e-5)


def test_estimators_agree_with_the_exact_kl():
  # Means over all tokens of a vocabulary, weighted by the policy.
  rng = np.random.default_rng(0)
  policy, reference = rng.dirichlet(np.ones(9), 2)
  exact = np.sum(policy * np.log(policy / reference))
  for name in ('k1', 'k3'):
    values = kl.estimate(np.log(policy), np.log(reference), name)
    assert np.sum(policy * values) == pytest.approx(exact)


def test_the_weight_adapts_to_the_target():
  control = kl.Control(kl_target=0.1, kl_horizon=100)
  # Errors +.1 and -.5, which is limited to -.2, over 50 rows.
  assert control.next_factor(2.0, 0.11, 50) == pytest.approx(2 * 1.05)
  assert control.next_factor(2.0, 0.05, 50) == pytest.approx(2 * 0.9)
  assert control.next_factor(2.0, None, 50) == 2
  assert control.next_factor(2.0, math.nan, 50) == 2  # A skipped update.
  # 600 rows count as the 100 of the horizon: 1 - 0.2 * 6 would be negative.
  assert control.next_factor(2.0, 0.05, 600) == pytest.approx(2 * 0.8)
  assert kl.Control().next_factor(2.0, 9.0, 50) == 2


def test_the_next_weight_is_a_metric():
  control = kl.Control(kl_target=0.1, kl_horizon=100)
  # The KL of the rewards counts before that of the loss.
  for metrics, factor in (
    ({'reward/kl': 0.11, 'loss/kl': 0.05}, 2.1),
    ({'loss/kl': 0.05}, 1.8),
    ({}, 2.0),
  ):
    actual = control.next_metrics(2.0, metrics, 50)
    assert actual == pytest.approx({'update/next_kl_factor': factor})
  assert kl.Control().next_metrics(2.0, {'loss/kl': 0.05}, 50) == {}


def test_long_responses_by_hand():
  # Limit 10, buffer 4: 0 up to 6 tokens, a quarter per token after that.
  actual = reward_shaping.overlong(np.array([0, 6, 7, 9, 10]), 10, 4)
  np.testing.assert_allclose(actual, [0, 0, 0.25, 0.75, 1])


def test_rewards_lose_the_kl_and_the_length_penalty():
  rows = algorithm_rows.random_rows(0)
  rng = np.random.default_rng(0)
  old, reference = rng.normal(size=(2, *rows.completion_mask.shape))
  old, reference = np.float32(old), np.float32(reference)
  shaping = reward_shaping.RewardShaping(
    kl_weight=0.5, overlong_buffer=4, overlong_penalty=2.0
  )
  shaped, metrics = shaping.shape(rows, old, reference, kl_factor=3.0)
  total, count = 0.0, 0
  for r in range(len(rows.groups)):
    length = int(rows.lengths[r] - rows.prompt_lengths[r])
    gaps = [float(old[r, c] - reference[r, c]) for c in range(length)]
    penalty = 0.5 * 3 * sum(gaps) + 2 * max(0, (length - 2) / 4)
    expected = float(rows.rewards[r]) - penalty
    assert shaped.rewards[r] == pytest.approx(expected, abs=1e-5)
    total, count = total + sum(gaps), count + length
  assert metrics['reward/kl'] == pytest.approx(total / count, abs=1e-6)
  assert shaped.tokens is rows.tokens and shaped.rewards.dtype == np.float64
  # Tokens of an earlier policy tell nothing about the KL of the current one.
  rows.ages[1:] = 1
  _, metrics = shaping.shape(rows, old, reference)
  own = rows.completion_mask[0]
  expected = (old[0] - reference[0])[own].mean()
  assert metrics['reward/kl'] == pytest.approx(expected, abs=1e-6)
  rows.ages[0] = 1
  assert 'reward/kl' not in shaping.shape(rows, old, reference)[1]


def test_the_mean_length_penalty_is_one_of_real_rows():
  rows = algorithm_rows.golden_rows()  # 8 of one token, and 2 of padding
  shaping = reward_shaping.RewardShaping(overlong_buffer=1)
  _, metrics = shaping.shape(rows, rows.sampler_log_probs, None)
  assert metrics == {'reward/overlong': 1}


def test_without_options_rows_stay():
  rows = algorithm_rows.golden_rows()
  shaped, metrics = reward_shaping.RewardShaping().shape(
    rows, rows.sampler_log_probs, None
  )
  assert shaped is rows and not metrics


@pytest.mark.parametrize(
  ('changes', 'line'),
  [
    (
      {'loss.kl_target': 0.1},
      'loss.kl_target=0.1: adapts one KL; needs either loss.kl_weight or',
    ),
    (
      {
        'loss.kl_target': 0.1,
        'loss.kl_weight': 0.1,
        'reward.kl_weight': 0.1,
      },
      'loss.kl_target=0.1: adapts one KL',
    ),
    (
      {'reward.overlong_buffer': 10**6},
      'reward.overlong_buffer=1000000: .*; must be at most that',
    ),
    (
      {'reward.kl_estimator': 'k2'},
      'reward.kl_estimator=k2: has no effect; needs reward.kl_weight',
    ),
    (
      {'loss.kl_weight': 0.1, 'loss.kl_estimator': 'k1'},
      'loss.kl_estimator=k1: its gradient is 0 on average; must be k2',
    ),
    (
      {'loss.surrogate': 'cispo', 'loss.dual_clip': 3.0},
      'loss.dual_clip=3.0: surrogate=cispo has none; must be None',
    ),
    ({'loss.tis_level': 'row'}, 'loss.tis_level=row: has no effect'),
    (
      {'optimizer.warmup_ratio': 0.1},
      'optimizer.warmup_ratio=0.1: has no effect; needs optimizer.decay_up',
    ),
    (
      {
        'optimizer.warmup_ratio': 0.1,
        'optimizer.warmup_updates': 3,
        'optimizer.decay_updates': 9,
      },
      'optimizer.warmup_ratio=0.1: warmup_updates=3 sets the warm-up',
    ),
    (
      {'optimizer.warmup_updates': 9, 'optimizer.decay_updates': 8},
      'optimizer.warmup_updates=9: ends after the decay',
    ),
    (
      {'algorithm.name': 'pass_at_k', 'algorithm.set_size': 99},
      'algorithm.set_size=99: a group has rollout.episodes_per_group=8',
    ),
  ],
)
def test_refused_options(changes, line):
  config = alfworld.get_config('mini')
  with config.ignore_type():
    config.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=line):
    config_lib.validate(config)
