"""What runs in a worker process: many environments, one call at a time.

Speaks over a pipe with `gigpo_jax.env_pool`. Lives here so that the process
imports neither jax nor gigpo_jax.

Calls are pickled tuples (kind, env, argument), answered one by one and in
order by ('reply', value), or ('error', line) of what was raised, or ('garbage',
line) of an answer that cannot be used. The first answer, before any call, tells
whether an environment could be made.
"""

import contextlib
import ctypes
import numbers
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import envs
from envs import base

_PR_SET_PDEATHSIG = 1

# Simulators also leave by sys.exit, which is no Exception.
_ERRORS = (Exception, SystemExit)

# Bounds of numbers in an answer. Advantages and algorithm.components square
# sums of them in float32, which ends at 3.4e38.
BOUNDS = {'reward': 1e6, 'score': 1e6}
LARGEST_METRIC = 1e12

_ANSWERS = {'reset': base.Observation, 'step': base.StepResult}

Answer = tuple[str, Any]


class Host:
  """The environments of a process, made when they are first called.

  Args:
    name: of the environment, in `envs.REGISTRY`.
    kwargs: its arguments.
  """

  def __init__(self, name: str, kwargs: dict):
    self._name, self._kwargs = name, kwargs
    self._envs: dict[int, base.Env] = {}
    self._spare: list[base.Env] = []

  def start(self) -> Answer:
    """Makes one environment ahead, to see whether it can be made."""
    try:
      self._spare.append(envs.make(self._name, **self._kwargs))
    except _ERRORS as error:
      return 'error', describe(error)
    return 'reply', None

  def call(self, kind: str, env: int, argument: Any) -> Answer:
    """Calls prepare, reset or step; whatever it raises becomes a line."""
    try:
      if kind == 'step' and env not in self._envs:
        raise LookupError('a step of an environment that has no episode')
      if env not in self._envs:
        self._envs[env] = (
          self._spare.pop()
          if self._spare
          else envs.make(self._name, **self._kwargs)
        )
      value = getattr(self._envs[env], kind)(argument)
      if wrong := _wrong(kind, value):
        self._drop(env)
        return 'garbage', f'env.name={self._name}: {wrong}'
    except _ERRORS as error:
      # A failed preparation says nothing about the episode under way.
      if kind != 'prepare':
        self._drop(env)
      return 'error', describe(error)
    return 'reply', value

  def close(self) -> None:
    """Closes all environments."""
    for env in list(self._envs):
      self._drop(env)

  def _drop(self, env: int) -> None:
    # One that broke may not even close; there is nothing left to save.
    with contextlib.suppress(*_ERRORS):
      if env in self._envs:
        self._envs.pop(env).close()


def _wrong(kind: str, value: Any) -> str:
  """Returns what is wrong with an answer; '' if it can be used."""
  if kind not in _ANSWERS:
    return ''
  wanted = _ANSWERS[kind]
  if not isinstance(value, wanted):
    return f'{kind} gave {type(value).__name__}, not {wanted.__name__}'
  if isinstance(value, base.Observation):
    return _wrong_observation(value)
  return _wrong_result(value)


def _wrong_result(value: base.StepResult) -> str:
  following = value.observation
  if following is not None:
    if not isinstance(following, base.Observation):
      return f'observation is {type(following).__name__}, not Observation'
    if wrong := _wrong_observation(following):
      return wrong
  for name in ('valid', 'success', 'done'):
    if not isinstance(getattr(value, name), (bool, np.bool_)):
      return f'{name}={getattr(value, name)!r:.80}: must be True or False'
  if bool(value.done) != (following is None):
    return f'done={value.done} does not go with what is to be seen next'
  return _wrong_figures(value) or _wrong_text(
    action=value.action,
    final_anchor='' if value.final_anchor is None else value.final_anchor,
  )


def _wrong_figures(value: base.StepResult) -> str:
  if not isinstance(value.metrics, dict):
    return f'metrics is {type(value.metrics).__name__}, not dict'
  figures = {'reward': value.reward}
  if value.score is not None:
    figures['score'] = value.score
  for name, x in (figures | value.metrics).items():
    if not isinstance(name, str):
      return f'a metric is called {name!r:.80}, not a str'
    bound = BOUNDS.get(name, LARGEST_METRIC)
    if not isinstance(x, numbers.Real) or not abs(x) <= bound:
      return f'{name}={x!r:.80}: must be a number within +-{bound:,.0f}'
  return ''


def _wrong_observation(value: base.Observation) -> str:
  if not isinstance(value.actions, (tuple, list)):
    return f'actions is {type(value.actions).__name__}, not tuple'
  return _wrong_text(
    prompt=value.prompt,
    short_prompt=value.short_prompt,
    anchor=value.anchor,
    text=value.text,
    task=value.task,
    **{f'actions[{n}]': action for n, action in enumerate(value.actions)},
  )


def _wrong_text(**texts: Any) -> str:
  for name, text in texts.items():
    if not isinstance(text, str):
      return f'{name} is {type(text).__name__}, not str'
    try:
      text.encode()
    except UnicodeEncodeError as error:
      return f'{name} is no text: {error}'
  return ''


def main(pipe: Connection, name: str, kwargs: dict, parent: int) -> None:
  """Serves calls until the pipe closes or the parent is gone."""
  die_with(parent)
  # Ctrl-C, and SIGTERM of a machine that is taken away, go to all processes;
  # the parent decides what ends.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  # Simulators print, also from C; stdout belongs to the results of commands.
  os.dup2(sys.stderr.fileno(), 1)
  host = Host(name, kwargs)
  try:
    pipe.send_bytes(_pickle(host.start()))
    while True:
      call = pickle.loads(pipe.recv_bytes())
      pipe.send_bytes(_pickle(host.call(*call)))
  except (EOFError, OSError):
    host.close()


def die_with(parent: int) -> None:
  """Asks the kernel to end this process when its parent dies (Linux)."""
  try:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  except (AttributeError, OSError, TypeError):
    return  # Elsewhere the closing pipe has to do.
  if os.getppid() != parent:
    os._exit(0)


def _pickle(answer: Answer) -> bytes:
  try:
    return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
  except _ERRORS as error:  # What __reduce__ of any class may raise.
    return pickle.dumps(('garbage', describe(error)))


def describe(error: BaseException) -> str:
  """Returns an exception in one line, with where it was raised."""
  text = ' '.join(str(error).split()) or type(error).__name__
  # Half a character could not be printed.
  text = text.encode(errors='backslashreplace').decode()
  trace = error.__traceback__
  while trace and trace.tb_next:
    trace = trace.tb_next
  place = ''
  if trace:
    file = os.path.basename(trace.tb_frame.f_code.co_filename)
    place = f' ({file}:{trace.tb_lineno})'
  return f'{type(error).__name__}: {text}{place}'
