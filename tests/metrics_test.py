"""Tests of metrics: intervals, summaries, the file across a kill, the plot."""

import contextlib
import dataclasses
import inspect
import json
import math
import os
import struct
import subprocess
import sys
import types

import numpy as np
import pytest
from matplotlib import figure
from tensorboardX.proto import event_pb2

from envs import base
from gigpo_jax import evaluation, metrics, trajectory
from gigpo_jax.runtime import errors
from gigpo_jax.tools import plots


def test_wilson_by_hand():
  # p = 8/10, z = 2: centre (0.8 + 4/20) / (1 + 4/10) = 1.0 / 1.4 = 0.714286;
  # half-width 2 sqrt(0.8*0.2/10 + 4/400) / 1.4 = 2 * 0.161245 / 1.4 = 0.230350.
  low, high = metrics.wilson(8, 10, z=2.0)
  assert low == pytest.approx(0.714286 - 0.230350, abs=1e-5)
  assert high == pytest.approx(0.714286 + 0.230350, abs=1e-5)
  assert metrics.wilson(0, 0) == (0.0, 1.0)
  assert metrics.wilson(0, 20)[0] == pytest.approx(0)


def _step(reward: float, valid: bool, tokens: int) -> trajectory.Step:
  result = base.StepResult(
    observation=None,
    reward=reward,
    valid=valid,
    action='a',
    success=reward > 0,
    done=True,
    metrics={'odd': float(valid)},
  )
  return trajectory.Step(
    prompt_ids=np.zeros(5, np.int32),
    completion_ids=np.zeros(tokens, np.int32),
    log_probs=np.zeros(tokens, np.float32),
    truncated=tokens == 4,
    prompt_shortened=False,
    anchor='s',
    observation='s',
    response='r',
    result=result,
  )


def test_revisits_by_hand():
  step = _step(0, True, 2)

  def episode(anchors):
    steps = [dataclasses.replace(step, anchor=anchor) for anchor in anchors]
    return trajectory.Trajectory(base.Task('train', 0), '', 0, 0, tuple(steps))

  # abab: two of four; abc: none, although another episode was there; aaa: two.
  episodes = [episode('abab'), episode('abc'), episode('aaa'), episode('')]
  assert metrics.revisit_rate(episodes) == pytest.approx(4 / 10)
  values = metrics.summarize(episodes[:1], prefix='train')
  assert values['train/revisit_rate'] == 0.5
  # ssp and three branches that repeat its ss: one of six different steps.
  branch = dataclasses.replace(episode('ssq'), num_repeated=2)
  assert metrics.revisit_rate([episode('ssp'), *[branch] * 3]) == (
    pytest.approx(1 / 6)
  )


def _episode_with_metrics(
  env_metrics: dict[str, float],
) -> list[trajectory.Trajectory]:
  step = _step(10, True, 2)
  result = dataclasses.replace(step.result, metrics=env_metrics)
  steps = (dataclasses.replace(step, result=result),)
  return [trajectory.Trajectory(base.Task('train', 0), 'a', 0, 0, steps)]


def test_environment_metrics_never_replace_trainer_metrics():
  expected = evaluation.summarize(_episode_with_metrics({}))
  names = [name.removeprefix('eval/') for name in expected]
  # Names that only some iterations have.
  names += ['score', 'score_low', 'failed_episodes/died', 'success_rate/b']
  forged = {name: -1.0 for name in [*names, 'env_score', 'plain']}
  rates = evaluation.summarize(_episode_with_metrics(forged))
  assert {name: rates[name] for name in expected} == expected
  own = {f'eval/env_{name}' for name in [*names, 'env_score']}
  assert rates.keys() - expected.keys() == own | {'eval/plain'}


def test_summary_by_hand():
  def episode(task_type, steps, failure=''):
    return trajectory.Trajectory(
      base.Task('train', 0), task_type, 0, 0, tuple(steps), failure
    )

  values = metrics.summarize(
    [
      episode('a', [_step(0, True, 2), _step(10, True, 4)]),
      episode('b', [_step(0, False, 2)]),
      episode('b', [], 'died'),
    ],
    prefix='eval',
  )
  assert values['eval/success_rate'] == pytest.approx(1 / 3)
  assert values['eval/success_rate/a'] == 1
  assert values['eval/success_rate/b'] == 0
  assert values['eval/episode_reward'] == pytest.approx(10 / 3)
  assert values['eval/episode_length'] == 1  # (2 + 1 + 0) / 3
  assert values['eval/invalid_action_rate'] == pytest.approx(1 / 3)
  assert values['eval/truncated_rate'] == pytest.approx(1 / 3)
  assert values['eval/response_tokens'] == pytest.approx(8 / 3)
  assert values['eval/response_tokens_max'] == 4
  assert values['eval/odd'] == pytest.approx(2 / 3)
  assert values['eval/failed_episodes'] == 1


def test_a_step_that_branches_share_counts_once():
  # One invalid step of 10 tokens in three episodes, five of 2 tokens.
  shared = _step(0, False, 10)
  first = trajectory.Trajectory(
    base.Task('train', 0), 'a', 0, 0, (shared, _step(0, True, 2))
  )
  branch = dataclasses.replace(
    first,
    member=1,
    steps=(shared, _step(10, True, 2), _step(10, True, 2)),
    parent=0,
    num_repeated=1,
  )
  values = metrics.summarize([first, branch, dataclasses.replace(branch)])
  assert values['train/episode_length'] == pytest.approx(8 / 3)
  assert values['train/episode_reward'] == pytest.approx(40 / 3)
  assert values['train/invalid_action_rate'] == pytest.approx(1 / 6)
  assert values['train/response_tokens'] == pytest.approx(20 / 6)


def test_reserved_environment_metric_gets_a_prefix():
  step = _step(10, True, 2)
  metrics_ = {'success_rate': 0.25, 'odd': 0.5}
  result = dataclasses.replace(step.result, metrics=metrics_)
  step = dataclasses.replace(step, result=result)
  values = metrics.summarize(
    [trajectory.Trajectory(base.Task('train', 0), 'a', 0, 0, (step,))],
    prefix='train',
  )
  assert values['train/success_rate'] == 1
  assert values['train/env_success_rate'] == 0.25
  assert values['train/odd'] == 0.5


def test_scores_are_averaged_over_episodes_not_steps():
  def step(score: float | None) -> trajectory.Step:
    plain = _step(0, True, 2)
    result = dataclasses.replace(plain.result, score=score)
    return dataclasses.replace(plain, result=result)

  def episode(*scores: float | None, failure: str = ''):
    steps = tuple(map(step, scores))
    return trajectory.Trajectory(
      base.Task('train', 0), 'a', 0, 0, steps, failure
    )

  episodes = [episode(None, None, None, 0.25), episode(1.0)]
  assert metrics.summarize(episodes)['train/score'] == 0.625
  # A failed episode counts as 0: 1.25 / 4.
  episodes += [episode(None, failure='died'), episode(failure='died')]
  assert metrics.summarize(episodes)['train/score'] == 0.3125
  # Also if it had a score before it failed: 1.25 / 5.
  episodes += [episode(0.5, 0.75, failure='died')]
  assert metrics.summarize(episodes)['train/score'] == 0.25
  assert evaluation.summarize(episodes)['eval/score'] == 0.25
  # No score if the environment reports none.
  assert 'train/score' not in metrics.summarize([episode(None)])


def _write(workdir: str, first: int, last: int) -> None:
  writer = metrics.Writer(workdir, first_iteration=first)
  for iteration in range(first, last):
    writer.write(iteration, {'x': float(iteration), 'bad': math.nan})
  writer.close()


def test_after_resume_each_iteration_is_stored_once(tmp_path):
  workdir = str(tmp_path)
  _write(workdir, 0, 5)
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"iteration": 5, "x"')  # Torn by a kill.
  _write(workdir, 3, 6)
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['iteration'] for line in lines] == list(range(6))
  assert json.loads(lines[0]) == {'iteration': 0, 'bad': None, 'x': 0.0}
  # Earlier events are in another file, unless it was created in the same
  # second.
  assert _scalars(tmp_path / 'tensorboard')[-3:] == [
    ('x', float(n), n) for n in range(3, 6)
  ]


def _scalars(folder) -> list[tuple[str, float, int]]:
  """Returns (name, value, iteration) of all TensorBoard events."""
  scalars = []
  for path in sorted(folder.glob('events*')):
    data = path.read_bytes()
    while data:
      # Format: length, checksum of the length, event, checksum.
      (size,) = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      scalars += [
        (v.tag, v.simple_value, event.step) for v in event.summary.value
      ]
      data = data[16 + size :]
  return scalars


def test_plot_is_a_png(tmp_path):
  writer = metrics.Writer(str(tmp_path))
  for iteration in range(4):
    values = {'train/success_rate': 0.1 * iteration}
    if iteration % 2 == 0:
      values |= {
        'eval/success_rate': 0.2,
        'eval/success_low': 0.1,
        'eval/success_high': 0.3,
      }
    writer.write(iteration, values)
  writer.close()
  with open(metrics.plot(str(tmp_path)), 'rb') as file:
    assert file.read(8) == b'\x89PNG\r\n\x1a\n'


def test_a_plot_shows_a_single_point(tmp_path, monkeypatch):
  axes = figure.Figure().subplots()

  @contextlib.contextmanager
  def image(*args, **kwargs):
    yield None, axes

  monkeypatch.setattr(plots, 'image', image)
  writer = metrics.Writer(str(tmp_path))
  writer.write(0, {'train/success_rate': 0.3})
  writer.close()
  metrics.plot(tmp_path)
  (line,) = axes.lines
  np.testing.assert_allclose(line.get_xydata(), [[0, 30]])
  assert line.get_marker() == 'o'


def test_console_line_of_an_evaluation():
  values = {
    'eval/success_rate': 0.5,
    'eval/success_low': 0.4,
    'eval/success_high': 0.6,
  }
  line = metrics.console_line(7, values)
  assert line == 'iteration    7  EVAL success 50.0% [40.0%, 60.0%]'


@pytest.mark.parametrize(
  'successes, n, low, high',
  [
    # 5 of 10: centre (0.5 + 3.8415/20) / 1.38415 = 0.5, half-width
    # 1.96 sqrt(0.025 + 3.8415/400) / 1.38415 = 0.2634.
    (5, 10, 0.2366, 0.7634),
    # 0 of 10: from 0 to 3.8415 / (10 + 3.8415) = 0.2775.
    (0, 10, 0.0, 0.2775),
    (10, 10, 0.7225, 1.0),
    # 81 of 263: an example of R. G. Newcombe, 1998.
    (81, 263, 0.2553, 0.3662),
  ],
)
def test_wilson_at_95_percent(successes, n, low, high):
  interval = metrics.wilson(successes, n)
  assert interval == pytest.approx((low, high), abs=5e-5)
  assert all(0 <= bound <= 1 for bound in interval)


def test_summary_if_every_environment_failed():
  values = metrics.summarize(
    [trajectory.Trajectory(base.Task('train', 0), 'a', 0, 0, (), 'died')]
  )
  assert values['train/success_rate'] == 0
  assert values['train/failed_episodes'] == 1
  assert all(math.isfinite(value) for value in values.values())


def test_write_flushes_to_disk(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(0, {'b': math.inf, 'a': np.float32(0.5)})
  (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  writer.close()
  assert json.loads(line) == {'iteration': 0, 'a': 0.5, 'b': None}


def test_resume_skips_a_line_of_zeros(tmp_path):
  # Some file systems leave such a line after a power loss.
  (tmp_path / 'metrics.jsonl').write_text(
    '{"iteration": 0}\n\x00\x00\x00\n{"iteration": 1}\n'
  )
  _write(tmp_path, 2, 3)
  assert [line['iteration'] for line in metrics.read(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize('number', ['1e400', '-1e400', '1' + '0' * 400])
def test_a_line_with_a_number_that_no_float_holds_is_damaged(
  tmp_path, capsys, number
):
  (tmp_path / 'metrics.jsonl').write_text(
    f'{{"iteration": 0}}\n{{"iteration": 1, "train/success_rate": {number}}}\n'
  )
  assert metrics.read(tmp_path) == [{'iteration': 0}]
  _write(tmp_path, 2, 3)
  assert '1 lines are damaged; the file is kept as' in capsys.readouterr().out
  assert [line['iteration'] for line in metrics.read(tmp_path)] == [0, 2]


def test_null_writer_has_the_methods_of_a_writer():
  def methods(kind):
    return {
      name: list(inspect.signature(function).parameters)
      for name, function in inspect.getmembers(kind, inspect.isfunction)
      if not name.startswith('_')
    }

  assert methods(metrics.NullWriter) == methods(metrics.Writer)


def test_console_line_of_a_training_iteration():
  values = {
    'train/success_rate': 0.625,
    'train/episode_reward': 6.25,
    'train/episode_length': 21.5,
    'train/invalid_action_rate': 0.031,
    'loss/total': -0.0123,
    'time/rollout_secs': 12.0,
    'time/update_secs': 3.0,
    'eval/success_rate': 0.5,
  }
  assert metrics.console_line(12, values) == (
    'iteration   12  success  62.5%  reward  6.25  steps  21.5  invalid  3.1%  '
    'loss -0.0123  rollout  12.0 s  update   3.0 s  EVAL success 50.0%'
  )
  assert metrics.console_line(3, {}) == 'iteration    3'
  idle = metrics.no_update(has_critic=False)
  assert metrics.console_line(3, idle) == 'iteration    3  no update'
  idle['filter/groups_kept'] = 0.0
  assert metrics.console_line(3, idle) == (
    'iteration    3  no update: the filter kept no group'
  )


@pytest.mark.parametrize('published', [None, {'paper, 7B': 0.908}])
def test_plot_of_a_run_without_metrics(tmp_path, published):
  metrics.Writer(tmp_path).close()
  with open(metrics.plot(tmp_path, published), 'rb') as file:
    assert file.read(4) == b'\x89PNG'


def test_effective_tokens_by_hand():
  mask = np.array([[True, True], [True, False], [True, True]])
  values = metrics.effective_tokens(np.array([2.0, -1.0, 0.0]), mask)
  # Weights 2, 2, 1, 0, 0: 25 / 9.
  assert values['advantage/trained_share'] == pytest.approx(0.6)
  assert values['advantage/effective_tokens'] == pytest.approx(25 / 9)
  # Mean 3 / 5, of squares 9 / 5.
  assert values['advantage/std'] == pytest.approx((9 / 5 - 9 / 25) ** 0.5)
  zeros = metrics.effective_tokens(np.zeros((3, 2)), mask)
  assert zeros == {
    'advantage/trained_share': 0,
    'advantage/effective_tokens': 0,
    'advantage/std': 0,
  }
  empty = metrics.effective_tokens(np.ones((3, 2)), mask & False)
  assert empty == zeros


FULL = """
import resource, sys
from gigpo_jax import metrics
writer = metrics.Writer(sys.argv[1])
size = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
  for iteration in range(10_000):
    writer.write(iteration, {'a': 1.0, 'b': 2.0})
except OSError as error:
  print(error.strerror, iteration)
"""


def test_full_disk_raises_without_waiting(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', FULL, str(tmp_path), '20000'],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.stdout.startswith('File too large'), done.stderr
  # All lines written before the error are complete.
  lines = metrics.read(tmp_path)
  assert len(lines) >= int(done.stdout.split()[-1])
  assert [line['iteration'] for line in lines] == list(range(len(lines)))


def test_failed_episodes_are_counted_by_cause_and_reported():
  def episode(index, failure):
    return trajectory.Trajectory(
      base.Task('train', index), 'a', 0, 0, (_step(0, True, 2),), failure
    )

  episodes = [
    episode(0, ''),
    episode(1, 'hung: step of env 1 took longer than 60 s'),
    episode(2, 'died: exit code 3'),
    episode(3, 'hung: step of env 3 took longer than 60 s'),
  ]
  values = metrics.summarize(episodes)
  assert values['train/failed_episodes'] == 3
  assert values['train/failed_episodes/hung'] == 2
  assert values['train/failed_episodes/died'] == 1
  assert metrics.failure_report(episodes) == (
    '3 of 4 episodes failed: 1 died, such as train/2 (exit code 3); 2 hung, '
    'such as train/1 (step of env 1 took longer than 60 s)'
  )
  assert metrics.failure_report(episodes[:1]) == ''
  metrics.stop_if_failed(episodes[:1], 0.0)
  share = sum(bool(t.failure) for t in episodes) / len(episodes)
  metrics.stop_if_failed(episodes, share)
  with pytest.raises(errors.RunError, match='pool.max_failed_share=0.1: '):
    metrics.stop_if_failed(episodes, 0.1)


@pytest.mark.parametrize(
  ('failures', 'advice'),
  [
    (('raised: no door (env.py:3)',), 'fix the environment or its data, then'),
    (
      ('garbage: reward.functions: brevity returned 1',),
      'fix the reward function, then rerun',
    ),
    (
      ('raised: no door', 'raised: reward.functions: brevity raised KeyError'),
      'fix the environment or its data and the reward function, then rerun',
    ),
  ],
)
def test_the_advice_names_what_failed(failures, advice):
  episodes = [
    trajectory.Trajectory(base.Task('train', n), 'a', 0, 0, (), failure)
    for n, failure in enumerate(failures)
  ]
  with pytest.raises(errors.RunError, match=advice) as error:
    metrics.stop_if_failed(episodes, 0.5)
  for n, failure in enumerate(failures):
    reason = failure.partition(': ')[2]
    assert f'such as train/{n} ({reason})' in str(error.value)


class _Remote:
  """A fake of the wandb package and of a wandb run."""

  def __init__(self, key: str | None = None):
    self.api = types.SimpleNamespace(api_key=key)
    self.opened, self.logged, self.finished = [], [], 0

  def Settings(self, **settings):  # noqa: N802
    return settings

  def init(self, **arguments):
    self.opened.append(arguments)
    return self

  def log(self, values, step):
    self.logged.append((step, values))

  def finish(self):
    self.finished += 1


@pytest.mark.parametrize(
  ('key', 'variable', 'mode'),
  [
    (None, None, 'offline'),
    ('secret', None, 'online'),
    ('secret', 'disabled', 'disabled'),
  ],
)
def test_wandb_gets_the_same_metrics(
  tmp_path, monkeypatch, key, variable, mode
):
  remote = _Remote(key)
  monkeypatch.setitem(sys.modules, 'wandb', remote)
  monkeypatch.delenv('WANDB_MODE', raising=False)
  if variable:
    monkeypatch.setenv('WANDB_MODE', variable)
  for first in (0, 1):
    writer = metrics.Writer(
      tmp_path, first_iteration=first, wandb='gigpo', config={'seed': 3}
    )
    writer.write(first, {'loss/total': 0.5, 'ratio/max': math.inf})
    writer.close()
  assert remote.logged == [(0, {'loss/total': 0.5}), (1, {'loss/total': 0.5})]
  assert remote.finished == 2
  first, second = remote.opened
  # A resumed run continues the same wandb run.
  assert first == second
  assert first['mode'] == mode and first['project'] == 'gigpo'
  assert first['config'] == {'seed': 3} and len(first['id']) == 8


@pytest.mark.slow
def test_real_wandb_stores_an_offline_run(tmp_path):
  pytest.importorskip('wandb')
  code = (
    'import sys\nfrom gigpo_jax import metrics\n'
    'writer = metrics.Writer(sys.argv[1], wandb="gigpo")\n'
    'writer.write(0, {"loss/total": 0.5})\nwriter.close()'
  )
  subprocess.run(
    [sys.executable, '-c', code, str(tmp_path)],
    env=os.environ | {'WANDB_MODE': 'offline'},
    check=True,
    timeout=120,
  )
  assert list((tmp_path / 'wandb').glob('offline-run-*/*.wandb'))
