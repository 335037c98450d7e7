"""Tests of envs/scienceworld_env.py with the real simulator."""

import shutil

import pytest

import envs
from envs import base, scienceworld_env

# py4j leaves sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
  'ignore::ResourceWarning', 'ignore::pytest.PytestUnraisableExceptionWarning'
)
NAME = 'find-non-living-thing'
OPTIONS = {'tasks': (NAME,), 'max_steps': 20}


@pytest.fixture(name='env', scope='module')
def fixture_env():
  pytest.importorskip('scienceworld')
  env = envs.make('scienceworld', **OPTIONS)
  yield env
  env.close()


@pytest.fixture(name='task', scope='module')
def fixture_task(env):
  """Returns the variation that starts in the art studio."""
  listed = envs.tasks('scienceworld', 'train', **OPTIONS)
  return base.Task('train', list(listed).index((NAME, 1)))


def _respond(action: str) -> str:
  return f'<think>so</think><action>{action}</action>'


def test_the_solution_succeeds_with_the_whole_reward(env, task, monkeypatch):
  results, step = [], env.step

  def record(response):
    results.append(step(response))
    return results[-1]

  monkeypatch.setattr(env, 'step', record)
  played = list(env.demonstrate(task, noise=0.0, seed=0))
  assert 'find a(n) non-living thing.' in played[0][0].prompt
  assert len(results) == len(played) > 2
  assert results[-1].success and results[-1].done and results[-1].score == 1
  assert sum(result.reward for result in results) == pytest.approx(10)
  assert all(result.valid for result in results)
  assert not any(result.done for result in results[:-1])
  noisy = [response for _, response in env.demonstrate(task, noise=1.0, seed=0)]
  assert noisy[::2] == [
    env._narrator.format_response('I look around.', 'look around')
  ] * (len(noisy) // 2)


def test_states_and_actions(env, task):
  first = env.reset(task)
  assert 'open OBJ' in first.actions and 'reset task' not in first.actions
  assert first.task.startswith('find a(n) non-living thing.')
  refused = ('fly away', 'reset task', 'reset  task', 'reset\ttask')
  for response in ('no tag', *map(_respond, refused)):
    assert not env.step(response).valid
  looked = env.step(_respond('look around'))
  assert looked.valid and 'the agent' in looked.observation.text
  moved = env.step(_respond('go to hallway')).observation
  back = env.step(_respond('go to art studio')).observation
  # Equal states after different texts, but for the score.
  states = [x.anchor.partition('score')[0] for x in (looked.observation, back)]
  assert states[0] == states[1] and moved.anchor != back.anchor
  assert back.text != looked.observation.text


def test_steps_do_not_list_all_valid_actions(env, task):
  env.reset(task)
  *_, info = env._simulator.step('look around')
  assert info['valid'] == [] and info['look'] and info['inv']


def test_the_first_variations_are_of_most_tasks():
  pytest.importorskip('scienceworld')
  listed = envs.tasks('scienceworld', 'valid')
  types = [listed.task_type(index) for index in range(len(listed))]
  assert len(set(types[:128])) > 0.6 * len(set(types))


def test_splits_and_unknown_tasks():
  pytest.importorskip('scienceworld')
  splits = [
    {tuple(found) for found in map(listed.__getitem__, range(len(listed)))}
    for listed in (
      envs.tasks('scienceworld', split, **OPTIONS)
      for split in ('train', 'valid', 'test')
    )
  ]
  assert all(splits)
  assert not splits[0] & splits[1] and not (splits[0] | splits[1]) & splits[2]
  with pytest.raises(ValueError, match='env.tasks=.*fly unknown; must be from'):
    envs.tasks('scienceworld', 'train', tasks=('fly',))


def test_without_java_it_is_refused_in_one_line(monkeypatch):
  pytest.importorskip('scienceworld')
  monkeypatch.setattr(shutil, 'which', lambda name: None)
  (line,) = scienceworld_env.check_installation({})
  assert 'install Java' in line
