"""The whole path, as a user starts it: smoke run, kill and resume, refusals."""

import json
import pathlib
import re
import subprocess

import filelock
import numpy as np
import preloaded
import programs
import pytest
import small_runs

from configs import alfworld
from gigpo_jax import checkpoint, tokenizer, train
from gigpo_jax.run import policy_files, run_config
from gigpo_jax.tools import outcomes, viewer


@pytest.fixture(name='uninterrupted', scope='module')
def fixture_uninterrupted(tmp_path_factory, worker_id):
  """Returns work directory and output of a run that all test workers share."""
  folder = tmp_path_factory.getbasetemp()
  if worker_id != 'master':
    folder = folder.parent
  workdir, printed = folder / 'uninterrupted', folder / 'uninterrupted.txt'
  with filelock.FileLock(folder / 'uninterrupted.lock'):
    if not printed.exists():
      printed.write_text(programs.run(small_runs.small(workdir)))
  return workdir, printed.read_text()


def test_a_run_leaves_what_the_readme_says(uninterrupted):
  workdir, printed = uninterrupted
  lines = small_runs.read_lines(workdir)
  assert [line['iteration'] for line in lines] == [0, 1, 2, 3]
  for name in (
    'train/success_rate',
    'train/episode_reward',
    'train/episode_length',
    'train/invalid_action_rate',
    'loss/total',
    'update/tokens',
    'advantage/singleton_anchor_rows',
  ):
    assert all(name in line for line in lines[:3]), name
  assert [
    line['iteration'] for line in lines if 'eval/success_rate' in line
  ] == [0, 3]
  assert printed.count('iteration ') >= 4
  for name in (
    'config.json',
    'learning_curve.png',
    'policy/config.json',
    'policy/tokenizer.json',
    'episodes/dataset_info.json',
  ):
    assert (workdir / name).is_file(), name
  assert list((workdir / 'tensorboard').glob('events*'))


def test_lines_have_the_durations_of_their_parts(uninterrupted):
  workdir, _ = uninterrupted
  first = json.loads((workdir / 'metrics.jsonl').read_text().splitlines()[0])
  durations = {k.removeprefix('time/') for k in first if k.startswith('time/')}
  assert durations == {
    'advantages_secs',
    'episodes_secs',
    'evaluation_secs',
    'iteration_secs',
    'rollout_secs',
    'rows_secs',
    'update_secs',
  }


def test_a_changed_config_keeps_the_earlier_one(tmp_path, monkeypatch, capsys):
  config = alfworld.get_config('smoke')
  run_config.save(config, str(tmp_path))

  def refuse(*_):
    raise ValueError('another shape')

  monkeypatch.setattr(checkpoint.Checkpointer, 'check', refuse)
  config.seed = 3
  with pytest.raises(ValueError, match='another shape'):
    train.train(config, str(tmp_path), allow_config_change=True)
  path, backup = tmp_path / 'config.json', tmp_path / 'config.json.bak'
  earlier = path.read_text()
  assert json.loads(earlier)['seed'] == 0 and not backup.exists()
  monkeypatch.undo()
  monkeypatch.setattr(train, 'loop', lambda *_: None)
  for printed in (f'{path}: the earlier file is kept as {backup.name}\n', ''):
    train.train(config, str(tmp_path), allow_config_change=True)
    assert capsys.readouterr().out == printed
    assert json.loads(path.read_text())['seed'] == 3
    assert [p.read_text() for p in tmp_path.glob('*.bak*')] == [earlier]
  # A longer run is the same experiment.
  config.num_iterations += 1
  train.train(config, str(tmp_path), allow_config_change=True)
  assert capsys.readouterr().out == ''


def test_a_run_cannot_become_shorter_than_it_is(tmp_path):
  config = alfworld.get_config('smoke')
  run_config.save(config, str(tmp_path))
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  config.num_iterations = 1
  for allow in (False, True):
    with pytest.raises(ValueError, match='has 2 iterations; must be at least'):
      train.train(config, str(tmp_path), allow_config_change=allow)


@pytest.mark.slow
def test_an_evaluation_inside_the_rollout_has_the_same_metrics(
  uninterrupted, tmp_path
):
  expected, _ = uninterrupted
  preloaded.run(
    small_runs.small(tmp_path, '--config.evaluation.inside_rollout=True')
  )
  small_runs.assert_same_end(tmp_path, expected)
  first, *_, last = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert 'time/evaluation_secs' not in json.loads(first)
  assert 'time/evaluation_secs' in json.loads(last)


def test_a_finished_run_is_left_as_it_is(uninterrupted):
  workdir, _ = uninterrupted
  written = {p: p.stat().st_mtime_ns for p in workdir.rglob('*')}
  assert preloaded.run(small_runs.small(workdir)) == (
    f'{workdir}: finished; a larger num_iterations continues the run, '
    'launch/evaluate.py evaluates its policy\n'
  )
  assert written == {p: p.stat().st_mtime_ns for p in workdir.rglob('*')}


def test_nothing_is_trained_but_sampled_tokens(uninterrupted):
  workdir, _ = uninterrupted
  for line in small_runs.read_lines(workdir)[:3]:
    steps = line['train/episode_length'] * 8
    expected = steps * line['train/response_tokens']
    assert line['update/tokens'] == pytest.approx(expected)


def test_killed_and_started_again_the_run_ends_the_same(
  uninterrupted, tmp_path
):
  expected, _ = uninterrupted
  # While the second checkpoint is written.
  moment = 'checkpoint:_write_manifest@2'
  small_runs.interrupt(moment, small_runs.small(tmp_path))
  assert len(small_runs.read_lines(tmp_path)) == 2
  # All is saved by then.
  moment = 'checkpoint:Checkpointer.wait+'
  small_runs.interrupt(moment, small_runs.small(tmp_path))
  # And what was written last is lost.
  newest = small_runs.newest_checkpoint(tmp_path)
  (newest / 'host' / 'metadata').write_text('torn')
  used = tmp_path / 'used.json'
  python, *command = small_runs.small(tmp_path)
  printed = preloaded.run([python, 'tests/observe.py', str(used), *command])
  # The starts before have compiled all programs.
  cache = json.loads(used.read_text())['cache']
  assert cache['hits'] == cache['requests'] > 10
  assert newest.name == '2'
  assert f'{newest}: damaged, skipped: host/metadata has' in printed
  assert f'resuming {tmp_path} after iteration 1' in printed
  small_runs.assert_same_end(tmp_path, expected)
  found, wanted = (
    small_runs.read_episodes(tmp_path),
    small_runs.read_episodes(expected),
  )
  assert [e['iteration'] for e in wanted] == [
    n for n in range(3) for _ in range(8)
  ]
  np.testing.assert_equal(found, wanted)


def test_episodes_hold_what_the_metrics_say(uninterrupted):
  workdir, _ = uninterrupted
  found = small_runs.read_episodes(workdir)
  for line in small_runs.read_lines(workdir)[:3]:
    played = [e for e in found if e['iteration'] == line['iteration']]
    steps = [s for e in played for s in e['steps'] if not s['is_last']]
    assert line['train/success_rate'] == np.mean([e['success'] for e in played])
    assert line['update/tokens'] == sum(len(s['log_probs']) for s in steps)
    spread = np.mean([abs(s['episode_advantage']) for s in steps])
    assert line['advantage/episode_abs_mean'] == pytest.approx(spread, abs=1e-6)
    text = tokenizer.Tokenizer(str(workdir / 'policy'))
    told = text.decode([s['completion_ids'] for s in steps])
    assert told == [s['response'] for s in steps]


@pytest.mark.slow
def test_successful_episodes_are_trained_on(uninterrupted, tmp_path):
  """Rejection-sampling fine-tuning, as the README has it."""
  workdir, _ = uninterrupted
  preloaded.run(
    small_runs.command(
      'sft',
      '--config=configs/alfworld.py:smoke',
      f'--workdir={tmp_path}',
      '--config.sft.init=',
      f'--config.sft.data={workdir / "episodes"}',
      '--config.sft.only_successful=False',
      '--config.sft.epochs=2',
    ),
    XLA_FLAGS=programs.QUICK,
  )
  lines = small_runs.read_lines(tmp_path)
  assert lines[-1]['loss/total'] < lines[0]['loss/total']
  # From the warm start on, whose tokenizer it keeps.
  start = programs.PROJECT / 'configs' / 'warm_starts' / 'alfworld_tiny'
  text = tokenizer.Tokenizer(str(tmp_path / 'policy'))
  assert text.fingerprint == tokenizer.Tokenizer(str(start)).fingerprint


# In the order in which they come; each process goes on where it can.
MOMENTS = (
  'run.run_config:save+',
  'checkpoint:Checkpointer.latest',
  'metrics:Writer.__init__',
  'learner:Learner.warm_up',
  'train:evaluate,sampler:Sampler.step@4',
  'run.collection:collect,sampler:Sampler.step@3',
  'run.collection:collect,sampler:Sampler.step@20',
  'env_pool:EnvPool.prepare',
  'learner:Learner.update',
  'learner:Learner.update,programs.learner_programs:LearnerPrograms.run@3',
  'metrics:Writer.write',
  'metrics:Writer.write+',
  'learner:Learner.update@2,programs.learner_programs:LearnerPrograms.run@2',
  'checkpoint:Checkpointer.save',
  'checkpoint:Checkpointer.save+',
  'checkpoint:_write_manifest',
  'checkpoint:_write_manifest+',
  # The second waits until the first is written.
  'checkpoint:Checkpointer.save@2+',
  'checkpoint:Checkpointer.restore',
  'run.run_builders:restore_or_init+',
  'learner:Learner.update@2,programs.learner_programs:LearnerPrograms.run@4',
  'checkpoint:_write_manifest',
  'checkpoint:Checkpointer.save@2',
  'train:evaluate@2,sampler:Sampler.step@3',
  'checkpoint:Checkpointer.wait+',
  'models.huggingface:save',
  'metrics:plot',
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_any_moment_the_run_ends_the_same(tmp_path):
  flags = (
    '--config.num_iterations=6',
    '--config.evaluation.every=2',
    '--config.checkpoint.every=2',
  )
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  preloaded.run(small_runs.small(whole, *flags))
  for moment in MOMENTS:
    small_runs.interrupt(moment, small_runs.small(parts, *flags))
  preloaded.run(small_runs.small(parts, *flags))
  small_runs.assert_same_end(parts, whole)


@pytest.mark.slow
def test_a_run_that_has_to_leave_saves_the_iteration_before(
  uninterrupted, tmp_path
):
  expected, _ = uninterrupted
  # Nothing would be saved before the end of the run.
  flags = ('--config.checkpoint.every=9', '--grace_secs=14')
  printed = small_runs.interrupt(
    'run.collection:collect@2,sampler:Sampler.step@3~15:60',
    small_runs.small(tmp_path, *flags),
    status=0,
  )
  assert printed.endswith(
    'SIGTERM: iteration 0 is saved; rerun the same command to resume\n'
  )
  assert len(small_runs.read_lines(tmp_path)) == 1
  assert 'after iteration 0' in preloaded.run(
    small_runs.small(tmp_path, *flags)
  )
  small_runs.assert_same_end(tmp_path, expected)


@pytest.mark.parametrize(
  ('moment', 'said'),
  [
    (
      'learner:Learner.warm_up',
      'there is no checkpoint yet; the same command starts again$',
    ),
    pytest.param(
      'run.collection:collect@3,sampler:Sampler.step@3',
      # The second may still be being written.
      'the same command resumes after iteration [01]$',
      marks=pytest.mark.slow,
    ),
  ],
)
def test_an_interrupt_ends_a_run_in_one_line(tmp_path, moment, said):
  printed = small_runs.interrupt(
    f'{moment}~2:60', small_runs.small(tmp_path), status=130
  )
  assert re.match(f'interrupted; {said}', printed, re.MULTILINE)
  assert 'Traceback' not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
  ('moment', 'grace', 'saved'),
  [
    ('learner:Learner.warm_up~15', 120, 'nothing is'),
    (
      'run.collection:collect@2,sampler:Sampler.step@3~15',
      120,
      'iteration 0 is',
    ),
    (
      'learner:Learner.update@2,programs.learner_programs:LearnerPrograms.run@2~15',
      120,
      'iteration 1',
    ),
    # Later than half of the time, and in time.
    ('train:stop_if_skipped@2~15:15', 24, 'iteration 1 is'),
    # Used up by then, and not in time.
    ('train:stop_if_skipped@2~15:60', 20, 'no time left'),
    ('train:evaluate@2~15:60', 20, 'iteration 2 is'),
  ],
)
def test_what_a_run_that_has_to_leave_has_saved(
  uninterrupted, tmp_path, moment, grace, saved
):
  expected, _ = uninterrupted
  flags = ('--config.checkpoint.every=9', f'--grace_secs={grace}')
  printed = small_runs.interrupt(
    moment, small_runs.small(tmp_path, *flags), status=0
  )
  assert f'SIGTERM: {saved}' in printed
  preloaded.run(small_runs.small(tmp_path, *flags))
  small_runs.assert_same_end(tmp_path, expected)


def _mount(folder: pathlib.Path, options: str) -> bool:
  folder.mkdir(exist_ok=True)
  command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(folder)]
  return not subprocess.run(
    command, capture_output=True, check=False
  ).returncode


@pytest.mark.slow
def test_a_full_disk_stops_the_run_which_then_goes_on(uninterrupted, tmp_path):
  expected, _ = uninterrupted
  disk = tmp_path / 'disk'
  # Two checkpoints, and not a third.
  if not _mount(disk, 'size=18m'):
    pytest.skip('needs to be allowed to mount')
  try:
    line = small_runs.stopped_run(disk / 'run')
    assert 'cannot be written' in line and 'No space left' in line
    assert 'rerun the same command' in line
    subprocess.run(['mount', '-o', 'remount,size=80m', disk], check=True)
    assert 'resuming' in preloaded.run(small_runs.small(disk / 'run'))
    small_runs.assert_same_end(disk / 'run', expected)
    subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
    done = subprocess.run(
      small_runs.small(disk / 'run'),
      cwd=programs.PROJECT,
      capture_output=True,
      check=False,
    )
    assert done.returncode == 2
    assert b'cannot be written (Read-only file system)' in done.stderr
  finally:
    subprocess.run(['umount', disk], check=True)


@pytest.mark.slow
def test_checkpoints_and_exports_are_evaluated(uninterrupted, tmp_path):
  workdir, _ = uninterrupted
  printed = preloaded.run(
    small_runs.command(
      'evaluate',
      *small_runs.small(tmp_path)[2:],
      f'--checkpoint={workdir}',
      f'--checkpoint={workdir}/checkpoints/2',
      f'--model={workdir / "policy"}',
      # The state of the optimizer is not needed.
      '--config.optimizer.mu_dtype=bfloat16',
      '--config.evaluation.repeats=2',
      '--config.evaluation.num_tasks=4',
      '--config.episodes.every=1',
    )
  )
  assert f'{workdir} minus {workdir / "policy"}' in printed
  assert f'policy: --checkpoint={workdir}\npolicy after iteration 2' in printed
  stored = json.loads((tmp_path / 'evaluation.json').read_text())
  newest, same, _ = stored['policies'].values()
  assert newest == same
  for found in stored['policies'].values():
    assert len(found['episodes']) == 8
    successes = [episode['success'] for episode in found['episodes']]
    assert found['rates']['eval/success_rate'] == np.mean(successes)
  for n, result in enumerate(stored['policies'].values()):
    groups = viewer.iteration(tmp_path / 'evaluation' / str(n), 0)['groups']
    assert (
      len(groups) == 4 and f'--workdir={tmp_path}/evaluation/{n}' in printed
    )
    successes = [e['success'] for group in groups for e in group['episodes']]
    assert sum(successes) == sum(e['success'] for e in result['episodes'])
  plot = (tmp_path / 'evaluation.png').read_bytes()
  assert 'earlier' not in printed
  # Other policies and tasks, without kept episodes.
  printed = preloaded.run(
    small_runs.command(
      'evaluate',
      *small_runs.small(tmp_path)[2:],
      f'--model={workdir / "policy"}',
      '--config.evaluation.num_tasks=1',
      '--config.episodes.every=0',
    )
  )
  assert f'the earlier evaluation is kept in {tmp_path}/evaluation.bak\n' in (
    printed
  )
  backup = tmp_path / 'evaluation.bak'
  assert json.loads((backup / 'evaluation.json').read_text()) == stored
  assert (backup / 'evaluation.png').read_bytes() == plot
  kept = sorted(path.name for path in (backup / 'evaluation').iterdir())
  assert kept == ['0', '1', '2'] and not (tmp_path / 'evaluation').exists()
  (result,) = outcomes.read_evaluation(tmp_path / 'evaluation.json').values()
  assert len(result) == 1


def _export_command(
  workdir: pathlib.Path, export: pathlib.Path, results: pathlib.Path
) -> list[str]:
  return small_runs.command(
    'evaluate',
    *small_runs.small(results)[2:],
    f'--checkpoint={workdir}/checkpoints/2',
    f'--export={export}',
    '--config.evaluation.num_tasks=1',
  )


def test_an_export_to_a_full_disk_is_one_line(uninterrupted, tmp_path):
  workdir, _ = uninterrupted
  # Enough for the check before the start, but not for the weights.
  if not _mount(tmp_path / 'disk', 'size=100k'):
    pytest.skip('needs to be allowed to mount')
  try:
    for export, status in ((tmp_path / 'disk/x', 1), ('/proc/none', 2)):
      process = preloaded.Process(
        _export_command(workdir, export, tmp_path / 'results')
      )
      _, errors = process.communicate(timeout=400)
      assert process.returncode == status
      assert f'{export}: cannot be written' in errors
      assert 'Traceback' not in errors
  finally:
    subprocess.run(['umount', tmp_path / 'disk'], check=True)


def test_a_checkpoint_is_exported(uninterrupted, tmp_path):
  workdir, _ = uninterrupted
  export = tmp_path / 'export'
  preloaded.run(_export_command(workdir, export, tmp_path))
  for name in ('model.safetensors', 'config.json', 'tokenizer.json'):
    one, other = (folder / 'policy' / name for folder in (workdir, export))
    assert one.read_bytes() == other.read_bytes(), name
  for folder in policy_files.FOLDERS:
    (tmp_path / 'own' / folder).mkdir(parents=True)
    with pytest.raises(ValueError, match=f'already has a folder {folder}'):
      policy_files.check_export(str(tmp_path / 'own'), [str(workdir)])
    (tmp_path / 'own' / folder).rmdir()
  for checkpoints, reason in (
    ([str(workdir)], 'already has a folder policy'),
    ([], 'needs exactly one --checkpoint'),
  ):
    with pytest.raises(ValueError, match=f'--export={export}: .*{reason}'):
      policy_files.check_export(str(export), checkpoints)
