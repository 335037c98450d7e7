"""HGPO (arXiv:2602.22817): compares steps with equal preceding anchors, too.

An anchor is the state in which a step was taken. G is the discounted return
from a step, and A_E is GiGPO's episode advantage.

Level k = 1, 2, .., K + 1 compares the steps of a group whose last k anchors are
equal; level 1 is GiGPO's anchor group. Step t, from 0, has t + 1 anchors so far
and is part of the first t + 1 levels only. If a level has no other step to
compare with, the remaining levels share its weight.

# Differs from the paper: the authors' code also drops advantages of exactly 0.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_collections
from jaxtyping import Array, Bool, Int

from gigpo_jax import advantages, arrays, batch, options
from gigpo_jax.algorithms import gigpo


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the anchors are no states, or contain their history."""
  if config.algorithm.anchor_history:
    yield (
      f'algorithm.anchor_history={config.algorithm.anchor_history}: hgpo '
      'compares histories itself (algorithm.history); must be 0'
    )
  if config.algorithm.anchor == 'shuffled' and config.algorithm.history:
    yield (
      'algorithm.anchor=shuffled: would leave hgpo few equal histories; set '
      'algorithm.history to 0, or algorithm.name to gigpo'
    )


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A = episode_weight A_E + sum of w_k A_k; default weight 0.

  The weights w_k are proportional to (k + 1)^alpha and have the sum 1. A_k is
  (G - mean) / (std + 1e-6), or without the division, over level k, with the
  population std (ddof 0).

  Attributes:
    history: K, the number of preceding anchors to compare; at most 64.
    level_exponent: alpha, the exponent of the weight of level k,
      (k + 1)^alpha; 1 in the paper.
  """

  default_episode_weight: ClassVar[float] = 0.0

  step_weight: float = dataclasses.field(default=1.0, init=False)
  history: int = options.number(2, low=0, high=64)
  level_exponent: float = options.number(1.0, low=-20, high=20)

  def components(self, rows: batch.Rows) -> advantages.Components:
    """Returns A_E, and the weighted sum of the levels as A_S."""
    return _components(
      self.inputs(rows),
      jnp.float32(self.level_exponent),
      history=self.history,
      **self.statistics(),
    )


@functools.partial(
  jax.jit,
  static_argnames=('history', *advantages.STATISTICS),
)
def _components(
  inputs, level_exponent, *, history, norm, penalty_scope, **statistics
):
  row_segments = advantages.segment_rows(inputs, penalty_scope=penalty_scope)
  all_rows = jnp.ones_like(row_segments.starts)
  total = weights = jnp.zeros(len(all_rows))
  for k, (segments, complete) in enumerate(levels(row_segments, history), 1):
    compared = complete & (arrays.segment_count(segments, all_rows) > 1)
    weight = jnp.where(compared, (k + 1.0) ** level_exponent, 0)
    total += weight * advantages.group_normalize(
      row_segments.returns, segments, all_rows, norm=norm, ddof=0
    )
    weights += weight
  step_advantage = jnp.where(
    weights > 0, total / jnp.maximum(weights, 1e-30), 0
  )
  return advantages.make_components(
    row_segments, step_advantage, norm=norm, **statistics
  )


def levels(
  row_segments: advantages.RowSegments, history: int
) -> list[tuple[Int[Array, ' R'], Bool[Array, ' R']]]:
  """Returns the levels k = 1, .., history + 1.

  A level is (segment of each step, whether the step has k anchors). Steps
  share a segment of level k if their last k anchors are equal. A step with
  fewer than k anchors shares no segment with a step that has k anchors.
  """
  segments, complete = row_segments.anchors, jnp.ones_like(row_segments.starts)
  all_levels = [(segments, complete)]
  for _ in range(history):
    previous_segments = jnp.append(segments, -1)[row_segments.previous]
    segments = arrays.segment_ids(row_segments.anchors, previous_segments)
    complete = jnp.append(complete, False)[row_segments.previous]
    all_levels.append((segments, complete))
  return all_levels
