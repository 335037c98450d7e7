"""ReMax (arXiv:2310.10505): a greedy episode as the baseline.

Each task is also played once with the most likely token at every position. The
baseline b of the task is the return of that episode, on which nothing is
trained (Algorithm 2):

    A = E - b,

where E and b are undiscounted sums of rewards, minus a penalty for each invalid
response. A group may have a single episode.

# Differs from the paper: the baseline is that of an episode of many turns, not
of one response.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import (
  algorithms,
  batch,
  continuations,
  options,
  row_stats,
  selectors,
)


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for a filter by rewards, and as `continuations` does."""
  yield from continuations.conflicts(config)
  yield from selectors.refuse_by_reward(
    config,
    'remax compares with a greedy episode, also if all rewards are equal',
  )


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = E - E of a greedy episode of the task.

  Attributes:
    invalid_penalty: subtracted from the reward of an invalid response.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = False
  greedy_start: ClassVar[bool] = True

  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row; 0 for padding and unknown baselines."""
    episodes = row_stats.episodes(rows, self.invalid_penalty)
    values = row_stats.known_state_values(rows)
    baselines = values[row_stats.first_rows(rows, episodes)]
    advantages = episodes.to_rows(np.nan_to_num(episodes.returns - baselines))
    return algorithms.make_output(advantages, rows)
