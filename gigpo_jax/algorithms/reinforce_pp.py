"""REINFORCE++ (arXiv:2501.03262): returns whitened over the whole batch.

# Differs from the paper: the KL to the reference is a term of the loss, as of
every algorithm here (`loss.kl_weight`), not taken off the reward.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import advantages, algorithms, batch


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = (E - b - mean) / (std + 1e-6), mean and std over the batch's tokens.

  Attributes:
    baseline: b; 'none', or 'group': the mean of a group's episodes.
    invalid_penalty: as of `advantages.gigpo`.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = False
  baseline: ClassVar[str] = 'none'

  invalid_penalty: float = 0.1

  def credit(self, rows: batch.Rows, values=None) -> algorithms.Credit:
    """Returns an advantage a row, 0 for padding."""
    del values
    found = _whitened(
      *advantages.inputs(*rows.steps_taken(), 1.0, self.invalid_penalty),
      jnp.asarray(rows.lengths - rows.prompt_lengths, jnp.float32),
      baseline=self.baseline,
    )
    found = np.asarray(found)
    return algorithms.Credit(
      found, {'advantage/abs_mean': float(np.abs(found[rows.real]).mean())}
    )


@functools.partial(jax.jit, static_argnames='baseline')
def _whitened(*given, baseline):
  *given, tokens = given
  found = advantages.describe(*given, penalty_scope='reward')
  returns = found.episode_returns
  if baseline == 'group':
    above = advantages.group_normalize(
      returns, found.groups, found.starts, norm='mean'
    )
  else:
    above = returns[0]
  return advantages.whiten(above, jnp.where(found.real, tokens, 0))
