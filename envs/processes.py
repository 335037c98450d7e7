"""Processes that end with those that started them.

`supervise` splits a worker process in two: a supervisor, and a child that runs
the environments. The supervisor runs no code of environments. When the child or
the trainer ends, however that happens, it ends every process that environments
have started. On Linux these include daemons, which have left their parent and
its session: as a subreaper, the supervisor becomes the parent of any descendant
whose own parent has ended. On other systems such processes may survive.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import time

import psutil

# Names the process that a command ends with.
PARENT_VARIABLE = 'GIGPO_JAX_PARENT'

# Asks a supervisor to end all processes. The kernel also sends it when the
# supervisor's parent ends.
END = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Polling period where the kernel sends no signal.
_POLL_SECS = 0.5
# Time in which killed processes are expected to end. A process that waits for a
# device ends later.
_KILL_SECS = 2.0


def end_with_named_parent() -> None:
  """Ends with the process named by $GIGPO_JAX_PARENT, if there is one.

  A process with threads must not run Python between fork and exec, so that a
  command asks for this itself.
  """
  if parent := os.environ.pop(PARENT_VARIABLE, ''):
    end_with_parent(int(parent))


def end_with_parent(parent: int) -> None:
  """Makes the kernel end this process when its parent dies (Linux)."""
  if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
    os._exit(0)


def supervise(parent: int) -> None:
  """Forks and returns in the child; this process becomes its supervisor.

  The supervisor ends with the child's exit code or signal. Both processes have
  sessions of their own, so that signals of the terminal do not reach them.

  Args:
    parent: id of the process that started this one.
  """
  supervisor = os.getpid()
  os.setsid()
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)
  child = os.fork()
  if not child:
    os.setsid()
    end_with_parent(supervisor)
    return
  status = -1
  try:
    # Pipes are open in the child alone, so that their other ends detect its
    # end.
    os.closerange(3, 65_536)
    status = _wait(child, parent)
  finally:
    _end_all(child)
    _exit_as(status)


def _wait(child: int, parent: int) -> int:
  """Returns the wait status of the child, or -1 if all processes shall end."""
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer)
  asked = []
  signal.signal(END, lambda number, _: asked.append(number))
  signal.signal(signal.SIGCHLD, lambda *_: None)
  _prctl(_PR_SET_PDEATHSIG, END)
  while not asked and os.getppid() == parent:
    for pid, status in _reap():
      if pid == child:
        return status
    if select.select([reader], [], [], _POLL_SECS)[0]:
      os.read(reader, 512)
  return -1


def _end_all(child: int) -> None:
  """Ends the child's process group and all descendants of this process."""
  end = time.monotonic() + _KILL_SECS
  while True:
    with contextlib.suppress(OSError):
      os.killpg(child, signal.SIGKILL)
    # Descendants of a process that ends become children of this one.
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
      with contextlib.suppress(psutil.Error):
        process.kill()
    for _ in _reap():
      pass
    if not descendants or time.monotonic() > end:
      return
    time.sleep(0.01)


def _reap():
  """Yields (process id, status) of each child that has ended."""
  with contextlib.suppress(ChildProcessError):
    while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
      yield ended


def _exit_as(status: int) -> None:
  """Ends this process as another process has ended, by its wait status."""
  code = os.waitstatus_to_exitcode(status) if status >= 0 else 1
  if code < 0:
    # The other process has already dumped its core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
      signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
  os._exit(max(code, 0))


def _prctl(option: int, value: int) -> bool:
  """Sets an attribute of this process; returns whether the kernel has it."""
  try:
    return ctypes.CDLL(None).prctl(option, value) == 0
  except (AttributeError, OSError, TypeError):
    return False
