"""Names, shapes and locations in our parameters of a checkpoint's tensors."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gigpo_jax.models import layer_runs, parameters
from gigpo_jax.models.qwen_config import QwenConfig


class Stored(NamedTuple):
  """A tensor of a layer in a file.

  Attributes:
    name: its name within the layer; {} is the expert.
    transposed: whether it is stored as (out, in).
    parts: its parts if it holds a part of the columns of our array; see
      `qwen_config.Delta.widths`. In the file, each part is contiguous; in our
      array, all columns of a head are.
  """

  name: str
  transposed: bool = True
  parts: tuple[str, ...] = ()


_QKV = ('q', 'k', 'v')

# (group, name) of an array of a layer: its tensor in the file.
_NAMES = {
  ('attention', 'q'): Stored('self_attn.q_proj.weight'),
  ('attention', 'k'): Stored('self_attn.k_proj.weight'),
  ('attention', 'v'): Stored('self_attn.v_proj.weight'),
  ('attention', 'q_bias'): Stored('self_attn.q_proj.bias', False),
  ('attention', 'k_bias'): Stored('self_attn.k_proj.bias', False),
  ('attention', 'v_bias'): Stored('self_attn.v_proj.bias', False),
  ('attention', 'o_bias'): Stored('self_attn.o_proj.bias', False),
  ('attention', 'o'): Stored('self_attn.o_proj.weight'),
  ('mlp', 'gate'): Stored('mlp.gate_proj.weight'),
  ('mlp', 'up'): Stored('mlp.up_proj.weight'),
  ('mlp', 'down'): Stored('mlp.down_proj.weight'),
  ('experts', 'router'): Stored('mlp.gate.weight'),
  ('experts', 'gate'): Stored('mlp.experts.{}.gate_proj.weight'),
  ('experts', 'up'): Stored('mlp.experts.{}.up_proj.weight'),
  ('experts', 'down'): Stored('mlp.experts.{}.down_proj.weight'),
  ('shared', 'gate'): Stored('mlp.shared_expert.gate_proj.weight'),
  ('shared', 'up'): Stored('mlp.shared_expert.up_proj.weight'),
  ('shared', 'down'): Stored('mlp.shared_expert.down_proj.weight'),
  ('shared', 'mix'): Stored('mlp.shared_expert_gate.weight'),
  ('norm', 'attention'): Stored('input_layernorm.weight', False),
  ('norm', 'mlp'): Stored('post_attention_layernorm.weight', False),
  ('norm', 'q'): Stored('self_attn.q_norm.weight', False),
  ('norm', 'k'): Stored('self_attn.k_norm.weight', False),
  ('delta', 'log_rate'): Stored('linear_attn.A_log', False),
  ('delta', 'step_bias'): Stored('linear_attn.dt_bias', False),
  ('delta', 'norm'): Stored('linear_attn.norm.weight', False),
  ('delta', 'o'): Stored('linear_attn.out_proj.weight'),
}
# The same for arrays that several tensors make up.
_PARTS = {
  ('delta', 'qkvz'): (
    Stored('linear_attn.in_proj_qkv.weight', parts=_QKV),
    Stored('linear_attn.in_proj_z.weight', parts=('z',)),
  ),
  ('delta', 'ba'): (
    Stored('linear_attn.in_proj_b.weight', parts=('b',)),
    Stored('linear_attn.in_proj_a.weight', parts=('a',)),
  ),
  ('delta', 'conv'): (Stored('linear_attn.conv1d.weight', parts=_QKV),),
}
# The same where a file has the columns of a head together.
_JOINED = {
  ('delta', 'qkvz'): (Stored('linear_attn.in_proj_qkvz.weight'),),
  ('delta', 'ba'): (Stored('linear_attn.in_proj_ba.weight'),),
}
_LAYER_NAMES = {key: (stored,) for key, stored in _NAMES.items()} | _PARTS
TOP_NAMES = {
  'embed': 'model.embed_tokens.weight',
  'norm': 'model.norm.weight',
  'unembed': 'lm_head.weight',
}

# Prefix of the names of the text part in a checkpoint with a vision tower, and
# ours; prefixes of other parts, which are not loaded.
_TEXT, _MODEL = 'model.language_model.', 'model.'
_OTHER_PARTS = ('model.visual.', 'mtp.')


# Parts of a tensor that holds a matrix of all experts: [experts, out, in].
_OF_ALL_EXPERTS = {
  'gate_up_proj': ('gate_proj', 'up_proj'),
  'down_proj': ('down_proj',),
}


def split_experts(
  name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], tuple[slice, ...]]]:
  """Yields (name, shape, slices of the tensor) of each expert's matrices.

  Other tensors are yielded as they are, with the slices ().

  Args:
    name: name of a tensor in a file.
    shape: its shape.
  """
  prefix, _, last = name.rpartition('.experts.')
  is_joint = prefix and last in _OF_ALL_EXPERTS and len(shape) == 3  # noqa: PLR2004
  parts = _OF_ALL_EXPERTS.get(last, ())
  # An empty tensor of a tiny file may claim any number of experts.
  if not is_joint or not all(shape) or shape[1] % len(parts):
    yield name, shape, ()
    return
  count, rows, columns = shape
  size = rows // len(parts)
  for expert in range(count):
    for n, part in enumerate(parts):
      slices = slice(expert, expert + 1), slice(n * size, (n + 1) * size)
      full_name = f'{prefix}.experts.{expert}.{part}.weight'
      yield full_name, (size, columns), slices


def text_name(name: str) -> str:
  """Returns the name of a tensor in a checkpoint without a vision tower."""
  return _MODEL + name.removeprefix(_TEXT) if name.startswith(_TEXT) else name


def is_other_part(config: QwenConfig, name: str) -> bool:
  """Returns whether a tensor belongs to a part that is not loaded."""
  return config.delta is not None and name.startswith(_OTHER_PARTS)


class Tensor(NamedTuple):
  """A tensor of a checkpoint and its location in our parameters.

  Attributes:
    path: path of the array in the tree of parameters.
    index: index of the tensor in the array: (), (n,) or (n, expert), for the
      n-th layer that has such an array.
    name: name in the file.
    shape: shape in the file.
    transposed: whether the tensor is stored as (out, in).
    columns: first and last column of each of its parts in our array, whose
      dimensions are [.., heads, columns]; (): it has all columns.
  """

  path: tuple[str, ...]
  index: tuple[int, ...]
  name: str
  shape: tuple[int, ...]
  transposed: bool
  columns: tuple[int, ...] = ()

  def to_ours(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor of the file in our layout.

    Args:
      values: the tensor.
      shape: shape of an element of our array.
    """
    values = values.T if self.transposed else values
    if not self.columns:
      return values.reshape(shape)
    heads = shape[-2]
    widths = np.diff(self.columns)
    parts = np.split(values, heads * np.cumsum(widths)[:-1], axis=-1)
    return np.concatenate(
      [
        part.reshape(*shape[:-1], width)
        for part, width in zip(parts, widths, strict=True)
      ],
      axis=-1,
    )

  def to_file(self, values: np.ndarray) -> np.ndarray:
    """Returns an element of our array as the tensor of the file."""
    if self.columns:
      values = self.outputs(values)
    if self.transposed:
      values = values.reshape(self.shape[::-1]).T
    return values.reshape(self.shape)

  def outputs(self, values: np.ndarray) -> np.ndarray:
    """Returns [I, ..] as [I, outputs of the tensor], in the file's order."""
    if not self.columns:
      return values.reshape(len(values), -1)
    parts = [
      values[..., start:end].reshape(len(values), -1)
      for start, end in itertools.pairwise(self.columns)
    ]
    return np.concatenate(parts, axis=-1)


def tensors(config: QwenConfig) -> Iterator[Tensor]:
  """Yields the tensors of a checkpoint of a network."""
  shapes = parameters.shapes(config)
  for name, stored_name in TOP_NAMES.items():
    if name in shapes:
      yield Tensor((name,), (), stored_name, shapes[name], False)
  names = _LAYER_NAMES
  if config.delta and config.delta.joined:
    names = names | _JOINED
  for (group, name), all_stored in names.items():
    if name not in shapes['layers'].get(group, {}):
      continue
    shape, layers = (
      shapes['layers'][group][name],
      layer_runs.layers_of(config, group, name),
    )
    for stored in all_stored:
      # 1 for tensors of an expert, 0 for others.
      dims, columns = 1 + stored.name.count('{}'), _columns(config, stored)
      own = shape[dims:]
      if columns:
        own = (*own[:-1], columns[-1] - columns[0])
      in_file = _stored_shape(name, own, stored.transposed)
      for index in _indices(shape[:dims]):
        full_name = stored.name.format(*index[1:])
        yield Tensor(
          ('layers', group, name),
          index,
          f'model.layers.{layers[index[0]]}.{full_name}',
          in_file,
          stored.transposed,
          columns,
        )


def _columns(config: QwenConfig, stored: Stored) -> tuple[int, ...]:
  """Returns `Tensor.columns`."""
  if not stored.parts:
    return ()
  widths = config.delta.widths
  # The parts of our array, in their order.
  whole = next(w for w in ('qkvz', 'ba') if stored.parts[0] in w)
  ends = dict(zip(whole, np.cumsum([widths[p] for p in whole]), strict=True))
  first = ends[stored.parts[0]] - widths[stored.parts[0]]
  return tuple(map(int, (first, *(ends[part] for part in stored.parts))))


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
  columns = math.prod(shape) // rows
  # A convolution is of one input channel.
  return (rows, 1, columns) if name == 'conv' else (rows, columns)


def leaf(tree: dict, path: tuple[str, ...]):
  """Returns the leaf of a nested dict at a path."""
  for key in path:
    tree = tree[key]
  return tree
