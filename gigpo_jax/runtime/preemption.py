"""Ending a run in time after SIGTERM, as when a machine is preempted.

The run has a grace period. In its first half the run stops at the end of the
current rollout or update. After that `Preempted` is raised wherever the run is,
so that it can save the state after the last finished iteration. An update is
never interrupted, because it donates the state. At the end of the grace period
the process exits; everything saved until then is intact.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator

from gigpo_jax.runtime import distributed, signals

_RESEND_SECS = 2.0


class Preempted(BaseException):
  """The run must save and end now."""


class PreemptionGuard:
  """Listens for SIGTERM; a context manager.

  In a multi-process run `Preempted` is only raised by `exit_if_requested`,
  because all processes must stop at the same place.

  Args:
    grace_secs: seconds between SIGTERM and the end of the process.
  """

  def __init__(self, grace_secs: float):
    self._half_secs = grace_secs / 2
    self._requested, self._closed = threading.Event(), threading.Event()
    self._is_late = self._is_deferred = self._is_disarmed = False

  def __enter__(self) -> 'PreemptionGuard':
    self._previous_handler = signal.signal(signal.SIGTERM, self._handle)
    self._listener = signals.listen(signal.SIGTERM, self._requested.set)
    self._listener.__enter__()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    self._is_disarmed = True
    self._closed.set()
    self._listener.__exit__(None, None, None)
    self._requested.set()
    # Until it ends, the thread may send signals, which would end a process
    # without a handler.
    self._thread.join()
    signal.signal(signal.SIGTERM, self._previous_handler)

  def exit_if_requested(self) -> None:
    """Raises `Preempted` if any process got SIGTERM; all must call this."""
    if any(distributed.all_gather_objects(self._requested.is_set())):
      raise Preempted

  @contextlib.contextmanager
  def defer(self) -> Iterator[None]:
    """Defers `Preempted` to the end of the context."""
    self._is_deferred = True
    try:
      yield
    finally:
      self._is_deferred = False
    if self._is_late and not self._is_disarmed:
      raise Preempted

  def disarm(self) -> None:
    """Prevents `Preempted` from now on, while the run saves."""
    self._is_disarmed = True

  def _handle(self, signum: int, frame: types.FrameType | None) -> None:
    del signum, frame
    if self._is_late and not (self._is_deferred or self._is_disarmed):
      raise Preempted

  def _watch(self) -> None:
    """Waits for SIGTERM, then for the end of the grace period."""
    self._requested.wait()
    if self._closed.wait(self._half_secs):
      return
    self._is_late = not distributed.is_multi_process()
    end = time.monotonic() + self._half_secs
    while (left := end - time.monotonic()) > 0:
      # Repeated, because an exception in a callback from C code is lost.
      if self._is_late and not self._is_disarmed:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
      if self._closed.wait(min(left, _RESEND_SECS)):
        return
    sys.stderr.write('SIGTERM: no time left; saved files are intact\n')
    os._exit(0)
