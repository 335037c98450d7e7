"""Write the tables and plots of the results from the files in docs/results.

    python -m gigpo_jax.tools.results

replaces the lines between `<!-- begin NAME -->` and `<!-- end NAME -->` in
docs/results.md, docs/results/details.md and README.md, and draws effects.png,
oracle.png and predictions.png in docs/results. It reads

- credit.csv and credit_tests.csv, from configs/sweeps/credit.py, and, for the
  table only, small.csv and small_tests.csv, from configs/sweeps/small.py, if
  they exist;
- main.csv, whose effects are drawn where credit_tests.csv has none;
- carry_over.csv, guard.csv, held_out.csv and teachers.csv, from the sweeps of
  these names, with guard_tests.csv and held_out_tests.csv;
- keydoor.csv and keydoor_tests.csv, from configs/sweeps/keydoor.py, and
  dial_predictors.json, from benchmarks/predictors.py with that sweep;
- predictors.json, from benchmarks/predictors.py;
- oracle.json, from benchmarks/credit.py;
- predictions.json, from `gigpo_jax.tools.law predict`, written before the runs.
"""

import argparse
import functools
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import lines

from gigpo_jax.runtime import output
from gigpo_jax.tools import (
  equal_cost,
  evidence,
  law,
  outcomes,
  paired,
  plots,
  sweep_runs,
  sweep_table,
)

PROJECT = pathlib.Path(__file__).parents[2]
_FOLDER = PROJECT / 'docs' / 'results'
_SWEEP = 'configs/sweeps/credit.py'
_BLOCK = re.compile(
  r'(<!-- begin (\w+) -->\n).*?(\n<!-- end \2 -->)', re.DOTALL
)
GIGPO = 'gigpo'
# Methods of the README and of the plot of effects: credit from equal states,
# the control without them, and the method that compares successive states.
_SHOWN = (GIGPO, 'gigpo shuffled', 'g2po')
# Success at the start has a column of its own, from evaluations.
_OTHER_PREDICTORS = tuple(law.PREDICTORS)[1:]
# Fewer pairs of seeds have no interval in the README.
_FEW_PAIRS = 3
_COST = ('spent/env_steps', 'spent/tokens')
_MISSING = '–'
_MARKERS = 'os^DvPX*<>'  # Of the environments.
# Points; the plot of effects does not show all of wider intervals.
_WIDE = 20.0


@functools.cache
def _evaluations(name: str) -> tuple[dict, ...]:
  return tuple(sweep_table.read(str(_FOLDER / f'{name}.csv')))


@functools.cache
def _tests(name: str = 'credit') -> dict[str, outcomes.Results]:
  """Returns the results of a benchmark by experiment, method and seed."""
  return outcomes.group(sweep_table.read_tests(_FOLDER / f'{name}.csv'))


def _rows_of(
  evaluations: Iterable[Mapping], experiment: str, name: str
) -> list:
  return [
    row
    for row in evaluations
    if (row['experiment'], row['name']) == (experiment, name)
  ]


def cost(rows: Sequence[Mapping]) -> list[str]:
  """Returns environment steps and tokens of a run, and seconds per iteration.

  Steps and tokens, in thousands, are means over runs. The seconds are a median
  over the periods between evaluations of all runs, as other work slows some.

  Args:
    rows: evaluations of the runs of a method.
  """
  last = {row['seed']: row for row in rows}.values()
  totals = [np.mean([row[name] for row in last]) / 1000 for name in _COST]
  cells = [f'{x:,.1f}' if x < 100 else f'{x:,.0f}' for x in totals]
  secs = [row['time/iteration_secs'] for row in rows]
  secs = [x for x in secs if x is not None]
  return [*cells, f'{np.median(secs):.1f}' if secs else '']


def credit_table(
  tests: Mapping[str, outcomes.Results], evaluations: Sequence[Mapping]
) -> str:
  """Returns the table of methods and environments.

  Args:
    tests: results by experiment, name and seed.
    evaluations: rows of `sweep_table.read` of the same runs.
  """
  rows = []
  for experiment, results in tests.items():
    gaps = {
      base: paired.compare_all(results, base) if base in results else {}
      for base in (law.BASELINE, GIGPO)
    }
    for n, (name, by_seed) in enumerate(results.items()):
      rows.append(
        (
          *('' if n else experiment, name, len(by_seed)),
          paired.summarize(by_seed)[0],
          *_cells(gaps[law.BASELINE], name),
          *_cells(gaps[GIGPO], name),
          *cost(_rows_of(evaluations, experiment, name)),
        )
      )
  columns = (
    *('environment', 'method', 'seeds', '%', 'minus grpo', 'p'),
    *('minus gigpo', 'p', 'k steps', 'k tokens', 's'),
  )
  return plots.table(columns, rows)


def robust_table(tests: Mapping[str, outcomes.Results]) -> str:
  """Returns interquartile means, and bootstrap intervals of differences.

  Args:
    tests: results by experiment, name and seed.
  """
  rows = []
  for experiment, results in tests.items():
    for n, (name, by_seed) in enumerate(results.items()):
      interval = ''
      by_task = paired.pair_outcomes(by_seed, results.get(law.BASELINE, {}))
      if by_task and name != law.BASELINE:
        interval = paired.interval(*paired.bootstrap(*by_task))
      mean = paired.summarize(by_seed)[1]
      rows.append(('' if n else experiment, name, mean, interval))
  columns = 'environment', 'method', 'IQM', 'minus grpo, bootstrap'
  return plots.table(columns, rows)


def _cells(
  gaps: Mapping[str, tuple[paired.Difference, float]], name: str
) -> tuple[str, str]:
  """Returns the difference of a method and its p-value; '' if it has none."""
  if name not in gaps:
    return '', ''
  gap, p = gaps[name]
  return str(gap), f'{p:.2g}'


def data_table(
  evaluations: Sequence[Mapping], methods: Iterable[str] | None = None
) -> str:
  """Returns the table of what runs were trained on.

  Success at the start is that of the first evaluation. The other columns are
  means over the iterations before the second one.

  Args:
    evaluations: rows of `sweep_table.read`.
    methods: names of the methods; None: all.
  """
  rows = []
  for experiment in dict.fromkeys(row['experiment'] for row in evaluations):
    names = dict.fromkeys(
      row['name'] for row in evaluations if row['experiment'] == experiment
    )
    label = experiment
    for name in names if methods is None else methods:
      cells = _data_cells(_rows_of(evaluations, experiment, name))
      if cells:
        rows.append((label, name, *cells))
        label = ''
  columns = (
    *('environment', 'method', 'seeds', 'success at the start', 'steps'),
    *('revisits', 'singletons', 'correlation', 'zero variance'),
  )
  return plots.table(columns, rows)


def _data_cells(runs: Sequence[Mapping]) -> tuple:
  """Returns the cells of `data_table` of a method's runs; () if none."""
  first = [row for row in runs if row['iteration'] == 0]
  early: dict[int, Mapping] = {}
  for row in runs:
    if row['iteration']:
      early.setdefault(row['seed'], row)
  if not early:
    return ()

  def mean(name: str) -> float:
    values = [row[name] for row in early.values() if row[name] is not None]
    return float(np.mean(values)) if values else np.nan

  predictors = law.predictor_cells({p: mean(p) for p in _OTHER_PREDICTORS})[1:]
  return (
    len(first),
    f'{100 * np.mean([row["eval/success_rate"] for row in first]):.1f} %',
    # A method with a critic has no A_E and A_S.
    *(_MISSING if cell == 'nan' else cell for cell in predictors),
    f'{mean("advantage/zero_variance_groups"):.1%}',
  )


# Question: the methods whose difference answers it.
QUESTIONS = {
  'Does step-level credit help?': (GIGPO, law.BASELINE),
  'Does it remain with shuffled anchors?': (
    'gigpo shuffled',
    law.BASELINE,
  ),
  'Are real anchors better than shuffled ones?': (GIGPO, 'gigpo shuffled'),
  'Is one state enough?': ('gigpo one state', law.BASELINE),
  'Are real states better than one?': (GIGPO, 'gigpo one state'),
  'Does the discount matter?': (GIGPO, 'gigpo discount 1'),
  'Does the episode advantage matter?': (GIGPO, 'gigpo steps only'),
  'Are larger updates the reason?': (GIGPO, 'grpo at matched kl'),
  'Does comparing successive states help more?': ('g2po', GIGPO),
  'Does it need real states?': ('g2po', 'g2po shuffled'),
  'Is credit of the last step enough?': ('g2po one state', law.BASELINE),
  'Does it need more than the last step?': ('g2po', 'g2po one state'),
  'Do its states help GiGPO?': ('gigpo state anchors', GIGPO),
  'Do values help with equal states?': ('g2po', 'gigpo state anchors'),
}


def controls_table(tests: Mapping[str, outcomes.Results]) -> str:
  """Returns the differences that answer the questions, by environment.

  A question has a line for each environment with a pair of runs.

  Args:
    tests: results by experiment, name and seed.
  """
  rows = []
  for question, (one, other) in QUESTIONS.items():
    labels = (question, f'{one} - {other}')
    for environment, results in tests.items():
      gap = paired.compare_results(results.get(one, {}), results.get(other, {}))
      if gap:
        rows.append((*labels, environment, str(gap)))
        labels = ('', '')
  columns = ('question', 'difference', 'environment', 'points, 95 %')
  return plots.table(columns, rows)


def dial_table(
  results: outcomes.Results, predictors: Mapping[str, Mapping[str, float]]
) -> str:
  """Returns the differences from GRPO by setting of keys and doors.

  Settings without a pair of runs of GiGPO and GRPO are left out.

  Args:
    results: results by name, such as 'decoys 4 gigpo', and seed.
    predictors: metrics by setting.

  Raises:
    ValueError: in one line, if policies have played different tasks.
  """
  names = law.BASELINE, GIGPO, 'g2po'
  named = {('keydoor', name): by_seed for name, by_seed in results.items()}
  rows = []
  for setting, by_method in law.by_setting(named).items():
    paired.check_tasks(by_method)
    grpo, *others = (by_method.get(name, {}) for name in names)
    gaps = [paired.compare_results(by_seed, grpo) for by_seed in others]
    if gaps[0] is None:
      continue
    rows.append(
      (
        setting.removeprefix('keydoor '),
        *law.predictor_cells(predictors.get(setting, {})),
        *(
          paired.summarize(by_seed)[0] if by_seed else _MISSING
          for by_seed in (grpo, *others)
        ),
        *(_MISSING if gap is None else str(gap) for gap in gaps),
      )
    )
  columns = (
    *('setting', 'start', 'steps', 'revisits', 'singletons', 'correlation'),
    *(*names, *(f'{x} - {law.BASELINE}' for x in names[1:])),
  )
  return plots.table(columns, rows)


def credit_block() -> str:
  """Returns the state of the benchmark and its table."""
  tests, evaluations = _tests(), _evaluations('credit')
  done = sum(len(runs) for x in tests.values() for runs in x.values())
  if (_FOLDER / 'small.csv').exists():
    tests = tests | _tests('small')
    evaluations += _evaluations('small')
  table = credit_table(tests, evaluations)
  lines = [f'{done} of {len(sweep_runs.read(_SWEEP))} runs are finished.']
  if f']{paired.BY_SEED}' in table:
    lines.append(
      f'Intervals with {paired.BY_SEED} are t-intervals and cover other seeds '
      'only: outcomes of single tasks were not kept.'
    )
  return '\n'.join([*lines, '', table])


# Pairs of methods whose differences are averaged over environments.
AVERAGED = (
  (GIGPO, law.BASELINE),
  ('gigpo shuffled', law.BASELINE),
  (GIGPO, 'gigpo shuffled'),
  ('gigpo one state', law.BASELINE),
  (GIGPO, 'gigpo one state'),
  *(
    (name, law.BASELINE)
    for name in ('g2po', 'graphgpo', 'pgpo', 'hgpo', 'gagpo', 'ecpo')
  ),
  *(('g2po', name) for name in (GIGPO, 'graphgpo', 'pgpo', 'g2po shuffled')),
)


def averages_block() -> str:
  """Returns the table of differences averaged over environments."""
  return _averages(_tests())


def further_block() -> str:
  """Returns the averages over environments of the seeds that were added."""
  tests = {
    environment: evidence.of_seeds(results, evidence.FURTHER_SEEDS)
    for environment, results in _tests().items()
  }
  return _averages(tests)


def _averages(tests: evidence.Tests) -> str:
  stable = [name for name in tests if name != 'gymnasium']
  groups = {
    'all': list(tests),
    'without the lake': stable,
    'without the lake and ALFWorld': [n for n in stable if 'alfworld' not in n],
  }
  return evidence.averages_table(tests, AVERAGED, groups)


def equal_dial_block() -> str:
  """Returns the comparison at equal costs for the settings of the dial."""
  named = []
  for row in _evaluations('keydoor'):
    setting, method = law.split_name(row['experiment'], row['name'])
    named.append(row | {'experiment': setting, 'name': method})
  return equal_cost.table(named, law.BASELINE)


def equal_gigpo_block() -> str:
  """Returns the comparison of changes of GiGPO at equal costs."""
  evaluations = _evaluations('carry_over') + _evaluations('teachers')
  return equal_cost.table(evaluations, GIGPO)


def guard_block() -> str:
  """Returns the success with a high learning rate, with and without a guard."""
  results = _tests('guard')['alfworld']
  gaps = paired.compare_all(results, 'high rate')
  rows = [
    (
      name,
      ', '.join(f'{100 * by_seed[s].success:.1f}' for s in sorted(by_seed)),
      paired.summarize(by_seed)[0],
      *_cells(gaps, name),
    )
    for name, by_seed in results.items()
  ]
  columns = '', 'success in %, by seed', 'mean', 'minus high rate', 'p'
  return plots.table(columns, rows)


# Names of the controls in oracle.json.
_ORACLE_NAMES = {
  'g2po, anchor=group': 'g2po one state',
  'g2po, anchor=shuffled': 'g2po shuffled',
  'gigpo, anchor=group': 'gigpo one state',
  'gigpo, anchor=shuffled': 'gigpo shuffled',
  'gigpo, anchor=state': 'gigpo state anchors',
  'gigpo, discount=1': 'gigpo discount 1',
  'gigpo, episode_weight=0': 'gigpo steps only',
}


def order_block() -> str:
  """Returns the rank correlations of cosines with success."""
  cosines = {
    environment: {
      _ORACLE_NAMES.get(name, name): values['cosine'][0]
      for name, values in measured['methods'].items()
    }
    for environment, measured in read_json('oracle').items()
  }
  return evidence.order_table(_tests(), cosines, least=5)


def dial_block() -> str:
  """Returns the table of the dial."""
  tests = _tests('keydoor')
  predictors = (_FOLDER / 'dial_predictors.json').read_text(encoding='utf-8')
  return dial_table(tests['keydoor'], json.loads(predictors))


@functools.cache
def _predictions() -> tuple[dict[str, dict], dict[str, law.Effect]]:
  """Returns the predicted and the measured effects by setting."""
  measured: dict[str, law.Effect] = {}
  for name in ('credit', 'held_out'):
    measured |= law.read_effects(str(_FOLDER / f'{name}.csv'))
  return read_json('predictions')['predictions'], measured


def readme_block() -> str:
  """Returns the table of the README: a row for each environment with a pair."""

  def difference(results: outcomes.Results, one: str, other: str) -> str:
    gap = paired.compare_results(results.get(one, {}), results.get(other, {}))
    if gap is None:
      return _MISSING
    if gap.seeds < _FEW_PAIRS:  # An interval would be too narrow.
      gap = gap._replace(low=np.nan, high=np.nan)
    return f'{gap} ({gap.seeds})'

  pairs = (GIGPO, law.BASELINE), ('g2po', GIGPO)
  rows = []
  for experiment, results in _tests().items():
    gaps = [difference(results, *pair) for pair in pairs]
    if gaps[0] != _MISSING:
      shares = [
        f'{paired.summarize(results[name])[0]} ({len(results[name])})'
        if name in results
        else _MISSING
        for name in (law.BASELINE, *_SHOWN)
      ]
      rows.append((experiment, *shares, *gaps))
  titles = [f'{one} minus {other}, 95 %' for one, other in pairs]
  columns = '`:mini`', law.BASELINE, *_SHOWN, *titles
  return plots.table(columns, rows)


BLOCKS = {
  'added': lambda: evidence.added_table(_tests(), (law.BASELINE, GIGPO)),
  'averages': averages_block,
  'credit': credit_block,
  'controls': lambda: controls_table(_tests()),
  'data': lambda: data_table(_evaluations('credit'), [GIGPO]),
  'data_all': lambda: data_table(_evaluations('credit')),
  'dial': dial_block,
  'equal': lambda: equal_cost.table(_evaluations('credit'), law.BASELINE),
  'equal_dial': equal_dial_block,
  'equal_gigpo': equal_gigpo_block,
  'further': further_block,
  'guard': guard_block,
  'held_out': lambda: credit_table(
    _tests('held_out'), _evaluations('held_out')
  ),
  'law': lambda: law.table(*_predictions()),
  'order': order_block,
  'power': lambda: evidence.power_table(_tests(), GIGPO, law.BASELINE),
  'ranks': lambda: evidence.ranks_table(_tests(), least_methods=14),
  'robust': lambda: robust_table(_tests()),
  'readme': readme_block,
}
PAGES = (
  PROJECT / 'docs' / 'results.md',
  _FOLDER / 'details.md',
  PROJECT / 'README.md',
)


def with_blocks(text: str) -> str:
  """Returns a page with current blocks.

  Raises:
    ValueError: in one line, if a block has an unknown name.
  """

  def block(match: re.Match) -> str:
    begin, name, end = match.groups()
    if name not in BLOCKS:
      raise ValueError(
        f'block {name}: unknown; must be one of {", ".join(BLOCKS)}'
      )
    return f'{begin}\n{BLOCKS[name]()}\n{end}'

  return _BLOCK.sub(block, text)


def measured_effects(
  tests: Mapping[str, outcomes.Results],
  evaluations: Sequence[Mapping],
  method: str,
) -> dict[str, tuple[float, float, float]]:
  """Returns the difference of a method from GRPO by environment, in points.

  Args:
    tests: results by experiment, name and seed.
    evaluations: rows of `sweep_table.read`; the last ones of their runs count
      where `tests` has fewer than two pairs.
    method: name of the method.

  Returns:
    (difference, low, high) with a 95 % interval.
  """
  found = {
    setting: (effect.mean, *effect.interval)
    for setting, effect in law.effects(evaluations, method).items()
    if effect.seeds > 1
  }
  for experiment, results in tests.items():
    one, other = (results.get(name, {}) for name in (method, law.BASELINE))
    gap = paired.compare_results(one, other)
    if gap is not None and gap.seeds > 1:
      found[experiment] = tuple(100 * x for x in gap[:3])
  return found


def draw_effects(
  path: pathlib.Path,
  predictors: Mapping[str, Mapping[str, float]],
  effects: Mapping[str, Mapping[str, tuple[float, float, float]]],
) -> None:
  """Draws effects by each predictor, with 95 % intervals.

  Intervals wider than _WIDE are cut off where the others end.

  Args:
    path: path of the image.
    predictors: metrics by setting.
    effects: by method and setting, as `measured_effects` returns them.
  """
  count = len(law.PREDICTORS)
  shown = [
    x
    for by_setting in effects.values()
    for mean, low, high in by_setting.values()
    for x in ((low, high) if high - low < _WIDE else (mean,))
  ]
  with plots.image(
    path, figsize=(3 * count, 3.6), ncols=count, sharey=True
  ) as (figure, panels):
    for axes, (metric, words) in zip(
      panels, law.PREDICTORS.items(), strict=True
    ):
      by_setting = {name: x[metric] for name, x in predictors.items()}
      _draw_panel(axes, by_setting, effects)
      axes.set(xlabel=words, ylim=(min(shown) - 1, max(shown) + 1))
    panels[0].set(ylabel='minus GRPO (points)')
    names = _settings_of(predictors, effects)
    handles = [
      lines.Line2D([], [], color=f'C{n}', linewidth=3, label=method)
      for n, method in enumerate(effects)
    ] + [
      lines.Line2D([], [], color='grey', marker=x, linestyle='', label=name)
      for x, name in zip(itertools.cycle(_MARKERS), names, strict=False)
    ]
    figure.legend(
      handles=handles, loc='outside upper center', ncols=len(handles)
    )


def _settings_of(
  predictors: Mapping[str, Any], effects: Mapping[str, Mapping[str, Any]]
) -> list[str]:
  """Returns the settings that a plot of effects shows."""
  return [name for name in predictors if name in effects[GIGPO]]


def _draw_panel(
  axes: Any,
  predictor: Mapping[str, float],
  effects: Mapping[str, Mapping[str, tuple[float, float, float]]],
) -> None:
  """Draws effects by one predictor; the methods are next to each other."""
  names = _settings_of(predictor, effects)
  shift = 0.03 * np.ptp([predictor[name] for name in names])
  for n, by_setting in enumerate(effects.values()):
    for marker, name in zip(itertools.cycle(_MARKERS), names, strict=False):
      if name not in by_setting:
        continue
      mean, low, high = by_setting[name]
      axes.errorbar(
        predictor[name] + n * shift,
        mean,
        [[mean - low], [high - mean]],
        fmt=marker,
        color=f'C{n}',
        capsize=2,
      )
  axes.axhline(0, color='grey', linewidth=0.8)
  axes.grid(alpha=0.3)


def draw_oracle(path: pathlib.Path, measured: Mapping[str, Mapping]) -> None:
  """Draws the cosines of methods with the oracle, a panel per setting.

  Args:
    path: path of the image.
    measured: by setting, a dictionary with `methods`, which has (cosine, low,
      high) by method, as benchmarks/credit.py writes it.
  """
  settings = list(measured)
  first = measured[settings[0]]['methods']
  names = sorted(first, key=lambda name: first[name]['cosine'][0])
  with plots.image(
    path,
    figsize=(2 + 3 * len(settings), 0.27 * len(names) + 1),
    ncols=len(settings),
    sharey=True,
    squeeze=False,
  ) as (_, panels):
    for axes, setting in zip(panels[0], settings, strict=True):
      methods = measured[setting]['methods']
      for n, name in enumerate(names):
        if name not in methods:
          continue
        value, low, high = methods[name]['cosine']
        axes.errorbar(
          value,
          n,
          xerr=[[value - low], [high - value]],
          fmt='o',
          color='C0' if methods[name]['minus gigpo'][1] <= 0 else 'C1',
          capsize=2,
        )
      axes.axvline(methods[GIGPO]['cosine'][0], color='grey', linewidth=0.8)
      axes.set(title=setting, xlabel='cosine with the oracle')
      axes.set_yticks(range(len(names)), names)
      axes.grid(alpha=0.3, axis='x')


def read_json(name: str) -> dict:
  """Returns a JSON file of docs/results."""
  return json.loads((_FOLDER / f'{name}.json').read_text(encoding='utf-8'))


def draw_all() -> None:
  """Draws the plots of docs/results.md."""
  evaluations = [*_evaluations('main'), *_evaluations('credit')]
  effects = {
    method: found
    for method in _SHOWN
    if (found := measured_effects(_tests(), evaluations, method))
  }
  draw_effects(_FOLDER / 'effects.png', read_json('predictors'), effects)
  draw_oracle(_FOLDER / 'oracle.png', read_json('oracle'))
  law.draw(str(_FOLDER / 'predictions.png'), *_predictions())


@output.handle()
def main() -> int:
  """Rewrites the pages and the plots; returns 2 on errors."""
  argparse.ArgumentParser(description=__doc__).parse_args()
  try:
    for path in PAGES:
      text = with_blocks(path.read_text(encoding='utf-8'))
      path.write_text(text, encoding='utf-8')
    draw_all()
  except (OSError, ValueError) as error:
    sys.stderr.write(f'{error}\n')
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
