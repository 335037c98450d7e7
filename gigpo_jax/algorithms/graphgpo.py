"""GraphGPO (arXiv:2605.26684): how near a step came to success.

The steps of a group's episodes are the edges of a graph, whose nodes are
anchors. What a step is worth is told by how many steps it is from where it led
to a success, on any episode's way.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gigpo_jax import advantages, arrays, batch
from gigpo_jax.algorithms import gigpo

_FAR = 2**30  # steps


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """GiGPO with 10 graph_discount^d - c (1 - v) instead of G.

  d is the number of steps from where a step led to success; where none is
  known, one more than the largest of the group that is.

  Attributes:
    graph_discount: of a step's distance.
  """

  graph_discount: float = 0.1

  def parts(self, rows: batch.Rows) -> advantages.Parts:
    """Returns A_E, and A_S of these values."""
    return _parts(
      *self.inputs(rows),
      *nodes(rows),
      jnp.float32(self.graph_discount),
      **self.statistics(),
    )


def nodes(rows: batch.Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns (where each step led to, whether that is known, or success)."""
  known = rows.next_anchors >= 0
  following = jnp.asarray(jnp.maximum(rows.next_anchors, 0), jnp.int32)
  return following, jnp.asarray(known), jnp.asarray(rows.success)


@functools.partial(
  jax.jit,
  static_argnames=('norm', 'episode_stats', 'penalty_scope', 'lone_episode'),
)
def _parts(*given, norm, penalty_scope, **options):
  *given, following, known, success, graph_discount = given
  groups, anchors = given[1], given[4]
  found = advantages.describe(*given, penalty_scope=penalty_scope)
  here, there = edges(groups, anchors, following)
  steps = distances(found.groups, here, there, known, success)
  values = arrays.two_add((10 * graph_discount**steps, 0 * steps), found.cost)
  step = advantages.step_advantages(values, found.anchors, norm=norm)
  return advantages.parts_of(found, step, norm=norm, **options)


def edges(
  groups: Int[Array, ' R'],
  anchors: Int[Array, ' R'],
  following: Int[Array, ' R'],
) -> tuple[Int[Array, ' R'], Int[Array, ' R']]:
  """Returns nodes in [0, 2 R) that each step leads from and to."""
  joined = arrays.segment_ids(
    jnp.concatenate([groups, groups]), jnp.concatenate([anchors, following])
  )
  return joined[: len(groups)], joined[len(groups) :]


def distances(
  groups: Int[Array, ' R'],
  here: Int[Array, ' R'],
  there: Int[Array, ' R'],
  known: Bool[Array, ' R'],
  success: Bool[Array, ' R'],
) -> Float[Array, ' R']:
  """Returns the steps to success from where each step led to, 0 if it is it.

  Args:
    groups: segment of each row's group.
    here: node that a step leads from.
    there: node that it leads to.
    known: whether that is known; else nothing is near it.
    success: whether the step accomplishes the task.
  """
  number = 2 * len(here)

  def left(of_node: jax.Array) -> jax.Array:
    """Returns steps that are left after each row's."""
    return jnp.where(success, 0, jnp.where(known, of_node[there], _FAR))

  def relax(carry: tuple) -> tuple:
    of_node, _ = carry
    shorter = jax.ops.segment_min(1 + left(of_node), here, number)
    shorter = jnp.minimum(of_node, shorter)
    return shorter, jnp.any(shorter != of_node)

  start = (jnp.full(number, _FAR, jnp.int32), jnp.bool_(True))
  of_node, _ = jax.lax.while_loop(lambda carry: carry[1], relax, start)
  steps = left(of_node)
  reached = jnp.where(steps < _FAR, steps, 0)
  # Of the nodes, too, that steps lead from: the farthest are led to by none.
  reached = jnp.maximum(
    reached, jnp.where(of_node[here] < _FAR, of_node[here], 0)
  )
  most = jax.ops.segment_max(reached, groups, len(groups))[groups]
  return jnp.where(steps < _FAR, steps, most + 1).astype(jnp.float32)
