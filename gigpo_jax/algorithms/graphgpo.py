"""GraphGPO (arXiv:2605.26684): advantages from the distance to success.

The steps of a group's episodes are the edges of a graph, and the anchors, the
states, are its nodes. The value of a step decreases with the length of the
shortest path from the state after it to success, along edges of any episode of
the group. This value replaces G, GiGPO's discounted return from a step, in the
step advantage A_S. The episode advantage A_E is GiGPO's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gigpo_jax import advantages, arrays, batch, options
from gigpo_jax.algorithms import gigpo

# Distance of nodes without a path to success, in steps.
_UNREACHABLE = 2**30


# A failed action stays in its state, and states include what an agent holds.
PRESETS = {'graphgpo': {'algorithm.anchor': 'state'}}


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """GiGPO with 10 graph_discount^d - c (1 - v) in place of G.

  c is `invalid_penalty`, and v is 1 for a valid response, else 0. d is the
  number of steps from the state after a step to success. Without a path to
  success, d is one more than the group's largest finite distance.

  Attributes:
    graph_discount: discount per step of distance, in [0, 1].
  """

  graph_discount: float = options.number(0.1, low=0, high=1)

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and A_S computed from distances to success."""
    return _components(
      self.inputs(rows),
      nodes(rows),
      jnp.float32(self.graph_discount),
      **self.statistics(),
    )


def nodes(rows: batch.Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns each step's (next anchor, whether it is known, success)."""
  known = rows.next_anchors >= 0
  following = jnp.asarray(jnp.maximum(rows.next_anchors, 0), jnp.int32)
  return following, jnp.asarray(known), jnp.asarray(rows.success)


@functools.partial(
  jax.jit,
  static_argnames=('norm', 'episode_stats', 'penalty_scope', 'lone_episode'),
)
def _components(
  inputs, graph_nodes, graph_discount, *, norm, penalty_scope, **statistics
):
  following, known, success = graph_nodes
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  sources, targets = edges(inputs.groups, inputs.anchors, following)
  steps = distances(row_segments.groups, sources, targets, known, success)
  values = arrays.two_add(
    (10 * graph_discount**steps, 0 * steps), row_segments.cost
  )
  step_advantage = advantages.step_advantages(
    values, row_segments.anchors, norm=norm
  )
  return advantages.make_components(
    row_segments, step_advantage, norm=norm, **statistics
  )


def edges(
  groups: Int[Array, ' R'],
  anchors: Int[Array, ' R'],
  following: Int[Array, ' R'],
) -> tuple[Int[Array, ' R'], Int[Array, ' R']]:
  """Returns the source and target node of each step, in [0, 2 R)."""
  ids = arrays.segment_ids(
    jnp.concatenate([groups, groups]), jnp.concatenate([anchors, following])
  )
  return ids[: len(groups)], ids[len(groups) :]


def distances(
  groups: Int[Array, ' R'],
  sources: Int[Array, ' R'],
  targets: Int[Array, ' R'],
  known: Bool[Array, ' R'],
  success: Bool[Array, ' R'],
) -> Float[Array, ' R']:
  """Returns the number of steps to success after each row's step.

  Successful steps have distance 0. Steps without a path to success have one
  more than the group's largest finite distance.

  Args:
    groups: segment id of each row's group.
    sources: source node of each step.
    targets: target node of each step.
    known: whether the target is known; otherwise it has no path to success.
    success: whether the step accomplishes the task.
  """
  num_nodes = 2 * len(sources)

  def remaining(node_distances: jax.Array) -> jax.Array:
    """Returns the distance to success after each row's step."""
    return jnp.where(
      success, 0, jnp.where(known, node_distances[targets], _UNREACHABLE)
    )

  def relax(carry: tuple) -> tuple:
    node_distances, _ = carry
    shorter = jax.ops.segment_min(
      1 + remaining(node_distances), sources, num_nodes
    )
    shorter = jnp.minimum(node_distances, shorter)
    return shorter, jnp.any(shorter != node_distances)

  initial = (jnp.full(num_nodes, _UNREACHABLE, jnp.int32), jnp.bool_(True))
  node_distances, _ = jax.lax.while_loop(lambda carry: carry[1], relax, initial)
  steps = remaining(node_distances)
  finite = jnp.where(steps < _UNREACHABLE, steps, 0)
  # Include source nodes: the farthest node may be the target of no step.
  finite = jnp.maximum(
    finite,
    jnp.where(
      node_distances[sources] < _UNREACHABLE, node_distances[sources], 0
    ),
  )
  largest = jax.ops.segment_max(finite, groups, len(groups))[groups]
  return jnp.where(steps < _UNREACHABLE, steps, largest + 1).astype(jnp.float32)
