"""Tests of envs/gymnasium_env.py: text rules, episodes, invalid arguments."""

import re
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envs
from envs import base, gymnasium_actions, gymnasium_env, mountain_car

TASK = base.Task('train', 3)
LAKE = {
  'id': 'FrozenLake-v1',
  'options': {'is_slippery': False},
  'actions': ('left', 'down', 'right', 'up'),
}


def _respond(action: str) -> str:
  return f'<think>so</think><action>{action}</action>'


class Riddle(gymnasium.Env):
  """Has a Text action space and Dict observations; `yes` is the goal."""

  action_space = spaces.Text(8)
  observation_space = spaces.Dict(
    {'asked': spaces.Text(20), 'times': spaces.Discrete(9)}
  )

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self._times = 0
    return self._observe(), {}

  def step(self, action):
    self._times += 1
    return self._observe(), float(action == 'yes'), action == 'yes', False, {}

  def _observe(self):
    return {'asked': 'Is it', 'times': self._times}


class Shout(Riddle):
  action_space = spaces.Text(8, charset='YES')

  def step(self, action):
    return self._observe(), float(action == 'YES'), action == 'YES', False, {}


class Picture(Riddle):
  action_space = spaces.Discrete(2, start=3)
  observation_space = spaces.Box(0, 255, (40, 40, 3), np.uint8)

  def _observe(self):
    return np.zeros((40, 40, 3), np.uint8)

  def step(self, action):
    assert action in (3, 4)
    return self._observe(), float(action == 4), action == 4, False, {}


gymnasium.register('Riddle-v0', Riddle, disable_env_checker=True)
gymnasium.register('Shout-v0', Shout, disable_env_checker=True)
gymnasium.register('Picture-v0', Picture, disable_env_checker=True)


class Knobs(Riddle):
  action_space = spaces.Dict({'a': spaces.Discrete(2)})


gymnasium.register('Knobs-v0', Knobs, disable_env_checker=True)


def push_by_one(observation, noise, rng) -> str:
  return _respond('1')


def brightness(picture) -> str:
  return f'It is {picture.mean():.0f} bright.'


@pytest.mark.parametrize(
  ('space', 'value', 'names', 'text'),
  [
    (spaces.Discrete(5), np.int64(3), (), '3'),
    (spaces.Text(9), 'a word', (), 'a word'),
    (spaces.MultiBinary(3), np.array([1, 0, 1]), (), '1, 0, 1'),
    (
      spaces.Tuple([spaces.Discrete(32), spaces.Discrete(11)]),
      (13, 10),
      ('sum', 'card'),
      'sum: 13\ncard: 10',
    ),
    (
      spaces.Box(-9, 9, (2,)),
      np.array([0.123456, -2.0], np.float32),
      (),
      '0.1235, -2',
    ),
    (
      spaces.Box(0, 9, (2, 2), np.int64),
      np.array([[1, 2], [3, 4]]),
      (),
      '1 2\n3 4',
    ),
    (
      spaces.Dict({'a': spaces.Discrete(3), 'b': spaces.Text(3)}),
      {'a': 1, 'b': 'x'},
      (),
      'a: 1\nb: x',
    ),
  ],
)
def test_observations_become_text_by_rule(space, value, names, text):
  assert gymnasium_env.to_text(space, value, names) == text


@pytest.mark.parametrize(
  ('space', 'names', 'shown', 'good', 'bad'),
  [
    (
      spaces.Box(np.array([-1, 0]), np.array([1, 9]), dtype=np.float32),
      ('steer', 'gas'),
      '<steer: number from -1 to 1>, <gas: number from 0 to 9>',
      {'-0.5, 9': [-0.5, 9], '+1e0 ,.25': [1, 0.25]},
      ('', '0', '0, 1, 2', '0, 9.1', '-1.01, 0', 'nan, 0', '0 1', 'x, 1'),
    ),
    (
      spaces.Box(-np.inf, np.inf, (1,)),
      (),
      '<number>',
      {'-1e6': [-1e6]},
      # float32 has no 1e39, and float64 no 1e999.
      ('inf', '--1', '1,', '1e39', '1e999'),
    ),
    (
      # In float32, 0.7 is a little smaller. Bounds have all their digits.
      spaces.Box(-np.pi, 0.7, (1,)),
      (),
      '<number from -3.1415927 to 0.7>',
      {'0.7': [0.7], '-3.1415927': [-np.pi]},
      ('0.7001', '-3.142'),
    ),
    (
      spaces.MultiDiscrete([3, 2], start=[1, 0]),
      (),
      '<integer from 1 to 3>, <integer from 0 to 1>',
      {'3, 0': [3, 0], '1.0,1': [1, 1]},
      ('0, 0', '4, 0', '1.5, 0', '3'),
    ),
    (
      spaces.MultiBinary((2, 2)),
      (),
      ', '.join(['<integer from 0 to 1>'] * 4),
      {'1, 0, 0, 1': [[1, 0], [0, 1]]},
      ('1, 0, 0, 2', '1, 0'),
    ),
  ],
)
def test_numbers_are_actions(space, names, shown, good, bad):
  form = gymnasium_actions.make(space, names)
  assert form.shown == (shown,)
  for text, values in good.items():
    action = form.parse(text)
    assert space.contains(action), text
    np.testing.assert_allclose(action, values)
  assert all(form.parse(text) is None for text in bad)
  rng = np.random.default_rng(0)
  drawn = [form.draw(rng) for _ in range(50)]
  assert all(space.contains(form.parse(text)) for text in drawn)
  assert len(set(drawn)) > 5


def test_large_actions_are_refused():
  with pytest.raises(ValueError, match='17 numbers; must be 1 to 16'):
    gymnasium_actions.make(spaces.Box(0, 1, (17,)), ())


def test_a_pendulum_is_pushed_by_a_number():
  pendulum = {'id': 'Pendulum-v1', 'actions': ('torque',), 'max_steps': 5}
  env = envs.make('gymnasium', **pendulum)
  first = env.reset(TASK)
  assert '<torque: number from -2 to 2>' in first.prompt
  left, right = (
    (env.reset(TASK), env.step(_respond(text)))[1] for text in ('-2', '1.5')
  )
  assert left.valid and left.observation.text != right.observation.text
  assert not env.step(_respond('2.5')).valid
  steps = list(env.demonstrate(TASK, noise=0, seed=0))
  assert len(steps) == 5 and len({response for _, response in steps}) == 5


def test_wrappers_apply_from_the_inside_out():
  wrappers = (
    ('gymnasium.wrappers:RepeatAction', {'num_repeats': 3}),
    (
      'gymnasium.wrappers:DiscretizeObservation',
      {'bins': (9, 6), 'multidiscrete': True},
    ),
    # Counts the actions, not the three steps of each.
    ('gymnasium.wrappers:TimeLimit', {'max_episode_steps': 2}),
  )
  car = {'id': 'MountainCarContinuous-v0', 'names': ('position', 'speed')}
  env = envs.make('gymnasium', **car, wrappers=wrappers)
  plain = envs.make('gymnasium', **car)
  # Bins of 0.2 from -1.2 and of 7/300 from -0.07.
  for index in range(3):
    task = base.Task('train', index)
    first = env.reset(task)
    position, speed = map(float, plain.reset(task).text.split()[1::2])
    assert speed == 0
    index_of_bin = int((position + 1.2) / 0.2)
    assert first.text == f'position: {index_of_bin}\nspeed: 3'
    assert first.anchor == f'{index_of_bin}, 3'
    # A step with the force x costs x^2 / 10, and speeds below 0 are in bin 2.
    result = env.step(_respond('-0.5'))
    assert result.reward == pytest.approx(-3 * 0.025)
    assert result.observation.text.endswith('speed: 2')
    assert env.step(_respond('-0.5')).done


@pytest.mark.parametrize(
  ('text', 'noise', 'right'),
  [
    ('position: 3\nspeed: 3', 0.0, 1.0),
    ('position: 8\nspeed: 2', 0.0, 0.0),
    ('position: 8\nspeed: 2', 0.5, 0.25),
  ],
)
def test_a_demonstrator_pushes_along_the_motion(text, noise, right):
  observation = base.Observation(text, text, text, text)
  rng = np.random.default_rng(0)
  pushes = [
    mountain_car.demonstrate(observation, noise, rng) for _ in range(400)
  ]
  matches = [
    re.fullmatch(r'<action>(-?)([01]\.\d)</action>', push) for push in pushes
  ]
  strengths = [float(match[2]) for match in matches]
  assert np.mean(strengths) == pytest.approx(0.5, abs=0.05)
  assert max(strengths) == 1
  assert np.mean([not match[1] for match in matches]) == pytest.approx(
    right, abs=0.06
  )


def test_a_demonstrator_plays_instead_of_random_actions():
  env = envs.make(
    'gymnasium',
    id='Pendulum-v1',
    max_steps=3,
    demonstrator=f'{__name__}:push_by_one',
  )
  steps = list(env.demonstrate(TASK, noise=0.0, seed=0))
  assert [response for _, response in steps] == [_respond('1')] * 3
  assert steps[0][0] == env.reset(TASK)


def test_crossing_the_frozen_lake():
  env = envs.make('gymnasium', **LAKE)
  first = env.reset(TASK)
  # Cells of the 4 x 4 map are counted row by row; the goal is the last one.
  assert first.text == first.anchor == '0'
  actions = ['down', 'down', 'right', 'down', 'right', 'right']
  results = [env.step(_respond(action)) for action in actions]
  assert [r.observation.text for r in results[:-1]] == [
    '4',
    '8',
    '9',
    '13',
    '14',
  ]
  last = results[-1]
  assert last.success and last.done and last.reward == 1
  assert last.final_anchor == '15\n(over)' and last.observation is None
  assert [r.reward for r in results[:-1]] == [0] * 5


def test_falling_into_a_hole_ends_without_success():
  env = envs.make('gymnasium', **LAKE)
  env.reset(TASK)
  results = [env.step(_respond(action)) for action in ('right', 'down')]
  assert results[-1].done and not results[-1].success


def test_success_by_return():
  # The shortest way, along the edge of the cliff, has 13 steps of -1.
  cliff = {
    'id': 'CliffWalking-v1',
    'actions': ('up', 'right', 'down', 'left'),
    'success_return': -13,
  }
  env = envs.make('gymnasium', **cliff)
  for detour, success in ((0, True), (1, False)):
    env.reset(TASK)
    actions = ['up', *['right'] * 11, 'down']
    actions[1:1] = ['left'] * detour
    results = [env.step(_respond(action)) for action in actions]
    assert results[-1].done and results[-1].success == success
  # An episode without any valid action has a return of 0, but no success.
  env = envs.make('gymnasium', max_steps=5, **cliff)
  env.reset(TASK)
  results = [env.step('nothing') for _ in range(5)]
  assert results[-1].done and not results[-1].success


def test_rendered_text_with_the_observation_as_anchor():
  env = envs.make('gymnasium', observe='render', **LAKE)
  first = env.reset(TASK)
  assert first.text == '[S]FFF\nFHFH\nFFFH\nHFFG'
  away, back = (
    env.step(_respond(action)).observation for action in ('down', 'up')
  )
  assert away.text.endswith('SFFF\n[F]HFH\nFFFH\nHFFG')
  # The rendered text contains the last action; the anchor does not.
  assert back.text != first.text and back.anchor == first.anchor == '0'


def test_text_actions_and_dict_observations():
  env = envs.make('gymnasium', id='Riddle-v0')
  first = env.reset(TASK)
  assert first.text == 'asked: Is it\ntimes: 0'
  assert gymnasium_actions.FREE in first.prompt
  assert env.step(_respond('no')).observation.text.endswith('times: 1')
  assert not env.step(_respond('much too long')).valid
  assert env.step(_respond('yes')).success
  with pytest.raises(ValueError, match=r'env.actions=\(\): any text'):
    list(env.demonstrate(TASK, noise=0, seed=0))


def test_text_actions_keep_their_case():
  env = envs.make('gymnasium', id='Shout-v0')
  env.reset(TASK)
  assert not env.step('<THINK>a</THINK><Action>yes</Action>').valid
  result = env.step('<THINK>a</THINK><Action> YES </Action>')
  assert (result.action, result.valid, result.success) == ('YES', True, True)


def test_observe_function_and_discrete_actions_with_an_offset():
  env = envs.make(
    'gymnasium', id='Picture-v0', observe=f'{__name__}:brightness'
  )
  assert env.reset(TASK).text == 'It is 0 bright.'
  assert not env.step(_respond('0')).done
  assert env.step(_respond('1')).success


def test_names_of_observation_entries():
  env = envs.make(
    'gymnasium',
    id='CartPole-v1',
    actions=('left', 'right'),
    names=('position', 'speed', 'angle', 'turning'),
  )
  lines = env.reset(TASK).text.splitlines()
  assert [line.split(':')[0] for line in lines] == [
    'position', 'speed', 'angle', 'turning',
  ]  # fmt: skip


def test_episodes_depend_on_task_and_actions_only():
  slippery = LAKE | {'options': {'is_slippery': True}}
  first, second = (envs.make('gymnasium', **slippery) for _ in range(2))

  def play(env, task):
    texts = [env.reset(task).text]
    for action in ('right', 'down') * 10:
      result = env.step(_respond(action))
      texts.append(result.final_anchor or result.observation.text)
      if result.done:
        return texts
    return texts

  tasks = [base.Task('train', n) for n in range(8)]
  transcripts = [play(first, task) for task in tasks]
  assert transcripts == [play(second, task) for task in reversed(tasks)][::-1]
  assert len(set(map(tuple, transcripts))) > 1
  other_seed = envs.make('gymnasium', seed=1, **slippery)
  assert transcripts != [play(other_seed, task) for task in tasks]


@pytest.mark.parametrize('noise', [0.5, 1.0])
def test_random_play_ends(noise: float):
  env = envs.make('gymnasium', max_steps=9, **LAKE)
  for index in range(20):
    steps = list(
      env.demonstrate(base.Task('train', index), noise=noise, seed=0)
    )
    assert 1 < len(steps) <= 9
    assert '<action>' in steps[0][1]


def test_the_expert_of_a_tabular_environment_takes_the_shortest_way():
  env = envs.make('gymnasium', max_steps=9, **LAKE)
  steps = list(env.demonstrate(base.Task('train', 0), noise=0.0, seed=0))
  assert len(steps) == 6
  assert 'right' in steps[-1][1]


def test_best_actions_by_hand():
  # State 1 is terminal. In state 0, action 0 earns 0.5 forever after, because
  # it stays, and action 1 earns 1 once.
  table = {
    0: {0: [(1.0, 0, 0.5, False)], 1: [(1.0, 1, 1.0, True)]},
    1: {0: [(1.0, 1, 0.0, True)], 1: [(1.0, 1, 0.0, True)]},
  }
  # 0.5 / (1 - discount) is above 1 for a discount above 0.5.
  assert gymnasium_env.best_actions(table, discount=0.6)[0] == 0
  assert gymnasium_env.best_actions(table, discount=0.4)[0] == 1


def test_best_actions_of_the_slippery_lake():
  lake = gymnasium.make('FrozenLake-v1', is_slippery=True).unwrapped
  best = gymnasium_env.best_actions(lake.P)
  # The well-known optimal policy; holes (5, 7, 11, 12) and goal have none.
  expected = {0: 0, 1: 3, 2: 3, 3: 3, 4: 0, 8: 3, 9: 1, 10: 0, 13: 2, 14: 1}
  assert {state: best[state] for state in expected} == expected


@pytest.mark.parametrize('response', ['left', _respond('jump'), ''])
def test_an_invalid_response_does_nothing(response):
  env = envs.make('gymnasium', max_steps=2, **LAKE)
  env.reset(TASK)
  first, second = env.step(response), env.step(response)
  assert not first.valid and first.observation.text == '0'
  assert second.done and not second.success


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'id': None}, 'env.id=None: must name an environment'),
    ({'id': 'Nowhere-v1'}, 'env.id=Nowhere-v1: cannot be made: .*Nowhere'),
    ({'id': 'no_module:X-v1'}, 'env.id=no_module:X-v1: cannot be made'),
    ({'id': 'mine/X-v1'}, 'mine not found.*; must be a registered id, or modu'),
    ({'options': {'depth': 3}}, "env.options={'depth': 3}: .*unexpected"),
    ({'actions': ('a', 'b')}, 'env.actions=.*must be 4 different names'),
    ({'actions': ('Left', 'b', 'c', 'd')}, 'in lower case'),
    (
      {'observe': 'picture'},
      'env.observe=picture: unknown .*; must be auto, r',
    ),
    ({'wrappers': ('a:B',)}, "env.wrappers=.*must be pairs of 'module:Class'"),
    (
      {'wrappers': (('a', {}),)},
      'wrappers=a: unknown .*; must be module:Class',
    ),
    ({'wrappers': (('math:Cosine', {}),)}, 'env.wrappers=math:Cosine: unknown'),
    (
      {'wrappers': (('gymnasium.wrappers:RepeatAction', {'often': 3}),)},
      'env.wrappers=gymnasium.wrappers:RepeatAction: .*often',
    ),
    ({'wrappers': (('gymnasium:make', 3),)}, 'must be pairs of'),
    (
      {'observe': 'math:draw'},
      'observe=math:draw: unknown .*no attribute .draw.',
    ),
    ({'id': 'Picture-v0', 'actions': (), 'options': {}}, 'at most 256; must'),
    (
      {'id': 'Pendulum-v1', 'options': {}, 'actions': ('a', 'b')},
      'env.actions=.*must be 1 names of numbers',
    ),
    ({'id': 'Knobs-v0', 'options': {}, 'actions': ()}, 'space is Dict; must'),
    ({'seed': -1}, 'env.seed=-1: must be from 0'),
    ({'prompt_style': 'long'}, 'env.prompt_style=long: must be one of'),
    (
      {'id': 'CartPole-v1', 'options': {}, 'actions': (), 'names': ('a',)},
      'env.names=.*1 names for an observation of 4 entries',
    ),
  ],
)
def test_invalid_arguments_are_errors_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    envs.tasks('gymnasium', 'train', **(LAKE | changes))
  assert len(str(error.value).splitlines()) == 1


def test_unknown_splits_are_errors():
  with pytest.raises(ValueError, match='split=x: must be one of train, valid'):
    envs.tasks('gymnasium', 'x', **LAKE)


def test_a_missing_gymnasium_is_reported(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gymnasium', None)
  with pytest.raises(ValueError, match='gymnasium is not installed; run pip'):
    envs.make('gymnasium', **LAKE)


@pytest.mark.parametrize('name', [' left', '左', 'a</action>'])
def test_names_that_no_valid_response_has_are_refused(name: str):
  with pytest.raises(ValueError, match='must be 2 different names'):
    gymnasium_actions.make(spaces.Discrete(2), (name, 'right'))
