"""Tests of task sampling: pure, without replacement, distinct per iteration."""

import itertools
import json

import numpy as np
import pytest

from envs import base
from gigpo_jax import tasks


def test_tasks_are_a_function_of_seed_and_iteration():
  first, second = (tasks.TaskSampler('train', 50, 4, 0) for _ in range(2))
  assert [first.at(i) for i in range(30)] == [
    second.at(29 - i) for i in range(30)
  ][::-1]
  other = tasks.TaskSampler('train', 50, 4, 1)
  assert [first.at(i) for i in range(5)] != [other.at(i) for i in range(5)]


def test_epochs_have_no_repeats_and_differ():
  stream = tasks.TaskSampler('train', 50, 4, 0)
  epochs = [
    [task.index for i in range(12) for task in stream.at(12 * epoch + i)]
    for epoch in range(2)
  ]
  assert all(len(set(epoch)) == 48 for epoch in epochs)
  assert epochs[0] != epochs[1]


def test_more_groups_than_tasks_are_rejected():
  with pytest.raises(ValueError, match='rollout.groups=5: more groups than'):
    tasks.TaskSampler('train', 4, 5, 0)


def test_evaluation_tasks_are_the_first_tasks():
  listed = tasks.CheckedTasks(range(5), 'toy', 'valid')
  assert len(listed.first(9)) == 5
  assert [str(t) for t in listed.first(2)] == [
    'valid/0',
    'valid/1',
  ]


def test_iterations_have_distinct_tasks_and_cover_all_tasks():
  # 10 tasks in iterations of 4: an epoch is 2 iterations, and 2 tasks are left.
  stream = tasks.TaskSampler('train', 10, 4, 0)
  drawn = [[task.index for task in stream.at(i)] for i in range(200)]
  assert all(len(set(iteration)) == 4 for iteration in drawn)
  counts = [
    sum(iteration.count(index) for iteration in drawn) for index in range(10)
  ]
  # About 20 of 100 epochs omit a given task (standard deviation 4).
  assert all(60 < count < 95 for count in counts)


def test_uncertain_tasks_are_drawn_more_often():
  stream = tasks.UncertaintySampler('train', 4, 1, 0, uniform=0.0)
  np.testing.assert_allclose(stream.chances(), 0.25)
  # 0, 4 and 8 of 8 episodes succeed: rates 0.1, 0.5 and 0.9; task 3 is new.
  outcomes = [(0, 0), (1, 4), (2, 8)]
  stream.record_outcomes(
    tasks.Outcome(base.Task('train', index), n < successes)
    for index, successes in outcomes
    for n in range(8)
  )
  stream.record_outcomes([tasks.Outcome(base.Task('valid', 3), True)])
  weights = np.array([0.09, 0.25, 0.09, 0.25])
  np.testing.assert_allclose(stream.chances(), weights / weights.sum())
  drawn = [stream.at(i)[0].index for i in range(4000)]
  frequencies = np.bincount(drawn, minlength=4) / 4000
  np.testing.assert_allclose(frequencies, weights / weights.sum(), atol=0.03)


def test_diversity_by_hand():
  # Two of three elements match in order: 1 - 2 * 2 / 6. Nothing matches: 1.
  assert tasks.diversity(['abc', 'abd']) == pytest.approx(1 / 3)
  assert tasks.diversity(['abc', 'abd', 'xyz']) == pytest.approx(7 / 9)
  assert tasks.diversity(['abc', 'abc']) == tasks.diversity(['abc']) == 0


def test_tasks_with_diverse_episodes_are_drawn_more_often():
  def make():
    return tasks.UncertaintySampler(
      'train', 3, 1, 0, uniform=0.4, diversity_weight=0.2
    )

  stream, other = make(), make()
  np.testing.assert_allclose(stream.chances(), 1 / 3)
  # One of two episodes succeeds. Those of task 0 are equal, those of task 1
  # differ; task 2 is new and has the mean diversity.
  stream.record_outcomes(
    tasks.Outcome(base.Task('train', index), n == 0, (actions[n],))
    for index, actions in enumerate(['aa', 'ab'])
    for n in range(2)
  )
  scores = 0.8 * 0.25 + 0.2 * np.array([0, 1, 0.5])
  expected = 0.4 / 3 + 0.6 * scores / scores.sum()
  np.testing.assert_allclose(stream.chances(), expected)
  assert stream.state() == {'0': [1, 2, 0.0], '1': [1, 2, 1.0]}
  other.restore(stream.state())
  np.testing.assert_array_equal(other.chances(), stream.chances())
  # The newest episodes of a task count.
  other.record_outcomes([tasks.Outcome(base.Task('train', 1), False, ('a',))])
  assert other.state()['1'] == [1, 3, 0.0]


def test_chances_do_not_depend_on_the_order_of_the_first_draws():
  def make():
    return tasks.UncertaintySampler('train', 4, 1, 0, diversity_weight=0.2)

  # Diversities 2/5, 3/5 and 2/3, whose sum rounds by order.
  actions = {0: ('abcde', 'abcxy'), 1: ('axy', 'ab'), 2: ('axyzw', 'a')}
  for order in itertools.permutations(actions):
    stream = make()
    for index in order:
      stream.record_outcomes(
        tasks.Outcome(base.Task('train', index), n == 0, tuple(texts))
        for n, texts in enumerate(actions[index])
      )
    restored = make()
    restored.restore(stream.state())
    np.testing.assert_array_equal(stream.chances(), restored.chances())


TYPES = ['easy', 'hard', 'easy', 'easy', 'hard', 'easy']


def test_stages_draw_their_types_in_epochs():
  stages = ((0, ('easy',)), (4, ()))
  stream = tasks.StageSampler('train', TYPES, 2, 0, stages)
  drawn = [[task.index for task in stream.at(i)] for i in range(7)]
  for epoch in (drawn[:2], drawn[2:4]):
    assert sorted(sum(epoch, [])) == [0, 2, 3, 5]
  assert sorted(sum(drawn[4:], [])) == list(range(6))
  again = tasks.StageSampler('train', TYPES, 2, 0, stages)
  assert [task.index for task in again.at(5)] == drawn[5]


@pytest.mark.parametrize(
  ('stages', 'message'),
  [
    ((), 'must be .first iteration, types., by increasing iteration from 0'),
    (((1, ()),), 'by increasing iteration from 0'),
    (((0, ()), (0, ())), 'by increasing iteration from 0'),
    (((0, ('odd',)),), 'no task has the type odd; must be of easy, hard'),
    (((0, ('hard',)),), 'from 0 on has 2 tasks; must have rollout.groups=3'),
  ],
)
def test_refused_stages(stages, message):
  with pytest.raises(ValueError, match=message):
    tasks.StageSampler('train', TYPES, 3, 0, stages)


@pytest.mark.parametrize('drawn', [(0,), (0, 0), (0, 6), (-1, 0)])
def test_unusable_draws_of_a_later_iteration_are_refused(drawn):
  stream = tasks.TaskSampler(
    'train', 6, 2, 0, lambda iteration, _: drawn if iteration else (4, 5)
  )
  assert [task.index for task in stream.at(0)] == [4, 5]
  with pytest.raises(ValueError, match='in iteration 1; must be as many diff'):
    stream.at(1)


def test_outcomes_are_restored():
  first, second = (
    tasks.UncertaintySampler('train', 20, 3, 0) for _ in range(2)
  )
  first.record_outcomes(
    tasks.Outcome(base.Task('train', index), index == 5) for index in (5, 7)
  )
  second.restore(first.state())
  assert first.state() == {'5': [1, 1], '7': [0, 1]}
  assert [first.at(i) for i in range(9)] == [second.at(i) for i in range(9)]
  assert all(len(set(first.at(i))) == 3 for i in range(9))


def test_a_weight_of_the_diversity_may_be_added_at_a_resume():
  task = base.Task('train', 2)
  before = tasks.UncertaintySampler('train', 4, 1, seed=0)
  before.record_outcomes([tasks.Outcome(task, success=True)])
  state = json.loads(json.dumps(before.state()))
  assert state == {'2': [1, 1]}
  after = tasks.UncertaintySampler('train', 4, 1, 0, diversity_weight=0.5)
  after.restore(state)
  assert after.state() == state
  after.record_outcomes(
    [tasks.Outcome(task, success=True, actions=(x,)) for x in 'ab']
  )
  assert after.state() == {'2': [3, 3, 1.0]}
  before.restore(json.loads(json.dumps(after.state())))
  assert before.state() == {'2': [3, 3]}
  fewer = tasks.UncertaintySampler('train', 2, 1, seed=0)
  fewer.restore(state)
  assert fewer.state() == {}


def test_tasks_without_a_chance_are_drawn_at_random():
  sampler = tasks.UncertaintySampler(
    'train', 6, 3, seed=0, uniform=0.0, diversity_weight=1.0
  )
  outcomes = [
    tasks.Outcome(base.Task('train', n), success=True, actions=actions)
    for n in range(6)
    for actions in (('a',), ('b',) if n == 5 else ('a',))
  ]
  sampler.record_outcomes(outcomes)
  np.testing.assert_array_equal(sampler.chances(), [0, 0, 0, 0, 0, 1])
  drawn = [[task.index for task in sampler.at(n)] for n in range(20)]
  assert {indices[0] for indices in drawn} == {5}
  others = {index for indices in drawn for index in indices[1:]}
  assert others == {0, 1, 2, 3, 4}
