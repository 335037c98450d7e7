"""The corridor with faults, for those who have to survive them.

A worker process that gets a `Plan` knows it as `faulty`.
"""

import dataclasses
import os
import subprocess
import sys
import time

import envs
from envs import base, messages, toy

Tasks = toy.Tasks
tasks = toy.tasks

# fault: the cause under which the pool has to count it; '' if it is none.
FAULTS = {
  'raise': 'raised',
  'raise_at_reset': 'raised',
  'sys_exit': 'raised',
  'not_finite': 'garbage',
  'too_large': 'garbage',
  'no_answer': 'garbage',
  'nameless': 'garbage',
  'no_text': 'garbage',
  'no_place': 'garbage',
  'no_score': 'garbage',
  'no_record': 'garbage',
  'done_and_on': 'garbage',
  'nothing_next': 'garbage',
  'bulky': 'garbage',
  'odd_name': 'garbage',
  'long_name': 'garbage',
  'many_names': 'garbage',
  'unpicklable': '',
  'unreadable': '',
  'fork': '',
  'impostor': '',
  'exit': 'died',
  'abort': 'died',
  'hang': 'hung',
  'print': '',
  'leak': '',
}
# Faults that make the worker useless: cause, and what is said.
WORKER_FAULTS = {
  'twice': ('garbage', 'answered a call that it did not get'),
  'no_bound': ('garbage', 'announced 4,000,000,000 bytes'),
  'half': ('hung', 'took longer than'),
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which tasks go wrong, how, and from which step on."""

  faults: dict[int, str]
  step: int = 1

  def __reduce__(self):
    return _arrived, (self.faults, self.step)


def _arrived(*fields) -> Plan:
  envs.REGISTRY['faulty'] = __name__
  return Plan(*fields)


class Env(toy.Env):
  """The corridor; a task's fault is its index in the plan."""

  _leaked: list[bytes] = []

  def __init__(self, *, plan: Plan, **kwargs):
    super().__init__(**kwargs)
    self._plan, self._kind = plan, ''

  def reset(self, task: base.Task) -> base.Observation:
    """Starts a walk."""
    self._kind = self._plan.faults.get(task.index, '')
    if self._kind == 'raise_at_reset':
      raise OSError('the door is stuck')
    if self._kind == 'children':
      # One that leaves its group, and one that does not.
      for detached in (False, True):
        child = subprocess.Popen(['sleep', '600'], start_new_session=detached)
        with open(os.environ['FAULTY_PIDS'], 'a') as file:
          file.write(f'{child.pid}\n')
    if self._kind == 'leak':
      self._leaked.append(b'x' * (16 * 2**20))
    self._steps = 0
    return super().reset(task)

  def step(self, response: str) -> base.StepResult:
    """Walks, or does what the plan says."""
    result = super().step(response)
    self._steps += 1
    if self._steps <= self._plan.step or not self._kind:
      return result
    return self._spoil(result)

  def _spoil(self, result: base.StepResult) -> base.StepResult:
    action = {
      'raise': lambda: 1 / 0,
      'sys_exit': lambda: sys.exit('left'),
      'exit': lambda: os._exit(3),
      'abort': os.abort,
      'hang': lambda: time.sleep(3600),
      'print': lambda: os.write(1, b'noise\n'),
      'fork': os.fork,
      'impostor': lambda: _forge(copies=3),
      'twice': lambda: _forge(copies=0),
      'no_bound': lambda: _write(messages.HEADER.pack(4 * 10**9, 0, 0)),
      'half': lambda: (_write(_answer(_number())[:-1]), time.sleep(3600)),
      'garble': _garble,
    }.get(self._kind)
    if action:
      action()
    changes = {
      'not_finite': {'reward': float('nan')},
      'too_large': {'reward': 1e39},
      'no_answer': {'success': None},
      'nameless': {'metrics': {None: 1.0}},
      'no_text': {'action': '\udcff'},
      'no_place': {'final_anchor': 0},
      'no_score': {'score': ''},
      'done_and_on': {'done': not result.done},
      'nothing_next': {'observation': None, 'done': False},
      'bulky': {'action': 'x' * (messages.MAX_BYTES + 1)},
      'odd_name': {'metrics': {'a\x1b[2Jb': 1.0}},
      'long_name': {'metrics': {'a' * 1000: 1.0}},
      'many_names': {'metrics': {str(n): 1.0 for n in range(1000)}},
      'unpicklable': {'action': _Unpicklable(result.action)},
      'unreadable': {'action': _Unreadable(result.action)},
    }.get(self._kind, {})
    if self._kind == 'no_record':
      return {'reward': 1.0}
    return dataclasses.replace(result, **changes)


def _garble() -> None:
  raise RuntimeError('\x1b[2Jlong\n\u202e\ud800' + 'x' * 10**7)


def _of_main(name: str):
  frame = sys._getframe()
  while name not in frame.f_locals or frame.f_code.co_name != 'main':
    frame = frame.f_back
  return frame.f_locals[name]


def _number() -> int:
  return _of_main('call')[0]


def _write(message: bytes) -> None:
  os.write(_of_main('pipe').fileno(), message)


def _answer(number: int) -> bytes:
  result = base.StepResult(None, 1e6, True, 'forged', True, True)
  return messages.encode(number, 'step', result)


def _forge(*, copies: int) -> None:
  """Answers calls to come from a copy of the process, or the last one."""
  if not copies:
    _write(_answer(_number() - 1))
  elif os.fork():
    os.wait()
  else:
    for ahead in range(copies):
      _write(_answer(_number() + ahead))
    os._exit(0)


class _Unpicklable(str):
  def __reduce__(self):
    raise RuntimeError('not to be sent')


def _refuse() -> None:
  raise RuntimeError('not to be read')


class _Unreadable(str):
  def __reduce__(self):
    return _refuse, ()
