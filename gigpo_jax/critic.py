"""The critic: the policy's network, with its adapters if any, and a value head.

It is a learner with a different head and loss, over the same packed rows. The
value of a completion token is computed at the preceding token, so it depends
only on the prompt and the earlier completion tokens.
"""

import concurrent.futures
import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Bool, Float

from gigpo_jax import batch, learner, losses, options
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import parameters, qwen
from gigpo_jax.runtime import compilation

# Metric of the learner -> the name under which the critic reports it.
_METRICS = {
  'loss/total': 'critic/loss',
  'value/clipped': 'critic/clipped',
  'update/grad_norm': 'critic/grad_norm',
  'update/skipped': 'critic/skipped',
  'update/skipped_in_row': 'critic/skipped_in_row',
  'update/most_skipped_in_row': 'critic/most_skipped_in_row',
  'update/count': 'critic/count',
}


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the critic, `config.critic`; see configs/base.py."""

  rate_ratio: float = options.number(10.0, low=0)
  value_clip: float = options.number(0.5, above=0)
  warmup_iterations: int = options.number(0, low=0)

  def __post_init__(self):
    options.check(self)


class Critic:
  """Predicts values of completion tokens and learns them by regression.

  Args:
    config: shape of the policy's network.
    mesh: the device mesh.
    value_clip: largest change of a value that the loss rewards, relative to
      the value before the update; in reward units.
    optimizer: the optimizer of the critic's parameters.
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
      loss=losses.ValueRegression(value_clip),
      optimizer=optimizer,
      aggregation='sequence_mean',
      **kwargs,
    )

  def init(self, params: dict) -> learner.TrainState:
    """Returns an initial state whose values are 0.

    Args:
      params: the policy's initial parameters; the state takes ownership. With
        adapters, only these and the value head are trained.
    """
    head = mesh_lib.shardings(self._mesh, parameters.logical_axes(self._config))
    zeros = jax.device_put(
      np.zeros(self._config.hidden_size, np.float32), head['value']
    )
    backbone = {name: x for name, x in params.items() if name != 'unembed'}
    return self._learner.init(backbone | {'value': zeros})

  def abstract_state(self) -> learner.TrainState:
    """Returns a state's shapes, dtypes and shardings."""
    return self._learner.abstract_state()[0]

  def compile(
    self, compiler: compilation.Compiler
  ) -> list[concurrent.futures.Future]:
    """Starts the compilation of all programs; see `Learner.compile`."""
    return self._learner.compile(compiler)

  def warm_up(self, state: learner.TrainState) -> learner.TrainState:
    """Runs the largest programs once; returns the state unchanged."""
    return self._learner.warm_up(state)

  def values(self, params: dict, rows: batch.Rows) -> Float[np.ndarray, 'R C']:
    """Returns the value before each completion token; 0 past the completion."""
    return self._learner.values(params, rows)

  def update(
    self,
    state: learner.TrainState,
    rows: batch.Rows,
    *,
    values: Float[np.ndarray, 'R C'],
    targets: Float[np.ndarray, 'R C'],
    value_mask: Bool[np.ndarray, 'R C'] | None,
    iteration: int,
    skipped_before: float = 0.0,
  ) -> tuple[learner.TrainState, dict[str, float]]:
    """Trains for `learner.epochs` passes over the rows.

    Args:
      state: donated.
      rows: the rows of an iteration.
      values: values before the update.
      targets: regression targets.
      value_mask: True at the positions that have a target; the positions of a
        row share the row's total weight. None for all completion tokens.
      iteration: with the seed, determines the shuffling.
      skipped_before: number of consecutive updates skipped just before.

    Returns:
      The new state and metrics named 'critic/...'.
    """
    tokens = rows.completion_mask.sum(axis=1, keepdims=True)
    if value_mask is None:
      value_mask = rows.completion_mask
    num_positions = np.maximum(value_mask.sum(axis=1, keepdims=True), 1)
    weights = np.where(value_mask, tokens / num_positions, 0).astype(np.float32)
    state, metrics = self._learner.update(
      state,
      rows,
      iteration=iteration,
      skipped_before=skipped_before,
      old_values=values,
      value_targets=targets,
      value_weights=weights,
    )
    # Convert the mean over tokens to a mean over the positions with a target.
    metrics['value/clipped'] *= tokens.sum() / max(value_mask.sum(), 1)
    return state, {new: metrics[old] for old, new in _METRICS.items()}
