"""Episodes that an agent harness plays through launch/serve.py.

The environment has no simulator. A harness asks the server for an episode,
plays it with chat completions and sends a reward. A task is a number, from
which the harness derives its own task.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from envs import checks

CONTEXTS = ('conversation',)
REPLAYS = False
HARNESS = 'launch/serve.py'


class Tasks:
  """The tasks of a split.

  Args:
    num_tasks: their number.
  """

  def __init__(self, num_tasks: int):
    self._num_tasks = num_tasks

  def __len__(self) -> int:
    return self._num_tasks

  def task_type(self, index: int) -> str:
    """Returns the only type; the tasks are those of the harness."""
    del index
    return 'harness'


def tasks(split: str, *, num_tasks: int = 1024, **kwargs: Any) -> Tasks:
  """Returns the tasks of a split; accepts the arguments of `Env`."""
  del split, kwargs
  return Tasks(num_tasks)


class Env:
  """Refuses to run: a harness plays the episodes.

  Args:
    num_tasks: number of tasks of each split.
    max_steps: limit of turns of an episode.
    tools: whether requests may offer tools.

  Raises:
    ValueError: always, in one line.
  """

  def __init__(
    self, *, num_tasks: int = 1024, max_steps: int = 16, tools: bool = True
  ):
    del num_tasks, max_steps, tools
    raise ValueError(
      f'a harness plays its episodes; use {HARNESS} instead of this command'
    )


def uses_tools(kwargs: Mapping[str, Any]) -> bool:
  """Returns whether requests may offer tools."""
  return bool(kwargs.get('tools', True))


def conflicts(config: Any) -> Iterator[str]:
  """Yields options with which a harness would wait or lose a reward."""
  if config.rollout.schedule != 'async':
    yield (
      f'rollout.schedule={config.rollout.schedule}: a harness may play fewer '
      'episodes at once than an iteration has; must be async'
    )
  if config.rollout.horizon:
    yield (
      f'rollout.horizon={config.rollout.horizon}: the harness ends episodes, '
      'and would lose their rewards; must be (), see env.max_steps'
    )


def check_options(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong option."""
  yield from checks.at_least(kwargs, num_tasks=1)
