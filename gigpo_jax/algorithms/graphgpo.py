"""GraphGPO (arXiv:2605.26684): advantages from the distance to success.

The steps of a group's episodes are the edges of a graph, and the anchors, the
states, are its nodes. The value of a step decreases with the length of the
shortest path from the state after it to success, along edges of any episode of
the group. This value replaces G, GiGPO's discounted return from a step, in the
step advantage A_S. The episode advantage A_E is GiGPO's.

# Differs from the paper: as in the released code, the exponent d does not count
the step itself; Eq. (4) has d + 1. Values are thus larger by the factor 1 /
graph_discount.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from gigpo_jax import (
  advantages,
  arrays,
  batch,
  options,
  reward_functions,
  row_stats,
  state_graph,
)
from gigpo_jax.algorithms import gigpo

# A failed action stays in its state, and states include what an agent holds.
PRESETS = {'graphgpo': {'algorithm.anchor': 'state'}}


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each reward that would have no effect."""
  if config.algorithm.episode_weight == 0:
    yield from reward_functions.refuse_success_only(config)


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """GiGPO with 10 graph_discount^d - c (1 - v) in place of G.

  c is `invalid_penalty`, and v is 1 for a valid response, else 0. d is the
  number of steps from the state after a step to success. Without a path to
  success, d is one more than the group's largest finite distance.

  Attributes:
    graph_discount: discount per step that remains to success; 0.1 in
      the released code.
  """

  reads_success: ClassVar[bool] = True

  graph_discount: float = options.number(0.1, low=0, high=1)

  @property
  def unused(self) -> tuple[str, ...]:
    """Options that it ignores: distances replace the discounted return."""
    return ('discount', *super().unused)

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and A_S computed from distances to success."""
    return _components(
      self.inputs(rows),
      nodes(rows),
      jnp.float32(self.graph_discount),
      **self.statistics(),
    )


def nodes(rows: batch.Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns each step's (next anchor, whether it is known, success).

  With several agents, the next state is that of the agent's own next step.
  """
  index = row_stats.next_rows(rows)
  following = np.where(index >= 0, rows.anchors[index], rows.next_anchors)
  return tuple(
    map(jnp.asarray, (np.maximum(following, 0), following >= 0, rows.success))
  )


@advantages.jit
def _components(
  inputs, graph_nodes, graph_discount, *, norm, penalty_scope, **statistics
):
  following, known, success = graph_nodes
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  sources, targets = state_graph.edges(inputs.groups, inputs.anchors, following)
  steps = state_graph.distances(
    row_segments.groups, sources, targets, known, success
  )
  values = arrays.two_add(
    (10 * graph_discount**steps, 0 * steps), row_segments.cost
  )
  step_advantage = advantages.step_advantages(
    values, row_segments.anchors, norm=norm
  )
  return advantages.make_components(
    row_segments, step_advantage, norm=norm, **statistics
  )
