"""Compare methods at equal environment steps and equal generated tokens.

All methods of a benchmark play the same number of episodes. The episodes of
some methods become shorter, so that their runs cost less.
"""

from collections.abc import Iterable, Mapping, Sequence

from gigpo_jax.tools import match_rate, plots, sweep_table

_BUDGETS = {
  'spent/episodes': 'equal episodes',
  'spent/env_steps': 'equal steps',
  'spent/tokens': 'equal tokens',
}
_STEPS = 'spent/env_steps'

Curves = Mapping[int, Sequence[dict]]  # Evaluations of a run, by seed.


def differences(curves: Curves, baseline: Curves, x: str) -> list[float]:
  """Returns differences of success at equal budgets, in points, by seed.

  The budget of a seed is the smaller total of its two runs, where the success
  of the other is interpolated between its evaluations.

  Args:
    curves: evaluations of a method's runs by seed.
    baseline: those of the method to compare with.
    x: column of the budget.
  """
  gaps = []
  for seed in sorted(curves.keys() & baseline.keys()):
    pair = curves[seed], baseline[seed]
    budget = min(curve[-1][x] for curve in pair)
    one, other = (sweep_table.success_at(curve, x, budget) for curve in pair)
    gaps.append(one - other)
  return gaps


def table(evaluations: Sequence[dict], baseline: str) -> str:
  """Returns a Markdown table of methods compared at equal costs.

  Columns: environment; method; seeds with a run of the baseline, to which the
  other columns are restricted; difference in environment steps; differences of
  success in points, mean and standard error over seeds, at equal episodes,
  environment steps and tokens; mean `ratio/kl`, divided by the baseline's.

  Args:
    evaluations: rows of `sweep_table.read`.
    baseline: name of the method to compare with.
  """
  rows = []
  for experiment in dict.fromkeys(row['experiment'] for row in evaluations):
    lines = [row for row in evaluations if row['experiment'] == experiment]
    methods = sweep_table.curves(lines)
    base = methods.pop(baseline, {})
    label = experiment
    for name, curves in methods.items():
      if seeds := curves.keys() & base.keys():
        paired = [row for row in lines if row['seed'] in seeds]
        moved = match_rate.distances(paired, experiment)
        gaps = [differences(curves, base, x) for x in _BUDGETS]
        rows.append(
          (
            *(label, name, len(seeds)),
            f'{_more_steps(curves, base, seeds):+.1f} %',
            *map(sweep_table.mean_and_error, gaps),
            f'{moved[name] / moved[baseline]:.2g}'
            if {name, baseline} <= moved.keys()
            else '',
          )
        )
        label = ''
  columns = 'environment', 'method', 'seeds', 'steps', *_BUDGETS.values()
  return plots.table((*columns, '`ratio/kl`'), rows)


def _more_steps(
  curves: Curves, baseline: Curves, seeds: Iterable[int]
) -> float:
  """Returns how many more environment steps a method took, in percent."""
  one, other = (
    sum(runs[seed][-1][_STEPS] for seed in seeds) for runs in (curves, baseline)
  )
  return 100 * (one / other - 1)
