"""Names, shapes and locations in our parameters of a checkpoint's tensors."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from gigpo_jax.models import layer_runs, parameters
from gigpo_jax.models.qwen_config import QwenConfig

# (group, name) of an array of a layer: (name of its tensor in the file within
# the layer, whether the tensor is stored as (out, in)).
LAYER_NAMES = {
  ('attention', 'q'): ('self_attn.q_proj.weight', True),
  ('attention', 'k'): ('self_attn.k_proj.weight', True),
  ('attention', 'v'): ('self_attn.v_proj.weight', True),
  ('attention', 'q_bias'): ('self_attn.q_proj.bias', False),
  ('attention', 'k_bias'): ('self_attn.k_proj.bias', False),
  ('attention', 'v_bias'): ('self_attn.v_proj.bias', False),
  ('attention', 'o_bias'): ('self_attn.o_proj.bias', False),
  ('attention', 'o'): ('self_attn.o_proj.weight', True),
  ('mlp', 'gate'): ('mlp.gate_proj.weight', True),
  ('mlp', 'up'): ('mlp.up_proj.weight', True),
  ('mlp', 'down'): ('mlp.down_proj.weight', True),
  ('experts', 'router'): ('mlp.gate.weight', True),
  ('experts', 'gate'): ('mlp.experts.{}.gate_proj.weight', True),
  ('experts', 'up'): ('mlp.experts.{}.up_proj.weight', True),
  ('experts', 'down'): ('mlp.experts.{}.down_proj.weight', True),
  ('norm', 'attention'): ('input_layernorm.weight', False),
  ('norm', 'mlp'): ('post_attention_layernorm.weight', False),
  ('norm', 'q'): ('self_attn.q_norm.weight', False),
  ('norm', 'k'): ('self_attn.k_norm.weight', False),
}
TOP_NAMES = {
  'embed': 'model.embed_tokens.weight',
  'norm': 'model.norm.weight',
  'unembed': 'lm_head.weight',
}


class Tensor(NamedTuple):
  """A tensor of a checkpoint and its location in our parameters.

  Attributes:
    path: path of the array in the tree of parameters.
    index: index of the tensor in the array: (), (n,) or (n, expert), for the
      n-th layer that has such an array.
    name: name in the file.
    shape: shape in the file.
    transposed: whether the tensor is stored as (out, in).
  """

  path: tuple[str, ...]
  index: tuple[int, ...]
  name: str
  shape: tuple[int, ...]
  transposed: bool


def tensors(config: QwenConfig) -> Iterator[Tensor]:
  """Yields the tensors of a checkpoint of a network."""
  shapes = parameters.shapes(config)
  for name, stored_name in TOP_NAMES.items():
    if name in shapes:
      yield Tensor((name,), (), stored_name, shapes[name], False)
  for (group, name), (template, transposed) in LAYER_NAMES.items():
    if name not in shapes['layers'].get(group, {}):
      continue
    # 1 for tensors of an expert, 0 for others.
    shape, expert_dims = shapes['layers'][group][name], template.count('{}')
    stored = _stored_shape(name, shape[1 + expert_dims :], transposed)
    layers = layer_runs.layers_of(config, group)
    for index in _indices(shape[: 1 + expert_dims]):
      layer = layers[index[0]]
      full_name = f'model.layers.{layer}.{template.format(*index[1:])}'
      path = ('layers', group, name)
      yield Tensor(path, index, full_name, stored, transposed)


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
  """Yields every index of a shape; unlike `np.ndindex`, lazily."""
  if not shape:
    yield ()
    return
  for first in range(shape[0]):
    for rest in _indices(shape[1:]):
      yield first, *rest


def _stored_shape(
  name: str, shape: tuple[int, ...], transposed: bool
) -> tuple[int, ...]:
  """Returns the shape in the file: heads flattened, matrices (out, in)."""
  if not transposed:
    return (math.prod(shape),)
  # Output projections flatten their two first dimensions, others their last.
  rows = shape[-1] if name == 'o' else math.prod(shape[1:])
  return rows, math.prod(shape) // rows


def leaf(tree: dict, path: tuple[str, ...]):
  """Returns the leaf of a nested dict at a path."""
  for key in path:
    tree = tree[key]
  return tree
