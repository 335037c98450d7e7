"""Ctrl-C ends a command at once, in one line, with status 130."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from gigpo_jax.runtime import signals

_STATUS = 130
# Returns the text after `interrupted`.
_outlook: list[Callable[[], str]] = [lambda: 'nothing was started']


def set_outlook(outlook: Callable[[], str]) -> None:
  """Sets the text after `interrupted`: how the command can be resumed.

  Args:
    outlook: returns the text; called in another thread.
  """
  _outlook[:] = [outlook]


@contextlib.contextmanager
def handle() -> Iterator[None]:
  """Handles Ctrl-C within the context, also during a compilation.

  A run loses nothing, because it writes its files atomically.
  """
  try:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # In the background.
      yield
      return
    # Another thread ends the process, because the main thread may be busy.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
      with signals.listen(signal.SIGINT, _end):
        yield
    finally:
      signal.signal(signal.SIGINT, signal.SIG_DFL)
  except KeyboardInterrupt:
    _end()


def _end() -> NoReturn:
  # Clear the line of a progress bar.
  clear = '\r\x1b[K' if sys.stderr.isatty() else ''
  with contextlib.suppress(OSError):
    os.write(2, f'{clear}interrupted; {_outlook[0]()}\n'.encode())
  os._exit(_STATUS)
