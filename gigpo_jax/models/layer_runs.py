"""Layers of one network that differ: dense MLPs among experts, and windows.

The parameters of a group ('attention', 'mlp', ..) are stacked over the layers
that have it. Consecutive layers of the same shape are a run, which one scan
applies.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from gigpo_jax.models.qwen_config import QwenConfig


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
  if not (config.dense_layers or config.window_layers):
    return (Run(config, 0, count),)
  windowed = config.window_layers or range(count)
  kinds = [(n in config.dense_layers, n in windowed) for n in range(count)]
  starts = [n for n in range(count) if not n or kinds[n] != kinds[n - 1]]
  return tuple(
    Run(_only(config, *kinds[start]), start, stop)
    for start, stop in zip(starts, [*starts[1:], count], strict=True)
  )


def _only(config: QwenConfig, is_dense: bool, is_windowed: bool) -> QwenConfig:
  """Returns the shape of a network whose layers are all of one kind."""
  changes: dict[str, Any] = {'dense_layers': (), 'window_layers': ()}
  if is_dense:
    changes |= {'num_experts': 0, 'intermediate_size': config.dense_size}
  if not is_windowed:
    changes['window'] = 0
  return dataclasses.replace(config, **changes)


def config_of(config: QwenConfig, layer: int) -> QwenConfig:
  """Returns the shape of a network whose layers are all like one layer."""
  return next(run.config for run in runs(config) if layer < run.stop)


def layers_of(config: QwenConfig, group: str) -> Sequence[int]:
  """Returns the indices of the layers with a group of parameters."""
  every = range(config.num_layers)
  if not config.dense_layers or group not in ('mlp', 'experts'):
    return every
  is_dense = group == 'mlp'
  return tuple(n for n in every if (n in config.dense_layers) == is_dense)


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
  taken = {}
  for group, arrays in layers.items():
    part = _indices(config, group, start, stop)
    if part.stop > part.start:
      taken[group] = jax.tree.map(lambda leaf, p=part: leaf[p], arrays)
  return taken


def take_groups(
  config: QwenConfig, layers: dict[str, Any], start: int, stop: int
) -> dict[str, Any]:
  """Returns the groups of the layers from `start` to `stop`, not sliced."""
  return {
    group: leaves
    for group, leaves in layers.items()
    if (part := _indices(config, group, start, stop)).stop > part.start
  }


def _indices(config: QwenConfig, group: str, start: int, stop: int) -> slice:
  """Returns where a group's stack holds the layers from `start` to `stop`."""
  layers = layers_of(config, group)
  if isinstance(layers, range):
    return slice(start, stop)
  return slice(*(sum(n < end for n in layers) for end in (start, stop)))
