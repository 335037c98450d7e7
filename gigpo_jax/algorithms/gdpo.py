"""GDPO (arXiv:2601.05242): reward components, each normalized separately.

The name stands for Group reward-Decoupled normalization Policy Optimization.
GRPO on the sum of rewards cannot distinguish mixtures with equal sums, and the
component of the largest scale dominates.

# Differs from the paper: its code whitens over tokens; here each episode has
weight 1, however many turns it has.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from gigpo_jax import (
  advantages,
  algorithms,
  arrays,
  batch,
  options,
  reward_functions,
  row_stats,
  selectors,
)

_EPSILON = 1e-4


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for a filter by the total reward and for unused rewards."""
  yield from selectors.refuse_by_reward(
    config, 'filters by the total reward, but gdpo uses its components'
  )
  yield from reward_functions.unused(config)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = sum of w_k (E_k - mean) / (std + 1e-4), whitened over the episodes.

  Mean and std are over the episodes of a group. E_k is an episode's sum of the
  k-th reward component.

  Attributes:
    components: names of the components, from `batch.COMPONENTS` or the
      environment's metrics.
    component_weights: w; () gives each component the weight 1.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  components: tuple[str, ...] = options.texts(('reward', 'valid'))
  component_weights: tuple[float, ...] = ()

  def __post_init__(self):
    options.check(self)
    reward_functions.check_weights(self.components, self.component_weights)

  credit = algorithms.credit

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding."""
    weights = self.component_weights or (1.0,) * len(self.components)
    advantages_R = _decoupled(
      jnp.asarray(row_stats.named_components(rows, self.components)),
      arrays.ids32(rows.groups, padding=True),
      arrays.ids32(rows.episodes),
      jnp.asarray(rows.steps),
      jnp.asarray(weights, jnp.float32),
    )
    return algorithms.make_output(np.asarray(advantages_R), rows)


@jax.jit
def _decoupled(components_RK, groups, episodes, steps, weights_K):
  group_ids = arrays.segment_ids(groups)
  episode_ids = arrays.segment_ids(groups, episodes)
  all_rows = jnp.ones(len(groups), bool)
  first = jax.ops.segment_min(steps, episode_ids, len(steps))[episode_ids]
  starts = steps == first
  total = terms = jnp.zeros(len(groups))
  for k in range(components_RK.shape[1]):
    component_R = components_RK[:, k]
    sums, sizes = (
      arrays.segment_sum(x, episode_ids, all_rows)
      for x in (component_R, jnp.abs(component_R))
    )
    normalized = advantages.group_normalize(
      (sums, 0 * sums),
      group_ids,
      starts,
      norm='mean_std',
      epsilon=_EPSILON,
      tolerance=arrays.sum_tolerance(sizes, group_ids),
    )
    total += weights_K[k] * normalized
    terms += jnp.abs(weights_K[k] * normalized)
  terms = jnp.where(groups != -1, terms, 0)
  batch_id = jnp.zeros_like(group_ids)
  # Components that cancel leave rounding errors, which are no differences.
  whitened = advantages.group_normalize(
    (total, 0 * total),
    batch_id,
    starts & (groups != -1),
    norm='mean_std',
    tolerance=arrays.sum_tolerance(terms, batch_id),
  )
  # Copies the value of an episode's first row to all of its rows.
  whitened = arrays.segment_sum(whitened, episode_ids, starts)
  return jnp.where(groups != -1, whitened, 0)
