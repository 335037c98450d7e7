"""ProGRPO (arXiv:2602.05281): confident responses get a smaller advantage.

The paper's advantage re-weighting (ARM) is A + alpha (c(q) - c(o)) in groups
with a successful episode, and A elsewhere. c is a confidence: the geometric
mean of the probabilities of the least likely 20 % of the tokens of a prompt q
or of a response o.

# Differs from the paper: alpha (`confidence_weight`) is not published; 0.1 is
this project's. q is the prompt of a turn. Its first token has no probability.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, options, plugins, row_stats


@dataclasses.dataclass(frozen=True)
class Modulator:
  """A + alpha (c(q) - c(o)) if an episode of the group succeeds, else A.

  Attributes:
    confidence_weight: alpha; not published.
    confidence_share: share of the least likely tokens, whose mean is c; 0.2 in
      the paper.
  """

  needs: ClassVar[tuple[str, ...]] = ('log_probs', 'prompt_log_probs')
  needs_group: ClassVar[bool] = True
  reads_success: ClassVar[bool] = True

  confidence_weight: float = options.number(0.1, low=0)
  confidence_share: float = options.number(0.2, above=0, high=1)

  def __post_init__(self):
    options.check(self)

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns the changed advantages."""
    mask = rows.completion_mask
    share = self.confidence_share
    prompts, responses = (
      np.exp(row_stats.lowest_means(values, where, share))
      for values, where in (
        (signals.outputs['prompt_log_probs'], rows.prompt_mask),
        (signals.outputs['log_probs'], mask),
      )
    )
    episodes = row_stats.episodes(rows)
    solved = episodes.group_means(episodes.success) > 0
    gaps = np.where(episodes.groups_to_rows(solved), prompts - responses, 0)
    return row_stats.add(advantages, self.confidence_weight * gaps, mask)
