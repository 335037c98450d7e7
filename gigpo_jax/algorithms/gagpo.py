"""GAGPO (arXiv:2605.13217): generalized advantage estimation without a critic.

The value V of a state is the mean of G, the discounted return from a step, over
the steps of its anchor group; V is 0 after an episode's last step. With reward
r and next state s', generalized advantage estimation (arXiv:1506.02438, Eq. 16)
gives

    delta_t = r_t + discount V(s') - V(s),
    A_t = delta_t + discount step_lambda A_{t+1},

which is normalized over all steps of the group. There is no episode advantage.
With step_lambda = 1, A before the normalization is G - V, GiGPO's step
advantage without the division by the deviation.

# Differs from the paper: its lambda is not published; 0.9 is this project's.
"""

import dataclasses
from typing import ClassVar

from gigpo_jax import advantages, arrays, batch, options, state_values
from gigpo_jax.algorithms import gigpo

# The paper compares whole responses: one ratio per row. The default
# loss.clip_epsilon=0.2 hardly ever clips it.
PRESETS = {'gagpo': {'loss.ratio_level': 'row'}}


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A = episode_weight A_E + z(A_t); default weight 0.

  z normalizes over the steps of a group, as option `norm` says. The paper
  reports lower success with the episode advantage A_E.

  Attributes:
    step_lambda: lambda of the estimation over steps; 0 gives one-step
      differences; not published.
  """

  default_episode_weight: ClassVar[float] = 0.0

  step_weight: float = dataclasses.field(default=1.0, init=False)
  step_lambda: float = options.number(0.9, low=0, high=1)

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and the normalized A_t as the step advantage."""
    return _components(
      self.inputs(rows),
      arrays.two_float(self.discount * self.step_lambda),
      **self.statistics(),
    )


@advantages.jit
def _components(inputs, decay, *, norm, penalty_scope, **others):
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  estimates = state_values.lambda_advantages(
    inputs, row_segments, decay, penalty_scope=penalty_scope
  )
  step_advantage = advantages.group_normalize(
    (estimates, 0 * estimates),
    row_segments.groups,
    row_segments.real,
    norm=norm,
    tolerance=arrays.sum_tolerance(
      row_segments.returns[0], row_segments.groups
    ),
  )
  return advantages.make_components(
    row_segments, step_advantage, norm=norm, **others
  )
