"""SIGTERM: at the end of the iteration, before it, and when time is over."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gigpo_jax.runtime import preemption

# Long beside what a machine may be busy with.
GRACE = 4.0


def _terminate() -> None:
  os.kill(os.getpid(), signal.SIGTERM)


def _until_told(notice: preemption.PreemptionGuard) -> None:
  end = time.monotonic() + GRACE / 4
  while not notice.agreed() and time.monotonic() < end:
    time.sleep(0.01)


def test_a_run_that_is_told_may_end_its_iteration():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.PreemptionGuard(GRACE) as notice:
    assert not notice.agreed()
    _terminate()
    _until_told(notice)
    assert notice.agreed()
  assert signal.getsignal(signal.SIGTERM) is before


def test_half_the_time_later_it_is_interrupted():
  with preemption.PreemptionGuard(GRACE) as notice:
    _terminate()
    begin = time.monotonic()
    with pytest.raises(preemption.Preempted):
      time.sleep(GRACE)
    assert GRACE / 2 <= time.monotonic() - begin < GRACE
    notice.leave()
    _terminate()  # Once is enough.
    with notice.hold():
      time.sleep(0.1)


def test_what_is_held_comes_to_its_end_first():
  done = False
  with preemption.PreemptionGuard(2.0) as notice:
    with pytest.raises(preemption.Preempted):
      with notice.hold():
        _terminate()
        time.sleep(1.3)
        done = True
    notice.leave()
  assert done


def test_an_end_that_nothing_was_told_of_is_quick():
  begin = time.monotonic()
  with preemption.PreemptionGuard(60.0):
    pass
  assert time.monotonic() - begin < 5


BUSY = """
import hashlib, os, signal, time
with preemption.PreemptionGuard(1.0):
  print(time.time(), flush=True)
  os.kill(os.getpid(), signal.SIGTERM)
  # As an update does, it keeps Python's handlers waiting.
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)
"""


def test_when_time_is_over_the_process_is_gone():
  done = subprocess.run(
    [sys.executable, '-c', BUSY], capture_output=True, text=True, check=False
  )
  took = time.time() - float(done.stdout)
  assert done.returncode == 0, done.stderr
  assert 1.0 <= took < 10
  assert done.stderr == 'SIGTERM: no time left; what is saved stays\n'
