"""REINFORCE++ (arXiv:2501.03262): returns whitened over all tokens of a batch.

E is the return of an episode, the undiscounted sum of its rewards.

# Differs from the paper: by default, the KL to the reference is a term of the
loss (`loss.kl_weight`). `reward.kl_weight` subtracts it from the reward, but
the KL of a whole episode counts for each of its tokens; in the paper, that from
the token on.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import advantages, algorithms, batch, options

PRESETS = {'reference_code': {}}


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A = (E - b - mean) / (std + 1e-6) over the tokens of the batch.

  Attributes:
    baseline: b; 'none' for 0, or 'group' for the mean of a group's episodes.
    invalid_penalty: subtracted from the reward of an invalid response.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = False
  baseline: ClassVar[str] = 'none'

  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  credit = algorithms.credit

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per row, 0 for padding."""
    advantages_R = _whitened(
      advantages.device_inputs(*rows.steps_taken(), 1.0, self.invalid_penalty),
      jnp.asarray(rows.lengths - rows.prompt_lengths, jnp.float32),
      baseline=self.baseline,
    )
    return algorithms.make_output(np.asarray(advantages_R), rows)


@functools.partial(jax.jit, static_argnames='baseline')
def _whitened(inputs, tokens, *, baseline):
  row_segments = advantages.segment_rows(inputs, penalty_scope='reward')
  returns = row_segments.episode_returns
  if baseline == 'group':
    centred = advantages.group_normalize(
      returns, row_segments.groups, row_segments.starts, norm='mean'
    )
  else:
    centred = returns[0]
  return advantages.whiten(centred, jnp.where(row_segments.real, tokens, 0))
