"""SIGTERM: a machine is about to be taken away, or somebody wants it back.

A run that is told so has a time of grace. It ends at the end of the rollout or
of the update under way, if that comes in the first half of the time; otherwise
`Leave` is raised wherever the run is, so that it can save what it had at the
end of the iteration before. An update, which uses up what it begins with, is
not interrupted. When the time is over the process is gone, with what was saved
until then.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator

from gigpo_jax import hosts, signals

_AGAIN_SECS = 2.0


class Leave(BaseException):
  """There is no time to end the iteration."""


class Notice:
  """Whether this process was told to leave; a context manager.

  Several processes have to agree on where they leave: they get no `Leave`.

  Args:
    grace_secs: time between SIGTERM and the end.
  """

  def __init__(self, grace_secs: float):
    self._half = grace_secs / 2
    self._told, self._over = threading.Event(), threading.Event()
    self._late = self._held = self._left = False

  def __enter__(self) -> 'Notice':
    self._handler_before = signal.signal(signal.SIGTERM, self._handle)
    self._listening = signals.listening(signal.SIGTERM, self._told.set)
    self._listening.__enter__()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    self._left = True
    self._over.set()
    self._listening.__exit__(None, None, None)
    self._told.set()
    # Until it is gone it may send signals, which end what does not handle them.
    self._thread.join()
    signal.signal(signal.SIGTERM, self._handler_before)

  def agreed(self) -> bool:
    """Whether any process was told to leave; all of them must call this."""
    return any(hosts.tell_all(self._told.is_set()))

  @contextlib.contextmanager
  def hold(self) -> Iterator[None]:
    """Puts `Leave` off to the end of what is done within."""
    self._held = True
    try:
      yield
    finally:
      self._held = False
    if self._late and not self._left:
      raise Leave

  def leave(self) -> None:
    """Says that the run is leaving: no `Leave` from here on."""
    self._left = True

  def _handle(self, number: int, frame: types.FrameType | None) -> None:
    del number, frame
    if self._late and not (self._held or self._left):
      raise Leave

  def _watch(self) -> None:
    """Waits for SIGTERM, and for the end of the grace."""
    self._told.wait()
    if self._over.wait(self._half):
      return
    self._late = not hosts.several()
    end = time.monotonic() + self._half
    while (left := end - time.monotonic()) > 0:
      # Again and again: an exception in a callback of C code comes to nothing.
      if self._late and not self._left:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
      if self._over.wait(min(left, _AGAIN_SECS)):
        return
    sys.stderr.write('SIGTERM: no time left; what is saved stays\n')
    os._exit(0)
