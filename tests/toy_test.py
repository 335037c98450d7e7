"""Tests of envs/toy.py: the behaviour that other tests rely on."""

import pytest

import envs
from envs import base, toy

RIGHT = '<think>on</think><action>right</action>'
LEFT = '<think>back</think><action>left</action>'


def _play(env: toy.Env, index: int, responses: list[str]):
  observations, results = [env.reset(base.Task('train', index))], []
  for response in responses:
    results.append(env.step(response))
    observations.append(results[-1].observation)
  return observations, results


def test_reaches_the_last_room():
  # Task 1 starts in room 1 of 5: three steps to room 4.
  _, results = _play(envs.make('toy'), 1, [RIGHT] * 3)
  assert [r.reward for r in results] == [0, 0, 10]
  assert [r.done for r in results] == [False, False, True]
  assert results[-1].success and results[-1].observation is None


def test_walking_back_gives_the_same_anchor_and_another_prompt():
  (first, second, third), _ = _play(toy.Env(), 1, [RIGHT, LEFT])
  assert first.anchor == third.anchor != second.anchor
  assert first.prompt != third.prompt
  assert first.short_prompt == third.short_prompt


def test_the_step_limit_ends_an_episode_without_success():
  _, results = _play(toy.Env(max_steps=3), 0, [LEFT, RIGHT, LEFT])
  assert [r.done for r in results] == [False, False, True]
  assert not results[-1].success and results[-1].reward == 0


@pytest.mark.parametrize('response', ['', 'right', '<action>up</action>'])
def test_an_invalid_response_does_not_move_the_agent(response: str):
  (before, after), (result,) = _play(toy.Env(), 1, [response])
  assert not result.valid and before.anchor == after.anchor


def test_the_same_task_gives_the_same_observation():
  used, fresh = toy.Env(), toy.Env()
  _play(used, 2, [LEFT, LEFT])
  assert used.reset(base.Task('train', 1)) == fresh.reset(base.Task('train', 1))


def test_counts_and_types_of_tasks():
  split = envs.tasks('toy', 'train', num_tasks=6)
  assert len(split) == 6
  assert {split.task_type(index) for index in range(6)} == {'near', 'far'}


def test_unknown_faults_and_environments_are_errors():
  with pytest.raises(ValueError, match='^faults=explode: must be one of raise'):
    toy.Env(faults={0: 'explode'})
  with pytest.raises(ValueError, match='unknown; must be .*toy'):
    envs.make('alfred')
