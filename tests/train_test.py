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

from gigpo_jax import train

PROJECT = pathlib.Path(train.__file__).parents[1]
# Smaller than the smoke variant: the path is what is tested.
SMALL = (
  '--config=configs/alfworld.py:smoke',
  '--config.num_iterations=3',
  '--config.rollout.groups=2',
  '--config.rollout.episodes_per_group=4',
  '--config.rollout.batch_buckets=(8,)',
  '--config.rollout.prompt_buckets=()',
  '--config.learner.length_buckets=(360,)',
  '--config.evaluation.num_tasks=8',
  '--config.evaluation.every=3',
  '--config.env.max_steps=6',
)


def _command(script: str, *flags: str) -> list[str]:
  return [sys.executable, f'launch/{script}.py', *flags]


def _small(workdir: pathlib.Path, *flags: str) -> list[str]:
  kept = [flag for flag in SMALL if 'prompt_buckets' not in flag]
  return _command(
    'train',
    *kept,
    '--config.rollout.prompt_buckets=(320,)',
    f'--workdir={workdir}',
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
