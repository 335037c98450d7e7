"""What every environment is to the trainer: one protocol, four records.

An environment talks text. It builds the whole prompt of a turn (instruction,
task, history, current observation) and parses the model's response itself, so
that the trainer knows no environment and adding one touches one folder. It
runs in worker processes: this package imports the standard library, numpy and
simulators, never jax or gigpo_jax.
"""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Task:
  """One initial state of an environment: all that a worker needs to reset.

  Attributes:
    split: the part of the environment's tasks that it belongs to.
    index: its number within the split; (split, index) identifies it.
  """

  split: str
  index: int

  def __str__(self) -> str:
    return f'{self.split}/{self.index}'


@dataclasses.dataclass(frozen=True)
class Observation:
  """What the policy sees before a turn.

  Attributes:
    prompt: the user message of this turn, before the chat template.
    short_prompt: the same without history, for when `prompt` is too long.
    anchor: the state by which steps are grouped (GiGPO, Eq. 6); any string.
    text: the environment's own words, for logs and people.
    task: what is to be done, as `prompt` says it, for people.
    actions: what can be done, as `prompt` lists it, for people.
  """

  prompt: str
  short_prompt: str
  anchor: str
  text: str
  task: str = ''
  actions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepResult:
  """What came of one response.

  Attributes:
    observation: what the policy sees next; None when the episode is over.
    reward: raw reward of this step, before the invalid-action penalty.
    valid: whether the response had the required form (v in GiGPO's terms).
    action: the action parsed out of the response and sent to the simulator.
    success: whether the task is accomplished; can be true only at the end.
    done: whether the episode is over (success or step limit).
    metrics: further numbers about this step, averaged over the steps that
      have them, by name.
    score: how well the whole episode went, in [0, 1], told with its last
      step; None during an episode, and always where there is no measure finer
      than success.
    final_anchor: the state that the episode ended in, told with its last step;
      None during an episode, and where it is not known.
  """

  observation: Observation | None
  reward: float
  valid: bool
  action: str
  success: bool
  done: bool
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  score: float | None = None
  final_anchor: str | None = None


class Env(Protocol):
  """One environment instance. It holds one episode at a time."""

  def prepare(self, task: Task) -> None:
    """Loads what a later reset to the task needs; may be a no-op.

    Called in the background, between episodes or during one; it must not
    disturb the running episode. What it caches may be shared by all
    environments of the process.
    """

  def reset(self, task: Task) -> Observation:
    """Starts an episode; the same task gives the same observation."""

  def step(self, response: str) -> StepResult:
    """Takes the model's response, verbatim, and moves on by one turn."""

  def close(self) -> None:
    """Frees what the simulator holds."""


class TaskInfo(Protocol):
  """The tasks of a split, known without starting a simulator.

  May have `draw(iteration, groups)`, which returns the numbers of the tasks to
  train on where they are not to be shuffled; see `gigpo_jax.tasks`.
  """

  def __len__(self) -> int: ...

  def kind(self, index: int) -> str:
    """Type of a task, by which success is reported ('pick', 'heat', ...)."""
