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
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker

from envs import base, messages, processes, worker

# Each worker uses a single thread and no accelerator. With a fixed hash seed,
# simulators iterate over sets of texts in the same order in every worker.
_WORKER_ENVIRON = {
  'OMP_NUM_THREADS': '1',
  'OPENBLAS_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
  'JAX_PLATFORMS': 'cpu',
  'PYTHONHASHSEED': '0',
}

# Maximum size and number of unanswered messages to a worker; a larger message
# is sent alone.
_WINDOW_BYTES = 65_536
_WINDOW_CALLS = 64

# Maximum size of a read from a pipe.
_READ_BYTES = 1 << 20

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


class LostError(Exception):
  """A worker process cannot be used any more.

  Attributes:
    cause: why its episodes fail, see `env_pool.CAUSES`.
    reason: a line about it.
  """

  def __init__(self, cause: str, reason: str):
    super().__init__(reason)
    self.cause, self.reason = cause, reason


@dataclasses.dataclass(eq=False)
class WorkerProcess:
  """A worker process and its unanswered calls; it replies in order.

  Attributes:
    process: the worker's supervisor, which ends with the worker.
    pipe: this process's end of the pipe.
    sent: calls that were sent and not answered, oldest first, including the
      start.
    waiting: calls that are held back until `sent` has room.
    progress: latest time, by the pool's clock, at which the worker can have
      started the oldest call of `sent`.
    replying: whether a part of the reply to the oldest call has arrived.
    resets: number of resets sent to it, without replays.
    died_idle: whether it died before it received a call.
    inbox: received bytes of an incomplete reply.
    outbox: bytes of `sent` that the pipe has not taken yet.
    pid: id of the worker process; None until it has reported it.
  """

  process: multiprocessing.Process
  pipe: connection.Connection
  sent: collections.deque[Call]
  waiting: collections.deque[Call]
  progress: float
  replying: bool = False
  resets: int = 0
  died_idle: bool = False
  inbox: bytearray = dataclasses.field(default_factory=bytearray)
  outbox: bytearray = dataclasses.field(default_factory=bytearray)
  pid: int | None = None

  @property
  def starting(self) -> bool:
    """Whether the worker has not yet reported its start."""
    return bool(self.sent) and self.sent[0].method == 'start'

  def send(self, now: float) -> None:
    """Sends waiting calls while they fit into the window.

    Args:
      now: the time by the pool's clock.
    """
    used = sum(len(call.message) for call in self.sent) if self.waiting else 0
    while self.waiting:
      used += len(self.waiting[0].message)
      full = used > _WINDOW_BYTES or len(self.sent) >= _WINDOW_CALLS
      if self.sent and full:
        return
      if not self.sent:
        self.progress = now
      self.sent.append(self.waiting.popleft())
      message = self.sent[-1].message
      self.outbox += messages.SIZE.pack(len(message)) + message
      self.flush()

  def finish_call(self, now: float) -> Call:
    """Removes and returns the oldest call, whose reply has arrived.

    Args:
      now: the time by the pool's clock.
    """
    self.progress, self.replying = now, False
    return self.sent.popleft()

  def extend_time(self, now: float, unread_secs: float) -> None:
    """Extends the time limit if only a part of a reply has arrived.

    Args:
      now: the time by the pool's clock.
      unread_secs: how long the pool has not read from the pipe.
    """
    if self.inbox and not self.replying:
      # The call is over. Its reply does not fit into the pipe, so that the rest
      # waited for this process; it gets a time limit of its own.
      self.replying, self.progress = True, now
    elif self.inbox:
      self.progress += unread_secs  # The rest may have waited as long.

  def flush(self) -> None:
    """Writes what the pipe takes without blocking."""
    try:
      while self.outbox:
        del self.outbox[: os.write(self.pipe.fileno(), self.outbox)]
    except BlockingIOError:
      pass
    except OSError:
      # It died; waiting for its reply detects that.
      self.outbox.clear()
      self.died_idle |= len(self.sent) == 1

  def receive(self) -> Iterator[tuple[int, bytes]]:
    """Reads available bytes, which may hold a part of a reply or several.

    Yields:
      (call id, encoded reply) of each complete reply.

    Raises:
      LostError: if the process has ended, or announces a reply that is too
        large.
    """
    try:
      data = os.read(self.pipe.fileno(), _READ_BYTES)
    except BlockingIOError:
      return
    except OSError:
      data = b''
    if not data:
      raise LostError('died', describe_death(self.process))
    self.inbox += data
    header = messages.HEADER
    while len(self.inbox) >= header.size:
      size, pid, call_id = header.unpack_from(self.inbox)
      if size > messages.MAX_BYTES:
        raise LostError('garbage', f'the worker announced {size:,} bytes')
      end = header.size + size
      if len(self.inbox) < end:
        return
      body = bytes(self.inbox[header.size : end])
      del self.inbox[:end]
      if self.pid is None:
        self.pid = pid  # Sent before any code of the environment has run.
      # Ignore replies of processes that an environment started.
      elif pid == self.pid:
        yield call_id, body


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
  # A worker may be stopped while it has much to read.
  os.set_blocking(pool_end.fileno(), False)
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
    os.kill(process.pid, processes.END)
    process.join(CLOSE_TIMEOUT_SECS)
  process.kill()
  process.join()
  process.close()
