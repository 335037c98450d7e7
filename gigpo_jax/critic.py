"""A critic: the policy's network with one number for each token.

It is a learner with another end and another loss: the same packs of the same
rows. A value is read ahead of each completion token, and so is a function of
the prompt and of the tokens before.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float

from gigpo_jax import batch, learner, losses
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import qwen


class Critic:
  """Tells values of the places in rows, and learns them.

  Args:
    config: shape of the policy.
    mesh: the devices.
    value_clip: how far an update may move a value from what it was.
    **kwargs: further arguments of `learner.Learner`.
  """

  def __init__(
    self,
    config: qwen.QwenConfig,
    mesh: jax.sharding.Mesh,
    *,
    value_clip: float,
    optimizer: optax.GradientTransformation,
    **kwargs: Any,
  ):
    self._config = dataclasses.replace(config, value_head=True)
    self._mesh = mesh
    self._learner = learner.Learner(
      self._config,
      mesh,
      loss=functools.partial(losses.value_regression, value_clip=value_clip),
      optimizer=optimizer,
      outputs=lambda params, hidden: (
        qwen.values(params, hidden),
        jnp.zeros(hidden.shape[:-1]),
      ),
      aggregation='sequence_mean',
      **kwargs,
    )

  def init(self, params: dict) -> learner.TrainState:
    """Returns a fresh state, whose values are 0.

    Args:
      params: of the policy, from which it starts; taken over.
    """
    head = mesh_lib.shardings(self._mesh, qwen.logical_axes(self._config))
    zeros = jax.device_put(
      np.zeros(self._config.hidden_size, np.float32), head['value']
    )
    kept = {name: x for name, x in params.items() if name != 'unembed'}
    return self._learner.init(kept | {'value': zeros})

  def describe(self) -> learner.TrainState:
    """Returns shapes, types and shardings of a state."""
    return self._learner.describe()[0]

  def num_programs(self) -> int:
    """Returns how many calls `warm_up` counts."""
    return self._learner.num_programs()

  def warm_up(
    self, state: learner.TrainState, advance: Callable[[], None] = lambda: None
  ) -> learner.TrainState:
    """Compiles every program; returns the state as it was."""
    return self._learner.warm_up(state, advance=advance)

  def values(self, params: dict, rows: batch.Rows) -> Float[np.ndarray, 'R C']:
    """Returns the value ahead of each completion token; 0 past the end."""
    return self._learner.log_probs(params, rows)

  def update(
    self,
    state: learner.TrainState,
    rows: batch.Rows,
    *,
    values: Float[np.ndarray, 'R C'],
    targets: Float[np.ndarray, 'R C'],
    links: Bool[np.ndarray, 'R C'],
    iteration: int,
    skipped_before: float = 0.0,
  ) -> tuple[learner.TrainState, dict[str, float]]:
    """Passes once over the rows.

    Args:
      state: donated.
      rows: of an iteration.
      values: before the update.
      targets: what is to be learnt.
      links: where; each row's weigh as much as another's, together.
      iteration: with the seed it determines the shuffling.
      skipped_before: how many of the updates before were skipped in a row.

    Returns:
      The new state and metrics, names 'critic/...'.
    """
    tokens = rows.completion_mask.sum(axis=1, keepdims=True)
    number = np.maximum(links.sum(axis=1, keepdims=True), 1)
    weights = np.where(links, tokens / number, 0).astype(np.float32)
    state, metrics = self._learner.update(
      state,
      rows,
      targets,
      old_log_probs=values,
      ref_log_probs=None,
      importance=weights,
      iteration=iteration,
      skipped_before=skipped_before,
    )
    names = {
      'loss/total': 'critic/loss',
      'value/clipped': 'critic/clipped',
      'update/grad_norm': 'critic/grad_norm',
      'update/skipped': 'critic/skipped',
      'update/skipped_in_row': 'critic/skipped_in_row',
      'update/most_skipped_in_row': 'critic/most_skipped_in_row',
      'update/count': 'critic/count',
    }
    # Of links, not of tokens.
    metrics['value/clipped'] *= tokens.sum() / max(links.sum(), 1)
    return state, {new: metrics[old] for old, new in names.items()}
