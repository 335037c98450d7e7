"""The toy corridor with faults, for tests of the environment pool.

Unpickling a `Plan` registers this module as the environment `faulty`.
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

# Fault: expected cause of the failure; '' if there must be no failure.
FAULTS = {
  'raise': 'raised',
  'raise_at_reset': 'raised',
  'sys_exit': 'raised',
  'not_finite': 'garbage',
  'too_large': 'garbage',
  'no_answer': 'garbage',
  'nameless': 'garbage',
  'no_text': 'garbage',
  'no_anchor': 'garbage',
  'no_score': 'garbage',
  'no_record': 'garbage',
  'done_flipped': 'garbage',
  'early_success': 'garbage',
  'no_observation': 'garbage',
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
# Faults after which the worker must be replaced: cause, and part of the reason.
WORKER_FAULTS = {
  'twice': ('garbage', 'replied to a call other than the oldest'),
  'no_bound': ('garbage', 'announced 4,000,000,000 bytes'),
  'half': ('hung', 'took longer than'),
  'drip': ('hung', 'took longer than'),
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """Faults by task index, and the number of steps before them."""

  faults: dict[int, str]
  step: int = 1

  def __reduce__(self):
    return _unpickle, (self.faults, self.step)


def _unpickle(*fields) -> Plan:
  envs.REGISTRY['faulty'] = __name__
  return Plan(*fields)


class Env(toy.Env):
  """The corridor; the plan gives the fault of each task index."""

  _leaked: list[bytes] = []

  def __init__(self, *, plan: Plan, **kwargs):
    super().__init__(**kwargs)
    self._plan, self._planned_fault = plan, ''

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode."""
    self._planned_fault = self._plan.faults.get(task.index, '')
    if self._planned_fault == 'raise_at_reset':
      raise OSError('the door is stuck')
    if self._planned_fault == 'children':
      # A child, a child that leaves the process group, and a daemon.
      children = [
        subprocess.Popen(['sleep', '600'], start_new_session=detached).pid
        for detached in (False, True)
      ]
      daemon = 'setsid sleep 600 > /dev/null & echo $!'
      children.append(int(subprocess.check_output(['sh', '-c', daemon])))
      with open(os.environ['FAULTY_PIDS'], 'a') as file:
        file.writelines(f'{pid}\n' for pid in children)
    if self._planned_fault == 'leak':
      self._leaked.append(b'x' * (16 * 2**20))
    self._steps = 0
    return super().reset(task)

  def step(self, response: str) -> base.StepResult:
    """Steps through the corridor, with the fault of the plan."""
    result = super().step(response)
    self._steps += 1
    if self._steps <= self._plan.step or not self._planned_fault:
      return result
    return self._inject_fault(result)

  def _inject_fault(self, result: base.StepResult) -> base.StepResult:
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
      'half': lambda: (
        _write(_forged_reply(_call_id())[:-1]),
        time.sleep(3600),
      ),
      'drip': _drip,
      'garble': _garble,
    }.get(self._planned_fault)
    if action:
      action()
    changes = {
      'not_finite': {'reward': float('nan')},
      'too_large': {'reward': 1e39},
      'no_answer': {'success': None},
      'nameless': {'metrics': {None: 1.0}},
      'no_text': {'action': '\udcff'},
      'no_anchor': {'final_anchor': 0},
      'no_score': {'score': ''},
      'done_flipped': {'done': not result.done},
      'early_success': {'success': not result.done},
      'no_observation': {'observation': None, 'done': False},
      'bulky': {'action': 'x' * (messages.MAX_BYTES + 1)},
      'odd_name': {'metrics': {'a\x1b[2Jb': 1.0}},
      'long_name': {'metrics': {'a' * 1000: 1.0}},
      'many_names': {'metrics': {str(n): 1.0 for n in range(1000)}},
      'hash': {'metrics': {'hash': float(hash('text') % 1000)}},
      'unpicklable': {'action': _Unpicklable(result.action)},
      'unreadable': {'action': _Unreadable(result.action)},
    }.get(self._planned_fault, {})
    if self._planned_fault == 'large' and result.observation:
      observation = dataclasses.replace(result.observation, prompt='x' * 10**6)
      changes = {'observation': observation}
    if self._planned_fault == 'no_record':
      return {'reward': 1.0}
    return dataclasses.replace(result, **changes)


def _garble() -> None:
  raise RuntimeError('\x1b[2Jlong\n\u202e\ud800' + 'x' * 10**7)


def _local_of_main(name: str):
  """Returns a local variable of `worker.main`."""
  frame = sys._getframe()
  while name not in frame.f_locals or frame.f_code.co_name != 'main':
    frame = frame.f_back
  return frame.f_locals[name]


def _call_id() -> int:
  return _local_of_main('call')[0]


def _write(message: bytes) -> None:
  os.write(_local_of_main('pipe').fileno(), message)


def _forged_reply(call_id: int) -> bytes:
  result = base.StepResult(None, 1e6, True, 'forged', True, True)
  return messages.encode(call_id, 'step', result)


def _drip() -> None:
  """Forges a reply of which a byte arrives from time to time."""
  for byte in _forged_reply(_call_id()):
    _write(bytes([byte]))
    time.sleep(0.05)


def _forge(*, copies: int) -> None:
  """Forges replies: to the next calls from a forked process, or to the last."""
  if not copies:
    _write(_forged_reply(_call_id() - 1))
  elif os.fork():
    os.wait()
  else:
    for offset in range(copies):
      _write(_forged_reply(_call_id() + offset))
    os._exit(0)


class _Unpicklable(str):
  def __reduce__(self):
    raise RuntimeError('must not be pickled')


def _raise() -> None:
  raise RuntimeError('must not be unpickled')


class _Unreadable(str):
  def __reduce__(self):
    return _raise, ()
