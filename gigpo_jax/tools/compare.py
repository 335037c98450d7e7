r"""Compare runs side by side: a table and one plot of learning curves.

    python -m gigpo_jax.tools.compare runs/alfworld-tiny \
        runs/alfworld-tiny-grpo --out curves.png

Runs that differ in their seed only share a color and, in the table, a name.
Thin lines are runs; the thick line is their mean over the iterations at which
all of them were evaluated.
"""

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from configs import base
from gigpo_jax import deprecated, metrics
from gigpo_jax.run import run_config
from gigpo_jax.runtime import files, output
from gigpo_jax.tools import plots

_RATE = 'eval/success_rate'
_REQUIRED = (_RATE, 'eval/success_low', 'eval/success_high')
_MOST_CHANGES = 5  # Fields that a line about a run lists.
# Starts of fields in which runs of different methods are usually the same.
_USUALLY_SHARED = (
  *('env.', 'evaluation.', 'num_iterations'),
  *('rollout.groups', 'rollout.episodes_per_group'),
)
_TITLE = 'gigpo_jax.tools.compare'  # Marks the plots that may be replaced.


def evaluations(lines: Sequence[dict]) -> dict[int, dict]:
  """Returns the metrics of iterations with an evaluation, by iteration."""
  evaluated = {
    line['iteration']: line
    for line in lines
    if all(line.get(name) is not None for name in _REQUIRED)
  }
  if not evaluated:
    raise ValueError(
      f'no {_RATE} in {len(lines)} iterations; the run must evaluate '
      '(evaluation.every)'
    )
  return evaluated


def table(runs: Sequence[tuple[str, int, Sequence[dict]]]) -> str:
  """Returns a Markdown table with one row per run.

  Args:
    runs: (variant, seed, metrics) of each run.
  """
  rows = []
  for variant, seed, lines in runs:
    evaluated = evaluations(lines)
    iterations = sorted(evaluated)
    first, last = evaluated[iterations[0]], evaluated[iterations[-1]]
    between = [f'{evaluated[i][_RATE]:.1%}' for i in iterations[1:-1]]
    seconds = sum(
      # time/iteration_secs includes the evaluation; the last evaluation follows
      # the last iteration and has its own time.
      line.get('time/iteration_secs') or line.get('time/evaluation_secs') or 0.0
      for line in lines
    )
    low, high = (last[f'eval/success_{end}'] for end in ('low', 'high'))
    episodes = max(line.get('spent/episodes') or 0 for line in lines)
    rows.append(
      (
        f'`{variant}`',
        seed,
        f'{first[_RATE]:.1%}',
        ', '.join(between),
        f'{last[_RATE]:.1%} [{low:.1%}, {high:.1%}]',
        f'{100 * (last[_RATE] - first[_RATE]):+.1f}',
        f'{episodes:,.0f}',
        f'{seconds / 60:.0f}',
      )
    )
  columns = 'run', 'seed', 'start', 'between', 'end, 95 %', 'points'
  return plots.table((*columns, 'episodes', 'minutes'), rows)


def draw(
  runs: Sequence[tuple[str, int, Sequence[dict]]], path: str | pathlib.Path
) -> None:
  """Draws the learning curves into an image file.

  Args:
    runs: (variant, seed, metrics) of each run.
    path: path of the image.
  """
  with plots.image(path, title=_TITLE, figsize=(7, 4)) as (_, axes):
    for n, variant in enumerate(dict.fromkeys(v for v, _, _ in runs)):
      color = f'C{n}'
      curves = [evaluations(lines) for v, _, lines in runs if v == variant]
      for curve in curves:
        x = sorted(curve)
        y = [100 * curve[i][_RATE] for i in x]
        axes.plot(x, y, color=color, alpha=0.35, linewidth=1)
      shared = sorted(set.intersection(*map(set, curves)))
      mean = [
        100 * sum(c[i][_RATE] for c in curves) / len(curves) for i in shared
      ]
      spent = [
        max(line.get('spent/episodes') or 0 for line in lines)
        for v, _, lines in runs
        if v == variant
      ]
      label = (
        f'{variant}, {len(curves)} seed{"s" if len(curves) > 1 else ""}, '
        f'{sum(spent) / len(spent):,.0f} episodes'
      )
      axes.plot(shared, mean, 'o-', color=color, linewidth=2, label=label)
    axes.set(xlabel='iteration', ylabel='success in evaluation (%)')
    axes.set_ylim(-2, 102)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc='best')


def load_all(
  workdirs: Sequence[str | pathlib.Path],
) -> list[tuple[str, int, list[dict]]]:
  """Returns the name, seed and metrics of each run.

  The name is the variant. If runs of one variant differ in more than their
  seed, the folder of the first run with the same settings follows, with as many
  of its parents as tell all folders apart; it is the name of runs without a
  variant.

  Raises:
    ValueError: in one line, if a folder is not a run's work directory, has no
      evaluation, or repeats a run.
  """
  runs = []
  # Folder of the first run with some settings, by variant and settings.
  folders: dict[str, dict[str, str]] = {}
  known: dict[tuple[str, int], str | pathlib.Path] = {}
  for workdir, folder in zip(workdirs, _folder_names(workdirs), strict=True):
    config, lines = _read_config(workdir), read_metrics(workdir)
    variant, seed = config.get('variant', ''), config['seed']
    settings = json.dumps(_settings(config), sort_keys=True)
    if (settings, seed) in known:
      raise ValueError(
        f'{workdir}: has the config and the seed of {known[settings, seed]}; '
        'must be another run'
      )
    known[settings, seed] = workdir
    folders.setdefault(variant, {}).setdefault(settings, folder)
    runs.append((variant, settings, seed, lines))
  named = []
  for variant, settings, seed, lines in runs:
    names = [variant] if variant else []
    if not variant or len(folders[variant]) > 1:
      names.append(folders[variant][settings])
    named.append((', '.join(names), seed, lines))
  return named


def differences(workdirs: Sequence[str | pathlib.Path]) -> list[str]:
  """Returns a line for each run that is unlike the first of its variant.

  The first run of a variant is compared with the first of all, in the fields
  that methods usually share: the environment, the evaluation, the episodes.
  """
  first: dict[str, tuple[str, dict]] = {}
  lines = []
  for workdir, folder in zip(workdirs, _folder_names(workdirs), strict=True):
    config = _read_config(workdir)
    own, variant = _settings(config), config.get('variant', '')
    is_new = variant not in first
    name, other = first.setdefault(variant, (folder, own))
    if is_new:
      name, other = next(iter(first.values()))
    changed = [
      f'{field}={value} ({before})'
      for field, (before, value) in run_config.differences(other, own, None)
      if not is_new or field.startswith(_USUALLY_SHARED)
    ]
    if more := len(changed[_MOST_CHANGES:]):
      changed[_MOST_CHANGES:] = [f'{more} more']
    if changed:
      lines.append(f'{folder} differs from {name}: {", ".join(changed)}')
  return lines


def unfinished(workdirs: Sequence[str | pathlib.Path]) -> list[str]:
  """Returns a line for each run that was not evaluated at its end."""
  lines = []
  for workdir, folder in zip(workdirs, _folder_names(workdirs), strict=True):
    last = max(evaluations(read_metrics(workdir)))
    count = _read_config(workdir).get('num_iterations', last)
    if last < count:
      lines.append(f'{folder}: last evaluated at iteration {last} of {count}')
  return lines


def _folder_names(workdirs: Sequence[str | pathlib.Path]) -> list[str]:
  """Returns the shortest ends of the paths that differ between folders."""
  paths = [pathlib.Path(workdir).resolve().parts for workdir in workdirs]
  for length in itertools.count(1):
    names = ['/'.join(parts[-length:]) for parts in paths]
    if len(set(names)) == len(set(paths)):
      return names


def _settings(config: dict) -> dict[str, Any]:
  """Returns the fields that runs share which differ in their seed only."""
  fields = run_config.fixed_fields(config)
  del fields['seed']
  return fields


def _read_config(workdir: str | pathlib.Path) -> dict:
  path = pathlib.Path(workdir) / 'config.json'
  if not path.is_file():
    raise ValueError(
      f'{workdir}: no config.json; must be the --workdir of a run'
    )
  config = files.read_stored(path)
  if 'seed' not in config:
    raise ValueError(f'{path}: lacks seed')
  deprecated.update_stored(config, base.get_config().to_dict())
  return config


def read_metrics(workdir: str | pathlib.Path) -> list[dict]:
  """Returns the metrics of a run with evaluations.

  Raises:
    ValueError: in one line, if it has none.
  """
  lines = metrics.read(workdir)
  try:
    evaluations(lines)
  except ValueError as error:
    raise ValueError(f'{workdir}: {error}') from None
  return lines


@output.handle()
def main(argv: Sequence[str] | None = None) -> int:
  """Prints the table and draws the plot if requested; returns 2 on errors."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('workdirs', nargs='+', help='work directories of runs')
  parser.add_argument('--out', help='path for the plot; none by default')
  options = parser.parse_args(argv)
  try:
    out = options.out
    path = plots.check_output(out, '--out', _TITLE) if out else None
    runs = load_all(options.workdirs)
    print(table(runs))
    notes = unfinished(options.workdirs) + differences(options.workdirs)
    if notes:
      print('', *notes, sep='\n')
    if path:
      _draw_file(runs, path)
  except ValueError as error:
    sys.stderr.write(f'{error}\n')
    return 2
  return 0


def _draw_file(
  runs: Sequence[tuple[str, int, Sequence[dict]]], path: pathlib.Path
) -> None:
  """Draws the learning curves, or raises ValueError in one line."""
  try:
    draw(runs, path)
  except (OSError, ValueError) as error:
    raise ValueError(
      f'--out={path}: cannot be written ({error}); must be an image file, such '
      'as curves.png, in a writable folder'
    ) from error
  print(f'\ncurves: {path}')


if __name__ == '__main__':
  sys.exit(main())
