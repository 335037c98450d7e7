"""G2PO (arXiv:2606.22995): what a state was worth to all who came by.

V of an anchor is the mean, over the group's visits, of the episode's reward,
discounted by the steps that were left.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gigpo_jax import advantages, arrays, batch
from gigpo_jax.algorithms import gigpo

_SAME = 2.0**-18


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A_S = z(V' - c (1 - v)) over the anchor group + z(V' - V) over the group.

  V' is the value of where a step led to; at the end of an episode its reward.
  """

  def parts(self, rows: batch.Rows) -> advantages.Parts:
    """Returns A_E, and A_S of these values."""
    return _parts(*self.inputs(rows), **self.statistics())


@functools.partial(
  jax.jit,
  static_argnames=('norm', 'episode_stats', 'penalty_scope', 'lone_episode'),
)
def _parts(*given, norm, penalty_scope, **options):
  rewards, steps, discount = given[0][0], given[3], given[6][0]
  found = advantages.describe(*given, penalty_scope=penalty_scope)
  here, there = values(found, rewards, steps, discount)
  # Sums of float32: equal ones may differ in their last bits.
  near = {'norm': norm, 'tolerance': _SAME * jnp.max(jnp.abs(here))}
  both = advantages.step_advantages(
    arrays.two_add((there, 0 * there), found.cost), found.anchors, **near
  )
  gain = there - here
  both += advantages.group_normalize(
    (gain, 0 * gain), found.groups, found.real, **near
  )
  return advantages.parts_of(found, both, norm=norm, **options)


def values(
  found: advantages.Described,
  rewards: Float[Array, ' R'],
  steps: Int[Array, ' R'],
  discount: Float[Array, ''],
) -> tuple[Float[Array, ' R'], Float[Array, ' R']]:
  """Returns the value of where each step was taken, and of where it led to.

  Args:
    found: of the rows.
    rewards: without penalties.
    steps: numbers within episodes.
    discount: a step.
  """
  every, number = jnp.ones_like(found.real), len(steps)
  rewards = arrays.segment_sum(rewards, found.episodes, every)
  last = jax.ops.segment_max(steps, found.episodes, number)[found.episodes]
  left = discount ** (last + 1 - steps) * rewards
  visits = arrays.segment_count(found.anchors, every)
  here = arrays.segment_sum(left, found.anchors, every) / visits
  # At the end of an episode there is its reward.
  there = rewards.at[found.previous].set(here, mode='drop')
  return here, there
