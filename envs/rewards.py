"""Reward functions: the user's own rewards of finished episodes.

A reward function is named 'module:function' and called with an `Episode`. It
returns a number per turn, or one number for the whole episode (a rubric, a
judge), which is the reward of the last turn. 'module:Class' names a dataclass
whose instances are called in the same way. Its fields are options; a property
`problem`, if it has one, says in one line what its options lack. A property
`longest_call_secs` bounds the time of a call.

The functions are called in worker processes. For the pool of these processes,
`Env` presents them as an environment: the pool bounds their time and reports
exceptions, unusable values and dead processes as it does for environments.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envs import base, checks, messages, worker


@dataclasses.dataclass(frozen=True)
class Turn:
  """A turn of a finished episode.

  Attributes:
    text: the environment's own text before the response.
    prompt: the user message; in a conversation, for display only.
    messages: the new messages of a conversation, as (role, text).
    response: the policy's response.
    action: the action that the environment parsed from it.
    reward: the environment's reward.
    valid: whether the response had the required form.
    metrics: the environment's metrics of the step.
  """

  text: str
  prompt: str
  messages: tuple[tuple[str, str], ...]
  response: str
  action: str
  reward: float
  valid: bool
  metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Episode:
  """What a reward function is called with.

  Attributes:
    task: identifies the initial state.
    task_text: the task description; '' if the environment gives none.
    turns: the turns in order; at least one.
    success: whether the task is accomplished.
    score: score in [0, 1]; None if the environment has none.
    final_state: the final state; None if unknown.
  """

  task: base.Task
  task_text: str
  turns: tuple[Turn, ...]
  success: bool
  score: float | None
  final_state: str | None


RewardFunction = Callable[[Episode], float | Sequence[float]]


def name_of(path: str) -> str:
  """Returns the name of a function, by which its values are reported."""
  return path.rpartition(':')[2].lower()


def make(
  path: str, options: Mapping[str, Any], *, field: str = 'reward.functions'
) -> RewardFunction:
  """Returns a reward function.

  Args:
    path: 'module:function', or 'module:Class' for a dataclass.
    options: fields of the dataclass.
    field: config field that names the function, for errors.

  Raises:
    ValueError: in one line, if there is no such function or an option is wrong.
  """
  target = checks.import_named(
    field, path, accepted='module:function', takes=('episode',)
  )
  field = f'{field}={path}'
  if not isinstance(target, type):
    known = ()
  elif dataclasses.is_dataclass(target):
    known = tuple(f.name for f in dataclasses.fields(target) if f.init)
  else:
    raise ValueError(f'{field}: a class must be a dataclass')
  if unknown := sorted(set(options) - set(known)):
    raise ValueError(
      f'reward.{name_of(path)}.{unknown[0]}={options[unknown[0]]}: {path} has '
      f'no such option; must be of {", ".join(known) or "none"}'
    )
  try:
    function = target(**options) if isinstance(target, type) else target
  except ValueError as error:
    prefix = f'reward.{name_of(path)}.'
    lines = [prefix + line for line in str(error).splitlines()]
    raise ValueError('\n'.join(lines)) from error
  except Exception as error:  # The class of a user may raise anything.
    reason = ' '.join(str(error).split())
    raise ValueError(
      f'reward.{name_of(path)}: {path} refuses its options {dict(options)} '
      f'({type(error).__name__}: {reason})'
    ) from error
  if not callable(function):
    raise ValueError(f'{field}: cannot be called; must be a function')
  return function


def encode(episode: Episode) -> str:
  """Returns an episode as text."""
  return json.dumps(dataclasses.asdict(episode), ensure_ascii=False)


def decode(text: str) -> Episode:
  """Returns the episode of a text."""
  plain = json.loads(text)
  plain['task'] = base.Task(**plain['task'])
  plain['turns'] = tuple(
    Turn(**turn | {'messages': tuple(map(tuple, turn['messages']))})
    for turn in plain['turns']
  )
  return Episode(**plain)


def per_turn(name: str, value: Any, num_turns: int) -> list[float]:
  """Returns a function's value as one reward per turn.

  Args:
    name: name of the function.
    value: what it returned.
    num_turns: number of turns of the episode.

  Raises:
    messages.UnusableReplyError: in one line, if it is neither a number nor a
      number per turn, or is out of bounds.
  """
  try:
    rewards = np.asarray(value, float)
    entries = np.asarray(value).flat
    # NumPy reads numbers from texts.
    is_usable = not any(isinstance(x, str | bytes | None) for x in entries)
  except (OverflowError, TypeError, ValueError):
    is_usable = False
  if not is_usable:
    rewards = np.full((1, 2), np.nan)
  if rewards.ndim == 0:
    rewards = np.append(np.zeros(num_turns - 1), rewards)
  if rewards.shape != (num_turns,):
    raise messages.UnusableReplyError(
      f'{name} returned {value!r:.80}; must be a number, or one per turn '
      f'({num_turns})'
    )
  bound = messages.BOUNDS['reward']
  if not (np.abs(rewards) <= bound).all():
    raise messages.UnusableReplyError(
      f'{name} returned {value!r:.80}; must be numbers within +-{bound:,.0f}'
    )
  return [float(reward) for reward in rewards]


class Env:
  """Calls reward functions; an environment for the pool of workers.

  Its first step receives an encoded episode. The step t reports the rewards of
  turn t as metrics, by the name of the function.

  Args:
    functions: paths of the functions.
    options: options of the functions, by name.
  """

  def __init__(
    self, functions: Sequence[str], options: Mapping[str, Mapping[str, Any]]
  ):
    self._functions = {
      name_of(path): make(path, options.get(name_of(path), {}))
      for path in functions
    }
    self._rewards: list[dict[str, float]] = []

  def prepare(self, task: base.Task) -> None:
    """Does nothing."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts to score an episode of a task."""
    del task
    self._rewards = []
    return base.Observation('', '', '', '')

  def step(self, response: str) -> base.StepResult:
    """Returns the rewards of the next turn.

    Args:
      response: the episode in the first step, '' later.
    """
    if response:
      self._rewards = self._score(decode(response))
    metrics = self._rewards.pop(0)
    done = not self._rewards
    return base.StepResult(
      observation=None if done else base.Observation('', '', '', ''),
      reward=0.0,
      valid=True,
      action='',
      success=False,
      done=done,
      metrics=metrics,
    )

  def close(self) -> None:
    """Does nothing."""

  def _score(self, episode: Episode) -> list[dict[str, float]]:
    """Returns the rewards of each turn, by function."""
    count = len(episode.turns)
    columns = {
      name: per_turn(name, _call(name, function, episode), count)
      for name, function in self._functions.items()
    }
    return [
      {name: rewards[t] for name, rewards in columns.items()}
      for t in range(count)
    ]


def _call(name: str, function: RewardFunction, episode: Episode) -> Any:
  """Returns the value of a function.

  Raises:
    messages.ReportedError: with the function's name, if it raises anything.
  """
  try:
    return function(episode)
  except worker.ERRORS as error:
    module = sys.modules.get(getattr(function, '__module__', ''))
    reason = worker.format_exception(error, getattr(module, '__file__', None))
    raise messages.ReportedError(f'{name} raised {reason}') from error


def tasks(split: str, **options: Any) -> Sequence[base.Task]:
  """Returns no tasks: the trainer chooses the episodes to score."""
  del split, options
  return ()
