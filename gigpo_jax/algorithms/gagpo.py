"""GAGPO (arXiv:2605.13217): generalized advantage estimation without a critic.

The value V of a state is the mean of G, the discounted return from a step, over
the steps of its anchor group; V is 0 after an episode's last step. With reward
r and next state s', generalized advantage estimation (arXiv:1506.02438, Eq. 16)
gives

    delta_t = r_t + discount V(s') - V(s),
    A_t = delta_t + discount step_lambda A_{t+1},

which is normalised over all steps of the group. There is no episode advantage.
With step_lambda = 1, A before the normalisation is G - V, GiGPO's step
advantage without the division by the deviation.

# Differs from the paper: its lambda is not published; 0.9 is this project's.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gigpo_jax import advantages, arrays, batch, options, state_values
from gigpo_jax.algorithms import gigpo

# The paper compares whole responses: one ratio per row.
PRESETS = {'gagpo': {'loss.ratio_level': 'row'}}


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A = episode_weight A_E + z(A_t); by default, episode_weight=0.

  z normalises over the steps of a group, as option `norm` says. The paper
  reports lower success with the episode advantage A_E.

  Attributes:
    step_lambda: lambda, in [0, 1]; 0 gives one-step differences.
  """

  default_episode_weight: ClassVar[float] = 0.0

  step_weight: float = dataclasses.field(default=1.0, init=False)
  step_lambda: float = options.number(0.9, low=0, high=1)

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and the normalised A_t as the step advantage."""
    return _components(
      self.inputs(rows),
      arrays.two_float(self.discount * self.step_lambda),
      **self.statistics(),
    )


@functools.partial(
  jax.jit,
  static_argnames=('norm', 'episode_stats', 'penalty_scope', 'lone_episode'),
)
def _components(inputs, decay, *, norm, penalty_scope, **others):
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  estimates = generalized_advantages(
    inputs, row_segments, decay, penalty_scope=penalty_scope
  )
  step_advantage = advantages.group_normalize(
    (estimates, 0 * estimates),
    row_segments.groups,
    row_segments.real,
    norm=norm,
    tolerance=arrays.sum_tolerance(row_segments.returns[0]),
  )
  return advantages.make_components(
    row_segments, step_advantage, norm=norm, **others
  )


def generalized_advantages(
  inputs: advantages.Inputs,
  row_segments: advantages.RowSegments,
  decay: arrays.TwoFloat,
  *,
  penalty_scope: str,
) -> Float[Array, ' R']:
  """Returns A_t of each row, before normalisation, in reward units.

  A_t is the lambda-return minus V. The lambda-return is a return with discount
  `decay` of rewards to which the rest of the next value is added. With lambda =
  1 nothing is added, and A_t = G - V to the last bit.

  Args:
    inputs: the rows.
    row_segments: their segments.
    decay: discount times lambda, two-float scalar.
    penalty_scope: as for `advantages.gigpo`.
  """
  values = state_values.estimate(row_segments.returns[0], row_segments)
  following = inputs.steps.at[row_segments.previous].set(
    inputs.steps, mode='drop'
  )
  gap = jnp.where(values.ends, 0, following - inputs.steps)
  kept = arrays.two_power(decay, gap)
  rest, _ = arrays.two_add(
    arrays.two_power(inputs.discount, gap), tuple(-half for half in kept)
  )
  added = rest * values.after
  lambda_returns = advantages.segment_rows(
    inputs._replace(
      rewards=arrays.two_add(inputs.rewards, (added, 0 * added)),
      discount=decay,
    ),
    penalty_scope=penalty_scope,
  ).returns
  returns = row_segments.returns
  difference, _ = arrays.two_add(
    lambda_returns, tuple(-half for half in returns)
  )
  return difference + advantages.step_advantages(
    returns, row_segments.anchors, norm='mean'
  )
