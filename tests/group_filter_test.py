"""Tests of the group filter, its refills and the counts of samples."""

import dataclasses
import types

import numpy as np
import pytest

from envs import base
from gigpo_jax import (
  algorithms,
  carry_over,
  group_filter,
  rollout,
  tasks,
  trajectory,
)
from gigpo_jax import metrics as metrics_lib
from gigpo_jax.run import collection
from gigpo_jax.runtime import errors


def episode(task, group, member, reward, turns=2):
  step = trajectory.Step(
    prompt_ids=np.array([1]),
    completion_ids=np.array([1, 2, 3]),
    log_probs=np.zeros(3, np.float32),
    truncated=False,
    prompt_shortened=False,
    anchor='',
    observation='',
    response='',
    result=base.StepResult(None, 0.0, True, '', False, False),
  )
  last = base.StepResult(None, reward, True, '', reward > 0, True)
  steps = [step] * (turns - 1) + [
    trajectory.Step(**{**vars(step), 'result': last})
  ]
  return trajectory.Trajectory(task, '', group, member, tuple(steps))


def make_play(rewards):
  """Returns a function that runs groups of two with rewards by task index."""

  def play(batch, position):
    del position
    return [
      episode(task, group, member, rewards[task.index][member])
      for group, task in enumerate(batch)
      for member in range(2)
    ]

  return play


class InOrder(tasks.TaskSampler):
  """Iterations use tasks 0 and 1, 2 and 3, ..; refills use 40 and 41, .."""

  def at(self, iteration):
    first = 2 * iteration
    if iteration >= 1 << 20:
      first = 40 + 2 * (iteration - (1 << 20))
    return [base.Task('train', first + n) for n in range(2)]


STREAM = InOrder('train', 100, 2, 0)


def run(rewards, refilled=(), iteration=0, **kwargs):
  rules = group_filter.GroupFilter(drop_zero_variance=True, **kwargs)
  by_task = dict(enumerate(rewards)) | dict(enumerate(refilled, 40))
  return collect(make_play(by_task), rules, iteration)


def collect(play, rules, iteration):
  return group_filter.collect(
    play(STREAM.at(iteration), iteration),
    (play(STREAM.at(n), n) for n in rules.refills(iteration)),
    rules,
    groups=2,
    iteration=iteration,
  )


def test_zero_variance_groups_are_replaced():
  collected = run([(0, 0), (0, 10)], [(10, 10), (10, 0), (0, 10), (0, 10)])
  assert [t.task.index for t in collected.kept] == [1, 1, 41, 41]
  assert [t.group for t in collected.kept] == [0, 0, 1, 1]
  assert [t.task.index for t in collected.episodes] == [
    0,
    0,
    1,
    1,
    40,
    40,
    41,
    41,
  ]
  assert collected.metrics == {
    'filter/refills': 1,
    'filter/groups_kept': 2,
    'filter/nonzero_variance_share': 0.5,
  }


def test_refills_are_bounded():
  collected = run([(0, 0), (0, 10)], [(10, 10)] * 4, max_refills=2)
  assert [t.task.index for t in collected.kept] == [1, 1]
  assert (
    len(collected.episodes) == 12 and collected.metrics['filter/refills'] == 2
  )
  collected = run([(0, 0)] * 2, [(0, 0)] * 4, max_refills=2)
  assert (
    collected.kept == collected.indices == [] and len(collected.episodes) == 12
  )
  assert collected.metrics['filter/groups_kept'] == 0


def test_failed_refills_do_not_end_the_run():
  def play(batch, position):
    episodes = make_play([(0, 0)] * 60)(batch, position)
    if position < 1 << 20:
      return episodes
    return [dataclasses.replace(t, failure='died') for t in episodes]

  rules = group_filter.GroupFilter(drop_zero_variance=True)
  collected = collect(play, rules, 0)
  assert len(collected.episodes) == 12 and not collected.kept


def test_excess_groups_are_dropped():
  collected = run([(0, 10), (0, 0)], [(0, 10), (10, 0)])
  assert [t.task.index for t in collected.kept] == [0, 0, 40, 40]


def test_warmup_iterations_drop_nothing():
  collected = run(
    [(0, 0)] * 20, iteration=1, warmup_iterations=2, max_refills=1
  )
  assert collected.kept == collected.episodes and not collected.metrics
  # The same tasks as without a filter.
  assert [t.task.index for t in collected.episodes] == [2, 2, 3, 3]


def test_refills_use_distinct_positions():
  rules = group_filter.GroupFilter(drop_zero_variance=True, max_refills=2)
  positions = [position for i in range(9) for position in rules.refills(i)]
  assert len({*positions, *range(9)}) == 27
  assert not group_filter.GroupFilter().refills(5)


def test_failed_episodes_have_no_variance():
  group = [episode(base.Task('train', 0), 0, n, 10.0 * n) for n in range(2)]
  assert group_filter.has_variance(group)
  failed = trajectory.Trajectory(**{**vars(group[0]), 'failure': 'died'})
  assert not group_filter.has_variance([failed, group[1]])


def test_spent_counts():
  spent = group_filter.SampleCounts.of(
    run([(0, 0), (0, 10)], [(0, 10), (0, 0)]).episodes
  )
  assert spent.metrics() == {
    'spent/episodes': 8,
    'spent/env_steps': 16,
    'spent/tokens': 48,
  }


@pytest.mark.parametrize(
  ('iteration', 'turns'), [(0, 10), (99, 10), (100, 20), (250, 30)]
)
def test_turn_limit_schedule(iteration, turns):
  schedule = ((0, 10), (100, 20), (200, 30))
  assert group_filter.max_turns(schedule, iteration) == turns


def test_empty_schedule_has_no_limit():
  assert group_filter.max_turns((), 5) is None
  assert group_filter.max_turns(((10, 5),), 9) is None


def test_rounding_is_no_variance():
  # 0.1 + 0.2 - 0.3 is 6e-17.
  first, *_ = episode(base.Task('train', 0), 0, 0, 0.0).steps
  steps = [
    dataclasses.replace(
      first, result=dataclasses.replace(first.result, reward=r)
    )
    for r in (0.1, 0.2, -0.3)
  ]
  group = [episode(base.Task('train', 0), 0, n, 0.0) for n in range(2)]
  group[0] = dataclasses.replace(group[0], steps=tuple(steps))
  assert group[0].reward != 0
  assert not group_filter.has_variance(group)


def collect_iteration(run_batches, rules, **options):
  """Returns groups and metrics of iteration 0 with faked episodes."""
  sections = {'groups': 2, 'horizon': ()}
  parts = types.SimpleNamespace(
    config=types.SimpleNamespace(rollout=types.SimpleNamespace(**sections)),
    learner=types.SimpleNamespace(base={}),
    group_size=2,
    sampling=None,
    carry_over=carry_over.CarryOver(),
    group_filter=rules,
    tasks=STREAM,
    algorithm=algorithms.make('grpo'),
    stop_if_failed=lambda played: metrics_lib.stop_if_failed(played, 0.25),
    eval_batch='evaluation',
  )
  runner = types.SimpleNamespace(
    run_batches=run_batches,
    metrics=dict,
    sampler=types.SimpleNamespace(release=lambda: None),
  )
  state = types.SimpleNamespace(policy=types.SimpleNamespace(params={}))
  return collection.collect(parts, runner, state, 0, **options)


def test_the_statistics_of_a_rollout_include_its_refills():
  calls, streams = [], []

  def run_batches(params, batches, *, is_continued=False, **options):
    del params, options
    calls.append(is_continued)
    (made,) = batches
    streams.append(made.stream)
    rewards = {task.index: (0, 10 * (len(calls) > 2)) for task in made.tasks}
    return [make_play(rewards)(made.tasks, 0)]

  rules = group_filter.GroupFilter(drop_zero_variance=True)
  groups, metrics = collect_iteration(run_batches, rules)
  # Without variance in the first two batches, the third one is kept.
  assert calls == [False, True, True]
  # A task that is drawn again has other random numbers.
  assert streams == [(rollout.TRAIN, n) for n in (0, *rules.refills(0))]
  assert len(groups.kept) == 4 and metrics['filter/refills'] == 2


@pytest.mark.parametrize('failed', ['training', 'evaluation'])
def test_failed_episodes_of_a_rollout_stop_the_run(failed):
  def run_batches(params, batches, **options):
    del params, options
    rewards = dict.fromkeys(range(4), (0.0, 10.0))
    played = {
      'training': make_play(rewards)(batches[0].tasks, 0),
      batches[1]: make_play(rewards)([base.Task('test', 0)], 0),
    }
    played[failed] = [
      dataclasses.replace(t, failure='worker died') for t in played[failed]
    ]
    return list(played.values())

  rules = group_filter.GroupFilter()
  count = {'training': 4, 'evaluation': 2}[failed]
  with pytest.raises(errors.RunError, match=f'{count} of {count} episodes'):
    collect_iteration(run_batches, rules, with_evaluation=True)
