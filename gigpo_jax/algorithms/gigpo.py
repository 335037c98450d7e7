"""GiGPO (arXiv:2505.10978): advantages within groups and anchor groups."""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import advantages, algorithms, batch, options

PRESETS = {
  # Readings of the released code.
  'reference_code': {
    'algorithm.episode_stats': 'rows',
    'algorithm.penalty_scope': 'row',
    'algorithm.lone_episode': 'raw',
  },
}


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = A_E + step_weight * A_S; attributes as for `advantages.gigpo`.

  Algorithms that change only A_S are subclasses.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  discount: float = options.number(0.95, low=0, high=1)
  step_weight: float = options.number(1.0, low=0, note='0 is GRPO')
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)
  norm: str = options.choice('mean_std', advantages.NORMS)
  episode_stats: str = options.choice(
    'trajectories', advantages.OPTIONS['episode_stats']
  )
  penalty_scope: str = options.choice(
    'reward', advantages.OPTIONS['penalty_scope']
  )
  lone_episode: str = options.choice('zero', advantages.OPTIONS['lone_episode'])

  def __post_init__(self):
    options.check(self)
    advantages.check_options(**self.statistics())

  def parts(self, rows: batch.Rows) -> advantages.Parts:
    """Returns the components of the advantages."""
    return advantages.gigpo_parts(
      *rows.steps_taken(),
      discount=self.discount,
      invalid_penalty=self.invalid_penalty,
      **self.statistics(),
    )

  def statistics(self) -> dict[str, str]:
    """Returns the options whose values are names."""
    return {
      'norm': self.norm,
      'episode_stats': self.episode_stats,
      'penalty_scope': self.penalty_scope,
      'lone_episode': self.lone_episode,
    }

  def inputs(self, rows: batch.Rows) -> advantages.Inputs:
    """Returns the input of `advantages.segment_rows`."""
    return advantages.device_inputs(
      *rows.steps_taken(), self.discount, self.invalid_penalty
    )

  credit = algorithms.credit

  def compute_advantages(
    self, rows: batch.Rows, values=None
  ) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding, with metrics."""
    del values
    parts = advantages.Parts(*(np.asarray(part) for part in self.parts(rows)))
    return algorithms.AlgorithmOutput(
      self.joint(parts), metrics(parts, rows.groups), parts=parts
    )

  def joint(self, parts: advantages.Parts) -> np.ndarray:
    """Returns the joint advantage A, Eq. (8)."""
    return advantages.combine(parts, self.step_weight)


def diagnose(rows: batch.Rows, **kwargs) -> dict[str, float]:
  """Returns GiGPO's metrics for the rows of any algorithm."""
  return Algorithm(**kwargs).compute_advantages(rows).metrics


def metrics(parts: advantages.Parts, groups: np.ndarray) -> dict[str, float]:
  """Returns metrics of the learning signal; most are means over rows.

  The others are groups_without_spread, the share of zero-variance groups, which
  have no signal at episode level; anchor_group_size_mean, a mean over anchor
  groups; anchor_groups_of_..., shares of anchor groups by size; standard
  deviations; and the correlation of A_E and A_S.
  """
  real = groups != -1
  if not real.any():
    return {}
  sizes = parts.anchor_group_sizes[real]
  episode, step = parts.episode_advantage[real], parts.step_advantage[real]
  ids = np.unique(groups[real], return_inverse=True)[1]
  largest = np.zeros(ids.max() + 1)
  np.maximum.at(largest, ids, np.abs(episode))
  # An anchor group of n rows is summed n times with weight 1/n.
  num_groups = np.sum(1 / sizes)
  values = {
    'advantage/singleton_anchor_rows': np.mean(sizes == 1),
    'advantage/anchor_group_size_mean': len(sizes) / num_groups,
    'advantage/groups_without_spread': np.mean(largest == 0),
    'advantage/episode_abs_mean': np.abs(episode).mean(),
    'advantage/step_abs_mean': np.abs(step).mean(),
    'advantage/episode_std': episode.std(),
    'advantage/step_std': step.std(),
  }
  for low, high in ((1, 1), (2, 3), (4, 7), (8, None)):
    inside = (sizes >= low) & (sizes <= (high or np.inf))
    name = f'{low}' if low == high else f'{low}_to_{high}'
    name = name if high else f'{low}_and_more'
    share = np.sum(inside / sizes) / num_groups
    values[f'advantage/anchor_groups_of_{name}'] = share
  if episode.std() > 0 and step.std() > 0:
    values['advantage/correlation'] = np.corrcoef(episode, step)[0, 1]
  return {name: float(value) for name, value in values.items()}
