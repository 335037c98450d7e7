r"""Predict the effect of step advantages from properties of an experiment.

    python -m gigpo_jax.tools.law fit runs/keydoor/keydoor.csv \
        runs/dial.json --output=law.json
    python -m gigpo_jax.tools.law predict law.json predictors.json \
        --output=predictions.json
    python -m gigpo_jax.tools.law compare predictions.json \
        runs/credit/credit.csv --plot=law.png

`fit` reads the CSV of a sweep and the predictors of its settings, from
`benchmarks/predictors.py --output`. The effect in a setting is the final
success of a method minus that of GRPO, paired by seed. The law is a line in no,
one or two predictors: the one with the smallest leave-one-setting-out error.
The error that `fit` reports is that of the whole procedure, selection included:
each setting is predicted by the law that is selected and fitted without it.

`predict` writes predictions for other settings, before their results are known;
it never overwrites a file. `compare` shows predicted and measured effects.

With `--method=best`, the effect of a seed is that of the method with the
largest mean gain over GRPO on the other seeds, so that the selection does not
favour it. All names of the sweep except GRPO take part, also controls; settings
with one other method are left out.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import scipy
from jaxtyping import Float, Int

from gigpo_jax import algorithms
from gigpo_jax.runtime import files, output
from gigpo_jax.tools import plots, sweep_table

BASELINE = 'grpo'
BEST = 'best'
# Metric: what it is. The first iterations of every run have them.
PREDICTORS = {
  'train/success_rate': 'success at the start',
  'train/episode_length': 'steps of an episode',
  'train/revisit_rate': 'revisits',
  'advantage/singleton_anchor_rows': 'singletons',
  'advantage/correlation': 'correlation of A_E and A_S',
}
_FORMATS = ('.1%', '.1f', '.1%', '.1%', '.2f')
_MOST_PREDICTORS = 2
_TITLE = 'gigpo_jax.tools.law'  # Marks the plots that may be replaced.
# Of a prediction in a file.
_PREDICTED = frozenset({'effect', 'half_width', 'outside'})
_T = TypeVar('_T')


class Effect(NamedTuple):
  """Final success of a method minus GRPO's in a setting, in points.

  Attributes:
    mean: mean over seeds.
    error: its standard error over seeds; NaN for a single seed.
    seeds: number of seeds.
  """

  mean: float
  error: float
  seeds: int

  @property
  def interval(self) -> tuple[float, float]:
    """The 95 % interval of the paired t-test; NaN for a single seed."""
    half = scipy.stats.t.ppf(0.975, max(self.seeds - 1, 1)) * self.error
    return float(self.mean - half), float(self.mean + half)


def predictor_cells(values: Mapping[str, float]) -> list[str]:
  """Returns the cells of a table for each of PREDICTORS; 'nan' if missing."""
  return [
    format(values.get(name, np.nan), spec)
    for name, spec in zip(PREDICTORS, _FORMATS, strict=True)
  ]


def split_name(experiment: str, name: str) -> tuple[str, str]:
  """Returns the setting and the method of a sweep's run.

  Args:
    experiment: name of the config file.
    name: name of the run: the method, in some sweeps after a setting.
  """
  setting, _, method = name.rpartition(' ')
  if method in algorithms.REGISTRY:
    return f'{experiment} {setting}'.strip(), method
  return experiment, name


def by_setting(
  results: Mapping[tuple[str, str], _T],
) -> dict[str, dict[str, _T]]:
  """Returns results by setting and method.

  Settings `alias` hide parts of a state from anchors only. GRPO has no anchors,
  so its results there are those of the setting without the alias.

  Args:
    results: by experiment and name of a run.
  """
  grouped: dict[str, dict[str, _T]] = {}
  for (experiment, name), result in results.items():
    setting, method = split_name(experiment, name)
    grouped.setdefault(setting, {})[method] = result
  for setting, by_method in grouped.items():
    plain = plain_setting(setting)
    if plain != setting and BASELINE in grouped.get(plain, {}):
      by_method[BASELINE] = grouped[plain][BASELINE]
  return grouped


def plain_setting(setting: str) -> str:
  """Returns the setting whose runs of GRPO a setting has."""
  return setting.partition(' alias ')[0]


def setting_of_config(config: str) -> str:
  """Returns the setting of a config in sweeps; `:mini` is the usual size."""
  path, _, variant = config.partition(':')
  variant = '' if variant == 'mini' else f' {variant}'
  return f'{pathlib.Path(path).stem}{variant}'


def effects(rows: Sequence[Mapping], method: str = 'gigpo') -> dict:
  """Returns the effect by setting, with seeds that both methods have.

  Args:
    rows: rows of `sweep_table.read`.
    method: name of a method, or BEST.
  """
  final: dict[tuple[str, str], dict[int, float]] = {}
  for row in rows:  # The last row of a run is its last evaluation.
    by_seed = final.setdefault((row['experiment'], row['name']), {})
    by_seed[row['seed']] = 100 * row['eval/success_rate']
  found = {}
  for setting, by_method in by_setting(final).items():
    baseline = by_method.pop(BASELINE, {})
    gains = {
      name: {s: rates[s] - baseline[s] for s in rates if s in baseline}
      for name, rates in by_method.items()
    }
    if method == BEST:
      # A single method is not chosen.
      gaps = _best_on_other_seeds(gains) if len(gains) > 1 else []
    else:
      gaps = list(gains.get(method, {}).values())
    if gaps:
      error = np.std(gaps, ddof=1) / len(gaps) ** 0.5 if gaps[1:] else np.nan
      found[setting] = Effect(float(np.mean(gaps)), float(error), len(gaps))
  return found


def read_effects(path: str, method: str = 'gigpo') -> dict[str, Effect]:
  """Returns the effects in a sweep's CSV.

  Tests of final policies, in the CSV next to it, have more tasks than the last
  evaluations and replace them in settings where no pair of runs lacks a test.

  Args:
    path: CSV that launch/sweep.py wrote.
    method: name of a method, or BEST.

  Raises:
    ValueError: in one line, if the file is not such a CSV, or has no effect.
  """
  tests = [
    {'experiment': result.experiment, 'name': result.name}
    | {'seed': result.seed, 'eval/success_rate': result.success}
    for result in sweep_table.read_tests(path)
  ]
  evaluated = effects(sweep_table.read(path), method)
  measured = evaluated | {
    setting: effect
    for setting, effect in effects(tests, method).items()
    if effect.seeds >= evaluated.get(setting, effect).seeds
  }
  if not measured:
    raise ValueError(
      f'{path}: has no runs of method {method} and of {BASELINE} with equal '
      'seeds; must have a pair'
    )
  return measured


def _best_on_other_seeds(
  gains: Mapping[str, Mapping[int, float]],
) -> list[float]:
  """Returns for each seed the gain of the method that is best on the others.

  Args:
    gains: success minus that of GRPO, by method and seed. Methods may have
      different seeds: their gains are comparable, success is not.
  """
  chosen = []
  for seed in sorted({seed for by_seed in gains.values() for seed in by_seed}):
    means = {
      method: np.mean([x for s, x in by_seed.items() if s != seed])
      for method, by_seed in gains.items()
      if seed in by_seed and len(by_seed) > 1
    }
    if means:
      chosen.append(gains[max(means, key=means.get)][seed])
  return chosen


def _fit_line(
  x_SP: Float[np.ndarray, 'S P'],
  y_S: Float[np.ndarray, ' S'],
  groups_S: Int[np.ndarray, ' S'],
) -> tuple[Float[np.ndarray, ' 1+P'], float]:
  """Returns coefficients, the intercept first, and the error left out.

  This is the root-mean-square error at the settings of a group of the fit
  without that group; infinite if only that group determines a coefficient.
  """
  design = np.column_stack([np.ones(len(y_S)), x_SP])
  gaps_S = np.full(len(y_S), np.inf)
  for group in np.unique(groups_S):
    out = groups_S == group
    if np.linalg.matrix_rank(design[~out]) == design.shape[1]:
      without, *_ = np.linalg.lstsq(design[~out], y_S[~out])
      gaps_S[out] = y_S[out] - design[out] @ without
  coefficients, *_ = np.linalg.lstsq(design, y_S)
  return coefficients, float(np.sqrt(np.mean(gaps_S**2)))


def _select(
  x_SP: Float[np.ndarray, 'S P'],
  y_S: Float[np.ndarray, ' S'],
  groups_S: Int[np.ndarray, ' S'],
) -> tuple[tuple[int, ...], Float[np.ndarray, ' 1+Q']]:
  """Returns the predictors with the smallest error, and the coefficients."""
  # Two settings more than coefficients, or the errors mean nothing.
  most = min(_MOST_PREDICTORS, len(y_S) - 3)
  candidates = [
    columns
    for count in range(max(most, 0) + 1)
    for columns in itertools.combinations(range(x_SP.shape[1]), count)
  ]
  fits = {c: _fit_line(x_SP[:, list(c)], y_S, groups_S) for c in candidates}
  best = min(fits, key=lambda columns: fits[columns][1])
  return best, fits[best][0]


@dataclasses.dataclass(frozen=True)
class Law:
  """A fitted line; effects are in points of success.

  Attributes:
    method: method whose success, minus GRPO's, it predicts.
    intercept: effect where all predictors are 0.
    coefficients: by predictor, in points per unit of the metric.
    error: root-mean-square error at settings left out of selection and fit.
    constant_error: the same error for the mean effect, without predictors.
    settings: number of settings.
    ranges: smallest and largest value of each predictor in these settings.
  """

  method: str
  intercept: float
  coefficients: Mapping[str, float]
  error: float
  constant_error: float
  settings: int
  ranges: Mapping[str, tuple[float, float]]

  def predict(self, values: Mapping[str, float]) -> float:
    """Returns the effect that metrics predict, in points."""
    return self.intercept + sum(
      slope * values[name] for name, slope in self.coefficients.items()
    )

  @property
  def half_width(self) -> float:
    """Half the approximate 95 % interval of an effect in a new setting."""
    freedom = max(self.settings - 1 - len(self.coefficients), 1)
    return float(scipy.stats.t.ppf(0.975, freedom) * self.error)

  def outside(self, values: Mapping[str, float]) -> list[str]:
    """Returns the predictors of the law that are outside the fitted range."""
    return [
      name
      for name in self.coefficients
      if not self.ranges[name][0] <= values[name] <= self.ranges[name][1]
    ]

  @classmethod
  def read(cls, path: str) -> 'Law':
    """Returns the law in a file that `fit` wrote.

    Raises:
      ValueError: in one line, if the file is not such a file.
    """
    try:
      law = cls(**files.read_object(pathlib.Path(path))['law'])
      law.predict(dict.fromkeys(law.coefficients, 0.0))
      law.outside(dict.fromkeys(law.coefficients, 0.0))
      describe(law)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
      raise ValueError(
        f'{path}: not a law ({error!r}); must be a file that '
        '`python -m gigpo_jax.tools.law fit` wrote'
      ) from error
    return law


def fit(
  measured: Mapping[str, Effect],
  predictors: Mapping[str, Mapping[str, float]],
  method: str = 'gigpo',
) -> Law:
  """Selects and fits a law.

  Settings that share runs of GRPO (`plain_setting`) are left out together.

  Args:
    measured: effect by setting.
    predictors: metrics by setting.
    method: the method of the effects.

  Raises:
    ValueError: in one line, with fewer than four settings with runs of their
      own.
  """
  settings = [name for name in measured if name in predictors]
  plain = [plain_setting(name) for name in settings]
  if len(set(plain)) < 4:
    raise ValueError(
      f'{len(set(plain))} settings with runs of their own have both effects '
      'and predictors; must be at least 4'
    )
  check_predictors(predictors, PREDICTORS)
  x_SP = np.array(
    [[predictors[name][p] for p in PREDICTORS] for name in settings]
  )
  y_S = np.array([measured[name].mean for name in settings])
  groups_S = np.array([plain.index(name) for name in plain])
  gaps = []
  for group in np.unique(groups_S):
    out = groups_S == group
    columns, (first, *slopes) = _select(
      *(array[~out] for array in (x_SP, y_S, groups_S))
    )
    gaps += list(y_S[out] - first - x_SP[out][:, list(columns)] @ slopes)
  columns, (first, *slopes) = _select(x_SP, y_S, groups_S)
  names = list(PREDICTORS)
  return Law(
    method=method,
    intercept=float(first),
    coefficients={
      names[c]: float(slope) for c, slope in zip(columns, slopes, strict=True)
    },
    error=float(np.sqrt(np.mean(np.square(gaps)))),
    constant_error=_fit_line(x_SP[:, :0], y_S, groups_S)[1],
    settings=len(settings),
    ranges={
      name: (float(column.min()), float(column.max()))
      for name, column in zip(names, x_SP.T, strict=True)
    },
  )


def check_predictors(
  predictors: Mapping[str, Mapping[str, float]], names: Iterable[str]
) -> None:
  """Checks that all settings have the predictors of given names.

  Raises:
    ValueError: in one line, if they do not.
  """
  for setting, values in predictors.items():
    missing = [n for n in names if not np.isfinite(values.get(n, np.nan))]
    if missing:
      raise ValueError(
        f'{setting}: has no {", ".join(missing)}; play more groups, or leave '
        'this setting out'
      )


def describe(law: Law) -> str:
  """Returns the law and its errors in words."""
  terms = [
    f'{slope:+.3g} x {PREDICTORS[name]}'
    for name, slope in law.coefficients.items()
  ]
  errors = [f'{error:.1f}' for error in (law.error, law.constant_error)]
  is_better = law.error < law.constant_error and errors[0] != errors[1]
  verdict = (
    'better than no predictor'
    if is_better
    else 'NO better than no predictor: do not rely on it'
  )
  return (
    f'{law.method} - {BASELINE} = {" ".join([f"{law.intercept:.3g}", *terms])} '
    f'points, from {law.settings} settings\n'
    f'error at a setting left out: {errors[0]} points; of the mean effect '
    f'alone: {errors[1]} ({verdict})'
  )


def predict_all(
  law: Law, predictors: Mapping[str, Mapping[str, float]]
) -> dict[str, dict]:
  """Returns the predicted effect of each setting, as plain values."""
  check_predictors(predictors, law.coefficients)
  return {
    name: {
      'effect': law.predict(values),
      'half_width': law.half_width,
      'outside': law.outside(values),
    }
    for name, values in predictors.items()
  }


def table(
  predictions: Mapping[str, Mapping], measured: Mapping[str, Effect]
) -> str:
  """Returns a Markdown table of predicted and measured effects."""
  rows = []
  for name, values in predictions.items():
    low, high = (values['effect'] + s * values['half_width'] for s in (-1, 1))
    outside = ', '.join(PREDICTORS[p] for p in values['outside'])
    cells = ['', '']
    if name in measured:
      mean, error, seeds = measured[name]
      known = f' ± {error:.1f}' if np.isfinite(error) else ''
      cells = [f'{mean:+.1f}{known}', str(seeds)]
    predicted = f'{values["effect"]:+.1f} [{low:+.1f}, {high:+.1f}]'
    rows.append((name, predicted, outside, *cells))
  columns = 'setting', 'predicted, 95 %', 'outside the fitted range'
  return plots.table((*columns, 'measured ± standard error', 'seeds'), rows)


def draw(
  path: str | pathlib.Path,
  predictions: Mapping[str, Mapping],
  measured: Mapping[str, Effect],
) -> None:
  """Draws measured by predicted effects.

  Predictions have their 95 % intervals, measurements their standard errors.
  """
  names = [name for name in predictions if name in measured]
  xs = [predictions[name]['effect'] for name in names]
  ys = [measured[name][0] for name in names]
  widths = [predictions[name]['half_width'] for name in names]
  errors = np.nan_to_num([measured[name][1] for name in names])
  with plots.image(path, title=_TITLE, figsize=(7, 5)) as (_, axes):
    axes.errorbar(xs, ys, xerr=widths, fmt='none', ecolor='lightgrey')
    axes.errorbar(xs, ys, errors, fmt='o')
    for name, x, y in zip(names, xs, ys, strict=True):
      left = x < np.median(xs)
      axes.annotate(
        name,
        (x, y),
        xytext=(-4 if left else 4, 4),
        textcoords='offset points',
        ha='right' if left else 'left',
      )
    axes.axline((0, 0), slope=1, color='grey', linewidth=0.8)
    axes.set(xlabel='predicted (points)', ylabel='measured (points)')
    axes.grid(alpha=0.3)


def _read_predictors(path: str) -> dict[str, dict[str, float]]:
  settings = files.read_object(pathlib.Path(path))
  for name, values in settings.items():
    numbers = values.values() if isinstance(values, dict) else [None]
    if not all(isinstance(value, int | float) for value in numbers):
      raise ValueError(
        f'{path}: {name}: no predictors; must be a file that '
        'benchmarks/predictors.py wrote'
      )
  return settings


def _write_new(path: str, values: dict) -> None:
  """Writes JSON to a file that must not exist: predictions are not revised."""
  try:
    with open(path, 'x', encoding='utf-8') as file:
      json.dump(values, file, indent=2)
  except FileExistsError as error:
    raise ValueError(f'--output={path}: exists; give another name') from error
  except OSError as error:
    raise ValueError(
      f'--output={path}: cannot be written ({error.strerror})'
    ) from error


def _is_prediction(value: object) -> bool:
  return isinstance(value, dict) and value.keys() >= _PREDICTED


def _run(options: argparse.Namespace) -> None:
  if options.command == 'fit':
    measured = read_effects(options.table, options.method)
    predictors = _read_predictors(options.predictors)
    law = fit(measured, predictors, options.method)
    print(describe(law))
    print(table(predict_all(law, predictors), measured))
    _write_new(options.output, {'law': dataclasses.asdict(law)})
  elif options.command == 'predict':
    law = Law.read(options.law)
    predictions = predict_all(law, _read_predictors(options.predictors))
    print(describe(law))
    print(table(predictions, {}))
    values = {'method': law.method, 'predictions': predictions}
    _write_new(options.output, values)
  else:
    plot = options.plot
    path = plots.check_output(plot, '--plot', _TITLE) if plot else None
    values = files.read_object(pathlib.Path(options.predictions))
    predictions = values.get('predictions')
    is_valid = isinstance(predictions, dict) and 'method' in values
    if not is_valid or not all(map(_is_prediction, predictions.values())):
      raise ValueError(
        f'{options.predictions}: has no predictions; must be a file that '
        '`python -m gigpo_jax.tools.law predict` wrote'
      )
    measured: dict[str, Effect] = {}
    for name in options.tables:
      effects = read_effects(name, values['method'])
      if again := measured.keys() & effects.keys():
        raise ValueError(
          f'{name}: has {min(again)}, as an earlier table has; must have other '
          'settings'
        )
      measured |= effects
    print(table(predictions, measured))
    if path:
      draw(path, predictions, measured)


@output.handle()
def main(argv: Sequence[str] | None = None) -> int:
  """Fits, predicts or compares; returns 2 on errors."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(dest='command', required=True)
  for name, inputs in (
    ('fit', ('table', 'predictors')),
    ('predict', ('law', 'predictors')),
    ('compare', ('predictions',)),
  ):
    command = commands.add_parser(name)
    for file in inputs:
      command.add_argument(file)
    if name == 'compare':
      command.add_argument('tables', nargs='+', metavar='table')
      command.add_argument('--plot', help='image file')
    else:
      command.add_argument('--output', required=True, help='new JSON file')
    if name == 'fit':
      command.add_argument('--method', default='gigpo', help='or best')
  try:
    _run(parser.parse_args(argv))
  except (OSError, ValueError) as error:
    sys.stderr.write(f'{error}\n')
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
