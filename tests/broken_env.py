"""The toy corridor with a bug, as an environment from outside the project."""

import dataclasses
import itertools
import json

from envs import base, toy

tasks = toy.tasks
_NUMBERS = itertools.count()


class Env(toy.Env):
  """Raises where `fails` says, for task indices below `below`.

  With fails='random', each episode of a task starts in another state.
  """

  def __init__(self, *, fails: str, below: int = 100, **kwargs):
    del kwargs
    super().__init__()
    self._fails, self._below, self._broken = fails, below, False

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode."""
    self._broken = task.index < self._below
    if self._fails == 'reset':
      self._parse()
    observation = super().reset(task)
    if self._fails == 'random':
      anchor = f'state {next(_NUMBERS)}'
      observation = dataclasses.replace(observation, anchor=anchor)
    return observation

  def step(self, response: str) -> base.StepResult:
    """Takes a step."""
    if self._fails == 'step' or (self._fails == 'action' and response):
      self._parse()
    if self._fails == 'result':
      return None
    return super().step(response)

  def _parse(self) -> None:
    if self._broken:
      json.loads('{')
