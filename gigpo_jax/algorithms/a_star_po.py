"""A*-PO (arXiv:2505.20686): the advantage over the best regularized policy.

With a penalty beta KL(pi || ref) on the reward, the best policy has the value

    V* = beta log mean exp(E / beta)                          (Eq. 3)

at the start of a task, where the mean is over episodes of the reference policy
and E is the undiscounted sum of an episode's rewards, minus a penalty for each
invalid response. The advantage of every row is E - V*, and the loss
`row_regression` fits the log-ratios to it.

# Differs from the paper: V* is the mean over the group's own episodes, of the
current policy, not over 8 of the reference policy; a row is a turn of an
episode, with the return of the whole episode.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import algorithms, batch, options, row_stats

LOSS = {'name': 'row_regression', 'aggregation': 'sequence_mean'}

PRESETS = {'a_star_po': {f'loss.{name}': x for name, x in LOSS.items()}}


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option of the loss with an unsupported value."""
  for name, needed in LOSS.items():
    if config.loss[name] != needed:
      yield (
        f'loss.{name}={config.loss[name]}: a_star_po is a regression of whole '
        f'rows; must be {needed}'
      )


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = E - beta log mean exp(E / beta) of the group.

  Attributes:
    value_temperature: beta, the temperature of the best value, in reward units;
      0.5 in the released code.
    invalid_penalty: subtracted from the reward of an invalid response.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  value_temperature: float = options.number(0.5, above=0)
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding."""
    episodes = row_stats.episodes(rows, self.invalid_penalty)
    scaled = episodes.returns / self.value_temperature
    largest = np.full(episodes.num_groups, -np.inf)
    np.maximum.at(largest, episodes.groups, scaled)
    means = episodes.group_means(np.exp(scaled - largest[episodes.groups]))
    best = self.value_temperature * (np.log(means) + largest)
    advantages = episodes.to_rows(episodes.returns - best[episodes.groups])
    return algorithms.make_output(advantages, rows)
