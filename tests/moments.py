"""Runs a program that gets a signal at a chosen moment.

    python tests/moments.py MOMENT launch/train.py --config=...

A moment is a chain of calls. `learner:Learner.update@2,train:stop_if_skipped@3`
is the start of the third call of `stop_if_skipped` after the start of the
second call of `Learner.update`; with `+` at the end, its return. The process
kills itself there. With `~15` at the end it gets signal 15 instead, and with
`~15:60` it also waits there for up to a minute.
"""

import functools
import importlib
import os
import runpy
import signal
import sys
import time


def parse(moment: str) -> tuple[list[tuple[str, int]], bool, int, float]:
  """Returns (functions and counts, whether at the return, signal, seconds)."""
  moment, _, sent = moment.partition('~')
  number, _, secs = sent.partition(':')
  returned = moment.endswith('+')
  chain = []
  for link in moment.removesuffix('+').split(','):
    name, _, count = link.partition('@')
    chain.append((name, int(count or 1)))
  return chain, returned, int(number or signal.SIGKILL), float(secs or 0)


def arm(moment: str) -> None:
  """Sends the signal at a moment from now on."""
  chain, returned, number, secs = parse(moment)
  calls = [0] * len(chain)

  def called(position: int, at_return: bool) -> None:
    last = position == len(chain) - 1
    before = all(
      calls[n] >= count for n, (_, count) in enumerate(chain[:position])
    )
    if not before or at_return != (returned and last):
      return
    calls[position] += 1
    if last and calls[position] == chain[position][1]:
      os.kill(os.getpid(), number)
      time.sleep(secs)

  for position, (name, _) in enumerate(chain):
    _wrap(name, functools.partial(called, position))


def _wrap(name: str, called) -> None:
  module, _, path = name.partition(':')
  *outer, last = path.split('.')
  holder = importlib.import_module(f'gigpo_jax.{module}')
  for part in outer:
    holder = getattr(holder, part)
  function = getattr(holder, last)

  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    called(False)
    result = function(*args, **kwargs)
    called(True)
    return result

  setattr(holder, last, wrapped)


if __name__ == '__main__':
  _, chosen, program, *flags = sys.argv
  arm(chosen)
  sys.argv = [program, *flags]
  runpy.run_path(program, run_name='__main__')
