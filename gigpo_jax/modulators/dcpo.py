"""DCPO (arXiv:2601.12730): advantages towards a policy of another temperature.

Not the DCPO with dynamic clipping. H is the mean token entropy of the
iteration, in nats, and p the share of successful episodes. The target is the
policy at 1.2 times the sampling temperature if H is at most the target entropy,
else at 0.8 times. With

    a = min(|target - H|, limit) / p,   alpha = a / (1 + a),

a token of log-prob l has the advantage (1 - alpha) A + alpha s exp(l_T - l),
where l_T is its log-prob under the target and s is 1 in successful episodes,
else 0. Formula and 0.5: released code, 597358816/DCPO; its paper has 0.25.

# Differs from the paper: an iteration without success keeps its advantages;
the formula has no p of 0.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import batch, losses, options, plugins, row_stats

_WARM, _COOL = 'log_probs@1.2', 'log_probs@0.8'


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the loss has one ratio or one error per row."""
  reason = 'dcpo gives each token an advantage of its own'
  yield from losses.refuse_rows(config.loss, reason, accepted='must be token')


@dataclasses.dataclass(frozen=True)
class Modulator:
  """(1 - alpha) A + alpha [success] exp(l_T - l) per token.

  Attributes:
    target_entropy: the target of H, in nats; 0.5 in the released code.
    target_limit: the largest distance of H from its target that counts; 0.1 in
      the released code.
  """

  needs: ClassVar[tuple[str, ...]] = ('log_probs', 'entropies', _WARM, _COOL)
  needs_group: ClassVar[bool] = False
  reads_success: ClassVar[bool] = True

  target_entropy: float = options.number(0.5, low=0)
  target_limit: float = options.number(0.1, low=0)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns one advantage per token."""
    mask, outputs = rows.completion_mask, signals.outputs
    advantages = row_stats.per_token(advantages, mask)
    episodes = row_stats.episodes(rows)
    rate = episodes.success.mean()
    if not rate:
      return np.where(mask, advantages, 0)
    entropy = outputs['entropies'][mask & ~rows.repeated[:, None]].mean()
    target = outputs[_WARM if entropy <= self.target_entropy else _COOL]
    ratios = np.exp(np.where(mask, target - outputs['log_probs'], 0))
    alpha = self.weight(entropy, rate)
    pull = episodes.to_rows(episodes.success)[:, None] * ratios
    return np.where(mask, (1 - alpha) * advantages + alpha * pull, 0)

  def weight(self, entropy: float, rate: float) -> float:
    """Returns alpha for a mean entropy and a positive success rate."""
    distance = min(abs(self.target_entropy - entropy), self.target_limit) / rate
    return distance / (1 + distance)
