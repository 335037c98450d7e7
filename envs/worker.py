"""The worker process: runs many environments, one call at a time.

It communicates over a pipe with `gigpo_jax.env_pool`. It is in this package so
that the process imports neither jax nor gigpo_jax.

Calls are pickled tuples (call_id, method, env, argument). Replies are encoded
by `messages`, one per call, in order. Two messages come before any call, with
call id 0: the worker's process id, and whether an environment could be created.

Processes that environments have started end with the worker; see `processes`.
"""

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import envs
from envs import base, messages, processes

# Simulators may also call sys.exit, whose SystemExit is no Exception.
ERRORS = (Exception, SystemExit)


class EnvHost:
  """The environments of a process, created at their first call.

  Args:
    name: name of the environment in `envs.REGISTRY`.
    kwargs: arguments of the environment.
  """

  def __init__(self, name: str, kwargs: dict):
    self._name, self._kwargs = name, kwargs
    self._envs: dict[int, base.Env] = {}
    self._spare: list[base.Env] = []

  def start(self) -> bytes:
    """Creates an environment to check that this works; returns the reply."""
    try:
      self._spare.append(envs.make(self._name, **self._kwargs))
    except ERRORS as error:
      return messages.encode_error(
        0, messages.ERROR, format_exception(error, self._file())
      )
    return messages.encode(0, 'start', None)

  def call(self, call_id: int, method: str, env: int, argument: Any) -> bytes:
    """Calls prepare, reset or step; an exception becomes a reply, too."""
    try:
      if method == 'step' and env not in self._envs:
        raise LookupError(f'env={env}: no episode is running; reset it first')
      if env not in self._envs:
        self._envs[env] = (
          self._spare.pop()
          if self._spare
          else envs.make(self._name, **self._kwargs)
        )
      value = getattr(self._envs[env], method)(argument)
      return messages.encode(call_id, method, value)
    except ERRORS as error:
      # A failed preparation does not affect the running episode.
      if method != 'prepare':
        self._drop(env)
      return messages.encode_error(call_id, *self._describe(error))

  def close(self) -> None:
    """Closes all environments."""
    for env in list(self._envs):
      self._drop(env)
    with contextlib.suppress(*ERRORS):
      while self._spare:
        self._spare.pop().close()

  def _drop(self, env: int) -> None:
    # A broken environment may fail to close; it holds nothing to save.
    with contextlib.suppress(*ERRORS):
      if env in self._envs:
        self._envs.pop(env).close()

  def _describe(self, error: BaseException) -> tuple[str, str]:
    """Returns the status and the line of an exception."""
    if isinstance(error, messages.UnusableReplyError):
      return messages.GARBAGE, f'env.name={self._name}: {_text(error)}'
    if isinstance(error, messages.ReportedError):
      return messages.ERROR, str(error)
    return messages.ERROR, format_exception(error, self._file())

  def _file(self) -> str | None:
    """Returns the file of the environment's module."""
    name = envs.REGISTRY.get(self._name, self._name)
    return getattr(sys.modules.get(name), '__file__', None)


def main(pipe: Connection, name: str, kwargs: dict, parent: int) -> None:
  """Serves calls until the pipe closes or the parent has ended."""
  # All processes get Ctrl-C, and SIGTERM on preemption; the parent decides
  # when the worker ends.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # The parent has blocked it until here.
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  # Simulators print, also from C; stdout is reserved for results of commands.
  os.dup2(sys.stderr.fileno(), 1)
  processes.supervise(parent)
  host, pid = EnvHost(name, kwargs), os.getpid()
  try:
    _send(pipe, messages.encode_pid(), pid)
    _send(pipe, host.start(), pid)
    while True:
      call = _receive(pipe)
      _send(pipe, host.call(*call), pid)
  except (EOFError, OSError):
    host.close()


def _receive(pipe: Connection) -> tuple[int, str, int, Any]:
  (size,) = messages.SIZE.unpack(_read(pipe, messages.SIZE.size))
  return pickle.loads(_read(pipe, size))


def _read(pipe: Connection, size: int) -> bytes:
  data = bytearray()
  while len(data) < size:
    part = os.read(pipe.fileno(), size - len(data))
    if not part:
      raise EOFError
    data += part
  return bytes(data)


def _send(pipe: Connection, message: bytes, pid: int) -> None:
  if os.getpid() != pid:
    # This is a process that an environment forked; it must not reply.
    os._exit(0)
  view = memoryview(message)
  while view:
    view = view[os.write(pipe.fileno(), view) :]


def format_exception(error: BaseException, file: str | None = None) -> str:
  """Returns an exception as one line, with the location that raised it.

  Args:
    error: the exception.
    file: an environment's file; its last line in the traceback is shown, too.
  """
  locations, trace = [], error.__traceback__
  while trace:
    locations.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
    trace = trace.tb_next
  shown = locations[-1:]
  in_file = [location for location in locations if location[0] == file]
  if in_file and in_file[-1] not in shown:
    shown += in_file[-1:]
  location_text = ', called in '.join(
    f'{os.path.basename(name)}:{line}' for name, line in shown
  )
  # Truncate the message, never the location.
  text = messages.to_line(_text(error) or type(error).__name__)
  max_bytes = messages.MAX_REASON_BYTES - 512
  text = text.encode()[:max_bytes].decode(errors='ignore')
  return f'{type(error).__name__}: {text}' + (
    location_text and f' ({location_text})'
  )


def _text(error: BaseException) -> str:
  try:
    return str(error)
  except ERRORS:
    return ''  # An environment's exception may fail to convert to a string.
