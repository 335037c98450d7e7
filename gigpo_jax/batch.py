"""Conversion of episodes to rows: padded numpy arrays with one row per step.

Input: a list of `trajectory.Trajectory`. Output: `Rows`. This module depends on
no device, environment or algorithm.
"""

import dataclasses
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from envs import base
from gigpo_jax import anchors, forced_prefixes, options, trajectory

# Reward components of every environment: the reward, -1 for each invalid
# response, and the score reported with the last step.
COMPONENTS = ('reward', 'valid', 'score')

# With several agents, a step's reward is that of the team until the agent's
# next step, or the agent's own until then. A team shares success and score.
AGENT_REWARDS = ('team', 'own')


@dataclasses.dataclass(frozen=True)
class Rows:
  """The training examples of an iteration; R includes padding rows.

  Attributes:
    tokens: prompt and completion, contiguous from position 0, padded right.
    prompt_lengths: number of prompt tokens; 0 for padding rows.
    lengths: number of prompt and completion tokens; 0 for padding rows.
    sampler_log_probs: log-probs of the completion tokens as computed by the
      sampler; 0 past the completion.
    groups: group of the row in [0, G); -1 marks padding. With several agents,
      each agent of a group is a group of its own.
    episodes: index of the episode in the iteration.
    steps: index of the turn within the episode, from 0.
    anchors: dense id of the state in which the turn was taken; equal for equal
      anchors of a group.
    rewards: raw reward of the step, float64: equal returns stay equal.
    valid: whether the response had the required form.
    next_anchors: id of the state after the step, as in `anchors`; -1 if that
      state is unknown.
    success: whether the step accomplished the task; in a team, the last step of
      each agent did if the episode did.
    components: reward components that an algorithm weighs separately.
    actions: dense id of the action; equal for equal actions of a group.
    ages: iterations since the row was sampled.
    truncated: whether the response reached the token limit before a stop token.
    state_values: mean return of episodes played from the state in which the
      turn was taken (`continuations`), or the probability of the answer there
      (`answer_scores`); NaN if unknown.
    agents: index of the agent that took the turn, in the order of
      `lora.agents`, otherwise in alphabetical order.
    responses: dense id of the sampled response. A branch (`branching`) has the
      responses of the turns that it repeats; all others are distinct.
    prefixes: index of the prefix of `rollout.prefixes` with which the response
      begins; -1 for none.
    forced: whether that prefix was forced.
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
  actions: Int[np.ndarray, ' R']
  ages: Int[np.ndarray, ' R']
  truncated: Bool[np.ndarray, ' R']
  state_values: Float[np.ndarray, ' R']
  agents: Int[np.ndarray, ' R']
  responses: Int[np.ndarray, ' R']
  prefixes: Int[np.ndarray, ' R']
  forced: Bool[np.ndarray, ' R']

  @property
  def real(self) -> Bool[np.ndarray, ' R']:
    """False for padding rows."""
    return self.groups >= 0

  @property
  def repeated(self) -> Bool[np.ndarray, ' R']:
    """True for rows whose response is that of an earlier row."""
    mask = np.ones(len(self.responses), bool)
    mask[np.unique(self.responses, return_index=True)[1]] = False
    return mask

  @property
  def completion_mask(self) -> Bool[np.ndarray, 'R C']:
    """True where a completion position holds a sampled token."""
    position = np.arange(self.sampler_log_probs.shape[1])
    return position < (self.lengths - self.prompt_lengths)[:, None]

  @property
  def prompt_mask(self) -> Bool[np.ndarray, 'R L-1']:
    """True for the prompt's tokens after the first, from the second token."""
    positions = np.arange(self.tokens.shape[1] - 1)
    return positions < self.prompt_lengths[:, None] - 1

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

  def checksum(self) -> int:
    """Returns a number that depends on the tokens and the rewards."""
    checksum = 0
    arrays = self.tokens, self.prompt_lengths, self.lengths, self.rewards
    for array in arrays:
      checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    return checksum

  def save(self, path: pathlib.Path, **further: np.ndarray) -> None:
    """Writes the real rows, and further arrays over rows, for `np.load`."""
    arrays = vars(self) | further
    np.savez_compressed(path, **{k: x[self.real] for k, x in arrays.items()})

  def take(self, index: np.ndarray | slice) -> 'Rows':
    """Returns the rows of the given indices, in that order."""
    return Rows(**{name: x[index] for name, x in vars(self).items()})


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
  agent_rewards: str = 'team',
  prefixes: Sequence[str] = (),
  agents: Sequence[str] = (),
  seed: Sequence[int] = (0,),
) -> Rows:
  """Returns the steps of all episodes as rows.

  Args:
    trajectories: the episodes; an episode with a `failure` contributes no
      rows, because its return is unknown.
    max_prompt_tokens: limit of a prompt; P in L = P + C.
    max_completion_tokens: limit of a completion; C.
    row_multiple: R is padded up to a power of two times this, so that
      programs over rows are compiled for few sizes.
    anchor: how states are compared; one of `anchors.ANCHORS`.
    similarity_threshold: see `anchors.assign_ids`.
    anchor_history: number of preceding states that must also be equal.
    components: names of reward components, from COMPONENTS or from the step
      metrics of the environment.
    agent_rewards: one of AGENT_REWARDS.
    prefixes: texts with which responses may begin; see `Rows.prefixes`.
    agents: names of the agents that have adapters of their own; (): none has.
    seed: for anchor='shuffled': seed of the run and iteration.

  Raises:
    ValueError: if no episode holds a step, no step reports a component, a row
      exceeds a limit, or `anchor` or `agent_rewards` is unknown.
  """
  options.check_choice('agent_rewards', agent_rewards, AGENT_REWARDS)
  complete = {n: t for n, t in enumerate(trajectories) if not t.failure}
  episodes = list(complete.values())
  turns = [
    (episode, index, t, step)
    for index, episode in complete.items()
    for t, step in enumerate(_rewarded_steps(episode, agent_rewards))
  ]
  steps = [step for *_, step in turns]
  if not steps:
    reason = next((t.failure for t in trajectories if t.failure), 'none given')
    raise ValueError(f'all episodes failed, nothing to train on: {reason}')
  rows = pack(
    [step.prompt_ids for step in steps],
    [step.completion_ids for step in steps],
    max_prompt_tokens=max_prompt_tokens,
    max_completion_tokens=max_completion_tokens,
    row_multiple=row_multiple,
    num_components=len(components),
  )
  transitions = _transitions(
    episodes,
    anchor=anchor,
    threshold=similarity_threshold,
    history=anchor_history,
    seed=seed,
  )
  _set_agents(rows, episodes, agents)
  rows.responses[: len(steps)] = _response_ids(episodes)
  action_ids: dict[tuple[int, str], int] = {}
  for r, (episode, index, t, step) in enumerate(turns):
    action = episode.group, _canonical(step.result.action)
    rows.actions[r] = action_ids.setdefault(action, len(action_ids))
    rows.episodes[r], rows.steps[r] = index, t
    rows.anchors[r], rows.next_anchors[r] = transitions[r]
    rows.prefixes[r] = forced_prefixes.find(step.response, prefixes)
    _fill_row(rows, r, step, components)
  _check_components(components, [step.result for step in steps])
  return rows


def _set_agents(
  rows: Rows,
  episodes: Sequence[trajectory.Trajectory],
  agents: Sequence[str],
) -> None:
  """Writes agents and groups; a group with several agents becomes several."""
  pairs = [(t.group, agent) for t in episodes for agent in t.agents]
  names = list(agents) or sorted({agent for _, agent in pairs})
  rows.agents[: len(pairs)] = [names.index(agent) for _, agent in pairs]
  ids = {pair: n for n, pair in enumerate(dict.fromkeys(pairs))}
  rows.groups[: len(pairs)] = [
    ids[pair] if len(names) > 1 else pair[0] for pair in pairs
  ]


def _response_ids(episodes: Sequence[trajectory.Trajectory]) -> list[int]:
  """Returns the id of the response of each step, equal for repeated ones.

  Args:
    episodes: each after its parent.
  """
  by_member: dict[tuple[int, int | None], list[int]] = {}
  all_ids, count = [], 0
  for episode in episodes:
    parent = by_member.get((episode.group, episode.parent), [])
    ids = parent[: episode.num_repeated]
    num_new = len(episode.steps) - len(ids)
    ids = [*ids, *range(count, count + num_new)]
    count += num_new
    by_member[episode.group, episode.member] = ids
    all_ids += ids
  return all_ids


def _rewarded_steps(
  episode: trajectory.Trajectory, agent_rewards: str
) -> tuple[trajectory.Step, ...]:
  """Returns the steps with the rewards of their agents; see AGENT_REWARDS.

  In a team, so are the step metrics, which may be components of the reward, and
  the last step of each agent has the success and the score of the episode.
  """
  # An agent that did not act may have a reward, too.
  is_shared = any(step.result.other_rewards for step in episode.steps)
  if len(set(episode.agents)) <= 1 and not is_shared:
    return episode.steps
  is_team = agent_rewards == 'team'
  rewards = episode.team_rewards if is_team else episode.own_rewards
  changes: list[dict[str, Any]] = [{'reward': reward} for reward in rewards]
  if is_team:
    for change, shared in zip(changes, _shared_metrics(episode), strict=True):
      change['metrics'] = shared
    end = episode.steps[-1].result
    for t in {agent: t for t, agent in enumerate(episode.agents)}.values():
      changes[t] |= {'success': end.success, 'score': end.score}
  return tuple(
    dataclasses.replace(step, result=dataclasses.replace(step.result, **change))
    for step, change in zip(episode.steps, changes, strict=True)
  )


def _shared_metrics(episode: trajectory.Trajectory) -> list[dict[str, float]]:
  """Returns, for each step, sums of metrics before its agent's next step."""
  metrics = [step.result.metrics for step in episode.steps]
  shared: list[dict[str, float]] = [{} for _ in metrics]
  for name in sorted({name for own in metrics for name in own}):
    sums = episode.until_next_turn([own.get(name, 0.0) for own in metrics])
    for result, total in zip(shared, sums, strict=True):
      result[name] = total
  return shared


def _transitions(
  episodes: Sequence[trajectory.Trajectory], **anchor_options: Any
) -> list[tuple[int, int]]:
  """Returns the ids of the states before and after each step."""
  states = anchors.assign_ids(
    [(t.group, _states(t)) for t in episodes],
    has_final_state=True,
    agents=[_state_agents(t) for t in episodes],
    **anchor_options,
  )
  return [pair for ids in states for pair in zip(ids, ids[1:], strict=False)]


def _states(episode: trajectory.Trajectory) -> list[str | None]:
  """Returns the state before each step, and the state after the last step."""
  return [
    *(step.anchor for step in episode.steps),
    episode.end[1] if episode.end else None,
  ]


def _state_agents(episode: trajectory.Trajectory) -> list[str]:
  """Returns the agent that acts in each state; the last one acted before."""
  end = episode.steps[-1].result.observation if episode.steps else None
  agents = episode.agents
  return [*agents, end.agent if end else ''.join(agents[-1:])]


def _canonical(action: str) -> str:
  """Returns an action without differences in case and white space."""
  return ' '.join(action.lower().split())


def _fill_row(
  rows: Rows, r: int, step: trajectory.Step, components: Sequence[str]
) -> None:
  """Writes a step's log-probs and result into row r."""
  rows.sampler_log_probs[r, : len(step.log_probs)] = step.log_probs
  rows.rewards[r] = step.result.reward
  rows.valid[r] = step.result.valid
  rows.success[r] = step.result.success
  rows.ages[r] = step.age
  rows.truncated[r] = step.truncated
  rows.forced[r] = step.forced_tokens > 0
  if step.state_value is not None:
    rows.state_values[r] = step.state_value
  rows.components[r] = [_component(step.result, name) for name in components]


def _check_components(
  components: Sequence[str], results: Sequence[base.StepResult]
) -> None:
  """Raises ValueError if no step reports a component.

  An environment may report it only at its end, which rollout.horizon cuts off.
  """
  is_known = any(result.done for result in results)
  for name in set(components) - set(COMPONENTS):
    if is_known and not any(name in result.metrics for result in results):
      raise ValueError(
        f'algorithm.components={tuple(components)}: the environment reports no '
        f'metric {name}; must be of {", ".join(COMPONENTS)}, or a step metric'
      )


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
  """Returns prompts and completions as rows, each its own group and episode.

  R is the number of pairs padded up to a power of two times `row_multiple`.
  All fields other than the tokens and lengths hold neutral values.

  Raises:
    ValueError: in one line, if a prompt or a completion is too long.
  """
  for name, limit, sequences in (
    ('max_prompt_tokens', max_prompt_tokens, prompts),
    ('max_completion_tokens', max_completion_tokens, completions),
  ):
    if (longest := max(map(len, sequences), default=0)) > limit:
      raise ValueError(f'{name}={limit}: a row has {longest}; must be no less')
  num_rows = row_multiple
  while num_rows < len(prompts):
    num_rows *= 2
  indices = np.arange(num_rows, dtype=np.int32)
  rows = Rows(
    tokens=np.zeros(
      (num_rows, max_prompt_tokens + max_completion_tokens), np.int32
    ),
    prompt_lengths=np.zeros(num_rows, np.int32),
    lengths=np.zeros(num_rows, np.int32),
    sampler_log_probs=np.zeros((num_rows, max_completion_tokens), np.float32),
    groups=np.where(indices < len(prompts), indices, -1),
    episodes=indices,
    steps=np.zeros(num_rows, np.int32),
    anchors=np.zeros(num_rows, np.int32),
    rewards=np.zeros(num_rows),
    valid=np.ones(num_rows, bool),
    next_anchors=np.full(num_rows, -1, np.int32),
    success=np.zeros(num_rows, bool),
    components=np.zeros((num_rows, num_components)),
    actions=np.zeros(num_rows, np.int32),
    ages=np.zeros(num_rows, np.int32),
    truncated=np.zeros(num_rows, bool),
    state_values=np.full(num_rows, np.nan),
    agents=np.zeros(num_rows, np.int32),
    responses=np.arange(num_rows, dtype=np.int32),
    prefixes=np.full(num_rows, -1, np.int32),
    forced=np.zeros(num_rows, bool),
  )
  for r, (prompt, completion) in enumerate(
    zip(prompts, completions, strict=True)
  ):
    rows.prompt_lengths[r] = len(prompt)
    rows.lengths[r] = len(prompt) + len(completion)
    rows.tokens[r, : rows.lengths[r]] = np.concatenate([prompt, completion])
  return rows
