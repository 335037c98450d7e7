"""Selection of the tasks of each iteration.

The tasks are a function of (seed, iteration). `UncertaintySampler` also
uses the outcomes so far.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from envs import base
from gigpo_jax import options

# epochs: shuffled, without replacement; uncertain: see `UncertaintySampler`;
# stages: see `StageSampler`.
DRAWS = ('epochs', 'uncertain', 'stages')


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the order of training tasks, `config.tasks`."""

  draw: str = options.choice('epochs', DRAWS)
  uniform: float = options.number(0.5, low=0, high=1)
  stages: tuple[tuple[int, tuple[str, ...]], ...] = ()

  def __post_init__(self):
    options.check(self)


class TaskSampler:
  """An endless stream of tasks: shuffled epochs without replacement.

  Args:
    split: name of the split.
    num_tasks: number of tasks in the split.
    groups: G, the number of distinct tasks per iteration. The remaining tasks
      of an epoch that cannot fill an iteration are skipped.
    seed: seed of the shuffling.
    draw: replaces the shuffling: maps (iteration, number of groups) to task
      indices, for environments that must draw tasks as another program does.

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

  def record_outcomes(self, outcomes: Iterable[tuple[base.Task, bool]]) -> None:
    """Ignores outcomes; subclasses may use them."""

  def state(self) -> dict:
    """Returns the statistics of outcomes as plain values."""
    return {}

  def restore(self, state: dict) -> None:
    """Restores statistics that `state` returned."""

  def at(self, iteration: int) -> list[base.Task]:
    """Returns the G tasks of an iteration."""
    indices = self._draw(iteration, self._groups)
    return [base.Task(self._split, int(index)) for index in indices]

  def _shuffled(self, iteration: int, groups: int) -> np.ndarray:
    epoch, position = divmod(iteration, self._num_tasks // groups)
    rng = np.random.Generator(np.random.Philox([self._seed, epoch]))
    order = rng.permutation(self._num_tasks)
    return order[position * groups : (position + 1) * groups]


class UncertaintySampler(TaskSampler):
  """Prefers tasks whose outcome is uncertain.

  A task's weight is proportional to p (1 - p). Its success rate is estimated
  as p = (s + 1) / (n + 2) from n episodes with s successes. Weights are mixed
  with the uniform distribution. The tasks of an iteration are distinct.

  Args:
    *args: passed to `TaskSampler`.
    uniform: weight of the uniform distribution in the mixture, in [0, 1].
    **kwargs: passed to `TaskSampler`.
  """

  def __init__(self, *args: Any, uniform: float = 0.5, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._draw, self._uniform = self._weighted, uniform
    self._counts = np.zeros((2, self._num_tasks), np.int64)

  def record_outcomes(self, outcomes: Iterable[tuple[base.Task, bool]]) -> None:
    """Counts the episodes and successes of tasks of this split."""
    for task, success in outcomes:
      if task.split == self._split:
        self._counts[:, task.index] += success, 1

  def state(self) -> dict:
    """Returns [successes, episodes] of each task that was played, by index."""
    played = np.flatnonzero(self._counts[1])
    return {str(n): self._counts[:, n].tolist() for n in played}

  def restore(self, state: dict) -> None:
    """Restores counts that `state` returned."""
    self._counts[:] = 0
    for index, counts in state.items():
      self._counts[:, int(index)] = counts

  def chances(self) -> np.ndarray:
    """Returns the probability of each task to be drawn first."""
    successes, episodes = self._counts
    rate = (successes + 1) / (episodes + 2)
    variance = rate * (1 - rate)
    floor = self._uniform / self._num_tasks
    return floor + (1 - self._uniform) * variance / variance.sum()

  def _weighted(self, iteration: int, groups: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox([self._seed, iteration]))
    # The order of first arrivals of Poisson processes with these rates is a
    # weighted sample without replacement.
    arrivals = rng.exponential(size=self._num_tasks) / self.chances()
    return np.argsort(arrivals, kind='stable')[:groups]


class StageSampler(TaskSampler):
  """Draws tasks of some types in each stage (CRAFT-GUI, arXiv:2508.11360).

  Within a stage, tasks come in shuffled epochs without replacement. The paper
  orders its stages by difficulty.

  Args:
    split: name of the split.
    task_types: type of each task of the split.
    groups: G, as for `TaskSampler`.
    seed: seed of the shuffling.
    stages: (first iteration, types), by increasing iteration from 0; the types
      () are all types.

  Raises:
    ValueError: if the stages are not such, a type is unknown, or a stage has
      fewer tasks than groups.
  """

  def __init__(
    self,
    split: str,
    task_types: Sequence[str],
    groups: int,
    seed: int,
    stages: Sequence[tuple[int, Sequence[str]]],
  ):
    super().__init__(split, len(task_types), groups, seed, self._staged)
    starts = [start for start, _ in stages]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
      raise ValueError(
        f'tasks.stages={tuple(stages)}: must be (first iteration, types), by '
        'increasing iteration from 0'
      )
    known = set(task_types)
    self._stages = []
    for start, types in stages:
      chosen = set(types) or known
      if unknown := sorted(chosen - known):
        raise ValueError(
          f'tasks.stages={tuple(stages)}: no task has the type '
          f'{", ".join(unknown)}; must be of {", ".join(sorted(known))}'
        )
      indices = [n for n, name in enumerate(task_types) if name in chosen]
      if len(indices) < groups:
        raise ValueError(
          f'tasks.stages={tuple(stages)}: the stage from {start} on has '
          f'{len(indices)} tasks; must have rollout.groups={groups} or more'
        )
      self._stages.append((start, np.array(indices)))

  def _staged(self, iteration: int, groups: int) -> np.ndarray:
    start, indices = next(
      stage for stage in reversed(self._stages) if stage[0] <= iteration
    )
    epoch, position = divmod(iteration - start, len(indices) // groups)
    rng = np.random.Generator(np.random.Philox([self._seed, start, epoch]))
    order = rng.permutation(indices)
    return order[position * groups : (position + 1) * groups]


def first_tasks(split: str, num_tasks: int) -> list[base.Task]:
  """Returns the first tasks of a split as the evaluation tasks."""
  return [base.Task(split, index) for index in range(num_tasks)]
