"""The whole path, as a user starts it: smoke run, kill and resume, refusals."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy

from gigpo_jax import episodes, tokenizer, train

PROJECT = pathlib.Path(train.__file__).parents[1]
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


def _run(command: list[str], timeout: float = 400) -> str:
  done = subprocess.run(
    command,
    cwd=PROJECT,
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _lines(workdir: pathlib.Path) -> list[dict]:
  """The metrics of a run, without what a clock measured."""
  path = workdir / 'metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  return [
    # How long things took, and what waited for what.
    {k: v for k, v in line.items() if not k.startswith(('time/', 'rollout/'))}
    for line in lines
  ]


def _episodes(workdir: pathlib.Path) -> list[dict]:
  return list(episodes.open_set(workdir / 'episodes'))


def _policy(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  return safetensors.numpy.load_file(workdir / 'policy' / 'model.safetensors')


@pytest.fixture(name='uninterrupted', scope='module')
def fixture_uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('uninterrupted')
  return workdir, _run(_small(workdir))


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
    # In the middle of iteration 2: its rollout has begun.
    for line in process.stdout:
      if line.startswith('iteration    1'):
        break
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
  assert len(_lines(tmp_path)) == 2
  printed = _run(_small(tmp_path))
  assert 'resuming' in printed
  assert _lines(tmp_path) == _lines(expected)
  found, wanted = _policy(tmp_path), _policy(expected)
  assert found.keys() == wanted.keys()
  for name in wanted:
    np.testing.assert_array_equal(found[name], wanted[name])
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
  _run(
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
        '--config.loss.corridor_weight=1.0',
        # Falls with the share of num_iterations otherwise.
        '--config.loss.corridor_decay=0.0',
      ),
    ),
  ],
  ids=['critic', 'feedback'],
)
def test_what_a_run_knows_of_its_past_is_kept(tmp_path, variant, flags):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'

  def run(workdir, *more):
    flags_ = (*flags, '--config.evaluation.every=0', *more)
    return _run(_small(workdir, *flags_, variant=variant))

  run(whole)
  run(parts, '--config.num_iterations=2')
  assert 'resuming' in run(parts)
  lines = _lines(whole)
  assert _lines(parts) == lines
  assert lines[2]['spent/episodes'] >= 3 * 8
  found, wanted = _policy(parts), _policy(whole)
  for name in wanted:
    np.testing.assert_array_equal(found[name], wanted[name])


def test_checkpoints_and_exports_are_evaluated(uninterrupted, tmp_path):
  workdir, _ = uninterrupted
  printed = _run(
    _command(
      'evaluate',
      *_small(tmp_path)[2:],
      f'--checkpoint={workdir}',
      f'--model={workdir / "policy"}',
      '--repeats=2',
    )
  )
  assert f'{workdir} less {workdir / "policy"}' in printed
  told = json.loads((tmp_path / 'evaluation.json').read_text())
  for found in told['policies'].values():
    assert len(found['episodes']) == 16
    successes = [episode['success'] for episode in found['episodes']]
    assert found['rates']['eval/success_rate'] == np.mean(successes)
  assert (tmp_path / 'evaluation.png').is_file()


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    ((), '--config: missing'),
    (('--config=configs/none.py',), 'configs/none.py'),
    (('--config=configs/alfworld.py:huge',), 'accepts at most one of'),
    (('--config=configs/alfworld.py:tiny', '--config.sed=1'), 'sed'),
    (('--config=configs/alfworld.py:tiny', '--config.seed=x'), 'seed'),
    (('--config=configs/alfworld.py:tiny', '--config.rollout.groups=0'), 'rou'),
    (('--config=configs/alfworld.py:tiny', '--wrkdir=x'), 'wrkdir'),
  ],
  ids=['none', 'file', 'variant', 'field', 'type', 'value', 'flag'],
)
def test_wrong_commands_end_in_one_line(tmp_path, flags, message):
  done = subprocess.run(
    _command('train', *flags, f'--workdir={tmp_path / "run"}'),
    cwd=PROJECT,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
  assert len(done.stderr.splitlines()) == 1, done.stderr
  assert not (tmp_path / 'run').exists()
