"""Stdout and stderr that cannot be written: a closed pipe or a full disk."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _Output:
  """A stream that ends the command, once, if it cannot be written.

  Later text is dropped. Nothing ends, and all text is dropped, if another error
  is being handled, or nobody could read why.

  Args:
    stream: the stream.
    ends: whether the command ends.
  """

  def __init__(self, stream: TextIO, *, ends: bool):
    self._stream, self._ends = stream, ends

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    """Writes a text."""
    with self._handle_errors():
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    """Writes what is buffered."""
    with self._handle_errors():
      self._stream.flush()

  @contextlib.contextmanager
  def _handle_errors(self) -> Iterator[None]:
    handled = sys.exc_info()[0]
    try:
      yield
    except OSError as error:
      # The interpreter flushes the stream once more.
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
      if not self._ends or handled:
        return
      if isinstance(error, BrokenPipeError):
        # As SIGPIPE ends other programs. No other handler may take it for an
        # error of its own.
        raise SystemExit(128 + signal.SIGPIPE) from None
      sys.stderr.write(
        f'stdout: cannot be written ({error}); free space or redirect it, then '
        'rerun the same command\n'
      )
      raise SystemExit(1) from None


@contextlib.contextmanager
def handle() -> Iterator[None]:
  """Ends a command whose stdout cannot be written; drops such text of stderr.

  If nothing reads stdout any more, as in `... | head`, the command ends
  quietly. On a full disk it ends in one line.
  """
  stdout, stderr = sys.stdout, sys.stderr
  if stdout is not None:  # Python has none if it is closed at the start.
    # A line that cannot be written ends the command at once.
    stdout.reconfigure(line_buffering=True)
    sys.stdout = _Output(stdout, ends=True)
  if stderr is not None:
    sys.stderr = _Output(stderr, ends=False)
  try:
    yield
  finally:
    sys.stdout, sys.stderr = stdout, stderr
