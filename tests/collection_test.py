"""Which groups an iteration trains on, and what it has cost."""

import dataclasses

import numpy as np
import pytest

from envs import base
from gigpo_jax import collection, tasks, trajectory


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


def player(rewards):
  """Plays groups of two; their rewards by the task's index."""

  def play(asked, place):
    del place
    return [
      episode(task, group, member, rewards[task.index][member])
      for group, task in enumerate(asked)
      for member in range(2)
    ]

  return play


class InOrder(tasks.TaskSampler):
  """Iterations take tasks 0 and 1, 2 and 3, ..; refills 40 and 41, .."""

  def at(self, iteration):
    place = 2 * iteration
    if iteration >= 1 << 20:
      place = 40 + 2 * (iteration - (1 << 20))
    return [base.Task('train', place + n) for n in range(2)]


STREAM = InOrder('train', 100, 2, 0)


def run(rewards, refilled=(), iteration=0, **kwargs):
  chosen = collection.Filter(without_spread=True, **kwargs)
  by_task = dict(enumerate(rewards)) | dict(enumerate(refilled, 40))
  return collection.collect(
    player(by_task), STREAM, chosen, groups=2, iteration=iteration
  )


def test_groups_without_spread_are_played_again_and_numbered():
  found = run([(0, 0), (0, 10)], [(10, 10), (10, 0), (0, 10), (0, 10)])
  assert [t.task.index for t in found.kept] == [1, 1, 41, 41]
  assert [t.group for t in found.kept] == [0, 0, 1, 1]
  assert [t.task.index for t in found.played] == [0, 0, 1, 1, 40, 40, 41, 41]
  assert found.metrics == {
    'filter/refills': 1,
    'filter/groups_kept': 2,
    'filter/groups_with_spread_share': 0.5,
  }


def test_refills_are_bounded_and_what_there_is_is_trained_on():
  found = run([(0, 0), (0, 10)], [(10, 10)] * 4, max_refills=2)
  assert [t.task.index for t in found.kept] == [1, 1]
  assert len(found.played) == 12 and found.metrics['filter/refills'] == 2
  found = run([(0, 0)] * 2, [(0, 0)] * 4, max_refills=2)
  assert found.kept == found.places == [] and len(found.played) == 12
  assert found.metrics['filter/groups_kept'] == 0


def test_a_refill_that_fails_does_not_end_the_run():
  def play(asked, place):
    found = player([(0, 0)] * 60)(asked, place)
    if place < 1 << 20:
      return found
    return [dataclasses.replace(t, failure='died') for t in found]

  chosen = collection.Filter(without_spread=True)
  found = collection.collect(play, STREAM, chosen, groups=2, iteration=0)
  assert len(found.played) == 12 and not found.kept


def test_more_than_wanted_are_dropped():
  found = run([(0, 10), (0, 0)], [(0, 10), (10, 0)])
  assert [t.task.index for t in found.kept] == [0, 0, 40, 40]


def test_nothing_is_dropped_before_the_warm_up_is_over():
  found = run([(0, 0)] * 20, iteration=1, warmup_iterations=2, max_refills=1)
  assert found.kept == found.played and not found.metrics
  # As without a filter.
  assert [t.task.index for t in found.played] == [2, 2, 3, 3]


def test_refills_of_iterations_are_different_places():
  chosen = collection.Filter(without_spread=True, max_refills=2)
  places = [place for i in range(9) for place in chosen.positions(i)]
  assert len(set(places)) == 27
  assert [chosen.positions(i)[0] for i in range(9)] == list(range(9))
  assert collection.Filter().positions(5) == [5]


def test_a_failed_episode_gives_no_spread():
  part = [episode(base.Task('train', 0), 0, n, 10.0 * n) for n in range(2)]
  assert collection.spread(part)
  broken = trajectory.Trajectory(**{**vars(part[0]), 'failure': 'died'})
  assert not collection.spread([broken, part[1]])


def test_what_was_spent():
  spent = collection.Spent()
  spent.add(run([(0, 0), (0, 10)], [(0, 10), (0, 0)]).played)
  assert spent.metrics() == {
    'spent/episodes': 8,
    'spent/env_steps': 16,
    'spent/tokens': 48,
  }


@pytest.mark.parametrize(
  ('iteration', 'turns'), [(0, 10), (99, 10), (100, 20), (250, 30)]
)
def test_horizon(iteration, turns):
  schedule = ((0, 10), (100, 20), (200, 30))
  assert collection.horizon(schedule, iteration) == turns


def test_no_schedule_is_no_limit():
  assert collection.horizon((), 5) is None
  assert collection.horizon(((10, 5),), 9) is None
