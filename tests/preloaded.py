"""Runs commands in forks of a process that has already imported their modules.

Each command behaves as in a process of its own, without the import time. The
program reads JSON from stdin: a list of [script, flags, variables]. It prints
one line of JSON per command: exit status, output and used resources. Times are
CPU seconds, because other processes may be using the machine.
"""

import gc
import json
import multiprocessing.process
import os
import pathlib
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback

_LIMIT_SECS = 60


def _child(script: str, flags: list[str], variables: dict) -> dict:
  import jax

  os.environ.update(variables)
  sys.argv = [script, *flags]
  addresses: list[str] = []

  def connect(self, address) -> None:
    addresses.append(str(address))
    raise OSError('no network in this test')

  socket.socket.connect = connect
  started: list[str] = []
  start = multiprocessing.process.BaseProcess.start

  def start_recorded(self) -> None:
    started.append(self.name)
    start(self)

  multiprocessing.process.BaseProcess.start = start_recorded
  status: object = 0
  try:
    runpy.run_path(script, run_name='__main__')
  except SystemExit as exit_:
    status = exit_.code
  from jax._src import xla_bridge

  initialized = xla_bridge.backends_are_initialized()
  return {
    'status': status,
    'devices': initialized,
    'arrays': len(jax.live_arrays()) if initialized else 0,
    'workers': started,
    'addresses': addresses,
  }


def _run(script: str, flags: list[str], variables: dict) -> dict:
  with tempfile.TemporaryDirectory() as folder:
    paths = [pathlib.Path(folder, name) for name in ('out', 'err', 'result')]
    child = os.fork()
    if not child:
      signal.alarm(_LIMIT_SECS)
      for descriptor, path in enumerate(paths[:2], start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
      try:
        result = _child(script, flags, variables)
        paths[2].write_text(json.dumps(result))
      except BaseException:
        traceback.print_exc()
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(0)
    _, _, used = os.wait4(child, 0)
    result = {'out': paths[0].read_text(), 'err': paths[1].read_text()}
    # A status of None: the command timed out, was killed or raised.
    result |= json.loads(paths[2].read_text()) if paths[2].exists() else {}
    return {'status': None} | result | {'secs': used.ru_utime + used.ru_stime}


if __name__ == '__main__':
  import transformers

  from envs.alfworld import env as alfworld_env  # noqa: F401
  from envs.webshop import env as webshop_env  # noqa: F401
  from gigpo_jax import episodes, evaluation, sft, train  # noqa: F401
  from gigpo_jax.tools import sweep  # noqa: F401

  # transformers imports these when they are first used.
  _ = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast
  gc.freeze()  # Collections in children do not copy these objects.

  print(json.dumps(time.process_time()), flush=True)
  for case in json.load(sys.stdin):
    print(json.dumps(_run(*case)), flush=True)
