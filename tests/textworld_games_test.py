"""Tests of TextWorld's games: walkthroughs win, seeds reproduce, errors."""

import sys
import warnings

import pytest

import envs
from envs import base, textworld_games

if sys.version_info >= (3, 13):
  pytest.skip('TextWorld does not support it', allow_module_level=True)

SMALL = {'settings': {'rooms': 2, 'objects': 2, 'quest_length': 2}}
TASK = base.Task('train', 0)


def _respond(command: str) -> str:
  return f'<think>so</think><action>{command}</action>'


@pytest.fixture(scope='module')
def env() -> textworld_games.Env:
  return textworld_games.Env(**SMALL)


@pytest.mark.parametrize('index', [0, 1])
def test_walkthrough_wins(env, index):
  task = base.Task('train', index)
  steps = list(env.demonstrate(task, noise=0.0, seed=0))
  assert len(steps) == 2
  observation = env.reset(task)
  for shown, response in steps:
    assert observation == shown
    result = env.step(response)
    observation = result.observation
  assert result.success and result.done and result.valid
  assert result.reward == 10 and result.score == 1
  assert result.final_anchor


@pytest.mark.parametrize(
  ('challenge', 'settings'),
  [
    ('coin_collector', {'level': 2}),
    pytest.param(
      'cooking', {'recipe': 1, 'cook': True}, marks=pytest.mark.slow
    ),
  ],
)
def test_challenges_can_be_won(challenge, settings):
  env = textworld_games.Env(challenge=challenge, settings=settings)
  steps = list(env.demonstrate(TASK, noise=0.0, seed=0))
  assert len(steps) > 1 and env._state.won
  # An expert with noise continues from the resulting state, or cannot win any
  # more.
  list(env.demonstrate(TASK, noise=0.4, seed=1))
  assert env._state.won or not env._state.policy_commands
  env.close()


def test_noise_depends_on_its_seed(env):
  first, repeated, other = (
    [response for _, response in env.demonstrate(TASK, noise=1.0, seed=seed)]
    for seed in (0, 0, 1)
  )
  assert first == repeated != other


def test_the_expert_stops_where_a_game_cannot_be_won(env, monkeypatch):
  step = env.step

  def lose_the_way(response):
    result = step(response)
    env._state['policy_commands'] = []
    return result

  monkeypatch.setattr(env, 'step', lose_the_way)
  assert len(list(env.demonstrate(TASK, noise=0.0, seed=0))) == 1


def test_first_observation(env):
  first = env.reset(TASK)
  assert first.text.startswith('-= ')
  assert '$$' not in first.prompt and '>' not in first.text
  assert {'look', 'inventory'} <= set(first.actions)
  assert all(action == action.lower() for action in first.actions)
  assert all(action in first.prompt for action in first.actions)
  assert first.task and first.task not in first.text
  text = env.step(_respond('look')).observation.text
  assert text == first.text


def test_status_line_is_removed():
  feedback = 'Taken.\n\n\n\n>      -= Attic =-0/2'
  assert textworld_games.clean(feedback) == 'Taken.'
  assert textworld_games.clean(' A > B.\n\n \nC') == 'A > B.\nC'


def test_anchor_depends_on_the_state_only(env):
  first = env.reset(TASK)
  looked = env.step(_respond('look')).observation
  listed = env.step(_respond('inventory')).observation
  assert first.anchor == looked.anchor == listed.anchor
  assert looked.text != listed.text
  steps = list(env.demonstrate(TASK, noise=0.0, seed=0))
  env.reset(TASK)
  assert env.step(steps[0][1]).observation.anchor != first.anchor


def test_interpreter_commands_are_refused(env, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  before = env.reset(TASK)
  for command in ('save', 'script', 'quit', 'restart', 'look. restart'):
    result = env.step(_respond(command))
    assert result.observation.anchor == before.anchor
    assert 'cannot be done' in result.observation.text
  assert env.step(_respond('look')).metrics['inadmissible_action_rate'] == 0
  env.reset(TASK)
  assert env.step(_respond('restore')).observation.anchor == before.anchor
  assert not list(tmp_path.iterdir())


def test_inadmissible_commands_change_nothing(env):
  before = env.reset(TASK).anchor
  for response in (
    _respond('fly away'),
    'fly away',
    _respond('a\nb'),
    _respond(' '),
  ):
    result = env.step(response)
    assert result.metrics['inadmissible_action_rate'] == 1
    assert result.observation.anchor == before and not result.done
  assert not env.step('fly away').valid


def test_step_limit_ends_an_episode():
  env = textworld_games.Env(max_steps=2, **SMALL)
  env.reset(TASK)
  results = [env.step(_respond('look')) for _ in range(2)]
  assert [r.done for r in results] == [False, True]
  assert not results[1].success and results[1].score == 0
  env.close()


def test_score_survives_an_inadmissible_last_command():
  env = textworld_games.Env(max_steps=1, **SMALL)
  # As if one of four tasks of a game were done, a game had no tasks, or the
  # score were negative.
  for score, maximum, share in ((1, 4, 0.25), (0, 0, 0.0), (-1, 4, 0.0)):
    env.reset(TASK)
    env._state['score'], env._state['max_score'] = score, maximum
    result = env.step(_respond('fly away'))
    assert result.done and not result.success and result.score == share
  env.close()


def test_a_lost_game_ends(env):
  env.reset(TASK)
  env._state['lost'] = True
  result = env.step(_respond('fly away'))
  assert result.done and not result.success and result.reward == 0


def test_compiled_games_depend_on_every_setting(monkeypatch):
  monkeypatch.setattr(textworld_games.cache, 'ensure', lambda folder, _: folder)
  level = {'level': 1}
  options = [
    (0, 'coin_collector', level),
    (1, 'coin_collector', level),
    (0, 'treasure_hunter', level),
    (0, 'coin_collector', {'level': 2}),
  ]
  paths = {textworld_games.compiled(*arguments) for arguments in options}
  monkeypatch.setattr(textworld_games._textworld(), '__version__', '9')
  paths.add(textworld_games.compiled(*options[0]))
  assert len(paths) == len(options) + 1


def test_settings_of_games():
  settings = textworld_games.parse('custom', {})
  assert settings == {'rooms': 3, 'objects': 4, 'quest_length': 3}
  settings = textworld_games.parse('cooking', {'recipe': 1, 'cook': False})
  assert settings['recipe'] == 1 and settings['cook'] is False
  chosen = {'rooms': 2, 'objects': 5, 'quest_length': 1}
  _, options = textworld_games._draw(0, 'custom', chosen)
  drawn = (options.nb_rooms, options.nb_objects, options.quest_length)
  assert drawn == (2, 5, 1)


def test_games_are_a_function_of_the_task(env, tmp_path, monkeypatch):
  first = env.reset(TASK)
  env.step(_respond('look'))
  other = env.reset(base.Task('train', 1))
  assert env.reset(TASK) == first != other
  monkeypatch.setenv('GIGPO_JAX_CACHE', str(tmp_path))
  uncached = textworld_games.Env(**SMALL)
  assert uncached.reset(TASK) == first
  (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
  assert {p.suffix for p in folder.iterdir()} == {'.z8', '.json'}
  uncached.close()


def test_games_are_compiled_and_played_without_warnings():
  env = textworld_games.Env(**SMALL)  # Importing TextWorld sets filters.
  with warnings.catch_warnings():
    warnings.resetwarnings()
    warnings.simplefilter('error')
    assert env.reset(base.Task('train', 2))
  env.close()


def test_sizes_and_seeds_of_splits():
  first, other = (
    textworld_games.Env(seed=seed, **SMALL).games('train')[0] for seed in (0, 1)
  )
  assert first != other
  assert len(envs.tasks('textworld', 'train', num_games=7, **SMALL)) == 7
  assert len(envs.tasks('textworld', 'valid', **SMALL)) == 1_000


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'challenge': 'chess'}, 'env.challenge=chess: must be one of custom, co'),
    ({'settings': {'level': 1}}, 'env.settings=.*unrecognized arguments'),
    ({'settings': {'rooms': 'x'}}, 'env.settings=.*invalid int value'),
    (
      {'challenge': 'coin_collector', 'settings': {}},
      'env.settings={}: .*required: --level',
    ),
    ({'num_games': 0}, 'env.num_games=0: must be at least 1'),
    ({'seed': -1}, 'env.seed=-1: must be from 0'),
    ({'prompt_style': 'long'}, 'env.prompt_style=long: must be one of'),
  ],
)
def test_invalid_arguments_are_refused_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    envs.tasks('textworld', 'train', **(SMALL | changes))
  assert len(str(error.value).splitlines()) == 1


def test_games_that_cannot_be_drawn_are_refused(monkeypatch):
  monkeypatch.setattr(textworld_games, '_MAX_DRAWS', 2)
  impossible = {'challenge': 'coin_collector', 'settings': {'level': 999}}
  with pytest.raises(ValueError, match=r'drawn in 2 attempts \(Expected level'):
    envs.tasks('textworld', 'train', **impossible)


def test_each_attempt_draws_another_game(tmp_path, monkeypatch):
  drawn = set()

  def draw(seed, *_):
    drawn.add(seed)
    raise AssertionError

  monkeypatch.setattr(textworld_games, '_draw', draw)
  with pytest.raises(ValueError, match=r'in 10 attempts \(AssertionError\)'):
    textworld_games._compile_game(
      tmp_path, seed=0, challenge='custom', settings={}
    )
  assert len(drawn) == 10


def test_unknown_splits_are_refused():
  with pytest.raises(ValueError, match='split=x: must be one of train, valid'):
    envs.tasks('textworld', 'x', **SMALL)


def test_missing_package_and_python_version_are_named(monkeypatch):
  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, 'textworld', None)
    with pytest.raises(ValueError, match='textworld is not installed; run pip'):
      textworld_games.Env(**SMALL)
  monkeypatch.setattr(sys, 'version_info', (3, 13, 0))
  with pytest.raises(ValueError, match='does not support Python 3.13'):
    textworld_games.Env(**SMALL)
