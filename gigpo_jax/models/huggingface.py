"""Hugging Face directories in and out: config.json and safetensors.

Tensors are read one by one, transposed to our layout, put on the mesh and
cast to float32 there; names that are missing, unknown or of another shape are
refused with both shapes. Needs no torch.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches numpy, and so safetensors, bfloat16)
import numpy as np
import safetensors
import safetensors.numpy

from gigpo_jax import files as files_lib
from gigpo_jax import hosts
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import lora, qwen

# Largest file of an export, and what a download of the hub is to bring.
FILE_BYTES = 5 * 10**9
_HUB_FILES = ['*.safetensors', '*.json', '*.jinja', 'vocab.*', 'merges.txt']
_HUB_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?')
_INDEX = 'model.safetensors.index.json'
_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'generation_config.json',
)

# Fields of config.json without which there is no network.
_NEEDED = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'rms_norm_eps',
)

# What is particular to a model_type.
_FAMILIES = {
  'qwen2': {'qkv_bias': True, 'qk_norm': False},
  'qwen3': {'qkv_bias': False, 'qk_norm': True},
  'qwen3_moe': {'qkv_bias': False, 'qk_norm': True},
}

# Ours within a layer: (theirs, whether stored as (out, in)).
_LAYER_NAMES = {
  ('attention', 'q'): ('self_attn.q_proj.weight', True),
  ('attention', 'k'): ('self_attn.k_proj.weight', True),
  ('attention', 'v'): ('self_attn.v_proj.weight', True),
  ('attention', 'q_bias'): ('self_attn.q_proj.bias', False),
  ('attention', 'k_bias'): ('self_attn.k_proj.bias', False),
  ('attention', 'v_bias'): ('self_attn.v_proj.bias', False),
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
_TOP_NAMES = {
  'embed': 'model.embed_tokens.weight',
  'norm': 'model.norm.weight',
  'unembed': 'lm_head.weight',
}


class _Tensor(NamedTuple):
  """A tensor of a checkpoint, and where it is in our parameters.

  Attributes:
    path: of the array in the tree.
    index: of the tensor in the array: (), (layer,) or (layer, expert).
    name: in the file.
    shape: in the file.
    transposed: whether it is stored as (out, in).
  """

  path: tuple[str, ...]
  index: tuple[int, ...]
  name: str
  shape: tuple[int, ...]
  transposed: bool


def read_config(
  directory: str, *, dtype: str = 'bfloat16', remat: str = 'none', **choices
) -> qwen.QwenConfig:
  """Returns the shape of a checkpoint's model from its config.json.

  Args:
    directory: the checkpoint.
    dtype: compute type.
    remat: what the backward pass computes again; see `qwen.REMATS`.
    **choices: other fields of the config that a checkpoint does not tell.

  Raises:
    ValueError: in one line, if there is none or the model is not supported.
  """
  path = pathlib.Path(directory) / 'config.json'
  if not path.is_file():
    raise ValueError(
      f'model.path={directory}: no config.json there; needs a Hugging Face '
      'directory with config.json, *.safetensors and a tokenizer'
    )
  try:
    raw = json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise ValueError(
      f'model.path={directory}: config.json cannot be read '
      f'({error.strerror}); must be readable'
    ) from error
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(raw, dict):
    raise ValueError(f'{path}: holds no JSON object; must be a config.json')
  kind = raw.get('model_type')
  if not isinstance(kind, str) or kind not in _FAMILIES:
    raise ValueError(
      f'model.path={directory}: model_type {kind} is not supported; known: '
      'qwen2 (Qwen2, Qwen2.5), qwen3, qwen3_moe'
    )
  # Files of 2024-25 have rope_theta at the top, later ones inside.
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  if raw.get('use_sliding_window'):
    raise ValueError(
      f'model.path={directory}: use_sliding_window is not supported; must be '
      'false'
    )
  _check_sizes(path, raw)
  bias = raw.get('attention_bias', False)
  if kind != 'qwen2' and bias:
    raise ValueError(
      f'model.path={directory}: attention_bias is not supported; must be false'
    )
  try:
    return _read_shape(
      directory, raw, rope, dtype=dtype, remat=remat, **choices
    )
  except (AttributeError, ArithmeticError, TypeError) as error:
    raise ValueError(
      f'{path}: cannot be a model ({error}); must be as Hugging Face writes it'
    ) from error


def _read_shape(directory: str, raw: dict, rope: dict, **choices):
  path, kind = pathlib.Path(directory) / 'config.json', raw['model_type']
  heads = raw['num_attention_heads']
  mlp = {'intermediate_size': raw['intermediate_size']}
  if kind == 'qwen3_moe':
    mlp = _experts(path, raw)
  theta = raw.get('rope_theta')
  if theta is None:
    theta = rope.get('rope_theta', 1e4)
  if isinstance(theta, str) or not theta > 1:
    raise ValueError(f'{path}: rope_theta={theta}: must be a number above 1')
  return qwen.QwenConfig(
    vocab_size=raw['vocab_size'],
    hidden_size=raw['hidden_size'],
    **mlp,
    num_layers=raw['num_hidden_layers'],
    num_heads=heads,
    num_kv_heads=raw.get('num_key_value_heads', heads),
    head_dim=raw.get('head_dim')
    or (128 if kind == 'qwen3' else raw['hidden_size'] // heads),
    rope_theta=float(theta),
    rms_norm_eps=raw['rms_norm_eps'],
    tie_embeddings=raw.get('tie_word_embeddings', False),
    **_FAMILIES[kind],
    yarn=_yarn(directory, rope),
    max_positions=raw.get('max_position_embeddings', 32768),
    **choices,
  )


def _check_sizes(path: pathlib.Path, raw: dict) -> None:
  missing = [name for name in _NEEDED if name not in raw]
  if missing:
    raise ValueError(f'{path}: lacks {", ".join(missing)}; all are needed')
  whole = (*_NEEDED, 'num_key_value_heads', 'head_dim')
  for name in (*whole, 'max_position_embeddings'):
    value = raw.get(name)
    if value is None and name not in _NEEDED:
      continue
    # What is not a number is not above 0, either.
    kinds, most, what = int, float('inf'), 'a whole number above 0'
    if name == 'rms_norm_eps':
      kinds, most, what = int | float, 1, 'a number between 0 and 1'
    if not isinstance(value, kinds) or not 0 < value < most:
      raise ValueError(f'{path}: {name}={value}: must be {what}')


def _experts(path: pathlib.Path, raw: dict) -> dict:
  """Returns the fields of a mixture of experts."""
  number = raw.get('num_experts', raw.get('num_local_experts'))
  needed = ('moe_intermediate_size', 'num_experts_per_tok')
  missing = [name for name in needed if name not in raw]
  if number is None or missing:
    lacks = (*missing, 'num_experts')[0]
    raise ValueError(f'{path}: lacks {lacks}; all of an expert are needed')
  if raw.get('mlp_only_layers') or raw.get('decoder_sparse_step', 1) != 1:
    raise ValueError(
      f'{path}: layers with and without experts are not supported; '
      'mlp_only_layers must be [], decoder_sparse_step 1'
    )
  return {
    'intermediate_size': raw['moe_intermediate_size'],
    'num_experts': number,
    'experts_per_token': raw['num_experts_per_tok'],
    'normalized_experts': bool(raw.get('norm_topk_prob', False)),
  }


def _yarn(directory: str, rope: dict) -> qwen.Yarn | None:
  """Returns how rotary angles are stretched, by config.json."""
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'default':
    return None
  needed = ('factor', 'original_max_position_embeddings')
  plain = {
    'mscale': (None, 0),
    'mscale_all_dim': (None, 0),
    'truncate': (None, True),
    'partial_rotary_factor': (None, 1),
  }
  if (
    kind != 'yarn'
    or any(rope.get(name) not in values for name, values in plain.items())
    or any(name not in rope for name in needed)
    or rope['factor'] < 1
  ):
    raise ValueError(
      f'model.path={directory}: rotary scaling {rope} is not supported; '
      f'known: none (rope_type default), or yarn with {" and ".join(needed)}'
    )
  return qwen.Yarn(
    factor=float(rope['factor']),
    original_length=rope['original_max_position_embeddings'],
    beta_fast=float(rope.get('beta_fast') or 32),
    beta_slow=float(rope.get('beta_slow') or 1),
    attention_factor=rope.get('attention_factor'),
  )


def _tensors(config: qwen.QwenConfig) -> Iterator[_Tensor]:
  """Yields the tensors of a checkpoint."""
  shapes = qwen.shapes(config)
  for name, theirs in _TOP_NAMES.items():
    if name in shapes:
      yield _Tensor((name,), (), theirs, shapes[name], False)
  for (group, name), (theirs, transposed) in _LAYER_NAMES.items():
    if name not in shapes['layers'].get(group, {}):
      continue
    whole, each = shapes['layers'][group][name], theirs.count('{}')
    stored = _stored_shape(name, whole[1 + each :], transposed)
    for index in np.ndindex(whole[: 1 + each]):
      full = f'model.layers.{index[0]}.{theirs.format(*index[1:])}'
      path = ('layers', group, name)
      yield _Tensor(path, index, full, stored, transposed)


def _stored_shape(
  name: str, shape: tuple[int, ...], transposed: bool
) -> tuple[int, ...]:
  """Shape of a tensor in the file: heads flattened, (out, in)."""
  if not transposed:
    return (int(np.prod(shape)),)
  # Output projections flatten their two leading dimensions, others the last.
  rows = shape[-1] if name == 'o' else int(np.prod(shape[1:]))
  return rows, int(np.prod(shape)) // rows


def _files(directory: str) -> dict[str, pathlib.Path]:
  """Returns the file of each tensor name."""
  root = pathlib.Path(directory)
  if (root / _INDEX).is_file():
    index = _index(root / _INDEX)
    absent = sorted(f for f in set(index.values()) if not (root / f).is_file())
    if absent:
      raise ValueError(
        f'model.path={directory}: {_INDEX} names {absent[0]}, which is not '
        f'there ({len(absent)} such); needs all of them'
      )
    return {name: root / f for name, f in index.items()}
  files: dict[str, pathlib.Path] = {}
  for path in sorted(root.glob('*.safetensors')):
    with _open(path) as tensors:
      files.update(dict.fromkeys(tensors.keys(), path))
  if not files:
    raise ValueError(
      f'model.path={directory}: no *.safetensors there; needs '
      f'model.safetensors, or {_INDEX} and its parts (pytorch_model.bin and '
      'other formats are not read)'
    )
  return files


def _index(path: pathlib.Path) -> dict[str, str]:
  """Returns which file has which tensor."""
  try:
    index = json.loads(path.read_text(encoding='utf-8'))['weight_map']
    return {str(name): str(file) for name, file in index.items()}
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{path}: not an index of safetensors files ({error}); needs weight_map'
    ) from error


def _open(path: pathlib.Path):
  try:
    return safetensors.safe_open(path, framework='np')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'{path}: not a readable safetensors file: {error}') from (
      error
    )


def check(directory: str, config: qwen.QwenConfig) -> None:
  """Compares a checkpoint's tensors with what the config says.

  Reads headers only.

  Raises:
    ValueError: in one line that names the first differences, with shapes.
  """
  files = _files(directory)
  expected = {tensor.name: tensor.shape for tensor in _tensors(config)}
  problems = [f'{name} {expected[name]} is missing' for name in expected]
  problems = [p for p in problems if p.split()[0] not in files]
  known_extra = {_TOP_NAMES['unembed']} if config.tie_embeddings else set()
  problems += [
    f'{name} is unknown'
    for name in files
    if name not in expected
    and name not in known_extra
    and not name.endswith('rotary_emb.inv_freq')
  ]
  found = set()
  for path in sorted(set(files.values())):
    with _open(path) as tensors:
      found |= set(tensors.keys())
      for name in tensors.keys():  # noqa: SIM118  (not a dict)
        if name not in expected:
          continue
        shape = tuple(tensors.get_slice(name).get_shape())
        if shape != tuple(expected[name]):
          problems.append(
            f'{name} is {shape} in the file and {expected[name]} by config.json'
          )
  problems += [
    f'{name} is missing from {files[name].name}'
    for name in expected
    if name in files and name not in found
  ]
  if problems:
    shown = '; '.join(problems[:4])
    more = f'; and {len(problems) - 4} more' if len(problems) > 4 else ''
    raise ValueError(f'model.path={directory}: {shown}{more}')


def load(
  directory: str,
  config: qwen.QwenConfig,
  mesh: jax.sharding.Mesh,
  *,
  dtype: str = 'float32',
) -> dict:
  """Returns a checkpoint's parameters, sharded over the mesh; no adapters.

  One tensor at a time is in host memory, twice while it is transposed.

  Args:
    directory: the checkpoint.
    config: shape of its model.
    mesh: the devices.
    dtype: of the parameters.

  Raises:
    ValueError: in one line, if tensors are missing, unknown or misshapen.
  """
  check(directory, config)
  files = _files(directory)
  shapes = qwen.shapes(config)
  placed = mesh_lib.shardings(mesh, qwen.logical_axes(config))
  params: dict = {}
  for tensor in hosts.bar(list(_tensors(config)), desc=f'reading {directory}'):
    *groups, last = tensor.path
    node = params
    for key in groups:
      node = node.setdefault(key, {})
    shape, sharding = _at(shapes, tensor.path), _at(placed, tensor.path)
    depth = len(tensor.index)
    one = jax.NamedSharding(mesh, jax.P(*sharding.spec[depth:]))
    with _open(files[tensor.name]) as stored:
      values = stored.get_tensor(tensor.name)
    values = values.T if tensor.transposed else values
    part = mesh_lib.place(values.reshape(shape[depth:]), one)
    if not depth:
      node[last] = _cast(part, sharding, dtype)
    else:
      if last not in node:
        node[last] = _zeros(shape, sharding, dtype)
      node[last] = _written(node[last], part, tensor.index, sharding)
    # One after the other, or they pile up.
    jax.block_until_ready(node[last])
    del values, part
  return params


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(
  part: jax.Array, sharding: jax.NamedSharding, dtype: str
) -> jax.Array:
  return jax.lax.with_sharding_constraint(part.astype(dtype), sharding)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(
  shape: tuple[int, ...], sharding: jax.NamedSharding, dtype: str
) -> jax.Array:
  return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _written(
  stack: jax.Array,
  part: jax.Array,
  index: tuple[int, ...],
  sharding: jax.NamedSharding,
) -> jax.Array:
  """Returns a stack of layers with a part of it put in."""
  stack = stack.at[index].set(part.astype(stack.dtype))
  return jax.lax.with_sharding_constraint(stack, sharding)


def _split(config: qwen.QwenConfig, itemsize: int) -> dict[str, list[_Tensor]]:
  """Returns which tensors go into which file of an export."""
  parts: list[list[_Tensor]] = [[]]
  used = 0
  for tensor in _tensors(config):
    size = math.prod(tensor.shape) * itemsize
    if parts[-1] and used + size > FILE_BYTES:
      parts.append([])
      used = 0
    parts[-1].append(tensor)
    used += size
  if len(parts) == 1:
    return {'model.safetensors': parts[0]}
  return {
    f'model-{n:05}-of-{len(parts):05}.safetensors': part
    for n, part in enumerate(parts, 1)
  }


def is_hub_name(path: str) -> bool:
  """Whether it looks like ORGANISATION/NAME, maybe with @REVISION."""
  return bool(_HUB_NAME.fullmatch(path))


@functools.cache
def fetch(name: str, *, only_config: bool = False) -> str:
  """Returns the folder of a model of the hub, fetched if it is not cached.

  What is cached stays as it is, though the hub may have a newer one, so that a
  run goes on with what it began with.

  Args:
    name: organisation/name or organisation/name@revision.
    only_config: whether its config.json will do.

  Raises:
    ValueError: in one line, if there is no such model, or no way to it.
  """
  name, _, revision = name.partition('@')
  options = {
    'revision': revision or None,
    'allow_patterns': 'config.json' if only_config else _HUB_FILES,
  }
  with contextlib.suppress(Exception):  # Not there, or not whole.
    folder = huggingface_hub.snapshot_download(
      name, local_files_only=True, **options
    )
    if only_config:
      read_config(folder)
    else:
      _files(folder)
    return folder
  try:
    return huggingface_hub.snapshot_download(name, **options)
  except Exception as error:  # Of the hub, of its HTTP client, of the disk.
    reason = ' '.join(str(error).split())[:160]
    raise ValueError(
      f'model.path={name}: no such folder here, and not to be had from the hub '
      f'({type(error).__name__}: {reason}); needs a folder, or a name on the '
      'hub and a way to it (HF_HUB_OFFLINE unset)'
    ) from error


def _at(tree: dict, path: tuple[str, ...]):
  for key in path:
    tree = tree[key]
  return tree


def save(
  directory: str,
  config: qwen.QwenConfig,
  params: dict,
  tokenizer_directory: str | None = None,
  dtype: str = 'bfloat16',
) -> None:
  """Writes a directory that `transformers` loads.

  Args:
    directory: where to; made if missing.
    config: shape of the model.
    params: its parameters; adapters are merged.
    tokenizer_directory: whose tokenizer files to copy along.
    dtype: of the tensors in the file.
  """
  adapters = config.adapters
  config = dataclasses.replace(config, adapters=None)
  root = pathlib.Path(directory)
  ours = hosts.first()
  if ours:
    root.mkdir(parents=True, exist_ok=True)
    # Left over from another export, they would be read along.
    for path in (*root.glob('*.safetensors'), root / _INDEX):
      path.unlink(missing_ok=True)
  files = _split(config, np.dtype(dtype).itemsize)
  for file, part in files.items():
    tensors = {
      tensor.name: _stored(params, tensor, dtype, adapters) for tensor in part
    }
    if ours:
      with files_lib.written(root / file):
        safetensors.numpy.save_file(
          tensors, root / file, metadata={'format': 'pt'}
        )
  if ours:
    _describe(root, config, dtype, files)
    _copy_tokenizer(tokenizer_directory, root)


def save_adapters(
  directory: str, config: qwen.QwenConfig, adapters: dict, base: str
) -> None:
  """Writes adapters as a directory that `peft` loads.

  Args:
    directory: where to; made if missing.
    config: shape of the model.
    adapters: see `lora.split`.
    base: the model that they belong to, a folder or a name on the hub.
  """
  tensors, targets = {}, set()
  for (group, name), (theirs, _) in _LAYER_NAMES.items():
    pair = adapters['layers'].get(group, {})
    if name + lora.A not in pair:
      continue
    targets.add(theirs.split('.')[1])
    for end, ours in (('lora_A', lora.A), ('lora_B', lora.B)):
      stack = mesh_lib.fetch(pair[name + ours])
      # [layers, in.., rank] and [layers, rank, out..]: (out, in) in a file.
      rank = config.adapters.rank
      shape = (-1, rank) if ours == lora.A else (rank, -1)
      for layer, matrix in enumerate(stack):
        full = theirs.replace('.weight', f'.{end}.weight')
        tensors[f'base_model.model.model.layers.{layer}.{full}'] = (
          np.ascontiguousarray(matrix.reshape(shape).T, np.float32)
        )
  if not hosts.first():
    return
  root = pathlib.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  path = root / 'adapter_model.safetensors'
  with files_lib.written(path):
    safetensors.numpy.save_file(tensors, path, metadata={'format': 'pt'})
  base, _, revision = base.partition('@')
  content = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'revision': revision or None,
    'r': config.adapters.rank,
    'lora_alpha': config.adapters.alpha,
    'lora_dropout': 0.0,
    'bias': 'none',
    'target_modules': sorted(targets),
    'inference_mode': True,
  }
  text = json.dumps(content, indent=2) + '\n'
  (root / 'adapter_config.json').write_text(text, encoding='utf-8')


def _describe(root, config, dtype, files: dict[str, list[_Tensor]]) -> None:
  """Writes config.json, and the index of several files."""
  contents = {'config.json': _config_json(config, dtype)}
  if len(files) > 1:
    of = {tensor.name: file for file, part in files.items() for tensor in part}
    size = sum(math.prod(tensor.shape) for tensor in _tensors(config))
    contents[_INDEX] = {
      'metadata': {'total_size': size * np.dtype(dtype).itemsize},
      'weight_map': of,
    }
  for name, content in contents.items():
    text = json.dumps(content, indent=2) + '\n'
    (root / name).write_text(text, encoding='utf-8')


def _copy_tokenizer(directory: str | None, root: pathlib.Path) -> None:
  if not directory or os.path.samefile(directory, root):
    return
  for name in _TOKENIZER_FILES:
    source = pathlib.Path(directory) / name
    if source.is_file():
      shutil.copyfile(source, root / name)


_merge = jax.jit(lora.merge, static_argnums=0)


def _stored(
  params: dict, tensor: _Tensor, dtype: str, adapters: lora.Lora | None
) -> np.ndarray:
  """Returns a tensor as a file has it, its adapter merged."""
  *groups, name = tensor.path
  group, stored = _at(params, groups), tensor.shape
  names = (name, name + lora.A, name + lora.B)
  if adapters and names[1] in group:
    # One layer at a time, added up in float32.
    part = {n: group[n][tensor.index][None].astype('float32') for n in names}
    leaf = _merge(adapters, part)[name][0]
  else:
    leaf = group[name][tensor.index] if tensor.index else group[name]
  host = mesh_lib.fetch(leaf)
  if tensor.transposed:
    host = host.reshape(stored[::-1]).T
  return np.ascontiguousarray(host.reshape(stored), dtype)


def _config_json(config: qwen.QwenConfig, dtype: str) -> dict:
  """Returns what `read_config` would make this config of."""
  kind = 'qwen3' if config.qk_norm else 'qwen2'
  architecture = f'{kind.capitalize()}ForCausalLM'
  if config.num_experts:
    kind, architecture = 'qwen3_moe', 'Qwen3MoeForCausalLM'
  content = {
    'architectures': [architecture],
    'model_type': kind,
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'intermediate_size': config.intermediate_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_positions,
    'rope_theta': config.rope_theta,
    'rms_norm_eps': config.rms_norm_eps,
    'tie_word_embeddings': config.tie_embeddings,
    'torch_dtype': dtype,
    'use_sliding_window': False,
  }
  if config.num_experts:
    content |= {
      'moe_intermediate_size': config.intermediate_size,
      'num_experts': config.num_experts,
      'num_experts_per_tok': config.experts_per_token,
      'norm_topk_prob': config.normalized_experts,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  if config.yarn:
    content['rope_scaling'] = {
      'rope_type': 'yarn',
      'factor': config.yarn.factor,
      'original_max_position_embeddings': config.yarn.original_length,
      'beta_fast': config.yarn.beta_fast,
      'beta_slow': config.yarn.beta_slow,
    }
    if config.yarn.attention_factor is not None:
      content['rope_scaling']['attention_factor'] = config.yarn.attention_factor
  return content
