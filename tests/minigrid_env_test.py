"""Tests of envs/minigrid_env.py: descriptions, states, the expert."""

import numpy as np
import pytest

import envs
from envs import base

pytest.importorskip('minigrid')

from minigrid.core import world_object as things

from envs import minigrid_env

TASK = base.Task('train', 1)
LOCAL = 'BabyAI-GoToLocalS6N3-v0'


def _respond(action: str) -> str:
  return f'<think>so</think><action>{action}</action>'


@pytest.fixture(name='room')
def fixture_room():
  """Returns an environment in an empty room, the agent in its middle."""
  env = envs.make('minigrid', id='MiniGrid-Empty-8x8-v0', anchor='state')
  env.reset(TASK)
  level = env._level
  level.grid.set(6, 6, None)  # the goal
  level.agent_pos, level.agent_dir = np.array([3, 4]), 3  # up
  return env


def test_objects_are_described_relative_to_the_agent(room):
  level = room._level
  level.put_obj(things.Key('red'), 2, 2)
  level.put_obj(things.Door('blue', is_locked=True), 3, 3)
  level.put_obj(things.Lava(), 5, 4)
  assert minigrid_env.describe(level) == (
    'You see a locked blue door 1 step forward; lava 2 steps right; '
    'a wall 3 steps left; a red key 2 steps forward and 1 step left; a wall 4 '
    'steps forward. You carry nothing.'
  )
  # A quarter turn to the right: forward becomes left.
  level.agent_dir = 0
  text = minigrid_env.describe(level)
  assert 'a locked blue door 1 step left' in text
  assert 'lava 2 steps forward' in text and 'red key' not in text
  level.carrying = things.Ball('green')
  assert minigrid_env.describe(level).endswith('You carry a green ball.')


def test_the_state_tells_apart_what_the_agent_cannot_see(room):
  level = room._level
  box = things.Box('red')
  level.put_obj(box, 2, 6)

  def states(*changes):
    found = [minigrid_env.state(level)]
    for change in changes:
      change()
      found.append(minigrid_env.state(level))
    return found

  different = states(
    lambda: setattr(box, 'contains', things.Key('green')),
    lambda: setattr(box, 'contains', things.Key('grey')),
    lambda: setattr(level, 'carrying', things.Ball('red')),
    lambda: setattr(level, 'agent_dir', 2),
    lambda: setattr(level, 'agent_pos', np.array([3, 5])),
    lambda: level.put_obj(things.Ball('red'), 1, 1),
  )
  assert len(set(different)) == 7
  same = states(lambda: setattr(level, 'step_count', 50))
  assert same[0] == same[1]


def test_the_state_has_the_parts_of_a_mission_that_are_done():
  env = envs.make('minigrid', id='BabyAI-GoToSeqS5R2-v0', anchor='state')
  for index in range(20):
    first = env.reset(base.Task('train', index))
    if 'done: (False, False)' in first.anchor:
      break
  instruction = env._level.instrs
  instruction.a_done = 'success'
  assert 'done: (success, False)' in minigrid_env.state(env._level)


def test_equal_actions_give_equal_episodes():
  env = envs.make('minigrid', id=LOCAL, anchor='state')
  actions = ['go forward', 'turn left', 'jump', 'go forward', 'turn right']

  def play():
    return [env.reset(TASK), *(env.step(_respond(a)) for a in actions)]

  first, *results = play()
  assert play() == [first, *results]
  assert [r.valid for r in results] == [True, True, False, True, True]
  # A wrong action changes nothing but the time.
  assert results[1].observation.anchor == results[2].observation.anchor
  other = envs.make('minigrid', id=LOCAL).reset(TASK)
  assert other.text == other.anchor == first.text != first.anchor


def test_the_expert_succeeds_and_its_mistakes_are_reproducible():
  env = envs.make('minigrid', id=LOCAL, anchor='state', max_steps=30)
  for index in range(10):
    task = base.Task('valid', index)
    steps = list(env.demonstrate(task, noise=0.0, seed=0))
    env.reset(task)
    *_, last = (env.step(response) for _, response in steps)
    assert last.success and last.done and last.reward == 10.0
    assert 0 < last.score < 1 and last.final_anchor
  noisy = [list(env.demonstrate(TASK, noise=0.5, seed=3)) for _ in range(2)]
  assert noisy[0] == noisy[1] != list(env.demonstrate(TASK, noise=0, seed=3))


def test_lava_and_the_step_limit_end_episodes(room):
  room._level.put_obj(things.Lava(), 3, 3)
  result = room.step(_respond('go forward'))
  assert result.done and not result.success and result.score == 0
  env = envs.make('minigrid', id=LOCAL, max_steps=2)
  env.reset(TASK)
  env.step('')
  assert env.step('').done


def test_a_mission_that_the_agent_must_end_succeeds_with_done():
  env = envs.make('minigrid', id='MiniGrid-GoToDoor-5x5-v0')
  first = env.reset(TASK)
  assert 'done: ' in first.prompt
  x, y = env._level.target_pos
  last = env._level.width - 1
  env._level.agent_pos = min(max(x, 1), last - 1), min(max(y, 1), last - 1)
  result = env.step(_respond('done'))
  assert result.valid and result.success and result.done


def test_levels_of_baby_ai_end_by_themselves():
  env = envs.make('minigrid', id=LOCAL)
  assert 'done: ' not in env.reset(TASK).prompt
  assert not env.step(_respond('done')).valid


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    (None, 'env.id=None: must name a level'),
    ('BabyAI-Nothing-v0', 'env.id=BabyAI-Nothing-v0: cannot be made'),
    ('CartPole-v1', 'env.id=CartPole-v1: no level of MiniGrid'),
  ],
)
def test_wrong_levels_are_refused_in_one_line(name, message):
  with pytest.raises(ValueError, match=message) as e:
    envs.tasks('minigrid', 'train', id=name)
  assert len(str(e.value).splitlines()) == 1
  assert list(envs.check_installation('minigrid', {'id': name}))


def test_only_babyai_has_an_expert():
  env = envs.make('minigrid', id='MiniGrid-Empty-5x5-v0')
  with pytest.raises(ValueError, match='only BabyAI levels have an expert'):
    next(env.demonstrate(TASK, noise=0, seed=0))
