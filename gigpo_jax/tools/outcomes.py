"""Outcomes of trained policies on test tasks, and the CSV that stores them.

The CSV has one line per policy. Its column `outcomes` has one bit per episode,
in hexadecimal digits, ordered by task, so that policies of several machines can
be compared task by task. `task_list` is a digest of the names of the tasks.
"""

import collections
import csv
import dataclasses
import hashlib
import io
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from gigpo_jax.runtime import files

COLUMNS = (
  *('experiment', 'name', 'seed', 'tasks', 'success'),
  *('episodes', 'task_list', 'settings', 'outcomes'),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """The test of one trained policy.

  Attributes:
    experiment: name of the config file.
    name: name of the run; runs of the same name differ in their seed.
    seed: seed of the run.
    tasks: number of tasks.
    success: mean success over tasks.
    episodes: number of episodes; 0 if not known.
    task_list: digest of the sorted names of the tasks; '' if not known.
    settings: config of the run and the test, as `Run.test_settings`; '' if
      not known.
    outcomes_T: mean success of each task in the order of the sorted names; None
      if not known.
  """

  experiment: str
  name: str
  seed: int
  tasks: int
  success: float
  episodes: int = 0
  task_list: str = ''
  settings: str = ''
  outcomes_T: Float[np.ndarray, ' T'] | None = None

  @property
  def key(self) -> tuple[str, str, int]:
    """Key of the run: (experiment, name, seed)."""
    return self.experiment, self.name, self.seed


Results = Mapping[str, Mapping[int, Result]]  # By name and seed.


def read_evaluation(path: pathlib.Path) -> dict[str, list[bool]]:
  """Returns the successes by task in a file evaluation.json.

  Args:
    path: file of `launch/evaluate.py` for one policy.

  Raises:
    ValueError: in one line with the file's name, if the file is damaged, of a
      newer release, or about several policies.
  """
  stored = files.read_stored(path)
  by_task: dict[str, list[bool]] = {}
  try:
    (policy,) = stored['policies'].values()
    for episode in policy['episodes']:
      task, success = episode['task'], episode['success']
      if not isinstance(task, str) or not isinstance(success, bool):
        raise TypeError(f'task {task!r} has success {success!r}')
      by_task.setdefault(task, []).append(success)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{path}: not an evaluation of one policy ({error!r:.200})'
    ) from error
  return by_task


def make_result(
  key: tuple[str, str, int],
  by_task: Mapping[str, Sequence[bool]],
  settings: str = '',
) -> Result:
  """Returns the result of a policy.

  Args:
    key: (experiment, name, seed) of its run.
    by_task: successes of the episodes of each task.
    settings: config of the run and the test.
  """
  names = sorted(by_task)
  outcomes_T = np.array([np.mean(by_task[name]) for name in names])
  digest = hashlib.sha256('\n'.join(names).encode()).hexdigest()
  return Result(
    *key,
    tasks=len(names),
    success=float(outcomes_T.mean()),
    episodes=sum(map(len, by_task.values())),
    task_list=digest[:12],
    settings=settings,
    outcomes_T=outcomes_T,
  )


def encode(result: Result) -> str:
  """Returns the bits of a result's episodes in hexadecimal digits.

  The bits of a task start with its successes. Without outcomes, or if tasks
  have different numbers of episodes, the text is empty.
  """
  repeats, rest = divmod(result.episodes, result.tasks)
  if result.outcomes_T is None or rest:
    return ''
  successes_T = np.rint(result.outcomes_T * repeats)
  if not np.allclose(successes_T, result.outcomes_T * repeats):
    return ''
  bits = np.arange(repeats) < successes_T[:, None]
  return np.packbits(bits).tobytes().hex()


def decode(
  text: str, tasks: int, episodes: int
) -> Float[np.ndarray, ' T'] | None:
  """Returns the outcomes that `encode` wrote; None for an empty text.

  Raises:
    ValueError: if the text has another length.
  """
  if not text:
    return None
  packed = np.frombuffer(bytes.fromhex(text), np.uint8)
  if len(packed) != -(-episodes // 8) or episodes % tasks:
    raise ValueError(f'{len(packed)} bytes of outcomes, {episodes} episodes')
  bits = np.unpackbits(packed)[:episodes]
  return bits.reshape(tasks, -1).mean(axis=1)


def write(path: pathlib.Path, results: Sequence[Result]) -> None:
  """Writes results to a CSV."""
  text = io.StringIO(newline='')
  writer = csv.DictWriter(text, COLUMNS)
  writer.writeheader()
  for result in results:
    line = {name: getattr(result, name) for name in COLUMNS[:-1]}
    writer.writerow(line | {'outcomes': encode(result)})
  files.write_atomic(pathlib.Path(path), text.getvalue())


def read(path: str | pathlib.Path) -> list[Result]:
  """Returns the results in a CSV that `write` wrote.

  Tables of earlier releases have no outcomes.

  Raises:
    ValueError: in one line, if the file is not such a CSV, or has several lines
      of a policy.
  """
  try:
    results = [_read_line(line) for line in files.read_csv(path)]
  except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
    raise ValueError(
      f'{path}: not a table of tests ({error!r:.200}); must be the CSV '
      '*_tests.csv that launch/sweep.py writes'
    ) from error
  counts = collections.Counter(result.key for result in results)
  for (experiment, name, seed), count in counts.items():
    if count > 1:
      raise ValueError(
        f'{path}: {experiment}, {name}, seed {seed}: has {count} lines; must '
        'be one'
      )
  return results


def _read_line(line: Mapping[str, str]) -> Result:
  tasks, episodes = int(line['tasks']), int(line.get('episodes') or 0)
  if tasks < 1:
    raise ValueError(f'{tasks} tasks')
  return Result(
    line['experiment'],
    line['name'],
    int(line['seed']),
    tasks,
    float(line['success']),
    episodes,
    line.get('task_list') or '',
    line.get('settings') or '',
    decode(line.get('outcomes') or '', tasks, episodes),
  )


def group(results: Sequence[Result]) -> dict[str, dict[str, dict[int, Result]]]:
  """Returns results by experiment, name and seed."""
  found: dict[str, dict[str, dict[int, Result]]] = {}
  for result in results:
    by_name = found.setdefault(result.experiment, {})
    by_name.setdefault(result.name, {})[result.seed] = result
  return found
