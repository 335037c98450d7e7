"""Run many experiments in parallel; collect results in a table and plots.

Each run is a work directory of launch/train.py. A rerun of the same command
skips finished runs and resumes the others.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence

import ml_collections
import numpy as np
import tqdm

import configs
from envs import processes
from gigpo_jax import config as config_lib
from gigpo_jax import deprecated, metrics
from gigpo_jax.run import config_fields, run_config
from gigpo_jax.runtime import files
from gigpo_jax.tools import outcomes, paired, sweep_table

_ROOT = pathlib.Path(__file__).parents[2]
_RATE = 'optimizer.learning_rate'
# jax's name of the share of a GPU's memory that a process reserves, its older
# name, and the share of all runs together; CUDA's libraries need the rest.
_MEMORY_SHARES = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'
_MEMORY_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of launch/train.py.

  Attributes:
    name: name of the variant; runs of the same name differ in their seed.
    config: value of the --config flag.
    seed: seed of everything random.
    overrides: (config field, value) pairs.
    test: (config field, value) pairs for the evaluation of the trained policy;
      empty for no such evaluation.
    experiment: only runs of the same experiment are compared; by default the
      name of the config file.
  """

  name: str
  config: str
  seed: int
  overrides: tuple[tuple[str, object], ...] = ()
  test: tuple[tuple[str, object], ...] = ()
  experiment: str = ''

  def __post_init__(self):
    stem = pathlib.Path(self.config.partition(':')[0]).stem
    object.__setattr__(self, 'experiment', self.experiment or stem)

  @property
  def key(self) -> tuple[str, str, int]:
    """Key of the run in the table: (experiment, name, seed)."""
    return self.experiment, self.name, self.seed

  @functools.cached_property
  def settings(self) -> str:
    """What the table keeps of a run's config, such as `config.py env.a=1`.

    It includes the learning rate, which a config file chooses by method.
    """
    rate = self.load().optimizer.learning_rate
    changes = dict(self.overrides) | {_RATE: rate}
    return ' '.join(
      (self.config, *(f'{k}={v}' for k, v in sorted(changes.items())))
    )

  def has_settings(self, stored: str | None) -> bool:
    """Returns whether settings in a table are the run's, as far as known.

    Tables of older releases have none, or lack the learning rate.
    """
    if stored is None or stored == self.settings:
      return True
    without = [x for x in self.settings.split(' ') if not x.startswith(_RATE)]
    return _RATE not in stored and stored == ' '.join(without)

  @property
  def folder(self) -> str:
    """Name of the work directory."""
    return _file_name(f'{self.experiment}-{self.name}-{self.seed}')

  def load(
    self, fields: Sequence[tuple[str, object]] = ()
  ) -> ml_collections.ConfigDict:
    """Returns the run's config.

    Args:
      fields: further (config field, value) pairs.

    Raises:
      ValueError: in one line, if the config or a field does not exist.
    """
    path, _, variant = self.config.partition(':')
    overrides = {'seed': self.seed, **dict((*self.overrides, *fields))}
    try:
      file = configs.find(path) or path
      config = config_fields.load(file, variant).lock()
      overrides = deprecated.renamed(overrides, config)
      for field in overrides.keys() - config_fields.flatten(config).keys():
        advice = config_fields.suggest(field, config) or 'see configs/base.py'
        raise ValueError(f'{field}: no such field; {advice}')
      config.update_from_flattened_dict(overrides)
    except (KeyError, OSError, TypeError, ValueError) as error:
      message = ' '.join(str(error).split())
      raise ValueError(f'{self.label}{message}') from error
    return config

  @property
  def label(self) -> str:
    """Start of errors about the run."""
    return f'--sweep: run {self.folder}: '

  def command(self, root: pathlib.Path) -> list[str]:
    """Returns the command that trains the run in a folder under `root`."""
    return self._launch('train', self.overrides, root / self.folder)

  def test_command(self, root: pathlib.Path) -> list[str]:
    """Returns the command that evaluates the trained policy."""
    policy, result = root / self.folder / 'policy', self.test_result(root)
    fields = (*self.overrides, *self.test)
    command = self._launch('evaluate', fields, result.parent)
    return [*command, f'--model={policy}']

  def test_result(self, root: pathlib.Path) -> pathlib.Path:
    """Returns the file that `test_command` writes."""
    return root / self.folder / 'test' / 'evaluation.json'

  def next_command(self, root: pathlib.Path) -> list[str] | None:
    """Returns the command to run next, or None if the run is complete."""
    self.load(self.test)  # Refuses unknown fields before the training.
    if not finished(self, root):
      return self.command(root)
    if self.test and not _is_tested(self, root):
      return self.test_command(root)
    return None

  def _launch(
    self,
    script: str,
    fields: Sequence[tuple[str, object]],
    workdir: pathlib.Path,
  ) -> list[str]:
    return [
      sys.executable,
      str(_ROOT / 'launch' / f'{script}.py'),
      f'--config={self.config}',
      f'--config.seed={self.seed}',
      *(f'--config.{field}={value}' for field, value in fields),
      f'--workdir={workdir}',
    ]


def read(given: str | pathlib.Path) -> list[Run]:
  """Returns the runs that a file lists in RUNS, a list of dictionaries.

  Each dictionary has the keys name, config and seed, and optionally experiment
  and, as dictionaries of config fields, overrides and test; see `Run`. The
  trained policies of runs with test are evaluated with these fields and
  compared task by task.

  Args:
    given: path of the file; a path within the project works from any folder.

  Raises:
    ValueError: in one line, if the file or its list is invalid, or two runs
      share a folder.
  """
  path = configs.find(str(given))
  if path is None or not os.path.isfile(path):
    raise ValueError(
      f'--sweep={given}: no such file; must be a Python file that defines RUNS'
    )
  try:
    entries = runpy.run_path(str(path)).get('RUNS')
  except (Exception, SystemExit) as error:  # A file may raise anything.
    raise ValueError(
      f'--sweep={path}: cannot be loaded ({type(error).__name__}: {error}); '
      'must be a Python file that defines RUNS'
    ) from error
  if not entries or not isinstance(entries, list | tuple):
    raise ValueError(
      f'--sweep={path}: RUNS is missing, empty or no list; must be a list of '
      'runs'
    )
  runs = [_run_of(entry, f'--sweep={path}') for entry in entries]
  folders = [run.folder for run in runs]
  if duplicates := sorted({f for f in folders if folders.count(f) > 1}):
    raise ValueError(
      f'--sweep={path}: {duplicates} are listed twice; runs must be unique'
    )
  return runs


def _run_of(entry: object, flag: str) -> Run:
  """Returns the run that an entry of RUNS describes.

  Raises:
    ValueError: in one line that begins with the flag, if it describes none.
  """
  if not isinstance(entry, dict):
    raise ValueError(f'{flag}: {entry}: must be a dictionary')
  types = {'name': str, 'config': str, 'seed': int, 'experiment': str}
  unknown = entry.keys() - types.keys() - {'overrides', 'test'}
  missing = types.keys() - {'experiment'} - entry.keys()
  if unknown or missing:
    raise ValueError(
      f'{flag}: {entry} has unknown keys {sorted(unknown)} and lacks '
      f'{sorted(missing)}; must have name, config, seed and optionally '
      'experiment, overrides and test'
    )
  changes = [entry.get(name, {}) for name in ('overrides', 'test')]
  if not all(isinstance(fields, dict) for fields in changes):
    raise ValueError(
      f'{flag}: {entry}: overrides and test must be dictionaries'
    )
  names = [name for fields in changes for name in fields]
  if 'seed' in changes[0] or not all(isinstance(name, str) for name in names):
    raise ValueError(
      f'{flag}: {entry}: overrides and test must have names of config fields, '
      'overrides not seed'
    )
  values = {name: entry[name] for name in types if name in entry}
  for name, value in values.items():
    if type(value) is not types[name]:
      raise ValueError(
        f'{flag}: {name}={value!r}: must be of type {types[name].__name__}'
      )
  overrides, test = (tuple(fields.items()) for fields in changes)
  return Run(**values, overrides=overrides, test=test)


def _file_name(text: str) -> str:
  return re.sub('[ /]', '-', text)


def finished(run: Run, root: pathlib.Path) -> bool:
  """Returns whether a run has completed all its iterations.

  Raises:
    ValueError: in one line, if its folder holds a run with another config.
  """
  folder, config = root / run.folder, run.load()
  run_config.check_resume(config, str(folder))
  lines = metrics.read(folder)
  # Agents with adapters of their own have a policy each.
  policies = list((folder / 'policy').glob('**/config.json'))
  if not lines or not policies:
    return False
  # A finished run can be resumed with more iterations, and then be killed
  # before it writes its policy again.
  is_last = lines[-1]['iteration'] >= config.num_iterations - 1
  return is_last and not any(metrics.is_older(p, folder) for p in policies)


def _is_tested(run: Run, root: pathlib.Path) -> bool:
  """Returns whether the result of a run's test can be read and is current."""
  try:
    outcomes.read_evaluation(run.test_result(root))
  except ValueError:  # Missing or damaged.
    return False
  return _is_current(run, root)


def _is_current(run: Run, root: pathlib.Path) -> bool:
  """Returns whether a test is later than its run and has the run's fields."""
  path = run.test_result(root)
  stored = files.read_stored(path).get('config', {})
  wanted = json.loads(json.dumps(dict(run.test)))
  if any(stored.get(field, wanted[field]) != wanted[field] for field in wanted):
    return False
  return not metrics.is_older(path, root / run.folder)


def run_all(
  runs: Sequence[Run], root: pathlib.Path, *, at_once: int
) -> list[Run]:
  """Completes all runs and returns those that failed.

  Each run is pinned to its share of the cores, if there are enough, has its
  share of a GPU's memory, and writes a log next to its folder. The runs end
  when this process ends.

  Args:
    runs: runs to train and to test.
    root: parent of the work directories.
    at_once: maximum number of parallel runs.
  """
  waiting = [run for run in runs if run.next_command(root)]
  at_once = max(1, min(at_once, len(waiting)))
  cores = sorted(os.sched_getaffinity(0)) if _can_pin_cores() else []
  share = len(cores) // at_once
  variables = _share_variables(at_once, share)
  free = list(range(at_once))
  running: dict[subprocess.Popen, tuple[Run, list[str], int]] = {}
  failed = []
  bar = tqdm.tqdm(total=len(runs), initial=len(runs) - len(waiting))
  try:
    while waiting or running:
      while waiting and free:
        run, index = waiting.pop(0), free.pop(0)
        command = run.next_command(root)
        own = cores[index * share : (index + 1) * share]
        process = _start(run, command, root, own, variables)
        running[process] = run, command, index
      bar.set_postfix_str(
        ', '.join(run.folder for run, _, _ in running.values())
      )
      process = _wait_for_any(running)
      run, command, index = running.pop(process)
      free.append(index)
      following = run.next_command(root)
      if process.returncode or following == command:
        failed.append(run)
        log = root / f'{run.folder}.log'
        *_, last = '', *log.read_text(errors='replace').splitlines()
        bar.write(f'{run.folder}: failed, see {log}: {last}')
      elif following:
        waiting.insert(0, run)
        continue
      bar.update()
  finally:
    for process in running:
      process.terminate()
    for process in running:
      process.wait()  # Until the run has saved its checkpoint.
    bar.close()
  return failed


def _validate(runs: Sequence[Run]) -> None:
  """Checks the configs of runs; those that differ in the seed alone once.

  Raises:
    ValueError: one line per problem.
  """
  different = {(run.config, run.overrides, run.test): run for run in runs}
  lines: dict[str, None] = {}
  for run in different.values():
    for fields in (), run.test:
      config = run.load(fields)
      try:
        config_lib.validate(config)
      except ValueError as error:
        lines |= dict.fromkeys(
          f'{run.label}{line}' for line in str(error).splitlines()
        )
  if lines:
    raise ValueError('\n'.join(lines))


def _can_pin_cores() -> bool:
  return hasattr(os, 'sched_setaffinity')


def _share_variables(at_once: int, cores: int) -> dict[str, str]:
  """Returns the environment variables of one of several runs on this machine.

  Args:
    at_once: number of parallel runs.
    cores: cores of a run; 0: not its own.
  """
  variables = {
    'OMP_NUM_THREADS': str(max(cores, 1)),
    processes.PARENT_VARIABLE: str(os.getpid()),
  }
  if at_once > 1 and not any(name in os.environ for name in _MEMORY_SHARES):
    # Each process would reserve 75 % of the GPU.
    variables[_MEMORY_SHARES[0]] = f'{_MEMORY_SHARE / at_once:.3f}'
  return variables


def _start(
  run: Run,
  command: list[str],
  root: pathlib.Path,
  cores: Sequence[int],
  variables: Mapping[str, str],
) -> subprocess.Popen:
  with open(root / f'{run.folder}.log', 'a', encoding='utf-8') as log:
    process = subprocess.Popen(
      command,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=os.environ | variables,
    )
  if cores:
    os.sched_setaffinity(process.pid, cores)
  return process


def _wait_for_any(running: dict) -> subprocess.Popen:
  while True:
    for process in running:
      try:
        process.wait(timeout=0.2)
      except subprocess.TimeoutExpired:
        continue
      return process


def gather(
  runs: Sequence[Run],
  root: pathlib.Path,
  name: str = 'results',
  known: Sequence[dict] = (),
) -> list[dict[str, float | str | None]]:
  """Returns the evaluations of finished runs and writes them to NAME.csv.

  Args:
    runs: runs to collect, in the order of the CSV.
    root: parent of the work directories, and folder of the CSV.
    name: name of the CSV, without suffix.
    known: evaluations of runs that are stored elsewhere.
  """
  root.mkdir(parents=True, exist_ok=True)
  by_run = sweep_table.by_run(known)
  evaluations = []
  for run in runs:
    if run.key in by_run:
      evaluations += by_run[run.key]
      continue
    if not finished(run, root):
      continue
    # An evaluation measures the policy before its iteration trains it, so the
    # totals spent are those before the iteration.
    spent = dict.fromkeys(sweep_table.SPENT, 0.0)
    since: list[dict] = []
    for line in metrics.read(root / run.folder):
      if line.get('eval/success_rate') is not None:
        evaluations.append(
          {'experiment': run.experiment, 'name': run.name, 'seed': run.seed}
          | {'settings': run.settings}
          | {column: line.get(column) for column in sweep_table.COLUMNS}
          | spent
          | {column: _mean_of(column, since) for column in sweep_table.MEANS}
        )
        since = []
      since.append(line)
      spent = {name: line.get(name, spent[name]) for name in sweep_table.SPENT}
  sweep_table.write(root / f'{name}.csv', evaluations)
  return evaluations


def gather_tests(
  runs: Sequence[Run],
  root: pathlib.Path,
  name: str = 'results',
  known: Sequence[outcomes.Result] = (),
) -> list[outcomes.Result]:
  """Returns the results of finished runs and writes them to NAME_tests.csv.

  Args:
    runs: runs to collect, in the order of the CSV.
    root: parent of the work directories, and folder of the CSV.
    name: name of the CSV, without suffix.
    known: results of runs that are stored elsewhere.
  """
  by_key = {result.key: result for result in known}
  results = []
  for run in runs:
    path = run.test_result(root)
    if run.key in by_key:
      results.append(by_key[run.key])
    elif (
      run.test
      and path.is_file()
      and finished(run, root)
      and _is_current(run, root)
    ):
      by_task = outcomes.read_evaluation(path)
      results.append(outcomes.make_result(run.key, by_task))
  if results:
    outcomes.write(sweep_table.tests_path(root / f'{name}.csv'), results)
  return results


def _mean_of(column: str, lines: Sequence[dict]) -> float | None:
  """Returns the mean of a column over the lines that have it, or None."""
  values = [line[column] for line in lines if line.get(column) is not None]
  return float(np.mean(values)) if values else None


def _describe_known(
  path: str, by_run: Mapping[tuple, Sequence[dict]], runs: Sequence[Run]
) -> str:
  """Returns how many runs are taken from a table.

  Args:
    path: value of --known.
    by_run: the table's evaluations by `Run.key`.
    runs: the runs of the sweep.

  Raises:
    ValueError: in one line, if there are none, or one has other settings.
  """
  stored = {r: by_run[r.key][0]['settings'] for r in runs if r.key in by_run}
  if not stored:
    raise ValueError(
      f'--known={path}: has no run of the sweep; experiment, name and seed '
      'must be those of the sweep'
    )
  for run, settings in stored.items():
    if not run.has_settings(settings):
      raise ValueError(
        f'--known={path}: {run.folder} was made with {settings}, but the sweep '
        f'has {run.settings}; give one of them another name, or leave out the '
        'table'
      )
  unchecked = list(stored.values()).count(None)
  note = f'; the settings of {unchecked} are not known' if unchecked else ''
  return f'{len(stored)} runs are taken from {path}{note}'


def main(
  sweep: str,
  workdir: str,
  *,
  at_once: int,
  only_gather: bool,
  known: Sequence[str] = (),
) -> int:
  """Runs a sweep and gathers its results; returns 1 if a run failed.

  Args:
    sweep: path of the file with RUNS.
    workdir: parent of the work directories.
    at_once: maximum number of parallel runs.
    only_gather: whether to skip training and only gather results.
    known: CSVs of runs that are stored elsewhere; these runs are skipped. Their
      tests are read from NAME_tests.csv next to NAME.csv. Of a run in several
      CSVs, the last one counts.
  """
  runs, root = read(sweep), pathlib.Path(workdir).resolve()
  table = root / f'{pathlib.Path(sweep).stem}.csv'
  earlier = sweep_table.by_run(sweep_table.read(table, missing_ok=True))
  earlier_tests = sweep_table.read_tests(table)
  known_runs: dict[tuple, list[dict]] = {}
  for path in known:
    by_run = sweep_table.by_run(sweep_table.read(path))
    print(_describe_known(path, by_run, runs))
    known_runs |= by_run
  to_run = [run for run in runs if run.key not in known_runs]
  run_config.check_workdir(workdir)
  failed = []
  if not only_gather:
    with files.lock(root):
      _validate([run for run in to_run if not finished(run, root)])
      failed = run_all(to_run, root, at_once=at_once)
  complete = {run.key for run in to_run if finished(run, root)}
  # Results stay in the table if the folders of their runs or tests are cleaned
  # up.
  unchanged = [
    run
    for run in to_run
    if run.key in earlier and run.has_settings(earlier[run.key][0]['settings'])
  ]
  kept = {x.key: earlier[x.key] for x in unchanged if x.key not in complete}
  untested = {x.key for x in unchanged if not x.test_result(root).exists()}
  if kept:
    print(f'{len(kept)} runs of {table} stay in it without complete folders')
  lost = earlier.keys() - kept.keys() - known_runs.keys() - complete
  if lost:
    print(f'{len(lost)} runs of {table} are not in the sweep any more')
    _back_up(table)
  tested = [x for x in earlier_tests if x.key in kept.keys() | untested]
  tested += [r for path in known for r in sweep_table.read_tests(path)]
  elsewhere = [line for x in (known_runs | kept).values() for line in x]
  evaluations = gather(runs, root, table.stem, elsewhere)
  tests = outcomes.group(gather_tests(runs, root, table.stem, tested))
  _report(evaluations, tests, len(runs), table)
  return int(bool(failed))


def _back_up(table: pathlib.Path) -> None:
  """Copies a table, and that of its tests, before they lose runs."""
  for path in (table, sweep_table.tests_path(table)):
    if path.exists():
      print(f'the earlier {path.name} is kept: {files.back_up(path)}')


def _report(
  evaluations: Sequence[dict],
  tests: Mapping[str, outcomes.Results],
  total: int,
  table: pathlib.Path,
) -> None:
  """Prints the results and draws learning curves.

  Args:
    evaluations: rows of `sweep_table.read`.
    tests: results of tests by experiment.
    total: number of runs of the sweep.
    table: the CSV, next to which the curves are drawn.
  """
  done = len(sweep_table.by_run(evaluations))
  print(f'{done} of {total} runs are finished')
  for experiment in dict.fromkeys(line['experiment'] for line in evaluations):
    part = [line for line in evaluations if line['experiment'] == experiment]
    print(f'\n{experiment}\n\n{sweep_table.table(part)}')
    if experiment in tests:
      print(f'\n{paired.table(tests[experiment])}')
    for x in sweep_table.AXES:
      name = f'{table.stem}_{experiment}_by_{x.rpartition("/")[2]}.png'
      sweep_table.draw(part, table.with_name(_file_name(name)), x=x)
  print(f'\n{table}')
