"""Tables of the evidence in all environments of a benchmark.

The tables of single environments detect large differences only. These average
over environments, rank the methods, and say what the seeds can detect.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float

from gigpo_jax.tools import outcomes, paired, plots

_RESAMPLES = 10_000
# Seeds that all methods have; further seeds were added for some of them.
FIRST_SEEDS = range(5)
FURTHER_SEEDS = range(5, 1000)

Tests = Mapping[str, outcomes.Results]  # By environment.
# Standard error of differences without variance.
_LEAST_ERROR = 1e-12


class Mean(NamedTuple):
  """A difference averaged over environments with equal weights.

  Attributes:
    mean: the average.
    low: lower end of its 95 % interval.
    high: upper end.
    p: two-sided p-value.
    differ: p-value of the test that the difference is the same everywhere; NaN
      for a single environment.
    environments: number of environments.
  """

  mean: float
  low: float
  high: float
  p: float
  differ: float
  environments: int


def average(gaps: Sequence[paired.Difference]) -> Mean:
  """Averages differences that were measured in several environments.

  The environments are fixed: the interval is about these, not about others. Its
  degrees of freedom are those of Satterthwaite (1946), and `differ` is Welch's
  test of equal means (1951).

  Args:
    gaps: a difference for each environment, of at least two seeds.
  """
  count = len(gaps)
  means = np.array([gap.mean for gap in gaps])
  # Equal gaps of all seeds have no variance.
  variances = np.array([max(gap.error, _LEAST_ERROR) ** 2 for gap in gaps])
  freedoms = np.array([gap.seeds - 1 for gap in gaps])
  error = float(variances.sum() ** 0.5 / count)
  freedom = variances.sum() ** 2 / np.sum(variances**2 / freedoms)
  mean = float(means.mean())
  return Mean(
    mean,
    *paired.t_interval(mean, error, freedom),
    paired.t_test(mean, error, freedom),
    _welch(means, variances, freedoms) if count > 1 else np.nan,
    count,
  )


def _welch(
  means: Float[np.ndarray, ' K'],
  variances: Float[np.ndarray, ' K'],
  freedoms: Float[np.ndarray, ' K'],
) -> float:
  """Returns the p-value of Welch's test that all means are equal."""
  weights = 1 / variances
  shares = weights / weights.sum()
  center = np.sum(shares * means)
  others = len(means) - 1
  spread = np.sum((1 - shares) ** 2 / freedoms) / (others * (others + 2))
  statistic = np.sum(weights * (means - center) ** 2) / others
  statistic /= 1 + 2 * (others - 1) * spread
  return float(scipy.stats.f.sf(statistic, others, 1 / (3 * spread)))


def averages_table(
  tests: Tests,
  pairs: Sequence[tuple[str, str]],
  groups: Mapping[str, Sequence[str]],
) -> str:
  """Returns the table of differences averaged over groups of environments.

  A group counts for a pair of methods if it has at least two environments in
  which both have two seeds in common.

  Args:
    tests: results by environment, name and seed.
    pairs: (method, other method).
    groups: environments by the name of their group.
  """
  rows = []
  for one, other in pairs:
    gaps = {}
    for environment, results in tests.items():
      gap = paired.compare_results(results.get(one, {}), results.get(other, {}))
      if gap and gap.seeds > 1:
        gaps[environment] = gap
    shown, label = set(), f'{one} - {other}'
    for name, environments in groups.items():
      chosen = tuple(e for e in environments if e in gaps)
      if len(chosen) < 2 or chosen in shown:
        continue
      shown.add(chosen)
      result = average([gaps[e] for e in chosen])
      rows.append(
        (
          *(label, f'{name} ({result.environments})'),
          paired.points(result.mean, result.low, result.high),
          *(f'{result.p:.2g}', f'{result.differ:.2g}'),
        )
      )
      label = ''
  columns = 'difference', 'environments', 'points, 95 %', 'p', 'p, equal'
  return plots.table(columns, rows)


def of_seeds(results: outcomes.Results, seeds: range) -> dict[str, dict]:
  """Returns the results of some seeds."""
  return {
    name: {seed: x for seed, x in by_seed.items() if seed in seeds}
    for name, by_seed in results.items()
  }


def added_table(tests: Tests, bases: Sequence[str]) -> str:
  """Returns differences in the first seeds and in those that were added.

  Methods that got further seeds because they were the best in the first ones
  are judged fairly by the further seeds alone.

  Args:
    tests: results by environment, name and seed.
    bases: methods with which the others are compared.
  """
  rows = []
  for environment, results in tests.items():
    first = of_seeds(results, FIRST_SEEDS)
    added = of_seeds(results, FURTHER_SEEDS)
    label = environment
    for name in results:
      cells = []
      for base in bases:
        for part in (first, added):
          gap = name != base and paired.compare_results(
            part.get(name, {}), part.get(base, {})
          )
          cells.append(str(gap) if gap and gap.seeds > 1 else '')
      if any(cells[1::2]):
        rows.append((label, name, *cells))
        label = ''
  seeds = f'seeds 0-{FIRST_SEEDS.stop - 1}', 'others'
  titles = [f'minus {base}, {part}' for base in bases for part in seeds]
  return plots.table(('environment', 'method', *titles), rows)


def ranks_table(tests: Tests, least_methods: int) -> str:
  """Returns the methods by their mean success over environments.

  Uses the first seeds only, which all methods have. The rank's interval is a
  bootstrap over the runs of each method and environment, whose deviations are
  enlarged by sqrt(S / (S - 1)) for S seeds.

  Args:
    tests: results by environment, name and seed.
    least_methods: environments with fewer methods are left out; then, methods
      that one of the environments lacks.
  """
  rates = {
    environment: {
      name: np.array([result.success for result in by_seed.values()])
      for name, by_seed in of_seeds(results, FIRST_SEEDS).items()
      if len(by_seed) == len(FIRST_SEEDS)
    }
    for environment, results in tests.items()
  }
  full = [e for e, by_name in rates.items() if len(by_name) >= least_methods]
  first = rates[full[0]] if full else ()
  names = [name for name in first if all(name in rates[e] for e in full)]
  rng = np.random.default_rng(0)
  means_NB = np.zeros((len(names), _RESAMPLES))
  for n, name in enumerate(names):
    for environment in full:
      rates_S = rates[environment][name]
      seeds = len(rates_S)
      drawn_BS = rates_S[rng.integers(seeds, size=(_RESAMPLES, seeds))]
      noise_B = (drawn_BS.mean(axis=1) - rates_S.mean()) * (
        seeds / (seeds - 1)
      ) ** 0.5
      means_NB[n] += (rates_S.mean() + noise_B) / len(full)
  centers = [np.mean([rates[e][name].mean() for e in full]) for name in names]
  ranks_NB = scipy.stats.rankdata(-means_NB, axis=0)
  rows = []
  for rank, n in enumerate(np.argsort(centers)[::-1], start=1):
    low, high = np.percentile(ranks_NB[n], [2.5, 97.5])
    interval = f'{rank} [{low:.0f}, {high:.0f}]'
    rows.append((names[n], f'{100 * centers[n]:.1f}', interval))
  title = f'mean success in % ({", ".join(full)})'
  return plots.table(('method', title, 'rank, 95 %'), rows)


def power_table(tests: Tests, one: str, other: str) -> str:
  """Returns what the seeds of each environment can detect.

  The test is that of `paired.compare`, whose error also covers tasks.

  Args:
    tests: results by environment, name and seed.
    one: the method of the difference.
    other: the method that is subtracted.
  """
  rows = []
  for environment, results in tests.items():
    gap = paired.compare_results(results.get(one, {}), results.get(other, {}))
    if not gap or gap.seeds < 2:
      continue
    bound = gap.mean + scipy.stats.t.ppf(0.95, gap.seeds - 1) * gap.error
    deviation = gap.error * gap.seeds**0.5
    detected = paired.detectable(deviation, gap.seeds)
    rows.append(
      (
        *(environment, gap.seeds, f'{100 * gap.deviation:.1f}'),
        *(f'{100 * detected:.1f}', f'{100 * bound:+.1f}'),
        paired.seeds_needed(0.02, deviation),
      )
    )
  columns = (
    *('environment', 'seeds', 'deviation', 'detected with 80 %'),
    *('is below, one-sided 95 %', 'seeds to detect 2 points'),
  )
  return plots.table(columns, rows)


def order_table(
  tests: Tests, measures: Mapping[str, Mapping[str, float]], least: int
) -> str:
  """Returns rank correlations of a measure of methods with final success.

  Uses the first seeds only, which all methods have.

  The p-value of the mean is that of permutations of the methods within each
  environment; the methods are not independent of each other.

  Args:
    tests: results by environment, name and seed.
    measures: by environment and method, such as a cosine.
    least: smallest number of methods of an environment.
  """
  rng = np.random.default_rng(0)
  rows, permuted_EB = [], []
  for environment, by_name in measures.items():
    results = of_seeds(tests.get(environment, {}), FIRST_SEEDS)
    names = [name for name in by_name if results.get(name)]
    if len(names) < least:
      continue
    success = [
      np.mean([result.success for result in results[name].values()])
      for name in names
    ]
    ranks_M, success_M = (
      scipy.stats.rankdata(x)
      for x in ([by_name[name] for name in names], success)
    )
    orders_BM = rng.permuted(np.tile(ranks_M, (_RESAMPLES, 1)), axis=1)
    orders_BM = np.vstack([ranks_M, orders_BM])
    centered_M = success_M - success_M.mean()
    scale = np.sum((ranks_M - ranks_M.mean()) ** 2) * np.sum(centered_M**2)
    permuted_EB.append(orders_BM @ centered_M / scale**0.5)
    rows.append((environment, len(names), *_permuted_cells(permuted_EB[-1])))
  if len(rows) > 1:
    rows.append(('mean', '', *_permuted_cells(np.mean(permuted_EB, axis=0))))
  columns = 'environment', 'methods', 'rank correlation', 'p'
  return plots.table(columns, rows)


def _permuted_cells(values_B: Float[np.ndarray, ' B']) -> tuple[str, str]:
  """Returns the first value, and the share of values as far from 0."""
  p = 1 - np.mean(np.abs(values_B) < abs(values_B[0]) - 1e-9)
  return f'{values_B[0]:+.2f}', f'{p:.2g}'
