"""RiskPO (arXiv:2510.00911): advantages from the lower tail of returns.

Tasks are bundled, and S is the sum of the returns of the k-th remaining
episodes of a bundle's tasks; if some failed, the last ones of the others have A
= 0. Two quantiles q_lo and q_hi of S, at the levels a_lo and a_hi, are tracked
over the run. Low sums are weighted more than high ones:

    RVaR = (relu(S - q_lo) - relu(S - q_hi) + q_lo - q_hi) / (a_hi - a_lo)
    CVaR = -relu(q_lo - S) / a_lo
    A = (w CVaR + RVaR) / (w + 1) / std(S),

where std is over the sums of a bundle (ddof 1), and 1 for a single sum. A sum
above q_hi has A = 0, so the policy learns from tasks that it does not solve
yet. After each iteration, q += rate (a - share of S below q). The quantiles
start as those of the first iteration. They are the algorithm's state, which
checkpoints save.

# Differs from the released code: equal sums of a bundle have A = 0 instead of a
division by 1e-6; its configs also divide by the std of a task's returns
(`credit_assign_mode=std`) or divide A among the tasks (`sum-mean`); returns
include the penalty for invalid responses.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

import ml_collections
import numpy as np
from jaxtyping import Float, Int

from gigpo_jax import algorithms, batch, options, row_stats, trajectory

_LOW, _HIGH = 'state/quantile_low', 'state/quantile_high'


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the groups do not fill bundles."""
  size, groups = config.algorithm.bundle_tasks, config.rollout.groups
  if groups % size:
    yield (
      f'algorithm.bundle_tasks={size}: rollout.groups={groups} tasks do not '
      'fill bundles; must divide it'
    )
  if config.rollout.carry_over > 0:
    yield (
      f'rollout.carry_over={config.rollout.carry_over}: the groups that end in '
      'an iteration do not fill bundles; must be 0'
    )
  if config.filter.drop_zero_variance:
    yield (
      'filter.drop_zero_variance=True: the groups that it keeps do not fill '
      'bundles; must be False'
    )


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = (w CVaR + RVaR) / (w + 1) / std of a bundle's sums of returns.

  Attributes:
    bundle_tasks: tasks of a bundle; 5 in the released code.
    tail_weight: w, the weight of the lower tail; 1.5 in the released code.
    quantile_levels: a_lo and a_hi, the levels of the tracked quantiles; the
      released code has a_hi = 0.8 or 0.9.
    quantile_rate: rate of the quantiles, in reward units; 0.1 in the released
      code.
    invalid_penalty: subtracted from the reward of an invalid response.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = False
  is_stateful: ClassVar[bool] = True

  bundle_tasks: int = options.number(2, low=1)
  tail_weight: float = options.number(1.5, low=0)
  quantile_levels: tuple[float, float] = options.field(
    (0.2, 0.8),
    lambda levels: len(levels) == 2 and 0 < levels[0] < levels[1] <= 1,  # noqa: PLR2004
    'must be two increasing numbers above 0, up to 1',
  )
  quantile_rate: float = options.number(0.1, low=0)
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  def compute_advantages(
    self, rows: batch.Rows, state: Mapping[str, float] = {}
  ) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row; 0 for padding and incomplete sums."""
    episodes = row_stats.episodes(rows, self.invalid_penalty)
    sums, bundles, own = self._sums(
      episodes, _bundles(rows, episodes, self.bundle_tasks)
    )
    advantages, metrics = np.zeros(len(own)), dict(state)
    if len(sums):
      low, high = np.quantile(sums, self.quantile_levels)
      quantiles = np.array([state.get(_LOW, low), state.get(_HIGH, high)])
      by_sum = self.risk(sums, quantiles) / _deviations(sums, bundles)
      advantages[own >= 0] = by_sum[own[own >= 0]]
      below = np.mean(sums[:, None] < quantiles, axis=0)
      levels = np.array(self.quantile_levels)
      quantiles += self.quantile_rate * (levels - below)
      metrics = dict(zip((_LOW, _HIGH), quantiles.tolist(), strict=True))
    return algorithms.make_output(episodes.to_rows(advantages), rows, metrics)

  def risk(
    self, sums: Float[np.ndarray, ' S'], quantiles: Float[np.ndarray, ' 2']
  ) -> Float[np.ndarray, ' S']:
    """Returns (w CVaR + RVaR) / (w + 1) of sums of returns."""
    (low, high), (a_low, a_high) = quantiles, self.quantile_levels
    middle = np.maximum(sums - low, 0) - np.maximum(sums - high, 0)
    rvar = (middle + low - high) / (a_high - a_low)
    cvar = -np.maximum(low - sums, 0) / a_low
    return (self.tail_weight * cvar + rvar) / (self.tail_weight + 1)

  def _sums(
    self, episodes: row_stats.Episodes, bundles: Int[np.ndarray, ' G']
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns complete sums, their bundles, and each episode's sum or -1."""
    # Episodes are ordered by group.
    sizes = np.bincount(episodes.groups)
    starts = np.cumsum(sizes) - sizes
    member = np.arange(len(episodes.groups)) - starts[episodes.groups]
    key = bundles[episodes.groups] * sizes.max() + member
    counts = np.bincount(key)
    complete = np.flatnonzero(counts == self.bundle_tasks)
    totals = np.bincount(key, weights=episodes.returns)[complete]
    sum_index = np.full(len(counts), -1)
    sum_index[complete] = np.arange(len(complete))
    return totals, complete // sizes.max(), sum_index[key]


def _deviations(
  sums: Float[np.ndarray, ' S'], bundles: Int[np.ndarray, ' S']
) -> Float[np.ndarray, ' S']:
  """Returns the deviation of each sum's bundle; inf if its sums are equal."""
  result = np.ones(len(sums))
  for bundle in np.unique(bundles):
    own = bundles == bundle
    if own.sum() > 1:
      is_equal = trajectory.are_equal(sums[own])
      result[own] = np.inf if is_equal else np.std(sums[own], ddof=1)
  return result


def _bundles(
  rows: batch.Rows, episodes: row_stats.Episodes, size: int
) -> Int[np.ndarray, ' G']:
  """Returns the bundle of each group: `size` tasks, of one agent."""
  agents = np.zeros(episodes.num_groups, int)
  agents[episodes.groups[episodes.index[rows.real]]] = rows.agents[rows.real]
  bundles = np.zeros(len(agents), int)
  for agent in np.unique(agents):
    own = np.flatnonzero(agents == agent)
    # There are at most as many bundles of an agent as groups.
    bundles[own] = agent * len(agents) + np.arange(len(own)) // size
  return bundles
