"""Worker processes as `env_pool` sees them: their calls, pipes and time.

The code that runs inside a worker process is `envs.worker`.
"""

import collections
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import connection, resource_tracker

from envs import base, worker

# Each worker uses a single thread and no accelerator.
_WORKER_ENVIRON = {
  'OMP_NUM_THREADS': '1',
  'OPENBLAS_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
  'JAX_PLATFORMS': 'cpu',
}

# Time in which a worker whose pipe is closed may end.
CLOSE_TIMEOUT_SECS = 2.0

# Period of the clock of time limits. A gap of more than two periods means that
# this process was stopped.
_TICK_SECS = 0.25


@dataclasses.dataclass(frozen=True)
class Call:
  """A call to an environment.

  Attributes:
    method: start, prepare, reset or step.
    env: index of the environment; -1 for a start.
    call_id: identifies the reply; 0 for a start.
    message: the encoded call.
    episode: index of the environment's episode, from 1.
    expected: the expected reply, if the call is replayed.
  """

  method: str
  env: int
  call_id: int = 0
  message: bytes = b''
  episode: int = 0
  expected: base.Observation | base.StepResult | None = None


@dataclasses.dataclass(eq=False)
class WorkerProcess:
  """A worker process and its unanswered calls; it replies in order.

  Attributes:
    process: the worker process.
    pipe: this process's end of the pipe.
    sent: calls that were sent and not answered, oldest first, including the
      start.
    waiting: calls that are held back until `sent` has room.
    progress: latest time, by the pool's clock, at which the worker can have
      started the oldest call of `sent`.
    resets: number of resets sent to it, without replays.
    died_idle: whether it died before it received a call.
    inbox: received bytes of an incomplete reply.
  """

  process: multiprocessing.Process
  pipe: connection.Connection
  sent: collections.deque[Call]
  waiting: collections.deque[Call]
  progress: float
  resets: int = 0
  died_idle: bool = False
  inbox: bytearray = dataclasses.field(default_factory=bytearray)

  @property
  def starting(self) -> bool:
    """Whether the worker has not yet reported its start."""
    return bool(self.sent) and self.sent[0].method == 'start'


class Clock:
  """Measures the seconds in which this process could run, for time limits.

  A stopped process (Ctrl-Z, a frozen container, a suspended machine) cannot
  observe the stop itself. A thread therefore reads the time periodically, and
  a long gap between two readings counts as two periods only.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._seconds, self._last = 0.0, time.monotonic()
    self._closed = threading.Event()
    threading.Thread(target=self._tick, daemon=True).start()

  def now(self) -> float:
    """Returns the seconds in which this process could run so far."""
    with self._lock:
      now = time.monotonic()
      self._seconds += min(now - self._last, 2 * _TICK_SECS)
      self._last = now
      return self._seconds

  def close(self) -> None:
    """Ends the thread."""
    self._closed.set()

  def _tick(self) -> None:
    while not self._closed.wait(_TICK_SECS):
      self.now()


def start(name: str, kwargs: dict, clock: Clock) -> WorkerProcess:
  """Starts a worker process, which first reports its start in a reply.

  Args:
    name: name of the environment in `envs.REGISTRY`.
    kwargs: arguments of the environment.
    clock: the pool's clock.
  """
  context = multiprocessing.get_context('spawn')
  pool_end, worker_end = context.Pipe()
  process = context.Process(
    target=worker.main,
    args=(worker_end, name, kwargs, os.getpid()),
    daemon=True,
  )
  # Ctrl-C on a terminal reaches all processes. The worker inherits the mask, so
  # that its imports are not interrupted. The tracker, which resets the mask,
  # starts before.
  resource_tracker.ensure_running()
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  # Set here and not in the worker, whose libraries read them on import.
  original = {key: os.environ.get(key) for key in _WORKER_ENVIRON}
  os.environ.update(_WORKER_ENVIRON)
  try:
    process.start()
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for key, value in original.items():
      if value is None:
        del os.environ[key]
      else:
        os.environ[key] = value
  worker_end.close()
  calls = collections.deque([Call('start', -1)])
  return WorkerProcess(
    process, pool_end, calls, collections.deque(), clock.now()
  )


def describe_death(process: multiprocessing.Process) -> str:
  """Returns a line about the death of a worker process."""
  process.join(CLOSE_TIMEOUT_SECS)
  return f'the worker process died (exit code {process.exitcode})'


def end_process(process: multiprocessing.Process) -> None:
  """Ends a worker process and the processes that it has started."""
  if process.is_alive():
    worker.kill_tree(process.pid)
  process.kill()
  process.join()
  process.close()
