"""From episodes to rows: padded numpy arrays, one row a step.

Input: `trajectory.Trajectory`s. Output: `Rows`. Knows no device, no
environment and no algorithm.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from gigpo_jax import trajectory


@dataclasses.dataclass(frozen=True)
class Rows:
  """One iteration as training examples; R counts padding rows too.

  Attributes:
    tokens: prompt and completion, contiguous from position 0, padded right.
    prompt_lengths: tokens of the prompt; 0 for padding rows.
    lengths: tokens of prompt and completion together; 0 for padding rows.
    sampler_log_probs: log-probs of the completion as the sampler saw them,
      0 past its end.
    groups: group of the row in [0, G); -1 marks padding.
    episodes: number of the episode in the iteration.
    steps: turn within the episode, from 0.
    anchors: dense id of the state the turn was taken in. Equal anchors have
      equal ids, across groups too.
    rewards: raw reward of the step.
    valid: whether the response had the required form.
  """

  tokens: Int[np.ndarray, "R L"]
  prompt_lengths: Int[np.ndarray, " R"]
  lengths: Int[np.ndarray, " R"]
  sampler_log_probs: Float[np.ndarray, "R C"]
  groups: Int[np.ndarray, " R"]
  episodes: Int[np.ndarray, " R"]
  steps: Int[np.ndarray, " R"]
  anchors: Int[np.ndarray, " R"]
  rewards: Float[np.ndarray, " R"]
  valid: Bool[np.ndarray, " R"]

  @property
  def real(self) -> Bool[np.ndarray, " R"]:
    """Which rows are not padding."""
    return self.groups >= 0

  @property
  def completion_mask(self) -> Bool[np.ndarray, "R C"]:
    """Which completion positions hold a sampled token."""
    position = np.arange(self.sampler_log_probs.shape[1])
    return position < (self.lengths - self.prompt_lengths)[:, None]


def from_trajectories(
  trajectories: Sequence[trajectory.Trajectory],
  *,
  max_prompt_tokens: int,
  max_completion_tokens: int,
  row_multiple: int = 256,
) -> Rows:
  """Returns the steps of all episodes as rows.

  Args:
    trajectories: episodes; one that the environment broke off (`failure`)
      contributes no rows, for its return is unknown.
    max_prompt_tokens: cap of a prompt; with the next it sizes L.
    max_completion_tokens: cap of a completion; sizes C.
    row_multiple: R is padded up to a power of two times this, so that
      programs over rows are compiled for few sizes.

  Raises:
    ValueError: if no episode holds a step.
  """
  steps = [
    (episode, number, t, step)
    for number, episode in enumerate(trajectories)
    if not episode.failure
    for t, step in enumerate(episode.steps)
  ]
  if not steps:
    raise ValueError('no episode holds a step: nothing to train on')
  num_rows = row_multiple
  while num_rows < len(steps):
    num_rows *= 2
  rows = Rows(
    tokens=np.zeros(
      (num_rows, max_prompt_tokens + max_completion_tokens), np.int32
    ),
    prompt_lengths=np.zeros(num_rows, np.int32),
    lengths=np.zeros(num_rows, np.int32),
    sampler_log_probs=np.zeros((num_rows, max_completion_tokens), np.float32),
    groups=np.full(num_rows, -1, np.int32),
    episodes=np.zeros(num_rows, np.int32),
    steps=np.zeros(num_rows, np.int32),
    anchors=np.zeros(num_rows, np.int32),
    rewards=np.zeros(num_rows, np.float32),
    valid=np.ones(num_rows, bool),
  )
  # A dictionary of the strings themselves: exact, so no hash can collide.
  anchor_ids: dict[str, int] = {}
  for r, (episode, number, t, step) in enumerate(steps):
    prompt, completion = step.prompt_ids, step.completion_ids
    rows.prompt_lengths[r] = len(prompt)
    rows.lengths[r] = len(prompt) + len(completion)
    rows.tokens[r, : rows.lengths[r]] = np.concatenate([prompt, completion])
    rows.sampler_log_probs[r, : len(completion)] = step.log_probs
    rows.groups[r] = episode.group
    rows.episodes[r] = number
    rows.steps[r] = t
    rows.anchors[r] = anchor_ids.setdefault(step.anchor, len(anchor_ids))
    rows.rewards[r] = step.result.reward
    rows.valid[r] = step.result.valid
  return rows
