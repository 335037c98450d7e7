"""A pool of many environments in few worker processes.

`reset` and `step` submit a call and return at once; `receive` returns the
replies that have arrived. A worker that dies or exceeds a time limit is
replaced, and the episode whose call it was executing ends with a `Failure`. The
worker's other episodes are replayed to their last step. The caller does not
notice, because an environment is a function of its task and of the responses.
An episode also fails if its replay differs, or if it was replayed too often
because of other environments.

Environments are not trusted. Messages of workers hold only data (see
`envs.messages`), are bounded in size, and are checked. A reply of another
process, or to no pending call, is never used. The environments of a worker
share its memory, so a running malicious environment can affect its own worker
only. This process also imports its module, for its tasks. Calls to workers are
pickled, because this process creates them.
"""

import atexit
import collections
import dataclasses
import itertools
import multiprocessing
import pickle
import selectors
import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil

from envs import base, messages, worker
from gigpo_jax import options
from gigpo_jax.runtime import worker_process

# Importing a simulator on a busy machine takes longer than any reset.
_START_TIMEOUT_SECS = 120.0

# Causes of failed episodes: the environment raised an exception, sent an
# unusable reply, ended its process, or did not reply in time; its replay
# differed; or other environments of its worker hung too often.
CAUSES = ('raised', 'garbage', 'died', 'hung', 'differed', 'neighbours')
_CAUSE_OF_STATUS = {messages.ERROR: 'raised', messages.GARBAGE: 'garbage'}

# Maximum number of replays of an episode because of other environments. Without
# a maximum, the pool could wait for every episode of a worker in turn if all of
# them hang. A death is detected at once.
_MAX_REPLAYS = 4

# Number of characters that a failure shows from the end of a response.
_SHOWN_CHARS = 60

# Longest wait for events; the selector refuses more than 24 days.
_MAX_WAIT_SECS = 3600.0

# Time in which a call of `receive` reads further parts of replies.
_DRAIN_SECS = 0.05
# Longest wait for the next part of a reply.
_NEXT_PART_SECS = 0.005


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the pool, `config.pool`; see configs/base.py."""

  num_envs: int = options.number(0, low=0, note='0 is one per episode')
  num_workers: int = options.number(2, low=0, note='0 is in this process')
  step_timeout_secs: float = options.number(60.0, above=0)
  reset_timeout_secs: float = options.number(300.0, above=0)
  max_resets_per_worker: int = options.number(0, low=0, note='0 is never')
  max_worker_mib: int = options.number(0, low=0, note='0 is unlimited')
  max_failed_share: float = options.number(0.25, low=0, high=1)

  def __post_init__(self):
    options.check(self)


@dataclasses.dataclass(frozen=True)
class Failure:
  """The failure of an episode.

  Attributes:
    env: index of the environment.
    task: task of the episode.
    last_action: the last response that it received; '' if none.
    cause: one of CAUSES.
    reason: description of the failure, in one line.
  """

  env: int
  task: base.Task
  last_action: str
  cause: str
  reason: str

  def __str__(self) -> str:
    tail = self.last_action[-_SHOWN_CHARS:]
    return f'{self.cause}: {self.reason}' + (tail and f', after {tail!r}')


@dataclasses.dataclass(frozen=True)
class Revision:
  """Another reply to a call that had one: the turn after it was dropped.

  Only `endpoint.EndpointPool` sends it, without a pending turn.

  Attributes:
    reply: replaces the reply.
  """

  reply: base.Observation | base.StepResult


Reply = base.Observation | base.StepResult | Failure | Revision


class EnvPool:
  """A fixed number of environments; a context manager.

  The pool belongs to the thread that creates it: on Linux, the workers end
  with that thread.

  Args:
    name: name of the environment in `envs.REGISTRY`.
    kwargs: arguments of the environment.
    num_envs: number of environments.
    num_workers: number of worker processes; 0 runs all environments in this
      process without time limits, for debugging.
    step_timeout_secs: time limit of a step. The time in which this process was
      stopped does not count.
    reset_timeout_secs: time limit of a reset or a preparation.
    envs_per_group: number of consecutive environments that share a worker and
      its caches.
    max_resets_per_worker: number of resets after which a worker is replaced and
      its episodes are replayed, for simulators that leak memory. The
      number of the worker's environments is a lower bound. None for no limit.
    max_worker_mib: resident memory in MiB above which a worker is replaced in
      the same way. None for no limit.

  Attributes:
    num_envs: number of environments.
    failures: all failures so far.
    restarts: number of workers replaced because they died or hung.
    recycled: number of workers replaced because of their resets or memory.

  Raises:
    ValueError: in one line, if the environment cannot be created.
  """

  def __init__(
    self,
    name: str,
    kwargs: dict,
    *,
    num_envs: int,
    num_workers: int,
    step_timeout_secs: float,
    reset_timeout_secs: float,
    envs_per_group: int = 1,
    max_resets_per_worker: int | None = None,
    max_worker_mib: float | None = None,
  ):
    self.num_envs = num_envs
    self.restarts = self.recycled = 0
    self.failures: list[Failure] = []
    self._name, self._kwargs = name, kwargs
    self._timeouts = {
      'start': _START_TIMEOUT_SECS,
      'step': step_timeout_secs,
      'reset': reset_timeout_secs,
      'prepare': reset_timeout_secs,
    }
    self._envs_per_group = envs_per_group
    self._max_resets = max_resets_per_worker
    self._max_mib = max_worker_mib
    self._tasks: dict[int, base.Task] = {}
    # For each environment: index of its episode, responses sent, replies.
    self._episodes: dict[int, int] = collections.defaultdict(int)
    self._responses: dict[int, list[str]] = {}
    self._replies: dict[int, list[Reply]] = {}
    self._replays: dict[int, int] = {}
    self._running: set[int] = set()
    self._arrived: collections.deque[tuple[int, Reply]] = collections.deque()
    self._host = worker.EnvHost(name, kwargs)
    self._call_ids = itertools.count(1)
    self._clock = worker_process.Clock()
    self._read_until = self._clock.now()  # Latest time of reading from pipes.
    self._selector = selectors.DefaultSelector()
    # Dismissed processes and their times of dismissal.
    self._dismissed: list[tuple[multiprocessing.Process, float]] = []
    # None: the process failed to start; the next call starts another.
    self._workers: list[worker_process.WorkerProcess | None] = []
    self._start_error = ''
    atexit.register(self.close)
    try:
      self._start_workers(min(num_workers, -(-num_envs // envs_per_group)))
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> 'EnvPool':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def reset(self, env: int, task: base.Task) -> None:
    """Starts an episode; `receive` returns its first observation."""
    self._begin(env, task)
    self._submit('reset', env, task)
    self._count_reset(env)

  def resume(
    self,
    env: int,
    task: base.Task,
    responses: Sequence[str],
    replies: Sequence[Reply],
  ) -> None:
    """Continues a paused episode, in any environment, by replaying it.

    `receive` returns nothing for the replay, unless it fails. The next call can
    be `step`, also before the replay ends.

    Args:
      env: index of the environment.
      task: task of the episode.
      responses: the responses so far.
      replies: the replies so far, which the replay must give again: the first
        observation, and the result of each response.
    """
    self._begin(env, task)
    self._responses[env], self._replies[env] = [*responses], [*replies]
    self._replay(env)
    self._count_reset(env)

  def _begin(self, env: int, task: base.Task) -> None:
    """Makes an environment ready for an episode."""
    self._check_env(env)
    # Drop replies of the previous episode that were not received.
    stale = [reply for reply in self._arrived if reply[0] == env]
    for reply in stale:
      self._arrived.remove(reply)
    self._running.discard(env)
    self._recycle(env)
    self._tasks[env], self._responses[env], self._replies[env] = task, [], []
    self._episodes[env] += 1
    self._replays[env] = 0
    self._running.add(env)

  def _count_reset(self, env: int) -> None:
    if self._workers:
      self._workers[self._worker_index(env)].resets += 1

  def step(self, env: int, response: str, turn: Any = None) -> None:
    """Sends a response, without its `turn`; `receive` returns the result.

    Raises:
      RuntimeError: if the environment runs no episode.
    """
    if env not in self._running:
      # The episode failed in the meantime; its failure is still queued.
      if any(other == env for other, _ in self._arrived):
        return
      raise RuntimeError(f'env={env}: no episode is running; reset it first')
    self._responses[env].append(response)
    self._submit('step', env, response)

  def end(self, env: int) -> None:
    """Ends an episode before its environment does."""
    self._running.discard(env)

  def refuse(self, env: int, reason: str) -> Failure:
    """Ends an episode whose last reply is unusable; returns the failure."""
    return self._record(env, 'garbage', reason)

  def prepare(self, env: int, task: base.Task) -> None:
    """Makes the environment's worker load a task ahead; gives no reply."""
    self._check_env(env)
    if self._workers:
      self._recycle(env)
      self._submit('prepare', env, task)

  def receive(
    self, timeout_secs: float | None = None
  ) -> list[tuple[int, Reply]]:
    """Returns the replies that have arrived, after waiting for at least one.

    Args:
      timeout_secs: longest time to wait; 0 reads what has arrived; None waits
        until a reply arrives, at most for the time limits of the pending calls.

    Returns:
      Pairs (environment, reply); empty only after the timeout. An episode that
      fails with its worker gets a `Failure` even without a pending call.

    Raises:
      RuntimeError: if no call is pending.
    """
    deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
    while not self._arrived:
      if not any(w and w.sent for w in self._workers):
        raise RuntimeError('receive: no call is pending')
      self._wait(deadline)
      if deadline is not None and time.monotonic() >= deadline:
        break
    replies = list(self._arrived)
    self._arrived.clear()
    return replies

  def close(self) -> None:
    """Ends all workers; further calls do nothing."""
    for w in self._workers:
      if w:
        self._dismiss(w)
    self._workers = []
    for process, since in self._dismissed:
      process.join(
        max(0.0, since + worker_process.CLOSE_TIMEOUT_SECS - time.monotonic())
      )
      worker_process.end_process(process)
    self._dismissed = []
    self._selector.close()
    self._clock.close()
    self._host.close()
    atexit.unregister(self.close)

  # Workers.

  def _start_workers(self, num_workers: int) -> None:
    if not num_workers:
      status, value = self._decode(self._host.start(), 'start')
      self._start_error = '' if status == messages.REPLY else value
    # Start all workers concurrently: imports take most of the time.
    for _ in range(num_workers):
      self._workers.append(self._start_worker())
    while any(w and w.starting for w in self._workers):
      self._wait(None)
    if self._start_error:
      raise ValueError(f'env.name={self._name}: {self._start_error}')

  def _worker_index(self, env: int) -> int:
    return (env // self._envs_per_group) % len(self._workers)

  def _envs_of(self, index: int, envs: Iterable[int]) -> list[int]:
    """Returns the environments of a worker, in order."""
    return sorted(env for env in envs if self._worker_index(env) == index)

  def _start_worker(self) -> worker_process.WorkerProcess:
    w = worker_process.start(self._name, self._kwargs, self._clock)
    self._selector.register(w.pipe, selectors.EVENT_READ, (w, 'pipe'))
    self._selector.register(
      w.process.sentinel, selectors.EVENT_READ, (w, 'sentinel')
    )
    return w

  def _dismiss(self, w: worker_process.WorkerProcess) -> None:
    """Closes a worker's pipe, which makes the worker exit."""
    self._selector.unregister(w.pipe)
    self._selector.unregister(w.process.sentinel)
    w.pipe.close()
    self._dismissed.append((w.process, time.monotonic()))

  def _recycle(self, env: int) -> None:
    """Replaces the environment's worker if it is over a limit."""
    if not self._workers:
      return
    index = self._worker_index(env)
    w = self._workers[index]
    if not w or w.starting or not self._is_over_limit(w):
      return
    if w.resets < len(self._envs_of(index, range(self.num_envs))):
      return
    self._reap()
    self._dismiss(w)
    self._workers[index] = self._start_worker()
    self.recycled += 1
    for other in self._envs_of(index, self._running):
      self._replay(other)

  def _reap(self) -> None:
    """Frees dismissed processes that have exited or exceeded their time."""
    expiry = time.monotonic() - worker_process.CLOSE_TIMEOUT_SECS
    dismissed, self._dismissed = self._dismissed, []
    for process, since in dismissed:
      if process.is_alive() and since > expiry:
        self._dismissed.append((process, since))
      else:
        worker_process.end_process(process)

  def _is_over_limit(self, w: worker_process.WorkerProcess) -> bool:
    if self._max_resets is not None and w.resets >= self._max_resets:
      return True
    if self._max_mib is None:
      return False
    try:
      memory = psutil.Process(w.pid).memory_info().rss
    except psutil.NoSuchProcess:
      return False  # It died; the next call detects that.
    return memory > self._max_mib * 2**20

  def _replace_lost(
    self, w: worker_process.WorkerProcess, cause: str, reason: str
  ) -> None:
    """Replaces a lost worker; the episode that it was executing fails."""
    index = self._workers.index(w)
    failing = None
    if w.sent and not w.died_idle and w.sent[0].method in ('reset', 'step'):
      call = w.sent[0]
      if call.episode == self._episodes[call.env]:
        failing = call.env
    affected = self._envs_of(index, self._running)
    self._dismiss(w)
    self._dismissed.pop()
    worker_process.end_process(w.process)
    if w.starting:
      # Starting another worker at once could loop forever.
      self._workers[index], self._start_error = None, reason
    else:
      self._workers[index] = self._start_worker()
      self.restarts += 1
    # The number of deaths is bounded, because each ends the episode that caused
    # it. Other losses are bounded by the number of replays.
    is_counted = cause == 'hung' or failing is None
    for env in affected:
      if env == failing or self._workers[index] is None:
        self._fail(env, cause, reason)
      elif is_counted and self._replays[env] == _MAX_REPLAYS:
        full_reason = f'its worker was lost too often; last reason: {reason}'
        self._fail(env, 'neighbours', full_reason)
      else:
        self._replays[env] += is_counted
        self._replay(env)

  def _replay(self, env: int) -> None:
    """Replays an episode in a new worker up to its last call."""
    calls = [('reset', self._tasks[env])]
    calls += [('step', response) for response in self._responses[env]]
    # A call without a reply so far has no expected reply.
    for (method, argument), expected in itertools.zip_longest(
      calls, self._replies[env]
    ):
      self._submit(method, env, argument, expected=expected)

  # Calls and replies.

  def _check_env(self, env: int) -> None:
    if not 0 <= env < self.num_envs:
      raise IndexError(
        f'env={env}: out of range; the pool has {self.num_envs} environments'
      )

  def _submit(
    self, method: str, env: int, argument: Any, expected: Reply | None = None
  ) -> None:
    call_id = next(self._call_ids)
    if not self._workers:
      call = worker_process.Call(
        method, env, call_id, b'', self._episodes[env], expected
      )
      reply = self._host.call(call_id, method, env, argument)
      self._handle_reply(call, *self._decode(reply, method))
      return
    index = self._worker_index(env)
    w = self._workers[index]
    if w is None:
      w = self._workers[index] = self._start_worker()
      self.restarts += 1
    message = pickle.dumps(
      (call_id, method, env, argument), pickle.HIGHEST_PROTOCOL
    )
    w.waiting.append(
      worker_process.Call(
        method, env, call_id, message, self._episodes[env], expected
      )
    )
    self._send(w)

  def _send(self, w: worker_process.WorkerProcess) -> None:
    w.send(self._clock.now())
    self._watch(w)

  def _watch(self, w: worker_process.WorkerProcess) -> None:
    """Waits for a worker's pipe to take bytes only if there are any."""
    events = selectors.EVENT_READ | bool(w.outbox) * selectors.EVENT_WRITE
    self._selector.modify(w.pipe, events, (w, 'pipe'))

  def _wait(self, deadline: float | None) -> None:
    """Waits once for events, until a deadline or a worker's time limit."""
    now = self._clock.now()
    waits = [
      w.progress + self._timeouts[w.sent[0].method] - now
      for w in self._workers
      if w and w.sent
    ]
    waits += [] if deadline is None else [deadline - time.monotonic()]
    timeout = max(0.0, min([*waits, _MAX_WAIT_SECS]))
    end, unread_secs = None, now - self._read_until
    while events := self._selector.select(timeout):
      # A worker may send without end.
      end = end or time.monotonic() + _DRAIN_SECS
      self._handle_events(events, unread_secs)
      unread_secs = 0.0
      left = end - time.monotonic()
      if left <= 0:
        break
      # The rest of a large reply follows as soon as its first part is read.
      in_part = any(key.data[0].inbox for key, _ in events)
      timeout = min(left, _NEXT_PART_SECS) if in_part else 0.0
    self._check_time_limits()
    self._read_until = self._clock.now()

  def _handle_events(
    self, events: list[tuple[selectors.SelectorKey, int]], unread_secs: float
  ) -> None:
    """Writes to and reads from the pipes that are ready.

    Args:
      events: the pipes.
      unread_secs: how long this process has not looked at them.
    """
    for key, mask in events:
      w, _ = key.data
      if mask & selectors.EVENT_WRITE and w in self._workers:
        w.flush()
        self._watch(w)
    ready = [key.data for key, mask in events if mask & selectors.EVENT_READ]
    for w, handle in ready:
      if handle == 'pipe':
        if w in self._workers:
          self._read(w, unread_secs)
      elif (w, 'pipe') not in ready and w in self._workers:
        # A process that the simulator started keeps the pipe open.
        self._replace_lost(w, 'died', worker_process.describe_death(w.process))

  def _read(self, w: worker_process.WorkerProcess, unread_secs: float) -> None:
    """Handles the replies that have arrived from a worker."""
    try:
      for call_id, body in w.receive():
        self._handle_message(w, call_id, body)
        if w not in self._workers:
          return
    except worker_process.LostError as error:
      self._replace_lost(w, error.cause, error.reason)
      return
    w.extend_time(self._clock.now(), unread_secs)

  def _handle_message(
    self, w: worker_process.WorkerProcess, call_id: int, body: bytes
  ) -> None:
    """Handles a complete reply of a worker."""
    if not w.sent or call_id != w.sent[0].call_id:
      self._replace_lost(
        w, 'garbage', 'the worker replied to a call other than the oldest'
      )
      return
    method = w.sent[0].method
    status, value = messages.decode(body, method)
    if method == 'start' and status != messages.REPLY:
      self._replace_lost(w, 'raised', value)
      return
    call = w.finish_call(self._clock.now())
    self._send(w)
    self._handle_reply(call, status, value)

  def _decode(self, message: bytes, method: str) -> tuple[str, Any]:
    """Returns (status, value) of a message of this process's own host."""
    return messages.decode(message[messages.HEADER.size :], method)

  def _handle_reply(
    self, call: worker_process.Call, status: str, value: Any
  ) -> None:
    if call.method in ('start', 'prepare'):
      return  # An error in `prepare` is raised again by `reset`.
    if (
      call.env not in self._running or call.episode != self._episodes[call.env]
    ):
      return  # Its episode is over.
    if status != messages.REPLY:
      self._fail(call.env, _CAUSE_OF_STATUS[status], value)
      return
    if call.expected is not None:
      if value != call.expected:
        reason = 'the episode differs when it is replayed'
        self._fail(call.env, 'differed', reason)
      return
    if isinstance(value, base.StepResult) and value.done:
      self._running.discard(call.env)
    self._replies[call.env].append(value)
    self._arrived.append((call.env, value))

  def _fail(self, env: int, cause: str, reason: str) -> None:
    self._arrived.append((env, self._record(env, cause, reason)))

  def _record(self, env: int, cause: str, reason: str) -> Failure:
    last_action = (self._responses[env] or [''])[-1]
    failure = Failure(env, self._tasks[env], last_action, cause, reason)
    self._running.discard(env)
    self.failures.append(failure)
    return failure

  def _check_time_limits(self) -> None:
    now = self._clock.now()
    for w in list(self._workers):
      if not w or not w.sent:
        continue
      call = w.sent[0]
      limit = self._timeouts[call.method]
      if now - w.progress > limit:
        target = '' if call.method == 'start' else f' of env {call.env}'
        reason = f'{call.method}{target} took longer than {limit:g} s'
        self._replace_lost(w, 'hung', reason)
