"""Tests of paired comparisons against hand-worked and published values."""

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.stats

from gigpo_jax.tools import outcomes, paired


def test_a_difference_by_hand():
  # Gaps 1 0 0 1 and 0 0 1 0: means 1/2 and 1/4 of seeds, 1/2 0 1/2 1/2 of
  # tasks. M_S = 4 / 32, M_T = 2 / 16, and M_E = 11 / 24, the largest.
  one = [[1, 1, 0, 1], [1, 0, 1, 1]]
  other = [[0, 1, 0, 0], [1, 0, 0, 1]]
  gap = paired.compare(one, other)
  assert (gap.mean, gap.seeds) == (0.375, 2)
  assert gap.deviation == pytest.approx(0.125 * 2**0.5)
  assert gap.error == pytest.approx((11 / 24 / 8) ** 0.5)
  # With one degree of freedom: 1 - 2 atan(t) / pi, and t = 12.706 at 95 %.
  t = 0.375 / gap.error
  assert gap.p == pytest.approx(1 - 2 * np.arctan(t) / np.pi)
  half = 12.7062 * gap.error
  ends = 0.375 - half, 0.375 + half
  assert (gap.low, gap.high) == pytest.approx(ends, rel=1e-4)
  # Seeds 0, 1: M_S = 4 / 2 is the largest. All tasks are alike.
  gap = paired.compare([[0] * 4, [1] * 4], np.zeros((2, 4)))
  assert gap.error == pytest.approx(0.5)
  # Tasks 0, 1: M_T = 2 / 2 and M_S = M_E = 0, up to rounding to halves.
  gap = paired.compare([[0, 1], [0, 1]], np.zeros((2, 2)))
  assert gap.error == pytest.approx(((1 + 1 / 12) / 4) ** 0.5)


def test_the_bootstrap_has_the_quantiles_of_all_resamples():
  gaps = np.array([[1, 0, -1], [1, 1, 0]])
  means = [
    gaps[np.ix_(seeds, tasks)].mean()
    for seeds in itertools.product(range(2), repeat=2)
    for tasks in itertools.product(range(3), repeat=3)
  ]
  low, high = np.percentile(means, [2.5, 97.5])
  ends = paired.bootstrap(np.maximum(gaps, 0), np.maximum(-gaps, 0))
  assert ends == pytest.approx((low, high), abs=0.05)


@pytest.mark.parametrize(
  ('seeds', 'of_seeds', 'of_tasks', 'most'),
  [
    (3, 0.2, 0.05, 0.965),  # Seeds differ as much as on the lake.
    (5, 0.1, 0.2, 0.98),
    (10, 0.03, 0.3, 0.985),
    (10, 0.0, 0.0, 1.0),  # The noise of tasks is the least that counts.
  ],
)
def test_the_interval_covers_the_true_difference(
  seeds, of_seeds, of_tasks, most
):
  rng = np.random.default_rng(0)
  covered = []
  for _ in range(1000):
    gaps = rng.normal(0.1, of_seeds, (seeds, 1))
    gaps = gaps + rng.normal(0, of_tasks, 100)
    gaps = gaps + rng.normal(0, 0.6, (seeds, 100))
    gap = paired.compare(gaps, np.zeros_like(gaps))
    covered.append(gap.low <= 0.1 <= gap.high)
    # The test and the interval agree.
    assert (gap.p < 0.05) == (not gap.low <= 0 <= gap.high)
  assert 0.935 <= np.mean(covered) <= most


def test_equal_methods_and_single_seeds():
  ones = np.ones((3, 4))
  same = paired.compare(ones, ones)
  assert (same.mean, same.p, same.deviation) == (0, 1, 0)
  assert same.low < 0 < same.high  # Up to rounding.
  # Ties in thirds: sums of floats differ in their last bits.
  one = np.array([[2, 0, 2, 2], [0, 3, 1, 1]]) / 3
  other = np.array([[1, 2, 0, 3], [0, 0, 3, 2]]) / 3
  assert paired.compare(one, other).p == 1
  assert paired.compare_seeds(np.full(3, 1e-17)).p == 1
  # Without a deviation, and without a resolution to replace it.
  assert paired.compare_seeds(np.full(3, 0.1)).p == 1
  single = paired.compare([[1, 1, 0, 1]], [[0, 1, 0, 0]])
  assert (single.mean, single.p, single.seeds) == (0.5, 1, 1)
  assert single.low < 0.5 < single.high


def test_two_tied_seeds_are_no_proof():
  # Gaps of all 4 tasks in both seeds: M_S = M_T = M_E = 0, and rounding to
  # quarters leaves 1 / (6 * 4) of M_S, so t = 1 / sqrt(1 / 24 / 8).
  gap = paired.compare(np.ones((2, 4)), np.zeros((2, 4)))
  assert gap.p == pytest.approx(1 - 2 * np.arctan(192**0.5) / np.pi)
  rng = np.random.default_rng(0)
  rates = np.clip(rng.normal(0.5, 0.05, (4000, 2, 2)), 0, 1)
  outcomes_MST = rng.random((4000, 2, 2, 128)) < rates[..., None]
  ps = [paired.compare(*pair).p for pair in outcomes_MST]
  # Of equal methods, 5 % have p < 0.05; one in a thousand p < 0.001.
  assert np.mean(np.array(ps) < 0.05) < 0.06
  assert np.mean(np.array(ps) < 0.001) < 0.004


@pytest.mark.parametrize(
  ('rates', 'expected'),
  [
    ([8, 1, 2, 3, 4, 5, 6, 100], 4.5),  # Without 1, 2, 8 and 100.
    ([1, 2, 3, 4, 100], 3),
    ([1, 5], 3),
  ],
)
def test_interquartile_mean(rates, expected):
  assert paired.interquartile_mean(np.array(rates)) == expected


def test_holm_by_hand():
  # In order .005, .01, .03, .04 times 4, 3, 2, 1, made increasing.
  adjusted = paired.holm([0.01, 0.04, 0.03, 0.005])
  assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
  assert paired.holm([0.6, 0.7]) == [1, 1]


@pytest.mark.parametrize(
  ('effect', 'options', 'expected'),
  [
    (0.5, {}, 34),
    (0.8, {}, 15),
    (1.0, {}, 10),
    (0.5, {'power': 0.95}, 54),
    (0.5, {'level': 0.01}, 51),
  ],
)
def test_seeds_needed_are_those_of_tables(effect, options, expected):
  # Two-sided paired t-test, 5 %, power 80 %: G*Power gives these numbers.
  assert paired.seeds_needed(3 * effect, 3.0, **options) == expected


def test_seeds_needed_detect_the_difference():
  seeds = paired.seeds_needed(5, 6)
  draws = np.random.default_rng(0).normal(5, 6, (20_000, seeds))
  rejected = scipy.stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
  assert rejected.mean() == pytest.approx(0.8, abs=0.04)


def test_seeds_needed_without_a_deviation_or_a_difference():
  assert paired.seeds_needed(5, 0) == 2
  assert paired.seeds_needed(0.02, 1e-17) == 2  # Of equal floats.
  with pytest.raises(ValueError, match='difference=0: too small'):
    paired.seeds_needed(0, 6)
  with pytest.raises(ValueError, match='difference=0: too small'):
    paired.seeds_needed(0, 0)


def test_seeds_alone_by_hand():
  # Differences 1/2 and 1/4: mean 3/8, deviation sqrt(2)/8. The quantile of t
  # with one degree of freedom is tan(0.475 pi) = 12.706.
  found = paired.compare_seeds([0.5, 0.25])
  half = 12.706 * 0.125
  expected = (0.375, 0.375 - half, 0.375 + half)
  assert found[:3] == pytest.approx(expected, rel=1e-4)
  assert found.p == pytest.approx(1 - 2 * np.arctan(3) / np.pi)
  assert str(found) == '+37.5 [-121.3, +196.3]*'
  rng = np.random.default_rng(0)
  gaps = rng.normal(size=7)
  found = paired.compare_seeds(gaps)
  interval = scipy.stats.ttest_1samp(gaps, 0).confidence_interval()
  assert found[1:3] == pytest.approx((interval.low, interval.high))
  single = paired.compare_seeds([0.5])
  assert (str(single), single.p, single.deviation) == ('+50.0', 1, 0)


def _result(name, seed, successes, tasks='abcd', known=True):
  by_task = {t: [bool(s)] for t, s in zip(tasks, successes, strict=True)}
  result = outcomes.make_result(('toy', name, seed), by_task)
  if not known:
    result = dataclasses.replace(result, outcomes_T=None, task_list='')
  return result


def test_unknown_outcomes_are_compared_by_seed():
  one = {n: _result('a', n, s) for n, s in enumerate(((1, 1, 0, 1), (1,) * 4))}
  other = {0: _result('b', 0, (0, 1, 0, 0)), 1: _result('b', 1, (1, 0, 0, 1))}
  by_task = paired.compare_results(one, other)
  assert by_task.by_task and by_task.mean == 0.5
  other[1] = _result('b', 1, (1, 0, 0, 1), known=False)
  by_seed = paired.compare_results(one, other)
  assert by_seed == paired.compare_seeds([0.5, 0.5]) and not by_seed.by_task
  assert paired.compare_results(one, {2: other[1]}) is None


def test_the_table_compares_shared_seeds():
  successes = {
    'grpo': {0: (0, 1, 0, 0), 1: (1, 0, 0, 1)},
    'gigpo': {0: (1, 1, 0, 1), 1: (1, 0, 1, 1)},
    'ppo': {1: (1, 0, 0, 1), 2: (0, 0, 0, 0)},
  }
  methods = {
    name: {seed: _result(name, seed, x) for seed, x in by_seed.items()}
    for name, by_seed in successes.items()
  }
  lines = paired.table(methods).splitlines()
  assert 'success, 4 tasks | IQM | minus grpo, 95 %' in lines[0]
  assert lines[2] == '| grpo | 2 | 37.5 | 37.5 |  |  |  |'
  assert lines[3].startswith('| gigpo | 2 | 75.0 | 75.0 | +37.5 [')
  assert lines[3].endswith('] | 2 | 0.72 |')  # Twice 0.36, see above.
  assert lines[4].startswith('| ppo | 2 | 25.0 | 25.0 | +0.0 [')
  assert lines[4].endswith('| 1 | 1 |')
  methods['ppo'][2] = _result('ppo', 2, (0,) * 4, known=False)
  assert paired.table(methods).splitlines() == lines
  alone = paired.table({'grpo': methods['grpo']}).splitlines()
  assert alone[0] == '| method | seeds | success, 4 tasks | IQM |'
  assert alone[2] == '| grpo | 2 | 37.5 | 37.5 |'
  for wrong in (_result('ppo', 2, (0,) * 4, 'abce'), _result('', 2, (1,), 'a')):
    methods['ppo'][2] = wrong
    with pytest.raises(ValueError, match='ppo, seed 2: has other test tasks'):
      paired.table(methods)


def test_equal_gaps_of_the_tasks_of_one_seed_have_an_interval():
  gap = paired.compare(np.ones((1, 8)), np.zeros((1, 8)))
  # Wilson's 3.8415 / (8 + 3.8415) below 1.
  assert gap.low == pytest.approx(1 - 0.32441, abs=1e-5)
  assert (gap.mean, gap.high, gap.p) == (1, 1, 1)
