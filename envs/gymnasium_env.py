"""Any gymnasium environment in words: one config away.

What it needs is an id, names for its actions and a sentence that says what is
to be done. Observations are told by rule (`tell`), as the environment renders
itself in text (without colours), or by a function of one's own, whose words are
the anchors then; else anchors are observations by rule, where there is one. A
task is the seed of a reset, of which all that is random must be a function.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from envs import base, narrator, seeds

FREE = '<your own words>'
_MAX_NUMBERS = 256  # of an observation that is told by rule
_DIGITS = 4
_ALL_DIGITS = 9  # of a float32

# Colours of a terminal; what is highlighted gets brackets.
_HIGHLIGHT = re.compile('\x1b\\[4[0-9]m(.*?)\x1b\\[0m')
_COLOUR = re.compile('\x1b\\[[0-9;]*m')


def tell(
  space: Any, value: Any, names: Sequence[str] = (), digits: int = _DIGITS
) -> str:
  """Returns an observation in words, by rule.

  Args:
    space: what it is one of.
    value: the observation.
    names: of its entries, where it is a list; () for none.
    digits: of numbers that are not whole.

  Raises:
    ValueError: if there is no rule for such a space.
  """
  from gymnasium import spaces

  if isinstance(space, spaces.Discrete):
    return str(int(value))
  if isinstance(space, spaces.Text):
    return str(value)
  if isinstance(space, spaces.Dict):
    return '\n'.join(
      f'{name}: {tell(part, value[name], digits=digits)}'
      for name, part in space.spaces.items()
    )
  if isinstance(space, spaces.Tuple):
    pairs = zip(space.spaces, value, strict=True)
    return _entries([tell(*pair, digits=digits) for pair in pairs], names)
  if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
    numbers = np.asarray(value)
    if numbers.size > _MAX_NUMBERS:
      raise ValueError(
        f'an observation of {numbers.size} numbers; at most {_MAX_NUMBERS}'
      )
    if numbers.ndim > 1:
      rows = numbers.reshape(-1, numbers.shape[-1])
      return '\n'.join(
        ' '.join(_number(n, digits) for n in row) for row in rows
      )
    return _entries([_number(n, digits) for n in numbers.reshape(-1)], names)
  raise ValueError(f'no rule for a space {type(space).__name__}')


def _number(value: Any, digits: int) -> str:
  if np.issubdtype(np.asarray(value).dtype, np.floating):
    # Nothing has no sign.
    return f'{float(value):z.{digits}g}'
  return str(int(value))


def _entries(parts: Sequence[str], names: Sequence[str]) -> str:
  if not names:
    return ', '.join(parts)
  if len(names) != len(parts):
    raise ValueError(
      f'env.names={tuple(names)}: {len(names)} names of {len(parts)} numbers'
    )
  pairs = zip(names, parts, strict=True)
  return '\n'.join(f'{name}: {part}' for name, part in pairs)


def strip_colours(text: str) -> str:
  """Returns a terminal's text as plain text, `[x]` for a highlighted x."""
  return _COLOUR.sub('', _HIGHLIGHT.sub(r'[\1]', text)).strip('\n')


class Env:
  """One environment of gymnasium.

  Args:
    id: its registered name; `module:Name` imports the module first.
    options: of `gymnasium.make`.
    actions: names of its actions, in order; () numbers them. Environments with
      a Text space take any words.
    task: what is to be done, a sentence.
    observe: 'auto', see `tell`; 'render', its own text ('ansi'); or
      'module:function', which takes an observation.
    names: of the entries of an observation that is a list, for 'auto'.
    success_return: sum of rewards from which an episode is a success, if it is
      not above 0 only where the environment ends it; None: where it does so
      with a reward above 0.
    seed: another one, other seeds.
    max_steps: turns after which an unfinished episode ends.
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
    task: str = 'reach the goal.',
    observe: str = 'auto',
    names: Sequence[str] = (),
    success_return: float | None = None,
    seed: int = 0,
    max_steps: int = 50,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    seeds.check_seed(seed)
    self._env = _make(id, options or {}, observe)
    self._actions = _name_actions(self._env.action_space, tuple(actions))
    self._task, self._seed = task, seed
    self._success_return = success_return
    self._max_steps = max_steps
    self._names = tuple(names)
    self._tell = self._rule(observe)
    self._mark: Callable[[Any], str]
    self._narrator = narrator.Narrator(
      f'You are an expert agent operating in the environment {id}.',
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      brief_observations=True,
    )
    self._text = self._anchor = ''
    self._return = 0.0
    self._try(observe)

  def _rule(self, observe: str) -> Callable[[Any], str]:
    if observe == 'auto':
      space = self._env.observation_space
      return functools.partial(tell, space, names=self._names)
    if observe == 'render':
      return lambda _: strip_colours(str(self._env.render()))
    return _function(observe)

  def _try(self, observe: str) -> None:
    """Tells an observation, for errors to come at once."""
    observation, _ = self._env.reset(seed=0)
    space = self._env.observation_space
    if observe not in ('auto', 'render'):
      # What a function leaves out is no part of the state.
      self._mark = self._tell
      self._see(observation)
      return
    try:
      self._mark = functools.partial(tell, space, digits=_ALL_DIGITS)
      self._mark(observation)
    except ValueError as error:
      if observe == 'auto':
        raise ValueError(
          f"env.observe=auto: {error}; must be 'render' or a function, "
          "'module:function'"
        ) from error
      self._mark = self._tell
    self._see(observation)

  def prepare(self, task: base.Task) -> None:
    """Has nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode with the task's seed."""
    seed = seeds.Seeds(task.split, self._seed)[task.index]
    observation, _ = self._env.reset(seed=seed)
    self._narrator.begin(self._task)
    self._return = 0.0
    return self._observe(observation)

  def step(self, response: str) -> base.StepResult:
    """Does the named action; where there is none nothing happens."""
    action, valid = self._narrator.project(response, keep_case=self._free)
    valid = valid and self._admits(action)
    self._narrator.take(action)
    reward, over, ended = 0.0, False, False
    if valid:
      observation, reward, ended, cut, _ = self._env.step(self._chosen(action))
      over = bool(ended or cut)
      self._see(observation)
    self._return += float(reward)
    done = over or self._narrator.step >= self._max_steps
    return base.StepResult(
      observation=None if done else self._told(),
      final_anchor=self._anchor if done else None,
      reward=float(reward),
      valid=valid,
      action=action,
      success=done and self._succeeded(bool(ended), float(reward)),
      done=done,
    )

  @property
  def _free(self) -> bool:
    return self._actions == (FREE,)

  def close(self) -> None:
    """Closes the environment."""
    self._env.close()

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[str, str]]:
    """Returns (prompt, response) of random play; see `narrator`.

    Args:
      task: the episode to play.
      noise: does not matter.
      seed: of the actions.

    Raises:
      ValueError: in one line, if actions have no names.
    """
    if self._free:
      raise ValueError('env.actions=(): any words; there is nothing to imitate')
    return narrator.random_play(
      self, task, self._actions, respond=self._narrator.respond, seed=seed
    )

  def _admits(self, action: str) -> bool:
    if self._free:
      return self._env.action_space.contains(action)
    return action in self._actions

  def _chosen(self, action: str) -> Any:
    if self._free:
      return action
    return self._env.action_space.start + self._actions.index(action)

  def _succeeded(self, ended: bool, reward: float) -> bool:
    if self._success_return is None:
      return ended and reward > 0
    # A sum below 0 is had by doing nothing: only at the environment's own end.
    reached = self._return >= self._success_return
    return reached and (ended or self._success_return > 0)

  def _see(self, observation: Any) -> None:
    self._text, self._anchor = self._tell(observation), self._mark(observation)

  def _observe(self, observation: Any) -> base.Observation:
    self._see(observation)
    return self._told()

  def _told(self) -> base.Observation:
    return self._narrator.observe(
      self._text, anchor=self._anchor, actions=self._actions
    )


def tasks(split: str, **kwargs) -> seeds.Seeds:
  """Returns the seeds of a split; takes the kwargs of `Env`."""
  Env(**kwargs).close()
  return seeds.Seeds(split, kwargs.get('seed', 0))


def _make(name: str | None, options: dict, observe: str) -> Any:
  try:
    import gymnasium
  except ImportError as error:
    raise ValueError(
      'env.name=gymnasium: gymnasium is not installed; run pip install -e '
      "'.[gymnasium]'"
    ) from error
  if not name:
    raise ValueError(f'env.id={name}: must name an environment of gymnasium')
  options = (
    {'render_mode': 'ansi'} | options if observe == 'render' else options
  )
  try:
    return gymnasium.make(name, **options)
  except (gymnasium.error.Error, ImportError) as error:
    reason = ' '.join(str(error).split())
    raise ValueError(f'env.id={name}: cannot be made: {reason}') from error
  except Exception as error:  # Whatever the environment raises.
    reason = ' '.join(str(error).split())
    raise ValueError(f'env.options={options}: {reason}') from error


def _name_actions(space: Any, actions: tuple[str, ...]) -> tuple[str, ...]:
  from gymnasium import spaces

  if isinstance(space, spaces.Text) and not actions:
    return (FREE,)
  if not isinstance(space, spaces.Discrete):
    raise ValueError(
      f'env.id: its actions are a {type(space).__name__}; must be Discrete, or '
      'Text'
    )
  found = actions or tuple(map(str, range(int(space.n))))
  if len(set(found)) != int(space.n) or any(a != a.lower() for a in found):
    raise ValueError(
      f'env.actions={actions}: must be {int(space.n)} different names in lower '
      'case'
    )
  return found


def _function(name: str) -> Callable[[Any], str]:
  module, colon, function = name.partition(':')
  try:
    if not colon:
      raise ImportError('must be auto, render or module:function')
    return vars(importlib.import_module(module))[function]
  except (ImportError, KeyError) as error:
    raise ValueError(f'env.observe={name}: not found: {error}') from error
