import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_losses

from gigpo_jax import kl, losses, token_batch


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'options', 'loss', 'slope'),
  [
    # Slope: d loss / d log ratio, which is -rho A without clipping.
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
    # Without a limit, float32 overflows there, and slopes would be NaN.
    pytest.param(1e40, -2.0, {'dual_clip': 3.0}, 6.0, 0.0, id='huge'),
    pytest.param(1e40, 2.0, {}, -2.4, 0.0, id='huge-and-good'),
  ],
)
def test_clipped_surrogate(ratio, advantage, options, loss, slope):
  def value(log_ratio):
    return losses.clipped_surrogate(log_ratio, jnp.array(advantage), **options)

  point = jnp.array(math.log(ratio))
  assert float(value(point)) == pytest.approx(loss, rel=1e-5)
  assert float(jax.jit(jax.grad(value))(point)) == pytest.approx(
    slope, rel=1e-5
  )


def arguments(**changes):
  """Returns two rows of two tokens; the last token is masked."""
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
    'row_ids': jnp.array([[0, 0], [0, 0]]),
  } | changes


def run(loss, inputs):
  """Returns losses and metrics of a policy loss for inputs by name."""
  outputs = token_batch.PolicyOutputs(inputs['log_probs'], inputs['entropies'])
  columns = {name: inputs[name] for name in loss.columns}
  tokens = token_batch.make(inputs['mask'], inputs['row_ids'], columns)
  return loss(outputs, tokens)


def policy_gradient(inputs, **options):
  return run(losses.PolicyGradient(**options), inputs)


def test_importance_by_hand():
  # The surrogates of the next test, each times its weight.
  weights = jnp.array([[0.5, 2.0], [0.25, 9.0]])
  loss, _ = policy_gradient(
    arguments(importance=weights), kl_weight=0.0, entropy_weight=0.0
  )
  np.testing.assert_allclose(loss, [[-0.5, -2.4], [0.2, 0]], atol=1e-6)
  learner = np.log(np.array([[0.5, 0.2]], np.float32))
  sampler = np.log(np.array([[0.1, 0.4]], np.float32))
  np.testing.assert_allclose(
    losses.truncated_importance(learner, sampler, 2.0), [[2.0, 0.5]], rtol=1e-6
  )


def test_importance_of_rows_by_hand():
  # Products 2 * .5 = 1 and 3 * 2 = 6, which is truncated.
  learner = np.log(np.array([[2, 0.5], [3, 2]], np.float32))
  actual = losses.truncated_importance(learner, 0 * learner, 4.0, 'row')
  np.testing.assert_allclose(actual, [[1, 1], [4, 4]], rtol=1e-6)


def test_cispo_by_hand():
  # Ratios 1.5 and .5 are clipped to 1.2 and .8: -1.2 * 2 * -.7, -.8 * -1 * -.1;
  # slopes -1.2 * 2 and .8, although both ratios are out of bounds.
  log_ratios = jnp.log(jnp.array([1.5, 0.5]))
  advantages, log_probs = jnp.array([2.0, -1.0]), jnp.array([-0.7, -0.1])

  def total(x):
    moved = log_ratios + x - jax.lax.stop_gradient(x)
    values = losses.cispo(moved, x, advantages)
    return jnp.sum(values), values

  slopes, values = jax.jit(jax.grad(total, has_aux=True))(log_probs)
  np.testing.assert_allclose(values, [1.68, -0.08], rtol=1e-6)
  np.testing.assert_allclose(slopes, [-2.4, 0.8], rtol=1e-6)


def test_policy_gradient_by_hand():
  loss, metrics = policy_gradient(
    arguments(), kl_weight=0.1, entropy_weight=0.01
  )
  # Surrogate: -1; -1.2 (clipped high); 0.8 (clipped low). k3: 0, .306853, 0.
  # Entropy: .3, .4, .5.
  expected = [[-1.003, -1.2 + 0.0306853 - 0.004], [0.8 - 0.005, 0]]
  np.testing.assert_allclose(loss, expected, atol=1e-6)
  policy = [[-1, -1.2], [0.8, 0]]
  np.testing.assert_allclose(metrics['loss/policy'], policy, atol=1e-6)
  np.testing.assert_array_equal(metrics['ratio/clipped_high'], [[0, 1], [0, 0]])
  np.testing.assert_array_equal(metrics['ratio/clipped_low'], [[0, 0], [1, 0]])


def test_ratios_above_the_dual_clip_are_counted_for_negative_advantages():
  # Ratios e and 1 of row 0, advantage 1; e and 1 of row 1, advantage -1.
  log_ratios = jnp.array([[1.0, 0], [1, 0]])
  inputs = arguments(mask=jnp.ones((2, 2), bool))
  inputs['old_log_probs'] = inputs['log_probs'] - log_ratios
  _, metrics = policy_gradient(inputs, dual_clip=2.0)
  np.testing.assert_array_equal(metrics['ratio/clipped_dual'], [[0, 0], [1, 0]])
  np.testing.assert_array_equal(metrics['ratio/clipped_high'], [[1, 0], [0, 0]])


def test_low_ratios_are_clipped_for_negative_advantages():
  # Ratios 1 / e and 1 in both rows; advantages 1 and -1.
  inputs = arguments(mask=jnp.ones((2, 2), bool))
  inputs['old_log_probs'] = inputs['log_probs'] + jnp.array([[1.0, 0], [1, 0]])
  _, metrics = policy_gradient(inputs)
  np.testing.assert_array_equal(metrics['ratio/clipped_low'], [[0, 0], [1, 0]])
  np.testing.assert_array_equal(metrics['ratio/clipped_high'], 0)


def test_cispo_clips_ratios_of_both_signs():
  # Ratios e and 1 / e in both rows; advantages 1 and -1.
  inputs = arguments(mask=jnp.ones((2, 2), bool))
  log_ratios = jnp.array([[1.0, -1], [1, -1]])
  inputs['old_log_probs'] = inputs['log_probs'] - log_ratios
  _, metrics = policy_gradient(inputs, surrogate='cispo')
  np.testing.assert_array_equal(metrics['ratio/clipped_high'], [[1, 0], [1, 0]])
  np.testing.assert_array_equal(metrics['ratio/clipped_low'], [[0, 1], [0, 1]])


@pytest.mark.parametrize(
  'loss',
  [losses.PolicyGradient(clip_epsilon=0.5, kl_weight=0.5), losses.Supervised()],
  ids=['policy gradient', 'supervised'],
)
def test_gradient_agrees_with_finite_differences(loss):
  rng = np.random.default_rng(0)
  draw = lambda: jnp.asarray(rng.normal(-1, 0.05, (3, 4)), jnp.float32)  # noqa: E731
  fixed = {
    'entropies': draw(),
    'old_log_probs': draw(),
    'ref_log_probs': draw(),
    'advantages': jnp.array([[1.0], [-1.0], [0.5]]),
    'importance': jnp.exp(draw()),
    'mask': jnp.asarray(rng.random((3, 4)) < 0.8),
    'row_ids': jnp.zeros((3, 4), jnp.int32),
  }

  def total(log_probs):
    return jnp.sum(run(loss, fixed | {'log_probs': log_probs})[0])

  point, h = draw(), 1e-2
  gradient = np.asarray(jax.jit(jax.grad(total))(point))
  for index in np.ndindex(3, 4):
    raised, lowered = (total(point.at[index].add(s * h)) for s in (1, -1))
    assert gradient[index] == pytest.approx(
      float(raised - lowered) / (2 * h), abs=2e-3
    )
  np.testing.assert_array_equal(gradient[~np.asarray(fixed['mask'])], 0)


def test_masked_tokens_may_be_infinite():
  bad = jnp.array([[0, 0], [0, jnp.inf]])
  inputs = arguments(old_log_probs=arguments()['old_log_probs'] - bad)

  def total(log_probs):
    loss, _ = policy_gradient(inputs | {'log_probs': log_probs})
    return jnp.sum(loss)

  value, gradient = jax.jit(jax.value_and_grad(total))(inputs['log_probs'])
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  assert gradient[1, 1] == 0


def test_entropy_bonus_raises_entropy():
  def total(entropies):
    inputs = arguments(entropies=entropies)
    return jnp.sum(policy_gradient(inputs, entropy_weight=0.2)[0])

  gradient = jax.jit(jax.grad(total))(arguments()['entropies'])
  np.testing.assert_allclose(gradient, [[-0.2, -0.2], [-0.2, 0]])


def test_reference_is_not_needed_without_kl():
  assert losses.needs_reference(losses.PolicyGradient())
  assert not losses.needs_reference(losses.PolicyGradient(kl_weight=0.0))
  loss, metrics = policy_gradient(
    arguments(ref_log_probs=None), kl_weight=0.0, entropy_weight=0.0
  )
  np.testing.assert_allclose(loss, [[-1, -1.2], [0.8, 0]], atol=1e-6)
  assert 'loss/kl' not in metrics


def test_rejected_arguments():
  with pytest.raises(ValueError, match='dual_clip=1.0: .* must be above 1'):
    losses.PolicyGradient(dual_clip=1.0)
  with pytest.raises(
    ValueError, match='aggregation=x: unknown; must be one of'
  ):
    losses.row_weights(np.array([1]), 4, 'x')


def test_supervised_is_the_negative_log_likelihood():
  loss, metrics = run(losses.Supervised(), arguments())
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


def row_arguments(log_ratios, row_ids, mask=None):
  """Returns one line of tokens of these rows, with advantages 1, 2, .."""
  log_ratios, row_ids = jnp.array([log_ratios]), jnp.array([row_ids])
  return {
    'log_probs': log_ratios - 1,
    'entropies': jnp.zeros(log_ratios.shape),
    'old_log_probs': jnp.full(log_ratios.shape, -1.0),
    'ref_log_probs': None,
    'advantages': 1.0 + row_ids,
    'importance': jnp.ones(log_ratios.shape),
    'mask': jnp.ones(log_ratios.shape, bool) if mask is None else mask,
    'row_ids': row_ids,
  }


SURROGATE_ONLY = {'kl_weight': 0.0, 'entropy_weight': 0.0}


def test_row_ratio_by_hand():
  inputs = row_arguments([0.1, -0.05, 0.2, 0.3, 0.7], [0, 0, 0, 1, 1])
  mask = inputs['mask'].at[0, 4].set(False)
  loss, metrics = policy_gradient(
    inputs | {'mask': mask}, ratio_level='row', **SURROGATE_ONLY
  )
  # exp(0.25 / 3) = 1.0869; exp(0.3) = 1.35 is clipped, times 2.
  np.testing.assert_allclose(
    loss, [[-1.0869, -1.0869, -1.0869, -2.4, 0]], atol=1e-4
  )
  np.testing.assert_allclose(
    metrics['ratio/clipped_high'], [[0, 0, 0, 1, 0]], atol=0
  )


def test_kl_is_per_token_at_both_ratio_levels():
  # The mean of the log ratios is 0.
  inputs = row_arguments([0.1, -0.1, 0.1, -0.1], [0, 0, 0, 0])
  token_level, row_level = (
    policy_gradient(inputs, ratio_level=level, **SURROGATE_ONLY)[1]
    for level in losses.RATIO_LEVELS
  )
  # exp(0.1) - 1 - 0.1, exp(-0.1) - 1 + 0.1.
  expected = [[0.0051709, 0.0048374, 0.0051709, 0.0048374]]
  for metrics in (token_level, row_level):
    np.testing.assert_allclose(metrics['ratio/kl'], expected, atol=1e-6)
  np.testing.assert_allclose(row_level['ratio/mean'], 1, atol=1e-6)


def test_single_token_rows_have_equal_losses_at_both_levels():
  inputs = row_arguments([0.1, -0.4, 0.05, 0.3], [0, 1, 2, 3])
  token_level, row_level = (
    policy_gradient(inputs, ratio_level=level, **SURROGATE_ONLY)
    for level in losses.RATIO_LEVELS
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
    token_level,
    row_level,
  )


def test_ratio_levels_have_equal_gradients_before_the_first_update():
  inputs = row_arguments([0.0] * 5, [0, 0, 0, 1, 1])
  # The mean over each row's tokens.
  weights = jnp.array([[1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]])

  def total(log_probs, level):
    loss, _ = policy_gradient(
      inputs | {'log_probs': log_probs}, ratio_level=level, **SURROGATE_ONLY
    )
    return jnp.sum(weights * loss)

  token_level, row_level = (
    jax.grad(total)(inputs['log_probs'], level) for level in losses.RATIO_LEVELS
  )
  np.testing.assert_allclose(token_level, row_level, rtol=1e-6)
  np.testing.assert_allclose(
    token_level, -weights * inputs['advantages'], rtol=1e-6
  )


def test_row_means_match_a_slow_reference():
  rng = np.random.default_rng(0)
  rows = np.sort(rng.integers(0, 4, (3, 12)), axis=1)
  mask = rng.random((3, 12)) < 0.8
  values = rng.normal(size=(3, 12)).astype(np.float32)
  expected = [
    [
      np.mean([v for v, r, m in zip(*line, strict=True) if m and r == row])
      if any(m and r == row for _, r, m in zip(*line, strict=True))
      else 0
      for row in line[1]
    ]
    for line in zip(values, rows, mask, strict=True)
  ]
  actual = losses.row_means(*map(jnp.asarray, (values, mask, rows)))
  np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_row_regression_by_hand():
  # Rows of two and one tokens, with log-ratios 2 and -1: (0.001 * 2 + 0.4772 -
  # 1)^2 = 0.2712, and (-0.001 + 0.4772)^2 = 0.2268, at each of their tokens.
  log_probs = jnp.array([[-1.0, -2.0, -3.0, -9.0]])
  columns = {
    'advantages': jnp.array([[0.5228, 0.5228, -0.4772, 9.0]]),
    'ref_log_probs': log_probs - jnp.array([[1.5, 0.5, -1.0, 7.0]]),
  }
  mask = jnp.array([[True, True, True, False]])
  tokens = token_batch.make(mask, jnp.array([[0, 0, 1, 1]]), columns)
  loss = losses.make('row_regression')
  found, _ = loss(token_batch.PolicyOutputs(log_probs, log_probs), tokens)
  np.testing.assert_allclose(found, [[0.2712, 0.2712, 0.2268, 0]], atol=5e-5)


def test_the_kl_of_row_regression_is_that_of_the_sampling_policy():
  # The expectation over tokens of p is KL(p || q), whichever is the policy.
  p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.8, 0.15, 0.045, 0.005])
  divergence = np.sum(p * np.log(p / q))
  for to, current, other, column, metric in (
    ('old', q, p, 'old_log_probs', 'ratio/kl'),
    ('reference', p, q, 'ref_log_probs', 'loss/kl'),
  ):
    log_probs = jnp.log(current)[None]
    columns = {'advantages': jnp.zeros((1, 4)), column: jnp.log(other)[None]}
    tokens = token_batch.make(
      jnp.ones((1, 4), bool), jnp.zeros((1, 4), int), columns
    )
    loss = losses.make('row_regression', log_ratio_to=to)
    _, metrics = loss(token_batch.PolicyOutputs(log_probs, log_probs), tokens)
    expected = np.sum(p * np.asarray(metrics[metric][0]))
    assert expected == pytest.approx(divergence, rel=1e-5)


def test_rebel_is_a_regression_on_all_pairs_of_a_group():
  # Log-ratios 0.3 and 0.1, rewards 1 and 0, eta 1: both pairs of different
  # responses have (0.2 - 1)^2 = 0.64, and x = -0.7, 0.1 the variance 0.64 / 4.
  pair = jnp.array([[0.3, 0.1]]) - jnp.array([[1.0, 0.0]])
  assert jnp.var(pair) == pytest.approx(0.16)
  rewards = jnp.array([1.0, 0.0, 2.5])
  rows = jnp.array([[0, 0, 1, 2, 2, 2]])
  old = jnp.array([[-1.0, -2.0, -0.5, -3.0, -1.0, -0.2]])

  def of_pairs(log_probs, eta=0.5):
    x = jax.ops.segment_sum((log_probs - old)[0], rows[0], 3) / eta - rewards
    return jnp.mean((x[:, None] - x[None, :]) ** 2)

  loss = losses.make('row_regression', log_ratio_to='old', log_ratio_weight=2.0)
  assert not losses.needs_reference(loss)
  columns = {
    'advantages': (rewards - rewards.mean())[rows],
    'old_log_probs': old,
  }
  tokens = token_batch.make(jnp.ones_like(rows, bool), rows, columns)
  lengths = jnp.array([2, 1, 3])[rows]

  def of_rows(log_probs):
    outputs = token_batch.PolicyOutputs(log_probs, log_probs)
    return jnp.sum(loss(outputs, tokens)[0] / lengths) / 3

  # Twice, because a pair has two responses.
  np.testing.assert_allclose(
    jax.jit(jax.grad(of_pairs))(old),
    2 * jax.jit(jax.grad(of_rows))(old),
    rtol=1e-5,
  )


def test_entropy_band_by_hand():
  band = losses.EntropyBand(weight=0.5, low=0.5, high=2.0)
  # The mean of the past entropies is 1; beta is 2 in the first iteration, then
  # 1 + 1 / e and 1 + 1 / e^2.
  columns = [band.make_columns([0.5, 1.5], k, 150) for k in (0, 75, 150)]
  weights = [c['entropy_band_weight'] for c in columns]
  np.testing.assert_allclose(weights, [1, 1.3679 / 2, 1.1353 / 2], atol=1e-4)
  assert columns[0]['entropy_low'] == 0.5
  assert columns[0]['entropy_high'] == 2.0
  assert band.make_columns([], 0, 150)['entropy_band_weight'] == 0
  # Half of one iteration counts as one, half of three as well.
  factors = [band.weight_factor(1, n) for n in (1, 2, 3)]
  np.testing.assert_allclose(factors, [1.3679] * 3, atol=1e-4)
  entropies = jnp.array([[2.5, 1.0, 0.2, 2.0]])
  tokens = token_batch.make(
    jnp.ones((1, 4), bool),
    jnp.zeros((1, 4), jnp.int32),
    {name: jnp.full((1, 4), x) for name, x in columns[0].items()},
  )
  penalty = band.penalty(entropies, tokens)
  np.testing.assert_allclose(penalty, [[0.5, 0, 0.3, 0]], atol=1e-6)
  slope = jax.grad(lambda x: band.penalty(x, tokens).sum())(entropies)
  np.testing.assert_allclose(slope[0, :3], [1, 0, -1], atol=0)


def test_an_entropy_band_may_be_a_point_or_unused():
  losses.EntropyBand(weight=1.0, low=1.0, high=1.0)
  losses.EntropyBand(weight=0.0, low=2.0, high=1.0)


def test_an_entropy_band_is_for_masked_tokens_only():
  columns = losses.EntropyBand(weight=1.0).make_columns([1.0], 0, 2)
  tokens = token_batch.make(
    jnp.array([[True, False]]),
    jnp.zeros((1, 2), jnp.int32),
    {name: jnp.full((1, 2), x) for name, x in columns.items()},
  )
  penalty = losses.EntropyBand().penalty(jnp.full((1, 2), 2.2), tokens)
  np.testing.assert_allclose(penalty, [[2.0, 0]], atol=1e-6)


def test_entropy_band_in_the_loss():
  # Entropies 0.3, 0.4 and 0.5; the bounds 0.35 and 0.45.
  inputs = arguments(
    entropy_low=jnp.full((2, 2), 0.35),
    entropy_high=jnp.full((2, 2), 0.45),
    entropy_band_weight=jnp.full((2, 2), 3.0),
  )
  (plain, _), (with_band, metrics) = (
    policy_gradient(
      inputs, entropy_weight=0.2, entropy_band=losses.EntropyBand(weight=weight)
    )
    for weight in (0.0, 1.0)
  )
  np.testing.assert_allclose(
    with_band - plain, [[0.2 * 3 * 0.05, 0], [0.2 * 3 * 0.05, 0]], atol=1e-6
  )
  np.testing.assert_allclose(
    metrics['loss/entropy_outside'], [[0.15, 0], [0.15, 0]], atol=1e-6
  )


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'ratio_level': 'word'}, 'ratio_level=word: .* token, row'),
    ({'kl_clamp': 81.0}, 'kl_clamp=81.0: .* at most 80; None is off'),
    (
      {'entropy_band': {'weight': -1.0}},
      'entropy_band.weight=-1.0: .* at least 0; 0 is off',
    ),
    (
      {'entropy_band': {'weight': 1.0, 'low': 9.0}},
      'entropy_band.low=9.0: above entropy_band.high=1.2',
    ),
    (
      {'entropy_band': {'weight': 1.0}, 'entropy_weight': 0.0},
      'entropy_band.weight=1.0: is a multiple of entropy_weight',
    ),
    ({'name': 'policy'}, 'name=policy: unknown .*one of policy_gradient'),
    ({'name': 'gigpo_jax.nothing:loss'}, 'name=.*: unknown .*module:function'),
    ({'name': 'math:tau_of'}, 'name=math:tau_of: unknown'),
    (
      {'clip_epsilom': 0.1},
      '^clip_epsilom=0.1: no option of policy_gradient; did you mean '
      'clip_epsilon. must be one of surrogate, ',
    ),
    (
      {'name': f'{__name__}:reinforce', 'clip_epsilon': 0.1},
      '^clip_epsilon=0.1: no option of .*; must be one of none',
    ),
  ],
  ids=str,
)
def test_rejected_options_are_reported_in_one_line(options, message):
  with pytest.raises(ValueError, match=message) as error:
    losses.make(**options)
  assert '\n' not in str(error.value)


@dataclasses.dataclass(frozen=True)
class Reinforce:
  """A loss of another project, with an option."""

  kl_weight: float = 0.0
  columns = ('advantages',)

  def __call__(self, outputs, tokens):
    return -outputs.log_probs * tokens.advantages, {}


def reinforce(outputs, tokens):
  return -outputs.log_probs * tokens.advantages, {}


def test_losses_are_made_by_name():
  loss = losses.make(
    'policy_gradient',
    clip_epsilon=0.1,
    entropy_band={'weight': 2.0},
  )
  band = losses.EntropyBand(weight=2.0)
  assert loss == losses.PolicyGradient(clip_epsilon=0.1, entropy_band=band)
  adaptive = dataclasses.replace(loss, kl_target=0.1)
  assert set(adaptive.columns) == set(losses.TRAINING_COLUMNS)
  assert set(adaptive.columns) - set(loss.columns) == {losses.KL_COLUMN}
  own, function = (
    losses.of_section(
      {'name': f'{__name__}:{name}', 'clip_epsilon': 0.1, 'kl_weight': 0.5}
    )
    for name in ('Reinforce', 'reinforce')
  )
  assert own == losses.make(f'{__name__}:Reinforce', kl_weight=0.5)
  assert own == Reinforce(kl_weight=0.5)
  assert function.columns == losses.POLICY_COLUMNS
  inputs = arguments(advantages=jnp.ones((2, 2)))
  np.testing.assert_array_equal(run(function, inputs)[0], -inputs['log_probs'])


def test_the_old_function_warns_and_gives_the_same_loss():
  inputs = arguments()
  expected, _ = policy_gradient(inputs, kl_weight=0.1)
  rows = inputs.pop('row_ids')
  with pytest.warns(DeprecationWarning, match='use losses.PolicyGradient'):
    loss, _ = losses.policy_gradient(**inputs, rows=rows, kl_weight=0.1)
  np.testing.assert_array_equal(loss, expected)
  inputs['ref_log_probs'] = None
  with (
    pytest.warns(DeprecationWarning),
    pytest.raises(ValueError, match='kl_weight=0.01: needs ref_log_probs'),
  ):
    losses.policy_gradient(**inputs, rows=rows)


def random_inputs(seed, *, band=False):
  rng = np.random.default_rng(seed)
  shape = (3, 10)
  names = ('log_probs', 'old_log_probs', 'ref_log_probs')
  inputs = {name: rng.normal(-1, 0.4, shape) for name in names}
  inputs |= {
    'entropies': rng.uniform(0, 3, shape),
    'advantages': rng.normal(0, 2, shape),
    'importance': rng.uniform(0, 2, shape),
  }
  if band:
    inputs |= {
      'entropy_low': np.full(shape, 1.0),
      'entropy_high': np.full(shape, 2.0),
      'entropy_band_weight': np.full(shape, 1.5),
    }
  inputs = {name: x.astype(np.float32) for name, x in inputs.items()}
  return inputs | {
    'mask': rng.random(shape) < 0.8,
    'row_ids': np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32),
  }


@pytest.mark.parametrize('level', losses.RATIO_LEVELS)
@pytest.mark.parametrize(
  'options',
  [
    {},
    {'clip_epsilon': 3e-3, 'clip_epsilon_high': 4e-3},
    {'dual_clip': 1.5, 'kl_weight': 0.0},
    {'clip_epsilon_high': 0.5, 'entropy_weight': 0.3, 'kl_weight': 0.5},
    {'kl_weight': 0.5, 'kl_clamp': 0.05},
  ],
  ids=str,
)
@pytest.mark.parametrize('with_band', [False, True])
def test_loss_matches_a_slow_reference(level, options, with_band):
  band = losses.EntropyBand(weight=float(with_band))
  for seed in range(4):
    inputs = random_inputs(seed, band=with_band)
    actual, _ = policy_gradient(
      {name: jnp.asarray(x) for name, x in inputs.items()},
      ratio_level=level,
      entropy_band=band,
      **options,
    )
    expected = slow_losses.policy_gradient(inputs, ratio_level=level, **options)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def gradient_of(inputs, **options):
  """Returns the gradient of the loss with respect to the log-probs."""
  inputs = jax.tree.map(jnp.asarray, inputs)

  def total(log_probs):
    changed = inputs | {'log_probs': log_probs}
    return jnp.sum(policy_gradient(changed, **options)[0])

  return jax.jit(jax.grad(total))(inputs['log_probs'])


@pytest.mark.parametrize('level', losses.RATIO_LEVELS)
@pytest.mark.parametrize(
  'options',
  [{}, {'dual_clip': 1.5, 'kl_weight': 0.5, 'kl_clamp': 0.05}],
  ids=str,
)
def test_gradients_match_a_slow_reference(level, options):
  for seed in range(2):
    inputs = random_inputs(seed)
    actual = gradient_of(inputs, ratio_level=level, **options)
    expected = slow_losses.slopes(inputs, ratio_level=level, **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_tokens_of_a_row_keep_their_importance():
  # Ratio 1, advantage 1: the gradient of a token is minus its own weight, and
  # not minus the mean of the weights, 1.25.
  inputs = row_arguments([0.0, 0.0], [0, 0])
  inputs['importance'] = jnp.array([[2.0, 0.5]])
  gradient = gradient_of(inputs, ratio_level='row', **SURROGATE_ONLY)
  np.testing.assert_allclose(gradient, [[-2.0, -0.5]], rtol=1e-6)


def test_equal_importance_gives_the_gradient_of_gspo():
  # Without fixed log-probs, this is the derivative of the row's ratio.
  inputs = random_inputs(0)
  inputs['importance'][:] = 1
  inputs['advantages'] = (1.0 + inputs['row_ids']).astype(np.float32)
  actual = gradient_of(inputs, ratio_level='row', **SURROGATE_ONLY)
  expected = slow_losses.slopes(
    inputs | {'fixed_log_probs': None}, ratio_level='row', **SURROGATE_ONLY
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
def test_aggregation_matches_a_slow_reference(aggregation):
  rng = np.random.default_rng(0)
  for _ in range(10):
    lengths = rng.integers(0, 9, 12)
    sums = np.where(lengths, rng.normal(size=12), 0)
    weights = losses.row_weights(lengths, 9, aggregation)
    assert float(np.sum(weights * sums)) == pytest.approx(
      slow_losses.aggregated(sums, lengths, 9, aggregation), abs=1e-6
    )


def test_value_regression_matches_a_slow_reference():
  rng = np.random.default_rng(0)
  values, old_values, targets = rng.normal(size=(3, 1, 40)).astype(np.float32)
  weights = rng.uniform(0, 2, (1, 40)).astype(np.float32)
  mask = rng.random((1, 40)) < 0.7
  columns = {
    'old_values': old_values,
    'value_targets': targets,
    'value_weights': weights,
  }
  tokens = token_batch.make(
    jnp.asarray(mask),
    jnp.zeros((1, 40), jnp.int32),
    jax.tree.map(jnp.asarray, columns),
  )
  outputs = token_batch.ValueOutputs(jnp.asarray(values))
  actual, _ = losses.ValueRegression(value_clip=0.5)(outputs, tokens)
  unmasked = slow_losses.value_regression(
    values[0], old_values[0], targets[0], weights[0], 0.5
  )
  expected = np.where(mask[0], unmasked, 0)
  np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-6)


def test_unknown_estimators_and_levels_are_refused():
  zeros = np.zeros((1, 2), np.float32)
  with pytest.raises(ValueError, match=r'^estimator=k4: unknown; must be one'):
    kl.estimate(zeros, zeros, 'k4')
  with pytest.raises(ValueError, match=r'^tis_level=rows: unknown; must be'):
    losses.truncated_importance(zeros, zeros, 2.0, 'rows')
