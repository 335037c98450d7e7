"""What runs in a worker process: many environments, one call at a time.

Speaks over a pipe with `gigpo_jax.env_pool`. Lives here so that the process
imports neither jax nor gigpo_jax.

Calls are pickled tuples (kind, env, argument), answered one by one and in
order by ('reply', value) or ('error', line). The first answer, before any
call, tells whether an environment could be made.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import envs
from envs import base

_PR_SET_PDEATHSIG = 1

# Simulators also leave by sys.exit, which is no Exception.
_ERRORS = (Exception, SystemExit)

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
      if kind in _ANSWERS and not isinstance(value, _ANSWERS[kind]):
        wanted = _ANSWERS[kind].__name__
        raise TypeError(f'{kind} gave {type(value).__name__}, not {wanted}')
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


def main(pipe: Connection, name: str, kwargs: dict, parent: int) -> None:
  """Serves calls until the pipe closes or the parent is gone."""
  _die_with(parent)
  # Ctrl-C goes to the whole process group; the parent decides what ends.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
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


def _die_with(parent: int) -> None:
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
    return pickle.dumps(('error', describe(error)))


def describe(error: BaseException) -> str:
  """Returns an exception in one line, with where it was raised."""
  text = ' '.join(str(error).split()) or type(error).__name__
  trace = error.__traceback__
  while trace and trace.tb_next:
    trace = trace.tb_next
  place = ''
  if trace:
    file = os.path.basename(trace.tb_frame.f_code.co_filename)
    place = f' ({file}:{trace.tb_lineno})'
  return f'{type(error).__name__}: {text}{place}'
