"""Values of states: mean returns of continuations, `algorithm.continuations`.

To reach the state before turn t of an episode again, the first t responses are
replayed. From there the policy plays K episodes to their end, with random
numbers of their own. These are the continuations of the state (VinePPO,
arXiv:2410.01679, Section 4). They are not trained on.

Episodes of a task that begin with the same responses are in the same state,
with the same prompt, and share its continuations. Equal anchors are not enough
for this: prompts may contain history, and the turns that remain may differ.
Random events of an environment depend on the task alone, so all continuations
of a state meet the same ones.

An algorithm may instead compare with one greedy episode from the start of each
task (ReMax, arXiv:2310.10505), whose undiscounted return is then its value.

Input and output: trajectories. This module does not use devices.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import ml_collections
import numpy as np
from jaxtyping import Float

from gigpo_jax import (
  branching,
  group_filter,
  reward_shaping,
  rollout,
  trajectory,
)


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option that continuations do not support."""
  yield from branching.conflicts(config)
  yield from reward_shaping.refuse_later(
    config,
    f'the further episodes of {config.algorithm.name} have the rewards of the '
    'environment only',
  )


@dataclasses.dataclass(frozen=True, eq=False)
class States:
  """The S distinct states in which the turns of episodes were taken.

  Attributes:
    starts: for each state, the turns that lead to it, as a paused episode.
    indices: for each episode, the state before each of its first turns; empty
      for an episode that failed.
  """

  starts: list[trajectory.Trajectory]
  indices: list[list[int]]


def find_states(
  episodes: Sequence[trajectory.Trajectory], *, only_starts: bool = False
) -> States:
  """Returns the states of episodes, or only those of their first turns."""
  starts: list[trajectory.Trajectory] = []
  known: dict[tuple, int] = {}
  indices = []
  for episode in episodes:
    states = []
    turns = min(len(episode.steps), 1) if only_starts else len(episode.steps)
    for t in range(0 if episode.failure else turns):
      responses = tuple(step.response for step in episode.steps[:t])
      state = known.setdefault((episode.group, responses), len(starts))
      if state == len(starts):
        start = {'steps': episode.steps[:t], 'num_repeated': t}
        starts.append(dataclasses.replace(episode, **start, is_paused=True))
      states.append(state)
    indices.append(states)
  return States(starts, indices)


def make_batch(
  states: States, count: int, like: rollout.EpisodeBatch
) -> rollout.EpisodeBatch:
  """Returns the continuations of states for a runner, ordered by state.

  The random stream of a token is a function of the seed, the iteration, the
  task, the member and turn of the state, the continuation and the token. Groups
  of the same task, which refills may draw again, have different streams.

  Args:
    states: the states.
    count: K, the continuations of each state.
    like: the batch in which their episodes were played.
  """
  counts: collections.Counter[int] = collections.Counter()
  earlier = {}  # By group: the number of earlier groups of its task.
  for group, task in dict.fromkeys(
    (s.group, s.task.index) for s in states.starts
  ):
    earlier[group] = counts[task]
    counts[task] += 1
  turns = 1 + max((len(start.steps) for start in states.starts), default=0)
  paused = []
  for start in states.starts:
    turn = earlier[start.group] * turns + len(start.steps)
    first = (turn * like.episodes_per_group + start.member) * count
    paused += [
      dataclasses.replace(start, member=first + k) for k in range(count)
    ]
  stream = rollout.CONTINUATION, like.stream[1]
  return dataclasses.replace(like, tasks=(), stream=stream, paused=paused)


def returns(
  states: States,
  played: Sequence[trajectory.Trajectory],
  discount: float,
  invalid_penalty: float,
) -> Float[np.ndarray, 'S K']:
  """Returns the return of each continuation from its state on, float64.

  NaN where the environment failed.

  Args:
    states: the states.
    played: the continuations, in the order of `make_batch`.
    discount: discount per turn.
    invalid_penalty: subtracted from the reward of an invalid response.
  """
  count = len(played) // max(len(states.starts), 1)
  totals = np.full((len(states.starts), count), np.nan)
  for n, episode in enumerate(played):
    if episode.failure:
      continue
    state, k = divmod(n, count)
    results = [s.result for s in episode.steps[episode.num_repeated :]]
    rewards = [r.reward - invalid_penalty * (not r.valid) for r in results]
    totals[state, k] = np.dot(rewards, discount ** np.arange(len(rewards)))
  return totals


def mean_returns(
  totals: Float[np.ndarray, 'S K'],
) -> Float[np.ndarray, ' S']:
  """Returns the value of each state; NaN if all of its continuations failed."""
  known = np.isfinite(totals)
  counts = known.sum(axis=1)
  sums = np.where(known, totals, 0).sum(axis=1)
  return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def with_values(
  episodes: Sequence[trajectory.Trajectory],
  states: States,
  values: Float[np.ndarray, ' S'],
) -> list[trajectory.Trajectory]:
  """Returns the episodes with the values of the states before their turns."""
  changed = []
  for episode, indices in zip(episodes, states.indices, strict=True):
    if not episode.failure:
      known = tuple(
        dataclasses.replace(step, state_value=float(values[state]))
        for step, state in zip(episode.steps, indices, strict=False)
      )
      steps = known + episode.steps[len(known) :]
      episode = dataclasses.replace(episode, steps=steps)
    changed.append(episode)
  return changed


def add_values(
  groups: group_filter.CollectedGroups,
  states: States,
  played: Sequence[trajectory.Trajectory],
  discount: float,
  invalid_penalty: float,
) -> tuple[group_filter.CollectedGroups, dict[str, float]]:
  """Returns groups with values and costs, and metrics 'continuations/...'.

  Args:
    groups: the episodes of an iteration.
    states: the states of those that are kept.
    played: their continuations.
    discount: discount per turn.
    invalid_penalty: subtracted from the reward of an invalid response.
  """
  totals = returns(states, played, discount, invalid_penalty)
  values, cost = mean_returns(totals), group_filter.SampleCounts.of(played)
  cost = dataclasses.replace(cost, episodes=0)
  groups = dataclasses.replace(
    groups, kept=with_values(groups.kept, states, values), further=cost
  )
  known = [row[np.isfinite(row)] for row in totals]
  variances = [row.var(ddof=1) / len(row) for row in known if len(row) > 1]
  metrics = {
    'states': len(totals),
    'env_steps': cost.env_steps,
    'tokens': cost.tokens,
    'value_mean': np.nanmean(values) if np.isfinite(values).any() else 0.0,
    'standard_error': np.sqrt(np.mean(variances)) if variances else 0.0,
  }
  return groups, {f'continuations/{k}': float(v) for k, v in metrics.items()}
