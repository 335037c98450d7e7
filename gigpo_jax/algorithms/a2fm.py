"""A2FM (arXiv:2510.12838): the reward of APO, which teaches cheap modes.

APO is the paper's Adaptive Policy Optimization. A response begins with one of
`rollout.prefixes`, its mode; the first one is the cheapest. The same number of
members of a group is forced into each mode, and the others choose one. With p
the share of successes of the members that are forced into the cheapest mode,
the reward of an episode is

    r = acc adapt fmt,
    adapt = 1 - p^alpha if the task is easy and a costlier mode was chosen,
    acc = 1 for a success, fmt = 1 if all responses are valid and have a mode;

adapt is 1 and the other factors are 0 otherwise. The advantage is (r - mean) /
(std + 1e-6) over the group. A task is easy if p is at least `easy_rate`. Forced
members have chosen nothing, and so have adapt = 1.

# Differs from the paper: the bound of easy tasks is not public, so `easy_rate`
is an option; success and the validity of responses take the place of the
judge's verdict and the paper's format.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np
from jaxtyping import Float

from gigpo_jax import (
  algorithms,
  batch,
  options,
  reward_functions,
  row_stats,
  selectors,
)

PRESETS = {
  'a2fm': {
    'rollout.prefixes': ('<action>', '<think>'),
    # Of eight members, four choose a mode.
    'rollout.episodes_per_group': 8,
    'rollout.forced_members': 2,
    'env.require_think': False,
  }
}

_MIN_MODES = 2  # Modes to choose from.


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if no member chooses a mode, or the reward is another."""
  texts = config.rollout.prefixes
  if len(texts) < _MIN_MODES:
    yield (
      f'rollout.prefixes={tuple(texts)}: a2fm chooses between modes; must be '
      'at least two texts, the cheapest mode first'
    )
  forced, members = (
    config.rollout[name] for name in ('forced_members', 'episodes_per_group')
  )
  if 0 < forced * len(texts) == members:
    yield (
      f'rollout.forced_members={forced}: forces all rollout.episodes_per_group='
      f'{members} members into {len(texts)} modes, so that none chooses one; '
      f'must be at most {(members - 1) // len(texts)}, or the group larger'
    )
  without_think = [text for text in texts if '<think>' not in text]
  if config.env.get('require_think') and without_think:
    yield (
      f'env.require_think=True: a response that begins with {without_think[0]} '
      'is invalid; must be False for a2fm with this mode'
    )
  yield from selectors.refuse_by_reward(
    config, 'a2fm also learns from a group in which all episodes succeed'
  )
  yield from reward_functions.refuse_success_only(config)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = z(success * valid * (1 - p^alpha if an easy task was costly)).

  Attributes:
    cost_power: alpha, the power of p, the share of successes in the cheapest
      mode; a costlier mode on an easy task earns 1 - p^alpha; 2 in the paper.
    easy_rate: smallest p of an easy task.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True
  reads_success: ClassVar[bool] = True
  reads_prefixes: ClassVar[bool] = True

  cost_power: float = options.number(2.0, above=0)
  easy_rate: float = options.number(0.5, above=0, high=1)

  def __post_init__(self):
    options.check(self)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding."""
    episodes = row_stats.episodes(rows)
    rewards, metrics = self.rewards(rows, episodes)
    by_episode = row_stats.group_z_scores(rewards, episodes.groups)
    return algorithms.make_output(episodes.to_rows(by_episode), rows, metrics)

  def rewards(
    self, rows: batch.Rows, episodes: row_stats.Episodes
  ) -> tuple[Float[np.ndarray, ' E'], dict[str, float]]:
    """Returns the reward r of each episode, and metrics."""
    forced = episodes.any(rows.forced)
    is_costly = episodes.any(rows.prefixes > 0)
    wrong = episodes.any(~rows.valid | (rows.prefixes < 0))
    forced_cheap = forced & ~is_costly
    counts = np.bincount(episodes.groups, weights=forced_cheap)
    wins = np.bincount(episodes.groups, weights=forced_cheap & episodes.success)
    p = (wins / np.maximum(counts, 1))[episodes.groups]
    penalized = ~forced & is_costly & (p >= self.easy_rate)
    adapt = np.where(penalized, 1 - p**self.cost_power, 1)
    metrics = {
      'advantage/cheap_success': float(wins.sum() / max(counts.sum(), 1))
    }
    if not forced.all():
      share = is_costly[~forced].mean()
      metrics['advantage/costlier_mode_share'] = float(share)
    return episodes.success * adapt * ~wrong, metrics
