"""Games of TextArena for one player: one config away.

A game explains itself and answers in text; moves are words. A task is the seed
of a reset.
"""

import contextlib
import io
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from envs import base, narrator, seeds

FREE = '<your move>'
_PLAYER = 0


class Dice:
  """Python's and numpy's random numbers, kept apart from everybody else's.

  Games draw them from the one global source, which the episodes of a process
  share otherwise.
  """

  def __init__(self):
    self._states = (random.getstate(), np.random.get_state())

  @contextlib.contextmanager
  def thrown(self) -> Iterator[None]:
    """Draws of the block go on where the last block's ended."""
    outside = (random.getstate(), np.random.get_state())
    self._put(self._states)
    try:
      yield
    finally:
      self._states = (random.getstate(), np.random.get_state())
      self._put(outside)

  def _put(self, states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class Env:
  """One game of TextArena.

  Args:
    id: its registered name, such as 'TowerOfHanoi-v0'.
    options: of `textarena.make`.
    actions: the moves, where they are few, for the prompt and for random play;
      () for whatever the game's rules say. Brackets around a move can be left
      out.
    board: regular expression of that part of the game's words that is its
      state, by which steps are compared; '' takes the boards that the game
      marks as such, or else all that was said and done.
    success_reward: reward of the game from which an episode is a success.
    seed: another one, other seeds.
    max_steps: turns after which an unfinished game ends.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must hold a `<think>` part.

  Raises:
    ValueError: in one line, if an argument cannot be used.
  """

  def __init__(
    self,
    *,
    id: str | None = None,
    options: dict | None = None,
    actions: Sequence[str] = (),
    board: str = '',
    success_reward: float = 1.0,
    seed: int = 0,
    max_steps: int = 50,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    seeds.check_seed(seed)
    self._arena = _import()
    self._dice = Dice()
    self._actions = tuple(map(str, actions)) or (FREE,)
    if any(str(action) != str(action).lower() for action in actions):
      raise ValueError(f'env.actions={actions}: must be in lower case')
    self._success_reward, self._seed = success_reward, seed
    self._max_steps = max_steps
    self._narrator = narrator.Narrator(
      'You are an expert player of text games.',
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      brief_observations=True,
    )
    try:
      self._pattern = re.compile(board, re.DOTALL)
    except re.error as error:
      raise ValueError(f'env.board={board}: {error}') from error
    self._id, self._options = id, options or {}
    self._game = self._make()
    self._text = self._board = ''
    # Whether what was said last did not show the board.
    self._unshown = False
    self._told: list[str] = []

  def _make(self) -> Any:
    """Returns a game that has been begun once, for errors to come at once."""
    name, options = self._id, self._options
    try:
      with self._quietly():
        # Without what formats observations for one long conversation.
        game = self._arena.make(f'{name}-raw', **options)
        game.reset(num_players=1, seed=0)
    except (AssertionError, LookupError, OSError) as error:
      reason = ' '.join(str(error).split())[:200]
      raise ValueError(
        f'env.id={name}: cannot be played by one, or lacks data: {reason}'
      ) from error
    except (ImportError, SyntaxError, ValueError) as error:
      raise ValueError(f'env.id={name}: cannot be made: {error}') from error
    except TypeError as error:
      raise ValueError(f'env.options={options}: {error}') from error
    return game

  @contextlib.contextmanager
  def _quietly(self) -> Iterator[None]:
    """Games print while they make puzzles."""
    with self._dice.thrown(), contextlib.redirect_stdout(io.StringIO()):
      yield

  def prepare(self, task: base.Task) -> None:
    """Has nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts a game with the task's seed; a new one, for some keep things."""
    seed = seeds.Seeds(task.split, self._seed)[task.index]
    self._game = self._make()
    with self._quietly():
      # numpy takes 32 bits; most games seed Python's numbers alone.
      np.random.seed(seed)
      random.seed(seed)
      self._game.reset(num_players=1, seed=seed)
    self._told, self._board, self._unshown = [], '', False
    rules = self._listen()
    self._narrator.begin(rules)
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Makes the move; the game answers what it makes of it."""
    action, valid = self._narrator.project(response, keep_case=self._free)
    self._narrator.take(action)
    done, outcome = False, 0.0
    if valid:
      with self._quietly():
        move = action if '[' in action else f'[{action}]'
        done, _ = self._game.step(move)
      self._listen()
    if done:
      rewards, _ = self._game.close()
      outcome = float(rewards[_PLAYER])
      self._told.append(f'The game is over: {outcome:g}.')
    over = done or self._narrator.step >= self._max_steps
    return base.StepResult(
      observation=None if over else self._observe(),
      final_anchor=self._where(ended=bool(done)) if over else None,
      reward=outcome,
      valid=valid,
      action=action,
      success=bool(done) and outcome >= self._success_reward,
      done=bool(over),
      score=min(1.0, max(0.0, outcome)) if over else None,
    )

  @property
  def _free(self) -> bool:
    return self._actions == (FREE,)

  def close(self) -> None:
    """Holds nothing."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[str, str]]:
    """Returns (prompt, response) of random play; see `narrator`.

    Args:
      task: the game to play.
      noise: does not matter.
      seed: of the moves.

    Raises:
      ValueError: in one line, if moves are not listed.
    """
    if self._free:
      raise ValueError(
        'env.actions=(): moves are not listed; nothing to imitate'
      )
    return narrator.random_play(
      self, task, self._actions, respond=self._narrator.respond, seed=seed
    )

  def _listen(self) -> str:
    """Takes in what the game has said since; returns its rules, if told."""
    kinds = self._arena.ObservationType
    rules, said = [], []
    _, messages = self._game.get_observation()
    shown = ''
    for sender, message, kind in messages:
      message = str(message).strip()
      if kind == kinds.PROMPT:
        rules.append(message)
      # Some games mix up the two.
      elif kinds.PLAYER_ACTION in (sender, kind):
        self._told.append(f'> {message}')
      else:
        said.append(message)
      if kind == kinds.GAME_BOARD and not self._pattern.pattern:
        shown = message
    self._told += said
    if self._pattern.pattern:
      found = self._pattern.search('\n'.join([*rules, *said]))
      shown = found[0].strip() if found else ''
    # What is told of a forbidden move does not show it.
    self._unshown = not shown
    self._board = shown or self._board
    if self._board and not any(self._board in text for text in (*said, *rules)):
      said.append(self._board)
    self._text = '\n'.join(said) or 'The game begins.'
    return '\n'.join(rules)

  def _where(self, *, ended: bool = False) -> str:
    """The board as it was shown last; of games without, all that was said."""
    if not self._board:
      return '\n'.join(self._told)
    notes = [self._told[-1]] if ended else []
    # After a forbidden move another one may end the game.
    if self._unshown and not ended:
      notes = ['(not shown again)']
    return '\n'.join([self._board, *notes])

  def _observe(self) -> base.Observation:
    return self._narrator.observe(
      self._text, anchor=self._where(), actions=self._actions
    )


def tasks(split: str, **kwargs) -> seeds.Seeds:
  """Returns the seeds of a split; takes the kwargs of `Env`."""
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
