"""Polychromic objective (arXiv:2509.25424): diverse sets of episodes.

Over all sets of k of the n episodes of a group, the value of a set is

    f = mean E of its episodes * share of them with distinct actions,

and the advantage of an episode is

    A = mean of f over the sets with it - mean of f over all sets.

An episode is thus better if it earns a reward and the other episodes of its set
act differently. E is the undiscounted sum of rewards, minus a penalty for each
invalid response. Two episodes are alike if they took the same actions.

# Differs from the paper: sets are formed at the start of a task only, and all
sets are enumerated. `polychromic_vine` also forms them at later states.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import ml_collections
import numpy as np
from jaxtyping import Float

from gigpo_jax import algorithms, batch, options, row_stats, selectors

_MAX_SETS = 100_000


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for a filter by rewards, and for one or too many sets.

  A group with one set has A = 0.
  """
  yield from selectors.refuse_by_reward(
    config,
    'filters by rewards, but polychromic also learns from actions that differ',
  )
  k, members = config.algorithm.set_size, config.rollout.episodes_per_group
  if not 2 <= k < members or math.comb(members, k) > _MAX_SETS:  # noqa: PLR2004
    yield (
      f'algorithm.set_size={k}: polychromic compares all sets of rollout.'
      f'episodes_per_group={members} episodes; must be at least 2 and below '
      f'that, with at most {_MAX_SETS} sets'
    )


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = mean of mean(E) * distinct / k over the sets with it - over all sets.

  Attributes:
    set_size: k, the episodes of a set.
    invalid_penalty: subtracted from the reward of an invalid response.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  set_size: int = options.number(2, low=1)
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding."""
    episodes = row_stats.episodes(rows, self.invalid_penalty)
    by_episode, chains = np.zeros(len(episodes.groups)), row_stats.chains(rows)
    for group in range(episodes.num_groups):
      own = np.flatnonzero(episodes.groups == group)
      actions = [tuple(rows.actions[chains[e]]) for e in own]
      by_episode[own] = set_advantages(
        episodes.returns[own], actions, self.set_size
      )
    return algorithms.make_output(episodes.to_rows(by_episode), rows)


def set_advantages(
  returns: Float[np.ndarray, ' N'], actions: Sequence[tuple[int, ...]], k: int
) -> Float[np.ndarray, ' N']:
  """Returns the advantage of each of N episodes that start in one state.

  Args:
    returns: return of each episode.
    actions: actions of each episode; episodes with equal ones are alike.
    k: number of episodes of a set; with fewer, all advantages are 0.
  """
  if len(returns) < k:
    return np.zeros(len(returns))
  action_ids = np.array([actions.index(own) for own in actions])
  sets = np.array([*itertools.combinations(range(len(returns)), k)])
  distinct = 1 + (np.diff(np.sort(action_ids[sets], axis=1), axis=1) > 0).sum(
    axis=1
  )
  values = returns[sets].mean(axis=1) * distinct / k
  totals = np.bincount(sets.reshape(-1), weights=np.repeat(values, k))
  # Every episode is in C(N - 1, k - 1) sets.
  return totals / math.comb(len(returns) - 1, k - 1) - values.mean()
