"""Tests of envs/textarena_env.py: games, anchors, isolated random states."""

import random
import sys

import ml_collections
import numpy as np
import pytest

import envs
from envs import base, textarena_env, textarena_opponents

TASK = base.Task('train', 3)
TOWER = {
  'id': 'TowerOfHanoi-v0',
  'actions': ('[a b]', '[a c]', '[b a]', '[b c]', '[c a]', '[c b]'),
}
SOLUTION = ['a c', 'a b', 'c b', 'a c', 'b a', 'b c', 'a c']


def _respond(action: str) -> str:
  return f'<think>so</think><action>{action}</action>'


def test_solving_the_tower_of_hanoi():
  env = envs.make('textarena', **TOWER)
  first = env.reset(TASK)
  assert 'from tower A to tower C' in first.task and first.task in first.prompt
  assert 'A: [3, 2, 1]' in first.text
  results = [env.step(_respond(move)) for move in SOLUTION]
  assert 'A: [3, 2]' in results[0].observation.text
  assert 'You moved disk 1' in results[0].observation.text
  last = results[-1]
  assert last.done and last.success and last.reward == 1 and last.score == 1
  assert 'C: [3, 2, 1]' in last.final_anchor
  assert [r.reward for r in results[:-1]] == [0] * 6


def test_anchors_are_the_game_boards():
  env = envs.make('textarena', **TOWER)
  first = env.reset(TASK)
  away, back = (
    env.step(_respond(move)).observation for move in ('[a b]', '[b a]')
  )
  assert first.anchor == back.anchor != away.anchor
  illegal = env.step(_respond('[b c]')).observation
  # A second illegal move would end the game, so this is another state.
  assert 'invalid move' in illegal.text
  assert illegal.text.endswith(back.anchor)
  assert illegal.anchor.startswith(back.anchor)
  assert illegal.anchor != back.anchor
  lost = env.step(_respond('[b c]'))
  assert lost.done and lost.final_anchor not in (illegal.anchor, back.anchor)


def test_illegal_moves_lose_the_game():
  env = envs.make('textarena', **TOWER)
  env.reset(TASK)
  results = [env.step(_respond('[b c]')) for _ in range(2)]
  assert results[1].done and not results[1].success
  assert results[1].score == 0


def test_an_invalid_response_is_not_passed_to_the_game():
  env = envs.make('textarena', max_steps=3, **TOWER)
  board = env.reset(TASK).anchor
  results = [env.step('[a c]') for _ in range(3)]
  assert not any(r.valid for r in results)
  assert results[-1].done and results[-1].final_anchor == board
  assert results[-1].score == 0


def test_anchors_without_a_board_are_the_transcript():
  env = envs.make('textarena', id='GuessTheNumber-v0')
  env.reset(TASK)
  results = [env.step(_respond(str(n))) for n in (1, 1, 20)]
  anchors = [r.observation.anchor for r in results if not r.done]
  assert len(set(anchors)) == len(anchors) > 1
  # The same text after other actions is another state.
  env.reset(TASK)
  assert env.step(_respond('2')).observation.anchor != anchors[0]


def test_board_pattern_selects_the_anchor():
  env = envs.make('textarena', id='LightsOut-v0', board=r'(?:[01O.X] ?){3,}.*')
  first = env.reset(TASK)
  results = [env.step(_respond('1 1')) for _ in range(2)]
  assert results[0].observation.anchor != first.anchor
  with pytest.raises(ValueError, match=r'env.board=\(: '):
    envs.make('textarena', id='LightsOut-v0', board='(')


@pytest.mark.parametrize('name', ['Countdown-v0', 'Cryptarithm-v0'])
def test_games_that_swap_sender_and_message_type_can_be_played(name):
  env = envs.make('textarena', id=name)
  env.reset(TASK)
  results = [env.step(_respond('1')) for _ in range(2)]
  assert results[0].action == '1'
  # A second illegal move loses the game. Its reward is swapped, too.
  assert results[1].done and results[1].reward == 0


@pytest.mark.parametrize('name', ['FrozenLake-v0', '2048-v0-easy'])
def test_episodes_of_one_process_are_independent(name):
  moves = ['right', 'down', 'left', 'down', 'right', 'up'] * 2

  def play(env, others=()):
    texts = [env.reset(TASK).text]
    for other in others:
      other.reset(base.Task('train', 7))
    for move in moves:
      result = env.step(_respond(move))
      texts.append(result.final_anchor or result.observation.text)
      if result.done:
        break
      for other in others:
        other.step(_respond(move))
        random.random(), np.random.random()
    return texts

  env, other = (envs.make('textarena', id=name) for _ in range(2))
  alone = play(env)
  assert play(env, [other]) == alone == play(envs.make('textarena', id=name))
  random.seed(5)
  expected = random.random()
  random.seed(5)
  play(env)
  assert random.random() == expected


def lowest_square(text: str, rng: np.random.Generator) -> str:
  """An opponent at tic-tac-toe that takes the first free square."""
  return textarena_opponents._LISTED.findall(text.splitlines()[-1])[0]


def stubborn(text: str, rng: np.random.Generator) -> str:
  return 'no move'


DUEL = {'id': 'TicTacToe-v0', 'opponent': f'{__name__}:lowest_square'}


def test_a_game_against_a_fixed_opponent():
  env = envs.make('textarena', **DUEL)
  env.reset(TASK)
  result = env.step(_respond('[4]'))
  assert 'Player 1 placed their symbol (X) in cell 0' in result.observation.text
  assert result.observation.anchor.startswith('Current Board:\n\n X | 1 | 2')
  results = [env.step(_respond(move)) for move in ('[3]', '[5]')]
  assert not results[0].done and results[1].done
  assert results[1].success and results[1].reward == results[1].score == 1
  # The opponent completes its row.
  env.reset(TASK)
  results = [env.step(_respond(move)) for move in ('[8]', '[7]', '[5]')]
  assert results[-1].done and not results[-1].success
  assert results[-1].reward == -1 and results[-1].score == 0
  assert '6 | O | O' in results[-1].final_anchor


def test_the_final_state_is_that_of_the_policys_player(monkeypatch):
  env = envs.make('textarena', **DUEL)
  env.reset(TASK)
  # Only the opponent learns what the last moves were.
  state, add = env._game.state, env._game.state.add_observation

  def hide(message, *args, **kwargs):
    add(*args, message=message, **(kwargs | {'to_id': 1}))

  for move in ('[8]', '[7]'):
    env.step(_respond(move))
  monkeypatch.setattr(state, 'add_observation', hide)
  last = env.step(_respond('[5]'))
  assert last.done and 'X | X | 2' in last.final_anchor


def test_the_policy_can_be_the_second_player():
  env = envs.make('textarena', player=1, **DUEL)
  first = env.reset(TASK)
  assert 'As Player 1' in first.task and ' O | 1 | 2' in first.anchor
  results = [env.step(_respond(move)) for move in ('[4]', '[2]', '[6]')]
  assert results[-1].success and results[-1].reward == 1


def test_a_random_opponent_is_a_function_of_the_task():
  duel = DUEL | {'opponent': 'random'}
  first, second = (envs.make('textarena', **duel) for _ in range(2))

  def play(env, index):
    texts = [env.reset(base.Task('train', index)).text]
    for square in (4, 0, 8):
      result = env.step(_respond(f'[{square}]'))
      texts.append(result.final_anchor or result.observation.text)
      if result.done:
        break
    return tuple(texts)

  episodes = [play(first, index) for index in range(8)]
  assert [play(second, index) for index in range(8)] == episodes
  assert len(set(episodes)) > 1
  rng = np.random.default_rng(0)
  text = "Moves: '[1]'\nMoves: '[2]', '[col 3]'\nYour turn."
  drawn = {
    textarena_opponents.play_randomly(text, rng, actions=()) for _ in range(20)
  }
  assert drawn == {'[2]', '[col 3]'}
  with pytest.raises(ValueError, match='the game lists no moves; set env.act'):
    textarena_opponents.play_randomly('Go.', rng, actions=())


def test_an_opponent_without_legal_moves_loses():
  env = envs.make('textarena', **(DUEL | {'opponent': f'{__name__}:stubborn'}))
  env.reset(TASK)
  result = env.step(_respond('[4]'))
  assert result.done and result.success


def test_self_play_has_two_agents_with_opposite_rewards():
  duel = DUEL | {'opponent': f'self:{__name__}:lowest_square'}
  env = envs.make('textarena', **duel)
  first = env.reset(TASK)
  results = [env.step(_respond(f'[{n}]')) for n in (4, 0, 3, 1, 5)]
  observations = [first, *(r.observation for r in results[:-1])]
  assert [o.agent for o in observations] == ['player 0', 'player 1'] * 2 + [
    'player 0'
  ]
  assert 'As Player 0' in first.task
  assert 'As Player 1' in observations[1].task
  assert observations[1].anchor.startswith('Current Board:\n\n 0 | 1 | 2')
  assert ' 3 | O | 5' in observations[1].anchor
  # Each player's history has its own moves only.
  assert '[0]' in observations[3].prompt.split('admissible')[0]
  last = results[-1]
  assert last.done and last.success and last.score == 1
  assert last.reward == 1 and last.other_rewards == {'player 1': -1}
  assert not any(r.other_rewards for r in results[:-1])
  # The second player wins.
  env.reset(TASK)
  results = [env.step(_respond(f'[{n}]')) for n in (4, 0, 3, 1, 8, 2)]
  assert results[-1].done and not results[-1].success
  assert results[-1].reward == 1 and results[-1].score == 0
  assert results[-1].other_rewards == {'player 0': -1}
  # On held-out tasks, the fixed opponent takes the first free square.
  held_out = env.reset(base.Task('valid', 3))
  assert held_out.agent == 'player 0'
  result = env.step(_respond('[4]'))
  assert 'Player 1 placed their symbol (X) in cell 0' in result.observation.text


def test_the_step_limit_counts_the_turns_of_one_game_only():
  env = envs.make(
    'textarena',
    id='IteratedPrisonersDilemma-v0',
    actions=('[cooperate]', '[defect]'),
    opponent='self',
    max_steps=4,
  )
  for split in ('train', 'valid', 'train'):
    env.reset(base.Task(split, 3))
    results = [env.step(_respond('[defect]')) for _ in range(4)]
    assert [result.done for result in results] == [False, False, False, True]


def test_an_invalid_response_in_a_game_for_two_is_an_illegal_move():
  env = envs.make('textarena', max_steps=3, **(DUEL | {'opponent': 'self'}))
  env.reset(TASK)
  env.step(_respond('[4]'))
  result = env.step('[0]')
  assert not result.valid and result.observation.agent == 'player 1'
  assert 'invalid move' in result.observation.text
  last = env.step(_respond('[0]'))
  # The limit of turns ends the game without rewards.
  assert last.done and last.reward == 0 and last.other_rewards == {}
  assert ' X | 1 | 2' in last.final_anchor and ' 3 | O | 5' in last.final_anchor
  # The second illegal move in a row loses, as in the game's rules.
  env = envs.make('textarena', **DUEL)
  first = env.reset(TASK)
  results = [env.step('[0]') for _ in range(2)]
  assert results[-1].done and results[-1].reward == -1
  # The board is the same before, but the state is not.
  assert results[0].observation.anchor == f'{first.anchor}\n(1 illegal)'


def test_random_play_uses_the_moves_that_the_game_lists():
  squares = tuple(f'[{n}]' for n in range(9))
  env = envs.make('textarena', actions=squares, id=DUEL['id'], opponent='self')
  play = list(env.demonstrate(TASK, noise=1, seed=0))
  moves = [response.split('action>')[1][:-2] for _, response in play]
  assert len(set(moves)) == len(moves) >= 5


NIM = {
  'id': 'Nim-v0',
  'options': {'piles': [1, 2]},
  # Two of the five moves are legal at first, and fewer later.
  'actions': ('[0 1]', '[0 2]', '[1 1]', '[1 3]', '[1 4]'),
}


def test_random_players_draw_legal_moves_if_the_game_lists_none():
  env = envs.make('textarena', opponent='random', **NIM)
  answers = set()
  for index in range(12):
    env.reset(base.Task('train', index))
    # Player 0 takes an object of pile 1, of which one is left; only player 0
    # makes an illegal move.
    result = env.step(_respond('[1 1]'))
    assert 'invalid' not in result.observation.text
    answers.add(result.observation.text)
  # Both legal answers occur.
  assert len(answers) == 2
  for index in range(12):
    task = base.Task('train', index)
    play = list(env.demonstrate(task, noise=1, seed=0))
    assert 1 <= len(play) <= 3
    assert not any('invalid' in shown.prompt for shown, _ in play)


def test_trials_of_moves_do_not_change_the_game():
  env = envs.make('textarena', opponent='random', **NIM)
  env.reset(TASK)
  before = env._game.state.game_state, env._random_state._states
  assert env._is_legal('[1 2]') and not env._is_legal('[0 2]')
  assert before == (env._game.state.game_state, env._random_state._states)
  assert before[0] == {'piles': [1, 2]} and not env._game.state.error_count
  # A player without a legal move plays the last one that is drawn.
  drawn = iter(range(10_000))
  move = env._draw_legal(lambda: f'[5 {next(drawn)}]')
  assert move == f'[5 {textarena_env._MAX_DRAWS - 1}]'


def test_self_play_with_shared_rewards_is_refused():
  config = ml_collections.ConfigDict(
    {'env': {'name': 'textarena', 'opponent': 'self'}, 'reward': {}}
  )
  config.reward.agents = 'own'
  assert not list(envs.conflicts(config))
  config.reward.agents = 'team'
  (line,) = envs.conflicts(config)
  assert line.startswith('reward.agents=team: ') and 'must be own' in line


def test_random_play_needs_a_list_of_moves():
  env = envs.make('textarena', **TOWER)
  for index in range(5):
    task = base.Task('train', index)
    assert 1 < len(list(env.demonstrate(task, noise=0, seed=0))) <= 14
  env = envs.make('textarena', id='GuessTheNumber-v0')
  with pytest.raises(ValueError, match=r'env.actions=\(\): moves are not'):
    list(env.demonstrate(TASK, noise=0, seed=0))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'id': None}, 'env.id=None: must name a game'),
    ({'id': 'Nowhere-v0'}, 'env.id=Nowhere-v0: cannot be made: .*Nowhere-v0 '),
    ({'id': 'TicTacToe-v0'}, 'played by 1 play.*; a game for two .*opponent$'),
    ({'opponent': 'random'}, 'env.id=TowerOfHanoi-v0: cannot be played by 2'),
    ({'opponent': 'bob'}, 'env.opponent=bob: unknown .*; must be random, self'),
    ({'player': 1}, 'env.player=1: must be 0, or 1 with env.opponent'),
    ({'options': {'depth': 3}}, "env.options={'depth': 3}: .*unexpected"),
    ({'actions': ('[A B]',)}, 'must be in lower case'),
    ({'seed': 5_000}, 'env.seed=5000: must be from 0'),
  ],
)
def test_invalid_arguments_are_errors_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    envs.tasks('textarena', 'train', **(TOWER | changes))
  assert len(str(error.value).splitlines()) == 1


def test_a_missing_textarena_is_reported(monkeypatch):
  monkeypatch.setitem(sys.modules, 'textarena', None)
  with pytest.raises(ValueError, match='textarena is not installed; run pip'):
    textarena_env.Env(**TOWER)
