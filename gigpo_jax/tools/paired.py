"""Compare methods whose runs share seeds and test tasks.

A method has one policy per seed, and each policy has played the same tasks. The
outcomes of a method are an array [S, T] of seeds and tasks, so that two methods
are compared entry by entry.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float

from gigpo_jax.runtime import files
from gigpo_jax.tools import plots

_RESAMPLES = 10_000


class Difference(NamedTuple):
  """Mean outcome of a method minus that of another one.

  Attributes:
    mean: mean difference over seeds and tasks.
    low: lower end of its 95 % interval.
    high: upper end.
    p: two-sided p-value of the paired t-test over seeds; 1 for a single seed.
    deviation: standard deviation of the differences of seeds.
    seeds: number of seeds that both methods have.
  """

  mean: float
  low: float
  high: float
  p: float
  deviation: float
  seeds: int


def compare(
  one_ST: Float[np.ndarray, 'S T'], other_ST: Float[np.ndarray, 'S T']
) -> Difference:
  """Compares two methods on the same seeds and tasks.

  The interval is a percentile bootstrap that draws seeds and tasks with
  replacement, independently of each other (Owen 2007, "The pigeonhole
  bootstrap", arXiv:0712.1111), so that it covers other seeds and other tasks.
  With a single seed it covers other tasks only.

  Args:
    one_ST: outcomes of the first method, such as 1 for success.
    other_ST: outcomes of the other method.
  """
  gaps_ST = np.asarray(one_ST, float) - np.asarray(other_ST, float)
  seeds, tasks = gaps_ST.shape
  rng = np.random.default_rng(0)
  seed_share_BS = rng.multinomial(seeds, [1 / seeds] * seeds, _RESAMPLES)
  task_share_BT = rng.multinomial(tasks, [1 / tasks] * tasks, _RESAMPLES)
  means_B = np.einsum('bt,bt->b', seed_share_BS @ gaps_ST, task_share_BT)
  low, high = np.percentile(means_B / (seeds * tasks), [2.5, 97.5])
  by_seed_S = gaps_ST.mean(axis=1)
  return Difference(
    float(gaps_ST.mean()),
    float(low),
    float(high),
    _paired_p(by_seed_S),
    float(by_seed_S.std(ddof=1)) if seeds > 1 else 0.0,
    seeds,
  )


def _paired_p(gaps_S: Float[np.ndarray, ' S']) -> float:
  if len(gaps_S) == 1:
    return 1.0
  if np.ptp(gaps_S) == 0:  # The t-test divides by the deviation.
    return 1.0 if gaps_S[0] == 0 else 0.0
  return float(scipy.stats.ttest_1samp(gaps_S, 0).pvalue)


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
  """
  for seeds in range(2, 10_000):
    critical = scipy.stats.t.ppf(1 - level / 2, seeds - 1)
    shift = abs(difference) / deviation * seeds**0.5
    # The other tail is negligible at the powers that one asks for.
    if scipy.stats.nct.sf(critical, seeds - 1, shift) >= power:
      return seeds
  raise ValueError(
    f'difference={difference}: too small for any number of seeds with '
    f'deviation={deviation}'
  )


def read_outcomes(path: pathlib.Path) -> dict[str, float]:
  """Returns the mean success of each task in a file evaluation.json.

  Args:
    path: file of `launch/evaluate.py` for one policy.

  Raises:
    ValueError: in one line with the file's name, if the file is damaged, of a
      newer release, or about several policies.
  """
  stored = files.read_stored(path)
  by_task: dict[str, list[float]] = {}
  try:
    (policy,) = stored['policies'].values()
    for episode in policy['episodes']:
      task, success = episode['task'], episode['success']
      if not isinstance(task, str) or not isinstance(success, bool):
        raise TypeError(f'task {task!r} has success {success!r}')
      by_task.setdefault(task, []).append(success)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{path}: not an evaluation of one policy ({error!r:.200})'
    ) from error
  return {task: float(np.mean(x)) for task, x in by_task.items()}


def table(outcomes: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
  """Returns a Markdown table of methods, each compared with the first.

  The p-values are adjusted for the number of methods in the table.

  Args:
    outcomes: outcomes by method, seed and task; the first method has all seeds
      with which another one is compared.

  Raises:
    ValueError: if policies have played different tasks.
  """
  tasks = _shared_tasks(outcomes)
  first, *others = outcomes
  differences = {
    name: compare(*_arrays(outcomes[name], outcomes[first], tasks))
    for name in others
    if outcomes[name].keys() & outcomes[first].keys()
  }
  adjusted = dict(
    zip(differences, holm([d.p for d in differences.values()]), strict=True)
  )
  rows = []
  for name, by_seed in outcomes.items():
    rates = [100 * np.mean(list(by_seed[seed].values())) for seed in by_seed]
    cells = ['', '', '']
    if name in differences:
      gap = differences[name]
      low, mean, high = (100 * x for x in (gap.low, gap.mean, gap.high))
      cells = [
        f'{mean:+.1f} [{low:+.1f}, {high:+.1f}]',
        gap.seeds,
        f'{adjusted[name]:.2g}',
      ]
    iqm = interquartile_mean(np.array(rates))
    rows.append(
      (name, len(rates), f'{np.mean(rates):.1f}', f'{iqm:.1f}', *cells)
    )
  columns = 'method', 'seeds', f'success, {len(tasks)} tasks', 'IQM'
  gaps = f'minus {first}, 95 %', 'pairs', 'p (Holm)'
  return plots.table((*columns, *gaps), rows)


def _shared_tasks(
  outcomes: Mapping[str, Mapping[int, Mapping[str, float]]],
) -> list[str]:
  expected: list[str] = []
  for name, by_seed in outcomes.items():
    for seed, by_task in by_seed.items():
      expected = expected or sorted(by_task)
      if sorted(by_task) != expected:
        raise ValueError(
          f'{name}, seed {seed}: has other test tasks than the runs before it; '
          'delete its folder test/ and rerun the sweep'
        )
  return expected


def _arrays(
  one: Mapping[int, Mapping[str, float]],
  other: Mapping[int, Mapping[str, float]],
  tasks: Sequence[str],
) -> list[Float[np.ndarray, 'S T']]:
  """Returns the outcomes of both methods on the seeds that both have."""
  seeds = sorted(one.keys() & other.keys())
  return [
    np.array([[method[seed][task] for task in tasks] for seed in seeds])
    for method in (one, other)
  ]
