"""Adapter that plays TextArena games for one or two players in text.

The game's own text gives the rules and the observations. An action is a move in
text. A task is the seed that is passed to `reset`. In a game for two, a fixed
opponent takes its turns inside `reset` and `step`; in self-play, the policy
takes the turns of both players, which are two agents.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envs import base, narrator, seeds, textarena_opponents

FREE = '<your move>'
# Moves of the opponent in a row; games end an opponent that plays no legal one.
_MAX_REPLIES = 100
# Draws of a random player for a legal move, if the game lists none.
_MAX_DRAWS = 200
# Stands for an invalid response in games for two. The game treats it as any
# illegal move; otherwise a player could delay a loss until the limit of turns.
_NO_MOVE = 'no move'


def conflicts(config: Any) -> Iterator[str]:
  """Yields a line if self-play adds up the rewards of both players."""
  opponent = config.env.get('opponent', '')
  self_play, _ = textarena_opponents.split_self(opponent)
  if self_play and config.reward.agents != 'own':
    yield (
      f'reward.agents={config.reward.agents}: the players of env.opponent='
      f'{opponent} have opposite rewards; must be own'
    )


def agents(kwargs: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the names of the players that the policy plays."""
  self_play, _ = textarena_opponents.split_self(kwargs.get('opponent', ''))
  return ('player 0', 'player 1') if self_play else ()


class RandomState:
  """A private copy of Python's and numpy's global random states.

  Games draw from the global generators. Without private states, the episodes of
  one process would change each other's random numbers.
  """

  def __init__(self):
    self._states = (random.getstate(), np.random.get_state())

  @contextlib.contextmanager
  def active(self) -> Iterator[None]:
    """Uses the private states inside the block; restores the global ones."""
    global_states = (random.getstate(), np.random.get_state())
    self._set(self._states)
    try:
      yield
    finally:
      self._states = (random.getstate(), np.random.get_state())
      self._set(global_states)

  def _set(self, states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class Seat:
  """What one player of a game reads, and the prompts made of it.

  Args:
    narrator: writes the prompts.
    board_pattern: see `Env`; '' for the messages that the game marks.
    types: the game's types of messages.

  Attributes:
    narrator: writes the prompts.
    transcript: all texts of the game that the player has read.
    text: what the game has said since the player's last turn.
  """

  def __init__(
    self, narrator: narrator.Narrator, board_pattern: re.Pattern, types: Any
  ):
    self.narrator = narrator
    self._board_pattern, self._types = board_pattern, types
    self.clear()

  def clear(self) -> None:
    """Forgets the game."""
    # A player may get no turn in the next game.
    self.narrator.reset('')
    self.transcript: list[str] = []
    self.text = self._board = ''
    self._has_rules = False

  def read(self, messages: Sequence[tuple[Any, str, Any]]) -> None:
    """Reads (sender, text, type) of new messages, the game's rules first."""
    rules, texts, board = [], [], ''
    for sender, message, message_type in messages:
      message = str(message).strip()
      if message_type == self._types.PROMPT:
        rules.append(message)
      # Some games swap the sender and the type.
      elif self._types.PLAYER_ACTION in (sender, message_type):
        self.transcript.append(f'> {message}')
      else:
        texts.append(message)
      if (
        message_type == self._types.GAME_BOARD
        and not self._board_pattern.pattern
      ):
        board = message
    self.transcript += texts
    if self._board_pattern.pattern:
      match = self._board_pattern.search('\n'.join([*rules, *texts]))
      board = match[0].strip() if match else ''
    # Some games do not show the board again after an illegal move.
    self._board = board or self._board
    if self._board and not any(
      self._board in text for text in (*texts, *rules)
    ):
      texts.append(self._board)
    self.text = '\n'.join(texts) or 'The game begins.'
    if not self._has_rules:
      self.narrator.reset('\n'.join(rules))
      self._has_rules = True

  def anchor(self, errors: int, *, game_over: bool = False) -> str:
    """Returns the latest board, or the transcript if the game has no board.

    Args:
      errors: illegal moves of the player in this turn.
      game_over: whether the game is over.
    """
    if not self._board:
      return '\n'.join(self.transcript)
    notes = [self.transcript[-1]] if game_over else []
    # After an illegal move the state differs although the board does not: a
    # second illegal move may end the game.
    if errors and not game_over:
      notes = [f'({errors} illegal)']
    return '\n'.join([self._board, *notes])

  def observe(
    self, actions: Sequence[str], agent: str, errors: int
  ) -> base.Observation:
    """Returns the observation of the player's turn."""
    observation = self.narrator.observe(
      self.text, anchor=self.anchor(errors), actions=actions
    )
    return dataclasses.replace(observation, agent=agent)


def _count_errors(game: Any) -> int:
  """Returns the illegal moves of the current player since a legal one."""
  return getattr(game.state, 'error_count', 0)


class Env:
  """A TextArena game as a text environment.

  Args:
    id: registered id, such as 'TowerOfHanoi-v0'.
    options: further keyword arguments of `textarena.make`.
    actions: the moves, if there are few, for the prompt and for random play; ()
      for any text that the game's rules allow. The square brackets that games
      expect around a move are optional.
    board: regular expression for the part of the game's text that is its state.
      Steps are grouped by it. '' uses the messages that the game marks as its
      board or, without a board, the entire transcript.
    opponent: the other player, see `textarena_opponents.make`; '' for games for
      one player. 'self' is self-play in the split 'train' and 'random' in
      other splits; 'self:NAME' is NAME there.
    player: number of the policy's player, 0 or 1; 0 in games for one. In
      self-play, the player whose success and score are reported.
    success_reward: an episode succeeds if the game's reward is at least this.
    seed: base seed of the tasks.
    max_steps: step limit of an episode.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must contain a `<think>` part.

  Raises:
    ValueError: in one line, if an argument is not valid.
  """

  def __init__(
    self,
    *,
    id: str | None = None,
    options: dict | None = None,
    actions: Sequence[str] = (),
    board: str = '',
    opponent: str = '',
    player: int = 0,
    success_reward: float = 1.0,
    seed: int = 0,
    max_steps: int = 50,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    seeds.check_seed(seed)
    self._textarena = _import()
    self._random_state = RandomState()
    self._actions = tuple(map(str, actions)) or (FREE,)
    if any(str(action) != str(action).lower() for action in actions):
      raise ValueError(f'env.actions={actions}: must be in lower case')
    self._num_players = 2 if opponent else 1
    if player not in range(self._num_players):
      raise ValueError(
        f'env.player={player}: must be 0, or 1 with env.opponent'
      )
    self._player, self._opponent_rng = player, np.random.default_rng(0)
    self._self_play, fixed = textarena_opponents.split_self(opponent)
    self._opponent: textarena_opponents.Opponent | None = None
    if opponent:
      self._opponent = textarena_opponents.make(fixed, actions)
    self._opponent_is_random = fixed == textarena_opponents.RANDOM
    self._success_reward, self._seed = success_reward, seed
    self._max_steps = max_steps
    try:
      board_pattern = re.compile(board, re.DOTALL)
    except re.error as error:
      raise ValueError(
        f'env.board={board}: {error}; must be a regular expression'
      ) from error

    def make_seat() -> Seat:
      return Seat(
        narrator.Narrator(
          'You are an expert player of text games.',
          history_length=history_length,
          prompt_style=prompt_style,
          require_think=require_think,
          brief_observations=True,
        ),
        board_pattern,
        self._textarena.ObservationType,
      )

    self._seats = tuple(make_seat() for _ in range(self._num_players))
    # The players of the policy in this episode.
    self._own_players: tuple[int, ...] = (player,)
    self._id, self._options = id, options or {}
    self._game = self._make()

  def _make(self) -> Any:
    """Makes a game and resets it once, so that errors surface here."""
    name, options = self._id, self._options
    if not name:
      raise ValueError(
        f'env.id={name}: must name a game of TextArena, such as Nim-v0'
      )
    try:
      with self._sandbox():
        # '-raw': without the wrappers that format one long conversation.
        game = self._textarena.make(f'{name}-raw', **options)
        game.reset(num_players=self._num_players, seed=0)
    except (AssertionError, LookupError, OSError) as error:
      reason = ' '.join(str(error).split())[:200]
      hint = '; a game for two players needs env.opponent'
      raise ValueError(
        f'env.id={name}: cannot be played by {self._num_players} player(s), or '
        f'lacks data: {reason}{hint if self._num_players == 1 else ""}'
      ) from error
    except (ImportError, SyntaxError, ValueError) as error:
      reason = str(error).replace(f'{name}-raw', name)
      raise ValueError(f'env.id={name}: cannot be made: {reason}') from error
    except TypeError as error:
      raise ValueError(f'env.options={options}: {error}') from error
    return game

  @contextlib.contextmanager
  def _sandbox(self) -> Iterator[None]:
    """Gives the game its own random state and discards its output."""
    with (
      self._random_state.active(),
      contextlib.redirect_stdout(io.StringIO()),
    ):
      yield

  def prepare(self, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts a game with the task's seed.

    A new game is made each time: some games keep state across resets.
    """
    seed = seeds.Seeds(task.split, self._seed)[task.index]
    self._game = self._make()
    with self._sandbox():
      # Most games seed Python's generator only. numpy's seed must fit 32 bits.
      np.random.seed(seed)
      random.seed(seed)
      self._game.reset(num_players=self._num_players, seed=seed)
    both = self._self_play and task.split == 'train'
    self._own_players = tuple(range(2)) if both else (self._player,)
    self._opponent_rng = np.random.default_rng([seed, self._player])
    for seat in self._seats:
      seat.clear()
    if self._reply():
      raise ValueError(f'env.id={self._id}: over before the first move')
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Passes the move to the game; the game itself judges whether it is legal.

    An invalid response is not passed on, or as `_NO_MOVE` in a game for two.
    """
    player = self._current_player()
    seat = self._seats[player]
    action, valid = seat.narrator.parse(response, keep_case=self._free_text)
    seat.narrator.record_action(action)
    game_over, rewards = False, dict.fromkeys(self._own_players, 0.0)
    is_move = valid or self._num_players > 1
    if is_move:
      move = action if '[' in action else f'[{action}]'
      with self._sandbox():
        game_over, _ = self._game.step(move if valid else _NO_MOVE)
      game_over = game_over or self._reply()
    steps = sum(seat.narrator.step for seat in self._seats)
    done = bool(game_over) or steps >= self._max_steps
    if done and is_move:
      # `get_observation` is that of another player if it is the other's turn.
      seat.read(self._game.state.observations[player])
    if game_over:
      given, _ = self._game.close()
      rewards = {number: _number(given[number]) for number in rewards}
      seat.transcript.append(f'The game is over: {rewards[player]:g}.')
    result, final_anchor = rewards[self._player], None
    if done:
      errors = _count_errors(self._game)
      final_anchor = seat.anchor(errors, game_over=bool(game_over))
    return base.StepResult(
      observation=None if done else self._observe(is_new=is_move),
      final_anchor=final_anchor,
      reward=rewards.pop(player),
      valid=valid,
      action=action,
      success=bool(game_over) and result >= self._success_reward,
      done=done,
      score=min(1.0, max(0.0, result)) if done else None,
      other_rewards={self._agent(n): x for n, x in rewards.items()}
      if game_over
      else {},
    )

  def _observe(self, *, is_new: bool = True) -> base.Observation:
    """Returns the observation of the player whose turn it is.

    Args:
      is_new: whether the game went on since the last observation.
    """
    player = self._current_player()
    seat = self._seats[player]
    if is_new:
      seat.read(self._game.get_observation()[1])
    errors = _count_errors(self._game)
    return seat.observe(self._actions, self._agent(player), errors)

  def _agent(self, player: int) -> str:
    """Returns the name of a player as an agent; '' without self-play."""
    return f'player {player}' if self._self_play else ''

  def _reply(self) -> bool:
    """Plays the opponent's turns; returns whether the game is over."""
    for _ in range(_MAX_REPLIES):
      if self._opponent is None or self._current_player() in self._own_players:
        return False
      with self._sandbox():
        _, messages = self._game.get_observation()
        game_over, _ = self._game.step(self._opponent_move(messages))
      if game_over:
        return True
    raise ValueError(
      f'env.opponent: {_MAX_REPLIES} moves in a row without an end of its turn'
    )

  def _opponent_move(self, messages: Sequence[tuple[Any, str, Any]]) -> str:
    """Returns the opponent's move; a random opponent draws a legal one."""
    # Rules may contain examples that look like a list of moves.
    skips_rules = self._opponent_is_random and not self._free_text
    rules = self._textarena.ObservationType.PROMPT if skips_rules else None
    text = '\n'.join(str(text) for _, text, kind in messages if kind != rules)

    def draw() -> str:
      return self._opponent(text, self._opponent_rng)

    return self._draw_legal(draw) if self._opponent_is_random else draw()

  def _draw_legal(self, draw: Callable[[], str]) -> str:
    """Returns the first legal move that is drawn; the last one if none is."""
    for _ in range(_MAX_DRAWS):
      move = draw()
      if self._is_legal(move):
        break
    return move

  def _is_legal(self, move: str) -> bool:
    """Returns whether the game accepts a move; plays it in a copy."""
    game, random_state = copy.deepcopy((self._game, self._random_state))
    with random_state.active(), contextlib.redirect_stdout(io.StringIO()):
      game.step(move)
    return not _count_errors(game)

  def _current_player(self) -> int:
    return self._game.state.current_player_id

  @property
  def _free_text(self) -> bool:
    return self._actions == (FREE,)

  def close(self) -> None:
    """Does nothing; there is nothing to free."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Returns (observation, response) of random moves, as `random_play`.

    Moves are drawn from those that the game lists, otherwise from `actions`; in
    a game for two, from the legal ones.

    Args:
      task: the task to play.
      noise: ignored; all moves are random.
      seed: seed of the moves.

    Raises:
      ValueError: in one line, if the moves are not listed.
    """
    if self._free_text:
      raise ValueError(
        'env.actions=(): moves are not listed; demonstrations need a list of '
        'moves to draw from'
      )

    def draw(rng: np.random.Generator) -> str:
      text = self._seats[self._current_player()].text
      play = functools.partial(
        textarena_opponents.play_randomly, text, rng, actions=self._actions
      )
      return self._draw_legal(play) if self._num_players > 1 else play()

    return narrator.random_play(
      self,
      task,
      draw,
      respond=self._seats[0].narrator.format_response,
      seed=seed,
    )


def _number(reward: Any) -> float:
  """Returns a reward; 0 where a game swaps it with the reason of a loss."""
  return 0.0 if isinstance(reward, str) else float(reward)


def tasks(split: str, **kwargs) -> seeds.Seeds:
  """Returns the seeds of a split; accepts and checks the kwargs of `Env`."""
  Env(**kwargs)
  return seeds.Seeds(split, kwargs.get('seed', 0))


def _import() -> Any:
  try:
    import textarena
  except ImportError as error:
    raise ValueError(
      'env.name=textarena: textarena is not installed; run pip install -e '
      "'.[textarena]'"
    ) from error
  return textarena
