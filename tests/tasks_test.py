import collections

import pytest

from envs import base
from gigpo_jax import tasks


def indices(sampler, iterations):
  return [[task.index for task in sampler.at(i)] for i in iterations]


def test_an_epoch_plays_every_task_once():
  sampler = tasks.TaskSampler('train', 12, 4, seed=0)
  for epoch in range(3):
    played = indices(sampler, range(3 * epoch, 3 * epoch + 3))
    assert sorted(sum(played, [])) == list(range(12))


def test_epochs_and_seeds_differ():
  sampler = tasks.TaskSampler('train', 12, 12, seed=0)
  first, second = indices(sampler, [0, 1])
  assert first != second
  other = tasks.TaskSampler('train', 12, 12, seed=1)
  assert indices(other, [0, 1]) != [first, second]


def test_an_iteration_is_a_function_of_seed_and_number():
  forward = indices(tasks.TaskSampler('train', 10, 3, seed=7), range(9))
  again = tasks.TaskSampler('train', 10, 3, seed=7)
  assert indices(again, reversed(range(9))) == forward[::-1]


def test_tasks_of_an_iteration_are_distinct_when_epochs_do_not_divide():
  sampler = tasks.TaskSampler('train', 10, 4, seed=0)
  played = indices(sampler, range(200))
  assert all(len(set(each)) == 4 for each in played)
  # 200 iterations are 100 epochs of 8 out of 10; each task is left out of a
  # fifth of them.
  counts = collections.Counter(sum(played, []))
  assert set(counts) == set(range(10))
  assert 60 < min(counts.values()) and max(counts.values()) < 95


def test_tasks_carry_the_split():
  (task,) = tasks.TaskSampler('train', 1, 1, seed=0).at(5)
  assert task == base.Task('train', 0)


def test_more_groups_than_tasks_is_refused_in_one_line():
  with pytest.raises(ValueError, match=r'^rollout\.groups=5: .* has 4$'):
    tasks.TaskSampler('train', 4, 5, seed=0)


def test_panel_is_the_first_tasks_in_order():
  assert [str(t) for t in tasks.panel('eval', 3)] == [
    'eval/0',
    'eval/1',
    'eval/2',
  ]
