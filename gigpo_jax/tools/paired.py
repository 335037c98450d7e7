"""Compare methods whose runs share seeds and test tasks.

A method has one policy per seed, and each policy has played the same tasks. The
outcomes of a method are an array [S, T] of seeds and tasks, so that two methods
are compared entry by entry. Where the outcomes of tasks are not known, the mean
success of the policies is compared seed by seed.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy  # Loads its subpackages when they are used.
from jaxtyping import Float, Int

from gigpo_jax import metrics
from gigpo_jax.tools import outcomes, plots

_RESAMPLES = 10_000
# Smaller gaps between mean outcomes are rounding errors: thirds do not cancel.
_ROUNDING = 1e-12
BY_SEED = '*'  # Mark of an interval that covers other seeds only.


class Difference(NamedTuple):
  """Mean outcome of a method minus that of another one.

  Attributes:
    mean: mean difference over seeds and tasks.
    low: lower end of its 95 % t-interval; NaN if it is not known.
    high: upper end.
    p: p-value of the two-sided t-test of the same variance; 1 for one seed.
    deviation: standard deviation of the differences of seeds.
    seeds: number of seeds that both methods have.
    by_task: whether tasks were compared, so that the interval covers them.
    error: standard error of `mean`; NaN for a single seed.
  """

  mean: float
  low: float
  high: float
  p: float
  deviation: float
  seeds: int
  by_task: bool = True
  error: float = np.nan

  def __str__(self) -> str:
    """Returns the difference and its interval in points."""
    mark = '' if self.by_task or np.isnan(self.low) else BY_SEED
    return points(self.mean, self.low, self.high) + mark


def points(mean: float, low: float, high: float) -> str:
  """Returns a difference and its interval in points, without one if NaN."""
  return f'{100 * mean:+.1f} {interval(low, high)}'.rstrip()


def interval(low: float, high: float) -> str:
  """Returns an interval in points; '' if it is not known."""
  if np.isnan(low):
    return ''
  return f'[{100 * low:+.1f}, {100 * high:+.1f}]'


def compare(
  one_ST: Float[np.ndarray, 'S T'], other_ST: Float[np.ndarray, 'S T']
) -> Difference:
  """Compares two methods on the same seeds and tasks.

  Seeds and tasks are random effects of a two-way layout. With the mean squares
  M_S of seeds, M_T of tasks and M_E of the residuals, the variance of the mean
  is estimated as

    (max(M_S, M_E, 1 / (6 T)) + max(M_T - M_E, 0)) / (S T),

  so that the interval covers other seeds and other tasks. It has S - 1 degrees
  of freedom, as the paired t-test over seeds, which it equals where M_S is the
  largest and tasks do not matter. M_E is the smallest variance that mean
  outcomes of T tasks can have: seeds that agree better do so by chance.
  1 / (6 T) is what rounding to multiples of 1 / T hides; means of several
  episodes per task hide less, so that their interval is too wide if S and T
  are small.

  The interval of a single seed covers other tasks only.

  Args:
    one_ST: outcomes of the first method, such as 1 for success.
    other_ST: outcomes of the other method.
  """
  gaps_ST = np.asarray(one_ST, float) - np.asarray(other_ST, float)
  seeds, tasks = gaps_ST.shape
  if seeds == 1:
    mean, low, high, *_ = compare_seeds(gaps_ST[0])
    if tasks > 1 and np.ptp(gaps_ST) == 0:
      low, high = metrics.interval_of_equal(mean, tasks, -1, 1)
    return Difference(mean, low, high, p=1.0, deviation=0.0, seeds=1)
  mean = gaps_ST.mean()
  by_seed_S1, by_task_T = gaps_ST.mean(axis=1, keepdims=True), gaps_ST.mean(0)
  rest_ST = gaps_ST - by_seed_S1 - by_task_T + mean
  residual = np.sum(rest_ST**2) / ((seeds - 1) * max(tasks - 1, 1))
  of_seeds = tasks * np.var(by_seed_S1, ddof=1)
  of_tasks = seeds * np.var(by_task_T, ddof=1) if tasks > 1 else 0.0
  # Rounding to multiples of 1 / T hides at least this much.
  least = max(residual, 1 / (6 * tasks))
  variance = max(of_seeds, least) + max(of_tasks - residual, 0)
  return _by_t(
    float(mean),
    float(variance / (seeds * tasks)) ** 0.5,
    float(by_seed_S1.std(ddof=1)),
    seeds,
  )


def compare_seeds(gaps_S: Float[np.ndarray, ' S']) -> Difference:
  """Compares two methods whose outcomes by task are not known.

  The interval is that of the paired t-test over seeds. A single seed has none.

  Args:
    gaps_S: by seed, the first method's mean outcome minus the other's.
  """
  gaps_S = np.asarray(gaps_S, float)
  mean, seeds = float(gaps_S.mean()), len(gaps_S)
  if seeds == 1:
    return Difference(mean, np.nan, np.nan, 1.0, 0.0, 1, by_task=False)
  deviation = float(gaps_S.std(ddof=1))
  gap = _by_t(mean, deviation / seeds**0.5, deviation, seeds)
  return gap._replace(by_task=False)


def _by_t(
  mean: float, error: float, deviation: float, seeds: int
) -> Difference:
  """Returns a difference with the interval and the p-value of its error.

  Without an error, the p-value is 1.
  """
  low, high = t_interval(mean, error, seeds - 1)
  p = t_test(mean, error, seeds - 1)
  return Difference(mean, low, high, p, deviation, seeds, error=error)


def t_interval(
  mean: float, error: float, freedom: float
) -> tuple[float, float]:
  """Returns the 95 % t-interval of a mean.

  Args:
    mean: the mean.
    error: its standard error.
    freedom: degrees of freedom.
  """
  half = float(scipy.stats.t.ppf(0.975, freedom)) * error
  return mean - half, mean + half


def t_test(mean: float, error: float, freedom: float) -> float:
  """Returns the two-sided p-value of a mean; 1 without an error.

  Args:
    mean: the mean.
    error: its standard error.
    freedom: degrees of freedom.
  """
  if error < _ROUNDING:
    return 1.0
  return float(2 * scipy.stats.t.sf(abs(mean) / error, freedom))


def bootstrap(
  one_ST: Float[np.ndarray, 'S T'], other_ST: Float[np.ndarray, 'S T']
) -> tuple[float, float]:
  """Returns the 95 % bootstrap interval of a difference, for comparison.

  A percentile bootstrap that draws seeds and tasks with replacement,
  independently of each other (Owen 2007, "The pigeonhole bootstrap",
  arXiv:0712.1111). It is too narrow where few seeds differ much, and too wide
  where they differ less than outcomes of single tasks.

  Args:
    one_ST: outcomes of the first method, such as 1 for success.
    other_ST: outcomes of the other method.
  """
  gaps_ST = np.asarray(one_ST, float) - np.asarray(other_ST, float)
  seeds, tasks = gaps_ST.shape
  seed_share_BS, task_share_BT = _resamples(seeds, tasks)
  means_B = np.einsum('bt,bt->b', seed_share_BS @ gaps_ST, task_share_BT)
  low, high = np.percentile(means_B / (seeds * tasks), [2.5, 97.5])
  return float(low), float(high)


@functools.lru_cache(maxsize=2)  # Tens of MB each; a table has few sizes.
def _resamples(
  seeds: int, tasks: int
) -> tuple[Int[np.ndarray, 'B S'], Int[np.ndarray, 'B T']]:
  """Returns how often each resample has each seed and each task."""
  rng = np.random.default_rng(0)
  return tuple(
    rng.multinomial(n, [1 / n] * n, _RESAMPLES) for n in (seeds, tasks)
  )


def interquartile_mean(rates_S: Float[np.ndarray, ' S']) -> float:
  """Returns the mean without the lowest and the highest quarter of the values.

  As rliable (arXiv:2108.13264) computes it; a quarter of the number of values
  is rounded down.

  Args:
    rates_S: one value per seed.
  """
  return float(scipy.stats.trim_mean(rates_S, 0.25))


def holm(p_values: Sequence[float]) -> list[float]:
  """Returns p-values that are adjusted for their number (Holm 1979).

  Rejecting those below a level makes a false rejection among all of them no
  more likely than the level.

  Args:
    p_values: p-values of all comparisons of a family.
  """
  order = np.argsort(p_values)
  factors = len(p_values) - np.arange(len(p_values))
  adjusted = np.maximum.accumulate(factors * np.asarray(p_values)[order])
  result = np.empty(len(p_values))
  result[order] = np.minimum(adjusted, 1)
  return result.tolist()


def seeds_needed(
  difference: float,
  deviation: float,
  *,
  power: float = 0.8,
  level: float = 0.05,
) -> int:
  """Returns the number of seeds with which a difference is probably detected.

  It is the smallest number for which the two-sided paired t-test rejects with
  the given probability; at least 2.

  Args:
    difference: true mean difference between two methods.
    deviation: standard deviation of the differences of seeds; same unit.
    power: probability of rejecting.
    level: significance level of the test.

  Raises:
    ValueError: if no number of seeds is sufficient.
  """
  if difference and deviation < _ROUNDING:
    return 2
  for seeds in range(2, 10_000 if difference else 0):
    critical = scipy.stats.t.ppf(1 - level / 2, seeds - 1)
    shift = abs(difference) / deviation * seeds**0.5
    # The other tail is negligible at the powers that one asks for.
    if scipy.stats.nct.sf(critical, seeds - 1, shift) >= power:
      return seeds
  raise ValueError(
    f'difference={difference}: too small for any number of seeds with '
    f'deviation={deviation}'
  )


def detectable(deviation: float, seeds: int) -> float:
  """Returns the difference that is detected with a probability of 80 %.

  It is that of `seeds_needed` with its default power and level.

  Args:
    deviation: standard deviation of the differences of seeds.
    seeds: number of seeds.
  """
  critical = scipy.stats.t.ppf(0.975, seeds - 1)
  shift = scipy.optimize.brentq(
    lambda x: scipy.stats.nct.sf(critical, seeds - 1, x) - 0.8, 0, 100
  )
  return float(shift * deviation / seeds**0.5)


def compare_results(
  one: Mapping[int, outcomes.Result], other: Mapping[int, outcomes.Result]
) -> Difference | None:
  """Compares two methods on the seeds that both have; None without any.

  Tasks are compared if the outcomes of all these policies are known.

  Args:
    one: results of the first method, by seed.
    other: results of the other method, by seed.
  """
  seeds = sorted(one.keys() & other.keys())
  if not seeds:
    return None
  if by_task := pair_outcomes(one, other):
    return compare(*by_task)
  return compare_seeds(
    np.array([one[seed].success - other[seed].success for seed in seeds])
  )


def pair_outcomes(
  one: Mapping[int, outcomes.Result], other: Mapping[int, outcomes.Result]
) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns outcomes [S, T] of both methods on the seeds that both have.

  None if there is no such seed, or if an outcome is not known.
  """
  seeds = sorted(one.keys() & other.keys())
  pair = [
    [by_seed[seed].outcomes_T for seed in seeds] for by_seed in (one, other)
  ]
  if not seeds or any(x is None for side in pair for x in side):
    return None
  return np.array(pair[0]), np.array(pair[1])


def compare_all(
  results: outcomes.Results, first: str
) -> dict[str, tuple[Difference, float]]:
  """Returns the difference of each method from one of them, and its p-value.

  The p-values are adjusted for the number of methods.

  Args:
    results: results by method and seed.
    first: the method with which the others are compared.

  Raises:
    ValueError: in one line, if policies have played different tasks.
  """
  check_tasks(results)
  gaps = {
    name: compare_results(by_seed, results[first])
    for name, by_seed in results.items()
    if name != first
  }
  gaps = {name: gap for name, gap in gaps.items() if gap is not None}
  adjusted = holm([gap.p for gap in gaps.values()])
  return dict(zip(gaps, zip(gaps.values(), adjusted, strict=True), strict=True))


def summarize(by_seed: Mapping[int, outcomes.Result]) -> tuple[str, str]:
  """Returns mean and interquartile mean of success over seeds, in percent."""
  rates_S = np.array([100 * result.success for result in by_seed.values()])
  return f'{rates_S.mean():.1f}', f'{interquartile_mean(rates_S):.1f}'


def table(results: outcomes.Results) -> str:
  """Returns a Markdown table of methods, each compared with the first.

  Args:
    results: results by method and seed.

  Raises:
    ValueError: in one line, if policies have played different tasks.
  """
  first, *_ = results
  differences = compare_all(results, first)
  rows = []
  for name, by_seed in results.items():
    cells = ['', '', '']
    if name in differences:
      gap, adjusted = differences[name]
      cells = [str(gap), gap.seeds, f'{adjusted:.2g}']
    rows.append((name, len(by_seed), *summarize(by_seed), *cells))
  tasks = max(result.tasks for result in results[first].values())
  columns = 'method', 'seeds', f'success, {tasks} tasks', 'IQM'
  gaps = f'minus {first}, 95 %', 'pairs', 'p (Holm)'
  return plots.table((*columns, *gaps), rows)


def check_tasks(results: outcomes.Results) -> None:
  """Checks that all policies have played the same tasks, as far as is known.

  Raises:
    ValueError: in one line, if they have not.
  """
  tasks, task_list = 0, ''
  for name, by_seed in results.items():
    for seed, result in by_seed.items():
      tasks, task_list = tasks or result.tasks, task_list or result.task_list
      if result.tasks != tasks or result.task_list not in ('', task_list):
        raise ValueError(
          f'{name}, seed {seed}: has other test tasks than the runs before it; '
          'delete its folder test/ and rerun the sweep'
        )
