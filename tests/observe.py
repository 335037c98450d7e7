"""Runs a program without a network and records which resources it uses.

    python tests/observe.py RESULT.json launch/train.py --config=...

The result has `devices`, whether devices were initialized; `arrays`, the number
of arrays on them; `workers`, names of the processes that were started;
`addresses` to which connections were attempted; and `cache`, the requests and
hits of the compilation cache.
"""

import collections
import json
import multiprocessing.process
import pathlib
import runpy
import socket
import sys


def _record(addresses: list[str], workers: list[str]) -> None:
  """Makes connections and new processes append to lists."""

  def connect(self, address) -> None:
    addresses.append(str(address))
    raise OSError('no network in this test')

  start = multiprocessing.process.BaseProcess.start

  def start_recorded(self) -> None:
    workers.append(self.name)
    start(self)

  socket.socket.connect = connect
  multiprocessing.process.BaseProcess.start = start_recorded


if __name__ == '__main__':
  import jax
  from jax._src import xla_bridge

  _, result, script, *flags = sys.argv
  used = {'addresses': [], 'workers': []}
  _record(**used)
  events = collections.Counter()
  jax.monitoring.register_event_listener(
    lambda name, **_: events.update([name])
  )
  sys.argv = [script, *flags]
  try:
    runpy.run_path(script, run_name='__main__')
  finally:
    used['devices'] = xla_bridge.backends_are_initialized()
    used['arrays'] = len(jax.live_arrays()) if used['devices'] else 0
    folder = '/jax/compilation_cache'
    used['cache'] = {
      'requests': events[f'{folder}/compile_requests_use_cache'],
      'hits': events[f'{folder}/cache_hits'],
    }
    pathlib.Path(result).write_text(json.dumps(used))
