"""The corridor with a mistake in it, as a module of somebody else's."""

import json

from envs import base, toy

tasks = toy.tasks


class Env(toy.Env):
  """Fails as it is told: at tasks below `below`, at reset or step."""

  def __init__(self, *, fails: str, below: int = 100, **kwargs):
    del kwargs
    super().__init__()
    self._fails, self._below, self._broken = fails, below, False

  def reset(self, task: base.Task) -> base.Observation:
    """Starts a walk."""
    self._broken = task.index < self._below
    if self._fails == 'reset':
      self._parse()
    return super().reset(task)

  def step(self, response: str) -> base.StepResult:
    """Walks."""
    if self._fails == 'step' or (self._fails == 'action' and response):
      self._parse()
    return super().step(response)

  def _parse(self) -> None:
    if self._broken:
      json.loads('{')
