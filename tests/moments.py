"""Runs a program that gets a signal at a moment of its own.

    python tests/moments.py MOMENT launch/train.py --config=...

A moment is a chain, `learner:Learner.update@2,learner:Learner._run@3`: the
third call of `Learner._run` after the second of `Learner.update`, as it begins,
or with `+` at the end as it returns. The process kills itself there; with
`~15` at the end it gets signal 15 instead, and with `~15:60` stays there for
up to a minute.
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
  """Waits for a moment from here on."""
  chain, returned, number, secs = parse(moment)
  calls = [0] * len(chain)

  def called(place: int, at_return: bool) -> None:
    last = place == len(chain) - 1
    before = all(
      calls[n] >= count for n, (_, count) in enumerate(chain[:place])
    )
    if not before or at_return != (returned and last):
      return
    calls[place] += 1
    if last and calls[place] == chain[place][1]:
      os.kill(os.getpid(), number)
      time.sleep(secs)

  for place, (name, _) in enumerate(chain):
    _wrap(name, functools.partial(called, place))


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
