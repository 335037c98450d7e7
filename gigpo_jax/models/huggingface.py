"""Hugging Face directories in and out: config.json and safetensors.

Tensors are read one by one, transposed to our layout, put on the mesh and
cast to float32 there; names that are missing, unknown or of another shape are
refused with both shapes. Needs no torch.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches numpy, and so safetensors, bfloat16)
import numpy as np
import safetensors
import safetensors.numpy

from gigpo_jax import hosts
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import qwen

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


def read_config(
  directory: str, *, dtype: str = 'bfloat16', remat: bool = False
) -> qwen.QwenConfig:
  """Returns the shape of a checkpoint's model from its config.json.

  Args:
    directory: the checkpoint.
    dtype: compute type.
    remat: whether to recompute activations in the backward pass.

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
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(raw, dict):
    raise ValueError(f'{path}: holds no JSON object; must be a config.json')
  kind = raw.get('model_type')
  if kind not in _FAMILIES:
    raise ValueError(
      f'model.path={directory}: model_type {kind} is not supported; known: '
      'qwen2 (Qwen2, Qwen2.5), qwen3 (dense)'
    )
  # Files of 2024-25 have rope_theta at the top, later ones inside.
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  if raw.get('use_sliding_window'):
    raise ValueError(
      f'model.path={directory}: use_sliding_window is not supported; must be '
      'false'
    )
  missing = [name for name in _NEEDED if name not in raw]
  if missing:
    raise ValueError(f'{path}: lacks {", ".join(missing)}; all are needed')
  bias = raw.get('attention_bias', False)
  if kind == 'qwen3' and bias:
    raise ValueError(
      f'model.path={directory}: attention_bias is not supported; must be false'
    )
  heads = raw['num_attention_heads']
  return qwen.QwenConfig(
    vocab_size=raw['vocab_size'],
    hidden_size=raw['hidden_size'],
    intermediate_size=raw['intermediate_size'],
    num_layers=raw['num_hidden_layers'],
    num_heads=heads,
    num_kv_heads=raw.get('num_key_value_heads', heads),
    head_dim=raw.get('head_dim')
    or (128 if kind == 'qwen3' else raw['hidden_size'] // heads),
    rope_theta=float(raw.get('rope_theta') or rope.get('rope_theta', 1e4)),
    rms_norm_eps=raw['rms_norm_eps'],
    tie_embeddings=raw.get('tie_word_embeddings', False),
    **_FAMILIES[kind],
    yarn=_yarn(directory, rope),
    max_positions=raw.get('max_position_embeddings', 32768),
    dtype=dtype,
    remat=remat,
  )


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


def _entries(config: qwen.QwenConfig) -> Iterator[tuple]:
  """Yields (path, layer or None, name, stored shape, transposed) of tensors."""
  shapes = qwen.shapes(config)
  for name, theirs in _TOP_NAMES.items():
    if name in shapes:
      yield (name,), None, theirs, shapes[name], False
  for (group, name), (theirs, transposed) in _LAYER_NAMES.items():
    if name not in shapes['layers'][group]:
      continue
    shape = shapes['layers'][group][name][1:]
    stored = _stored_shape(name, shape, transposed)
    for layer in range(config.num_layers):
      full = f'model.layers.{layer}.{theirs}'
      yield ('layers', group, name), layer, full, stored, transposed


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
    index = json.loads((root / _INDEX).read_text(encoding='utf-8'))
    absent = sorted(
      f for f in set(index['weight_map'].values()) if not (root / f).is_file()
    )
    if absent:
      raise ValueError(
        f'model.path={directory}: {_INDEX} names {absent[0]}, which is not '
        f'there ({len(absent)} such); needs all of them'
      )
    return {name: root / f for name, f in index['weight_map'].items()}
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
  expected = {name: shape for _, _, name, shape, _ in _entries(config)}
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
  directory: str, config: qwen.QwenConfig, mesh: jax.sharding.Mesh
) -> dict:
  """Returns a checkpoint's parameters, float32, sharded over the mesh.

  One tensor at a time is in host memory, twice while it is transposed.

  Raises:
    ValueError: in one line, if tensors are missing, unknown or misshapen.
  """
  check(directory, config)
  files = _files(directory)
  shapes = qwen.shapes(config)
  placed = mesh_lib.shardings(mesh, qwen.logical_axes(config))
  params: dict = {}
  entries = list(_entries(config))
  for path, layer, name, _, transposed in hosts.bar(
    entries, desc=f'reading {directory}'
  ):
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    shape, sharding = _at(shapes, path), _at(placed, path)
    with _open(files[name]) as tensors:
      tensor = tensors.get_tensor(name)
    tensor = tensor.T if transposed else tensor
    if layer is None:
      part = mesh_lib.place(tensor.reshape(shape), sharding)
      node[path[-1]] = _widened(part, sharding)
    else:
      if layer == 0:
        node[path[-1]] = _zeros(shape, sharding)
      one = jax.NamedSharding(mesh, jax.P(*sharding.spec[1:]))
      part = mesh_lib.place(tensor.reshape(shape[1:]), one)
      node[path[-1]] = _written(node[path[-1]], part, layer, sharding)
    # One after the other, or they pile up.
    jax.block_until_ready(node[path[-1]])
    del tensor, part
  return params


@functools.partial(jax.jit, static_argnums=1)
def _widened(part: jax.Array, sharding: jax.NamedSharding) -> jax.Array:
  return jax.lax.with_sharding_constraint(part.astype(jnp.float32), sharding)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape: tuple[int, ...], sharding: jax.NamedSharding) -> jax.Array:
  zeros = jnp.zeros(shape, jnp.float32)
  return jax.lax.with_sharding_constraint(zeros, sharding)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _written(
  stack: jax.Array, part: jax.Array, layer: int, sharding: jax.NamedSharding
) -> jax.Array:
  """Returns a stack of layers with one of them put in."""
  stack = stack.at[layer].set(part.astype(jnp.float32))
  return jax.lax.with_sharding_constraint(stack, sharding)


def _split(config: qwen.QwenConfig, itemsize: int) -> dict[str, list[tuple]]:
  """Returns which tensors go into which file of an export."""
  parts: list[list[tuple]] = [[]]
  used = 0
  for entry in _entries(config):
    size = math.prod(entry[3]) * itemsize
    if parts[-1] and used + size > FILE_BYTES:
      parts.append([])
      used = 0
    parts[-1].append(entry)
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
    params: its parameters.
    tokenizer_directory: whose tokenizer files to copy along.
    dtype: of the tensors in the file.
  """
  root = pathlib.Path(directory)
  ours = hosts.first()
  if ours:
    root.mkdir(parents=True, exist_ok=True)
    # Left over from another export, they would be read along.
    for path in (*root.glob('*.safetensors'), root / _INDEX):
      path.unlink(missing_ok=True)
  files = _split(config, np.dtype(dtype).itemsize)
  for file, entries in files.items():
    tensors = {entry[2]: _stored(params, entry, dtype) for entry in entries}
    if ours:
      safetensors.numpy.save_file(
        tensors, root / file, metadata={'format': 'pt'}
      )
  if ours:
    _describe(root, config, dtype, files)
    _copy_tokenizer(tokenizer_directory, root)


def _describe(root, config, dtype, files: dict[str, list[tuple]]) -> None:
  """Writes config.json, and the index of several files."""
  contents = {'config.json': _config_json(config, dtype)}
  if len(files) > 1:
    size = sum(math.prod(entry[3]) for entry in _entries(config))
    contents[_INDEX] = {
      'metadata': {'total_size': size * np.dtype(dtype).itemsize},
      'weight_map': {e[2]: file for file, part in files.items() for e in part},
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


def _stored(params: dict, entry: tuple, dtype: str) -> np.ndarray:
  """Returns one of `_entries` as a file has it."""
  path, layer, _, stored, transposed = entry
  leaf = _at(params, path)
  host = mesh_lib.fetch(leaf if layer is None else leaf[layer])
  shaped = host.reshape(stored[::-1]).T if transposed else host.reshape(stored)
  return np.ascontiguousarray(shaped, dtype)


def _config_json(config: qwen.QwenConfig, dtype: str) -> dict:
  """Returns what `read_config` would make this config of."""
  kind = 'qwen3' if config.qk_norm else 'qwen2'
  content = {
    'architectures': [f'{kind.capitalize()}ForCausalLM'],
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
