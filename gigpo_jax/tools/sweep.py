"""Run many experiments in parallel; collect results in a table and plots.

Each run is a work directory of launch/train.py. A rerun of the same command
skips finished runs and resumes the others.
"""

import os
import pathlib
import subprocess
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import tqdm

from envs import processes
from gigpo_jax import config as config_lib
from gigpo_jax import metrics
from gigpo_jax.run import run_config
from gigpo_jax.runtime import files
from gigpo_jax.tools import outcomes, paired, sweep_runs, sweep_table
from gigpo_jax.tools.sweep_runs import Run

# jax's name of the share of a GPU's memory that a process reserves, its older
# name, and the share of all runs together; CUDA's libraries need the rest.
_MEMORY_SHARES = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'
_MEMORY_SHARE = 0.9


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
      is_test = bool(fields)
      try:
        config_lib.validate(
          config, collects=not is_test, evaluates=is_test or None
        )
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
    if not sweep_runs.finished(run, root):
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
    if run.key in by_key:
      results.append(by_key[run.key])
    elif (
      run.test
      and sweep_runs.finished(run, root)
      and (by_task := sweep_runs.read_test(run, root)) is not None
    ):
      results.append(outcomes.make_result(run.key, by_task, run.test_settings))
  if results or sweep_table.tests_path(root / f'{name}.csv').exists():
    outcomes.write(sweep_table.tests_path(root / f'{name}.csv'), results)
  return results


def _mean_of(column: str, lines: Sequence[dict]) -> float | None:
  """Returns the mean of a column over the lines that have it, or None."""
  values = [line[column] for line in lines if line.get(column) is not None]
  return float(np.mean(values)) if values else None


def _read_tables(
  path: str | pathlib.Path, *, missing_ok: bool = False
) -> tuple[dict[tuple, list[dict]], dict[tuple, outcomes.Result]]:
  """Returns the evaluations and the tests in a table, by `Run.key`."""
  evaluations = sweep_table.read(path, missing_ok=missing_ok)
  tests = sweep_table.read_tests(path)
  return sweep_table.by_run(evaluations), {test.key: test for test in tests}


def _read_known(
  path: str, runs: Sequence[Run]
) -> tuple[dict[tuple, list[dict]], dict[tuple, outcomes.Result]]:
  """Returns evaluations and tests of runs in a table; prints how many.

  Args:
    path: value of --known.
    runs: the runs of the sweep.

  Raises:
    ValueError: in one line, if there are none, or one has other settings.
  """
  evaluations, tests = _read_tables(path)
  known = [run for run in runs if run.key in evaluations]
  if not known:
    raise ValueError(
      f'--known={path}: has no run of the sweep; experiment, name and seed '
      'must be those of the sweep'
    )
  stored = [evaluations[run.key][0]['settings'] for run in known]
  tested = [run for run in known if run.test and run.key in tests]
  different = [
    (run.folder, settings, run.settings)
    for run, settings in zip(known, stored, strict=True)
    if not run.has_settings(settings)
  ] + [
    (run.folder, tests[run.key].settings, run.test_settings)
    for run in tested
    if not run.has_test_settings(tests[run.key].settings, same_run=True)
  ]
  if different:
    folder, made, wanted = different[0]
    raise ValueError(
      f'--known={path}: {folder} was made with {made}, but the sweep has '
      f'{wanted}; give one of them another name, or leave out the table'
    )
  notes = [f'{len(known)} runs are taken from {path}']
  if unchecked := stored.count(None):
    notes.append(f'the settings of {unchecked} are not known')
  if untested := sum(bool(run.test) for run in known) - len(tested):
    notes.append(f'{untested} have no test there')
  print('; '.join(notes))
  return (
    {run.key: evaluations[run.key] for run in known},
    {run.key: tests[run.key] for run in tested},
  )


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
  runs, root = sweep_runs.read(sweep), pathlib.Path(workdir).resolve()
  table = root / f'{pathlib.Path(sweep).stem}.csv'
  earlier = _read_tables(table, missing_ok=True)
  stored: dict[tuple, list[dict]] = {}
  tests: dict[tuple, outcomes.Result] = {}
  for path in known:
    more, more_tests = _read_known(path, runs)
    tests = {k: test for k, test in tests.items() if k not in more} | more_tests
    stored |= more
  to_run = [run for run in runs if run.key not in stored]
  run_config.check_workdir(workdir)
  failed = []
  if only_gather:
    for run in to_run:
      run.load(run.test)  # Refuses unknown fields.
  else:
    with files.lock(root):
      _validate([run for run in to_run if not sweep_runs.finished(run, root)])
      failed = run_all(to_run, root, at_once=at_once)
  complete = {run.key for run in to_run if _is_complete(run, root)}
  kept, kept_tests = _cleaned_up(to_run, root, complete, *earlier)
  if kept:
    print(f'{len(kept)} runs of {table} stay in it without complete folders')
  stored, tests = stored | kept, tests | kept_tests
  evaluated = [run for run in runs if run.key in stored.keys() | complete]
  tested = [
    run
    for run in runs
    if run.key in tests or (run.key in complete and _has_test(run, root))
  ]
  lost = [
    len(before.keys() - {run.key for run in now})
    for before, now in zip(earlier, (evaluated, tested), strict=True)
  ]
  if any(lost):
    print(f'{lost[0]} runs and {lost[1]} tests of {table} are left out')
    _back_up(table)
  finished = {run.key for run in (*evaluated, *tested)}
  lines = [line for lines in stored.values() for line in lines]
  evaluations = gather(evaluated, root, table.stem, lines)
  results = gather_tests(tested, root, table.stem, [*tests.values()])
  _draw(evaluations, table)
  print(f'{len(finished)} of {len(runs)} runs are finished')
  _report(evaluations, outcomes.group(results), table)
  return int(bool(failed))


def _cleaned_up(
  runs: Sequence[Run],
  root: pathlib.Path,
  complete: Collection[tuple],
  evaluations: Mapping[tuple, list[dict]],
  tests: Mapping[tuple, outcomes.Result],
) -> tuple[dict[tuple, list[dict]], dict[tuple, outcomes.Result]]:
  """Returns evaluations and tests whose folders were cleaned up, by `Run.key`.

  Args:
    runs: the runs of the sweep.
    root: parent of the work directories.
    complete: keys of the runs with complete folders.
    evaluations: the evaluations in the table.
    tests: the tests in the table.
  """
  same = {
    run.key
    for run in runs
    if run.key in evaluations
    and run.has_settings(evaluations[run.key][0]['settings'])
  }
  untested = [
    run
    for run in runs
    if run.key in tests
    and (run.key not in complete or not run.test_result(root).exists())
  ]
  return (
    {key: evaluations[key] for key in same - set(complete)},
    {
      run.key: tests[run.key]
      for run in untested
      if run.has_test_settings(
        tests[run.key].settings, same_run=run.key in same
      )
    },
  )


def _has_test(run: Run, root: pathlib.Path) -> bool:
  """Returns whether a finished run has its test; prints why one is left out."""
  if not run.test:
    return False
  is_tested = sweep_runs.read_test(run, root) is not None
  if not is_tested and run.test_result(root).exists():
    print(f'{run.folder}: its test has another config or policy, or is damaged')
  return is_tested


def _is_complete(run: Run, root: pathlib.Path) -> bool:
  """Returns whether a run is finished; prints why its folder does not count."""
  try:
    return sweep_runs.finished(run, root)
  except ValueError as error:
    print(f'{run.folder} does not count: {error}')
    return False


def _back_up(table: pathlib.Path) -> None:
  """Copies a table, and that of its tests, before they lose runs."""
  for path in (table, sweep_table.tests_path(table)):
    if path.exists():
      print(f'the earlier {path.name} is kept: {files.back_up(path)}')


def _draw(evaluations: Sequence[dict], table: pathlib.Path) -> None:
  """Draws learning curves, by experiment, next to the CSV `table`."""
  for experiment in dict.fromkeys(line['experiment'] for line in evaluations):
    part = _of_experiment(evaluations, experiment)
    for x in sweep_table.AXES:
      name = f'{table.stem}_{experiment}_by_{x.rpartition("/")[2]}.png'
      path = table.with_name(sweep_runs.file_name(name))
      sweep_table.draw(part, path, x=x)


def _report(
  evaluations: Sequence[dict],
  tests: Mapping[str, outcomes.Results],
  table: pathlib.Path,
) -> None:
  """Prints the results.

  Args:
    evaluations: rows of `sweep_table.read`.
    tests: results of tests by experiment.
    table: the CSV.
  """
  evaluated = [line['experiment'] for line in evaluations]
  for experiment in dict.fromkeys((*evaluated, *tests)):
    print(f'\n{experiment}')
    if part := _of_experiment(evaluations, experiment):
      print(f'\n{sweep_table.table(part)}')
    if experiment in tests:
      print(f'\n{paired.table(tests[experiment])}')
  print(f'\n{table}')


def _of_experiment(evaluations: Sequence[dict], experiment: str) -> list[dict]:
  return [line for line in evaluations if line['experiment'] == experiment]
