"""Keys and doors with tasks or an expert that differ between processes.

The variable HOSTS_DIFFER names what differs in the second process.
"""

import os
from collections.abc import Iterator

from envs import base, keydoor
from envs.keydoor import ANCHORS

__all__ = ['ANCHORS', 'Env', 'tasks']

_DIFFERS = (
  os.environ.get('JAX_PROCESS_ID') == '1' and os.environ['HOSTS_DIFFER']
)


class _Fewer:
  """Tasks without the last one."""

  def __init__(self, whole):
    self._whole = whole
    self.task_type = whole.task_type

  def __len__(self) -> int:
    return len(self._whole) - 1


def tasks(split: str, **kwargs):
  """Returns the tasks; the second process may have fewer for evaluations."""
  whole = keydoor.tasks(split, **kwargs)
  return _Fewer(whole) if _DIFFERS == 'tasks' and split != 'train' else whole


class Env(keydoor.Env):
  """Its expert may say something else in the second process."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of each step of the expert."""
    steps = super().demonstrate(task, noise=noise, seed=seed)
    for observation, response in steps:
      differs = _DIFFERS == 'expert' and task.index % 10 == 1
      yield observation, response + ' now' if differs else response
