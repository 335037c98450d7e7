"""GiGPO (arXiv:2505.10978): advantages within groups and anchor groups."""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import advantages, algorithms, batch, deprecated, options

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

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns the components of the advantages."""
    return advantages.gigpo_components(
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
  parts = algorithms.old_method('parts', 'components')

  def __init_subclass__(cls):
    super().__init_subclass__()
    if 'parts' in vars(cls) and 'components' not in vars(cls):
      deprecated.warn(f'{cls.__module__}.Algorithm.parts', 'components')
      cls.components = cls.parts

  def compute_advantages(
    self, rows: batch.Rows, values=None
  ) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding, with metrics."""
    del values
    components = advantages.Components(
      *(np.asarray(x) for x in self.components(rows))
    )
    return algorithms.AlgorithmOutput(
      self.joint(components),
      advantages.signal_metrics(components, rows.groups),
      components=components,
    )

  def joint(self, components: advantages.Components) -> np.ndarray:
    """Returns the joint advantage A, Eq. (8)."""
    return advantages.combine(components, self.step_weight)
