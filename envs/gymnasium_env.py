"""Adapter that plays any Gymnasium environment in text; needs a config only.

The config names the environment's id, its actions and the task as a sentence.
Observations become text in one of three ways: by rule (`to_text`), by the
environment's own `ansi` rendering (without colours), or by a user's function.
With a user's function, its text is also the anchor. Otherwise the anchor is the
observation by rule, if its space has a rule, or else the rendered text.

A task is the seed that is passed to `reset`. Everything random in the
environment must be a function of it.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envs import (
  base,
  checks,
  demonstrators,
  gymnasium_actions,
  narrator,
  seeds,
)

_MAX_NUMBERS = 256  # in an observation that becomes text by rule
_DIGITS = 4  # significant digits that a prompt shows
_ALL_DIGITS = 9  # significant digits that distinguish all float32 numbers

# Terminal escape codes. Highlighted text is put in brackets instead.
_HIGHLIGHT = re.compile('\x1b\\[4[0-9]m(.*?)\x1b\\[0m')
_COLOUR = re.compile('\x1b\\[[0-9;]*m')


def to_text(
  space: Any, value: Any, names: Sequence[str] = (), digits: int = _DIGITS
) -> str:
  """Returns an observation as text, by the rule for its space.

  Args:
    space: the observation space.
    value: the observation.
    names: names of the entries of a flat observation; () for none.
    digits: significant digits of floating-point numbers.

  Raises:
    ValueError: if the space has no rule or the observation is too large.
  """
  from gymnasium import spaces

  if isinstance(space, spaces.Discrete):
    return str(int(value))
  if isinstance(space, spaces.Text):
    return str(value)
  if isinstance(space, spaces.Dict):
    return '\n'.join(
      f'{name}: {to_text(part, value[name], digits=digits)}'
      for name, part in space.spaces.items()
    )
  if isinstance(space, spaces.Tuple):
    pairs = zip(space.spaces, value, strict=True)
    return _join([to_text(*pair, digits=digits) for pair in pairs], names)
  if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
    numbers = np.asarray(value)
    if numbers.size > _MAX_NUMBERS:
      raise ValueError(
        f'an observation has {numbers.size} numbers; at most {_MAX_NUMBERS}'
      )
    if numbers.ndim > 1:
      rows = numbers.reshape(-1, numbers.shape[-1])
      return '\n'.join(
        ' '.join(_format(n, digits) for n in row) for row in rows
      )
    return _join([_format(n, digits) for n in numbers.reshape(-1)], names)
  raise ValueError(f'a {type(space).__name__} space has no generic description')


def _format(value: Any, digits: int) -> str:
  if np.issubdtype(np.asarray(value).dtype, np.floating):
    # The option z writes -0.0 as 0.
    return f'{float(value):z.{digits}g}'
  return str(int(value))


def _join(parts: Sequence[str], names: Sequence[str]) -> str:
  if not names:
    return ', '.join(parts)
  if len(names) != len(parts):
    raise ValueError(
      f'env.names={tuple(names)}: {len(names)} names for an observation of '
      f'{len(parts)} entries; must be as many'
    )
  pairs = zip(names, parts, strict=True)
  return '\n'.join(f'{name}: {part}' for name, part in pairs)


def strip_colours(text: str) -> str:
  """Removes terminal colours; writes `[x]` for a highlighted x."""
  return _COLOUR.sub('', _HIGHLIGHT.sub(r'[\1]', text)).strip('\n')


class Env:
  """A Gymnasium environment as a text environment.

  Args:
    id: registered id; `module:Name` imports the module first.
    options: further keyword arguments of `gymnasium.make`.
    wrappers: wrappers of the environment, the innermost first. Each is a pair:
      'module:Class' and a dict of the keyword arguments that follow the
      environment.
    actions: names of the discrete actions, in order; () uses their numbers. An
      environment with a Text action space accepts any text. In Box,
      MultiDiscrete and MultiBinary spaces an action is a number for each entry,
      and these are the names of the entries; () for none.
    task: sentence that states the task.
    observe: how observations become text: 'auto' by rule, see `to_text`;
      'render' by the environment's 'ansi' rendering; 'module:function' by a
      function of the observation.
    names: names of the entries of a flat observation, for 'auto'.
    success_return: an episode succeeds if its sum of rewards is at least this.
      If it is not above 0, the environment must also have terminated the
      episode. None: an episode succeeds if the environment terminates it with a
      positive reward.
    seed: base seed of the tasks.
    max_steps: step limit of an episode.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must contain a `<think>` part.
    demonstrator: play for a warm start, see `demonstrators`; '' for the expert
      of a tabular environment, or random actions.

  Raises:
    ValueError: in one line, if an argument is not valid.
  """

  def __init__(  # noqa: PLR0913
    self,
    *,
    id: str | None = None,
    options: dict | None = None,
    wrappers: Sequence[tuple[str, dict]] = (),
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
    demonstrator: str = '',
  ):
    seeds.check_seed(seed)
    self._env = _wrap(_make(id, options or {}, observe), wrappers)
    self._actions = gymnasium_actions.make(self._env.action_space, actions)
    self._task, self._seed = task, seed
    self._success_return = success_return
    self._max_steps, self._demonstrator = max_steps, demonstrator
    self._names = tuple(names)
    self._to_text = self._text_function(observe)
    self._to_anchor: Callable[[Any], str]
    self._narrator = narrator.Narrator(
      f'You are an expert agent operating in the environment {id}.',
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      brief_observations=True,
    )
    self._text = self._anchor = ''
    self._return = 0.0
    self._best_actions: np.ndarray | None = None
    self._choose_anchor(observe)

  def _text_function(self, observe: str) -> Callable[[Any], str]:
    if observe == 'auto':
      space = self._env.observation_space
      return functools.partial(to_text, space, names=self._names)
    if observe == 'render':
      return lambda _: strip_colours(str(self._env.render()))
    return checks.import_named(
      'env.observe',
      observe,
      accepted='auto, render or module:function',
      takes=('observation',),
    )

  def _choose_anchor(self, observe: str) -> None:
    """Sets the anchor function; tries both on a first observation.

    An observation that cannot become text is an error here, before any episode.
    """
    observation, _ = self._env.reset(seed=0)
    space = self._env.observation_space
    if observe not in ('auto', 'render'):
      # The user's function decides what belongs to the state.
      self._to_anchor = self._to_text
      self._record(observation)
      return
    try:
      self._to_anchor = functools.partial(to_text, space, digits=_ALL_DIGITS)
      self._to_anchor(observation)
    except ValueError as error:
      if observe == 'auto':
        raise ValueError(
          f"env.observe=auto: {error}; must be 'render' or a function, "
          "'module:function'"
        ) from error
      self._to_anchor = self._to_text
    self._record(observation)

  def prepare(self, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode with the task's seed."""
    seed = seeds.Seeds(task.split, self._seed)[task.index]
    observation, _ = self._env.reset(seed=seed)
    self._narrator.reset(self._task)
    self._return = 0.0
    return self._observe(observation)

  def step(self, response: str) -> base.StepResult:
    """Takes the named action; an invalid response only uses up a step."""
    action, valid = self._narrator.parse(
      response, keep_case=self._actions.keep_case
    )
    played = self._actions.parse(action) if valid else None
    valid = played is not None
    self._narrator.record_action(action)
    reward, ended, terminated = 0.0, False, False
    if valid:
      observation, reward, terminated, truncated, _ = self._env.step(played)
      terminated = bool(terminated)
      ended = terminated or bool(truncated)
      self._record(observation)
    self._return += float(reward)
    done = ended or self._narrator.step >= self._max_steps
    return base.StepResult(
      observation=None if done else self._build_observation(),
      # Some environments end in the observation of another turn.
      final_anchor=(self._anchor + '\n(over)' * terminated) if done else None,
      reward=float(reward),
      valid=valid,
      action=action,
      success=done and self._succeeded(terminated, float(reward)),
      done=done,
    )

  def close(self) -> None:
    """Closes the Gymnasium environment."""
    self._env.close()

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[str | base.Observation, str]]:
    """Returns (prompt or observation, response) of noisy play.

    Without `env.demonstrator`, see `narrator.random_play`.

    The expert of a tabular environment, such as FrozenLake, knows the
    probabilities of its transitions. Without an expert, all actions are random.

    Args:
      task: the task to play.
      noise: probability of a random action per step, if there is an expert.
      seed: seed of the actions.

    Raises:
      ValueError: in one line, if the actions are free text or there is no such
        demonstrator.
    """
    if self._demonstrator:
      return demonstrators.play(
        self, task, self._demonstrator, noise=noise, seed=seed
      )
    return narrator.random_play(
      self,
      task,
      self._actions.draw,
      respond=self._narrator.format_response,
      seed=seed,
      expert=self._expert() if noise < 1 else None,
      noise=noise,
    )

  def _expert(self) -> Callable[[], str] | None:
    """Returns the expert of a tabular environment, otherwise None."""
    env = self._env.unwrapped
    if not hasattr(env, 'P'):
      return None
    if self._best_actions is None:
      self._best_actions = best_actions(env.P)
    return lambda: self._actions.shown[self._best_actions[int(env.s)]]

  def _succeeded(self, terminated: bool, reward: float) -> bool:
    if self._success_return is None:
      return terminated and reward > 0
    # A threshold of 0 or less is also reached by invalid responses alone, whose
    # rewards are 0. It only counts if the environment terminated the episode.
    reached = self._return >= self._success_return
    return reached and (terminated or self._success_return > 0)

  def _record(self, observation: Any) -> None:
    self._text = self._to_text(observation)
    self._anchor = self._to_anchor(observation)

  def _observe(self, observation: Any) -> base.Observation:
    self._record(observation)
    return self._build_observation()

  def _build_observation(self) -> base.Observation:
    return self._narrator.observe(
      self._text, anchor=self._anchor, actions=self._actions.shown
    )


def best_actions(
  table: Mapping[int, Mapping[int, Sequence[tuple]]], discount: float = 0.99
) -> np.ndarray:
  """Returns the optimal action of each state, by value iteration.

  Args:
    table: (probability, next state, reward, terminated) of each transition, by
      state and action, as Gymnasium's tabular environments have it in `P`.
    discount: discount factor, below 1.
  """
  values_S = np.zeros(len(table))
  while True:
    q_SA = np.array(
      [
        [
          sum(
            p * (reward + discount * values_S[s] * (not terminated))
            for p, s, reward, terminated in table[state][action]
          )
          for action in sorted(table[state])
        ]
        for state in sorted(table)
      ]
    )
    change = np.abs(q_SA.max(axis=1) - values_S).max()
    values_S = q_SA.max(axis=1)
    if change <= 1e-9:
      return q_SA.argmax(axis=1)


def tasks(split: str, **kwargs) -> seeds.Seeds:
  """Returns the seeds of a split; accepts and checks the kwargs of `Env`."""
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
    raise ValueError(
      f'env.id={name}: must name an environment that is registered in gymnasium'
    )
  options = (
    {'render_mode': 'ansi'} | options if observe == 'render' else options
  )
  try:
    return gymnasium.make(name, **options)
  except (gymnasium.error.Error, ImportError) as error:
    reason = ' '.join(str(error).split())
    raise ValueError(
      f'env.id={name}: cannot be made: {reason.rstrip(".")}; must be a '
      'registered id, or module:id of a module that registers it'
    ) from error
  except Exception as error:  # Constructors may raise anything.
    reason = ' '.join(str(error).split())
    raise ValueError(f'env.options={options}: {reason}') from error


def _wrap(env: Any, wrappers: Sequence[tuple[str, dict]]) -> Any:
  for wrapper in wrappers:
    match wrapper:
      case [str(name), Mapping() as arguments]:
        make = checks.import_named(
          'env.wrappers', name, accepted='module:Class'
        )
      case _:
        raise ValueError(
          f"env.wrappers={tuple(wrappers)}: must be pairs of 'module:Class' "
          'and a dict of arguments'
        )
    try:
      env = make(env, **arguments)
    except Exception as error:  # Constructors may raise anything.
      reason = ' '.join(str(error).split())
      raise ValueError(f'env.wrappers={name}: {reason}') from error
  return env
