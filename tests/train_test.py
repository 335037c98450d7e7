"""The whole path, as a user starts it: smoke run, kill and resume, refusals."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import programs
import pytest
import safetensors.numpy

from configs import alfworld
from envs.alfworld import games
from gigpo_jax import (
  checkpoint,
  episodes,
  group_filter,
  metrics,
  run_config,
  run_logs,
  run_state,
  tokenizer,
  train,
)
from gigpo_jax.tools import metric_list

PROJECT = pathlib.Path(train.__file__).parents[1]
# What its threads say at times when a write failed.
ORBAX = re.compile(
  r'Traceback \(most recent call last\):\n(?:  .*\n)+'
  r'RuntimeError: Event loop is closed\n'
)
# Smaller than the smoke variant: the path is what is tested.
SMALL = (
  '--config.num_iterations=3',
  '--config.rollout.groups=2',
  '--config.rollout.episodes_per_group=4',
  '--config.rollout.batch_buckets=(8,)',
  '--config.rollout.prompt_buckets=(320,)',
  '--config.learner.length_buckets=(360,)',
  '--config.evaluation.num_tasks=8',
  '--config.evaluation.every=3',
  '--config.env.max_steps=6',
  '--config.episodes.every=1',
)


def _command(script: str, *flags: str) -> list[str]:
  return [sys.executable, f'launch/{script}.py', *flags]


def _small(workdir: pathlib.Path, *flags: str, variant: str = 'smoke'):
  return _command(
    'train',
    f'--config=configs/alfworld.py:{variant}',
    f'--workdir={workdir}',
    *SMALL,
    *flags,
  )


def _lines(workdir: pathlib.Path) -> list[dict]:
  """The metrics of a run, without what is another each time."""
  path = workdir / 'metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  unlisted = {k for line in lines for k in line if not metric_list.find(k)} - {
    'iteration'
  }
  assert not unlisted, f'add to gigpo_jax/tools/metric_list.py: {unlisted}'
  return [
    {
      k: v
      for k, v in line.items()
      if not k.startswith(metrics.NONDETERMINISTIC)
    }
    for line in lines
  ]


def _episodes(workdir: pathlib.Path) -> list[dict]:
  return list(episodes.open_dataset(workdir / 'episodes'))


def _policy(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  return safetensors.numpy.load_file(workdir / 'policy' / 'model.safetensors')


def _saved(workdir: pathlib.Path) -> dict:
  """Parameters and optimizer of the newest checkpoint, in float32."""
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(_newest(workdir) / 'state')


def _newest(workdir: pathlib.Path) -> pathlib.Path:
  found = (workdir / 'checkpoints').iterdir()
  return max(
    (p for p in found if p.name.isdecimal()), key=lambda p: int(p.name)
  )


def _assert_ends_the_same(found: pathlib.Path, expected: pathlib.Path) -> None:
  """Compares two runs bit for bit."""
  lines = _lines(found)
  assert [line['iteration'] for line in lines] == list(range(len(lines)))
  assert lines == _lines(expected)
  assert _policy(found).keys() == _policy(expected).keys()
  jax.tree.map(np.testing.assert_array_equal, _policy(found), _policy(expected))
  saved = _saved(expected)
  assert len(jax.tree.leaves(saved)) > len(_policy(expected))
  jax.tree.map(np.testing.assert_array_equal, _saved(found), saved)


def _broken_off(
  moment: str, command: list[str], status: int = -signal.SIGKILL
) -> str:
  """Runs a command until it gets a signal at a moment; returns its output."""
  python, *rest = command
  done = subprocess.run(
    [python, 'tests/moments.py', moment, *rest],
    cwd=PROJECT,
    capture_output=True,
    text=True,
    timeout=400,
    check=False,
  )
  assert done.returncode == status, f'{moment}: {done.stdout}{done.stderr}'
  return done.stderr + done.stdout


@pytest.fixture(name='uninterrupted', scope='module')
def fixture_uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('uninterrupted')
  return workdir, programs.run(_small(workdir))


def test_a_run_leaves_what_the_readme_says(uninterrupted):
  workdir, printed = uninterrupted
  lines = _lines(workdir)
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
  first = json.loads((workdir / 'metrics.jsonl').open().readline())
  durations = {k.removeprefix('time/') for k in first if k.startswith('time/')}
  assert durations == {
    'credit_secs',
    'evaluation_secs',
    'iteration_secs',
    'rollout_secs',
    'rows_secs',
    'update_secs',
  }


def test_a_change_that_is_refused_leaves_the_config(tmp_path, monkeypatch):
  config = alfworld.get_config('smoke')
  run_config.save(config, str(tmp_path))

  def refuse(*_):
    raise ValueError('another shape')

  monkeypatch.setattr(checkpoint.Checkpointer, 'check', refuse)
  config.seed = 3
  with pytest.raises(ValueError, match='another shape'):
    train.train(config, str(tmp_path), allow_config_change=True)
  assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 0


def test_nothing_is_trained_but_sampled_tokens(uninterrupted):
  workdir, _ = uninterrupted
  for line in _lines(workdir)[:3]:
    steps = line['train/episode_length'] * 8
    expected = steps * line['train/response_tokens']
    assert line['update/tokens'] == pytest.approx(expected)


def test_killed_and_started_again_the_run_ends_the_same(
  uninterrupted, tmp_path
):
  expected, _ = uninterrupted
  with subprocess.Popen(
    _small(tmp_path),
    cwd=PROJECT,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  ) as process:
    # In the middle of iteration 1: its rollout has begun.
    for line in process.stdout:
      if line.startswith('iteration    0'):
        break
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
  assert len(_lines(tmp_path)) == 1
  for moment in (
    'checkpoint:_write_manifest',
    'learner:Learner.update,learner_programs:LearnerPrograms.run@3',
    # All is saved by then.
    'checkpoint:Checkpointer.wait+',
  ):
    _broken_off(moment, _small(tmp_path))
  # And what was written last is lost.
  newest = _newest(tmp_path)
  (newest / 'host' / 'metadata').write_text('torn')
  printed = programs.run(_small(tmp_path))
  assert newest.name == '2'
  assert f'{newest}: damaged, skipped: host/metadata has' in printed
  assert f'resuming {tmp_path} after iteration 1' in printed
  _assert_ends_the_same(tmp_path, expected)
  found, wanted = _episodes(tmp_path), _episodes(expected)
  assert [e['iteration'] for e in wanted] == [
    n for n in range(3) for _ in range(8)
  ]
  np.testing.assert_equal(found, wanted)


def test_episodes_hold_what_the_metrics_say(uninterrupted):
  workdir, _ = uninterrupted
  found = _episodes(workdir)
  for line in _lines(workdir)[:3]:
    played = [e for e in found if e['iteration'] == line['iteration']]
    steps = [s for e in played for s in e['steps'] if not s['is_last']]
    assert line['train/success_rate'] == np.mean([e['success'] for e in played])
    assert line['update/tokens'] == sum(len(s['log_probs']) for s in steps)
    spread = np.mean([abs(s['episode_advantage']) for s in steps])
    assert line['advantage/episode_abs_mean'] == pytest.approx(spread, abs=1e-6)
    text = tokenizer.Tokenizer(str(workdir / 'policy'))
    told = text.decode([s['completion_ids'] for s in steps])
    assert told == [s['response'] for s in steps]


def test_successful_episodes_are_trained_on(uninterrupted, tmp_path):
  """Rejection-sampling fine-tuning, as the README has it."""
  workdir, _ = uninterrupted
  programs.run(
    _command(
      'sft',
      *_small(tmp_path)[2:],
      '--config.sft.init=',
      f'--config.sft.data={workdir / "episodes"}',
      '--config.sft.only_successful=False',
      '--config.sft.epochs=2',
    )
  )
  lines = _lines(tmp_path)
  assert lines[-1]['loss/total'] < lines[0]['loss/total']
  # From the warm start on, whose tokenizer it keeps.
  start = PROJECT / 'configs' / 'warm_starts' / 'alfworld_tiny'
  text = tokenizer.Tokenizer(str(tmp_path / 'policy'))
  assert text.fingerprint == tokenizer.Tokenizer(str(start)).fingerprint


# In the order in which they come; each process goes on where it can.
MOMENTS = (
  'run_config:save+',
  'checkpoint:Checkpointer.latest',
  'metrics:Writer.__init__',
  'learner:Learner.warm_up',
  'train:evaluate,sampler:Sampler.step@4',
  'train:collect,sampler:Sampler.step@3',
  'train:collect,sampler:Sampler.step@20',
  'env_pool:EnvPool.prepare',
  'learner:Learner.update',
  'learner:Learner.update,learner_programs:LearnerPrograms.run@3',
  'metrics:Writer.write',
  'metrics:Writer.write+',
  'learner:Learner.update@2,learner_programs:LearnerPrograms.run@2',
  'checkpoint:Checkpointer.save',
  'checkpoint:Checkpointer.save+',
  'checkpoint:_write_manifest',
  'checkpoint:_write_manifest+',
  # The second waits until the first is written.
  'checkpoint:Checkpointer.save@2+',
  'checkpoint:Checkpointer.restore',
  'run_builders:restore_or_init+',
  'learner:Learner.update@2,learner_programs:LearnerPrograms.run@4',
  'checkpoint:_write_manifest',
  'checkpoint:Checkpointer.save@2',
  'train:evaluate@2,sampler:Sampler.step@3',
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
  programs.run(_small(whole, *flags))
  for moment in MOMENTS:
    _broken_off(moment, _small(parts, *flags))
  programs.run(_small(parts, *flags))
  _assert_ends_the_same(parts, whole)


def test_a_run_that_has_to_leave_saves_the_iteration_before(
  uninterrupted, tmp_path
):
  expected, _ = uninterrupted
  # Nothing would be saved before the end of the run.
  flags = ('--config.checkpoint.every=9', '--grace_secs=20')
  printed = _broken_off(
    'train:collect@2,sampler:Sampler.step@3~15:60',
    _small(tmp_path, *flags),
    status=0,
  )
  assert printed.endswith(
    'SIGTERM: iteration 0 is saved; rerun the same command to resume\n'
  )
  assert len(_lines(tmp_path)) == 1
  assert 'after iteration 0' in programs.run(_small(tmp_path, *flags))
  _assert_ends_the_same(tmp_path, expected)


@pytest.mark.parametrize(
  ('moment', 'said'),
  [
    (
      'learner:Learner.warm_up',
      'there is no checkpoint yet; the same command starts again$',
    ),
    pytest.param(
      'train:collect@3,sampler:Sampler.step@3',
      # The second may still be being written.
      'the same command resumes after iteration [01]$',
      marks=pytest.mark.slow,
    ),
  ],
)
def test_an_interrupt_ends_a_run_in_one_line(tmp_path, moment, said):
  printed = _broken_off(f'{moment}~2:60', _small(tmp_path), status=130)
  assert re.match(f'interrupted; {said}', printed, re.MULTILINE)
  assert 'Traceback' not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
  ('moment', 'grace', 'saved'),
  [
    ('learner:Learner.warm_up~15', 120, 'nothing is'),
    ('train:collect@2,sampler:Sampler.step@3~15', 120, 'iteration 0 is'),
    (
      'learner:Learner.update@2,learner_programs:LearnerPrograms.run@2~15',
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
  printed = _broken_off(moment, _small(tmp_path, *flags), status=0)
  assert f'SIGTERM: {saved}' in printed
  programs.run(_small(tmp_path, *flags))
  _assert_ends_the_same(tmp_path, expected)


def _stopped(workdir: pathlib.Path, *flags: str) -> str:
  """Runs until the run is stopped; returns the line that says why."""
  done = subprocess.run(
    _small(workdir, *flags),
    cwd=PROJECT,
    capture_output=True,
    text=True,
    timeout=400,
    check=False,
  )
  assert done.returncode == 1, done.stdout + done.stderr
  said = ORBAX.sub('', done.stderr)
  assert len(said.splitlines()) == 1, done.stderr
  return said


@pytest.mark.slow
def test_updates_that_come_to_nothing_stop_the_run(tmp_path):
  line = _stopped(
    tmp_path,
    '--config.optimizer.learning_rate=1e38',
    '--config.learner.max_skipped_in_row=2',
  )
  assert line.startswith('update/most_skipped_in_row=2: loss or gradient was ')
  lines = _lines(tmp_path)
  assert [line['update/skipped'] for line in lines] == [0, 1]
  with np.load(tmp_path / 'skipped_update.npz') as rows:
    assert len(rows['tokens']) == len(rows['advantages']) > 0
    assert not np.isfinite(rows['old_log_probs']).all()


@pytest.mark.slow
@pytest.mark.parametrize('bad', [1, 20], ids=['one', 'most'])
def test_damaged_games_end_their_own_episodes(tmp_path, bad):
  data, workdir = tmp_path / 'data', tmp_path / 'run'
  for split in ('train', 'valid_unseen'):
    games.main(['--out', str(data), '--split', split, '--num', '24'])
  for path in sorted(data.rglob('train/**/game.tw-pddl'))[-bad:]:
    # Its header is whole, so that it counts as a game.
    path.write_text(path.read_text().replace('(:init', '(:int'))
  flags = (
    f'--config.env.data_dir={data}',
    '--config.env.engine=native',
    '--config.rollout.groups=8',
    '--config.rollout.batch_buckets=(32,)',
  )
  if bad > 1:
    line = _stopped(workdir, *flags)
    assert line.startswith('pool.max_failed_share=0.25: ')
    assert 'episodes failed: ' in line and 'raised, such as train/' in line
    return
  printed = programs.run(_small(workdir, *flags))
  lines = _lines(workdir)[:3]
  # Every game is played once.
  assert sum(line['train/failed_episodes'] for line in lines) == 4
  assert sum(line.get('train/failed_episodes/raised', 0) for line in lines) == 4
  assert '4 of 32 episodes failed: 4 raised, such as train/23 (' in printed


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
    line = _stopped(disk / 'run')
    assert 'cannot be written' in line and 'No space left' in line
    assert 'rerun the same command' in line
    subprocess.run(['mount', '-o', 'remount,size=80m', disk], check=True)
    assert 'resuming' in programs.run(_small(disk / 'run'))
    _assert_ends_the_same(disk / 'run', expected)
    subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
    done = subprocess.run(
      _small(disk / 'run'), cwd=PROJECT, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b'cannot be written (Read-only file system)' in done.stderr
  finally:
    subprocess.run(['umount', disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('variant', 'flags'),
  [
    (
      'smoke,ppo',
      (
        '--config.critic.warmup_iterations=1',
        '--config.rollout.groups=8',
        '--config.rollout.episodes_per_group=1',
      ),
    ),
    (
      'smoke,strong',
      (
        '--config.filter.warmup_iterations=0',
        '--config.filter.max_refills=1',
        '--config.tasks.draw=uncertain',
        '--config.rollout.horizon=((0,3),(2,6))',
        '--config.loss.entropy_weight=0.01',
        '--config.loss.entropy_band.weight=1.0',
        # Falls with the share of num_iterations otherwise.
        '--config.loss.entropy_band.decay=0.0',
      ),
    ),
  ],
  ids=['critic', 'feedback'],
)
def test_what_a_run_knows_of_its_past_is_kept(tmp_path, variant, flags):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'

  def run(workdir, *more):
    flags_ = (*flags, '--config.evaluation.every=0', *more)
    return programs.run(_small(workdir, *flags_, variant=variant))

  run(whole)
  run(parts, '--config.num_iterations=2')
  assert 'resuming' in run(parts)
  assert _lines(whole)[2]['spent/episodes'] >= 3 * 8
  _assert_ends_the_same(parts, whole)


def test_an_iteration_without_signal_calls_no_learner():
  unusable = object()  # Has none of the methods of a learner or a critic.
  parts = types.SimpleNamespace(
    learner=unusable, critic=unusable, algorithm=unusable, loss=unusable
  )
  state = run_state.RunState(unusable, unusable)
  history = run_state.History(entropies=(0.5,), skipped={'update': 1.0})
  groups = group_filter.CollectedGroups([], [], [], {})
  logs = run_logs.RunLogs(metrics.NullWriter())
  same_state, values = train.update(parts, state, history, groups, 3, logs)
  assert same_state is state
  history = history.after(3, groups, {}, values)
  assert (history.entropies, history.skipped) == ((0.5,), {'update': 1.0})
  assert values == {
    'advantage/std': 0,
    'advantage/trained_share': 0,
    'advantage/effective_tokens': 0,
    'update/count': 0,
    'update/tokens': 0,
    'update/grad_norm': 0,
    'critic/count': 0,
  }
  assert 'loss' not in metrics.console_line(3, values)


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['smoke', 'smoke,ppo'])
def test_nothing_is_learnt_where_no_group_has_spread(tmp_path, variant):
  # All fail, some without form: what costs them something is not learnt from.
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'

  def run(workdir, *more):
    flags = (
      '--config.env.max_steps=2',
      '--config.rollout.temperature=2.0',
      '--config.filter.drop_zero_variance=True',
      '--config.filter.max_refills=0',
      '--config.filter.warmup_iterations=1',
      '--config.loss.kl_weight=0.1',
      '--config.loss.entropy_weight=0.1',
      '--config.optimizer.weight_decay=0.1',
      '--config.optimizer.decay_updates=9',
      '--config.checkpoint.keep=3',
      '--config.evaluation.every=0',
    )
    return programs.run(_small(workdir, *flags, *more, variant=variant))

  run(whole)
  first, *others = _lines(whole)
  assert first['update/grad_norm'] > 0 and 'filter/refills' not in first
  for line in others:
    assert 0 < line['train/invalid_action_rate'] < 1
    assert line['filter/groups_kept'] == 0
    assert line['update/count'] == line['update/grad_norm'] == 0
    assert line.get('critic/count', 0) == 0
  # Parameters, moments and counts of updates, of policy and critic.
  with ocp.StandardCheckpointer() as reader:
    one, *later = (
      reader.restore(whole / 'checkpoints' / str(n) / 'state') for n in range(3)
    )
  assert len(jax.tree.leaves(one)) > len(_policy(whole))
  for state in later:
    jax.tree.map(np.testing.assert_array_equal, state, one)
  run(parts, '--config.num_iterations=2')
  assert 'resuming' in run(parts)
  _assert_ends_the_same(parts, whole)


def test_checkpoints_and_exports_are_evaluated(uninterrupted, tmp_path):
  workdir, _ = uninterrupted
  printed = programs.run(
    _command(
      'evaluate',
      *_small(tmp_path)[2:],
      f'--checkpoint={workdir}',
      f'--checkpoint={workdir}/checkpoints/2',
      f'--model={workdir / "policy"}',
      '--repeats=2',
    )
  )
  assert f'{workdir} minus {workdir / "policy"}' in printed
  assert f'policy: --checkpoint={workdir}\npolicy after iteration 2' in printed
  told = json.loads((tmp_path / 'evaluation.json').read_text())
  newest, same, _ = told['policies'].values()
  assert newest == same
  for found in told['policies'].values():
    assert len(found['episodes']) == 16
    successes = [episode['success'] for episode in found['episodes']]
    assert found['rates']['eval/success_rate'] == np.mean(successes)
  assert (tmp_path / 'evaluation.png').is_file()
