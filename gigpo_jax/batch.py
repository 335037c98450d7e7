"""From episodes to rows: padded numpy arrays, one row a step.

Input: `trajectory.Trajectory`s. Output: `Rows`. Knows no device, no
environment and no algorithm.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from envs import base
from gigpo_jax import anchors, trajectory

# What an episode's reward may be looked at by: the environment's reward, -1 for
# each invalid response, and the score told at the end.
COMPONENTS = ('reward', 'valid', 'score')


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
    next_anchors: id of the state that the step led to, as in `anchors`; -1
      where that is not known.
    success: whether the step accomplished the task.
    components: parts of the reward that algorithms weigh by themselves.
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
  next_anchors: Int[np.ndarray, ' R']
  success: Bool[np.ndarray, ' R']
  components: Float[np.ndarray, 'R K']

  @property
  def real(self) -> Bool[np.ndarray, ' R']:
    """Which rows are not padding."""
    return self.groups >= 0

  @property
  def completion_mask(self) -> Bool[np.ndarray, 'R C']:
    """Which completion positions hold a sampled token."""
    position = np.arange(self.sampler_log_probs.shape[1])
    return position < (self.lengths - self.prompt_lengths)[:, None]

  def steps_taken(self) -> tuple[np.ndarray, ...]:
    """Returns the first arguments of `advantages.gigpo`."""
    return (
      self.rewards,
      self.groups,
      self.episodes,
      self.steps,
      self.anchors,
      self.valid,
    )

  def save(self, path: pathlib.Path, **further: np.ndarray) -> None:
    """Writes the real rows, and arrays that belong to them, for `np.load`."""
    arrays = dataclasses.asdict(self) | further
    np.savez_compressed(path, **{k: x[self.real] for k, x in arrays.items()})

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
  anchor: str = 'observation',
  similarity_threshold: float = 0.9,
  anchor_history: int = 0,
  components: Sequence[str] = (),
) -> Rows:
  """Returns the steps of all episodes as rows.

  Args:
    trajectories: episodes; one that the environment broke off (`failure`)
      contributes no rows, for its return is unknown.
    max_prompt_tokens: cap of a prompt; with the next it sizes L.
    max_completion_tokens: cap of a completion; sizes C.
    row_multiple: R is padded up to a power of two times this, so that
      programs over rows are compiled for few sizes.
    anchor: what makes two states the same; one of `anchors.KINDS`.
    similarity_threshold: see `anchors.number`.
    anchor_history: states before it that have to be the same, too.
    components: of the reward, by themselves; of COMPONENTS, or a number that
      the environment tells of its steps.

  Raises:
    ValueError: if no episode holds a step, or none tells a component.
  """
  played = [
    (number, t) for number, t in enumerate(trajectories) if not t.failure
  ]
  steps = [
    (episode, number, t, step)
    for number, episode in played
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
    num_components=len(components),
  )
  states = anchors.number(
    [(t.group, _states(t)) for _, t in played],
    kind=anchor,
    threshold=similarity_threshold,
    history=anchor_history,
    ends=True,
  )
  ids = [x for seen in states for x in zip(seen, seen[1:], strict=False)]
  for r, (episode, number, t, step) in enumerate(steps):
    rows.sampler_log_probs[r, : len(step.log_probs)] = step.log_probs
    rows.groups[r] = episode.group
    rows.episodes[r] = number
    rows.steps[r] = t
    rows.anchors[r], rows.next_anchors[r] = ids[r]
    rows.rewards[r] = step.result.reward
    rows.valid[r] = step.result.valid
    rows.success[r] = step.result.success
    rows.components[r] = [_component(step.result, name) for name in components]
  for name in set(components) - set(COMPONENTS):
    if not any(name in step.result.metrics for _, _, _, step in steps):
      raise ValueError(
        f'algorithm.components={tuple(components)}: the environment tells '
        f'nothing called {name}; must be of {", ".join(COMPONENTS)}, or told'
      )
  return rows


def _states(episode: trajectory.Trajectory) -> list[str | None]:
  """Returns the states that its steps were taken in, and the last one."""
  return [
    *(step.anchor for step in episode.steps),
    episode.end[1] if episode.end else None,
  ]


def _component(result: base.StepResult, name: str) -> float:
  if name == 'reward':
    return result.reward
  if name == 'valid':
    return float(result.valid) - 1
  if name == 'score':
    return result.score or 0.0
  return result.metrics.get(name, 0.0)


def pack(
  prompts: Sequence[np.ndarray],
  completions: Sequence[np.ndarray],
  *,
  max_prompt_tokens: int,
  max_completion_tokens: int,
  row_multiple: int,
  num_components: int = 0,
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
    next_anchors=np.full(num_rows, -1, np.int32),
    success=np.zeros(num_rows, bool),
    components=np.zeros((num_rows, num_components), np.float32),
  )
  for r, (prompt, completion) in enumerate(
    zip(prompts, completions, strict=True)
  ):
    rows.prompt_lengths[r] = len(prompt)
    rows.lengths[r] = len(prompt) + len(completion)
    rows.tokens[r, : rows.lengths[r]] = np.concatenate([prompt, completion])
  return rows
