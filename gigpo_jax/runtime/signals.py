"""Immediate delivery of signals to a thread."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listen(number: int, callback: Callable[[], None]) -> Iterator[None]:
  """Calls a function in a separate thread as soon as a signal arrives.

  A Python handler runs only after the current compilation or update, but the
  interpreter writes the signal's number to a pipe at once. The signal must have
  a Python handler. Use this in the main thread.

  Args:
    number: number of the signal.
    callback: function to call; must return soon.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

  def watch() -> None:
    while numbers := os.read(reader, 64):
      if previous >= 0:
        # Pass the signals on to the previous listener.
        with contextlib.suppress(OSError):
          os.write(previous, numbers)
      if number in numbers:
        callback()

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(previous)
    os.close(writer)
    thread.join()
    os.close(reader)
