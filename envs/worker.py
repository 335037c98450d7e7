"""What runs in a worker process: many environments, one call at a time.

Speaks over a pipe with `gigpo_jax.env_pool`. Lives here so that the process
imports neither jax nor gigpo_jax.

Calls are tuples (kind, call number, env, argument); answers ('begin', number,
env, None) when a call is taken up and ('reply' or 'error', number, env, value)
when it is done. `prepare` calls are answered by 'begin' and 'ready'.
"""

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import envs
from envs import base

_PR_SET_PDEATHSIG = 1


def main(pipe: Connection, name: str, kwargs: dict, parent: int) -> None:
  """Serves calls until the pipe closes or the parent is gone."""
  _die_with(parent)
  # Ctrl-C goes to the whole process group; the parent decides what ends.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # Simulators print; the terminal belongs to the parent's progress bar.
  sys.stdout = open(os.devnull, 'w')  # noqa: SIM115  (for life)
  environments: dict[int, base.Env] = {}
  while True:
    try:
      call = pipe.recv()
      if call is None:
        return
      _serve(pipe, environments, name, kwargs, call)
    except (EOFError, OSError):
      return


def _die_with(parent: int) -> None:
  """Asks the kernel to end this process when its parent dies (Linux)."""
  try:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  except (AttributeError, OSError, TypeError):
    return  # Elsewhere the closing pipe has to do.
  if os.getppid() != parent:
    os._exit(0)


def _serve(
  pipe: Connection,
  environments: dict[int, base.Env],
  name: str,
  kwargs: dict,
  call: tuple[str, int, int, Any],
) -> None:
  kind, number, env, argument = call
  pipe.send(('begin', number, env, None))
  try:
    value = perform(environments, name, kwargs, kind, env, argument)
    # Pickled here, so that what cannot be is this call's error.
    ForkingPickler.dumps(value)
    answer = ('ready' if kind == 'prepare' else 'reply', number, env, value)
  except Exception as error:  # noqa: BLE001  (whatever a simulator raises)
    environments.pop(env, None)
    answer = ('error', number, env, describe(error))
  pipe.send(answer)


def perform(
  environments: dict[int, base.Env],
  name: str,
  kwargs: dict,
  kind: str,
  env: int,
  argument: Any,
) -> Any:
  """Makes the environment if need be, and calls it."""
  if env not in environments:
    environments[env] = envs.make(name, **kwargs)
  return getattr(environments[env], kind)(argument)


def describe(error: Exception) -> str:
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
