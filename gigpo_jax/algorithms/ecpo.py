"""ECPO (arXiv:2606.05885): step advantages of actions, weighted by evidence.

G is the discounted return from a step. An anchor group has n steps with mean G
of m. Its steps with the same action have n_a steps with mean m_a, which is
shrunk towards m, because few steps are little evidence:

    (n_a m_a + prior_steps m) / (n_a + prior_steps).

A_a is this mean, normalized over the steps of the anchor group. With B the
variance of G between the actions and W the variance within the actions, A_a is
weighted by

    rho = tanh(n / evidence_steps) B / (B + W + 1e-6),

so that an anchor group counts little if it is small or if equal actions have
different returns. GiGPO's episode advantage A_E is added.

# Differs from the paper: tau (`evidence_steps`) is not published; 4 is this
project's. Neither is the canonical form of actions; here it ignores case and
white space. The normalization counts each step of an action, not each action.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gigpo_jax import advantages, arrays, batch, options, state_values
from gigpo_jax.algorithms import gigpo


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A = episode_weight A_E + step_weight rho A_a.

  Attributes:
    prior_steps: kappa, the number of steps with the anchor's mean return that
      are added to those of an action; 2 in the paper.
    evidence_steps: tau, the number of steps of an anchor group at which its
      weight is tanh(1) = 0.76; not published.
  """

  prior_steps: float = options.number(2.0, low=0)
  evidence_steps: float = options.number(4.0, above=0)

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and rho A_a as the step advantage."""
    return _components(
      self.inputs(rows),
      jnp.asarray(rows.actions, jnp.int32),
      jnp.float32(self.prior_steps),
      jnp.float32(self.evidence_steps),
      **self.statistics(),
    )


@advantages.jit
def _components(
  inputs, actions, prior_steps, evidence_steps, *, norm, penalty_scope, **others
):
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  means, signal = action_means(row_segments, actions, prior_steps)
  action_advantage = advantages.step_advantages(
    (means, 0 * means),
    row_segments.anchors,
    norm=norm,
    tolerance=arrays.sum_tolerance(
      row_segments.returns[0], row_segments.anchors
    ),
  )
  steps = arrays.segment_count(
    row_segments.anchors, jnp.ones_like(row_segments.real)
  )
  weight = jnp.tanh(steps / evidence_steps) * signal
  return advantages.make_components(
    row_segments, weight * action_advantage, norm=norm, **others
  )


def action_means(
  row_segments: advantages.RowSegments,
  actions: Int[Array, ' R'],
  prior_steps: Float[Array, ''],
) -> tuple[Float[Array, ' R'], Float[Array, ' R']]:
  """Returns the shrunk mean of each row's action, and B / (B + W + 1e-6).

  Args:
    row_segments: segments of the rows.
    actions: ids of the actions, equal for equal actions of a group.
    prior_steps: number of steps with the mean of the anchor group.
  """
  returns = row_segments.returns[0]
  mean = state_values.anchor_means(returns, row_segments)
  by_action = row_segments._replace(
    anchors=arrays.segment_ids(row_segments.anchors, actions)
  )
  action_mean = state_values.anchor_means(returns, by_action)
  count = arrays.segment_count(
    by_action.anchors, jnp.ones_like(row_segments.real)
  )
  shrunk = (count * action_mean + prior_steps * mean) / (count + prior_steps)
  between, within = (
    state_values.anchor_means(deviation**2, row_segments)
    for deviation in (action_mean - mean, returns - action_mean)
  )
  return shrunk, between / (between + within + advantages.EPSILON)
