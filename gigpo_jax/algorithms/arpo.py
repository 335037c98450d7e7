"""ARPO (arXiv:2507.19849): GRPO with branches where entropy rises.

Half of a group's episodes are roots; the others branch from them (`branching`).
With H_t the entropy of the first tokens of turn t, which follow the reply of
the environment, an episode branches before turn t if

    clip(u - weight (H_t - H_0), 0, 1) <= probability                    (code)

for a uniform random number u. Earlier turns come first. The advantages are
those of GRPO over all episodes of the group; a turn that several episodes share
has the mean of their advantages (Section 3.2, hard estimation).

H_t is the mean of -log p, in nats, over the first `branch_tokens` tokens of the
turn's response. Its expectation is the mean entropy of the policy at these
positions, and the sampler has computed it. An entropy that rises is thus partly
the surprise of the sampled tokens, which the branch samples anew.

# Differs from the code: H_t has all probabilities, not the top 10, is a mean
instead of a sum over 20 tokens divided by log V, and belongs to the turn after
the reply, as in the paper, not to the turn before it. Branches of branches come
after all branches of roots. A shared turn is trained on once, not once per
episode, which gave it the same mean with a larger weight.
"""

import dataclasses

import numpy as np
from jaxtyping import Float

from gigpo_jax import branching, options, trajectory
from gigpo_jax.algorithms import grpo

conflicts = branching.conflicts


@dataclasses.dataclass(frozen=True)
class Algorithm(grpo.Algorithm):
  """GRPO; branches where u - w (H_t - H_0) <= p; mean A of shared turns.

  Attributes:
    root_share: share of a group's episodes that are played from the start; the
      others branch from them; 8 of 16 in the paper.
    branch_probability: p, the probability of a branch at a turn without a
      change of entropy; 0.5 in the released code.
    branch_entropy_weight: w, the weight of the change of entropy, per nat; 0.2
      in the released code.
    branch_tokens: number of first tokens of a turn whose entropy counts; 20 in
      the released code.
  """

  root_share: float = options.number(0.5, above=0, high=1, note='1 is GRPO')
  branch_probability: float = options.number(0.5, low=0, high=1)
  branch_entropy_weight: float = options.number(0.2, low=0, high=1_000)
  branch_tokens: int = options.number(20, low=1)

  def branch_order(
    self, episode: trajectory.Trajectory, draws: Float[np.ndarray, ' T']
  ) -> Float[np.ndarray, ' T']:
    """Returns the index of each turn with a branch, inf for others."""
    change = np.array(
      [self.entropy(s) - self.entropy(episode.steps[0]) for s in episode.steps]
    )
    lowered = np.clip(draws - self.branch_entropy_weight * change, 0, 1)
    turns = np.arange(len(draws))
    return np.where(lowered <= self.branch_probability, turns, np.inf)

  def entropy(self, step: trajectory.SampledTurn) -> float:
    """Returns an unbiased estimate of the entropy of the first tokens."""
    return -float(np.mean(step.log_probs[: self.branch_tokens], dtype=float))
