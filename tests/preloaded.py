"""Runs commands in forks of a process that has imported what they need.

Each is as if it ran by itself, without the seconds that imports take. Reads
JSON from stdin, a list of [script, flags, variables], and prints a line of JSON
for each: how it ended, what it said, and what it had taken by then. Seconds are
those of a processor, for others may be busy on the machine.
"""

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
    raise OSError('no network here')

  socket.socket.connect = connect
  begun: list[str] = []
  start = multiprocessing.process.BaseProcess.start

  def start_noted(self) -> None:
    begun.append(self.name)
    start(self)

  multiprocessing.process.BaseProcess.start = start_noted
  status: object = 0
  try:
    runpy.run_path(script, run_name='__main__')
  except SystemExit as leaving:
    status = leaving.code
  from jax._src import xla_bridge

  taken = xla_bridge.backends_are_initialized()
  return {
    'status': status,
    'devices': taken,
    'arrays': len(jax.live_arrays()) if taken else 0,
    'workers': begun,
    'addresses': addresses,
  }


def _run(script: str, flags: list[str], variables: dict) -> dict:
  with tempfile.TemporaryDirectory() as folder:
    names = [pathlib.Path(folder, name) for name in ('out', 'err', 'told')]
    child = os.fork()
    if not child:
      signal.alarm(_LIMIT_SECS)
      for descriptor, name in enumerate(names[:2], start=1):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), descriptor)
      try:
        told = _child(script, flags, variables)
        names[2].write_text(json.dumps(told))
      except BaseException:
        traceback.print_exc()
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(0)
    _, _, used = os.wait4(child, 0)
    found = {'out': names[0].read_text(), 'err': names[1].read_text()}
    # None: it took too long, was killed, or raised.
    found |= json.loads(names[2].read_text()) if names[2].exists() else {}
    return {'status': None} | found | {'secs': used.ru_utime + used.ru_stime}


if __name__ == '__main__':
  from gigpo_jax import evaluation, sft, train  # noqa: F401
  from gigpo_jax.tools import sweep  # noqa: F401

  print(json.dumps(time.process_time()), flush=True)
  for case in json.load(sys.stdin):
    print(json.dumps(_run(*case)), flush=True)
