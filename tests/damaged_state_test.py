"""Tests of damage to every file that a run reads back.

They start a run whose policy is four numbers, and stop it before compilation.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import types
from collections.abc import Callable

import episodes_test
import jax
import jax.numpy as jnp
import pytest

from configs import alfworld
from envs import base
from gigpo_jax import (
  builders,
  checkpoint,
  episodes,
  evaluation,
  learner,
  metrics,
  train,
)
from gigpo_jax import config as config_lib
from gigpo_jax.run import (
  model_builders,
  run_builders,
  run_state,
  saved_checkpoint,
  trial,
)
from gigpo_jax.runtime import errors, files
from gigpo_jax.tools import compare, outcomes, sweep_runs, viewer

ITERATIONS = 4


class Started(Exception):
  """The run has read all files that it reads back."""


class _Learner:
  base: dict = {}

  def init(self, params):
    return learner.TrainState(params, {}, jnp.int32(0))

  def abstract_state(self):
    return checkpoint.abstract_state(self.init({'w': jnp.zeros(4)})), {}


def _config():
  config = alfworld.get_config('smoke')
  config.num_iterations = 9
  config.checkpoint.every = config.episodes.every = 1
  config.evaluation.every = 0
  return config


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
  mesh = jax.make_mesh((8,), ('data',))
  policy = types.SimpleNamespace(
    mesh=mesh,
    tokenizer=episodes_test.Text(),
    load=lambda: {'w': jnp.arange(4.0)},
    sampler=types.SimpleNamespace(base=None),
  )
  parts = {
    'make_learner': lambda *_: _Learner(),
    'make_reference': lambda *_: None,
    'make_pool': lambda config: contextlib.nullcontext(),
    'make_runner': lambda *_: types.SimpleNamespace(prefetch=lambda *_: None),
  }
  for name, part in parts.items():
    monkeypatch.setattr(builders, name, part)
  monkeypatch.setattr(trial, 'try_environment', lambda *_: None)
  monkeypatch.setattr(model_builders, 'make_model_bundle', lambda _: policy)
  monkeypatch.setattr(config_lib, 'validate', lambda config, **_: None)
  writers, make_writer = [], builders.make_writer

  def make(*args):
    writers.append(make_writer(*args))
    return writers[-1]

  monkeypatch.setattr(builders, 'make_writer', make)
  yield
  for writer in writers:
    writer.close()


def _start(workdir: pathlib.Path, **changes: object) -> int:
  """Starts a run; returns the iteration that it resumes after, or -1."""
  config = _config()
  config.update(changes)
  histories = []
  restore_or_init = run_builders.restore_or_init

  def restore(*args):
    state, history = restore_or_init(*args)
    histories.append(history)
    return state, history

  def estimate_advantages(*_):
    raise Started

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run_builders, 'restore_or_init', restore)
    patch.setattr(run_builders, 'start_compilation', lambda *_: {})
    patch.setattr(train, 'estimate_advantages', estimate_advantages)
    with pytest.raises(Started):
      train.train(config, str(workdir), allow_config_change=bool(changes))
  return histories[0].iteration


def _write_run(workdir: pathlib.Path, **changes: object) -> None:
  """Writes the files of a run of some iterations.

  Args:
    workdir: folder of the run.
    **changes: changes of the values that checkpoints hold besides the state.
  """

  def loop(parts, runner, saver, *_):
    del runner
    state, history = run_builders.restore_or_init(parts, saver)
    logs = run_builders.open_logs(parts, 0)
    for iteration in range(ITERATIONS):
      episodes_test.write(logs.episode_writer, iteration)
      history = dataclasses.replace(history, iteration=iteration)
      saver.save(iteration, state.to_dict(), history.to_json() | changes)
    saver.wait()

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, 'loop', loop)
    train.train(_config(), str(workdir))


@pytest.fixture(name='run', scope='module')
def fixture_run(tmp_path_factory):
  return tmp_path_factory.mktemp('run')


@pytest.fixture(name='workdir')
def fixture_workdir(run, tmp_path):
  if not (run / 'config.json').exists():
    _write_run(run)
    with (run / 'metrics.jsonl').open('w') as file:
      for iteration in range(ITERATIONS):
        line = {'iteration': iteration, 'loss/total': 10.0**-iteration}
        file.write(json.dumps(line) + '\n')
  return shutil.copytree(run, tmp_path / 'run')


def _halve(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


def _text(text: str) -> Callable[[pathlib.Path], object]:
  return lambda path: path.write_text(text)


DAMAGES = {
  'half': _halve,
  'empty': _text(''),
  'object': _text('{}\n'),
  'list': _text('[1]\n'),
  'number': _text('3\n'),
  'types': _text('{"iteration": "x", "files": 3, "num_iterations": "x"}\n'),
  'newer': _text('{"version": 99}\n'),
  'deep': _text('[' * 100_000),
  'garbage': lambda path: path.write_bytes(b'\x00\xff\xfe' * 99),
  'missing': pathlib.Path.unlink,
}
NEWEST = f'checkpoints/{ITERATIONS - 1}'
# What happens: an older state, a report, or a refusal.
OLDER = ('manifest.json', 'host/metadata', 'state/_METADATA')
REFUSED = (
  'config.json',
  'episodes/dataset_info.json',
  'episodes/metadata.json',
  'episodes/features.json',
  'episodes/episodes-train.array_record-00001',
)


def _damaged(name: str) -> list:
  return [pytest.param(name, d, id=f'{name} {d}') for d in DAMAGES]


def test_undamaged_state_resumes_in_silence(workdir, capsys):
  before = (workdir / 'metrics.jsonl').read_text()
  assert _start(workdir) == ITERATIONS - 1
  said = capsys.readouterr().out.splitlines()
  assert said[0] == f'resuming {workdir} after iteration {ITERATIONS - 1}'
  assert len(said) == 1
  assert (workdir / 'metrics.jsonl').read_text() == before
  assert not list(workdir.glob('*.bak*'))


def test_a_finished_run_says_that_no_iteration_is_left(workdir, capsys):
  _start(workdir, num_iterations=ITERATIONS)
  assert capsys.readouterr().out.splitlines()[-1] == (
    f'resuming {workdir} after iteration {ITERATIONS - 1}; no iteration is left'
  )


@pytest.mark.parametrize(
  ('name', 'damage'),
  [case for name in OLDER for case in _damaged(f'{NEWEST}/{name}')],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
  workdir, capsys, name, damage
):
  DAMAGES[damage](workdir / name)
  assert _start(workdir) == ITERATIONS - 2
  said = capsys.readouterr().out
  assert f'{workdir}/{NEWEST}: damaged, skipped: ' in said
  assert f'after iteration {ITERATIONS - 2}\n' in said


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_metadata_is_restored(workdir, capsys, damage):
  path = workdir / NEWEST / '_CHECKPOINT_METADATA'
  DAMAGES[damage](path)
  assert _start(workdir) == ITERATIONS - 1
  said = capsys.readouterr().out
  assert f'{path}: was damaged, restored from manifest.json' in said
  assert json.loads(path.read_text())['item_handlers'].keys() == {
    'host',
    'state',
  }


@pytest.mark.parametrize(
  ('name', 'damage'), [case for name in REFUSED for case in _damaged(name)]
)
def test_other_damage_is_refused_in_one_line_or_kept_aside(
  workdir, capsys, name, damage
):
  DAMAGES[damage](workdir / name)
  found = sorted(workdir.rglob('*'))
  said = ''
  try:
    assert _start(workdir) == ITERATIONS - 1
    said = capsys.readouterr().out
    # Not all damage is seen at start; then what was there is still there.
    assert '.bak' in said or sorted(workdir.rglob('*')) == found
  except (ValueError, errors.RunError) as error:
    said = str(error)
    assert len(said.splitlines()) == 1
    assert pathlib.Path(name).name in said or str(workdir / 'episodes') in said
    assert sorted(workdir.rglob('*')) == found
  kept = [p for p in workdir.rglob('episodes-*') if p.is_file()]
  assert len(kept) == ITERATIONS - (damage == 'missing' and 'record' in name)


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_metrics_are_kept_and_reported(workdir, capsys, damage):
  path = workdir / 'metrics.jsonl'
  DAMAGES[damage](path)
  before = path.read_bytes() if path.exists() else b''
  assert _start(workdir) == ITERATIONS - 1
  said = capsys.readouterr().out
  assert f'{path}: ' in said and 'iterations up to the checkpoint are' in said
  if before:
    assert said.count('kept as metrics.jsonl.bak\n') == 1
    assert (workdir / 'metrics.jsonl.bak').read_bytes() == before
  assert all(x['iteration'] < ITERATIONS for x in metrics.read(workdir))


@pytest.mark.parametrize('is_finished', [False, True])
def test_metrics_and_episodes_outlive_their_checkpoints(
  workdir, capsys, is_finished
):
  if is_finished:
    (workdir / 'policy').mkdir()
  before = (workdir / 'metrics.jsonl').read_text()
  shutil.rmtree(workdir / 'checkpoints')
  assert _start(workdir) == -1
  said = capsys.readouterr().out
  assert 'the file is kept as metrics.jsonl.bak' in said
  assert 'the folder is kept as episodes.bak' in said
  assert (workdir / 'metrics.jsonl.bak').read_text() == before
  kept = episodes.open_dataset(workdir / 'episodes.bak')
  assert kept.iterations == list(range(ITERATIONS))
  assert metrics.read(workdir) == []
  # Another time, another name.
  (workdir / 'metrics.jsonl').write_text(before)
  _start(workdir)
  assert (workdir / 'metrics.jsonl.bak.1').read_text() == before


@pytest.mark.parametrize('every', [0, 1])
def test_episodes_of_repeated_iterations_are_dropped(workdir, capsys, every):
  shutil.rmtree(workdir / NEWEST)
  repeated = ITERATIONS - 1
  assert _start(workdir, episodes={'every': every}) == repeated - 1
  assert 'bak' not in capsys.readouterr().out
  kept = episodes.open_dataset(workdir / 'episodes')
  assert kept.iterations == list(range(repeated))


def test_a_folder_that_is_no_set_of_episodes_stays(workdir):
  shutil.rmtree(workdir / 'episodes')
  (workdir / 'episodes').mkdir()
  (workdir / 'episodes/own.txt').write_text('text')
  _start(workdir, episodes={'every': 0})
  assert [x.name for x in (workdir / 'episodes').iterdir()] == ['own.txt']


def test_episodes_without_their_list_are_kept(workdir, capsys):
  (workdir / 'episodes/dataset_info.json').unlink()
  _start(workdir)
  said = capsys.readouterr().out
  assert f'has {ITERATIONS} files but no dataset_info.json' in said
  found = list((workdir / 'episodes.bak').glob('episodes-*'))
  assert len(found) == ITERATIONS


def test_what_a_kill_leaves_is_dropped_in_silence(workdir, capsys):
  with (workdir / 'metrics.jsonl').open('a') as file:
    file.write(f'{{"iteration": {ITERATIONS}}}\n{{"iterat')
  (workdir / 'episodes/episodes-train.array_record-00004').write_bytes(b'torn')
  _start(workdir)
  assert 'bak' not in capsys.readouterr().out
  assert [x['iteration'] for x in metrics.read(workdir)] == [0, 1, 2, 3]
  assert not list(workdir.glob('*.bak*'))


def _store_interval(workdir: pathlib.Path, every: int) -> None:
  """Sets the interval of checkpoints in the stored config of a run."""
  path = workdir / 'config.json'
  stored = json.loads(path.read_text())
  stored['checkpoint']['every'] = every
  path.write_text(json.dumps(stored))


def _stored_interval(workdir: pathlib.Path) -> int:
  stored = json.loads((workdir / 'config.json').read_text())
  return stored['checkpoint']['every']


def test_a_kill_before_the_logs_are_trimmed_keeps_the_interval(workdir, capsys):
  # The run was killed 6 iterations after its newest checkpoint.
  _store_interval(workdir, 20)
  with (workdir / 'metrics.jsonl').open('a') as file:
    for iteration in range(ITERATIONS, ITERATIONS + 6):
      file.write(f'{{"iteration": {iteration}}}\n')

  def start_compilation(*_):
    raise Started

  # Resumed with checkpoint.every=1, it is killed before it trims its logs.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run_builders, 'start_compilation', start_compilation)
    with pytest.raises(Started):
      train.train(_config(), str(workdir))
  _start(workdir)
  assert 'bak' not in capsys.readouterr().out
  assert len(metrics.read(workdir)) == ITERATIONS
  assert not list(workdir.glob('*.bak*'))


def test_iterations_of_a_damaged_checkpoint_are_repeated(workdir, capsys):
  # The run has had rarer checkpoints than its config has now.
  newest = 8
  damaged = (workdir / NEWEST).rename(workdir / f'checkpoints/{newest}')
  (damaged / 'manifest.json').unlink()
  with (workdir / 'metrics.jsonl').open('a') as file:
    for iteration in range(ITERATIONS, newest + 1):
      file.write(f'{{"iteration": {iteration}}}\n')
  assert _start(workdir) == ITERATIONS - 2
  assert 'bak' not in capsys.readouterr().out
  assert len(metrics.read(workdir)) == ITERATIONS - 1
  assert not list(workdir.glob('*.bak*'))


@pytest.mark.parametrize('is_resumed', [False, True])
def test_a_resumed_run_stores_its_config_after_compilation(
  workdir, monkeypatch, is_resumed
):
  _store_interval(workdir, 20)
  if not is_resumed:
    shutil.rmtree(workdir / 'checkpoints')
  intervals = []

  def prepare(*_):
    intervals.append(_stored_interval(workdir))
    if len(intervals) == 1:
      raise Started
    history = run_state.History(iteration=_config().num_iterations - 1)
    return None, history, None

  monkeypatch.setattr(train, 'prepare', prepare)
  monkeypatch.setattr(train, 'finish', lambda *_: None)
  with pytest.raises(Started):
    train.train(_config(), str(workdir))
  train.train(_config(), str(workdir))
  assert intervals == ([20, 20] if is_resumed else [1, 1])
  assert _stored_interval(workdir) == 1


def test_state_without_a_version_resumes(workdir):
  """As it was written before there were versions."""
  for path in [workdir / 'config.json', workdir / 'episodes/metadata.json']:
    found = json.loads(path.read_text())
    assert found.pop('version') == files.VERSION
    path.write_text(json.dumps(found))
  for folder in (workdir / 'checkpoints').iterdir():
    manifest = json.loads((folder / 'manifest.json').read_text())
    host = json.loads((folder / 'host/metadata').read_text())
    del host['version']
    (folder / 'host/metadata').write_text(json.dumps(host))
    listed = manifest['files']
    digest = checkpoint._digest(folder / 'host/metadata')
    size = (folder / 'host/metadata').stat().st_size
    listed['host/metadata'] = (size, digest)
    (folder / 'manifest.json').write_text(json.dumps(listed))
  assert _start(workdir) == ITERATIONS - 1


@pytest.mark.parametrize(
  'change',
  [
    {'version': 99},
    {'spent': None},
    {'spent': {'coffee': 3}},
    {'entropies': 'many'},
    {'skipped': [1]},
    {'tasks': None, 'iteration': 0},
  ],
  ids=str,
)
def test_a_host_state_of_another_release_is_refused(workdir, change):
  shutil.rmtree(workdir)
  _write_run(workdir, **change)
  with pytest.raises(ValueError, match=rf'/{ITERATIONS - 1}/host: ') as error:
    _start(workdir)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('damage', [*DAMAGES, 'two', 'success'])
def test_a_damaged_evaluation_is_made_again(tmp_path, monkeypatch, damage):
  monkeypatch.setattr(sweep_runs, 'finished', lambda *_: True)
  tested = (('evaluation.num_tasks', 4),)
  run = sweep_runs.Run('a', 'configs/alfworld.py:smoke', 0, test=tested)
  played = [
    types.SimpleNamespace(
      task=base.Task('test', 0),
      task_type='',
      member=0,
      success=True,
      score=None,
      reward=1.0,
      steps=(),
      num_repeated=0,
      failure='',
    )
  ]
  monkeypatch.setattr(evaluation, 'draw', lambda *_: None)
  path = run.test_result(tmp_path)
  path.parent.mkdir(parents=True)
  (tmp_path / run.folder / 'metrics.jsonl').touch()
  config = run.load(run.test)
  evaluation._write(config, path.parent, {'policy': played}, {})
  assert outcomes.read_evaluation(path) == {'test/0': [True]}
  assert run.next_command(tmp_path) is None
  if damage in DAMAGES:
    DAMAGES[damage](path)
  elif damage == 'two':
    evaluation._write(config, path.parent, {'a': played, 'b': played}, {})
  else:
    path.write_text(path.read_text().replace('true', '"true"'))
  with pytest.raises(ValueError, match=f'{path}: ') as error:
    outcomes.read_evaluation(path)
  assert '\n' not in str(error.value)
  assert run.next_command(tmp_path) == run.test_command(tmp_path)


@pytest.mark.parametrize('damage', ['empty', 'object', 'garbage', 'deep'])
def test_a_damaged_wandb_run_id_is_refused(tmp_path, damage):
  DAMAGES[damage](tmp_path / 'wandb_run_id')
  config = _config()
  config.metrics.wandb = 'mine'
  with pytest.raises(ValueError, match='/wandb_run_id: ') as error:
    run_builders.check_run(config, str(tmp_path), allow_config_change=False)
  assert '\n' not in str(error.value)


READERS = {
  'compare': lambda workdir: compare.load_all([workdir]),
  'viewer': lambda workdir: viewer.summary(workdir),
  'sweep': lambda workdir: sweep_runs.finished(
    sweep_runs.Run('a', 'configs/alfworld.py:smoke', 0), workdir.parent
  ),
  'evaluate': lambda workdir: saved_checkpoint.check(str(workdir)),
}


@pytest.mark.parametrize('name', ['config.json', 'metrics.jsonl'])
@pytest.mark.parametrize('damage', DAMAGES)
@pytest.mark.parametrize('reader', READERS)
def test_readers_refuse_in_one_line(workdir, tmp_path, reader, damage, name):
  workdir = workdir.rename(tmp_path / 'alfworld-a-0')
  DAMAGES[damage](workdir / name)
  try:
    READERS[reader](workdir)
  except ValueError as error:
    assert len(str(error).splitlines()) == 1
    assert str(workdir) in str(error) or workdir.name in str(error)
