"""GiGPO (arXiv:2505.10978): episodes of a group, steps of an anchor group."""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import advantages, algorithms, batch


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Advantages of both levels; attributes as of `advantages.gigpo`.

  Others that differ in the step's part alone derive from it.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  discount: float = 0.95
  step_weight: float = 1.0
  invalid_penalty: float = 0.1
  norm: str = 'mean_std'
  episode_stats: str = 'trajectories'
  penalty_scope: str = 'reward'
  lone_episode: str = 'zero'

  def __post_init__(self):
    advantages.check_options(**self.statistics())

  def parts(self, rows: batch.Rows) -> advantages.Parts:
    """Returns what the advantages are made of."""
    return advantages.gigpo_parts(
      *rows.steps_taken(),
      discount=self.discount,
      invalid_penalty=self.invalid_penalty,
      **self.statistics(),
    )

  def statistics(self) -> dict[str, str]:
    """Returns the options that are names."""
    return {
      'norm': self.norm,
      'episode_stats': self.episode_stats,
      'penalty_scope': self.penalty_scope,
      'lone_episode': self.lone_episode,
    }

  def inputs(self, rows: batch.Rows) -> tuple:
    """Returns what `advantages.describe` takes."""
    return advantages.inputs(
      *rows.steps_taken(), self.discount, self.invalid_penalty
    )

  def credit(self, rows: batch.Rows, values=None) -> algorithms.Credit:
    """Returns an advantage a row, 0 for padding, and metrics by name."""
    del values
    parts = advantages.Parts(*(np.asarray(part) for part in self.parts(rows)))
    return algorithms.Credit(
      self.joint(parts), metrics(parts, rows.groups), parts=parts
    )

  def joint(self, parts: advantages.Parts) -> np.ndarray:
    """Returns A, Eq. (8)."""
    return advantages.combine(parts, self.step_weight)


def diagnose(rows: batch.Rows, **options) -> dict[str, float]:
  """Returns metrics of what GiGPO would have seen in any algorithm's rows."""
  return Algorithm(**options).credit(rows).metrics


def metrics(parts: advantages.Parts, groups: np.ndarray) -> dict[str, float]:
  """Returns what tells whether there is anything to learn from.

  Means over rows, but for groups_without_spread: the share of groups whose
  episodes all got the same return and so teach nothing at episode level;
  anchor_group_size_mean: the mean over anchor groups; and correlation, of the
  two advantages.
  """
  real = groups != -1
  if not real.any():
    return {}
  sizes = parts.anchor_group_sizes[real]
  episode, step = parts.episode_advantage[real], parts.step_advantage[real]
  ids = np.unique(groups[real], return_inverse=True)[1]
  largest = np.zeros(ids.max() + 1)
  np.maximum.at(largest, ids, np.abs(episode))
  # Each group of n rows is counted n times with 1/n.
  number = np.sum(1 / sizes)
  found = {
    'advantage/singleton_anchor_rows': np.mean(sizes == 1),
    'advantage/anchor_group_size_mean': len(sizes) / number,
    'advantage/groups_without_spread': np.mean(largest == 0),
    'advantage/episode_abs_mean': np.abs(episode).mean(),
    'advantage/step_abs_mean': np.abs(step).mean(),
    'advantage/episode_std': episode.std(),
    'advantage/step_std': step.std(),
  }
  for least, most in ((1, 1), (2, 3), (4, 7), (8, None)):
    inside = (sizes >= least) & (sizes <= (most or np.inf))
    name = f'{least}' if least == most else f'{least}_to_{most}'
    name = name if most else f'{least}_and_more'
    share = np.sum(inside / sizes) / number
    found[f'advantage/anchor_groups_of_{name}'] = share
  if episode.std() > 0 and step.std() > 0:
    found['advantage/correlation'] = np.corrcoef(episode, step)[0, 1]
  return {name: float(value) for name, value in found.items()}
