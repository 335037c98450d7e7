"""Which tasks an iteration plays: a pure function of (seed, iteration)."""

import numpy as np

from envs import base


class TaskSampler:
  """An endless stream of tasks: shuffled epochs without replacement.

  Args:
    split: the tasks' part.
    num_tasks: how many it has.
    groups: G, distinct tasks of an iteration. What is left of an epoch when
      it cannot fill an iteration is skipped.
    seed: of the shuffling.

  Raises:
    ValueError: if there are more groups than tasks.
  """

  def __init__(self, split: str, num_tasks: int, groups: int, seed: int):
    if groups > num_tasks:
      raise ValueError(
        f'rollout.groups={groups}: more groups than tasks; split {split} has '
        f'{num_tasks}'
      )
    self._split, self._num_tasks = split, num_tasks
    self._groups, self._seed = groups, seed

  def at(self, iteration: int) -> list[base.Task]:
    """Returns the G tasks of an iteration."""
    epoch, place = divmod(iteration, self._num_tasks // self._groups)
    rng = np.random.Generator(np.random.Philox([self._seed, epoch]))
    order = rng.permutation(self._num_tasks)
    chosen = order[place * self._groups : (place + 1) * self._groups]
    return [base.Task(self._split, int(index)) for index in chosen]


def panel(split: str, num_tasks: int) -> list[base.Task]:
  """Returns the first tasks of a split, for evaluation."""
  return [base.Task(split, index) for index in range(num_tasks)]
