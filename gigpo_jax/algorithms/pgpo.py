"""PGPO (arXiv:2609.02236): step advantages and differences of potentials.

The potential Phi of a state is the mean of G, the discounted return from a
step, over the steps of its anchor group. A step from state s to s' has the
difference

    delta = potential_discount Phi(s') - Phi(s);

in the last step of an episode, its reward replaces the first term. A_phi is
delta, normalized over the anchor group like GiGPO's step advantage A_S. With p
the success rate of the group,

    A = A_S + potential_weight (1 - p)^failure_exponent A_phi,

so that steps of failed episodes differ by the states that they reach.

# Differs from the paper: the reward of a last step includes the penalty of an
invalid response, which the published formula does not mention.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gigpo_jax import advantages, arrays, batch, options, state_values
from gigpo_jax.algorithms import gigpo


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A = episode_weight A_E + A_S + w A_phi; default weight 0.

  The paper reports lower success with the episode advantage A_E.

  Attributes:
    potential_weight: beta, the weight w of A_phi if no episode succeeds; 1 in
      the paper.
    failure_exponent: alpha, the exponent of the failure rate in w; 2 in the
      paper.
    potential_discount: gamma, the discount of the next potential; 1 in the
      paper.
  """

  default_episode_weight: ClassVar[float] = 0.0
  reads_success: ClassVar[bool] = True

  step_weight: float = dataclasses.field(default=1.0, init=False)
  potential_weight: float = options.number(1.0, low=0)
  failure_exponent: float = options.number(2.0, low=0)
  potential_discount: float = options.number(1.0, low=0, high=1)

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and A_S + w A_phi as the step advantage."""
    return _components(
      self.inputs(rows),
      jnp.asarray(rows.success),
      jnp.float32(self.potential_weight),
      jnp.float32(self.failure_exponent),
      jnp.float32(self.potential_discount),
      **self.statistics(),
    )


@advantages.jit
def _components(  # noqa: PLR0913
  inputs, success, weight, exponent, discount, *, norm, penalty_scope, **others
):
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  potentials = state_values.estimate(row_segments.returns[0], row_segments)
  rewards = inputs.rewards[0] + row_segments.cost[0]
  reached = jnp.where(potentials.ends, rewards, discount * potentials.after)
  difference = reached - potentials.before
  transition_advantage = advantages.step_advantages(
    (difference, 0 * difference),
    row_segments.anchors,
    norm=norm,
    tolerance=arrays.sum_tolerance(
      jnp.maximum(jnp.abs(reached), jnp.abs(potentials.before)),
      row_segments.anchors,
    ),
  )
  weight *= (1 - success_rates(row_segments, success)) ** exponent
  step_advantage = advantages.step_advantages(
    row_segments.returns, row_segments.anchors, norm=norm
  )
  return advantages.make_components(
    row_segments,
    step_advantage + weight * transition_advantage,
    norm=norm,
    **others,
  )


def success_rates(
  row_segments: advantages.RowSegments, success: Bool[Array, ' R']
) -> Float[Array, ' R']:
  """Returns the share of successful episodes in the group of each row.

  Args:
    row_segments: segments of the rows.
    success: whether a step accomplished the task; at most one per episode.
  """
  groups = row_segments.groups
  episodes = arrays.segment_count(groups, row_segments.starts)
  return arrays.segment_count(groups, success) / episodes
