"""Signals reach a thread at once, whatever the main thread is doing."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listening(number: int, callback: Callable[[], None]) -> Iterator[None]:
  """Calls back, in a thread of its own, as soon as a signal arrives.

  A handler in Python waits for the end of a compilation or an update; the
  interpreter writes the number of a signal to a pipe at once. The signal needs
  a handler in Python for that. To be used in the main thread.

  Args:
    number: of the signal.
    callback: must return soon.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

  def watch() -> None:
    while sent := os.read(reader, 64):
      if before >= 0:
        # Whoever listened before still does.
        with contextlib.suppress(OSError):
          os.write(before, sent)
      if number in sent:
        callback()

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    os.close(writer)
    thread.join()
    os.close(reader)
