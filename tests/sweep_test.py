"""Tests of sweeps: which runs are started, skipped and gathered."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from gigpo_jax.run import model_builders, run_config
from gigpo_jax.runtime import files
from gigpo_jax.tools import outcomes, paired, sweep, sweep_runs, sweep_table

PROJECT = pathlib.Path(sweep.__file__).parents[2]


def write_run(folder, curve):
  """Writes a finished run with (environment steps, success) evaluations."""
  (folder / 'policy').mkdir(parents=True)
  # A line counts steps up to the end of its iteration; the last line is only an
  # evaluation.
  after = [steps for steps, _ in curve[1:]] + [curve[-1][0]]
  lines = [
    {
      'iteration': n,
      'spent/episodes': steps / 10,
      'spent/env_steps': steps,
      'spent/tokens': 7 * steps,
      'eval/success_rate': rate,
      'train/success_rate': n / 8,
    }
    for n, ((_, rate), steps) in enumerate(zip(curve, after, strict=True))
  ]
  (folder / 'metrics.jsonl').write_text(
    ''.join(json.dumps(line) + '\n' for line in lines)
  )
  (folder / 'policy' / 'config.json').write_text('{}')


def write_test(run, root):
  """Writes the test of a run: it fails the task x and solves y."""
  path = run.test_result(root)
  path.parent.mkdir()
  episodes = [{'task': t, 'success': t == 'y'} for t in 'yx']
  path.write_text(json.dumps({'policies': {'p': {'episodes': episodes}}}))


RUNS = [
  sweep_runs.Run('a', 'configs/alfworld.py:smoke', 0),
  sweep_runs.Run('a', 'configs/alfworld.py:smoke', 1),
  sweep_runs.Run(
    'b', 'configs/alfworld.py:smoke,grpo', 0, (('pool.num_workers', 3),)
  ),
]


def _entry(run):
  """Returns a run as an entry of a sweep's file."""
  entry = dataclasses.asdict(run) | {'overrides': dict(run.overrides)}
  return {name: value for name, value in entry.items() if name != 'test'}


def test_finished_runs_are_gathered_and_not_rerun(tmp_path):
  write_run(tmp_path / 'alfworld-a-0', [(0, 0.2), (100, 0.4)])
  write_run(tmp_path / 'alfworld-a-1', [(0, 0.2), (120, 0.8)])
  write_run(tmp_path / 'alfworld-b-0', [(0, 0.2), (110, 0.5)])
  assert sweep.run_all(RUNS, tmp_path, at_once=2) == []
  assert not list(tmp_path.glob('*.log'))
  evaluations = sweep.gather(RUNS, tmp_path)
  assert len(evaluations) == 6
  assert evaluations[1]['spent/env_steps'] == 100
  # Means over the iterations before an evaluation; the first has none.
  assert [line['train/success_rate'] for line in evaluations[:2]] == [None, 0]
  assert evaluations[1]['advantage/correlation'] is None
  header = (tmp_path / 'results.csv').read_text().splitlines()[0]
  assert header.startswith('experiment,name,seed,settings,iteration')
  lines = sweep_table.table(evaluations).splitlines()
  headers = (
    'minus a, paired | at 100 environment steps | at 700 generated tokens'
  )
  assert headers in lines[0]
  # Last rates 40 and 80: mean 60, standard error sqrt(800 / 2) = 20. After 100
  # steps: 40 and 20 + 60 * 5/6 = 70; 20 + 30 * 10/11 = 47.3.
  interpolated = '55.0 ± 15.0 | 55.0 ± 15.0'
  assert (
    lines[2] == f'| a | 2 | 11 | 60.0 ± 20.0 |  | {interpolated} | 40.0, 80.0 |'
  )
  # Seed 0 of run a has a last rate of 40.
  assert lines[3] == '| b | 1 | 11 | 50.0 | 10.0 | 47.3 | 47.3 | 50.0 |'
  assert 'minus' not in sweep_table.table(evaluations[:4])  # Run a alone.
  # Without seed 0 of run a, no seed is shared.
  unpaired = sweep_table.table(evaluations[2:]).splitlines()
  assert 'minus' not in unpaired[0] and '| b | 1 | 11 | 50.0 |' in unpaired[3]
  sweep_table.draw(evaluations, tmp_path / 'curves.png')
  assert (tmp_path / 'curves.png').stat().st_size > 5000


def test_runs_share_the_cores_and_the_memory_of_a_gpu(tmp_path, monkeypatch):
  shares, pinned = [], []

  def next_command(run, root):
    return None if (root / run.folder).exists() else [run.folder]

  class Process:
    pid, returncode = 7, 0

    def __init__(self, command, env, **_):
      (tmp_path / command[0]).mkdir()
      shares.append((env['OMP_NUM_THREADS'], env.get(names[0])))

    def wait(self, timeout=None):
      pass

    def terminate(self):
      pass

  names = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
  for name in names:
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(sweep_runs.Run, 'next_command', next_command)
  monkeypatch.setattr(sweep.subprocess, 'Popen', Process)
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {*range(3, 8)})
  monkeypatch.setattr(os, 'sched_setaffinity', lambda _, c: pinned.append(c))
  runs = [sweep_runs.Run('a', 'configs/alfworld.py:smoke', n) for n in range(2)]
  assert sweep.run_all(runs, tmp_path, at_once=2) == []
  assert shares == [('2', '0.450')] * 2 and pinned == [[3, 4], [5, 6]]
  # One run has all; a user's own share stays; without enough cores, no pins.
  cases = (1, 5, '', ('5', None)), (6, 4, '0.1', ('2', None))
  for at_once, cores, own, share in (*cases, (6, 1, '', ('1', None))):
    monkeypatch.setattr(
      os, 'sched_getaffinity', lambda _, count=cores: {*range(count)}
    )
    shares.clear()
    pinned.clear()
    for run in runs:
      (tmp_path / run.folder).rmdir()
    if own:
      monkeypatch.setenv(names[1], own)
    sweep.run_all(runs, tmp_path, at_once=at_once)
    assert shares == [share] * 2
  assert not pinned


@pytest.mark.slow
@pytest.mark.skipif(
  not hasattr(os, 'sched_setaffinity'), reason='pins processes to cores'
)
def test_failed_runs_are_reported_and_others_continue(tmp_path, capsys):
  runs = [
    sweep_runs.Run('bad', 'configs/alfworld.py:smoke', 0, (('seed', -1),)),
    sweep_runs.Run('worse', 'configs/webshop.py:smoke', 0, (('seed', -2),)),
  ]
  assert sweep.run_all(runs, tmp_path, at_once=1) == runs
  assert 'seed=-1' in (tmp_path / 'alfworld-bad-0.log').read_text()
  assert 'alfworld-bad-0.log: seed=-1: out of range' in capsys.readouterr().out
  assert 'seed=-2' in (tmp_path / 'webshop-worse-0.log').read_text()


def _write_outcomes(successes: str) -> list[str]:
  """Returns a command that writes its last argument's evaluation.json."""
  code = f"""
import json, os, sys
folder, = (x[10:] for x in sys.argv if x.startswith('--workdir='))
os.mkdir(folder)
episodes = [{{'task': str(n), 'success': s == '1'}}
            for n, s in enumerate('{successes}')]
report = {{'policies': {{'policy': {{'episodes': episodes}}}}}}
with open(folder + '/evaluation.json', 'w') as file:
  json.dump(report, file)
"""
  return [sys.executable, '-c', code]


def test_trained_policies_are_tested_and_compared(
  tmp_path, monkeypatch, capsys
):
  file = tmp_path / 'list.py'
  tested = {'overrides': {}, 'test': {'evaluation.num_tasks': 4}}
  file.write_text(f'RUNS = {[_entry(run) | tested for run in RUNS]}')
  for name in ('a-0', 'a-1', 'b-0'):
    write_run(tmp_path / f'alfworld-{name}', [(0, 0.2), (100, 0.4)])
  command = sweep_runs.Run.test_command
  successes = {'a': '0100', 'b': '0111'}

  def test_command(run, root):
    given = command(run, root)
    assert '--config.evaluation.num_tasks=4' in given
    assert f'--model={root / run.folder / "policy"}' in given
    if (run.name, run.seed) == ('a', 1) and not fixed:
      return [sys.executable, '-c', 'raise SystemExit(3)']
    return [*_write_outcomes(successes[run.name]), *given[2:]]

  monkeypatch.setattr(sweep_runs.Run, 'test_command', test_command)
  options = {'at_once': 1, 'only_gather': False}
  fixed = False
  assert sweep.main(str(file), str(tmp_path), **options) == 1
  assert 'alfworld-a-1: failed' in capsys.readouterr().out
  result = tmp_path / 'alfworld-a-0' / 'test' / 'evaluation.json'
  written = result.stat().st_mtime_ns
  fixed = True
  assert sweep.main(str(file), str(tmp_path), **options) == 0
  assert result.stat().st_mtime_ns == written
  printed = capsys.readouterr().out
  assert '| a | 2 | 25.0 | 25.0 |  |  |  |' in printed
  assert '| b | 1 | 75.0 | 75.0 | +50.0 [' in printed
  lines = (tmp_path / 'list_tests.csv').read_text().splitlines()
  # Outcomes 0100 and 0111, in hexadecimal digits.
  for line, start, end in zip(
    lines[1:],
    ('alfworld,a,0,4,0.25,4,', 'alfworld,a,1,4,0.25,4,', 'alfworld,b,0,4,0.75'),
    (',40', ',40', ',70'),
    strict=True,
  ):
    assert line.startswith(start) and line.endswith(end)
  unknown = dataclasses.replace(RUNS[0], test=(('evaluation.task', 4),))
  with pytest.raises(ValueError, match='-a-0: evaluation.task: no such field'):
    sweep.run_all([unknown], tmp_path, at_once=1)


def test_results_stay_if_folders_are_cleaned_up(tmp_path, capsys):
  runs = [dataclasses.replace(run, test=(('seed', 0),)) for run in RUNS]
  file = tmp_path / 'list.py'
  entries = [_entry(run) | {'test': dict(run.test)} for run in runs]
  file.write_text(f'RUNS = {entries}')
  _write_tested(runs, tmp_path)
  options = {'at_once': 1, 'only_gather': True}
  sweep.main(str(file), str(tmp_path), **options)
  table, tests = tmp_path / 'list.csv', tmp_path / 'list_tests.csv'
  contents = sweep_table.read(table), tests.read_text()
  shutil.rmtree(tmp_path / runs[0].folder)
  shutil.rmtree(tmp_path / runs[1].folder / 'policy')
  capsys.readouterr()
  sweep.main(str(file), str(tmp_path), **options)
  assert '2 runs of ' in capsys.readouterr().out
  shutil.rmtree(tmp_path / runs[2].folder / 'test')
  sweep.main(str(file), str(tmp_path), **options)
  assert (sweep_table.read(table), tests.read_text()) == contents
  # Results of other settings do not stay.
  entries[0]['overrides'] = {'pool.num_workers': 3}
  file.write_text(f'RUNS = {entries}')
  sweep.main(str(file), str(tmp_path), **options)
  keys = [line['seed'] for line in sweep_table.read(table)]
  assert keys == [1, 1, 0, 0]
  # But a copy of the tables has them.
  assert sweep_table.read(tmp_path / 'list.csv.bak') == contents[0]
  assert (tmp_path / 'list_tests.csv.bak').read_text() == contents[1]


def test_files_are_written_before_results_are_printed(tmp_path):
  runs = [dataclasses.replace(run, test=(('seed', 0),)) for run in RUNS]
  file = tmp_path / 'list.py'
  entries = [_entry(run) | {'test': dict(run.test)} for run in runs]
  file.write_text(f'RUNS = {entries}')
  _write_tested(runs, tmp_path)
  flags = f'--sweep={file}', '--gather', f'--workdir={tmp_path}'
  reader, writer = os.pipe()
  os.close(reader)
  done = _command(*flags, stdout=writer)
  os.close(writer)
  assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, '')
  written = {path.name for path in tmp_path.glob('list[._]*')}
  axes = ('env_steps', 'tokens', 'iteration')
  curves = {f'list_alfworld_by_{x}.png' for x in axes}
  assert written == {'list.py', 'list.csv', 'list_tests.csv'} | curves


def test_a_changed_test_is_repeated(tmp_path):
  run = dataclasses.replace(RUNS[0], test=(('evaluation.num_tasks', 2),))
  write_run(tmp_path / run.folder, [(0, 0.2), (100, 0.4)])
  write_test(run, tmp_path)
  assert run.next_command(tmp_path) is None  # Older files have no config.
  path = run.test_result(tmp_path)
  report = json.loads(path.read_text())
  for num_tasks, is_current in ((2, True), (4, False)):
    report['config'] = {'evaluation.num_tasks': num_tasks}
    path.write_text(json.dumps(report))
    assert (run.next_command(tmp_path) is None) == is_current
    assert len(sweep.gather_tests([run], tmp_path)) == is_current


def test_a_test_with_further_fields_is_not_current(tmp_path):
  fields = ('evaluation.num_tasks', 4), ('evaluation.temperature', 0.0)
  run = dataclasses.replace(RUNS[0], test=fields)
  write_run(tmp_path / run.folder, [(0, 0.2), (100, 0.4)])
  write_test(run, tmp_path)
  path = run.test_result(tmp_path)
  report = json.loads(path.read_text())
  report['config'] = run_config.experiment(run.load(run.test))
  path.write_text(json.dumps(report))
  assert run.next_command(tmp_path) is None
  # What a resume may change does not change a test.
  other = ('mesh.data', 2), ('checkpoint.every', 7), ('pool.num_envs', 4)
  assert (
    dataclasses.replace(run, overrides=other).next_command(tmp_path) is None
  )
  report['config']['model.decode_attention'] = 'xla'  # The former default.
  path.write_text(json.dumps(report))
  assert run.next_command(tmp_path) is None
  without = dataclasses.replace(run, test=fields[:1])
  assert without.next_command(tmp_path) == without.test_command(tmp_path)
  assert sweep.gather_tests([without], tmp_path) == []


def _write_sweep(path, runs):
  """Writes a file with runs and their tests."""
  entries = [_entry(run) | {'test': dict(run.test)} for run in runs]
  path.write_text(f'RUNS = {entries}')


def _write_tested(runs, root, curve=((0, 0.2), (100, 0.4))):
  """Writes finished runs and their tests."""
  for run in runs:
    write_run(root / run.folder, curve)
    write_test(run, root)


def test_tests_with_other_settings_are_not_mixed(tmp_path):
  greedy = [
    dataclasses.replace(run, test=(('evaluation.temperature', 0.0),))
    for run in RUNS
  ]
  file, root = tmp_path / 'list.py', tmp_path / 'a'
  _write_tested(greedy, root)
  options = {'at_once': 1, 'only_gather': True}
  _write_sweep(file, greedy)
  sweep.main(str(file), str(root), **options)
  table = root / 'list.csv'
  assert len(sweep_table.read_tests(table)) == 3
  sampled = [dataclasses.replace(run, test=(('seed', 0),)) for run in RUNS]
  _write_sweep(file, sampled)
  with pytest.raises(ValueError, match='0.0, but the sweep has .*test: seed=0'):
    sweep.main(str(file), str(tmp_path / 'b'), known=[str(table)], **options)
  shutil.rmtree(root / greedy[0].folder)
  shutil.rmtree(root / greedy[1].folder / 'test')
  sweep.main(str(file), str(root), **options)
  # The third has no config, as in files of earlier releases.
  assert [test.name for test in sweep_table.read_tests(table)] == ['b']


def test_a_copied_run_is_finished_and_tested(tmp_path):
  run = dataclasses.replace(RUNS[0], test=(('evaluation.num_tasks', 4),))
  write_run(tmp_path / run.folder, [(0, 0.2), (100, 0.4)])
  write_test(run, tmp_path)
  path, policy = run.test_result(tmp_path), tmp_path / run.folder / 'policy'
  for file in (path, policy / 'config.json'):
    os.utime(file, (0, 0))
  assert run.next_command(tmp_path) == run.command(tmp_path)
  iterations = run.load().num_iterations
  training = policy / 'training.json'
  training.write_text(json.dumps({'iterations': iterations}))
  assert run.next_command(tmp_path) == run.test_command(tmp_path)
  report = json.loads(path.read_text())
  for tested in (iterations, iterations - 1):
    report['policies']['p']['iterations'] = tested
    path.write_text(json.dumps(report))
    assert (run.next_command(tmp_path) is None) == (tested == iterations)
  # Of fewer iterations than the run has now.
  training.write_text(json.dumps({'iterations': iterations - 1}))
  assert run.next_command(tmp_path) == run.command(tmp_path)


def test_runs_without_evaluations_are_finished_and_compared(tmp_path, capsys):
  runs = [dataclasses.replace(run, test=(('seed', 0),)) for run in RUNS]
  file, root = tmp_path / 'list.py', tmp_path / 'runs'
  _write_sweep(file, runs)
  _write_tested(runs, root, [(0, None), (100, None)])
  options = {'at_once': 1, 'only_gather': True}
  for _ in range(2):
    sweep.main(str(file), str(root), **options)
    printed = capsys.readouterr().out
    assert '3 of 3 runs are finished' in printed and '| b | 1 |' in printed
    shutil.rmtree(root / runs[0].folder, ignore_errors=True)


def test_known_runs_without_tests_are_named(tmp_path, capsys):
  runs = [dataclasses.replace(run, test=(('seed', 0),)) for run in RUNS]
  file, root = tmp_path / 'list.py', tmp_path / 'a'
  _write_sweep(file, runs)
  _write_tested(runs, root)
  options = {'at_once': 1, 'only_gather': True}
  sweep.main(str(file), str(root), **options)
  table = root / 'list.csv'
  copy = tmp_path / 'copy.csv'
  shutil.copy(table, copy)
  capsys.readouterr()
  known = [str(table), str(copy)]
  sweep.main(str(file), str(tmp_path / 'b'), known=known, **options)
  assert f'from {copy}; 3 have no test there' in capsys.readouterr().out
  # A run and its test come from the same table.
  assert sweep_table.read_tests(tmp_path / 'b' / 'list.csv') == []


def test_known_tests_are_of_no_use_to_a_sweep_without_tests(tmp_path):
  runs = [dataclasses.replace(run, test=(('seed', 0),)) for run in RUNS]
  file, root = tmp_path / 'list.py', tmp_path / 'a'
  _write_sweep(file, runs)
  _write_tested(runs, root)
  options = {'at_once': 1, 'only_gather': True}
  sweep.main(str(file), str(root), **options)
  _write_sweep(file, RUNS)
  known = [str(root / 'list.csv')]
  sweep.main(str(file), str(tmp_path / 'b'), known=known, **options)
  assert sweep_table.read_tests(tmp_path / 'b' / 'list.csv') == []
  # A folder of another config is no obstacle, also for runs in the table.
  _write_sweep(file, runs)
  for folder in (root, tmp_path / 'c'):
    if folder != root:
      write_run(folder / runs[0].folder, [(0, 0.2), (100, 0.4)])
    changed = dataclasses.replace(runs[0], overrides=(('seed', 7),)).load()
    run_config.save(changed, str(folder / runs[0].folder))
    sweep.main(str(file), str(folder), known=known, **options)
  _write_sweep(file, [dataclasses.replace(runs[0], overrides=(('a.b', 1),))])
  with pytest.raises(ValueError, match='^--sweep: run alfworld-a-0: a.b: no'):
    sweep.main(str(file), str(root), **options)


def test_home_folder_of_an_override():
  entry = {'name': 'a', 'config': 'configs/alfworld.py', 'seed': 0}
  overrides = {'model.path': '~/m', 'env.data_dir': '~/d'}
  run = sweep_runs._run_of(entry | {'overrides': overrides}, '--sweep')
  home = os.path.expanduser('~')
  config = run.load()
  assert config.model.path == f'{home}/m' and config.env.data_dir == '~/d'
  assert 'model.path=~/m' in run.settings


def test_policies_of_agents_are_in_folders(tmp_path):
  write_run(tmp_path / RUNS[0].folder, [(0, 0.2), (100, 0.4)])
  policy = tmp_path / RUNS[0].folder / 'policy'
  (policy / 'planner').mkdir()
  (policy / 'config.json').rename(policy / 'planner' / 'config.json')
  assert sweep_runs.finished(RUNS[0], tmp_path)


def test_known_tests_join_those_of_this_machine(tmp_path):
  known = [
    outcomes.make_result(run.key, {'x': [True], 'y': [run.seed == 1]})
    for run in RUNS[:2]
  ]
  tested = [dataclasses.replace(run, test=(('seed', 0),)) for run in RUNS]
  write_run(tmp_path / tested[2].folder, [(0, 0.2), (100, 0.4)])
  write_test(tested[2], tmp_path)
  results = sweep.gather_tests(tested, tmp_path, 'all', known)
  assert results[:2] == known and results[2].outcomes_T.tolist() == [0, 1]
  stored = sweep_table.read_tests(tmp_path / 'all.csv')
  assert [r.key for r in stored] == [run.key for run in RUNS]
  assert {r.task_list for r in stored} == {known[0].task_list}
  assert paired.table(outcomes.group(results)['alfworld']) == paired.table(
    outcomes.group(stored)['alfworld']
  )
  assert sweep_table.read_tests(tmp_path / 'none.csv') == []


@pytest.mark.parametrize(
  ('config', 'overrides'),
  [('configs/alfworld.py:huge', ()), ('configs/alfworld.py', (('sed', 1),))],
)
def test_runs_without_a_config_are_refused(tmp_path, config, overrides):
  run = sweep_runs.Run('worse', config, 0, overrides)
  with pytest.raises(ValueError, match='run alfworld-worse-0: .*(huge|sed)'):
    sweep.run_all([run], tmp_path, at_once=1)


@pytest.mark.parametrize(
  ('field', 'value', 'expected'),
  [
    ('rollout.groups', '3', "groups='3': wrong type; must be an integer"),
    ('rollout.groups', True, 'groups=True: wrong type; must be an integer'),
    ('optimizer.learning_rate', None, '_rate=None: wrong type; must be a numb'),
    ('model.dtype', None, 'dtype=None: wrong type; must be a text'),
    ('model.dtype', 3, 'dtype=3: wrong type; must be a text'),
    ('rollout.prompt_buckets', 160, 'buckets=160: wrong type; must be a tuple'),
    ('guard.rollback', None, 'guard.rollback: no such field; see configs/base'),
  ],
)
def test_values_of_a_wrong_type_are_one_line(field, value, expected):
  run = dataclasses.replace(RUNS[0], overrides=((field, value),))
  with pytest.raises(ValueError, match='^--sweep: run alfworld-a-0: ') as error:
    run.load()
  section = field.partition('.')[0]
  assert f': {section}.' in str(error.value) and expected in str(error.value)
  assert '\n' not in str(error.value)


def test_fields_that_accept_none():
  unset = ('loss.tis_clip', None), ('evaluation.split', None)
  config = dataclasses.replace(RUNS[0], overrides=unset).load()
  assert config.loss.tis_clip is None and config.evaluation.split is None


def test_lists_and_numbers_of_numpy_are_plain_values(tmp_path):
  file = tmp_path / 'list.py'
  file.write_text(
    'import numpy as np\n'
    'values = {"rollout.prompt_buckets": [np.int64(64), 128],'
    ' "optimizer.learning_rate": np.float32(0.5)}\n'
    'RUNS = [dict(name="a", config="configs/alfworld.py:smoke",'
    ' seed=np.arange(2)[1], overrides=values, test=values)]'
  )
  (run,) = sweep_runs.read(file)
  assert run.seed == 1 and type(run.seed) is int and run.test == run.overrides
  values = dict(run.overrides)
  assert repr(values['rollout.prompt_buckets']) == '(64, 128)'
  assert repr(values['optimizer.learning_rate']) == '0.5'
  assert '--config.rollout.prompt_buckets=(64, 128)' in run.command(tmp_path)
  sweep._validate([run])
  assert sweep_runs._plain([[0, ['pick', 'heat']]]) == ((0, ('pick', 'heat')),)


def test_wrong_values_are_refused_before_the_first_run(tmp_path, monkeypatch):
  monkeypatch.setattr(sweep, 'run_all', lambda *args, **kwargs: pytest.fail())
  entry = {'name': 'a', 'config': 'configs/alfworld.py:smoke', 'seed': 0}
  wrong = [
    entry | {'name': 'b', 'overrides': {'rollout.groups': -1}},
    entry | {'name': 'c', 'test': {'evaluation.num_tasks': -4}},
  ]
  file = tmp_path / 'list.py'
  file.write_text(f'RUNS = {[entry, *wrong]}')
  with pytest.raises(ValueError, match='--sweep: run') as raised:
    sweep.main(str(file), str(tmp_path), at_once=1, only_gather=False)
  first, second = str(raised.value).splitlines()
  assert 'alfworld-b-0: rollout.groups=-1: ' in first
  assert 'alfworld-c-0: evaluation.num_tasks=-4: ' in second


def test_an_unknown_field_is_named_in_a_short_line():
  overrides = (('rollout.group', 1),)
  run = sweep_runs.Run('bad', 'configs/alfworld.py:smoke', 0, overrides)
  with pytest.raises(ValueError, match=r'-bad-0: rollout.group: no such') as e:
    run.load()
  assert str(e.value).endswith('did you mean rollout.groups?')


def test_an_unknown_field_of_a_test_is_named_once(tmp_path):
  entry = {'name': 'a', 'config': 'configs/alfworld.py:smoke', 'seed': 0}
  file = tmp_path / 'list.py'
  file.write_text(f'RUNS = [{entry | {"test": {"evaluation.num": 4}}}]')
  with pytest.raises(ValueError, match='evaluation.num: no such') as raised:
    sweep.main(str(file), str(tmp_path), at_once=1, only_gather=False)
  assert str(raised.value).count('--sweep: run alfworld-a-0: ') == 1


def test_runs_of_own_configs_and_modules(tmp_path, monkeypatch):
  (tmp_path / 'own.py').write_text(
    'from configs import alfworld\n'
    'def get_config(arg=""):\n'
    '  config = alfworld.get_config("smoke")\n'
    '  config.env.name = "mine"\n'
    '  return config\n'
  )
  (tmp_path / 'mine.py').write_text('raise RuntimeError("is imported")')
  monkeypatch.chdir(tmp_path)
  path = os.pathsep.join(['.', str(PROJECT)])
  monkeypatch.setenv('PYTHONPATH', path)
  runs = [sweep_runs.Run('a', 'own.py', 0)]
  assert sweep.run_all(runs, tmp_path, at_once=1) == runs
  assert 'is imported (mine.py:1' in (tmp_path / 'own-a-0.log').read_text()


def test_known_runs_are_gathered_and_not_rerun(tmp_path, monkeypatch):
  for n in (0, 1):
    write_run(tmp_path / f'first/alfworld-a-{n}', [(0, 0.2), (100, 0.4 + n)])
  write_run(tmp_path / 'second/alfworld-b-0', [(0, 0.2), (110, 0.5)])
  known = sweep.gather(RUNS, tmp_path / 'first')
  table = str(tmp_path / 'first/results.csv')
  # A table of another machine that already contains the other one.
  sweep.gather(RUNS, tmp_path / 'third', known=known)
  copy = str(tmp_path / 'third/results.csv')
  assert sweep_table.read(table) == known
  file = tmp_path / 'list.py'
  file.write_text(f'RUNS = {[_entry(run) for run in RUNS]}')
  started = []
  monkeypatch.setattr(
    sweep, 'run_all', lambda runs, *_, **__: started.extend(runs) or []
  )
  code = sweep.main(
    str(file),
    str(tmp_path / 'second'),
    at_once=1,
    only_gather=False,
    known=[table, copy],
  )
  assert (code, [run.name for run in started]) == (0, ['b'])
  evaluations = sweep_table.read(str(tmp_path / 'second/list.csv'))
  assert evaluations[:4] == known
  assert [line['name'] for line in evaluations[4:]] == ['b', 'b']
  other = dataclasses.replace(RUNS[0], name='c')
  file.write_text(f'RUNS = {[_entry(other)]}')
  with pytest.raises(ValueError, match=r'results.csv: has no run of the sweep'):
    sweep.main(
      str(file),
      str(tmp_path / 'second'),
      at_once=1,
      only_gather=True,
      known=[table],
    )
  file.write_text(f'RUNS = {[_entry(other) | {"name": 1}]}')
  with pytest.raises(ValueError, match='name=1: must be of type str'):
    sweep_runs.read(file)
  for line in ('alfworld,a', 'alfworld,a,0,5,16'):  # An interrupted copy.
    file.write_text(pathlib.Path(table).read_text() + line)
    with pytest.raises(ValueError, match='must be the CSV that'):
      sweep_table.read(str(file))
  file.write_text('experiment,name\nalfworld,a\n')
  with pytest.raises(ValueError, match='must be the CSV that'):
    sweep_table.read(str(file))


def test_known_runs_with_other_settings_are_refused(tmp_path, capsys):
  write_run(tmp_path / 'first/alfworld-a-0', [(0, 0.2), (100, 0.4)])
  changed = dataclasses.replace(RUNS[0], overrides=(('pool.num_workers', 3),))
  file, table = tmp_path / 'list.py', tmp_path / 'first/results.csv'
  sweep.gather(RUNS, tmp_path / 'first')

  def gather(run):
    file.write_text(f'RUNS = {[_entry(run)]}')
    options = {'at_once': 1, 'only_gather': True, 'known': [str(table)]}
    sweep.main(str(file), str(tmp_path / 'second'), **options)
    return capsys.readouterr().out

  assert f'1 runs are taken from {table}\n' in gather(RUNS[0])
  rate = f'optimizer.learning_rate={RUNS[0].load().optimizer.learning_rate}'
  problem = f'{RUNS[0].config} {rate}, but the sweep has {RUNS[0].config} '
  with pytest.raises(
    ValueError, match=f'made with {problem}{rate} pool.num_workers=3;'
  ):
    gather(changed)
  # The rate that the config file has now is another one.
  content = table.read_text()
  table.write_text(content.replace(rate, 'optimizer.learning_rate=9.0'))
  with pytest.raises(ValueError, match='made with .*rate=9.0, but'):
    gather(RUNS[0])
  # Tables of older releases lack the rate, or all settings.
  table.write_text(content.replace(f' {rate}', ''))
  assert f'1 runs are taken from {table}\n' in gather(RUNS[0])
  table.write_text(content.replace(f'{RUNS[0].config} {rate}', ''))
  assert 'the settings of 1 are not known' in gather(changed)


def test_folder_with_another_config_is_refused(tmp_path, capsys):
  write_run(tmp_path / 'alfworld-a-0', [(0, 0.2), (100, 0.4)])
  run_config.save(RUNS[0].load(), str(tmp_path / 'alfworld-a-0'))
  assert len(sweep.gather(RUNS[:1], tmp_path)) == 2
  changed = dataclasses.replace(RUNS[0], overrides=(('seed', 7),))
  advice = 'give the run another name in the sweep, or move the folder$'
  with pytest.raises(ValueError, match=f'seed=7 .was 0.; {advice}'):
    sweep.run_all([changed], tmp_path, at_once=1)
  write_run(tmp_path / 'alfworld-b-0', [(0, 0.2), (100, 0.4)])
  file = tmp_path / 'list.py'
  _write_sweep(file, [RUNS[2], RUNS[0]])
  stored = json.loads((tmp_path / 'alfworld-a-0' / 'config.json').read_text())
  stored['seed'] = 7
  (tmp_path / 'alfworld-a-0' / 'config.json').write_text(json.dumps(stored))
  sweep.main(str(file), str(tmp_path), at_once=1, only_gather=True)
  printed = capsys.readouterr().out
  assert 'alfworld-a-0 does not count: ' in printed and 'was 7' in printed
  assert '1 of 2 runs are finished' in printed


def test_a_run_of_the_same_model_at_another_path_is_finished(tmp_path):
  run, folder = RUNS[0], tmp_path / RUNS[0].folder
  write_run(folder, [(0, 0.2), (100, 0.4)])
  config = run.load()
  model = shutil.copytree(PROJECT / config.model.path, tmp_path / 'model')
  config.model.path = str(model)
  inputs = model_builders.describe_files(config)
  run_config.save(config, str(folder), inputs=inputs)
  assert sweep_runs.finished(run, tmp_path)
  config.model.path = 'elsewhere'
  run_config.save(config, str(folder), inputs=dict.fromkeys(inputs, 'other'))
  with pytest.raises(ValueError, match='model.path=.* .was elsewhere'):
    sweep_runs.finished(run, tmp_path)


_RUN_SWEEP = """
import pathlib, sys
from gigpo_jax.tools import sweep, sweep_runs
# launch/train.py up to the point at which it parses its flags.
code = (
  'import os, runpy, time; from absl import app; '
  'app.run = lambda *_, **__: print(os.getpid(), flush=True) or time.sleep(99);'
  'runpy.run_path("launch/train.py", run_name="__main__")'
)
sweep_runs.Run.command = lambda *_: [sys.executable, '-c', code]
run = sweep_runs.Run('a', 'configs/alfworld.py:smoke', 0)
sweep.run_all([run], pathlib.Path(sys.argv[1]), at_once=1)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='needs prctl')
def test_killing_a_sweep_ends_its_runs(tmp_path):
  log = tmp_path / 'alfworld-a-0.log'

  def trainer() -> str:
    return log.read_text().strip() if log.exists() else ''

  with subprocess.Popen(
    [sys.executable, '-c', _RUN_SWEEP, str(tmp_path)],
    cwd=PROJECT,
    stderr=subprocess.DEVNULL,
  ) as process:
    try:
      _wait_for(trainer)
      assert psutil.pid_exists(int(trainer()))
    finally:
      process.kill()
  _wait_for(lambda: not _is_running(int(trainer())))


def _is_running(pid: int) -> bool:
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def _wait_for(condition) -> None:
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.05)


def test_locked_sweep_is_refused(tmp_path):
  file = tmp_path / 'list.py'
  file.write_text(f'RUNS = [{_entry(RUNS[0])}]')
  with files.lock(tmp_path), pytest.raises(ValueError, match='in use by'):
    sweep.main(str(file), str(tmp_path), at_once=1, only_gather=False)


def test_unfinished_runs_are_not_gathered(tmp_path):
  write_run(tmp_path / 'alfworld-a-0', [(0, 0.2), (100, 0.4)])
  write_run(tmp_path / 'alfworld-a-1', [(0, 0.2)])
  policy = tmp_path / 'alfworld-a-1' / 'policy' / 'config.json'
  # A policy from before the run was extended.
  os.utime(policy, (0, 0))
  assert {line['seed'] for line in sweep.gather(RUNS[:2], tmp_path)} == {0}
  policy.unlink()
  assert {line['seed'] for line in sweep.gather(RUNS[:2], tmp_path)} == {0}


def test_an_extended_run_is_tested_again(tmp_path):
  run = dataclasses.replace(RUNS[0], test=(('evaluation.num_tasks', 4),))
  folder = tmp_path / run.folder
  write_run(folder, [(0, 0.2), (100, 0.4)])
  write_test(run, tmp_path)
  assert run.next_command(tmp_path) is None
  assert len(sweep.gather_tests([run], tmp_path)) == 1
  # The extended run has written metrics, and then also its policy.
  path = run.test_result(tmp_path)
  os.utime(path, (0, 0))
  os.utime(folder / 'policy' / 'config.json', (1, 1))
  assert run.next_command(tmp_path) == run.command(tmp_path)
  assert sweep.gather_tests([run], tmp_path) == []
  os.utime(folder / 'policy' / 'config.json')
  assert run.next_command(tmp_path) == run.test_command(tmp_path)
  assert sweep.gather_tests([run], tmp_path) == []


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('RUNS = []', 'RUNS is missing, empty'),
    ('RUNS = 5', 'RUNS is missing, empty or no list'),
    ('RUNS = [', 'cannot be loaded .SyntaxError: '),
    ('import sys; sys.exit(3)', 'cannot be loaded .SystemExit: 3'),
    (
      'RUNS = [{"name": "a", "config": "x", "seed": 0, "overrides": {1: 2}}]',
      'must have names of config fields, overrides not seed',
    ),
    (
      'RUNS = [{"name": "a", "config": "x", "seed": 0, "overrides": {"seed": 2}'
      '}]',
      'must have names of config fields, overrides not seed',
    ),
    ('RUNS = [("a", "x", 0)]', "'x', 0.: must be a dictionary"),
    (
      'RUNS = [{"name": "a", "config": "x", "seed": 0, "overrides": ["b"]}]',
      'overrides and test must be dictionaries',
    ),
    (
      'RUNS = [{"name": "a", "config": "x", "seed": 0, "test": {"b": {1}}}]',
      'overrides and test have .1., a set; must have None, numbers, texts or',
    ),
    (
      'RUNS = [{"name": 300 * "a", "config": "x", "seed": 0}]',
      "sweep.py: run 'x-aaaa.*: cannot be a folder; .* at most 251 bytes",
    ),
    (
      'RUNS = [{"name": "a\\0b", "config": "x", "seed": 0}]',
      r"run 'x-a\\x00b-0': cannot be a folder; .* must be printable",
    ),
    ('RUNS = [{"name": "a"}]', "lacks .'config', 'seed'."),
    (
      'RUNS = 2 * [{"name": "a", "config": "x", "seed": 0}]',
      "'x-a-0'. are listed twice",
    ),
  ],
)
def test_invalid_sweep_files_are_refused(tmp_path, text, message):
  path = tmp_path / 'sweep.py'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    sweep_runs.read(path)
  with pytest.raises(ValueError, match='no such file'):
    sweep_runs.read(tmp_path / 'nowhere.py')


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('x', 'c.py: cannot be loaded .NameError'),
    ('get_config = lambda variant: None', 'get_config returned a NoneType'),
  ],
)
def test_invalid_configs_of_runs_are_refused(tmp_path, text, message):
  path = tmp_path / 'c.py'
  path.write_text(text)
  with pytest.raises(ValueError, match=rf'--sweep: run c-a-0: .*{message}'):
    sweep_runs.Run('a', str(path), 0).load()


def _command(
  *flags: str, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, 'launch/sweep.py', *flags],
    cwd=PROJECT,
    stdout=stdout,
    stderr=subprocess.PIPE,
    text=True,
    check=False,
  )


def test_command_error_is_one_line(tmp_path):
  done = _command(f'--workdir={tmp_path}')
  assert done.returncode == 2
  assert done.stderr.strip() == '--sweep: missing; must be set'


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
  runs = '--sweep=configs/sweeps/main.py'
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match=r'--workdir=.*file: cannot be written'):
    sweep.main(
      'configs/sweeps/main.py', f'{tmp_path}/file', at_once=1, only_gather=True
    )
  (tmp_path / 'main.csv.tmp').symlink_to('/dev/full')
  done = _command(runs, '--gather', f'--workdir={tmp_path}')
  assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
  assert f'{tmp_path}: cannot be written' in done.stderr


def test_a_name_with_a_slash_is_one_folder():
  run = sweep_runs.Run('a/b c', 'configs/alfworld.py', 0)
  assert run.folder == 'alfworld-a-b-c-0'
  run = sweep_runs.Run('a', 'configs/alfworld.py', 0, experiment='d/e f')
  assert run.folder == 'd-e-f-a-0'


def test_an_experiment_divides_the_runs_of_a_config_file(tmp_path):
  entry = {'name': 'a', 'config': 'configs/alfworld.py:smoke', 'seed': 0}
  file = tmp_path / 'list.py'
  file.write_text(f'RUNS = [{entry}, {entry | {"experiment": "other"}}]')
  runs = sweep_runs.read(file)
  assert [run.key for run in runs] == [('alfworld', 'a', 0), ('other', 'a', 0)]
  file.write_text(f'RUNS = [{entry | {"experiment": 1}}]')
  with pytest.raises(ValueError, match='experiment=1: must be of type str'):
    sweep_runs.read(file)


def test_a_table_of_another_kind_is_one_short_line(tmp_path):
  path = tmp_path / 'picture.csv'
  for content in (bytes(range(256)) * 9, b'{"a": "' + b'x' * 200_000):
    path.write_bytes(content)
    with pytest.raises(ValueError, match='not a table of a sweep') as error:
      sweep_table.read(str(path))
    assert len(str(error.value)) < 400 and '\n' not in str(error.value)


def test_two_evaluations_of_an_iteration_are_refused(tmp_path):
  row = {'experiment': 'a', 'name': 'b', 'seed': 1, 'iteration': 4}
  sweep_table.write(tmp_path / 't.csv', [row, row | {'seed': 2}])
  assert len(sweep_table.read(tmp_path / 't.csv')) == 2
  sweep_table.write(tmp_path / 't.csv', [row, row])
  with pytest.raises(ValueError, match='2 evaluations of iteration 4 of a b'):
    sweep_table.read(tmp_path / 't.csv')
