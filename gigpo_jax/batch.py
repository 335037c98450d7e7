"""From episodes to rows: padded numpy arrays, one row a step.

Input: `trajectory.Trajectory`s. Output: `Rows`. Knows no device, no
environment and no algorithm.
"""

import dataclasses
import difflib
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
    anchors: dense id of the state the turn was taken in; equal for equal
      anchors of a group.
    rewards: raw reward of the step.
    valid: whether the response had the required form.
  """

  tokens: Int[np.ndarray, 'R L']
  prompt_lengths: Int[np.ndarray, ' R']
  lengths: Int[np.ndarray, ' R']
  sampler_log_probs: Float[np.ndarray, 'R C']
  groups: Int[np.ndarray, ' R']
  episodes: Int[np.ndarray, ' R']
  steps: Int[np.ndarray, ' R']
  anchors: Int[np.ndarray, ' R']
  rewards: Float[np.ndarray, ' R']
  valid: Bool[np.ndarray, ' R']

  @property
  def real(self) -> Bool[np.ndarray, ' R']:
    """Which rows are not padding."""
    return self.groups >= 0

  @property
  def completion_mask(self) -> Bool[np.ndarray, 'R C']:
    """Which completion positions hold a sampled token."""
    position = np.arange(self.sampler_log_probs.shape[1])
    return position < (self.lengths - self.prompt_lengths)[:, None]

  def take(self, index: np.ndarray) -> 'Rows':
    """Returns some of the rows, in the given order."""
    return Rows(
      **{
        field.name: getattr(self, field.name)[index]
        for field in dataclasses.fields(self)
      }
    )


def from_trajectories(
  trajectories: Sequence[trajectory.Trajectory],
  *,
  max_prompt_tokens: int,
  max_completion_tokens: int,
  row_multiple: int = 256,
  similarity_threshold: float = 1.0,
) -> Rows:
  """Returns the steps of all episodes as rows.

  Args:
    trajectories: episodes; one that the environment broke off (`failure`)
      contributes no rows, for its return is unknown.
    max_prompt_tokens: cap of a prompt; with the next it sizes L.
    max_completion_tokens: cap of a completion; sizes C.
    row_multiple: R is padded up to a power of two times this, so that
      programs over rows are compiled for few sizes.
    similarity_threshold: below 1, anchors of a group whose Ratcliff-Obershelp
      ratio reaches it are one; see `similar_anchors`.

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
    reason = next((t.failure for t in trajectories if t.failure), 'none given')
    raise ValueError(f'all episodes failed, nothing to train on: {reason}')
  rows = pack(
    [step.prompt_ids for _, _, _, step in steps],
    [step.completion_ids for _, _, _, step in steps],
    max_prompt_tokens=max_prompt_tokens,
    max_completion_tokens=max_completion_tokens,
    row_multiple=row_multiple,
  )
  anchors = [(episode.group, step.anchor) for episode, _, _, step in steps]
  if similarity_threshold < 1:
    anchors = similar_anchors(anchors, similarity_threshold)
  # A dictionary of the anchors themselves: exact, so no hash can collide.
  anchor_ids: dict[tuple[int, str], int] = {}
  for r, (episode, number, t, step) in enumerate(steps):
    rows.sampler_log_probs[r, : len(step.log_probs)] = step.log_probs
    rows.groups[r] = episode.group
    rows.episodes[r] = number
    rows.steps[r] = t
    rows.anchors[r] = anchor_ids.setdefault(anchors[r], len(anchor_ids))
    rows.rewards[r] = step.result.reward
    rows.valid[r] = step.result.valid
  return rows


def pack(
  prompts: Sequence[np.ndarray],
  completions: Sequence[np.ndarray],
  *,
  max_prompt_tokens: int,
  max_completion_tokens: int,
  row_multiple: int,
) -> Rows:
  """Returns prompts and completions as rows: each a group and an episode.

  R is the number of pairs padded up to a power of two times `row_multiple`.
  Everything but the tokens and their lengths is at its neutral value.
  """
  num_rows = row_multiple
  while num_rows < len(prompts):
    num_rows *= 2
  numbers = np.arange(num_rows, dtype=np.int32)
  rows = Rows(
    tokens=np.zeros(
      (num_rows, max_prompt_tokens + max_completion_tokens), np.int32
    ),
    prompt_lengths=np.zeros(num_rows, np.int32),
    lengths=np.zeros(num_rows, np.int32),
    sampler_log_probs=np.zeros((num_rows, max_completion_tokens), np.float32),
    groups=np.where(numbers < len(prompts), numbers, -1).astype(np.int32),
    episodes=numbers,
    steps=np.zeros(num_rows, np.int32),
    anchors=np.zeros(num_rows, np.int32),
    rewards=np.zeros(num_rows, np.float32),
    valid=np.ones(num_rows, bool),
  )
  for r, (prompt, completion) in enumerate(
    zip(prompts, completions, strict=True)
  ):
    rows.prompt_lengths[r] = len(prompt)
    rows.lengths[r] = len(prompt) + len(completion)
    rows.tokens[r, : rows.lengths[r]] = np.concatenate([prompt, completion])
  return rows


def similar_anchors(
  anchors: Sequence[tuple[int, str]], threshold: float
) -> list[tuple[int, str]]:
  """Replaces each (group, anchor) by the first similar one of its group.

  Greedy, in row order, against the first member of each cluster, with the
  Ratcliff-Obershelp ratio 2M/T as difflib computes it: the similarity
  grouping of GiGPO's released code. Quadratic in a group's distinct anchors.
  """
  clusters: dict[int, list[str]] = {}
  first: dict[tuple[int, str], tuple[int, str]] = {}
  for group, text in anchors:
    if (group, text) in first:
      continue
    members = clusters.setdefault(group, [])
    match = next(
      (
        member
        for member in members
        if difflib.SequenceMatcher(None, text, member).ratio() >= threshold
      ),
      None,
    )
    if match is None:
      members.append(text)
    first[group, text] = (group, match if match is not None else text)
  return [first[anchor] for anchor in anchors]
