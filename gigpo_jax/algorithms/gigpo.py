"""GiGPO (arXiv:2505.10978): episodes of a group, steps of an anchor group."""

import dataclasses

import numpy as np
from jaxtyping import Float

from gigpo_jax import advantages, batch


@dataclasses.dataclass(frozen=True)
class GiGPO:
  """Advantages of both levels; attributes as of `advantages.gigpo`."""

  discount: float = 0.95
  step_weight: float = 1.0
  invalid_penalty: float = 0.1
  norm: str = 'mean_std'
  episode_stats: str = 'trajectories'
  penalty_scope: str = 'reward'
  lone_episode: str = 'zero'

  def __post_init__(self):
    advantages.check_options(
      norm=self.norm,
      episode_stats=self.episode_stats,
      penalty_scope=self.penalty_scope,
      lone_episode=self.lone_episode,
    )

  def advantages(
    self, rows: batch.Rows
  ) -> tuple[Float[np.ndarray, ' R'], dict[str, float]]:
    """Returns an advantage a row, 0 for padding, and metrics by name."""
    parts = advantages.gigpo_parts(
      rows.rewards,
      rows.groups,
      rows.episodes,
      rows.steps,
      rows.anchors,
      rows.valid,
      **dataclasses.asdict(self),
    )
    parts = advantages.Parts(*(np.asarray(part) for part in parts))
    joint = np.asarray(advantages.combine(parts, self.step_weight))
    return joint, metrics(parts, rows.groups)


make = GiGPO


def metrics(parts: advantages.Parts, groups: np.ndarray) -> dict[str, float]:
  """Returns what tells whether there is anything to learn from.

  Means over rows, but for groups_without_spread: the share of groups whose
  episodes all got the same return and so teach nothing at episode level; and
  anchor_group_size_mean: the mean over anchor groups.
  """
  real = groups != -1
  if not real.any():
    return {}
  sizes = parts.anchor_group_sizes[real]
  absolute = np.abs(parts.episode_advantage[real])
  ids = np.unique(groups[real], return_inverse=True)[1]
  largest = np.zeros(ids.max() + 1)
  np.maximum.at(largest, ids, absolute)
  return {
    'advantage/singleton_anchor_rows': float(np.mean(sizes == 1)),
    # Each group of n rows is counted n times with 1/n.
    'advantage/anchor_group_size_mean': float(len(sizes) / np.sum(1 / sizes)),
    'advantage/groups_without_spread': float(np.mean(largest == 0)),
    'advantage/episode_abs_mean': float(absolute.mean()),
    'advantage/step_abs_mean': float(np.abs(parts.step_advantage[real]).mean()),
  }
