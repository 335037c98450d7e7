"""Write a model as a Hugging Face directory, and adapters as peft does."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Sequence

import jax
import ml_dtypes  # noqa: F401  (teaches numpy, and so safetensors, bfloat16)
import numpy as np
import safetensors.numpy

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import lora
from gigpo_jax.models.huggingface import config as config_lib
from gigpo_jax.models.huggingface import layout, weights
from gigpo_jax.models.qwen_config import QwenConfig
from gigpo_jax.runtime import distributed, files

# Maximum size of a file of an export.
FILE_BYTES = 5 * 10**9
_GENERATION = 'generation_config.json'
TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  _GENERATION,
)


def save(
  directory: str,
  config: QwenConfig,
  params: dict,
  tokenizer_directory: str | None = None,
  stop_ids: Sequence[int] = (),
  dtype: str = 'bfloat16',
) -> None:
  """Writes a model as a directory that `transformers` loads.

  All processes must call this; the main process writes.

  Args:
    directory: the target; created if missing. Other weights in it are removed.
    config: shape of the model.
    params: parameters of the model; adapters are merged.
    tokenizer_directory: directory whose tokenizer files are copied; None: no
      tokenizer.
    stop_ids: tokens that end a response, from which the generation config
      gets its `eos_token_id`; (): they stay as they are.
    dtype: type of the tensors in the files.
  """
  adapters = config.adapters
  config = dataclasses.replace(config, adapters=None)
  root = pathlib.Path(directory)
  is_main = distributed.is_main_process()
  if is_main:
    root.mkdir(parents=True, exist_ok=True)
    # Files of an earlier export would be loaded together with the new files.
    for path in (*root.glob('*.safetensors'), root / weights.INDEX):
      path.unlink(missing_ok=True)
  shards = _split(config, np.dtype(dtype).itemsize)
  for file, part in shards.items():
    tensors = {
      tensor.name: _export(params, tensor, dtype, adapters) for tensor in part
    }
    if is_main:
      with files.as_os_errors(root / file):
        safetensors.numpy.save_file(
          tensors, root / file, metadata={'format': 'pt'}
        )
  if is_main:
    _write_config(root, config, dtype, shards)
    _copy_tokenizer(tokenizer_directory, root)
    if stop_ids:
      _write_stop_ids(root, stop_ids)


def save_adapters(
  directory: str, config: QwenConfig, adapters: dict, base: str
) -> None:
  """Writes adapters as a directory that `peft` loads.

  Adapters of experts have a tensor per expert, as the models of transformers 4
  have. With transformers 5, peft joins them; it refuses 'gate' without 'up'. It
  then adapts modules of these names in experts only, so those of other MLPs are
  also named as parameters. peft refuses such a file with transformers 4. It
  does not know the experts of Qwen3.5.

  All processes must call this; the main process writes.

  Args:
    directory: the target; created if missing.
    config: shape of the model.
    adapters: parameters of the adapters; see `lora.split`.
    base: the base model, a folder or a name on the hub.
  """
  tensors, targets, beside_experts = {}, set(), set()
  joins = config.num_experts and (not config.delta or config.delta.joined)
  on_host: dict[tuple, tuple[np.ndarray, ...]] = {}
  plain = dataclasses.replace(config, adapters=None)
  for tensor in layout.tensors(plain):
    *groups, name = tensor.path
    arrays = adapters
    for group in groups:
      arrays = arrays.get(group, {})
    if name + lora.A not in arrays:
      continue
    if tensor.path not in on_host:
      on_host[tensor.path] = tuple(
        mesh_lib.to_host(arrays[name + suffix]) for suffix in (lora.A, lora.B)
      )
    module = tensor.name.removesuffix('.weight')
    targets.add(module.rpartition('.')[2])
    if joins and groups[-1] in ('mlp', 'shared'):
      # Without 'model.layers.N.'.
      beside_experts.add(tensor.name.split('.', 3)[3])
    a, b = (stack[tensor.index] for stack in on_host[tensor.path])
    # [in.., rank] and [rank, out..]; (rank, in) and (out, rank) in the file.
    rank, prefix = config.adapters.rank, f'base_model.model.{module}'
    for suffix, values in (
      ('lora_A', a.reshape(-1, rank).T),
      ('lora_B', tensor.outputs(b).T),
    ):
      tensors[f'{prefix}.{suffix}.weight'] = np.ascontiguousarray(
        values, np.float32
      )
  if not distributed.is_main_process():
    return
  root = pathlib.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  path = root / 'adapter_model.safetensors'
  with files.as_os_errors(path):
    safetensors.numpy.save_file(tensors, path, metadata={'format': 'pt'})
  content = _adapter_config(config.adapters, base) | {
    'target_modules': sorted(targets)
  }
  if beside_experts:
    content['target_parameters'] = sorted(beside_experts)
  _write_json(root / 'adapter_config.json', content)


def _adapter_config(adapters: lora.Lora, base: str) -> dict:
  """Returns the adapter_config.json of any matrices of a base model."""
  revision = ''
  if not os.path.exists(base):
    base, _, revision = base.partition('@')
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'revision': revision or None,
    'r': adapters.rank,
    'lora_alpha': adapters.alpha,
    'lora_dropout': 0.0,
    'bias': 'none',
    'inference_mode': True,
  }


def _write_json(path: pathlib.Path, content: dict) -> None:
  text = json.dumps(content, indent=2) + '\n'
  path.write_text(text, encoding='utf-8')


def _write_config(
  root, config, dtype, shards: dict[str, list[layout.Tensor]]
) -> None:
  """Writes config.json and, for several weight files, their index."""
  contents = {'config.json': config_lib.to_json(config, dtype)}
  if len(shards) > 1:
    weight_map = {
      tensor.name: file for file, part in shards.items() for tensor in part
    }
    size = sum(math.prod(tensor.shape) for tensor in layout.tensors(config))
    contents[weights.INDEX] = {
      'metadata': {'total_size': size * np.dtype(dtype).itemsize},
      'weight_map': weight_map,
    }
  for name, content in contents.items():
    _write_json(root / name, content)


def _copy_tokenizer(directory: str | None, root: pathlib.Path) -> None:
  if not directory or os.path.samefile(directory, root):
    return
  for name in TOKENIZER_FILES:
    source = pathlib.Path(directory) / name
    if source.is_file():
      shutil.copyfile(source, root / name)


def _write_stop_ids(root: pathlib.Path, stop_ids: Sequence[int]) -> None:
  """Sets the tokens at which `generate` of `transformers` stops."""
  path = root / _GENERATION
  content = json.loads(path.read_text('utf-8')) if path.is_file() else {}
  _write_json(path, content | {'eos_token_id': list(stop_ids)})


def _split(config: QwenConfig, itemsize: int) -> dict[str, list[layout.Tensor]]:
  """Returns the tensors of each file of an export, by file name."""
  parts: list[list[layout.Tensor]] = [[]]
  used = 0
  for tensor in layout.tensors(config):
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


_merge = jax.jit(lora.merge, static_argnums=0)


def _export(
  params: dict, tensor: layout.Tensor, dtype: str, adapters: lora.Lora | None
) -> np.ndarray:
  """Returns a tensor in the file's layout, with its adapter merged."""
  *groups, name = tensor.path
  group = layout.leaf(params, groups)
  names = (name, name + lora.A, name + lora.B)
  if adapters and names[1] in group:
    # One layer at a time, in float32.
    part = {n: group[n][tensor.index][None].astype('float32') for n in names}
    leaf = _merge(adapters, part)[name][0]
  else:
    leaf = group[name][tensor.index] if tensor.index else group[name]
  values = tensor.to_file(mesh_lib.to_host(leaf))
  return np.ascontiguousarray(values, dtype)
