"""The CSV of a sweep's evaluations: reading, tables, learning curves.

NAME_tests.csv next to NAME.csv has the tests of the final policies.
"""

import collections
import csv
import io
import pathlib
from collections.abc import Sequence

import numpy as np

from gigpo_jax import deprecated
from gigpo_jax.runtime import files
from gigpo_jax.tools import outcomes, plots

# Columns of the CSV, after experiment, name, seed and settings.
COLUMNS = (
  'iteration',
  'spent/episodes',
  'spent/env_steps',
  'spent/tokens',
  'eval/success_rate',
  'eval/success_low',
  'eval/success_high',
  'eval/score',
  'eval/episode_length',
  'eval/invalid_action_rate',
)
# Further CSV columns: means over the iterations since the previous evaluation.
MEANS = (
  'train/success_rate',
  'train/episode_length',
  'train/invalid_action_rate',
  'train/revisit_rate',
  'advantage/singleton_anchor_rows',
  'advantage/anchor_group_size_mean',
  'advantage/zero_variance_groups',
  'advantage/episode_std',
  'advantage/step_std',
  'advantage/correlation',
  'advantage/effective_tokens',
  'ratio/kl',
  'loss/entropy',
  'update/grad_norm',
  'time/iteration_secs',
  'time/advantages_secs',
)
SPENT = tuple(column for column in COLUMNS if column.startswith('spent/'))
# Columns of the x axis: their labels.
AXES = {
  'spent/env_steps': 'environment steps',
  'spent/tokens': 'generated tokens',
  'iteration': 'iteration',
}


def read(
  path: str | pathlib.Path, *, missing_ok: bool = False
) -> list[dict[str, float | str | None]]:
  """Returns the evaluations in a CSV that `write` wrote.

  Args:
    path: the CSV.
    missing_ok: whether a missing file is an empty table.

  Raises:
    ValueError: in one line, if the file is not such a CSV.
  """
  if missing_ok and not pathlib.Path(path).is_file():
    return []
  try:
    lines = map(deprecated.renamed_metrics, files.read_csv(path))
    rows = [
      {'experiment': line['experiment'], 'name': line['name']}
      | {'seed': int(line['seed']), 'iteration': int(line['iteration'])}
      | {'settings': line.get('settings') or None}
      | {
        column: None if line[column] == '' else float(line[column])
        for column in COLUMNS[1:]
      }
      # Tables of earlier releases lack some of these columns.
      | {name: float(line[name]) if line.get(name) else None for name in MEANS}
      for line in lines
    ]
  except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
    raise ValueError(
      f'{path}: not a table of a sweep ({type(error).__name__}: '
      f'{error}); must be the CSV that launch/sweep.py writes'
    ) from error
  _check_unique(path, rows)
  return rows


def _check_unique(path: str | pathlib.Path, rows: Sequence[dict]) -> None:
  """Checks that no run has two evaluations of an iteration."""
  counts = collections.Counter(
    (row['experiment'], row['name'], row['seed'], row['iteration'])
    for row in rows
  )
  for (experiment, name, seed, iteration), count in counts.items():
    if count > 1:
      raise ValueError(
        f'{path}: has {count} evaluations of iteration {iteration} of '
        f'{experiment} {name}, seed {seed}; must have one'
      )


def write(path: str | pathlib.Path, evaluations: Sequence[dict]) -> None:
  """Writes evaluations, dictionaries of columns, as a CSV."""
  columns = ['experiment', 'name', 'seed', 'settings', *COLUMNS, *MEANS]
  text = io.StringIO(newline='')
  writer = csv.DictWriter(text, columns)
  writer.writeheader()
  writer.writerows(evaluations)
  files.write_atomic(pathlib.Path(path), text.getvalue())


def tests_path(path: str | pathlib.Path) -> pathlib.Path:
  """Returns the CSV of tests that belongs to a sweep's CSV."""
  path = pathlib.Path(path)
  return path.with_name(f'{path.stem}_tests.csv')


def read_tests(path: str | pathlib.Path) -> list[outcomes.Result]:
  """Returns the tests next to a sweep's CSV; none without such a file."""
  path = tests_path(path)
  return outcomes.read(path) if path.is_file() else []


def by_run(evaluations: Sequence[dict]) -> dict[tuple, list[dict]]:
  """Returns evaluations by experiment, name and seed of their run."""
  grouped: dict[tuple, list[dict]] = {}
  for line in evaluations:
    key = line['experiment'], line['name'], line['seed']
    grouped.setdefault(key, []).append(line)
  return grouped


def table(evaluations: Sequence[dict]) -> str:
  """Returns a Markdown table of success rates, with a row for each name.

  Columns: number of seeds; episodes played for training; success at the end as
  mean and standard error; paired difference from the first name, seed by seed;
  success at equal environment steps and at equal generated tokens, interpolated
  at the smallest total of any run; success of each seed at the end.

  Args:
    evaluations: evaluations, as `read` returns them.
  """
  by_name = curves(evaluations)
  budgets = {
    x: min(c[-1][x] for by_seed in by_name.values() for c in by_seed.values())
    for x in ('spent/env_steps', 'spent/tokens')
  }
  first, *_ = by_name
  headers = [f'minus {first}, paired']
  headers += [f'at {budget:,.0f} {AXES[x]}' for x, budget in budgets.items()]
  rows = []
  final = {
    name: {s: 100 * c[-1]['eval/success_rate'] for s, c in by_seed.items()}
    for name, by_seed in by_name.items()
  }
  for name, by_seed in by_name.items():
    final_rates = list(final[name].values())
    differences = [
      x - final[first][s] for s, x in final[name].items() if s in final[first]
    ]
    cells = [
      mean_and_error(final_rates),
      mean_and_error(differences) if differences and name != first else '',
    ]
    for x, budget in budgets.items():
      cells.append(
        mean_and_error([success_at(c, x, budget) for c in by_seed.values()])
      )
    each = ', '.join(f'{x:.1f}' for x in final_rates)
    played = np.mean([c[-1]['spent/episodes'] for c in by_seed.values()])
    rows.append((name, len(final_rates), f'{played:,.0f}', *cells, each))
  columns = 'run', 'seeds', 'episodes', 'final success', *headers, 'each seed'
  return plots.table(columns, rows)


def curves(evaluations: Sequence[dict]) -> dict[str, dict[int, list[dict]]]:
  """Returns evaluations by name, then by seed."""
  grouped: dict[str, dict[int, list[dict]]] = {}
  for (_, name, seed), lines in by_run(evaluations).items():
    grouped.setdefault(name, {})[seed] = lines
  return grouped


def success_at(curve: Sequence[dict], x: str, budget: float) -> float:
  """Returns the success in percent at a budget, interpolated linearly.

  Args:
    curve: evaluations of a run.
    x: column of the budget, such as 'spent/env_steps'.
    budget: value of that column; beyond the last one, the last success counts.
  """
  xs = [line[x] for line in curve]
  ys = [100 * line['eval/success_rate'] for line in curve]
  return float(np.interp(budget, xs, ys))


def mean_and_error(values: Sequence[float]) -> str:
  """Returns mean ± standard error; for one value, the value alone."""
  mean = sum(values) / len(values)
  if len(values) == 1:
    return f'{mean:.1f}'
  return f'{mean:.1f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.1f}'


def draw(
  evaluations: Sequence[dict], path: pathlib.Path, *, x: str = 'spent/env_steps'
) -> None:
  """Draws learning curves: mean over seeds, with a band from min to max.

  Args:
    evaluations: evaluations, as `read` returns them.
    path: path of the image.
    x: column of the x axis.
  """
  with plots.image(path, figsize=(7, 4.2)) as (_, axes):
    for n, (name, by_seed) in enumerate(curves(evaluations).items()):
      # All curves of a name end where the shortest of them ends.
      end = min(curve[-1][x] for curve in by_seed.values())
      xs = np.linspace(0, end, 50)
      ys = np.array(
        [[success_at(c, x, budget) for budget in xs] for c in by_seed.values()]
      )
      played = np.mean([c[-1]['spent/episodes'] for c in by_seed.values()])
      label = (
        f'{name}, {len(by_seed)} seed{"s" if len(by_seed) > 1 else ""}, '
        f'{played:,.0f} episodes'
      )
      axes.plot(xs, ys.mean(axis=0), color=f'C{n}', label=label)
      axes.fill_between(
        xs,
        ys.min(axis=0),
        ys.max(axis=0),
        color=f'C{n}',
        alpha=0.15,
      )
    axes.set(xlabel=AXES[x], ylim=(-2, 102))
    axes.set_ylabel('success in evaluation (%)')
    axes.grid(alpha=0.3)
    axes.legend(loc='best', fontsize='small')
