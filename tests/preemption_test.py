"""Tests of SIGTERM: in time, late, and at the end of the grace period."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gigpo_jax.runtime import preemption

# Long compared with the delays of a busy machine.
GRACE_SECS = 4.0


def _terminate() -> None:
  os.kill(os.getpid(), signal.SIGTERM)


def test_a_preempted_run_may_finish_its_iteration():
  handler = signal.getsignal(signal.SIGTERM)
  with preemption.PreemptionGuard(GRACE_SECS) as guard:
    guard.exit_if_requested()
    _terminate()
    end = time.monotonic() + GRACE_SECS / 4
    with pytest.raises(preemption.Preempted):
      while time.monotonic() < end:
        guard.exit_if_requested()
        time.sleep(0.01)
  assert signal.getsignal(signal.SIGTERM) is handler


def test_a_run_is_interrupted_after_half_the_grace_period():
  with preemption.PreemptionGuard(GRACE_SECS) as guard:
    _terminate()
    start = time.monotonic()
    with pytest.raises(preemption.Preempted):
      time.sleep(GRACE_SECS)
    assert GRACE_SECS / 2 <= time.monotonic() - start < GRACE_SECS
    guard.disarm()
    _terminate()  # Has no further effect.
    with guard.defer():
      time.sleep(0.1)


def test_deferred_blocks_are_finished_first():
  finished = False
  with preemption.PreemptionGuard(2.0) as guard:
    with pytest.raises(preemption.Preempted):
      with guard.defer():
        _terminate()
        time.sleep(1.3)
        finished = True
    guard.disarm()
  assert finished


def test_exit_without_a_signal_is_immediate():
  start = time.monotonic()
  with preemption.PreemptionGuard(60.0):
    pass
  assert time.monotonic() - start < 5


BUSY = """
import hashlib, os, signal, time
from gigpo_jax.runtime import preemption
with preemption.PreemptionGuard(1.0):
  print(time.time(), flush=True)
  os.kill(os.getpid(), signal.SIGTERM)
  # This call delays Python's signal handlers, as an update does.
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)
"""


def test_the_process_exits_at_the_end_of_the_grace_period():
  done = subprocess.run(
    [sys.executable, '-c', BUSY],
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
  )
  secs = time.time() - float(done.stdout)
  assert done.returncode == 0, done.stderr
  assert 1.0 <= secs < 10
  assert done.stderr == 'SIGTERM: no time left; saved files are intact\n'
