"""The interface between environments and the trainer.

An environment works with text. It builds the complete prompt of a turn
(instruction, task, history, current observation), or in a conversation the new
messages of the turn, and parses the model's response. The trainer is therefore
independent of environments, and adding an environment changes a single folder.
Environments run in worker processes: this package imports the standard library,
numpy and simulators, never jax or gigpo_jax.
"""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Task:
  """An initial state of an environment.

  Attributes:
    split: the split of the environment's tasks that contains the task.
    index: index within the split; (split, index) identifies the task.
  """

  split: str
  index: int

  def __str__(self) -> str:
    return f'{self.split}/{self.index}'


# Roles of the messages that an environment sends. An assistant message is text
# that the policy did not sample, such as an example.
ROLES = ('system', 'user', 'tool', 'assistant')


@dataclasses.dataclass(frozen=True)
class Message:
  """A message to the policy in a conversation.

  Attributes:
    role: one of ROLES.
    text: the content.
    call_id: id of the tool call that a tool message answers; '' if it has none.
  """

  role: str
  text: str
  call_id: str = ''


# What a turn adds to the input of the policy: a prompt of its own, or messages.
Input = str | tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Observation:
  """The input of the policy in a turn.

  It is either a prompt of its own, or in a conversation some messages that are
  added to the messages and responses so far.

  Attributes:
    prompt: the user message of this turn, before the chat template; in a
      conversation, for display only.
    short_prompt: the same without history, used if `prompt` is too long; ''
      for the same text.
    anchor: the state by which steps are grouped (GiGPO, Eq. 6); any string.
    text: the environment's own text, for logs and display.
    task: the task description in `prompt`, for display.
    actions: the admissible actions that `prompt` lists, for display.
    messages: the new messages of a conversation; empty if every turn has a
      prompt of its own.
    tools: tools of a conversation, in its first observation only. Each is the
      JSON text of a function: name, description, parameters.
    conversation: name of the conversation to which the messages belong. A new
      name starts another conversation in the same episode.
    agent: name of the agent that takes the turn, if there are several. Their
      advantages are compared separately.
  """

  prompt: str
  short_prompt: str
  anchor: str
  text: str
  task: str = ''
  actions: tuple[str, ...] = ()
  messages: tuple[Message, ...] = ()
  tools: tuple[str, ...] = ()
  conversation: str = ''
  agent: str = ''


@dataclasses.dataclass(frozen=True)
class Data:
  """Official data of an environment.

  Attributes:
    variable: environment variable of the folder.
    hint: what is missing and how to get it, such as 'no games; run ...'.
  """

  variable: str
  hint: str


@dataclasses.dataclass(frozen=True)
class StepResult:
  """The result of a response.

  Attributes:
    observation: the next observation; None when the episode is over.
    reward: raw reward of this step, before the invalid-action penalty.
    valid: whether the response had the required form (v in GiGPO's terms).
    action: the action parsed from the response and sent to the simulator.
    success: whether the task is accomplished; True only in the last step.
    done: whether the episode is over (success or step limit).
    metrics: further metrics of this step by name; each is averaged over the
      steps that report it.
    score: score of the episode in [0, 1], reported with its last step. None
      during an episode, and if the environment has no score.
    final_anchor: the final state of the episode, reported with its last step.
      None during an episode, and if the state is unknown. A lost end must not
      have the anchor of a state in which an episode continues.
    other_rewards: raw rewards of agents that did not take this step, by name.
      Each is added to the reward of the agent's latest step.
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
  other_rewards: dict[str, float] = dataclasses.field(default_factory=dict)


class Env(Protocol):
  """An environment instance. It runs one episode at a time."""

  def prepare(self, task: Task) -> None:
    """Loads data that a later reset to the task needs; may do nothing.

    It is called between episodes or during an episode, and must not affect the
    running episode. All environments of a process may share its caches.
    """

  def reset(self, task: Task) -> Observation:
    """Starts an episode; the same task gives the same observation."""

  def step(self, response: str) -> StepResult:
    """Advances by one turn, given the model's response verbatim."""

  def close(self) -> None:
    """Frees the simulator's resources."""


class TaskInfo(Protocol):
  """Information about the tasks of a split, without starting a simulator.

  It may have a method `draw(iteration, groups)`, which returns the different
  indices of the tasks to train on and replaces shuffling; see
  `gigpo_jax.tasks`. It may also have a method `answer(index)`, which returns a
  reference answer as text, if the module has `answer_start(kwargs)`; see
  `envs.answer_start`.
  """

  def __len__(self) -> int: ...

  def task_type(self, index: int) -> str:
    """Returns a task's type, by which success is reported ('pick', ...)."""
