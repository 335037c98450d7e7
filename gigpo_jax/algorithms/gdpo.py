"""GDPO: rewards of several kinds, each normalised by itself.

Group reward-Decoupled normalisation Policy Optimization (arXiv:2601.05242).
GRPO on the sum merges different mixtures of rewards, and lets the one of the
largest scale decide.

# Differs from the paper: its code whitens over tokens; here an episode counts
once, however many turns it has.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import advantages, algorithms, arrays, batch

_EPSILON = 1e-4
_SAME = 2.0**-18  # of the largest: sums of float32


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = sum of w_k (E_k - mean) / (std + 1e-4), whitened over the episodes.

  Mean and std over the episodes of a group; E_k is an episode's sum of the
  k-th component of the reward.

  Attributes:
    components: names of the components; see `batch.COMPONENTS`.
    component_weights: w; () is 1 for each.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  components: tuple[str, ...] = ('reward', 'valid')
  component_weights: tuple[float, ...] = ()

  def __post_init__(self):
    weights, names = self.component_weights, self.components
    if not names or (weights and len(weights) != len(names)):
      raise ValueError(
        f'component_weights={tuple(weights)}: components={tuple(names)} are '
        f'{len(names)}; must be at least one component, a weight for each'
      )

  def credit(self, rows: batch.Rows, values=None) -> algorithms.Credit:
    """Returns an advantage a row, 0 for padding."""
    del values
    weights = self.component_weights or (1.0,) * len(self.components)
    found = _decoupled(
      jnp.asarray(rows.components),
      arrays.ids32(rows.groups, padding=True),
      arrays.ids32(rows.episodes),
      jnp.asarray(rows.steps),
      jnp.asarray(weights, jnp.float32),
    )
    found = np.asarray(found)
    return algorithms.Credit(
      found, {'advantage/abs_mean': float(np.abs(found[rows.real]).mean())}
    )


@functools.partial(jax.jit)
def _decoupled(components_RK, groups, episodes, steps, weights_K):
  group_ids = arrays.segment_ids(groups)
  episode_ids = arrays.segment_ids(groups, episodes)
  every = jnp.ones(len(groups), bool)
  first = jax.ops.segment_min(steps, episode_ids, len(steps))[episode_ids]
  starts = steps == first
  total = jnp.zeros(len(groups))
  for k in range(components_RK.shape[1]):
    sums = arrays.segment_sum(components_RK[:, k], episode_ids, every)
    above = advantages.group_normalize(
      (sums, 0 * sums),
      group_ids,
      starts,
      norm='mean_std',
      epsilon=_EPSILON,
      tolerance=_SAME * jnp.max(jnp.abs(sums)),
    )
    total += weights_K[k] * above
  white = advantages.whiten(total, jnp.where(starts & (groups != -1), 1.0, 0.0))
  # Of an episode's first row; the others have the same.
  white = arrays.segment_sum(white, episode_ids, starts)
  return jnp.where(groups != -1, white, 0)
