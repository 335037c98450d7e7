"""Which tasks an iteration plays.

A function of (seed, iteration), and, where tasks are drawn by how uncertain
their outcome is, of the outcomes so far.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from envs import base

# epochs: all of them, one after another; uncertain: see `Uncertain`.
DRAWS = ('epochs', 'uncertain')


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

  def observe(self, outcomes: Iterable[tuple[base.Task, bool]]) -> None:
    """Is told the successes of episodes; does not care."""

  def state(self) -> dict:
    """Returns what was learnt of outcomes, as plain values."""
    return {}

  def restore(self, state: dict) -> None:
    """Goes on from what `state` returned."""

  def at(self, iteration: int) -> list[base.Task]:
    """Returns the G tasks of an iteration."""
    chosen = self._draw(iteration, self._groups)
    return [base.Task(self._split, int(index)) for index in chosen]

  def _shuffled(self, iteration: int, groups: int) -> np.ndarray:
    epoch, place = divmod(iteration, self._num_tasks // groups)
    rng = np.random.Generator(np.random.Philox([self._seed, epoch]))
    order = rng.permutation(self._num_tasks)
    return order[place * groups : (place + 1) * groups]


class Uncertain(TaskSampler):
  """Draws tasks rather whose episodes succeed now and then.

  A task's chance is in proportion to p (1 - p), with p = (s + 1) / (n + 2) of n
  episodes, s of which succeeded; a share of the chances is the same for all.
  The tasks of an iteration are distinct.

  Args:
    uniform: that share.
    **kwargs: of `TaskSampler`.
  """

  def __init__(self, *args, uniform: float = 0.5, **kwargs):
    super().__init__(*args, **kwargs)
    self._draw, self._uniform = self._weighted, uniform
    self._counts = np.zeros((2, self._num_tasks), np.int64)

  def observe(self, outcomes: Iterable[tuple[base.Task, bool]]) -> None:
    """Counts the successes of episodes of this split."""
    for task, success in outcomes:
      if task.split == self._split:
        self._counts[:, task.index] += success, 1

  def state(self) -> dict:
    """Returns successes and episodes by task, of those that were played."""
    played = np.flatnonzero(self._counts[1])
    return {str(n): self._counts[:, n].tolist() for n in played}

  def restore(self, state: dict) -> None:
    """Goes on from what `state` returned."""
    self._counts[:] = 0
    for number, counts in state.items():
      self._counts[:, int(number)] = counts

  def chances(self) -> np.ndarray:
    """Returns the chance of each task to be drawn first."""
    successes, episodes = self._counts
    rate = (successes + 1) / (episodes + 2)
    doubt = rate * (1 - rate)
    even = self._uniform / self._num_tasks
    return even + (1 - self._uniform) * doubt / doubt.sum()

  def _weighted(self, iteration: int, groups: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox([self._seed, iteration]))
    # The first arrivals of Poisson processes of these rates.
    arrivals = rng.exponential(size=self._num_tasks) / self.chances()
    return np.argsort(arrivals, kind='stable')[:groups]


def panel(split: str, num_tasks: int) -> list[base.Task]:
  """Returns the first tasks of a split, for evaluation."""
  return [base.Task(split, index) for index in range(num_tasks)]
