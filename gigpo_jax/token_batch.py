"""The interface between a model, a loss and the learner.

The learner computes a model's outputs for the completion tokens of a
microbatch. A loss maps these outputs and a `TokenBatch` to one loss per token.

Shapes: **S** shards of the microbatch, **T** completion tokens of a shard, with
padding at the end; see `packing`.
"""

from typing import Protocol

import flax.struct
from jaxtyping import Array, Bool, Float, Int

# Loss of each token, and metrics of each token by name.
TokenLoss = tuple[Float[Array, 'S T'], dict[str, Float[Array, 'S T']]]


@flax.struct.dataclass
class TokenBatch:
  """The completion tokens of a microbatch, with one value per token and column.

  Fields that the loss does not list in `Loss.columns` are None, and such extras
  are absent. All numbers are 0 for padding.

  Attributes:
    mask: True for completion tokens, False for padding.
    row_ids: index of the token's row among the rows of its shard that have
      tokens, in [0, T), because a shard of T tokens has at most T such rows.
    advantages: advantage of the token, or of its row.
    old_log_probs: log-probs of the tokens before the iteration's first update,
      computed by the learner or by the sampler.
    ref_log_probs: log-probs under the frozen reference policy.
    importance: factor of the advantage, at least 0: the truncated importance
      weight, or 1.
    extras: columns of particular losses, by name.
  """

  mask: Bool[Array, 'S T']
  row_ids: Int[Array, 'S T']
  advantages: Float[Array, 'S T'] | None = None
  old_log_probs: Float[Array, 'S T'] | None = None
  ref_log_probs: Float[Array, 'S T'] | None = None
  importance: Float[Array, 'S T'] | None = None
  extras: dict[str, Float[Array, 'S T']] = flax.struct.field(
    default_factory=dict
  )


# Columns with a field of their own; all others are extras.
FIELDS = ('advantages', 'old_log_probs', 'ref_log_probs', 'importance')


def make(
  mask: Bool[Array, 'S T'],
  row_ids: Int[Array, 'S T'],
  columns: dict[str, Float[Array, 'S T']],
) -> TokenBatch:
  """Returns a token batch from columns by name."""
  fields = {name: x for name, x in columns.items() if name in FIELDS}
  extras = {name: x for name, x in columns.items() if name not in FIELDS}
  return TokenBatch(mask=mask, row_ids=row_ids, extras=extras, **fields)


@flax.struct.dataclass
class PolicyOutputs:
  """The outputs of a policy for each token.

  Attributes:
    log_probs: log-prob of the sampled token at the sampling temperature.
    entropies: entropy of the distribution of the token, in nats.
  """

  log_probs: Float[Array, 'S T']
  entropies: Float[Array, 'S T']


@flax.struct.dataclass
class ValueOutputs:
  """The outputs of a critic for each token.

  Attributes:
    values: value predicted before the token is sampled, in reward units.
  """

  values: Float[Array, 'S T']


class Loss(Protocol):
  """Computes a loss per token; the learner weights and sums it.

  Attributes:
    columns: names of the columns that the loss reads: fields of `TokenBatch`,
      or extras. `Learner.update` requires exactly these. A run with
      'ref_log_probs' keeps a reference policy.

  A class with an attribute `per_row` of True has one error for all tokens of a
  row, so that its tokens can be neither left out nor weighted.
  """

  columns: tuple[str, ...]

  def __call__(
    self, outputs: PolicyOutputs | ValueOutputs, tokens: TokenBatch
  ) -> TokenLoss:
    """Returns the loss of each token, and metrics of each token by name.

    Metrics are averaged over the tokens of an iteration, except that metrics
    with names ending in '/max' are maximized.
    """
