"""The toy corridor with a bug, as an environment from outside the project."""

import json

from envs import base, toy

tasks = toy.tasks


class Env(toy.Env):
  """Raises where `fails` says, for task indices below `below`."""

  def __init__(self, *, fails: str, below: int = 100, **kwargs):
    del kwargs
    super().__init__()
    self._fails, self._below, self._broken = fails, below, False

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode."""
    self._broken = task.index < self._below
    if self._fails == 'reset':
      self._parse()
    return super().reset(task)

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
