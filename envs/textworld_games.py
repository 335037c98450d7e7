"""Games from TextWorld's generator, played by TextWorld's engine.

Rooms, objects and a quest are drawn from the task's seed and compiled for the
Z-machine into the cache, which takes about a second per game. Quests of
'custom' games have a chosen length; the others are TextWorld's challenges.
"""

import argparse
import contextlib
import functools
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from envs import base, cache, narrator, seeds

CUSTOM = 'custom'
SUCCESS_REWARD = 10.0
_FORMAT = 1  # Version of the cached games.
_MAX_DRAWS = 10  # For some seeds there is no quest of the chosen length.
_GAME = 'game.z8'

_LAST_PYTHON = (3, 12)
# Observation after an inadmissible command.
_REFUSAL = 'That cannot be done now.'
# The interpreter's status line, which follows the feedback.
_STATUS = re.compile(r'\n>\s*(-=.*)?\Z', re.DOTALL)
_BLANKS = re.compile(r'\n\s*\n')


class _Parser(argparse.ArgumentParser):
  """Parses the settings of a game like TextWorld's own program."""

  def error(self, message: str) -> None:
    """Raises ValueError instead of exiting."""
    raise ValueError(message)


def parse(challenge: str, settings: dict) -> dict:
  """Returns all settings of a challenge, including defaults.

  Args:
    challenge: 'custom', or a TextWorld challenge without its 'tw-' prefix.
    settings: settings that differ from the defaults.

  Raises:
    ValueError: in one line, if the challenge or a setting is unknown.
  """
  known = _challenges()
  if challenge != CUSTOM and challenge not in known:
    raise ValueError(
      f'env.challenge={challenge}: must be one of '
      f'{", ".join((CUSTOM, *sorted(known)))}'
    )
  parser = _Parser(add_help=False, allow_abbrev=False)
  if challenge == CUSTOM:
    for name, default in (('rooms', 3), ('objects', 4), ('quest-length', 3)):
      parser.add_argument(f'--{name}', type=int, default=default)
  else:
    known[challenge][2](parser)
  flags = []
  for name, value in sorted(settings.items()):
    flag = f'--{name.replace("_", "-")}'
    if value is True:
      flags.append(flag)
    elif value is not False:
      flags.append(f'{flag}={value}')
  try:
    return vars(parser.parse_args(flags))
  except ValueError as error:
    raise ValueError(f'env.settings={settings}: {error}') from error


def _textworld() -> Any:
  if sys.version_info[:2] > _LAST_PYTHON:
    raise ValueError(
      'env.name=textworld: TextWorld does not support Python 3.13 and '
      'newer; use Python 3.11 or 3.12'
    )
  try:
    import textworld
    import textworld.challenges
    import textworld.generator
  except ImportError as error:
    raise ValueError(
      'env.name=textworld: textworld is not installed; run pip install -e '
      "'.[alfworld]'"
    ) from error
  return textworld


def _challenges() -> dict[str, tuple]:
  """Returns (description, make, add_arguments) of challenges by name."""
  challenges = _textworld().challenges.CHALLENGES
  return {name.removeprefix('tw-'): parts for name, parts in challenges.items()}


def _draw(seed: int, challenge: str, settings: dict) -> Any:
  """Returns a game that is not yet compiled, and its options."""
  textworld = _textworld()
  options = textworld.GameOptions()
  options.seeds = seed
  if challenge != CUSTOM:
    return _challenges()[challenge][1](settings, options), options
  options.nb_rooms, options.nb_objects = settings['rooms'], settings['objects']
  options.quest_length = settings['quest_length']
  return textworld.generator.make_game(options), options


@contextlib.contextmanager
def _no_score_warnings() -> Iterator[None]:
  """Hides warnings that the interpreter cannot score a generated game.

  TextWorld keeps the score itself. It hides the warnings only on import, which
  a library that resets the warning filters undoes.
  """
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'Game .* is not fully supported')
    yield


def _compile_game(
  folder: pathlib.Path, *, seed: int, challenge: str, settings: dict
) -> None:
  """Compiles the first game that can be drawn."""
  textworld = _textworld()
  rng = np.random.default_rng(seed)
  reason = ''
  for _ in range(_MAX_DRAWS):
    try:
      with contextlib.redirect_stdout(sys.stderr), _no_score_warnings():
        game, options = _draw(int(rng.integers(2**31)), challenge, settings)
    except (AssertionError, LookupError, RuntimeError, ValueError) as error:
      reason = ' '.join(str(error).split()) or type(error).__name__
      continue
    options.path = str(folder / _GAME)
    textworld.generator.compile_game(game, options)
    for path in folder.iterdir():
      # Keep only the game and the file that its engine reads.
      if path.suffix not in ('.z8', '.json'):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    return
  raise ValueError(
    f'env.settings={settings}: no game drawn in {_MAX_DRAWS} attempts '
    f'({reason}); choose another size or length'
  )


def compiled(seed: int, challenge: str, settings: dict) -> pathlib.Path:
  """Returns the path of a compiled game, compiling it if necessary.

  The game is a function of the arguments.
  """
  version = _textworld().__version__
  sorted_settings = sorted(settings.items())
  folder = cache.place(
    'textworld', _FORMAT, version, seed, challenge, sorted_settings
  )
  make = functools.partial(
    _compile_game, seed=seed, challenge=challenge, settings=settings
  )
  return cache.ensure(folder, make) / _GAME


def clean(text: str) -> str:
  """Returns the text of a game without the interpreter's status line."""
  feedback = _STATUS.sub('', text.strip(' '))
  return _BLANKS.sub('\n', feedback).strip()


class Env:
  """Plays one game at a time.

  Args:
    challenge: 'custom', 'coin_collector', 'treasure_hunter', 'cooking' or
      'simple'.
    settings: settings of the challenge, as for `tw-make`, such as `level`; for
      custom games rooms, objects and quest_length.
    num_games: maximum number of games of a split; each takes half a megabyte of
      the cache.
    seed: seed of the games.
    max_steps: maximum number of turns of an episode.
    history_length: K, the number of past turns in the prompt.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a valid response needs a `<think>` part.

  Raises:
    ValueError: in one line, if an argument is invalid.
  """

  def __init__(
    self,
    *,
    challenge: str = CUSTOM,
    settings: dict | None = None,
    num_games: int = 1_000,
    seed: int = 0,
    max_steps: int = 30,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    if num_games < 1:
      raise ValueError(f'env.num_games={num_games}: must be at least 1')
    seeds.check_seed(seed)
    self._challenge = challenge
    self._settings = parse(challenge, settings or {})
    self._num_games, self._seed = num_games, seed
    self._max_steps = max_steps
    self._narrator = narrator.Narrator(
      'You are an expert player of text adventures.',
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      brief_observations=True,
    )
    self._engine: Any = None
    self._path: pathlib.Path | None = None
    self._state: Any = None

  def games(self, split: str) -> seeds.Seeds:
    """Returns the seeds of the games of a split."""
    return seeds.Seeds(split, self._seed, self._num_games)

  def _game(self, task: base.Task) -> pathlib.Path:
    seed = self.games(task.split)[task.index]
    return compiled(seed, self._challenge, self._settings)

  def prepare(self, task: base.Task) -> None:
    """Compiles the game if it is not in the cache."""
    self._game(task)

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode and returns its first observation."""
    path = self._game(task)
    if path != self._path:
      self.close()
      self._engine, self._path = _start(path), path
    self._state = self._engine.reset()
    self._narrator.reset(clean(self._state.objective))
    return self._observe(clean(self._state.description))

  def step(self, response: str) -> base.StepResult:
    """Plays the command and returns the result."""
    command, valid = self._narrator.parse(response)
    admissible = command in self._commands()
    self._narrator.record_action(command)
    feedback = _REFUSAL
    if admissible:
      # Other commands may be the interpreter's own, such as `restore`.
      self._state, _, _ = self._engine.step(' '.join(command.split()))
      feedback = clean(self._state.feedback)
    won, lost = bool(self._state.won), bool(self._state.lost)
    done = won or lost or self._narrator.step >= self._max_steps
    observation = None
    if not done:
      observation = self._observe(feedback)
    return base.StepResult(
      observation=observation,
      final_anchor=self._facts() if done else None,
      reward=SUCCESS_REWARD if won else 0.0,
      valid=valid,
      action=command,
      success=won,
      done=done,
      metrics={'inadmissible_action_rate': float(not admissible)},
      score=self._score_share() if done else None,
    )

  def close(self) -> None:
    """Stops the interpreter."""
    if self._engine is not None:
      self._engine.close()
      self._engine = self._path = None

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of an expert that errs at some rate.

    Args:
      task: the game to play.
      noise: probability that a step's command is drawn from the admissible
        ones. The engine finds the way from there, if there is one.
      seed: seed of the noise.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    while observation is not None and self._state.policy_commands:
      command = self._state.policy_commands[0].lower()
      if rng.random() < noise:
        choices = self._commands()
        command = choices[rng.integers(len(choices))]
      response = self._narrator.format_response(f'I {command}.', command)
      yield observation, response
      observation = self.step(response).observation

  def _score_share(self) -> float:
    """Returns the score as a share of the maximum score."""
    score = max(0.0, float(self._state.score or 0.0))
    return score / max(1.0, float(self._state.max_score))

  def _commands(self) -> tuple[str, ...]:
    # Responses are parsed in lower case, which the engine accepts.
    return tuple(c.lower() for c in self._state.admissible_commands)

  def _facts(self) -> str:
    """Returns all facts of the state as text."""
    return '\n'.join(sorted(map(str, self._state.facts)))

  def _observe(self, text: str) -> base.Observation:
    return self._narrator.observe(
      text,
      anchor=self._facts(),
      actions=self._commands(),
    )


def tasks(split: str, **kwargs) -> seeds.Seeds:
  """Returns the seeds of a split; takes the keyword arguments of `Env`."""
  env = Env(**kwargs)
  split_seeds = env.games(split)
  # Fail early if no such game can be drawn.
  env.prepare(base.Task('train', 0))
  return split_seeds


def _start(path: pathlib.Path) -> Any:
  textworld = _textworld()
  infos = textworld.EnvInfos(
    admissible_commands=True,
    description=True,
    facts=True,
    lost=True,
    max_score=True,
    objective=True,
    policy_commands=True,
    score=True,
    won=True,
  )
  with _no_score_warnings():
    return textworld.start(str(path), request_infos=infos)
