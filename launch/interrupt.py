"""Ctrl-C and SIGTERM end a command at once, in one line.

The status is 130 or 143, as in a shell.
"""

import contextlib
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import NoReturn

from gigpo_jax.runtime import signals

_WORDS = {signal.SIGINT: 'interrupted', signal.SIGTERM: 'terminated'}
# Returns the text after the word.
_outlook: list[Callable[[], str]] = [lambda: 'nothing was started']


def set_outlook(outlook: Callable[[], str]) -> None:
  """Sets the text after the word: how the command can be resumed.

  Args:
    outlook: returns the text; called in another thread.
  """
  _outlook[:] = [outlook]


@contextlib.contextmanager
def handle() -> Iterator[None]:
  """Handles Ctrl-C and SIGTERM within the context, also during a compilation.

  A run loses nothing, because it writes its files atomically. A command may
  set a handler of its own, as training does for SIGTERM.
  """
  try:
    with contextlib.ExitStack() as stack:
      for signum in _WORDS:
        # A command in the background ignores Ctrl-C.
        if signal.getsignal(signum) != signal.SIG_IGN:
          stack.enter_context(_listen(signum))
      yield
  except KeyboardInterrupt:
    _end(signal.SIGINT)


@contextlib.contextmanager
def _listen(signum: int) -> Iterator[None]:
  """Ends the process when a signal arrives."""

  def end() -> None:
    if signal.getsignal(signum) is _do_nothing:
      _end(signum)

  signal.signal(signum, _do_nothing)
  try:
    # Another thread ends the process, because the main thread may be busy.
    with signals.listen(signum, end):
      yield
  finally:
    signal.signal(signum, signal.SIG_DFL)


def _do_nothing(signum: int, frame: types.FrameType | None) -> None:
  del signum, frame


def _end(signum: int) -> NoReturn:
  # Clear the line of a progress bar.
  clear = '\r\x1b[K' if sys.stderr.isatty() else ''
  with contextlib.suppress(OSError):
    text = f'{clear}{_WORDS[signum]}; {_outlook[0]()}\n'
    os.write(2, text.encode())
  os._exit(128 + signum)
