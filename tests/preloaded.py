"""Runs commands in forks of a process that has already imported their modules.

A command behaves as in a process of its own, without the import time of about
three seconds. `run` and `Process` start one such server per test process. The
server gets a command with one end of a socket and the files for the command's
output, forks, and answers with the process id and, at the end, the status.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys

from programs import PROJECT

_MESSAGE_BYTES = 2**20
# JAX reads these when a run starts, and all others when it is imported.
_READ_LATE = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')


class Process:
  """A command in a fork, with the methods of `subprocess.Popen`.

  Attributes:
    pid: process id.
    stdout: reader of the output.
    stderr: reader of the errors.
    returncode: exit status, negative for a signal; None while it runs.
  """

  def __init__(self, command: list[str], **variables: str):
    """Starts a command in the folder of the project.

    Args:
      command: Python, a script and flags.
      **variables: added to the environment.
    """
    changed = [n for n in variables if n.startswith('JAX_')]
    if early := set(changed) - set(_READ_LATE):
      raise ValueError(f'{early}: needs a process of its own')
    python, *arguments = command
    assert python == sys.executable
    connection, self._status = socket.socketpair()
    (stdout, out), (stderr, err) = os.pipe(), os.pipe()
    self.stdout, self.stderr = open(stdout), open(stderr)  # noqa: SIM115
    request = json.dumps([arguments, dict(os.environ) | variables])
    ends = [connection.fileno(), out, err]
    socket.send_fds(_server(), [request.encode()], ends)
    connection.close()
    os.close(out)
    os.close(err)
    self.pid = self._receive()['pid']
    self.returncode = None

  def _receive(self) -> dict:
    return json.loads(self._status.recv(_MESSAGE_BYTES))

  def communicate(self, timeout: float | None = None) -> tuple[str, str]:
    """Waits for the end; returns the output and the errors."""
    pool = concurrent.futures.ThreadPoolExecutor(2)
    reading = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
    try:
      texts = [reader.result(timeout) for reader in reading]
    except TimeoutError:
      self.kill()
      raise
    finally:
      pool.shutdown()
    self.wait()
    self.stdout.close()
    self.stderr.close()
    return texts[0], texts[1]

  def send_signal(self, signum: int) -> None:
    """Sends a signal to the process if it is running."""
    if self.returncode is None:
      with contextlib.suppress(ProcessLookupError):  # It has ended.
        os.kill(self.pid, signum)

  def kill(self) -> None:
    """Kills the process if it is running."""
    self.send_signal(signal.SIGKILL)

  def wait(self) -> int:
    """Waits for the end and returns the exit status."""
    if self.returncode is None:
      self.returncode = self._receive()['status']
      self._status.close()
    return self.returncode


def run(command: list[str], *, timeout: float = 400, **variables: str) -> str:
  """Runs a command of the project, which must succeed; returns its output."""
  process = Process(command, **variables)
  out, errors = process.communicate(timeout)
  assert process.returncode == 0, out + errors
  return out


@functools.cache
def _server() -> socket.socket:
  """Starts the process that forks; returns a connection to it."""
  ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  process = subprocess.Popen(
    [sys.executable, __file__, str(theirs.fileno())],
    pass_fds=[theirs.fileno()],
    cwd=PROJECT,
    stdin=subprocess.DEVNULL,
  )
  theirs.close()
  atexit.register(process.wait)
  atexit.register(ours.close)  # First: the server then exits.
  ours.recv(_MESSAGE_BYTES)  # It has imported the modules.
  return ours


def _serve(requests: socket.socket) -> list[str]:
  """Forks for every request; returns in the process that runs a command."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nothing waits for forks.
  while True:
    message, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
    if not message:
      os._exit(0)  # The test process has ended.
    if not os.fork():
      requests.close()
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      return _fork_command(*json.loads(message), *files)
    for file in files:
      os.close(file)


def _fork_command(
  arguments: list[str],
  variables: dict[str, str],
  status: int,
  out: int,
  err: int,
) -> list[str]:
  """Waits for a fork; returns the command's arguments in the fork."""
  child = os.fork()
  if not child:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, target in ((out, 1), (err, 2)):
      os.dup2(file, target)
    for file in (status, out, err):
      os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    return arguments
  os.close(out)
  os.close(err)
  with socket.socket(fileno=status) as connection:
    connection.send(json.dumps({'pid': child}).encode())
    _, ended = os.waitpid(child, 0)
    message = {'status': os.waitstatus_to_exitcode(ended)}
    connection.send(json.dumps(message).encode())
  os._exit(0)


def _import() -> None:
  """Imports the modules that the commands use."""
  import scipy.stats  # noqa: F401
  import transformers
  from tensorboardX import event_file_writer  # noqa: F401

  from envs.alfworld import env as alfworld_env  # noqa: F401
  from envs.webshop import env as webshop_env  # noqa: F401
  from gigpo_jax import episodes, evaluation, sft, train  # noqa: F401
  from gigpo_jax.tools import sweep  # noqa: F401

  # transformers imports these when they are first used.
  _ = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast


def _run_program(arguments: list[str], status: list[int]) -> None:
  """Runs a program; sets the exit status that the interpreter will have."""
  sys.argv[:] = arguments
  sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
  status[:] = [1]  # Of an exception.
  try:
    runpy.run_path(arguments[0], run_name='__main__')
    status[:] = [0]
  except SystemExit as end:
    status[:] = [end.code if isinstance(end.code, int) else bool(end.code)]
    raise


def _exit(status: list[int]) -> None:
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(*status)


if __name__ == '__main__':
  status_: list[int] = []
  # Called last, so that forks skip the deletion of all modules.
  atexit.register(_exit, status_)
  with socket.socket(fileno=int(sys.argv[1])) as connection_:
    _import()
    gc.freeze()  # Collections in forks do not copy these objects.
    connection_.send(b'ready')
    arguments_ = _serve(connection_)
  _run_program(arguments_, status_)
