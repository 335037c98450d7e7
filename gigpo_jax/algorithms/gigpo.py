"""GiGPO (arXiv:2505.10978): advantages within groups and anchor groups.

A group is the N episodes of a task; an anchor group is the steps of a group
that were taken in the same state of the environment. With E the sum of an
episode's rewards and G the discounted return from a step,

    A_E = (E - mean of E in the group) / its standard deviation,       Eq. (3)
    A_S = (G - mean of G in the anchor group) / its standard deviation, Eq. (7)
    A = A_E + step_weight * A_S,                                       Eq. (8)

and every token of a step has the step's advantage A. `advantages.gigpo`
computes this for all rows (one per step) at once. `episode_weight` multiplies
A_E; the paper has no such weight. Its value 0 leaves A_S alone.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import advantages, algorithms, batch, options

PRESETS = {
  # Options that reproduce the authors' released code.
  'reference_code': {
    'algorithm.episode_stats': 'rows',
    'algorithm.penalty_scope': 'row',
    'algorithm.lone_episode': 'raw',
  },
}


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = episode_weight A_E + step_weight A_S.

  A base class of variants.

  Attributes:
    needs_values: whether the algorithm needs a critic.
    needs_group: whether it compares episodes, and needs two per group.
    default_episode_weight: weight of A_E if the option is not set.
    discount: gamma per step, for G only; 0.95 in the paper.
    step_weight: omega, the weight of A_S; 1 in the paper.
    episode_weight: weight of A_E; 0 leaves A_S alone. None: 1, or 0 for
      algorithms whose paper has no episode advantage.
    invalid_penalty: subtracted from the reward of an invalid response; 0.1 in
      the paper.
    norm: mean_std divides by the standard deviation; mean does not divide;
      leave_one_out compares with the mean of the other entries, without
      dividing; mean_abs divides by the mean absolute deviation.
    episode_stats: whether mean and deviation of E have one entry per episode
      (trajectories) or per row (rows, the authors' code).
    penalty_scope: whether the penalty changes the reward, or E and G of that
      row only (row, the authors' code).
    lone_episode: A_E of a group with one entry: zero, or E (raw, the authors'
      code).
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True
  default_episode_weight: ClassVar[float] = 1.0

  discount: float = options.number(0.95, low=0, high=1)
  step_weight: float = options.number(1.0, low=0, note='0 is GRPO')
  episode_weight: float | None = options.number(
    None, low=0, note='0 leaves the step advantage alone'
  )
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
    if self.episode_weight == 0 and self.step_weight == 0:
      raise ValueError(
        'episode_weight=0: with step_weight=0 all advantages are 0; must be '
        'above 0'
      )

  @property
  def unused(self) -> tuple[str, ...]:
    """Options of an advantage whose weight is 0."""
    of_steps = () if self.step_weight else ('discount',)
    of_episodes = () if self._weight else ('episode_stats', 'lone_episode')
    return of_steps + of_episodes

  @property
  def _weight(self) -> float:
    """Weight of A_E."""
    weight = self.episode_weight
    return self.default_episode_weight if weight is None else weight

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, A_S, E and G of each row."""
    return advantages.gigpo_components(
      *rows.steps_taken(),
      discount=self.discount,
      invalid_penalty=self.invalid_penalty,
      **self.statistics(),
    )

  def statistics(self) -> dict[str, str]:
    """Returns the options of means and stds, as in `advantages.STATISTICS`."""
    return {name: getattr(self, name) for name in advantages.STATISTICS}

  def inputs(self, rows: batch.Rows) -> advantages.Inputs:
    """Returns the rows as inputs of the functions of `advantages`."""
    return advantages.device_inputs(
      *rows.steps_taken(), self.discount, self.invalid_penalty
    )

  # Deprecated names of `compute_advantages` and `components`.
  credit = algorithms.credit
  parts = algorithms.old_method('parts', 'components')

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding, with metrics."""
    components = advantages.Components(
      *(np.asarray(x) for x in self.components(rows))
    )
    return algorithms.AlgorithmOutput(
      self.joint(components),
      advantages.signal_metrics(components, rows.groups),
      components=components,
    )

  def joint(self, components: advantages.Components) -> np.ndarray:
    """Returns A, Eq. (8)."""
    return advantages.combine(components, self.step_weight, self._weight)
