"""Graphs of states: distances to success along the steps of a group.

The steps of a group's episodes are the edges of a graph, and the states before
and after them are its nodes. Inputs and outputs are arrays with one entry per
row, as in `advantages`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gigpo_jax import arrays

# Distance of nodes without a path to success, in steps.
_UNREACHABLE = 2**30


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
