"""Episodes on the host: ragged, frozen, exactly what was sampled.

A `Step` is one turn; its token ids are the sampler's own and are never made
again from text. This module knows neither jax nor environments' insides.
"""

import dataclasses

import numpy as np

from envs import base


@dataclasses.dataclass(frozen=True)
class Step:
  """One turn: observation, prompt, response, action, reward.

  Attributes:
    prompt_ids: int32 [P]; the rendered prompt.
    completion_ids: int32 [C]; the sampled tokens, the stop token included.
    log_probs: float32 [C]; log-probability of each sampled token under the
      sampling policy at its temperature, before top-k and top-p.
    truncated: the response reached the token limit before a stop token.
    prompt_shortened: the prompt was too long: history or text was dropped.
    anchor: the environment state in which the turn was taken.
    observation: the environment's words that the policy answered to.
    response: the decoded response, for people.
    result: what the environment made of it.
  """

  prompt_ids: np.ndarray
  completion_ids: np.ndarray
  log_probs: np.ndarray
  truncated: bool
  prompt_shortened: bool
  anchor: str
  observation: str
  response: str
  result: base.StepResult


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One episode.

  Attributes:
    task: the initial state.
    kind: the task's type.
    group: number of the group within the iteration, in [0, G).
    member: number of the episode within the group, in [0, N).
    steps: its turns in order; turns answered by the environment only.
    failure: why the environment ended it, `CAUSE: REASON`; '' otherwise.
  """

  task: base.Task
  kind: str
  group: int
  member: int
  steps: tuple[Step, ...]
  failure: str = ''

  @property
  def cause(self) -> str:
    """Why the environment ended it, in a word of `env_pool.CAUSES`."""
    return self.failure.partition(':')[0]

  @property
  def success(self) -> bool:
    """Whether the task was accomplished; never where the episode failed."""
    done = bool(self.steps) and self.steps[-1].result.success
    return done and not self.failure

  @property
  def reward(self) -> float:
    """Sum of raw rewards, before any penalty."""
    return sum(step.result.reward for step in self.steps)

  @property
  def end(self) -> tuple[str, str] | None:
    """Returns (what was seen, anchor) where it ended; None if not known.

    A horizon ends episodes that would have gone on.
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
    """Score of the episode, in [0, 1]; 0 where the episode failed.

    None if the environment has no score, or the episode no steps.
    """
    score = self.steps[-1].result.score if self.steps else None
    return 0.0 if self.failure and score is not None else score
