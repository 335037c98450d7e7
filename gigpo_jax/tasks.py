"""Selection of the tasks of each iteration.

The tasks are a function of (seed, iteration). `UncertaintySampler` also
uses the outcomes so far.
"""

import dataclasses
import difflib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

import envs
from envs import base, messages
from gigpo_jax import options

# epochs: shuffled, without replacement; uncertain: see `UncertaintySampler`;
# stages: see `StageSampler`.
DRAWS = ('epochs', 'uncertain', 'stages')

# Tasks whose types are compared between processes.
_COMPARED_TASKS = 32


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the order of training tasks, `config.tasks`."""

  draw: str = options.choice('epochs', DRAWS)
  uniform: float = options.number(0.5, low=0, high=1)
  diversity_weight: float = options.number(0.0, low=0, high=1)
  stages: tuple[tuple[int, tuple[str, ...]], ...] = ()

  def __post_init__(self):
    options.check(self)


class CheckedTasks:
  """The tasks of a split, whose methods raise errors of one line.

  They are code of an environment, which may raise anything.

  Args:
    tasks: the tasks; see `base.TaskInfo`.
    env_name: name of the environment.
    split: name of the split.
  """

  def __init__(self, tasks: base.TaskInfo, env_name: str, split: str):
    self._tasks, self._env_name, self._split = tasks, env_name, split

  def __len__(self) -> int:
    return envs.count(self._env_name, self._split, self._tasks)

  def __getattr__(self, name: str) -> Any:
    value = getattr(self._tasks, name)  # Optional methods may be None.
    call = functools.partial(self._call, name, value)
    return call if callable(value) else value

  def task_type(self, index: int) -> str:
    """Returns a task's type.

    Raises:
      ValueError: in one line, if the environment fails, or returns no printable
        text.
    """
    result = self._call('task_type', self._tasks.task_type, index)
    # It is part of names of metrics.
    if not isinstance(result, str) or not messages.is_name(result):
      raise ValueError(
        f'env.name={self._env_name}: task_type({index}) of split '
        f'{self._split} is {result!r:.80}; must be a text of 1 to '
        f'{messages.MAX_NAME_CHARS} printable characters'
      )
    return result

  def first(self, count: int) -> list[base.Task]:
    """Returns the first tasks, at most `count`."""
    return [base.Task(self._split, n) for n in range(min(count, len(self)))]

  def describe(self) -> dict[str, str]:
    """Returns a text that distinguishes the tasks, by the name of the split."""
    count = len(self)
    types = [self.task_type(n) for n in range(min(count, _COMPARED_TASKS))]
    digest = hashlib.sha256(repr(types).encode()).hexdigest()[:8]
    name = f'env.name={self._env_name}: split {self._split}'
    return {name: f'{count} tasks ({digest})'}

  def _call(self, name: str, method: Callable, *args: Any) -> Any:
    call = f'{name}({", ".join(map(str, args))}) of split {self._split}'
    expected = 'must be a method of envs.base.TaskInfo'
    with envs.explain_errors(f'env.name={self._env_name}', call, expected):
      result = method(*args)
      # Of `draw`, in whatever type.
      return [int(n) for n in result] if name == 'draw' else result


class Outcome(NamedTuple):
  """The outcome of an episode.

  Attributes:
    task: its task.
    success: whether it succeeded.
    actions: its actions.
  """

  task: base.Task
  success: bool
  actions: tuple[str, ...] = ()


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

  def record_outcomes(self, outcomes: Iterable[Outcome]) -> None:
    """Ignores outcomes; subclasses may use them."""

  def state(self) -> dict:
    """Returns the statistics of outcomes as plain values."""
    return {}

  def restore(self, state: dict) -> None:
    """Restores statistics that `state` returned."""

  def at(self, iteration: int) -> list[base.Task]:
    """Returns the G tasks of an iteration.

    Raises:
      ValueError: in one line, if an environment draws unusable tasks. Groups of
        one task would play the same episodes.
    """
    indices = [int(n) for n in self._draw(iteration, self._groups)]
    usable = all(0 <= n < self._num_tasks for n in indices)
    if not usable or not len(indices) == len(set(indices)) == self._groups:
      raise ValueError(
        f'split {self._split} draws the tasks {indices[:10]} for '
        f'{self._groups} groups in iteration {iteration}; must be as many '
        f'different indices below {self._num_tasks}'
      )
    return [base.Task(self._split, index) for index in indices]

  def _shuffled(self, iteration: int, groups: int) -> np.ndarray:
    epoch, position = divmod(iteration, self._num_tasks // groups)
    rng = np.random.Generator(np.random.Philox([self._seed, epoch]))
    order = rng.permutation(self._num_tasks)
    return order[position * groups : (position + 1) * groups]


class UncertaintySampler(TaskSampler):
  """Prefers tasks whose outcome is uncertain.

  A task's weight is proportional to (1 - w) p (1 - p) + w d. Its success rate
  is estimated as p = (s + 1) / (n + 2) from n episodes with s successes. d is
  the `diversity` of the episodes when the task was last drawn; for a new task,
  it is the mean of the others. Weights are mixed with the uniform distribution.
  The tasks of an iteration are distinct. w = 0.2 is the variance-aware sampling
  of MMR1 (arXiv:2509.21268).

  # Differs from the paper: its diversity combines several measures of text, and
  scores are refreshed by further episodes.

  Args:
    *args: passed to `TaskSampler`.
    uniform: weight of the uniform distribution in the mixture, in [0, 1].
    diversity_weight: w, in [0, 1].
    **kwargs: passed to `TaskSampler`.
  """

  def __init__(
    self,
    *args: Any,
    uniform: float = 0.5,
    diversity_weight: float = 0.0,
    **kwargs: Any,
  ):
    super().__init__(*args, **kwargs)
    self._draw, self._uniform = self._weighted, uniform
    self._diversity_weight = diversity_weight
    self._counts = np.zeros((2, self._num_tasks), np.int64)
    self._diversities: dict[int, float] = {}

  def record_outcomes(self, outcomes: Iterable[Outcome]) -> None:
    """Counts the episodes and successes of tasks of this split."""
    actions: dict[int, list[tuple[str, ...]]] = {}
    for outcome in outcomes:
      if outcome.task.split == self._split:
        index = outcome.task.index
        self._counts[:, index] += outcome.success, 1
        actions.setdefault(index, []).append(outcome.actions)
    if self._diversity_weight:
      self._diversities |= {n: diversity(x) for n, x in actions.items()}

  def state(self) -> dict:
    """Returns [successes, episodes] of each task that was played, by index.

    Followed by the diversity, if it is known.
    """
    return {
      str(n): [
        *self._counts[:, n].tolist(),
        *([self._diversities[n]] if n in self._diversities else []),
      ]
      for n in np.flatnonzero(self._counts[1])
    }

  def restore(self, state: dict) -> None:
    """Restores statistics that `state` returned.

    The resumed run may have another weight of the diversity, or fewer tasks.
    """
    self._counts[:], self._diversities = 0, {}
    for key, (successes, episodes, *diversities) in state.items():
      index = int(key)
      if index < self._num_tasks:
        self._counts[:, index] = successes, episodes
        if diversities and self._diversity_weight:
          (self._diversities[index],) = diversities

  def chances(self) -> np.ndarray:
    """Returns the probability of each task to be drawn first."""
    successes, episodes = self._counts
    rate = (successes + 1) / (episodes + 2)
    scores = rate * (1 - rate)
    # In the order of a restored state: a sum depends on it in its last bits.
    if known := dict(sorted(self._diversities.items())):
      diversities = np.full(self._num_tasks, np.mean([*known.values()]))
      diversities[[*known]] = [*known.values()]
      weight = self._diversity_weight
      scores = (1 - weight) * scores + weight * diversities
    floor = self._uniform / self._num_tasks
    # With diversity alone, all scores may be 0.
    total = scores.sum()
    shares = scores / total if total else 1 / self._num_tasks
    return floor + (1 - self._uniform) * shares

  def _weighted(self, iteration: int, groups: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox([self._seed, iteration]))
    # The order of first arrivals of Poisson processes with these rates is a
    # weighted sample without replacement. Those of rate 0 come last, in random
    # order.
    times, chances = rng.exponential(size=self._num_tasks), self.chances()
    arrivals = np.full(self._num_tasks, np.inf)
    np.divide(times, chances, out=arrivals, where=chances > 0)
    return np.lexsort((times, arrivals))[:groups]


def diversity(sequences: Sequence[Sequence[str]]) -> float:
  """Returns the mean over pairs of 1 - their share of matching elements.

  The share is that of `difflib`, in order; 0 without pairs.
  """
  distances = [
    1 - difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
    for a, b in itertools.combinations(sequences, 2)
  ]
  return float(np.mean(distances)) if distances else 0.0


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
    ValueError: if the stages are malformed, a type is unknown, or a stage has
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


def make(
  options: Options, split: str, tasks: base.TaskInfo, groups: int, seed: int
) -> TaskSampler:
  """Returns the sampler of a split, for G groups per iteration.

  Raises:
    ValueError: in one line, if its tasks cannot be drawn like this.
  """
  sizes = split, len(tasks), groups, seed
  if options.draw == 'uncertain':
    return UncertaintySampler(
      *sizes,
      uniform=options.uniform,
      diversity_weight=options.diversity_weight,
    )
  if options.draw == 'stages':
    types = [tasks.task_type(index) for index in range(len(tasks))]
    return StageSampler(split, types, groups, seed, options.stages)
  return TaskSampler(*sizes, draw=getattr(tasks, 'draw', None))
