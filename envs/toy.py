"""A corridor of rooms: a minimal, deterministic environment for tests.

The agent starts in one of the rooms and must reach the last one. Walking back
and forth revisits states, so anchor groups of several steps exist.
"""

import math
import os
import random
import re
import sys
import time

from envs import base

_ACTION = re.compile(r'<action>(left|right)</action>')
FAULTS = (
  'raise',
  'hang',
  'exit',
  'sys_exit',
  'unpicklable',
  'huge',
  'print',
  'raise_at_reset',
  'raise_at_prepare',
  'moody',
)
HUGE_CHARS = 2**18 - 1_000


class Tasks:
  """The tasks of a split; a task's index determines its start room."""

  def __init__(self, num_tasks: int):
    self._num_tasks = num_tasks

  def __len__(self) -> int:
    return self._num_tasks

  def task_type(self, index: int) -> str:
    """Returns the task type: 'near' for odd indices, 'far' for even ones."""
    return 'near' if index % 2 else 'far'


def tasks(split: str, **kwargs) -> Tasks:
  """Returns the tasks of a split; accepts the kwargs of `Env`."""
  del split
  return Tasks(kwargs.get('num_tasks', 100))


class Env:
  """The corridor environment.

  Args:
    rooms: number of rooms; the goal is the last one.
    max_steps: step limit of an episode.
    num_tasks: number of tasks in a split.
    step_secs: mean duration of a step, seconds.
    step_tail: standard deviation of the logarithm of the duration.
    faults: task index -> fault, one of FAULTS, that every step of the task
      shows. For tests of error handling.
    fault_step: first step, from 0, at which the fault occurs.

  Raises:
    ValueError: if a fault is unknown.
  """

  def __init__(
    self,
    *,
    rooms: int = 5,
    max_steps: int = 8,
    num_tasks: int = 100,
    step_secs: float = 0.0,
    step_tail: float = 0.0,
    faults: dict[int, str] | None = None,
    fault_step: int = 0,
  ):
    self._rooms, self._max_steps = rooms, max_steps
    self._step_secs, self._step_tail = step_secs, step_tail
    self._faults, self._fault_step = faults or {}, fault_step
    for fault in self._faults.values():
      if fault not in FAULTS:
        raise ValueError(f'faults={fault}: must be one of {", ".join(FAULTS)}')
    self._fault = ''
    self._start = self._room = self._step = 0

  def prepare(self, task: base.Task) -> None:
    """Does nothing; there is nothing to load."""
    if self._faults.get(task.index) == 'raise_at_prepare':
      raise RuntimeError('the corridor is not built')

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode in the task's room."""
    self._fault = self._faults.get(task.index, '')
    if self._fault == 'raise_at_reset':
      raise RuntimeError('the corridor is closed')
    self._start = task.index
    self._room = task.index % (self._rooms - 1)
    self._step = 0
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Moves left or right; an invalid response leaves the agent in place."""
    if self._step_secs:
      # Seeded by the episode's content, so that every benchmark that plays the
      # same episodes waits equally long.
      rng = random.Random(f'{self._start} {self._step} {response}')
      normal = rng.gauss(0.0, 1.0) - self._step_tail / 2
      time.sleep(self._step_secs * math.exp(self._step_tail * normal))
    if self._fault and self._step >= self._fault_step:
      self._trigger_fault()
    match = _ACTION.search(response)
    action = match[1] if match else response[-30:]
    move = {'left': -1, 'right': 1}[action] if match else 0
    self._room = max(0, self._room + move)
    self._step += 1
    success = self._room == self._rooms - 1
    done = success or self._step == self._max_steps
    metrics = {'room': float(self._room)}
    if self._fault == 'unpicklable':
      metrics['room'] = lambda: None
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=self._text() if done else None,
      reward=10.0 if success else 0.0,
      valid=match is not None,
      action=action,
      success=success,
      done=done,
      metrics=metrics,
    )

  def close(self) -> None:
    """Does nothing; there is nothing to free."""

  def _trigger_fault(self) -> None:
    if self._fault == 'raise':
      raise RuntimeError('the floor gave way')
    if self._fault == 'hang':
      time.sleep(3600)
    if self._fault == 'exit':
      os._exit(3)
    if self._fault == 'sys_exit':
      sys.exit('the walker left')
    if self._fault == 'print':
      print('noise on stdout', flush=True)
      os.write(1, b'noise on the descriptor\n')
      sys.stderr.write('noise on stderr\n')

  def _text(self) -> str:
    return f'You are in room {self._room} of {self._rooms}.'

  def _observe(self) -> base.Observation:
    text = self._text()
    prompt = f'{text} Go left or right.'
    if self._fault == 'moody':
      text += f' It is {os.getpid()} degrees.'
    if self._fault == 'huge' and self._step:
      text += ' ' * HUGE_CHARS
    return base.Observation(
      prompt=f'Step {self._step}. {prompt}',
      short_prompt=prompt,
      anchor=text,
      text=text,
    )
