"""Recorded episodes on the host: ragged, frozen, with the sampled token ids.

A `Step` is one turn. Its token ids are those of the sampler; text is never
tokenized again. This module depends neither on jax nor on an environment.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from envs import base
from gigpo_jax import deprecated

# Sums of rewards are equal up to this, absolute or relative.
ROUNDING = 1e-9


def are_equal(sums: Sequence[float]) -> bool:
  """Returns whether sums of rewards are equal, up to rounding."""
  low, high = min(sums), max(sums)
  return math.isclose(low, high, rel_tol=ROUNDING, abs_tol=ROUNDING)


@dataclasses.dataclass(frozen=True)
class SampledTurn:
  """A turn without the environment's result.

  Attributes:
    prompt_ids: int32 [P]; the rendered prompt.
    completion_ids: int32 [C]; the sampled tokens, including the stop token.
    log_probs: float32 [C]; log-probability of each sampled token under the
      sampling policy at its temperature, before top-k and top-p.
    truncated: whether the response reached the token limit before a stop token.
    prompt_shortened: whether history or text was dropped from a prompt that
      was too long.
    anchor: the environment state in which the turn was taken.
    observation: the environment's text before the response.
    response: the text of the response, which the environment gets.
    forced_tokens: number of tokens at the end of `prompt_ids` that begin the
      response. They were not sampled and are not trained on.
  """

  prompt_ids: np.ndarray
  completion_ids: np.ndarray
  log_probs: np.ndarray
  truncated: bool
  prompt_shortened: bool
  anchor: str
  observation: str
  response: str
  forced_tokens: int = dataclasses.field(default=0, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Step(SampledTurn):
  """One turn: observation, prompt, response, action, reward.

  Attributes:
    result: the environment's result for the response.
    age: iterations since the response was sampled; above 0 in groups that
      `carry_over` continues.
    state_value: mean return of episodes that were played from the state in
      which the turn was taken (`continuations`); None if there are none.
  """

  result: base.StepResult
  age: int = 0
  state_value: float | None = None

  @classmethod
  def without_tokens(
    cls, observation: base.Observation, response: str, result: base.StepResult
  ) -> 'Step':
    """Returns a turn that no policy sampled; one 0 stands for its tokens."""
    token = np.zeros(1, np.int32)
    return cls(
      prompt_ids=token,
      completion_ids=token,
      log_probs=np.zeros(1, np.float32),
      truncated=False,
      prompt_shortened=False,
      anchor=observation.anchor,
      observation=observation.text,
      response=response,
      result=result,
    )


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One episode.

  Attributes:
    task: the initial state.
    task_type: the type of the task.
    group: index of the group within the iteration, in [0, G).
    member: index of the episode within the group, in [0, N).
    steps: the turns in order; only those that the environment answered.
    failure: why the environment failed, as `CAUSE: REASON`; '' if it did not.
    first_observation: the first observation, with which the episode can be
      replayed; None if unknown.
    is_paused: whether the episode continues in another rollout.
    parent: the member of the group whose first turns the episode repeats
      (`branching`); None if it repeats none.
    num_repeated: number of these turns, or of those that lead to the state of a
      continuation.
  """

  task: base.Task
  task_type: str
  group: int
  member: int
  steps: tuple[Step, ...]
  failure: str = ''
  first_observation: base.Observation | None = None
  is_paused: bool = False
  parent: int | None = None
  num_repeated: int = 0

  kind = deprecated.attribute('Trajectory.kind', 'task_type')

  @property
  def cause(self) -> str:
    """The failure's cause, one of `env_pool.CAUSES`; '' without a failure."""
    return self.failure.partition(':')[0]

  @property
  def success(self) -> bool:
    """Whether the task was accomplished; False if the environment failed."""
    done = bool(self.steps) and self.steps[-1].result.success
    return done and not self.failure

  @property
  def reward(self) -> float:
    """Sum of the raw rewards of all agents, before any penalty."""
    return sum(self._step_rewards)

  @property
  def agents(self) -> tuple[str, ...]:
    """The agent of each step; '' if there is only one."""
    results = (step.result.observation for step in self.steps[:-1])
    given = (self.first_observation, *results)
    return tuple(
      observation.agent if observation else ''
      for observation, _ in zip(given, self.steps, strict=False)
    )

  @property
  def team_rewards(self) -> tuple[float, ...]:
    """For each step, all agents' rewards before its agent's next step.

    The rewards of an agent's steps then add up to those of all steps from its
    first one on.
    """
    return self.until_next_turn(self._step_rewards)

  @property
  def _step_rewards(self) -> list[float]:
    """For each step, the sum of the rewards that it gives to all agents."""
    return [
      math.fsum([s.result.reward, *s.result.other_rewards.values()])
      for s in self.steps
    ]

  def until_next_turn(self, values: Sequence[float]) -> tuple[float, ...]:
    """Returns, for each step, the sum of values before its agent's next step.

    Args:
      values: one value per step, which the agents share.
    """
    return tuple(math.fsum(values[t:end]) for t, end in self._next_turns)

  @property
  def own_rewards(self) -> tuple[float, ...]:
    """For each step, its agent's rewards before the agent's next step."""
    agents, results = self.agents, [s.result for s in self.steps]
    return tuple(
      math.fsum(
        [
          results[t].reward,
          *(r.other_rewards.get(agents[t], 0) for r in results[t + 1 : end]),
        ]
      )
      for t, end in self._next_turns
    )

  def by_agent(self, values: Sequence[float]) -> dict[str, float]:
    """Returns the sum of values over the steps of each agent.

    Args:
      values: one value per step, such as `own_rewards`.
    """
    totals: dict[str, float] = {}
    for agent, value in zip(self.agents, values, strict=True):
      totals[agent] = totals.get(agent, 0.0) + value
    return totals

  @property
  def _next_turns(self) -> Iterator[tuple[int, int]]:
    """Yields each step with its agent's next one, or the number of steps."""
    agents = self.agents
    for t, agent in enumerate(agents):
      following = (s for s in range(t + 1, len(agents)) if agents[s] == agent)
      yield t, next(following, len(agents))

  @property
  def end(self) -> tuple[str, str] | None:
    """The final (text, anchor) of the episode; None if unknown.

    An episode that a limit of turns ends has a last observation; otherwise
    both are the final anchor.
    """
    if not self.steps:
      return None
    result = self.steps[-1].result
    if result.observation:
      return result.observation.text, result.observation.anchor
    state = result.final_anchor
    return None if state is None else (state, state)

  @property
  def score(self) -> float | None:
    """Score of the episode, in [0, 1]; 0 if the environment failed.

    None if the environment has no score or the episode has no steps.
    """
    score = self.steps[-1].result.score if self.steps else None
    return 0.0 if self.failure and score is not None else score
