"""Many environments over few worker processes; each advances on its own.

`reset` and `step` submit a call and return at once; `receive` hands out what
is answered. A worker that dies, or that spends longer on a call than allowed,
is replaced; the episode that it was busy with is answered with a `Failure`. Its
other episodes are played again up to where they were, which nobody notices: an
environment is a function of its task and of the responses. One that proves not
to be is a failure, too, and so is one that has waited for hung neighbours too
often.

Environments are not trusted: what their workers send holds data alone (see
`envs.messages`), is bounded, and is checked. An answer of another process, or
one that belongs to no call, never counts. Environments of one worker share its
memory; a worker is as far as a wicked one reaches. Calls to workers are
pickled, as they are this process's own.
"""

import atexit
import collections
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import selectors
import threading
import time
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any

import psutil

from envs import base, messages, worker

# Workers get one thread each, and never the accelerator.
_WORKER_ENVIRON = {
  'OMP_NUM_THREADS': '1',
  'OPENBLAS_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
  'JAX_PLATFORMS': 'cpu',
}

# What may be on its way to a worker at once. It has to fit into the pipe's
# buffer: sending then never blocks, whatever the worker is doing.
_WINDOW_BYTES = 65_536
_WINDOW_CALLS = 64

# Importing a simulator on a busy machine is slower than any reset.
_START_TIMEOUT_SECS = 120.0

# Why an episode was broken off: its environment raised, answered what cannot be
# used, ended its process or did not answer in time; it went differently when it
# was played again; or others of its worker hung too often.
CAUSES = ('raised', 'garbage', 'died', 'hung', 'differed', 'neighbours')
_CAUSES = {messages.ERROR: 'raised', messages.GARBAGE: 'garbage'}

# How often an episode is played again after another one hung. If it were for
# ever and all hung, every episode in turn would be waited for. One that dies is
# found out at once.
_MOST_REPLAYS = 4
_CLOSE_TIMEOUT_SECS = 2.0

# How much of an answer is read at once.
_READ_BYTES = 1 << 20

# How often the clock of time limits looks. Where it could not look for longer
# than twice that, this process was stopped.
_TICK_SECS = 0.25

# Of a response, in a report.
_SHOWN_CHARS = 60


@dataclasses.dataclass(frozen=True)
class Failure:
  """An episode that its environment broke off.

  Attributes:
    env: the environment.
    task: what it was playing.
    last_action: the last response sent to it; '' if it was being reset.
    cause: one of CAUSES.
    reason: what happened, in one line.
  """

  env: int
  task: base.Task
  last_action: str
  cause: str
  reason: str

  def __str__(self) -> str:
    last = self.last_action[-_SHOWN_CHARS:]
    return f'{self.cause}: {self.reason}' + (last and f', after {last!r}')


Reply = base.Observation | base.StepResult | Failure


@dataclasses.dataclass(frozen=True)
class _Call:
  """What an environment is asked.

  Attributes:
    kind: start, prepare, reset or step.
    env: which; -1 for a start.
    number: by which its answer is known; 0 for a start.
    message: as it is sent.
    episode: number of the environment's episode, from 1 on.
    known: the answer, where a worker gave it that was lost since.
  """

  kind: str
  env: int
  number: int = 0
  message: bytes = b''
  episode: int = 0
  known: Reply | None = None


@dataclasses.dataclass(eq=False)
class _Worker:
  """A process and the calls it has not answered; it answers in order.

  Attributes:
    sent: calls on their way or under way, oldest first; the start is one.
    waiting: calls that are held back until `sent` has room.
    progress: when, by the pool's clock, the oldest call of `sent` can have been
      taken up at last.
    inbox: what of an answer has come.
    resets: how many it was given, those of episodes played again left out.
    died_idle: whether it was gone before it was asked anything.
  """

  process: multiprocessing.Process
  pipe: connection.Connection
  sent: collections.deque[_Call]
  waiting: collections.deque[_Call]
  progress: float
  resets: int = 0
  died_idle: bool = False
  inbox: bytearray = dataclasses.field(default_factory=bytearray)

  @property
  def starting(self) -> bool:
    return bool(self.sent) and self.sent[0].kind == 'start'


class _Clock:
  """Seconds that count for time limits: those in which this process could run.

  A stopped process (Ctrl-Z, a frozen container, a suspended machine) cannot
  tell; so a thread looks at the time again and again, and of a long pause
  between two looks only a moment counts.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._seconds, self._last = 0.0, time.monotonic()
    self._closed = threading.Event()
    threading.Thread(target=self._tick, daemon=True).start()

  def now(self) -> float:
    """Returns how many have passed."""
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


class EnvPool:
  """A fixed number of environments; a context manager.

  Belongs to the thread that makes it: on Linux workers die with it.

  Args:
    name: of the environment, in `envs.REGISTRY`.
    kwargs: its arguments.
    num_envs: environments alive at once.
    num_workers: processes they are spread over; 0 runs all in this process,
      without timeouts, for debugging.
    step_timeout_secs: longest time a step may take, without the time in which
      this process was stopped.
    reset_timeout_secs: longest time a reset or preparation may take.
    envs_per_group: as many neighbours share a worker, and its caches.
    max_resets_per_worker: a worker is replaced after as many resets, and its
      episodes are played again up to where they were; for simulators that leak.
      None: never. It gets as many as it has environments in any case.
    max_worker_mib: likewise, when its process has more memory. None: never.

  Attributes:
    failures: all that happened.
    restarts: workers that were replaced because they died or hung.
    recycled: workers that were replaced because they had served their time.

  Raises:
    ValueError: in one line, if the environment cannot be made.
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
    # Of each environment: which episode it is, what was sent and answered.
    self._episodes: dict[int, int] = collections.defaultdict(int)
    self._responses: dict[int, list[str]] = {}
    self._replies: dict[int, list[Reply]] = {}
    self._replays: dict[int, int] = {}
    self._running: set[int] = set()
    self._answers: collections.deque[tuple[int, Reply]] = collections.deque()
    self._host = worker.Host(name, kwargs)
    self._numbers = itertools.count(1)
    self._clock = _Clock()
    self._context = multiprocessing.get_context('spawn')
    self._selector = selectors.DefaultSelector()
    # Processes that were let go, and when.
    self._leaving: list[tuple[multiprocessing.Process, float]] = []
    # None: its process could not start; the next call tries again.
    self._workers: list[_Worker | None] = []
    self._start_error = ''
    atexit.register(self.close)
    try:
      self._open(min(num_workers, -(-num_envs // envs_per_group)))
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> 'EnvPool':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def reset(self, env: int, task: base.Task) -> None:
    """Begins an episode; `receive` will give its first observation."""
    self._check(env)
    # An answer of the episode before, not fetched, is not this one's.
    stale = [answer for answer in self._answers if answer[0] == env]
    for answer in stale:
      self._answers.remove(answer)
    self._running.discard(env)
    self._recycle(env)
    self._tasks[env], self._responses[env], self._replies[env] = task, [], []
    self._episodes[env] += 1
    self._replays[env] = 0
    self._running.add(env)
    self._submit('reset', env, task)
    if self._workers:
      self._workers[self._place(env)].resets += 1

  def step(self, env: int, response: str) -> None:
    """Sends the policy's response; `receive` will give the result.

    Raises:
      RuntimeError: if no episode is running there.
    """
    if env not in self._running:
      # It was lost meanwhile: the failure on its way is the answer.
      if any(other == env for other, _ in self._answers):
        return
      raise RuntimeError(f'env={env}: no episode is running; reset it first')
    self._responses[env].append(response)
    self._submit('step', env, response)

  def end(self, env: int) -> None:
    """Ends an episode though its environment would continue."""
    self._running.discard(env)

  def refuse(self, env: int, reason: str) -> Failure:
    """Ends an episode whose last answer cannot be used; returns the failure."""
    return self._record(env, 'garbage', reason)

  def prepare(self, env: int, task: base.Task) -> None:
    """Lets the environment's worker load a task ahead; never answered."""
    self._check(env)
    if self._workers:
      self._recycle(env)
      self._submit('prepare', env, task)

  def receive(
    self, timeout_secs: float | None = None
  ) -> list[tuple[int, Reply]]:
    """Returns answers that have come, waiting for at least one.

    Args:
      timeout_secs: longest time to wait; 0 takes what is there; None is for
        ever, which the calls' own timeouts bound.

    Returns:
      (environment, answer) pairs; empty only after the timeout. An episode
      that cannot go on after its worker was lost is answered unasked.

    Raises:
      RuntimeError: if there is nothing to wait for.
    """
    end = None if timeout_secs is None else time.monotonic() + timeout_secs
    while not self._answers:
      if not any(w and w.sent for w in self._workers):
        raise RuntimeError('receive: no call is under way')
      self._wait(end)
      if end is not None and time.monotonic() >= end:
        break
    answers = list(self._answers)
    self._answers.clear()
    return answers

  def close(self) -> None:
    """Ends all workers; may be called again."""
    for w in self._workers:
      if w:
        self._dismiss(w)
    self._workers = []
    for process, since in self._leaving:
      process.join(max(0.0, since + _CLOSE_TIMEOUT_SECS - time.monotonic()))
      _end(process)
    self._leaving = []
    self._selector.close()
    self._clock.close()
    self._host.close()
    atexit.unregister(self.close)

  # Workers.

  def _open(self, num_workers: int) -> None:
    if not num_workers:
      what, value = self._decode(self._host.start(), 'start')
      self._start_error = '' if what == messages.REPLY else value
    # All at once: most of a start is waiting for imports.
    for _ in range(num_workers):
      self._workers.append(self._start())
    while any(w and w.starting for w in self._workers):
      self._wait(None)
    if self._start_error:
      raise ValueError(f'env.name={self._name}: {self._start_error}')

  def _place(self, env: int) -> int:
    return (env // self._envs_per_group) % len(self._workers)

  def _at(self, place: int, envs: Iterable[int]) -> list[int]:
    """Returns those that are of a worker, in order."""
    return sorted(env for env in envs if self._place(env) == place)

  def _start(self) -> _Worker:
    ours, theirs = self._context.Pipe()
    process = self._context.Process(
      target=worker.main,
      args=(theirs, self._name, self._kwargs, os.getpid()),
      daemon=True,
    )
    # Here, and not in the worker: its libraries read them when imported.
    before = {name: os.environ.get(name) for name in _WORKER_ENVIRON}
    os.environ.update(_WORKER_ENVIRON)
    try:
      process.start()
    finally:
      for name, value in before.items():
        if value is None:
          del os.environ[name]
        else:
          os.environ[name] = value
    theirs.close()
    sent = collections.deque([_Call('start', -1)])
    w = _Worker(process, ours, sent, collections.deque(), self._clock.now())
    self._selector.register(ours, selectors.EVENT_READ, (w, 'pipe'))
    self._selector.register(
      process.sentinel, selectors.EVENT_READ, (w, 'sentinel')
    )
    return w

  def _dismiss(self, w: _Worker) -> None:
    """Lets a worker go: it leaves when it finds its pipe closed."""
    self._selector.unregister(w.pipe)
    self._selector.unregister(w.process.sentinel)
    w.pipe.close()
    self._leaving.append((w.process, time.monotonic()))

  def _recycle(self, env: int) -> None:
    """Replaces the worker if it has served its time."""
    if not self._workers:
      return
    place = self._place(env)
    w = self._workers[place]
    if not w or w.starting or not self._worn_out(w):
      return
    if w.resets < len(self._at(place, range(self.num_envs))):
      return
    self._reap()
    self._dismiss(w)
    self._workers[place] = self._start()
    self.recycled += 1
    for other in self._at(place, self._running):
      self._replay(other)

  def _reap(self) -> None:
    """Frees what is kept for processes that have left, or had time to."""
    longest_ago = time.monotonic() - _CLOSE_TIMEOUT_SECS
    leaving, self._leaving = self._leaving, []
    for process, since in leaving:
      if process.is_alive() and since > longest_ago:
        self._leaving.append((process, since))
      else:
        _end(process)

  def _worn_out(self, w: _Worker) -> bool:
    if self._max_resets is not None and w.resets >= self._max_resets:
      return True
    if self._max_mib is None:
      return False
    try:
      memory = psutil.Process(w.process.pid).memory_info().rss
    except psutil.NoSuchProcess:
      return False  # It died; the next call finds out.
    return memory > self._max_mib * 2**20

  def _lose(self, w: _Worker, cause: str, reason: str) -> None:
    """Starts another worker; what this one was busy with has failed."""
    place = self._workers.index(w)
    guilty = None
    if w.sent and not w.died_idle and w.sent[0].kind in ('reset', 'step'):
      call = w.sent[0]
      if call.episode == self._episodes[call.env]:
        guilty = call.env
    lost = self._at(place, self._running)
    self._dismiss(w)
    self._leaving.pop()
    _end(w.process)
    if w.starting:
      # Again at once would be for ever.
      self._workers[place], self._start_error = None, reason
    else:
      self._workers[place] = self._start()
      self.restarts += 1
    # Each death of a guilty one is its last: there is an end to them.
    endless = cause == 'hung' or guilty is None
    for env in lost:
      if env == guilty or self._workers[place] is None:
        self._fail(env, cause, reason)
      elif endless and self._replays[env] == _MOST_REPLAYS:
        reason_ = f'lost its worker too often, at last because {reason}'
        self._fail(env, 'neighbours', reason_)
      else:
        self._replays[env] += endless
        self._replay(env)

  def _replay(self, env: int) -> None:
    """Brings an episode to where it was before its worker was lost."""
    calls = [('reset', self._tasks[env])]
    calls += [('step', response) for response in self._responses[env]]
    # What is still to be answered has no reply to be known by.
    for (kind, argument), known in itertools.zip_longest(
      calls, self._replies[env]
    ):
      self._submit(kind, env, argument, known=known)

  # Calls and answers.

  def _check(self, env: int) -> None:
    if not 0 <= env < self.num_envs:
      raise IndexError(f'env={env}: the pool has {self.num_envs}')

  def _submit(
    self, kind: str, env: int, argument: Any, known: Reply | None = None
  ) -> None:
    number = next(self._numbers)
    if not self._workers:
      call = _Call(kind, env, number, b'', self._episodes[env])
      answer = self._host.call(number, kind, env, argument)
      self._take(call, *self._decode(answer, kind))
      return
    place = self._place(env)
    w = self._workers[place]
    if w is None:
      w = self._workers[place] = self._start()
      self.restarts += 1
    message = pickle.dumps(
      (number, kind, env, argument), pickle.HIGHEST_PROTOCOL
    )
    w.waiting.append(
      _Call(kind, env, number, message, self._episodes[env], known)
    )
    self._send(w)

  def _send(self, w: _Worker) -> None:
    """Sends what waits, as far as there is room."""
    used = sum(len(call.message) for call in w.sent) if w.waiting else 0
    while w.waiting:
      used += len(w.waiting[0].message)
      full = used > _WINDOW_BYTES or len(w.sent) >= _WINDOW_CALLS
      if w.sent and full:
        return
      if not w.sent:
        w.progress = self._clock.now()
      w.sent.append(w.waiting.popleft())
      try:
        w.pipe.send_bytes(w.sent[-1].message)
      except OSError:
        # It died; waiting for its answer finds out.
        w.died_idle |= len(w.sent) == 1
        return

  def _wait(self, end: float | None) -> None:
    """Takes what comes until `end` or a worker's time is up, once."""
    now = self._clock.now()
    waits = [
      w.progress + self._timeouts[w.sent[0].kind] - now
      for w in self._workers
      if w and w.sent
    ]
    waits += [] if end is None else [end - time.monotonic()]
    timeout = max(0.0, min(waits))
    while events := self._selector.select(timeout):
      ready = [key.data for key, _ in events]
      for w, handle in ready:
        if handle == 'pipe':
          if w in self._workers:
            self._read(w)
        elif (w, 'pipe') not in ready and w in self._workers:
          # Something that the simulator started holds the pipe open.
          self._lose(w, 'died', _death(w.process))
      timeout = 0.0
    self._check_clocks()

  def _read(self, w: _Worker) -> None:
    """Reads what has come, which may be a part of an answer or several."""
    try:
      data = os.read(w.pipe.fileno(), _READ_BYTES)
    except OSError:
      data = b''
    if not data:
      self._lose(w, 'died', _death(w.process))
      return
    w.inbox += data
    header = messages.HEADER
    while w in self._workers and len(w.inbox) >= header.size:
      size, pid, number = header.unpack_from(w.inbox)
      if size > messages.MAX_BYTES:
        self._lose(w, 'garbage', f'the worker announced {size:,} bytes')
        return
      end = header.size + size
      if len(w.inbox) < end:
        return
      body = bytes(w.inbox[header.size : end])
      del w.inbox[:end]
      # A process that an environment started may hold the pipe, too.
      if pid == w.process.pid:
        self._answer(w, number, body)

  def _answer(self, w: _Worker, number: int, body: bytes) -> None:
    """Takes a whole answer of a worker."""
    if not w.sent or number != w.sent[0].number:
      self._lose(w, 'garbage', 'the worker answered a call that it did not get')
      return
    call = w.sent[0]
    what, value = messages.decode(body, call.kind)
    if call.kind == 'start' and what != messages.REPLY:
      self._lose(w, 'raised', value)
      return
    w.sent.popleft()
    w.progress = self._clock.now()
    self._send(w)
    self._take(call, what, value)

  def _decode(self, answer: bytes, kind: str) -> tuple[str, Any]:
    """Returns (kind, value) of an answer of this process."""
    return messages.decode(answer[messages.HEADER.size :], kind)

  def _take(self, call: _Call, what: str, value: Any) -> None:
    if call.kind in ('start', 'prepare'):
      return  # What went wrong in preparing goes wrong again at the reset.
    if (
      call.env not in self._running or call.episode != self._episodes[call.env]
    ):
      return  # Its episode is over.
    if what != messages.REPLY:
      self._fail(call.env, _CAUSES[what], value)
      return
    if call.known is not None:
      if value != call.known:
        reason = 'played again, the episode went differently'
        self._fail(call.env, 'differed', reason)
      return
    if isinstance(value, base.StepResult) and value.done:
      self._running.discard(call.env)
    self._replies[call.env].append(value)
    self._answers.append((call.env, value))

  def _fail(self, env: int, cause: str, reason: str) -> None:
    self._answers.append((env, self._record(env, cause, reason)))

  def _record(self, env: int, cause: str, reason: str) -> Failure:
    last_action = (self._responses[env] or [''])[-1]
    failure = Failure(env, self._tasks[env], last_action, cause, reason)
    self._running.discard(env)
    self.failures.append(failure)
    return failure

  def _check_clocks(self) -> None:
    now = self._clock.now()
    for w in list(self._workers):
      if not w or not w.sent:
        continue
      call = w.sent[0]
      limit = self._timeouts[call.kind]
      if now - w.progress > limit:
        where = '' if call.kind == 'start' else f' of env {call.env}'
        reason = f'{call.kind}{where} took longer than {limit:g} s'
        self._lose(w, 'hung', reason)


def _death(process: multiprocessing.Process) -> str:
  process.join(_CLOSE_TIMEOUT_SECS)
  return f'the worker process died (exit code {process.exitcode})'


def _end(process: multiprocessing.Process) -> None:
  if process.is_alive():
    worker.end_tree(process.pid)
  process.kill()
  process.join()
  process.close()
