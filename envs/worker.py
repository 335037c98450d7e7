"""What runs in a worker process: many environments, one call at a time.

Speaks over a pipe with `gigpo_jax.env_pool`. Lives here so that the process
imports neither jax nor gigpo_jax.

Calls are pickled tuples (number, kind, env, argument), answered one by one and
in order by `messages`. The first answer, before any call, has number 0 and
tells whether an environment could be made.

The worker leads a process group and ends what its environments have started: a
guard, a process of its own, ends the group however the worker ends.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil

import envs
from envs import base, messages

_PR_SET_PDEATHSIG = 1
# Tells the guard that the worker is gone.
_GONE = signal.SIGUSR1
# How often the guard looks where the kernel does not tell it.
_GUARD_SECS = 0.5

# Simulators also leave by sys.exit, which is no Exception.
_ERRORS = (Exception, SystemExit)


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

  def start(self) -> bytes:
    """Makes one environment ahead, to see whether it can be made."""
    try:
      self._spare.append(envs.make(self._name, **self._kwargs))
    except _ERRORS as error:
      return messages.refuse(0, messages.ERROR, describe(error, self._file()))
    return messages.encode(0, 'start', None)

  def call(self, number: int, kind: str, env: int, argument: Any) -> bytes:
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
      return messages.encode(number, kind, value)
    except messages.Unusable as error:
      self._drop(env)
      line = f'env.name={self._name}: {_text(error)}'
      return messages.refuse(number, messages.GARBAGE, line)
    except _ERRORS as error:
      # A failed preparation says nothing about the episode under way.
      if kind != 'prepare':
        self._drop(env)
      line = describe(error, self._file())
      return messages.refuse(number, messages.ERROR, line)

  def close(self) -> None:
    """Closes all environments."""
    for env in list(self._envs):
      self._drop(env)

  def _drop(self, env: int) -> None:
    # One that broke may not even close; there is nothing left to save.
    with contextlib.suppress(*_ERRORS):
      if env in self._envs:
        self._envs.pop(env).close()

  def _file(self) -> str | None:
    """Returns the file of the environment's module."""
    name = envs.REGISTRY.get(self._name, self._name)
    return getattr(sys.modules.get(name), '__file__', None)


def main(pipe: Connection, name: str, kwargs: dict, parent: int) -> None:
  """Serves calls until the pipe closes or the parent is gone."""
  die_with(parent)
  # Ctrl-C, and SIGTERM of a machine that is taken away, go to all processes;
  # the parent decides what ends.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  # Simulators print, also from C; stdout belongs to the results of commands.
  os.dup2(sys.stderr.fileno(), 1)
  os.setsid()
  _guard()
  host, pid = Host(name, kwargs), os.getpid()
  try:
    _send(pipe, host.start(), pid)
    while True:
      call = pickle.loads(pipe.recv_bytes())
      _send(pipe, host.call(*call), pid)
  except (EOFError, OSError):
    host.close()
    _end_detached()


def _send(pipe: Connection, message: bytes, pid: int) -> None:
  if os.getpid() != pid:
    # An environment has forked, and this is the copy: it must not answer.
    os._exit(0)
  view = memoryview(message)
  while view:
    view = view[os.write(pipe.fileno(), view) :]


def die_with(parent: int) -> None:
  """Asks the kernel to end this process when its parent dies (Linux)."""
  if _ask_for_signal(signal.SIGKILL) and os.getppid() != parent:
    os._exit(0)


def _ask_for_signal(number: int) -> bool:
  """Asks the kernel for a signal when the parent dies (Linux).

  Returns whether it will come; elsewhere the closing pipe has to do.
  """
  try:
    return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number) == 0
  except (AttributeError, OSError, TypeError):
    return False


def _guard() -> None:
  """Starts a process that ends this one's group when this one has ended."""
  worker = os.getpid()
  signal.pthread_sigmask(signal.SIG_BLOCK, {_GONE})
  if os.fork():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_GONE})
    return
  try:
    # The pipe's other end is to see that it closes.
    os.closerange(3, 65_536)
    asked = _ask_for_signal(_GONE)
    while os.getppid() == worker:
      if asked:
        signal.sigwait({_GONE})
      else:
        time.sleep(_GUARD_SECS)
  finally:
    # The guard is a member of this group.
    os.killpg(worker, signal.SIGKILL)


def end_tree(pid: int) -> None:
  """Ends a worker, its group, and what it started outside of its group."""
  descendants = _descendants(pid)
  with contextlib.suppress(OSError):
    os.killpg(pid, signal.SIGKILL)
  for process in descendants:
    with contextlib.suppress(psutil.Error):
      process.kill()


def _end_detached() -> None:
  """Ends what this process started outside of its group."""
  group = os.getpgrp()
  for process in _descendants(os.getpid()):
    with contextlib.suppress(psutil.Error, OSError):
      if os.getpgid(process.pid) != group:
        process.kill()


def _descendants(pid: int) -> list[psutil.Process]:
  try:
    return psutil.Process(pid).children(recursive=True)
  except psutil.Error:
    return []


def describe(error: BaseException, file: str | None = None) -> str:
  """Returns an exception in one line, with where it was raised.

  Args:
    error: the exception.
    file: of an environment, whose last line on the way there is named, too.
  """
  places, trace = [], error.__traceback__
  while trace:
    places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
    trace = trace.tb_next
  shown = places[-1:]
  own = [place for place in places if place[0] == file]
  if own and own[-1] not in shown:
    shown += own[-1:]
  where = ', called in '.join(
    f'{os.path.basename(name)}:{line}' for name, line in shown
  )
  # The place is never what is cut.
  text = messages.clean(_text(error) or type(error).__name__)
  room = messages.MAX_REASON_BYTES - 512
  text = text.encode()[:room].decode(errors='ignore')
  return f'{type(error).__name__}: {text}' + (where and f' ({where})')


def _text(error: BaseException) -> str:
  try:
    return str(error)
  except _ERRORS:
    return ''  # An exception of an environment may not even say what it is.
