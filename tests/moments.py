"""Runs a program and sends it a signal at a chosen moment.

    python tests/moments.py MOMENT launch/train.py --config=...

A moment is a chain of calls. `learner:Learner.update@2,train:stop_if_skipped@3`
is the start of the third call of `stop_if_skipped` after the start of the
second call of `Learner.update`; a final `+` means its return. The process kills
itself at the moment. With `~15` at the end it sends itself signal 15 instead;
with `~15:60` it also waits for up to a minute.
"""

import functools
import importlib
import os
import runpy
import signal
import sys
import time


def parse(moment: str) -> tuple[list[tuple[str, int]], bool, int, float]:
  """Returns calls with their counts, whether at the return, signal, seconds."""
  moment, _, ending = moment.partition('~')
  signum, _, secs = ending.partition(':')
  returned = moment.endswith('+')
  chain = []
  for link in moment.removesuffix('+').split(','):
    name, _, count = link.partition('@')
    chain.append((name, int(count or 1)))
  return chain, returned, int(signum or signal.SIGKILL), float(secs or 0)


def arm(moment: str) -> None:
  """Wraps the functions of a moment so that they send the signal."""
  chain, returned, signum, secs = parse(moment)
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
      os.kill(os.getpid(), signum)
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
