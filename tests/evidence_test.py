"""Tests of tables over all environments against hand-worked values."""

import numpy as np
import pytest
import scipy.stats

from gigpo_jax.tools import evidence, outcomes, paired


def _results(rates):
  """Returns results of given rates by environment, method and seed."""
  return {
    environment: {
      name: {
        seed: outcomes.Result(environment, name, seed, 4, rate)
        for seed, rate in enumerate(by_seed)
      }
      for name, by_seed in by_name.items()
    }
    for environment, by_name in rates.items()
  }


def _rows(table):
  """Returns the cells of a table, without its head."""
  return [
    [cell.strip() for cell in line.split('|')[1:-1]]
    for line in table.splitlines()[2:]
  ]


def test_an_average_by_hand():
  # Gaps 0.1, 0.3 and 0.5, 0.5, 0.8: means 0.2 and 0.6, variances of the means
  # 0.01 and 0.01. Equal variances: (0.02)^2 / (0.01^2 / 1 + 0.01^2 / 2) = 8/3.
  gaps = [paired.compare_seeds(x) for x in ([0.1, 0.3], [0.5, 0.5, 0.8])]
  assert [gap.error**2 for gap in gaps] == pytest.approx([0.01, 0.01])
  result = evidence.average(gaps)
  error = 0.02**0.5 / 2
  half = scipy.stats.t.ppf(0.975, 8 / 3) * error
  assert result[:3] == pytest.approx((0.4, 0.4 - half, 0.4 + half))
  t = 0.4 / error
  assert result.p == pytest.approx(2 * scipy.stats.t.sf(t, 8 / 3))
  # Of two means, Welch's F is the square of Welch's t: 0.4 / sqrt(0.02).
  welch = scipy.stats.ttest_ind([0.1, 0.3], [0.5, 0.5, 0.8], equal_var=False)
  assert result.differ == pytest.approx(welch.pvalue)
  assert np.isnan(evidence.average(gaps[:1]).differ)


def test_differences_without_variance_have_an_average():
  equal = [paired.compare_seeds(np.array([x, x])) for x in (0.25, 0.5)]
  result = evidence.average(equal)
  assert result[:3] == pytest.approx((0.375, 0.375, 0.375))
  assert result.differ < 1e-9


def test_averages_cover_the_mean_of_the_environments():
  rng = np.random.default_rng(0)
  covered, differ = [], []
  for _ in range(500):
    gaps = [
      paired.compare_seeds(rng.normal(mean, deviation, seeds))
      for mean, deviation, seeds in ((0, 1, 5), (0, 0.3, 10), (0, 2, 7))
    ]
    result = evidence.average(gaps)
    covered.append(result.low <= 0 <= result.high)
    differ.append(result.differ < 0.05)
  assert 0.92 <= np.mean(covered) <= 0.98 and np.mean(differ) < 0.08


def test_groups_with_the_same_environments_have_one_row():
  tests = _results(
    {
      'a': {'grpo': [0.1, 0.2], 'gigpo': [0.3, 0.5]},
      'b': {'grpo': [0.1, 0.2], 'gigpo': [0.2, 0.5]},
      'c': {'grpo': [0.1, 0.2], 'gigpo': [0.4]},
    }
  )
  pairs = [('gigpo', 'grpo'), ('g2po', 'grpo')]
  groups = {'all': 'abc', 'first': 'ab', 'last': 'bc'}
  ((name, shown, points, *_),) = _rows(
    evidence.averages_table(tests, pairs, groups)
  )
  # Gaps 0.2, 0.3 and 0.1, 0.3: means 0.25 and 0.2.
  assert (name, shown) == ('gigpo - grpo', 'all (2)')
  assert points.startswith('+22.5 [')


def test_further_seeds_are_compared_alone():
  first, further = [0.1] * 5, [0.2, 0.3]
  tests = _results(
    {
      'a': {
        'grpo': first + further,
        'gigpo': [0.2] * 5 + [0.5, 0.4],
        'rloo': first,
      }
    }
  )
  rows = _rows(evidence.added_table(tests, ['grpo']))
  assert [row[:2] for row in rows] == [['a', 'gigpo']]
  assert rows[0][2].startswith('+10.0') and rows[0][3].startswith('+20.0')


def test_ranks_are_those_of_clear_differences():
  rng = np.random.default_rng(0)
  means = {'low': 0.1, 'one': 0.5, 'two': 0.5, 'high': 0.9}
  tests = _results(
    {
      environment: {
        name: list(rng.normal(mean, 0.01, 5)) for name, mean in means.items()
      }
      for environment in 'ab'
    }
    | {'c': {'low': [0.5] * 5}}
  )
  rows = _rows(evidence.ranks_table(tests, least_methods=4))
  assert rows[0][0] == 'high' and rows[0][2] == '1 [1, 1]'
  assert rows[3][0] == 'low' and rows[3][2] == '4 [4, 4]'
  assert {row[2][2:] for row in rows[1:3]} == {'[2, 3]'}


def test_power_by_hand():
  # Gaps 0.1, 0.2 and 0.3: deviation 0.1, error 0.1 / sqrt(3).
  tests = _results({'a': {'grpo': [0, 0, 0], 'gigpo': [0.1, 0.2, 0.3]}})
  ((*_, deviation, detected, bound, seeds),) = _rows(
    evidence.power_table(tests, 'gigpo', 'grpo')
  )
  assert deviation == '10.0'
  # Student's t with 2 degrees of freedom: 2.920.
  assert bound == f'{20 + 2.920 * 10 / 3**0.5:+.1f}'
  assert int(seeds) == paired.seeds_needed(2, 10)
  difference = float(detected) / 100
  draws = np.random.default_rng(0).normal(difference, 0.1, (20_000, 3))
  rejected = scipy.stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
  assert rejected.mean() == pytest.approx(0.8, abs=0.01)


def test_power_counts_the_noise_of_tasks():
  # Gaps 1 0 and 0 1: the seeds agree by chance.
  by_seed = {'gigpo': [(1, 0), (0, 1)], 'grpo': [(0, 0), (0, 0)]}
  tests = outcomes.group(
    [
      outcomes.make_result(
        ('a', name, seed),
        {t: [bool(x)] for t, x in zip('ab', successes, strict=True)},
      )
      for name, by_task in by_seed.items()
      for seed, successes in enumerate(by_task)
    ]
  )
  gap = paired.compare_results(tests['a']['gigpo'], tests['a']['grpo'])
  ((*_, deviation, detected, _, seeds),) = _rows(
    evidence.power_table(tests, 'gigpo', 'grpo')
  )
  assert deviation == '0.0' and gap.error > 0
  noise = gap.error * 2**0.5
  assert detected == f'{100 * paired.detectable(noise, 2):.1f}'
  assert int(seeds) == paired.seeds_needed(0.02, noise)


def test_further_seeds_and_unfinished_methods_change_no_order():
  rng = np.random.default_rng(0)
  names = 'abcdef'
  rates = {e: {name: list(rng.random(5)) for name in names} for e in ('x', 'y')}
  measures = {e: {name: rng.random() for name in names} for e in rates}
  tests = _results(rates)
  ranks = evidence.ranks_table(tests, least_methods=6)
  order = evidence.order_table(tests, measures, least=5)
  for by_name in rates.values():
    by_name['a'] += [9.0] * 5
  tests = _results(rates)
  assert evidence.order_table(tests, measures, least=5) == order
  rates['x']['g'] = rates['y']['g'] = [0.5] * 4
  assert evidence.ranks_table(_results(rates), least_methods=6) == ranks


def test_the_noise_of_ranks_is_enlarged():
  # A third of the resamples of `high` lack its last seed: their mean is 0.5,
  # and 0.52 - 0.02 sqrt(5 / 4) = 0.4976 after the enlargement.
  rates = {'a': {'high': [0.5] * 4 + [0.6], 'low': [0.499] * 5}}
  rows = _rows(evidence.ranks_table(_results(rates), least_methods=2))
  assert rows == [['high', '52.0', '1 [1, 2]'], ['low', '49.9', '2 [1, 2]']]
  # No environment has enough methods yet.
  assert not _rows(evidence.ranks_table(_results(rates), least_methods=3))


def test_methods_with_equal_success_have_no_significant_order():
  rates = {'x': {name: [0.5] for name in 'abcde'}}
  measures = {'x': {name: n / 5 for n, name in enumerate('abcde')}}
  with np.errstate(invalid='ignore'):
    (row,) = _rows(evidence.order_table(_results(rates), measures, least=5))
  assert row[3] == '1'


def test_orders_as_far_from_0_as_the_observed_one_count():
  # Of the six orders of three methods, two have a correlation of 1 or -1.
  rates = {'x': {'a': [0.1], 'b': [0.2], 'c': [0.3]}}
  measures = {'x': {'a': 3.0, 'b': 2.0, 'c': 1.0}}
  (row,) = _rows(evidence.order_table(_results(rates), measures, least=3))
  assert row[2] == '-1.00'
  assert float(row[3]) == pytest.approx(1 / 3, abs=0.02)


def test_rank_correlations_are_those_of_scipy():
  rng = np.random.default_rng(0)
  rates = {e: {n: [rng.random()] for n in 'abcdefgh'} for e in ('x', 'y')}
  measures = {
    e: {n: values[0] + 0.3 * rng.random() for n, values in by_name.items()}
    for e, by_name in rates.items()
  }
  *rows, mean = _rows(
    evidence.order_table(_results(rates), measures | {'z': {'a': 1.0}}, 5)
  )
  values = []
  for environment, count, value, p in rows:
    expected = scipy.stats.spearmanr(
      list(measures[environment].values()),
      [x for (x,) in rates[environment].values()],
    )
    assert count == '8' and value == f'{expected.statistic:+.2f}'
    assert float(p) == pytest.approx(expected.pvalue, abs=0.02)
    values.append(expected.statistic)
  assert mean[0] == 'mean' and mean[2] == f'{np.mean(values):+.2f}'
