"""The corridor with faults, for those who have to survive them.

A worker process that gets a `Plan` knows it as `faulty`.
"""

import dataclasses
import os
import sys
import time

import envs
from envs import base, toy

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
  'unpicklable': 'garbage',
  'unreadable': 'garbage',
  'exit': 'died',
  'abort': 'died',
  'hang': 'hung',
  'print': '',
  'leak': '',
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
      'unpicklable': {'action': _Unpicklable()},
      'unreadable': {'action': _Unreadable()},
    }.get(self._kind, {})
    if self._kind == 'no_record':
      return {'reward': 1.0}
    return dataclasses.replace(result, **changes)


class _Unpicklable(str):
  def __reduce__(self):
    raise RuntimeError('not to be sent')


def _refuse() -> None:
  raise RuntimeError('not to be read')


class _Unreadable(str):
  def __reduce__(self):
    return _refuse, ()
