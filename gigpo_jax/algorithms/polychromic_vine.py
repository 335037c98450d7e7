"""Polychromic objective with vines (arXiv:2509.25424): sets at many states.

A group starts with some episodes, its roots. Others branch from them at random
turns (`branching`), several at each: the vines of a state. Sets of k are formed
among the roots, which start in the first state, and at each other state among
the vines and the episode from which they branch. From there on, an episode has

    A = mean of f over the sets with it - mean of f over all sets of the state,

where f is the value of a set as in `polychromic`, with the returns and actions
from the state on. A turn has the advantage of the last such state of its
episode. A state with at most k episodes has a single set, which cannot be
compared, and does not count.

# Differs from the paper: between the states, advantages are those of the last
state instead of a critic's; all sets are enumerated. A shared turn is trained
on once.
"""

import dataclasses
from collections.abc import Iterator

import ml_collections
import numpy as np
from jaxtyping import Int

from gigpo_jax import algorithms, batch, branching, options, row_stats
from gigpo_jax.algorithms import polychromic

PRESETS = {
  # With sets of 2: 5 episodes start in the first state, 3 branch.
  'polychromic_vine': {
    'rollout.episodes_per_group': 8,
    'algorithm.root_share': 0.6,
  }
}


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if a state has too few episodes to compare sets."""
  yield from branching.conflicts(config)
  yield from polychromic.conflicts(config)
  values, members = config.algorithm, config.rollout.episodes_per_group
  k, vines, share = values.set_size, values.branches_per_turn, values.root_share
  roots = algorithms.num_roots(Algorithm(root_share=share), members)
  if k > vines:
    yield (
      f'algorithm.set_size={k}: a state has algorithm.branches_per_turn + 1 = '
      f'{vines + 1} episodes, and sets of all of them cannot be compared; must '
      f'be at most {vines}'
    )
  elif k >= roots:
    yield (
      f'algorithm.root_share={share}: {roots} of rollout.episodes_per_group='
      f'{members} episodes start in the first state, and sets of '
      f'algorithm.set_size={k} of them cannot be compared; must give at least '
      f'{k + 1}'
    )


@dataclasses.dataclass(frozen=True)
class Algorithm(polychromic.Algorithm):
  """A of `polychromic` at the last state with several vines.

  Attributes:
    root_share: share of a group's episodes that are played from the start; the
      others branch from them.
    branches_per_turn: vines of a state, the episodes that branch at each chosen
      turn.
  """

  root_share: float = options.number(
    0.5, above=0, high=1, note='1 is polychromic'
  )
  branches_per_turn: int = options.number(3, low=1)

  branch_order = staticmethod(branching.random_order)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding.

    The rows of an episode come after those of the episode from which it
    branches.
    """
    rewards = row_stats.penalized_rewards(rows, self.invalid_penalty)
    advantages = np.zeros(len(rewards))
    # Later states replace the advantages of earlier ones.
    for chains in _by_state(rows):
      if len(chains) > self.set_size:
        by_chain = polychromic.set_advantages(
          np.array([rewards[chain].sum() for chain in chains]),
          [tuple(rows.actions[chain]) for chain in chains],
          self.set_size,
        )
        for chain, advantage in zip(chains, by_chain, strict=True):
          advantages[chain] = advantage
    # A repeated turn has the advantage of the episode that sampled it.
    _, first, own = np.unique(
      rows.responses, return_index=True, return_inverse=True
    )
    return algorithms.make_output(advantages[first[own]], rows)


def _by_state(rows: batch.Rows) -> list[list[Int[np.ndarray, ' T']]]:
  """Returns, for each state, the rows of each of its episodes from there on.

  The episodes of a state are those that were sampled from there and the one
  from which they branch. Earlier states come first.
  """
  sampled: dict[int, np.ndarray] = {}  # By response: the rows after it.
  states: dict[tuple[int, int], list[np.ndarray]] = {}
  repeated = rows.repeated
  for chain in row_stats.chains(rows):
    t = int(repeated[chain].sum())
    last = rows.responses[chain[t - 1]] if t else -1 - rows.groups[chain[0]]
    own = states.setdefault((t, int(last)), [sampled[int(last)]] if t else [])
    own.append(chain[t:])
    for turn in range(t, len(chain)):
      sampled[int(rows.responses[chain[turn]])] = chain[turn + 1 :]
  return [states[key] for key in sorted(states)]
