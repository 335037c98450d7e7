r"""Several runs side by side: a table, and learning curves in one picture.

    python -m gigpo_jax.compare runs/alfworld-tiny runs/alfworld-tiny-grpo \
        --out curves.png

Runs of one variant share a colour: thin lines are runs, the thick one their
mean over the evaluations that all of them have.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from gigpo_jax import files, metrics

_RATE = 'eval/success_rate'
_NEEDED = (_RATE, 'eval/success_low', 'eval/success_high')


def evaluations(lines: Sequence[dict]) -> dict[int, dict]:
  """Returns the lines with an evaluation, by iteration."""
  found = {
    line['iteration']: line
    for line in lines
    if all(line.get(name) is not None for name in _NEEDED)
  }
  if not found:
    raise ValueError(
      f'no {_RATE} in {len(lines)} iterations; must have been evaluated '
      '(evaluation.every)'
    )
  return found


def table(runs: Sequence[tuple[str, int, Sequence[dict]]]) -> str:
  """Returns a Markdown table, a row for each run.

  Args:
    runs: variant, seed and metrics of each.
  """
  rows = []
  for variant, seed, lines in runs:
    found = evaluations(lines)
    order = sorted(found)
    first, last = found[order[0]], found[order[-1]]
    middle = [f'{found[i][_RATE]:.1%}' for i in order[1:-1]]
    seconds = sum(
      # An iteration counts its evaluation, but the last has no iteration.
      line.get('time/iteration_secs') or line.get('time/evaluation_secs') or 0.0
      for line in lines
    )
    low, high = (last[f'eval/success_{end}'] for end in ('low', 'high'))
    episodes = max(line.get('spent/episodes') or 0 for line in lines)
    rows.append(
      f'| `{variant}` | {seed} | {first[_RATE]:.1%} | {", ".join(middle)} '
      f'| {last[_RATE]:.1%} [{low:.1%}, {high:.1%}] '
      f'| {100 * (last[_RATE] - first[_RATE]):+.1f} | {episodes:,.0f} '
      f'| {seconds / 60:.0f} |'
    )
  head = (
    '| run | seed | start | between | end, 95 % | points | episodes | minutes |'
  )
  return '\n'.join([head, '|---|---|---|---|---|---|---|---|', *rows])


def draw(
  runs: Sequence[tuple[str, int, Sequence[dict]]], path: str | pathlib.Path
) -> None:
  """Writes the picture; `runs` as in `table`."""
  # Slow to import.
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 4), layout='constrained')
  for n, variant in enumerate(dict.fromkeys(v for v, _, _ in runs)):
    color = f'C{n}'
    found = [evaluations(lines) for v, _, lines in runs if v == variant]
    for curve in found:
      x = sorted(curve)
      y = [100 * curve[i][_RATE] for i in x]
      axes.plot(x, y, color=color, alpha=0.35, linewidth=1)
    shared = sorted(set.intersection(*map(set, found)))
    mean = [100 * sum(f[i][_RATE] for f in found) / len(found) for i in shared]
    spent = [
      max(line.get('spent/episodes') or 0 for line in lines)
      for v, _, lines in runs
      if v == variant
    ]
    label = (
      f'{variant}, {len(found)} seed{"s" if len(found) > 1 else ""}, '
      f'{sum(spent) / len(spent):,.0f} episodes'
    )
    axes.plot(shared, mean, 'o-', color=color, linewidth=2, label=label)
  axes.set(xlabel='iteration', ylabel='success, held-out tasks (%)')
  axes.set_ylim(-2, 102)
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(alpha=0.3)
  axes.legend(loc='best')
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def load(workdir: str | pathlib.Path) -> tuple[str, int, list[dict]]:
  """Returns a run's variant, seed and metrics.

  Raises:
    ValueError: if the folder is not one of a run.
  """
  path = pathlib.Path(workdir) / 'config.json'
  if not path.is_file():
    raise ValueError(
      f'{workdir}: no config.json; must be the --workdir of a run'
    )
  config = files.read_stored(path)
  if missing := {'variant', 'seed'} - config.keys():
    raise ValueError(f'{path}: lacks {", ".join(sorted(missing))}')
  lines = metrics.read(workdir)
  try:
    evaluations(lines)
  except ValueError as error:
    raise ValueError(f'{workdir}: {error}') from None
  return config['variant'], config['seed'], lines


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the table, draws a picture if asked; returns 2 if refused."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('workdirs', nargs='+', help='of runs')
  parser.add_argument('--out', help='file for the picture; none by default')
  options = parser.parse_args(argv)
  try:
    runs = [load(workdir) for workdir in options.workdirs]
  except ValueError as error:
    sys.stderr.write(f'{error}\n')
    return 2
  print(table(runs))
  if options.out:
    draw(runs, options.out)
    print(f'\ncurves: {options.out}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
