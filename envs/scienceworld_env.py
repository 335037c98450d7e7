"""ScienceWorld: experiments of elementary science in a house, in text.

Wraps the simulator of Wang et al. (arXiv:2203.07540), which needs Java. Each
environment has a Java process of its own, of about 1 GB. A task is a variation
of one of the simulator's 30 tasks; splits are the simulator's.

The state by which steps are grouped is the room, the inventory and the score.
It does not include what happens in other rooms. Details of a variation, such as
the colours of paints in a room, differ between episodes, so that episodes
cannot be replayed.
"""

import contextlib
import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envs import base, narrator, seeds

ANCHORS = ('observation', 'state')
REPLAYS = False
SUCCESS_REWARD = 10.0

_ROLE = 'You are an expert agent in a house with rooms for experiments.'
_RULES = """\
Actions are free text of the listed forms, where OBJ is something that you see \
or carry."""
_BEST_SCORE = 100
_UNKNOWN = 'No known action matches that input.'
# Commands to the simulator that are no actions.
_COMMANDS = ('reset task', 'task')
_SPLITS = {'train': 'train', 'valid': 'dev', 'test': 'test'}


class Tasks:
  """Variations of the tasks of a split.

  Args:
    variations: (name of the task, number of the variation) by index.
  """

  def __init__(self, variations: Sequence[tuple[str, int]]):
    self._variations = variations

  def __len__(self) -> int:
    return len(self._variations)

  def __getitem__(self, index: int) -> tuple[str, int]:
    return self._variations[index]

  def task_type(self, index: int) -> str:
    """Returns the name of the simulator's task."""
    return self._variations[index][0]


def tasks(split: str, *, tasks: Sequence[str] = (), **kwargs: Any) -> Tasks:
  """Returns the tasks of a split; accepts the arguments of `Env`.

  Raises:
    ValueError: in one line, if there is no such split or task.
  """
  del kwargs
  if split not in _SPLITS:
    raise ValueError(f'split={split}: must be one of {", ".join(_SPLITS)}')
  return Tasks(_variations(tuple(tasks))[split])


def check_installation(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line if the simulator is not installed."""
  del kwargs
  try:
    _module()
  except ValueError as error:
    yield str(error)


class Env:
  """ScienceWorld as a text environment.

  Args:
    tasks: names of the simulator's tasks, such as 'boil'; () for all.
    simplifications: names of simplifications, joined by commas, or 'easy' for
      all of them; '' for none.
    anchor: one of ANCHORS; identifies a state (GiGPO, Eq. 6).
    max_steps: step limit of an episode.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must contain a `<think>` part.

  Raises:
    ValueError: in one line, if an argument is not valid or Java is missing.
  """

  def __init__(
    self,
    *,
    tasks: Sequence[str] = (),
    simplifications: str = 'easy',
    anchor: str = 'state',
    max_steps: int = 50,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    self._simulator = _start()
    self._names, self._simplifications = tuple(tasks), simplifications
    self._anchor, self._max_steps = anchor, max_steps
    self._score = 0
    self._narrator = narrator.Narrator(
      _ROLE,
      rules=_RULES,
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
      brief_observations=True,
    )

  def prepare(self, task: base.Task) -> None:
    """Does nothing; loading a task is a part of `reset`."""

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode with a variation of a task."""
    self._load(task)
    text, info = self._simulator.reset()
    self._score, self._forms = 0, _forms(self._simulator)
    goal = ' '.join(self._simulator.get_task_description().split())
    self._narrator.reset(goal.removeprefix('Your task is to '))
    return self._observe(text, info)

  def step(self, response: str) -> base.StepResult:
    """Acts; a response without a known action only uses up a step."""
    action, valid = self._narrator.parse(response)
    # The simulator ignores further spaces.
    valid = valid and ' '.join(action.split()) not in _COMMANDS
    self._narrator.record_action(action)
    text, _, ended, info = self._simulator.step(action if valid else '')
    valid = valid and text != _UNKNOWN
    score = int(info['score'])
    gain, self._score = score - self._score, score
    success = score >= _BEST_SCORE
    # A wrong final answer ends the episode with the score -100.
    ended = ended or success or score < 0
    done = ended or self._narrator.step >= self._max_steps
    observation = self._observe(text, info)
    return base.StepResult(
      observation=None if done else observation,
      # The gains of an episode that succeeds add up to SUCCESS_REWARD.
      reward=SUCCESS_REWARD * max(gain, 0) / _BEST_SCORE,
      valid=valid,
      action=action,
      success=success,
      done=done,
      score=min(1.0, max(0.0, score / _BEST_SCORE)) if done else None,
      final_anchor=observation.anchor if done else None,
    )

  def close(self) -> None:
    """Ends the Java process."""
    _end(self._simulator)

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of the simulator's solution.

    Args:
      task: the task to play.
      noise: probability of looking around before a step of the solution.
      seed: seed of the noise.
    """
    observation: base.Observation | None = self.reset(task)
    rng = np.random.default_rng([seed, task.index])
    for action in self._simulator.get_gold_action_sequence():
      for taken in ('look around',) * (rng.random() < noise) + (action,):
        if observation is None:
          return
        response = self._narrator.format_response(f'I {taken}.', taken)
        yield observation, response
        observation = self.step(response).observation

  def _load(self, task: base.Task) -> None:
    name, variation = _variations(self._names)[task.split][task.index]
    self._simulator.load(
      name, variation, self._simplifications, generateGoldPath=True
    )

  def _observe(self, text: str, info: dict[str, Any]) -> base.Observation:
    state = f'{info["look"]}\n{info["inv"]}\nscore: {info["score"]}'
    anchor = text if self._anchor == 'observation' else state
    return self._narrator.observe(text, anchor=anchor, actions=self._forms)


def _forms(simulator: Any) -> tuple[str, ...]:
  """Returns the forms of actions, such as 'open OBJ'."""
  forms = simulator.get_possible_actions()
  return tuple(form for form in forms if form not in _COMMANDS)


@functools.lru_cache(maxsize=4)
def _variations(names: tuple[str, ...]) -> dict[str, list[tuple[str, int]]]:
  """Returns (task, variation) of each split; starts a simulator."""
  simulator = _start()
  try:
    known = list(simulator.get_task_names())
    if unknown := set(names) - set(known):
      raise ValueError(
        f'env.tasks={names}: {", ".join(sorted(unknown))} unknown; must be '
        f'from {", ".join(known)}'
      )
    found: dict[str, list[tuple[str, int]]] = {split: [] for split in _SPLITS}
    for name in names or known:
      simulator.load(name, 0, '')
      for split, own in _SPLITS.items():
        numbers = getattr(simulator, f'get_variations_{own}')()
        found[split] += [(name, int(number)) for number in numbers]
    return {split: seeds.mix(pairs) for split, pairs in found.items()}
  finally:
    _end(simulator)


def _module() -> Any:
  """Returns the package.

  Raises:
    ValueError: in one line, if it or Java is missing.
  """
  try:
    import scienceworld
  except ImportError as error:
    raise ValueError(
      'env.name=scienceworld: scienceworld is not installed; run pip install '
      "-e '.[scienceworld]'"
    ) from error
  if not shutil.which('java'):
    raise ValueError(
      'env.name=scienceworld: there is no command `java`; install Java 8 or '
      'newer'
    )
  return scienceworld


def _start() -> Any:
  """Returns a simulator without step limit, in a Java process of its own."""

  class Simulator(_module().ScienceWorldEnv):
    """Does not list all valid actions in each step: half of its time."""

    def get_valid_action_object_combinations(self) -> list[str]:
      return []

  return Simulator('', envStepLimit=1_000_000)


def _end(simulator: Any) -> None:
  # py4j raises various errors if the process has already ended.
  with contextlib.suppress(Exception):
    simulator.close()
    simulator._obj_tree_tempdir.cleanup()
  process = simulator._gateway.java_process
  process.kill()
  process.wait()
  for stream in (process.stdin, process.stdout):
    if stream:
      with contextlib.suppress(OSError):
        stream.close()
