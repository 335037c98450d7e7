"""Which tasks an iteration plays: a pure function of (seed, iteration)."""

from collections.abc import Callable, Sequence

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
    draw: takes an iteration and a number of groups and returns the tasks'
      numbers; instead of the shuffling, for environments that must draw as
      another program does.

  Raises:
    ValueError: if there are more groups than tasks.
  """

  def __init__(
    self,
    split: str,
    num_tasks: int,
    groups: int,
    seed: int,
    draw: Callable[[int, int], Sequence[int]] | None = None,
  ):
    if groups > num_tasks:
      raise ValueError(
        f'rollout.groups={groups}: more groups than tasks; split {split} has '
        f'{num_tasks}'
      )
    self._split, self._num_tasks = split, num_tasks
    self._groups, self._seed = groups, seed
    self._draw = draw or self._shuffled

  def at(self, iteration: int) -> list[base.Task]:
    """Returns the G tasks of an iteration."""
    chosen = self._draw(iteration, self._groups)
    return [base.Task(self._split, int(index)) for index in chosen]

  def _shuffled(self, iteration: int, groups: int) -> np.ndarray:
    epoch, place = divmod(iteration, self._num_tasks // groups)
    rng = np.random.Generator(np.random.Philox([self._seed, epoch]))
    order = rng.permutation(self._num_tasks)
    return order[place * groups : (place + 1) * groups]


def panel(split: str, num_tasks: int) -> list[base.Task]:
  """Returns the first tasks of a split, for evaluation."""
  return [base.Task(split, index) for index in range(num_tasks)]
