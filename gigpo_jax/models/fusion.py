"""Matrices with the same input as one matrix, for the sampler.

A decoding step is a sequence of small matmuls, so fewer and wider matmuls are
faster. The columns of a fused matrix are ordered by groups, `QwenConfig.fused`
in number, and each group has the same share of every part: query heads, and the
keys and values of these heads. A matrix that is sharded over the groups thus
gives each device the parts of its own heads.

Shapes: **O** columns of a fused matrix, **G** groups.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gigpo_jax.models.qwen_config import QwenConfig

# The parts of each fused matrix, and the group of a layer that has it.
PARTS = {'qkv': ('q', 'k', 'v'), 'gate_up': ('gate', 'up')}
_GROUPS = {'attention': 'qkv', 'mlp': 'gate_up', 'shared': 'gate_up'}

# Suffix of the names of biases.
BIAS = '_bias'


def fuse(
  layer: dict[str, dict], join: Callable[[str, list], Any]
) -> dict[str, dict]:
  """Returns a layer's arrays with the parts of fused arrays replaced by these.

  Args:
    layer: arrays of a layer, or anything in their place, by group and name.
    join: (name of a fused array, its parts) -> the fused array.
  """
  fused = {}
  for group, arrays in layer.items():
    fused[group] = dict(arrays)
    matrix = _GROUPS.get(group)
    for suffix in ('', BIAS) if matrix else ():
      parts = [
        fused[group].pop(part + suffix)
        for part in PARTS[matrix]
        if part + suffix in arrays
      ]
      if parts:
        fused[group][matrix + suffix] = join(matrix + suffix, parts)
  return fused


def join_shapes(name: str, parts: list[tuple]) -> tuple:
  """Returns (shape, logical axes) of a fused array.

  Args:
    name: name of the fused array.
    parts: shape and logical axes of each part.
  """
  inputs = _num_inputs(name)
  columns = sum(math.prod(shape[inputs:]) for shape, _ in parts)
  # The last part has a column dimension by which the groups are sharded.
  shape, axes = parts[-1]
  return (*shape[:inputs], columns), axes[: inputs + 1]


def join_arrays(
  config: QwenConfig, name: str, parts: list[jax.Array]
) -> jax.Array:
  """Returns a fused array of all layers, [N, inputs.., O].

  Args:
    config: shape of the network.
    name: name of the fused array.
    parts: its parts, [N, inputs.., outputs..] each.
  """
  leading = 1 + _num_inputs(name)
  grouped = [
    part.reshape(*part.shape[:leading], config.fused, -1) for part in parts
  ]
  joined = jnp.concatenate(grouped, axis=-1)
  return joined.reshape(*joined.shape[:leading], -1)


def _num_inputs(name: str) -> int:
  return 0 if name.endswith(BIAS) else 1


def split(
  config: QwenConfig, name: str, y_BLO: jax.Array
) -> tuple[jax.Array, ...]:
  """Splits the product with a fused matrix into the products with its parts.

  Args:
    config: shape of the network.
    name: 'qkv' or 'gate_up'.
    y_BLO: the product.

  Returns:
    [B, L, H, E], [B, L, K, E] and [B, L, K, E] for 'qkv', with [B, L, 2 H, E]
    if each query has a gate; [B, L, F] twice for 'gate_up'.
  """
  y_BLGI = y_BLO.reshape(*y_BLO.shape[:-1], config.fused, -1)
  if name == 'gate_up':
    parts = jnp.split(y_BLGI, 2, axis=-1)
    outputs = (-1,)
  else:
    queries = config.num_heads * config.head_dim // config.fused
    queries *= 1 + config.attention_gate
    keys = config.num_kv_heads * config.head_dim // config.fused
    parts = jnp.split(y_BLGI, (queries, queries + keys), axis=-1)
    outputs = (-1, config.head_dim)
  return tuple(part.reshape(*y_BLO.shape[:-1], *outputs) for part in parts)
