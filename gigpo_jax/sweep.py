"""Many runs of launch/train.py: two at a time, gathered in a table and curves.

A run is a folder, and goes on where it stopped, as every run does; one that is
finished is left alone. So the same command again does what is missing.
"""

import csv
import dataclasses
import functools
import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Sequence

import ml_collections
import numpy as np
import tqdm

import configs
from envs import worker
from gigpo_jax import config as config_lib
from gigpo_jax import files, metrics

_ROOT = pathlib.Path(__file__).parents[1]
# Of the CSV, after name and seed.
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
# Means of the iterations since the evaluation before; of the CSV, too.
MEANS = (
  'train/success_rate',
  'train/episode_length',
  'train/invalid_action_rate',
  'advantage/singleton_anchor_rows',
  'advantage/anchor_group_size_mean',
  'advantage/groups_without_spread',
  'advantage/episode_std',
  'advantage/step_std',
  'advantage/correlation',
  'advantage/effective_tokens',
  'ratio/kl',
  'loss/entropy',
  'update/grad_norm',
  'time/iteration_secs',
  'time/credit_secs',
)
_SPENT = tuple(column for column in COLUMNS if column.startswith('spent/'))
_X = {
  'spent/env_steps': 'environment steps',
  'spent/tokens': 'generated tokens',
  'iteration': 'iteration',
}


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of launch/train.py.

  Attributes:
    name: what it is an example of; runs of a name differ in their seed.
    config: as --config has it.
    seed: of everything random.
    overrides: (field, value) of the config.
  """

  name: str
  config: str
  seed: int
  overrides: tuple[tuple[str, object], ...] = ()

  @property
  def experiment(self) -> str:
    """Name of its config: only runs of one are compared."""
    return pathlib.Path(self.config.partition(':')[0]).stem

  @property
  def key(self) -> tuple[str, str, int]:
    """What a line of the table names it by."""
    return self.experiment, self.name, self.seed

  @property
  def folder(self) -> str:
    """Name of its work directory."""
    name = self.name.replace(' ', '-')
    return f'{self.experiment}-{name}-{self.seed}'

  def load(self) -> ml_collections.ConfigDict:
    """Returns its config.

    Raises:
      ValueError: in one line, if there is none such.
    """
    path, _, variant = self.config.partition(':')
    given = {'seed': self.seed, **dict(self.overrides)}
    try:
      config = runpy.run_path(str(_ROOT / path))['get_config'](variant).lock()
      config.update_from_flattened_dict(given)
    except (KeyError, OSError, TypeError, ValueError) as error:
      told = ' '.join(str(error).split())
      raise ValueError(f'--sweep: run {self.folder}: {told}') from error
    return config

  def command(self, root: pathlib.Path) -> list[str]:
    """Returns what runs it, into a folder of `root`."""
    return [
      sys.executable,
      str(_ROOT / 'launch' / 'train.py'),
      f'--config={self.config}',
      f'--config.seed={self.seed}',
      *(f'--config.{field}={value}' for field, value in self.overrides),
      f'--workdir={root / self.folder}',
    ]


def read(given: str | pathlib.Path) -> list[Run]:
  """Returns the runs of a file, which has a list RUNS of dictionaries.

  Each has name, config and seed, and maybe overrides, a dictionary.

  Raises:
    ValueError: in one line, if it has not, or two runs have one folder.
  """
  # Those of the project are found from any folder.
  path = configs.find(str(given))
  if path is None or not os.path.isfile(path):
    raise ValueError(f'--sweep={given}: no such file; must be one with RUNS')
  found = runpy.run_path(str(path)).get('RUNS')
  if not found:
    raise ValueError(f'--sweep={path}: has no RUNS; must be a list of runs')
  runs = []
  for told in found:
    unknown = set(told) - {'name', 'config', 'seed', 'overrides'}
    missing = {'name', 'config', 'seed'} - set(told)
    if unknown or missing:
      raise ValueError(
        f'--sweep={path}: {told} has {sorted(unknown)} and lacks '
        f'{sorted(missing)}; must have name, config, seed, maybe overrides'
      )
    overrides = tuple(told.get('overrides', {}).items())
    runs.append(Run(told['name'], told['config'], told['seed'], overrides))
  folders = [run.folder for run in runs]
  if twice := sorted({f for f in folders if folders.count(f) > 1}):
    raise ValueError(f'--sweep={path}: {twice} are there twice; must be once')
  return runs


def finished(run: Run, root: pathlib.Path) -> bool:
  """Whether a run has come to its end.

  Raises:
    ValueError: in one line, if its folder is of a run with another config.
  """
  folder, config = root / run.folder, run.load()
  config_lib.check_resume(config, str(folder))
  if not (folder / 'policy' / 'config.json').is_file():
    return False
  # A shorter one may be gone on with.
  lines = metrics.read(folder)
  return bool(lines) and lines[-1]['iteration'] >= config.num_iterations - 1


def run_all(
  runs: Sequence[Run], root: pathlib.Path, *, at_once: int
) -> list[Run]:
  """Runs what is not finished; returns those that failed.

  Each has a core to itself, where there are as many, and a log in its folder.
  They end with this process.
  """
  waiting = [run for run in runs if not finished(run, root)]
  cores = sorted(os.sched_getaffinity(0)) if _pins() else []
  free = list(range(at_once))
  under_way: dict[subprocess.Popen, tuple[Run, int]] = {}
  failed = []
  bar = tqdm.tqdm(total=len(runs), initial=len(runs) - len(waiting))
  try:
    while waiting or under_way:
      while waiting and free:
        run, place = waiting.pop(0), free.pop(0)
        process = _begin(run, root, cores[place : place + 1])
        under_way[process] = run, place
      bar.set_postfix_str(
        ', '.join(run.folder for run, _ in under_way.values())
      )
      process = _first_over(under_way)
      run, place = under_way.pop(process)
      free.append(place)
      bar.update()
      if process.returncode or not finished(run, root):
        failed.append(run)
        bar.write(f'{run.folder}: failed, see {root / run.folder}.log')
  finally:
    for process in under_way:
      process.terminate()
    for process in under_way:
      process.wait()  # Until it has saved.
    bar.close()
  return failed


def _pins() -> bool:
  return hasattr(os, 'sched_setaffinity')


def _begin(
  run: Run, root: pathlib.Path, cores: Sequence[int]
) -> subprocess.Popen:
  with open(root / f'{run.folder}.log', 'a', encoding='utf-8') as log:
    process = subprocess.Popen(
      run.command(root),
      cwd=_ROOT,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=os.environ | {'OMP_NUM_THREADS': '1'},
      # By the kernel, however this process ends.
      preexec_fn=functools.partial(worker.die_with, os.getpid()),
    )
  if cores:
    os.sched_setaffinity(process.pid, cores)
  return process


def _first_over(under_way: dict) -> subprocess.Popen:
  while True:
    for process in under_way:
      try:
        process.wait(timeout=0.2)
      except subprocess.TimeoutExpired:
        continue
      return process


def read_table(path: str) -> list[dict[str, float | str | None]]:
  """Returns the evaluations of a CSV that `gather` has written.

  Raises:
    ValueError: in one line, if there is none such.
  """
  try:
    with open(path, newline='', encoding='utf-8') as file:
      lines = list(csv.DictReader(file))
    return [
      {'experiment': line['experiment'], 'name': line['name']}
      | {'seed': int(line['seed']), 'iteration': int(line['iteration'])}
      | {
        column: float(line[column]) if line[column] else None
        for column in (*COLUMNS[1:], *MEANS)
      }
      for line in lines
    ]
  except (OSError, KeyError, ValueError) as error:
    raise ValueError(
      f'--known={path}: not a table of a sweep ({error!r}); must be its CSV'
    ) from error


def gather(
  runs: Sequence[Run],
  root: pathlib.Path,
  name: str = 'results',
  known: Sequence[dict] = (),
) -> list[dict[str, float | str | None]]:
  """Returns evaluations of finished runs, and writes them to NAME.csv.

  Args:
    runs: in whose order they are.
    root: where the runs live.
    name: of the CSV.
    known: evaluations of runs that live elsewhere.
  """
  root.mkdir(parents=True, exist_ok=True)
  by_run = _by_run(known)
  found = []
  for run in runs:
    if run.key in by_run:
      found += by_run[run.key]
      continue
    if not finished(run, root):
      continue
    # A line evaluates what the iterations before it have made.
    spent = dict.fromkeys(_SPENT, 0.0)
    since: list[dict] = []
    for line in metrics.read(root / run.folder):
      if line.get('eval/success_rate') is not None:
        found.append(
          {'experiment': run.experiment, 'name': run.name, 'seed': run.seed}
          | {column: line.get(column) for column in COLUMNS}
          | spent
          | {column: _mean_of(column, since) for column in MEANS}
        )
        since = []
      since.append(line)
      spent = {name: line.get(name, spent[name]) for name in _SPENT}
  columns = ['experiment', 'name', 'seed', *COLUMNS, *MEANS]
  with open(root / f'{name}.csv', 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(found)
  return found


def _by_run(found: Sequence[dict]) -> dict[tuple, list[dict]]:
  """Returns evaluations by `Run.key`."""
  by_run: dict[tuple, list[dict]] = {}
  for line in found:
    key = line['experiment'], line['name'], line['seed']
    by_run.setdefault(key, []).append(line)
  return by_run


def _mean_of(column: str, lines: Sequence[dict]) -> float | None:
  """Returns the mean of what lines tell of a column; None if none does."""
  told = [line[column] for line in lines if line.get(column) is not None]
  return float(np.mean(told)) if told else None


def table(found: Sequence[dict]) -> str:
  """Returns a Markdown table: success by name, mean and standard error.

  At the end of the runs, and how many episodes were played for training until
  then; how far that is from the first name's, seed by seed; at as many
  environment steps, and as many generated tokens, as the run has that spent
  least of them, between evaluations on a line; and each seed's at the end.

  Args:
    found: of `gather`.
  """
  curves = _curves(found)
  least = {
    x: min(c[-1][x] for by_seed in curves.values() for c in by_seed.values())
    for x in ('spent/env_steps', 'spent/tokens')
  }
  first, *_ = curves
  heads = [f'less {first}, paired']
  heads += [f'at {most:,.0f} {_X[x]}' for x, most in least.items()]
  lines = [
    '| run | seeds | episodes | success at the end '
    f'| {" | ".join(heads)} | each |',
    '|---|---|---|---|---|---|---|---|',
  ]
  at_end = {
    name: {s: 100 * c[-1]['eval/success_rate'] for s, c in by_seed.items()}
    for name, by_seed in curves.items()
  }
  for name, by_seed in curves.items():
    ends = list(at_end[name].values())
    apart = [
      x - at_end[first][s]
      for s, x in at_end[name].items()
      if s in at_end[first]
    ]
    told = [_mean(ends), _mean(apart) if apart and name != first else '']
    for x, most in least.items():
      told.append(_mean([_at(c, x, most) for c in by_seed.values()]))
    each = ', '.join(f'{x:.1f}' for x in ends)
    played = np.mean([c[-1]['spent/episodes'] for c in by_seed.values()])
    lines.append(
      f'| {name} | {len(ends)} | {played:,.0f} | {" | ".join(told)} | {each} |'
    )
  return '\n'.join(lines)


def _curves(found: Sequence[dict]) -> dict[str, dict[int, list[dict]]]:
  """Returns evaluations by name and seed."""
  curves: dict[str, dict[int, list[dict]]] = {}
  for (_, name, seed), lines in _by_run(found).items():
    curves.setdefault(name, {})[seed] = lines
  return curves


def _at(curve: Sequence[dict], x: str, most: float) -> float:
  """Returns the success, in per cent, where `most` of x were spent."""
  places = [line[x] for line in curve]
  heights = [100 * line['eval/success_rate'] for line in curve]
  return float(np.interp(most, places, heights))


def _mean(values: Sequence[float]) -> str:
  """Returns mean and standard error; of one value only that."""
  mean = sum(values) / len(values)
  if len(values) == 1:
    return f'{mean:.1f}'
  return f'{mean:.1f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.1f}'


def draw(
  found: Sequence[dict], path: pathlib.Path, *, x: str = 'spent/env_steps'
) -> None:
  """Writes curves: means over seeds, and bands from the least to the most."""
  # Slow to import.
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 4.2), layout='constrained')
  for n, (name, by_seed) in enumerate(_curves(found).items()):
    # At places that all seeds come to.
    end = min(curve[-1][x] for curve in by_seed.values())
    places = np.linspace(0, end, 50)
    heights = np.array(
      [[_at(c, x, most) for most in places] for c in by_seed.values()]
    )
    played = np.mean([c[-1]['spent/episodes'] for c in by_seed.values()])
    label = (
      f'{name}, {len(by_seed)} seed{"s" if len(by_seed) > 1 else ""}, '
      f'{played:,.0f} episodes'
    )
    axes.plot(places, heights.mean(axis=0), color=f'C{n}', label=label)
    axes.fill_between(
      places,
      heights.min(axis=0),
      heights.max(axis=0),
      color=f'C{n}',
      alpha=0.15,
    )
  axes.set(xlabel=_X[x], ylabel='success, held-out tasks (%)', ylim=(-2, 102))
  axes.grid(alpha=0.3)
  axes.legend(loc='best', fontsize='small')
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def main(
  sweep: str,
  workdir: str,
  *,
  at_once: int,
  only_gather: bool,
  known: Sequence[str] = (),
) -> int:
  """Runs a sweep and gathers it; returns 1 if a run failed.

  Args:
    sweep: file with the list.
    workdir: where the runs live.
    at_once: runs side by side.
    only_gather: whether to run nothing.
    known: tables of runs that live elsewhere, and are not run again.
  """
  runs, root = read(sweep), pathlib.Path(workdir).resolve()
  elsewhere = [line for path in known for line in read_table(path)]
  done = _by_run(elsewhere).keys()
  here = [run for run in runs if run.key not in done]
  root.mkdir(parents=True, exist_ok=True)
  failed = []
  if not only_gather:
    with files.locked(root):
      failed = run_all(here, root, at_once=at_once)
  name = pathlib.Path(sweep).stem
  found = gather(runs, root, name, elsewhere)
  print(f'{len(_by_run(found))} of {len(runs)} runs are finished')
  for experiment in dict.fromkeys(line['experiment'] for line in found):
    part = [line for line in found if line['experiment'] == experiment]
    print(f'\n{experiment}\n\n{table(part)}')
    for x in _X:
      path = root / f'{name}_{experiment}_by_{x.rpartition("/")[2]}.png'
      draw(part, path, x=x)
  print(f'\n{root}/{name}.csv')
  return int(bool(failed))
