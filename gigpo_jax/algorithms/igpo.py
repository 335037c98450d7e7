"""IGPO (arXiv:2510.14967): information gain as the reward of a turn.

p_t is the policy's probability of the task's reference answer before turn t
(`gigpo_jax.answer_scores`). A turn other than the last is rewarded with the
gain p_{t+1} - p_t, and the last turn with the return E of the episode.
Gains and returns are normalized separately in the group,

    r = (x - mean) / (std + 1e-6),                             Section 3.2
    A_t = sum over k >= t of discount^(k - t) r_k.

E is the undiscounted sum of rewards, minus a penalty for each invalid response.
With `components`, the last turn has the sum of w_k z(E_k) instead, where E_k is
an episode's sum of the k-th reward component, as in `gdpo`. As in the released
code, the gain is a difference of probabilities; the paper has one of log-probs.

# Differs from the paper: E replaces the F1 score of the answer.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

import envs
from gigpo_jax import (
  algorithms,
  batch,
  options,
  reward_functions,
  row_stats,
  selectors,
)

PRESETS = {'igpo': {'algorithm.discount': 1.0, 'algorithm.components': ()}}


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if tasks have no answers, or turns an earlier policy."""
  if envs.answer_start(config.env.name, config.env) is None:
    yield (
      f'env.name={config.env.name}: its tasks have no reference answer, which '
      'igpo scores; must be search_qa or another environment with answers'
    )
  if config.rollout.carry_over > 0:
    yield (
      f'rollout.carry_over={config.rollout.carry_over}: igpo scores answers by '
      'one policy; must be 0'
    )
  if config.algorithm.components:
    yield from reward_functions.unused(config)
  yield from selectors.refuse_by_reward(
    config,
    "igpo also learns from the answer's probability in groups of equal rewards",
  )


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = discounted sum of z(p' - p) and of z(E) of the last turn.

  Attributes:
    discount: discount per turn; 1 in the released code.
    gain_weight: weight of the gains of the answer's probability.
    components: names of the components of the last turn's reward, as in `gdpo`;
      () uses E.
    component_weights: w; () gives each component the weight 1.
    invalid_penalty: subtracted from the reward of an invalid response; not used
      with `components`, of which `valid` counts invalid responses.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True
  scores_answers: ClassVar[bool] = True

  discount: float = options.number(0.95, low=0, high=1)
  gain_weight: float = options.number(1.0, low=0)
  components: tuple[str, ...] = options.texts(('reward', 'valid'))
  component_weights: tuple[float, ...] = ()
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)
    if self.components or self.component_weights:
      reward_functions.check_weights(self.components, self.component_weights)

  @property
  def unused(self) -> tuple[str, ...]:
    """Options that the other ones switch off."""
    return ('invalid_penalty',) if self.components else ()

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row; 0 for padding."""
    episodes = row_stats.episodes(rows, self.invalid_penalty)
    following, real = row_stats.next_rows(rows), rows.real
    values = row_stats.known_state_values(rows)
    gains = np.where(following >= 0, values[following] - values, np.nan)
    rewards = self.gain_weight * row_stats.group_z_scores(gains, rows.groups)
    for weight, values_E in self._sums(rows, episodes):
      last = np.where(
        real & (following < 0), episodes.to_rows(values_E), np.nan
      )
      rewards += weight * row_stats.group_z_scores(last, rows.groups)
    advantages = np.where(real, rewards, 0)
    # From the last turns to the first ones.
    for r in np.argsort(-rows.steps, kind='stable'):
      if following[r] >= 0:
        advantages[r] += self.discount * advantages[following[r]]
    known = gains[np.isfinite(gains)]
    mean = float(known.mean()) if len(known) else 0.0
    metrics = {'advantage/gain_mean': mean}
    return algorithms.make_output(advantages, rows, metrics)

  def _sums(
    self, rows: batch.Rows, episodes: row_stats.Episodes
  ) -> list[tuple[float, np.ndarray]]:
    """Returns the weight of each component and its sum over each episode."""
    if not self.components:
      return [(1.0, episodes.returns)]
    weights = self.component_weights or (1.0,) * len(self.components)
    sums = map(
      episodes.sum, row_stats.named_components(rows, self.components).T
    )
    return list(zip(weights, sums, strict=True))
