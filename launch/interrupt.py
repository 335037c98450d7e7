"""Ctrl-C ends a command at once, in one line, with status 130."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from gigpo_jax.runtime import signals

_STATUS = 130
# What the line says after `interrupted`.
_described: list[Callable[[], str]] = [lambda: 'nothing was started']


def describe(what_follows: Callable[[], str]) -> None:
  """Sets what the line says after `interrupted`; called in another thread."""
  _described[:] = [what_follows]


@contextlib.contextmanager
def handled() -> Iterator[None]:
  """Handles Ctrl-C within the context, also during a compilation.

  A run loses nothing by it: whatever it keeps is written atomically.
  """
  try:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # In the background.
      yield
      return
    # The thread that listens ends the process; the main thread may be busy.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
      with signals.listen(signal.SIGINT, _end):
        yield
    finally:
      signal.signal(signal.SIGINT, signal.SIG_DFL)
  except KeyboardInterrupt:
    _end()


def _end() -> NoReturn:
  # Over a progress bar.
  clear = '\r\x1b[K' if sys.stderr.isatty() else ''
  with contextlib.suppress(OSError):
    os.write(2, f'{clear}interrupted; {_described[0]()}\n'.encode())
  os._exit(_STATUS)
