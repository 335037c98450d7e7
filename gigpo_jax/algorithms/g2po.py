"""G2PO (arXiv:2606.22995): advantages from values of anchor states.

An anchor is a state; the steps of a group that were taken in it are its anchor
group. V, the value of an anchor, is the mean over these steps of their
episode's total reward, discounted by the number of remaining steps. V is used
in the step advantage A_S. The episode advantage A_E is GiGPO's.

# Differs from the paper: the variant `g2po` has the chosen options in the
states of WebShop. Those of the released code are observations, as with
algorithm.anchor=observation; in ALFWorld they are the same as here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gigpo_jax import advantages, arrays, batch, state_values
from gigpo_jax.algorithms import gigpo

# A failed action stays in its state, and states include what an agent holds.
PRESETS = {'g2po': {'algorithm.anchor': 'state'}}


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A_S = z(V' - c (1 - v)) by anchor group + z(V' - V) by group.

  z normalizes by the mean and the standard deviation, as option `norm` says.
  c is `invalid_penalty`, and v is 1 for a valid response, else 0. V' is the
  value of the state after a step; after an episode's last step, it is the
  episode's total reward.
  """

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and A_S computed from values of anchors."""
    return _components(self.inputs(rows), **self.statistics())


@advantages.jit
def _components(inputs, *, norm, penalty_scope, **statistics):
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  before, after = values(
    row_segments, inputs.rewards[0], inputs.steps, inputs.discount[0]
  )
  size = jnp.maximum(jnp.abs(before), jnp.abs(after))
  step_advantage = advantages.step_advantages(
    arrays.two_add((after, 0 * after), row_segments.cost),
    row_segments.anchors,
    norm=norm,
    tolerance=arrays.sum_tolerance(size, row_segments.anchors),
  )
  gain = after - before
  step_advantage += advantages.group_normalize(
    (gain, 0 * gain),
    row_segments.groups,
    row_segments.real,
    norm=norm,
    tolerance=arrays.sum_tolerance(size, row_segments.groups),
  )
  return advantages.make_components(
    row_segments, step_advantage, norm=norm, **statistics
  )


def values(
  row_segments: advantages.RowSegments,
  rewards: Float[Array, ' R'],
  steps: Int[Array, ' R'],
  discount: Float[Array, ''],
) -> tuple[Float[Array, ' R'], Float[Array, ' R']]:
  """Returns the values of the states before and after each step.

  Args:
    row_segments: segments of the rows.
    rewards: rewards of the steps, without penalties.
    steps: index of each step within its episode.
    discount: discount per step.
  """
  all_rows, num_rows = jnp.ones_like(row_segments.real), len(steps)
  rewards = arrays.segment_sum(rewards, row_segments.episodes, all_rows)
  last = jax.ops.segment_max(steps, row_segments.episodes, num_rows)[
    row_segments.episodes
  ]
  discounted = discount ** (last + 1 - steps) * rewards
  estimates = state_values.estimate(discounted, row_segments)
  after = jnp.where(estimates.ends, rewards, estimates.after)
  return estimates.before, after
