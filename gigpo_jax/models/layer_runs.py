"""Layers of one network that differ, in attention or MLP.

A layer may have a window, a dense MLP among experts, or a state instead of
attention (`delta_net`). An array of a group ('attention', 'mlp', ..) is stacked
over the layers that have it. Consecutive layers of the same shape are a run,
which one scan applies.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gigpo_jax.models.qwen_config import QwenConfig

# Arrays that only layers with attention have, besides those of 'attention'.
_HEAD_NORMS = (('norm', 'q'), ('norm', 'k'))


class Run(NamedTuple):
  """Consecutive layers of the same shape.

  Attributes:
    config: shape of a network of such layers only.
    start: index of the first layer.
    stop: index after the last layer.
  """

  config: QwenConfig
  start: int
  stop: int


@functools.lru_cache
def runs(config: QwenConfig) -> tuple[Run, ...]:
  """Returns the runs of a network, in the order of its layers."""
  count = config.num_layers
  if not (config.dense_layers or config.window_layers or config.delta_layers):
    return (Run(config, 0, count),)
  kinds = [_kind(config, n) for n in range(count)]
  starts = [n for n in range(count) if not n or kinds[n] != kinds[n - 1]]
  return tuple(
    Run(_only(config, *kinds[start]), start, stop)
    for start, stop in zip(starts, [*starts[1:], count], strict=True)
  )


def _kind(config: QwenConfig, n: int) -> tuple[bool, bool, bool]:
  """Returns whether a layer is dense, has a window, and has a state."""
  has_state = config.delta is not None and (
    not config.delta_layers or n in config.delta_layers
  )
  has_window = not config.window_layers or n in config.window_layers
  return n in config.dense_layers, has_window and not has_state, has_state


def _only(
  config: QwenConfig, is_dense: bool, has_window: bool, has_state: bool
) -> QwenConfig:
  """Returns the shape of a network whose layers are all of one kind."""
  changes: dict[str, Any] = {
    'dense_layers': (),
    'window_layers': (),
    'delta_layers': (),
  }
  if is_dense:
    changes |= {'num_experts': 0, 'shared_size': 0}
    changes['intermediate_size'] = config.dense_size
  if not has_window:
    changes['window'] = 0
  if not has_state:
    changes['delta'] = None
  return dataclasses.replace(config, **changes)


def can_branch(config: QwenConfig) -> bool:
  """Returns whether texts of a sequence may branch.

  A window and a state reach back to the tokens just before, which belong to
  another branch.
  """
  return not (config.window or config.delta)


def config_of(config: QwenConfig, layer: int) -> QwenConfig:
  """Returns the shape of a network whose layers are all like one layer."""
  return next(run.config for run in runs(config) if layer < run.stop)


def layers_of(config: QwenConfig, group: str, name: str = '') -> Sequence[int]:
  """Returns the indices of the layers with an array.

  Args:
    config: shape of the network.
    group: group of the array.
    name: its name; '' for a group whose arrays are all in the same layers.
  """
  every = range(config.num_layers)
  if group in ('mlp', 'experts', 'shared') and config.dense_layers:
    is_dense = group == 'mlp'
    return tuple(n for n in every if (n in config.dense_layers) == is_dense)
  of_attention = group == 'attention' or (group, name) in _HEAD_NORMS
  if config.delta_layers and (of_attention or group == 'delta'):
    has_state = group == 'delta'
    return tuple(n for n in every if (n in config.delta_layers) == has_state)
  return every


def take(
  config: QwenConfig, layers: dict[str, Any], start: int, stop: int
) -> dict[str, Any]:
  """Returns the stacked parameters of the layers from `start` to `stop`.

  Args:
    config: shape of the network.
    layers: stacked parameters of all layers, by group.
    start: index of the first layer.
    stop: index after the last layer, of the same run.
  """
  return _select(config, layers, start, stop, lambda leaf, part: leaf[part])


def take_groups(
  config: QwenConfig, layers: dict[str, Any], start: int, stop: int
) -> dict[str, Any]:
  """Returns the arrays of the layers from `start` to `stop`, not sliced."""
  return _select(config, layers, start, stop, lambda leaf, _: leaf)


def _select(
  config: QwenConfig, layers: dict, start: int, stop: int, use: Callable
) -> dict[str, Any]:
  """Returns use(leaf, slice of its stack) of all arrays of some layers."""
  selected: dict[str, Any] = {}
  for group, arrays in layers.items():
    for name, leaf in arrays.items():
      part = _indices(config, group, name, start, stop)
      if part.stop > part.start:
        selected.setdefault(group, {})[name] = use(leaf, part)
  return selected


def _indices(
  config: QwenConfig, group: str, name: str, start: int, stop: int
) -> slice:
  """Returns where an array's stack holds the layers from `start` to `stop`."""
  layers = layers_of(config, group, name)
  if isinstance(layers, range):
    return slice(start, stop)
  return slice(*(sum(n < end for n in layers) for end in (start, stop)))
