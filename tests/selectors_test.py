"""Tests of selectors of rows and tokens."""

import algorithm_rows
import modulators_test
import numpy as np
import pytest
import slow_plugins
from tiny_learner import (
  assert_trees_close,
  make_learner,
  make_rows,
  step,
)

from configs import alfworld
from gigpo_jax import plugins, row_stats, selectors
from gigpo_jax.selectors import (
  best_and_worst,
  capo,
  d3s,
  mismatch,
  s_grpo,
  snr,
)

NAMES = tuple(selectors.REGISTRY)


def make(name, **options):
  (selector,) = selectors.FAMILY.make({'select': (name,)} | options)
  return selector


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('truncated', {}),
    ('snr', {}),
    ('snr', {'group_share': 0.5}),
    ('best_and_worst', {'kept_episodes': 2}),
    ('best_and_worst', {'kept_episodes': 3}),
    ('capo', {}),
    ('capo', {'gain_high': 0.5, 'fisher_high': 0.1}),
    ('capo', {'gain_low': -0.01, 'gain_high': 9.0, 'fisher_high': 0.02}),
    ('mismatch', {}),
    ('mismatch', {'mismatch_level': 'row', 'mismatch_high': 3.0}),
    ('mismatch', {'mismatch_level': 'row_mean', 'mismatch_low': 0.8}),
    ('d3s', {'variance_scope': 'group', 'variance_rows': (0.1, 0.2)}),
    ('d3s', {'variance_rows': (0.1, 0.2), 'variance_tokens': (0.5, 1.0)}),
  ],
  ids=str,
)
def test_selectors_match_a_slow_reference(name, options):
  for seed in range(2 if name == 'd3s' else 4):
    groups = 1 if options.get('variance_tokens') else 3
    rows, advantages, signals = modulators_test.random_case(seed, groups)
    kept, chosen, metrics = selectors.apply(
      [make(name, **options)], advantages, rows, signals
    )
    table = slow_plugins.Table(rows, advantages, signals)
    expected = getattr(slow_plugins, name)(table, **options)
    assert set(zip(*np.nonzero(chosen), strict=True)) == expected
    np.testing.assert_array_equal(kept.real, chosen.any(axis=1))
    share = len(expected) / rows.completion_mask.sum()
    assert metrics['filter/tokens_share'] == pytest.approx(share)


def test_a_share_of_a_number_is_rounded_up():
  # In float64, 0.07 * 100 is above 7.
  counts = row_stats.share_count(0.07, np.array([0, 1, 15, 100]))
  np.testing.assert_array_equal(counts, [0, 1, 2, 7])


@pytest.mark.parametrize('scale', [1, 1e-5, 1e-8, 1e4])
@pytest.mark.parametrize(
  ('count', 'expected'),
  [(1, [-3]), (2, [2, -3]), (3, [2, 1, -3]), (4, [2, 1, -1, -3])],
)
def test_the_largest_variance_by_hand(count, expected, scale):
  values = np.array([2.0, 1, 0, -1, -3])
  chosen = d3s.largest_variance(scale * values, count)
  np.testing.assert_array_equal(values[chosen], expected)


def test_the_share_of_d3s_grows():
  rows, advantages, _ = modulators_test.random_case(0)
  outputs = {'entropies': np.ones(rows.completion_mask.shape)}
  shares = [
    selectors.apply(
      [d3s.Selector()], advantages, rows, plugins.Signals(outputs, progress)
    )[2]['filter/rows_share']
    for progress in (0.0, 0.5)
  ]
  # .25 and .375 of the rows, then .2 and .35 of their tokens: at most those.
  assert 0 < shares[0] < shares[1] <= 0.4


def test_early_tokens_are_always_kept():
  rows = algorithm_rows.random_rows(0)
  mask = rows.completion_mask
  subject = s_grpo.Selector(early_tokens=2, token_probability=0.5)
  advantages = np.ones(len(mask))
  one, same, other = (
    subject(advantages, rows, plugins.Signals(seed=(0, k))) for k in (0, 0, 1)
  )
  np.testing.assert_array_equal(one, same)
  assert (one != other).any()
  np.testing.assert_array_equal(one[:, :2], mask[:, :2])
  assert 0.3 < one[:, 2:].sum() / mask[:, 2:].sum() < 0.7
  assert not one[~mask].any()


def test_a_chain_drops_rows_one_after_another():
  # Group 0 has both outcomes, and its best and worst episodes are the first of
  # each; truncated rows then vanish from these.
  rows = algorithm_rows.golden_rows()
  rows.truncated[[1, 6]] = True
  chain = (
    snr.Selector(group_share=1.0),
    best_and_worst.Selector(kept_episodes=2),
    make('truncated'),
  )
  kept, chosen, metrics = selectors.apply(
    chain, np.ones(10), rows, plugins.Signals()
  )
  # Returns 10, 0, 10: the worst is episode 1, the best the last of equal ones.
  np.testing.assert_array_equal(np.flatnonzero(kept.real), [3, 4, 5, 7])
  assert chosen.sum() == 4
  assert metrics == {'filter/rows_share': 0.5, 'filter/tokens_share': 0.5}
  assert kept.sampler_log_probs is rows.sampler_log_probs


def test_dropped_rows_keep_their_reward():
  # The rows with the rewards of episodes 0 and 2 are truncated.
  rows = algorithm_rows.golden_rows()
  rows.truncated[[2, 7]] = True
  chain = make('truncated'), best_and_worst.Selector(kept_episodes=2)
  kept, *_ = selectors.apply(chain, np.ones(10), rows, plugins.Signals())
  # Returns 10, 0, 10 as above.
  np.testing.assert_array_equal(np.flatnonzero(kept.real), [3, 4, 5, 6])
  # Group 0 has the returns 10 and 0, group 1 has 0 and 4.
  rows = algorithm_rows.golden_rows()
  rows.groups[6:8], rows.episodes[7], rows.rewards[7] = 1, 3, 4
  rows.truncated[2] = True
  chain = make('truncated'), snr.Selector(group_share=0.5)
  kept, *_ = selectors.apply(chain, np.ones(10), rows, plugins.Signals())
  np.testing.assert_array_equal(np.flatnonzero(kept.real), [0, 1, 3, 4, 5])


def test_a_shared_turn_is_kept_with_either_episode():
  rows = algorithm_rows.golden_rows()
  # The episodes have the returns 10, 0 and 10; the first two share a turn, of
  # which another selector drops the second copy.
  rows.responses[3] = rows.responses[0]
  left = selectors.keep(rows, np.arange(10) != 3)
  subject = best_and_worst.Selector(kept_episodes=2)
  chosen = subject(np.ones(10), left, plugins.Signals(rows=rows))
  np.testing.assert_array_equal(np.flatnonzero(chosen), [0, 4, 5, 6, 7])


def test_invalid_responses_count_as_in_the_algorithm():
  # Four failures, of which one has an invalid response; GRPO's advantages are
  # 1/2, -3/2, 1/2 and 1/2.
  rows = algorithm_rows.golden_rows()
  index = np.flatnonzero(rows.real)[:4]
  rows.groups[:] = -1
  rows.groups[index], rows.episodes[index], rows.rewards[index] = 0, range(4), 0
  rows.valid[index] = True, False, True, True
  signals = plugins.Signals(invalid_penalty=0.1)
  chain = [best_and_worst.Selector(kept_episodes=2)]
  kept, *_ = selectors.apply(chain, np.ones(10), rows, signals)
  assert index[1] in np.flatnonzero(kept.real)
  # The other group has equal episodes, and is the first of equal ones.
  more = np.flatnonzero(algorithm_rows.golden_rows().real)[4:6]
  rows.groups[index], rows.groups[more] = 1, 0
  rows.episodes[more], rows.rewards[more] = (0, 1), 1
  rows.valid[more] = True
  chain = [snr.Selector(group_share=0.5)]
  kept, *_ = selectors.apply(chain, np.ones(10), rows, signals)
  np.testing.assert_array_equal(np.flatnonzero(kept.real), index)


def test_nothing_may_be_left():
  rows = algorithm_rows.golden_rows()
  rows.truncated[:] = True
  kept, chosen, metrics = selectors.apply(
    [make('truncated'), snr.Selector()], np.ones(10), rows, plugins.Signals()
  )
  assert not kept.real.any() and not chosen.any()
  assert metrics['filter/rows_share'] == 0


def test_without_tokens_capo_has_no_metrics():
  rows = algorithm_rows.golden_rows()
  rows.truncated[:] = True
  zeros = np.zeros(rows.completion_mask.shape)
  signals = plugins.Signals(dict.fromkeys(capo.Selector.needs, zeros))
  chain = make('truncated'), make('capo')
  _, chosen, metrics = selectors.apply(chain, np.ones(10), rows, signals)
  assert not chosen.any()
  assert metrics.keys() == {'filter/rows_share', 'filter/tokens_share'}


def test_options_that_choose_no_token_are_refused():
  assert make('capo', gain_low=0.5, gain_high=0.5).gain_low == 0.5
  with pytest.raises(ValueError, match='gain_low=0.6: chooses no token with'):
    make('capo', gain_low=0.6, gain_high=0.5)
  with pytest.raises(ValueError, match='token_probability=0.0: chooses no'):
    make('s_grpo', early_tokens=0, token_probability=0.0)


def test_levels_of_mismatch_by_hand():
  # Ratios 4 and .5 of two tokens: product 2, geometric mean 1.414.
  rows = modulators_test.random_case(0)[0].take(np.array([0]))
  rows.lengths[:], rows.prompt_lengths[:] = 4, 2
  rows.sampler_log_probs[:] = 0
  outputs = {'log_probs': np.log([[4, 0.5, 9, 9, 9, 9]])}
  signals = plugins.Signals(outputs)

  def keeps(level, high):
    subject = mismatch.Selector(mismatch_level=level, mismatch_high=high)
    return subject(np.ones(1), rows, signals)

  np.testing.assert_array_equal(keeps('token', 3.0)[0, :2], [False, True])
  assert not keeps('row', 1.9)[0] and keeps('row', 2.1)[0]
  assert not keeps('row_mean', 1.4)[0] and keeps('row_mean', 1.5)[0]
  # Both ends of the range are in it.
  outputs['log_probs'][:] = 0
  exact = mismatch.Selector(mismatch_low=1.0, mismatch_high=1.0)
  assert exact(np.ones(1), rows, signals).all()
  # The product is too large for a float.
  outputs['log_probs'] = np.full((1, 6), 400.0)
  assert not keeps('row', 9.9)[0]


def test_a_loss_of_rows_takes_mismatch_of_rows():
  config = alfworld.get_config('mini,mismatch')
  config.loss.name = 'row_regression'
  for level, count in (('token', 1), ('row', 0), ('row_mean', 0)):
    config.filter.mismatch_level = level
    assert len([*mismatch.conflicts(config)]) == count


def token_signals(probs, features, sampled, learning_rate):
  """Returns one row with a token for each of `probs`, and its signals."""
  rows = modulators_test.random_case(0)[0].take(np.array([0]))
  rows.prompt_lengths[:], rows.lengths[:] = 2, 2 + len(probs)
  width = rows.completion_mask.shape[1]

  def pad(values):
    return np.pad(values, (0, width - len(values)), constant_values=9)[None]

  outputs = {'feature_squares': pad(np.sum(np.square(features), axis=-1))}
  for k in (1, 2, 3):
    powers = probs**k / np.sum(probs**k, axis=-1, keepdims=True)
    name = f'log_probs@{1 / k}' if k > 1 else 'log_probs'
    outputs[name] = pad(np.log(powers[np.arange(len(probs)), sampled]))
  return rows, plugins.Signals(outputs, learning_rate=learning_rate)


def test_curvature_by_hand():
  # p .5 .3 .2, x.x = 5, A = 2, eta .1: s = .25 + .09 + .04, eta A n = 1,
  # c = .125 + .027 + .008 - .12^2 = .1456; .1 * 4 * 5 * .38 + (.38^2 - c).
  rows, signals = token_signals(
    np.array([[0.5, 0.3, 0.2]]), np.array([[1.0, 2.0]]), [0], 0.1
  )
  gain, fisher = capo.measure(np.array([2.0]), rows, signals)
  np.testing.assert_allclose(gain[0, 0], 0.7588)
  np.testing.assert_allclose(fisher[0, 0], 0.0722)
  assert not gain[0, 1:].any() and not fisher[0, 1:].any()
  subject = make('capo', gain_high=0.76, fisher_high=0.0723)
  assert subject(np.array([2.0]), rows, signals)[0].sum() == 1
  assert subject.metrics(np.array([2.0]), rows, signals) == {
    'filter/fisher_mean': pytest.approx(0.0722),
    'filter/fisher_max': pytest.approx(0.0722),
  }


def differences(function, point, size=1e-4):
  """Returns the gradient of a function, by central differences."""
  steps = size * np.eye(point.size).reshape(-1, *point.shape)
  values = [function(point + d) - function(point - d) for d in steps]
  return np.array(values).reshape(point.shape) / (2 * size)


@pytest.mark.parametrize('advantage', [1.5, -0.7])
def test_curvature_equals_finite_differences_of_softmax_regression(advantage):
  rng = np.random.default_rng(3)
  weights, features = rng.normal(size=(3, 2)), rng.normal(size=(2, 2))

  def log_prob(weights, x, y):
    logits = weights @ x
    return logits[y] - np.log(np.sum(np.exp(logits)))

  sampled, rate = [0, 2], 0.3
  probs = np.exp(
    [[log_prob(weights, x, y) for y in range(3)] for x in features]
  )
  rows, signals = token_signals(probs, features, sampled, rate)
  gain, fisher = capo.measure(np.array([advantage]), rows, signals)
  for n, (x, y) in enumerate(zip(features, sampled, strict=True)):
    old = log_prob(weights, x, y)

    def surrogate(flat, x=x, y=y, old=old):
      new = log_prob(flat.reshape(3, 2), x, y)
      return advantage * np.exp(new - old)

    flat = weights.ravel()
    grad = differences(surrogate, flat)
    step = rate * grad
    along = differences(
      lambda flat: differences(surrogate, flat) @ step,  # noqa: B023
      flat,
    )
    score = differences(lambda w, x=x, y=y: log_prob(w, x, y), weights).ravel()
    expected = grad @ step + step @ along / 2
    np.testing.assert_allclose(gain[0, n], expected, rtol=1e-5)
    information = np.outer(score, score)
    expected = step @ information @ step / 2
    np.testing.assert_allclose(fisher[0, n], expected, rtol=1e-5)


def test_certain_tokens_are_kept():
  # Rounded log-probs of near-certain tokens must not yield a negative gain.
  rng = np.random.default_rng(0)
  rest = 10.0 ** rng.uniform(-9, -3, 6)
  probs = np.stack([1 - rest, rest], axis=1)
  rows, signals = token_signals(probs, np.ones((6, 4)), [0] * 6, 1e-4)
  rounded = {k: x.astype(np.float32) for k, x in signals.outputs.items()}
  signals = plugins.Signals(rounded, learning_rate=1e-4)
  for advantage in (1.0, -1.0):
    assert make('capo')(np.array([advantage]), rows, signals).all()


def test_dropped_tokens_do_not_count_in_the_update():
  rows = make_rows()
  subject = make_learner()
  mask = rows.completion_mask
  trained = mask & (np.arange(mask.shape[1]) < 1)
  state, metrics = step(subject, rows, trained=trained)
  assert metrics['update/tokens'] == trained.sum()
  # The same as with the first tokens only, whose later tokens do not exist.
  short = selectors.keep(rows, rows.real)
  short.lengths[:] = short.prompt_lengths + trained.sum(axis=1)
  expected, expected_metrics = step(subject, short)
  assert_trees_close(state.params, expected.params, 2e-6)
  for name in ('loss/total', 'ratio/kl', 'loss/entropy'):
    assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4)
  # All tokens.
  all_tokens, _ = step(subject, rows, trained=mask)
  expected, _ = step(subject, rows)
  assert_trees_close(all_tokens.params, expected.params, 1e-7)


def test_dropped_rows_have_no_next_row():
  rows = algorithm_rows.golden_rows()
  np.testing.assert_array_equal(
    row_stats.next_rows(rows), [1, 2, -1, 4, 5, -1, 7, -1, -1, -1]
  )
  kept = selectors.keep(rows, rows.episodes != 1)
  np.testing.assert_array_equal(
    row_stats.next_rows(kept), [1, 2, -1, -1, -1, -1, 7, -1, -1, -1]
  )


def test_dropped_rows_are_not_computed():
  rows = make_rows()
  kept = selectors.keep(rows, np.arange(16) % 2 == 0)
  _, metrics = step(make_learner(), kept)
  assert metrics['update/tokens'] == rows.completion_mask[:8:2].sum()
  assert metrics['packs/tokens'] == rows.lengths[:8:2].sum()
