"""Tests of evaluation: rates, intervals and comparisons of policies."""

import contextlib
import dataclasses
import io
import json
import sys

import numpy as np
import pytest
from matplotlib import pyplot

from configs import alfworld
from envs import base
from gigpo_jax import builders, evaluation, metrics, trajectory
from gigpo_jax.run import model_builders, run_config, saved_checkpoint, trial


def episode(task, success, member=0, task_type='pick', failure='', score=None):
  step = trajectory.Step(
    prompt_ids=np.array([1]),
    completion_ids=np.array([1]),
    log_probs=np.zeros(1, np.float32),
    truncated=False,
    prompt_shortened=False,
    anchor='',
    observation='',
    response='',
    result=base.StepResult(
      None, 10.0 * success, True, '', success, True, score=score
    ),
  )
  return trajectory.Trajectory(
    base.Task('valid', task), task_type, task, member, (step,), failure
  )


def test_one_episode_per_task_gives_wilson_interval():
  episodes = [episode(n, n < 3) for n in range(10)]
  rates = evaluation.summarize(episodes)
  assert rates['eval/success_rate'] == pytest.approx(0.3)
  assert (rates['eval/success_low'], rates['eval/success_high']) == (
    metrics.wilson(3, 10)
  )


def test_repeats_of_a_task_are_not_independent():
  # Five of ten tasks always succeed: the uncertainty is in the choice of tasks.
  episodes = [episode(n, n < 5, m) for n in range(10) for m in range(50)]
  low, high = evaluation.success_interval(episodes)
  wilson = metrics.wilson(250, 500)
  assert high - low > 3 * (wilson[1] - wilson[0])
  assert 0.15 <= low <= 0.25 and 0.75 <= high <= 0.85


def test_the_bootstrap_covers_95_percent():
  # Three draws from 0, 0, 1 have the sums 0 to 3 with the probabilities 8, 12,
  # 6 and 1 / 27, so that the quantile 0.975 is 3, and 0.95 would be 2.
  for wins in (1, 2):
    episodes = [episode(n, n < wins, m) for n in range(3) for m in range(2)]
    assert evaluation.success_interval(episodes) == (0, 1)


def test_pass_at_k_by_hand():
  # One success of 4: 1 - C(3, 2) / C(4, 2) = 1/2; all four: 1. Scores .2, .6
  # and .2 have three pairs, with the largest scores .6, .2 and .6.
  assert evaluation.best_at_k([0, 0, 1, 0], 2) == pytest.approx(0.5)
  assert evaluation.best_at_k([0, 0, 1, 0], 4) == 1
  assert evaluation.best_at_k([0.2, 0.6, 0.2], 2) == pytest.approx(1.4 / 3)
  assert evaluation.best_at_k([0.2, 0.6], 1) == pytest.approx(0.4)
  # C(2000, 1024) exceeds the range of floats.
  assert evaluation.best_at_k([1.0] * 2000, 1024) == 1
  assert evaluation.best_at_k([0] * 1999 + [1], 1024) == 1024 / 2000
  outcomes = {0: (1, 0, 0, 0), 1: (0, 0, 0, 0), 2: (1, 1, 1, 0)}
  metrics = evaluation.summarize(
    [
      episode(task, success, member)
      for task, successes in outcomes.items()
      for member, success in enumerate(successes)
    ]
  )
  assert metrics['eval/pass_at/2'] == pytest.approx((0.5 + 0 + 1) / 3)
  assert metrics['eval/pass_at/4'] == pytest.approx(2 / 3)
  assert 'eval/pass_at/8' not in metrics


def test_pass_at_k_needs_k_episodes_of_every_task():
  members = {0: 4, 1: 2, 2: 8}
  rates = evaluation.summarize(
    [episode(task, True, m) for task, n in members.items() for m in range(n)]
  )
  assert [k for k in rates if 'pass_at' in k] == ['eval/pass_at/2']


def test_equal_outcomes_give_wilson_interval_over_tasks():
  episodes = [episode(n, True, m) for n in range(10) for m in range(50)]
  assert evaluation.success_interval(episodes) == metrics.wilson(10, 10)
  # Half of the episodes of the only task: not rounded to a failure.
  episodes = [episode(0, m < 2, m) for m in range(4)]
  assert evaluation.success_interval(episodes) == metrics.wilson(0.5, 1)


@pytest.mark.parametrize(
  ('better', 'worse', 'p'),
  # 2 (1 + 10 + 45) / 1024; all of five: 2 / 32.
  [(8, 2, 0.109375), (2, 8, 0.109375), (5, 0, 0.0625), (3, 3, 1), (0, 0, 1)],
)
def test_sign_test_by_hand(better, worse, p):
  assert evaluation.sign_test(better, worse) == pytest.approx(p)


def test_policies_are_compared_task_by_task():
  one = [episode(n, n < 6) for n in range(10)]
  other = [episode(n, n in (0, 1, 9)) for n in range(10)]
  (comparison,) = evaluation.compare(one, other).values()
  assert comparison.difference == pytest.approx(0.3)
  assert (comparison.better, comparison.worse) == (4, 1)
  assert comparison.low < 0.3 < comparison.high
  assert comparison.p == pytest.approx(2 * 6 / 32)
  with pytest.raises(
    ValueError, match='must have the tasks of the first policy'
  ):
    evaluation.compare(one, other[:5])


def test_scores_are_compared_if_reported():
  one = [episode(n, False, score=0.75 * (n < 3)) for n in range(4)]
  other = [episode(n, False, score=0.25) for n in range(4)]
  comparisons = evaluation.compare(one, other)
  assert comparisons['score'].difference == pytest.approx((3 * 0.5 - 0.25) / 4)
  assert (comparisons['score'].better, comparisons['score'].worse) == (3, 1)
  # No task differs in success: 3.8416 / (4 + 3.8416), of Wilson's formula.
  assert comparisons['success'].difference == 0
  assert comparisons['success'].high == pytest.approx(0.48990, abs=1e-5)
  assert comparisons['success'].low == -comparisons['success'].high


def test_the_same_gap_on_all_tasks_has_an_interval():
  one, other = ([episode(n, won) for n in range(8)] for won in (True, False))
  success = evaluation.compare(one, other)['success']
  # Wilson's 3.8415 / (8 + 3.8415) below 1.
  assert success.low == pytest.approx(1 - 0.32441, abs=1e-5)
  assert (success.difference, success.high) == (1, 1)


def test_scores_of_repeats_by_hand():
  # Each task has the mean 0.5; 3.84 / (2 + 3.84) on both sides is clipped.
  scores = {0: (0.0, 1.0), 1: (0.5, 0.5)}
  rates = evaluation.summarize(
    [
      episode(task, False, member, score=score)
      for task, by_member in scores.items()
      for member, score in enumerate(by_member)
    ]
  )
  assert (rates['eval/score_low'], rates['eval/score_high']) == (0, 1)
  assert rates['eval/score_best_of/2'] == (1 + 0.5) / 2
  assert rates['eval/pass_at/2'] == 0


def test_equal_mean_scores_are_ties_whatever_the_order_of_episodes():
  scores = 0.1, 0.2, 0.3  # The rounded sums of both orders differ.
  one = [episode(0, False, m, score=x) for m, x in enumerate(scores)]
  other = [episode(0, False, m, score=x) for m, x in enumerate(scores[::-1])]
  comparison = evaluation.compare(one, other)['score']
  assert (comparison.difference, comparison.better, comparison.worse) == (
    0,
    0,
    0,
  )


def test_records_count_turns_and_invalid_responses():
  played = episode(7, True, 1, score=0.25)
  (step,) = played.steps
  invalid = dataclasses.replace(
    step, result=dataclasses.replace(step.result, valid=False)
  )
  played = dataclasses.replace(played, steps=(invalid, invalid, step))
  assert evaluation._record(played) == {
    'task': str(played.task),
    'kind': 'pick',
    'repeat': 1,
    'success': True,
    'score': 0.25,
    'turns': 3,
    'invalid': 2,
    'failure': '',
  }


def test_table_has_a_row_per_task_type(tmp_path):
  episodes = [
    episode(n, n < 2, task_type='heat' if n % 2 else 'cool') for n in range(4)
  ]
  lines = evaluation.table('mine', episodes).splitlines()
  assert [line.split('|')[2].strip() for line in lines[2:]] == [
    'all',
    'cool',
    'heat',
  ]
  assert '| 4 | 50.0% [15.0%, 85.0%]' in lines[2]
  named = [
    dataclasses.replace(e, task_type=x)
    for e, x in zip(episodes, ('all', 'cool', 'cool', 'cool'), strict=True)
  ]
  lines = evaluation.table('mine', named).splitlines()
  assert [line.split('|')[2:4] for line in lines[2:]] == [
    [' all ', ' 4 '],
    [" 'all' ", ' 1 '],
    [' cool ', ' 3 '],
  ]
  evaluation.draw({'mine': episodes, 'other': episodes}, tmp_path / 'x.png')
  assert (tmp_path / 'x.png').stat().st_size > 5000


class _ClosedPipe(io.StringIO):
  def write(self, text):
    if 'tasks' in text:
      raise BrokenPipeError
    return super().write(text)


def test_results_are_written_before_they_are_shown(tmp_path, monkeypatch):
  played = [episode(0, True)], None, None
  _play(monkeypatch, [('model', 'a')], lambda *_, keep: played)
  monkeypatch.setattr(sys, 'stdout', _ClosedPipe())
  with pytest.raises(BrokenPipeError):
    evaluation.main(alfworld.get_config('smoke'), str(tmp_path))
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ['evaluation.json', 'evaluation.png']


def _play(monkeypatch, policies, evaluate):
  """Makes `evaluation.main` evaluate these policies with a function."""
  nothing = contextlib.nullcontext()
  monkeypatch.setattr(evaluation, '_evaluate_policy', evaluate)
  monkeypatch.setattr(evaluation, '_check_policies', lambda *_: policies)
  monkeypatch.setattr(builders, 'make_pool', lambda _: nothing)
  monkeypatch.setattr(trial, 'try_environment', lambda *_: None)


def test_results_are_written_before_the_policy_is_exported(
  tmp_path, monkeypatch
):
  order = []

  def evaluate(config, source, path, pool, *, keep):
    del config, pool
    order.append((source, path, keep))
    return [episode(0, source == 'model')], None, write if keep else None

  def write(folder):
    assert (tmp_path / 'evaluation.png').exists()
    order.append(folder)
    raise OSError('full')

  policies = [('checkpoint', 'run'), ('model', 'a'), ('model', 'b')]
  _play(monkeypatch, policies, evaluate)
  export = str(tmp_path / 'export')
  with pytest.raises(OSError, match='full'):
    evaluation.main(
      alfworld.get_config('smoke'),
      str(tmp_path),
      models=['a', 'b'],
      checkpoints=['run'],
      export=export,
    )
  assert order == [
    ('model', 'a', False),
    ('model', 'b', False),
    ('checkpoint', 'run', True),
    export,
  ]
  stored = json.loads((tmp_path / 'evaluation.json').read_text())
  rates = {k: v['rates'] for k, v in stored['policies'].items()}
  assert list(rates) == ['run', 'a', 'b']
  assert [v['eval/success_rate'] for v in rates.values()] == [0, 1, 1]


def test_plot_has_labels(tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(pyplot, 'close', drawn.append)
  episodes = [episode(n, n % 2 == 0, task_type='ab'[n % 2]) for n in range(6)]
  evaluation.draw({'mine': episodes, 'x' * 200: episodes}, tmp_path / 'x.png')
  (axes,), (legend,) = drawn[0].axes, drawn[0].legends
  monkeypatch.undo()
  pyplot.close(drawn[0])
  shown = [label.get_text() for label in axes.get_xticklabels()]
  assert shown == ['all (6)', 'a (3)', 'b (3)']
  assert 'task type' in axes.get_xlabel() and '95 %' in axes.get_ylabel()
  assert [text.get_text() for text in axes.texts] == 2 * ['50', '100', '0']
  names = [text.get_text() for text in legend.get_texts()]
  assert names[0] == 'mine' and len(names[1]) < 80
  # The legend does not cover the bars.
  box = legend.get_window_extent()
  assert not box.overlaps(axes.get_window_extent())


def test_prompts_other_than_in_training_are_reported(tmp_path, capsys):
  config = alfworld.get_config('smoke')
  run_config.save(config, str(tmp_path))
  config.evaluation.num_tasks, config.seed = 3, 5
  saved_checkpoint.compare(config, str(tmp_path))
  assert not capsys.readouterr().out
  config.env.history_length, config.rollout.max_prompt_tokens = 4, 999
  saved_checkpoint.compare(config, str(tmp_path))
  line = capsys.readouterr().out
  assert 'env.history_length=4 (trained with ' in line
  assert 'rollout.max_prompt_tokens=999 (trained with ' in line


def test_a_config_without_the_model_of_a_checkpoint_is_refused(tmp_path):
  config = alfworld.get_config('smoke')
  config.model.path = 'start/policy'
  run_config.save(config, str(tmp_path))
  config.model.path = None
  with pytest.raises(ValueError, match='model.path=None: .* start/policy; set'):
    saved_checkpoint.compare(config, str(tmp_path))


def test_adapters_are_evaluated_with_their_own_network(tmp_path):
  config = alfworld.get_config('smoke')
  config.lora.rank, config.lora.alpha = 4, 8.0
  run_config.save(config, str(tmp_path))
  saved_checkpoint.compare(config, str(tmp_path))
  config.evaluation.num_tasks = 3
  saved_checkpoint.compare(config, str(tmp_path / 'checkpoints' / '3'))
  config.lora.alpha = 16.0
  with pytest.raises(ValueError, match='lora.alpha=16.0: .* trained with 8.0'):
    saved_checkpoint.compare(config, str(tmp_path))


def test_adapters_are_evaluated_with_the_weights_they_were_trained_on(tmp_path):
  config = alfworld.get_config('smoke')
  config.lora.rank = 4
  inputs = model_builders.describe_files(config)
  run_config.save(config, str(tmp_path), inputs=inputs)
  saved_checkpoint.compare(config, str(tmp_path))
  run_config.save(config, str(tmp_path), inputs=dict.fromkeys(inputs, 'other'))
  with pytest.raises(ValueError, match='model.path=.* its files have changed'):
    saved_checkpoint.compare(config, str(tmp_path))


def test_each_earlier_evaluation_has_a_folder_of_its_own(tmp_path):
  assert not evaluation._move_earlier(tmp_path)
  assert not list(tmp_path.iterdir())
  for n, name in enumerate(('evaluation.bak', 'evaluation.bak.1')):
    (tmp_path / 'evaluation.json').write_text(str(n))
    assert evaluation._move_earlier(tmp_path) == [
      f'the earlier evaluation is kept in {tmp_path}/{name}'
    ]
    assert (tmp_path / name / 'evaluation.json').read_text() == str(n)
  # Kept episodes of an evaluation that was killed.
  (tmp_path / 'evaluation' / '0').mkdir(parents=True)
  evaluation._move_earlier(tmp_path)
  assert (tmp_path / 'evaluation.bak.2' / 'evaluation' / '0').is_dir()
  assert not (tmp_path / 'evaluation').exists()
