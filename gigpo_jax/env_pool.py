"""Many environments over few worker processes; each advances on its own.

`reset` and `step` submit a call and return at once; `receive` hands out what
is answered. A worker that dies, or that spends longer on a call than allowed,
is replaced, and the episodes it was running are answered with a `Failure`;
nobody else notices.
"""

import atexit
import collections
import dataclasses
import multiprocessing
import os
import time
from multiprocessing import connection
from typing import Any

from envs import base, worker

_ONE_THREAD = {
  name: '1'
  for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')
}


@dataclasses.dataclass(frozen=True)
class Failure:
  """An episode that its environment broke off.

  Attributes:
    env: the environment.
    task: what it was playing.
    last_action: the last response sent to it; '' if it was being reset.
    reason: what happened, in one line.
  """

  env: int
  task: base.Task
  last_action: str
  reason: str


Reply = base.Observation | base.StepResult | Failure


@dataclasses.dataclass
class _Worker:
  """A process and the calls it has not answered, oldest first.

  Attributes:
    calls: call number -> (kind, env, when it was begun or None).
    resets: how many it has served.
    greeted: whether it has answered anything yet.
  """

  process: multiprocessing.Process
  pipe: connection.Connection
  calls: dict[int, tuple[str, int, float | None]]
  resets: int = 0
  greeted: bool = False


class EnvPool:
  """A fixed number of environments; a context manager.

  Args:
    name: of the environment, in `envs.REGISTRY`.
    kwargs: its arguments.
    num_envs: environments alive at once.
    num_workers: processes they are spread over; 0 runs all in this process,
      without timeouts, for debugging.
    step_timeout_secs: longest time a step may take.
    reset_timeout_secs: longest time a reset or preparation may take.
    envs_per_group: as many neighbours share a worker, and its caches.
    max_resets_per_worker: a worker is replaced, when none of its episodes is
      running, after as many resets; for simulators that leak. None: never.
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
  ):
    self.num_envs = num_envs
    self.restarts = 0
    self.failures: list[Failure] = []
    self._name, self._kwargs = name, kwargs
    self._timeouts = {
      'step': step_timeout_secs,
      'reset': reset_timeout_secs,
      'prepare': reset_timeout_secs,
    }
    self._envs_per_group = envs_per_group
    self._max_resets = max_resets_per_worker
    self._tasks: dict[int, base.Task] = {}
    self._actions: dict[int, str] = {}
    self._running: set[int] = set()
    self._answers: collections.deque[tuple[int, Reply]] = collections.deque()
    self._local: dict[int, base.Env] = {}
    self._next_call = 0
    self._context = multiprocessing.get_context('spawn')
    groups = -(-num_envs // envs_per_group)
    self._workers: list[_Worker] = []
    atexit.register(self.close)
    for _ in range(min(num_workers, groups)):
      self._workers.append(self._start())

  def __enter__(self) -> 'EnvPool':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def reset(self, env: int, task: base.Task) -> None:
    """Begins an episode; `receive` will give its first observation."""
    if env not in self._running:
      self._recycle(env)
    self._tasks[env], self._actions[env] = task, ''
    self._running.add(env)
    self._submit('reset', env, task)

  def step(self, env: int, response: str) -> None:
    """Sends the policy's response; `receive` will give the result."""
    self._actions[env] = response
    self._submit('step', env, response)

  def prepare(self, env: int, task: base.Task) -> None:
    """Lets the environment's worker load a task ahead; never answered."""
    if self._workers:
      self._submit('prepare', env, task)

  def receive(
    self, timeout_secs: float | None = None
  ) -> list[tuple[int, Reply]]:
    """Returns answers that have come, waiting for at least one.

    Args:
      timeout_secs: longest time to wait; None is for ever, which the calls'
        own timeouts bound.

    Returns:
      (environment, answer) pairs; empty only after the timeout.
    """
    end = None if timeout_secs is None else time.monotonic() + timeout_secs
    while not self._answers:
      left = 1.0 if end is None else min(1.0, end - time.monotonic())
      if left <= 0:
        break
      if not any(w.calls for w in self._workers):
        raise RuntimeError('receive: no call is under way')
      self._wait(left)
    answers = list(self._answers)
    self._answers.clear()
    return answers

  def close(self) -> None:
    """Ends all workers; may be called again."""
    for w in self._workers:
      self._stop(w)
    self._workers = []
    for env in self._local.values():
      env.close()
    self._local = {}
    atexit.unregister(self.close)

  # Workers.

  def _place(self, env: int) -> int:
    return (env // self._envs_per_group) % len(self._workers)

  def _start(self) -> _Worker:
    ours, theirs = self._context.Pipe()
    process = self._context.Process(
      target=worker.main,
      args=(theirs, self._name, self._kwargs, os.getpid()),
      daemon=True,
    )
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
      process.start()
    finally:
      for name, value in before.items():
        if value is None:
          del os.environ[name]
        else:
          os.environ[name] = value
    theirs.close()
    return _Worker(process, ours, {})

  def _stop(self, w: _Worker) -> None:
    w.process.kill()
    w.process.join()
    w.process.close()
    w.pipe.close()

  def _recycle(self, env: int) -> None:
    """Replaces a worker that has served its time and is idle."""
    if not self._workers or self._max_resets is None:
      return
    place = self._place(env)
    w = self._workers[place]
    busy = any(self._place(other) == place for other in self._running)
    if w.resets >= self._max_resets and not busy and not w.calls:
      self._stop(w)
      self._workers[place] = self._start()

  # Calls and answers.

  def _submit(self, kind: str, env: int, argument: Any) -> None:
    if not 0 <= env < self.num_envs:
      raise IndexError(f'env={env}: the pool has {self.num_envs}')
    if not self._workers:
      self._perform(kind, env, argument)
      return
    w = self._workers[self._place(env)]
    number, self._next_call = self._next_call, self._next_call + 1
    w.calls[number] = (kind, env, None)
    w.resets += kind == 'reset'
    try:
      w.pipe.send((kind, number, env, argument))
    except OSError:
      pass  # It died; waiting for its answer finds out.

  def _perform(self, kind: str, env: int, argument: Any) -> None:
    try:
      self._answer(
        env,
        worker.perform(
          self._local, self._name, self._kwargs, kind, env, argument
        ),
      )
    except Exception as error:  # noqa: BLE001  (whatever a simulator raises)
      self._local.pop(env, None)
      self._fail(env, worker.describe(error))

  def _wait(self, timeout_secs: float) -> None:
    by_handle: dict[Any, _Worker] = {}
    for w in self._workers:
      by_handle[w.pipe] = by_handle[w.process.sentinel] = w
    for handle in connection.wait(list(by_handle), timeout_secs):
      w = by_handle[handle]
      if w in self._workers:
        self._read(w)
    self._check_clocks()

  def _read(self, w: _Worker) -> None:
    try:
      while w.pipe.poll():
        self._take(w, *w.pipe.recv())
    except (EOFError, OSError):
      pass
    if not w.process.is_alive() and not w.pipe.closed:
      code = w.process.exitcode
      if not w.greeted:
        raise RuntimeError(
          f'env.name={self._name}: a worker could not start (exit code '
          f'{code}); see its message above'
        )
      self._replace(w, f'the worker process died (exit code {code})')

  def _take(
    self, w: _Worker, what: str, number: int, env: int, value: Any
  ) -> None:
    w.greeted = True
    kind, _, _ = w.calls[number]
    if what == 'begin':
      w.calls[number] = (kind, env, time.monotonic())
      return
    del w.calls[number]
    if kind == 'prepare':
      return  # What went wrong there will go wrong at the reset.
    if what == 'error':
      self._fail(env, value)
    else:
      self._answer(env, value)

  def _answer(
    self, env: int, value: base.Observation | base.StepResult
  ) -> None:
    if isinstance(value, base.StepResult) and value.done:
      self._running.discard(env)
    self._answers.append((env, value))

  def _fail(self, env: int, reason: str) -> None:
    failure = Failure(env, self._tasks[env], self._actions[env], reason)
    self._running.discard(env)
    self.failures.append(failure)
    self._answers.append((env, failure))

  def _check_clocks(self) -> None:
    now = time.monotonic()
    for w in list(self._workers):
      for kind, env, begun in w.calls.values():
        limit = self._timeouts[kind]
        if begun is not None and now - begun > limit:
          self._replace(
            w,
            f'{kind} of env {env} took longer than {limit:g} s '
            f'(pool.{"step" if kind == "step" else "reset"}_timeout_secs)',
          )
          break

  def _replace(self, w: _Worker, reason: str) -> None:
    """Starts another worker; what this one was running has failed."""
    place = self._workers.index(w)
    lost = {env for env in self._running if self._place(env) == place}
    self._stop(w)
    self._workers[place] = self._start()
    self.restarts += 1
    for env in sorted(lost):
      self._fail(env, reason)
