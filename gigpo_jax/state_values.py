"""Values of states without a critic: means of returns over anchor groups.

An anchor group is the steps of a group of episodes that were taken in the same
state. The value V of the state is the mean of a return over these steps.
Inputs and outputs are arrays with one entry per row, as in `advantages`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gigpo_jax import advantages, arrays


class StateValues(NamedTuple):
  """Values around each step, in units of the return.

  Attributes:
    before: V of the state in which the step was taken.
    after: V of the state of the episode's next step; 0 for its last step.
    ends: whether the step is the last one of its episode.
  """

  before: Float[Array, ' R']
  after: Float[Array, ' R']
  ends: Bool[Array, ' R']


def estimate(
  returns: Float[Array, ' R'], row_segments: advantages.RowSegments
) -> StateValues:
  """Returns the values of the states before and after each step.

  Args:
    returns: return from each step on, whose mean over an anchor group is V.
    row_segments: segments of the rows.
  """
  before = anchor_means(returns, row_segments)
  previous = row_segments.previous
  return StateValues(
    before=before,
    after=jnp.zeros_like(before).at[previous].set(before, mode='drop'),
    ends=jnp.ones_like(row_segments.real).at[previous].set(False, mode='drop'),
  )


def anchor_means(
  values: Float[Array, ' R'], row_segments: advantages.RowSegments
) -> Float[Array, ' R']:
  """Returns, for each row, the mean of values over its anchor group.

  The mean of equal values is exactly this value: differences from the first of
  them are averaged, because a sum of hundreds of float32 has rounding errors
  that a division by a standard deviation near 0 would magnify.
  """
  all_rows = jnp.ones_like(row_segments.real)
  anchors = row_segments.anchors
  first = values[arrays.segment_first(anchors, all_rows)]
  total = arrays.segment_sum(values - first, anchors, all_rows)
  return first + total / arrays.segment_count(anchors, all_rows)


def lambda_advantages(
  inputs: advantages.Inputs,
  row_segments: advantages.RowSegments,
  decay: arrays.TwoFloat,
  *,
  penalty_scope: str,
) -> Float[Array, ' R']:
  """Returns A_t of each row, before normalization, in reward units.

  A_t is the lambda-return minus V. The lambda-return is the return, with
  discount `decay`, of the rewards r + (discount - decay) V', where V' is the
  value of the next state. With lambda = 1, A_t = G - V to the last bit.

  Args:
    inputs: the rows.
    row_segments: their segments.
    decay: discount times lambda, two-float scalar.
    penalty_scope: as for `advantages.gigpo`.
  """
  values = estimate(row_segments.returns[0], row_segments)
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
