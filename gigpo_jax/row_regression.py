"""A loss that regresses the log-ratio of a whole row on its advantage.

A*-PO (arXiv:2505.20686, Algorithm 1) minimizes, over the responses y to a
prompt x, (beta log(pi(y|x) / pi_ref(y|x)) - (r - V*(x)))^2. The algorithm
`a_star_po` makes the advantages r - V*(x).

REBEL (arXiv:2404.16767, Eq. 4) minimizes, over pairs of responses,

    ((log(pi(y|x) / pi_old(y|x)) - log(pi(y'|x) / pi_old(y'|x))) / eta
     - (r - r'))^2.

The mean over all ordered pairs of a group is twice the variance of the group's
x_i = log-ratio_i / eta - r_i. Its gradient is that of twice the mean of
(x_i - c)^2, where the constant c is the mean of all x_i. Before an update, all
log-ratios are 0 and c is minus the mean reward, so that `rebel` makes the
advantages r minus their mean, with log_ratio_weight=1 / eta and
log_ratio_to=old. Later in the same iteration, c differs by the mean log-ratio
of the group / eta. Its expectation, -KL / eta, is of second order in the change
of the parameters; for the few samples of a group it is of first order.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from gigpo_jax import kl, losses, options, token_batch


@dataclasses.dataclass(frozen=True)
class RowRegression:
  """`row_regression`: (weight * sum of log(pi / other) of a row - A)^2.

  Every token of a row has the row's loss, so that with
  loss.aggregation=sequence_mean the loss of an update is the mean over rows. A
  row's advantage is the mean over its tokens.

  Attributes:
    log_ratio_weight: weight of a row's log-ratio; 1e-3 in the released code of
      A*-PO.
    log_ratio_to: the other policy: reference, or old, the policy before the
      iteration's first update.
  """

  log_ratio_weight: float = options.number(1e-3, above=0)
  log_ratio_to: str = options.choice('reference', ('reference', 'old'))
  per_row: ClassVar[bool] = True

  def __post_init__(self):
    options.check(self)

  @property
  def columns(self) -> tuple[str, ...]:
    """Names of the columns that the loss reads."""
    is_reference = self.log_ratio_to == 'reference'
    return 'advantages', 'ref_log_probs' if is_reference else 'old_log_probs'

  def __call__(
    self, outputs: token_batch.PolicyOutputs, tokens: token_batch.TokenBatch
  ) -> token_batch.TokenLoss:
    """Returns the loss and metrics of each token."""
    mask, ids = tokens.mask, tokens.row_ids
    other = getattr(tokens, self.columns[1])
    log_probs, other = (
      jnp.where(mask, x, 0) for x in (outputs.log_probs, other)
    )
    log_ratios = losses.row_sums(log_probs - other, mask, ids)
    advantages = losses.row_means(tokens.advantages, mask, ids)
    error = self.log_ratio_weight * log_ratios - advantages
    loss = jnp.where(mask, error**2, 0)
    # Both are KL(p || q), estimated on tokens that p sampled.
    if losses.needs_reference(self):
      divergence = {'loss/kl': kl.estimate(log_probs, other)}
    else:
      divergence = {'ratio/kl': kl.estimate(other, log_probs)}
    metrics = divergence | {
      'loss/policy': loss,
      'loss/entropy': jnp.where(mask, outputs.entropies, 0),
    }
    return loss, metrics
