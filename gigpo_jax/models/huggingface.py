"""Load and save Hugging Face directories: config.json and safetensors.

Tensors are read one at a time, transposed to our layout, placed on the mesh and
cast to float32 there. Missing tensors, unknown tensors and wrong shapes are
errors. Needs no torch.
"""

import contextlib
import dataclasses
import functools
import itertools
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

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import lora, parameters, qwen
from gigpo_jax.runtime import console, distributed, files

# Maximum size of a file of an export.
FILE_BYTES = 5 * 10**9
# Files that are downloaded from the hub.
_HUB_FILES = ['*.safetensors', '*.json', '*.jinja', 'vocab.*', 'merges.txt']
# Maximum characters of a value, and number of differences, in an error.
_MAX_SHOWN, _MAX_NAMED = 80, 4
# Rows of an embedding that are compared at a time.
_TIED_ROWS = 8192
_HUB_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?')
_INDEX = 'model.safetensors.index.json'
_ADAPTER = 'adapter_config.json'
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

# Required fields of config.json, for any network and for a mixture of experts.
_REQUIRED = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'rms_norm_eps',
)
_EXPERTS_REQUIRED = ('moe_intermediate_size', 'num_experts_per_tok')
_EXPERTS_FIELDS = (
  *_EXPERTS_REQUIRED,
  'num_experts',
  'num_local_experts',
  'norm_topk_prob',
)
# Fields that hold an integer above 0.
_COUNTS = (
  *(name for name in _REQUIRED if name != 'rms_norm_eps'),
  *_EXPERTS_REQUIRED,
  'num_experts',
  'num_local_experts',
  'num_key_value_heads',
  'head_dim',
  'max_position_embeddings',
)
# Fields that hold true or false.
_FLAGS = ('tie_word_embeddings', 'norm_topk_prob')
# All fields that `read_config` uses.
_READ = (
  *_COUNTS,
  *_FLAGS,
  'rms_norm_eps',
  'model_type',
  'rope_theta',
  'rope_scaling',
  'rope_parameters',
)

# Fields that may change the network, with the values that do not change it.
# Null never changes it. A field that is in none of these lists is refused.
_NEUTRAL = {
  'hidden_act': ('silu', 'swish'),
  'attention_bias': (False,),
  'use_sliding_window': (False,),
  'decoder_sparse_step': (1,),
  'mlp_only_layers': ([],),
  'partial_rotary_factor': (1,),
  'mlp_bias': (False,),
  'is_causal': (True,),
  'use_mrope': (False,),
  'use_dynamic_ntk': (False,),
  'use_logn_attn': (False,),
  'add_cross_attention': (False,),
  'is_encoder_decoder': (False,),
  'tie_encoder_decoder': (False,),
  'pretraining_tp': (1,),
  'pruned_heads': ({},),
  'auto_map': ({},),
  'quantization_config': (),
}

# Fields that never change the network. They concern sliding windows (refused if
# use_sliding_window is true), training, memory and outputs, generation, and
# notes.
_WITHOUT_EFFECT = frozenset(
  """
  sliding_window max_window_layers
  attention_dropout initializer_range output_router_logits router_aux_loss_coef
  gradient_checkpointing use_bfloat16 tf_legacy_loss torch_dtype dtype
  use_cache chunk_size_feed_forward torchscript return_dict output_attentions
  output_hidden_states output_scores return_dict_in_generate is_decoder
  attn_implementation experts_implementation
  bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
  forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens
  begin_suppress_tokens prefix max_length min_length model_max_length do_sample
  num_beams num_beam_groups num_return_sequences diversity_penalty
  early_stopping length_penalty repetition_penalty no_repeat_ngram_size
  encoder_no_repeat_ngram_size exponential_decay_length_penalty
  remove_invalid_values temperature top_k top_p typical_p
  transformers_version name_or_path model_name tokenizer_class finetuning_task
  task_specific_params problem_type num_labels id2label label2id
  unsloth_fixed unsloth_version
  """.split()
)
# Prefix of the private fields of transformers.
_PRIVATE = '_'

# Required and accepted fields of the rotary angles, by rope_type.
_YARN_REQUIRED = ('factor', 'original_max_position_embeddings')
_ROPE = {
  'default': ('rope_type', 'type', 'rope_theta'),
  'yarn': (
    *('rope_type', 'type', 'rope_theta', *_YARN_REQUIRED),
    *('beta_fast', 'beta_slow', 'attention_factor'),
  ),
}
_NEUTRAL_ROPE = {
  'mscale': (0,),
  'mscale_all_dim': (0,),
  'truncate': (True,),
  'partial_rotary_factor': (1,),
}

# Largest count (int32) and largest base of the rotary angles (float32).
_MAX_COUNT, _MAX_THETA = 2**31 - 1, 1e38

# Fields of QwenConfig that depend on model_type.
_FAMILIES = {
  'qwen2': {'qkv_bias': True, 'qk_norm': False},
  'qwen3': {'qkv_bias': False, 'qk_norm': True},
  'qwen3_moe': {'qkv_bias': False, 'qk_norm': True},
}
_ARCHITECTURES = {
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'qwen3_moe': 'Qwen3MoeForCausalLM',
}

# Accepted types of tensors, as safetensors names them.
_DTYPES = ('BF16', 'F16', 'F32', 'F64')

# (group, name) of an array of a layer: (name of its tensor in the file within
# the layer, whether the tensor is stored as (out, in)).
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
  """A tensor of a checkpoint and its location in our parameters.

  Attributes:
    path: path of the array in the tree of parameters.
    index: index of the tensor in the array: (), (layer,) or (layer, expert).
    name: name in the file.
    shape: shape in the file.
    transposed: whether the tensor is stored as (out, in).
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
    remat: activations that the backward pass recomputes; see `qwen_config`.
    **choices: other fields of the result that config.json does not define.

  Raises:
    ValueError: if config.json is missing or invalid, or the model is not
      supported; in one line.
  """
  path = pathlib.Path(directory) / 'config.json'
  if not path.is_file():
    raise ValueError(
      f'model.path={directory}: no config.json; needs a Hugging Face '
      'directory with config.json, *.safetensors and a tokenizer'
    )
  try:
    raw = json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise ValueError(
      f'model.path={directory}: config.json cannot be read '
      f'({error.strerror}); must be readable'
    ) from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(raw, dict):
    raise ValueError(f'{path}: not a JSON object; must be a config.json')
  family = raw.get('model_type')
  if not isinstance(family, str) or family not in _FAMILIES:
    raise ValueError(
      f'model.path={directory}: model_type {family} is not supported; must be '
      'qwen2 (Qwen2, Qwen2.5), qwen3 or qwen3_moe'
    )
  _check_numbers(directory, raw)
  _check_fields(directory, raw)
  try:
    return _read_shape(directory, raw, dtype=dtype, remat=remat, **choices)
  except (AttributeError, ArithmeticError, TypeError) as error:
    raise ValueError(
      f'{path}: does not describe a model ({error}); must be as Hugging Face '
      'writes it'
    ) from error


def _field_error(
  directory: str, name: str, value: object, accepted: str
) -> ValueError:
  """Returns the one-line error for a field of config.json."""
  field = f'{json.dumps(name)[1:-1]}={_abbreviated(value)}'
  return ValueError(
    f'model.path={directory}: config.json has {field}; {accepted}'
  )


def _abbreviated(value: object) -> str:
  """Returns a value as JSON on one line, truncated."""
  text = json.dumps(value)
  return text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}..'


def _check_fields(directory: str, raw: dict) -> None:
  """Refuses unsupported fields of config.json that may change the network."""
  family, neutral = raw['model_type'], dict(_NEUTRAL)
  neutral['architectures'] = ([_ARCHITECTURES[family]], [])
  layers = raw.get('layer_types')
  if isinstance(layers, list) and len(layers) == raw['num_hidden_layers']:
    neutral['layer_types'] = (['full_attention'] * len(layers),)
  if family == 'qwen2':
    # transformers ignores it for Qwen2, which always has biases.
    neutral['attention_bias'] = (False, True)
  known = {*_READ, *_WITHOUT_EFFECT}
  if family != 'qwen3_moe':
    known -= {*_EXPERTS_FIELDS}
  rest = {name: raw[name] for name in raw if name not in known}
  _check_neutral(directory, rest, neutral)


def _check_neutral(directory: str, fields: dict, neutral: dict) -> None:
  """Refuses fields whose value is not one that leaves the network unchanged."""
  for name, value in fields.items():
    if value is None or name.startswith(_PRIVATE):
      continue
    if name not in neutral:
      raise _field_error(
        directory,
        name,
        value,
        'unknown field that may change the network; remove it if it does not',
      )
    if value not in neutral[name]:
      accepted = _abbreviated(neutral[name][0] if neutral[name] else None)
      raise _field_error(
        directory, name, value, f'only {accepted} is supported'
      )


def _read_shape(directory: str, raw: dict, **choices) -> qwen.QwenConfig:
  family, heads = raw['model_type'], raw['num_attention_heads']
  mlp = {'intermediate_size': raw['intermediate_size']}
  if family == 'qwen3_moe':
    mlp = _experts(directory, raw)
  rope = _rope(directory, raw)
  kv_heads = raw['num_key_value_heads'] or heads
  if heads % kv_heads:
    accepted = f'must divide into num_attention_heads={heads}'
    raise _field_error(directory, 'num_key_value_heads', kv_heads, accepted)
  head_dim = 128 if family == 'qwen3' else raw['hidden_size'] // heads
  head_dim = raw.get('head_dim') or head_dim
  if not head_dim or head_dim % 2:
    accepted = 'must be even, for rotary positions'
    raise _field_error(directory, 'head_dim', head_dim, accepted)
  return qwen.QwenConfig(
    vocab_size=raw['vocab_size'],
    hidden_size=raw['hidden_size'],
    **mlp,
    num_layers=raw['num_hidden_layers'],
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    rope_theta=_theta(directory, raw, rope),
    rms_norm_eps=raw['rms_norm_eps'],
    tie_embeddings=bool(raw.get('tie_word_embeddings')),
    **_FAMILIES[family],
    yarn=_yarn(directory, rope),
    max_positions=raw.get('max_position_embeddings') or 32768,
    **choices,
  )


def _check_numbers(directory: str, raw: dict) -> None:
  path = pathlib.Path(directory) / 'config.json'
  missing = [name for name in _REQUIRED if raw.get(name) is None]
  # Null means num_attention_heads.
  if 'num_key_value_heads' not in raw:
    missing.append('num_key_value_heads')
  if missing:
    raise ValueError(f'{path}: lacks {", ".join(missing)}; all are required')
  for names, is_valid, accepted in (
    (_COUNTS, _is_count, 'an integer above 0, at most 2147483647'),
    (_FLAGS, lambda value: isinstance(value, bool), 'true or false'),
    (
      ['rms_norm_eps'],
      lambda value: _is_number(value) and 0 < value < 1,
      'a number between 0 and 1',
    ),
  ):
    for name in names:
      if raw.get(name) is not None and not is_valid(raw[name]):
        raise _field_error(directory, name, raw[name], f'must be {accepted}')


def _is_number(value: object) -> bool:
  """Returns whether a value is a finite number; booleans are not."""
  return type(value) in (int, float) and -math.inf < value < math.inf


def _is_count(value: object) -> bool:
  return type(value) is int and 0 < value <= _MAX_COUNT


def _experts(directory: str, raw: dict) -> dict:
  """Returns the fields of QwenConfig for a mixture of experts."""
  names = ('num_experts', 'num_local_experts')
  given = [raw[name] for name in names if raw.get(name) is not None]
  missing = [name for name in _EXPERTS_REQUIRED if raw.get(name) is None]
  if not given or missing:
    path = pathlib.Path(directory) / 'config.json'
    field = (*missing, 'num_experts')[0]
    raise ValueError(
      f'{path}: lacks {field}; a mixture of experts requires '
      f'{", ".join(_EXPERTS_REQUIRED)} and num_experts'
    )
  num_experts, per_token = given[0], raw['num_experts_per_tok']
  if given[-1] != num_experts:
    accepted = f'must be equal to num_experts={num_experts}'
    raise _field_error(directory, 'num_local_experts', given[-1], accepted)
  if per_token > num_experts:
    accepted = f'must be at most num_experts={num_experts}'
    raise _field_error(directory, 'num_experts_per_tok', per_token, accepted)
  return {
    'intermediate_size': raw['moe_intermediate_size'],
    'num_experts': num_experts,
    'experts_per_token': per_token,
    'normalized_experts': bool(raw.get('norm_topk_prob')),
  }


def _rope(directory: str, raw: dict) -> dict:
  """Returns the fields of config.json for the rotary angles."""
  # Files of 2024 and 2025 have rope_scaling, later files rope_parameters.
  given = [raw[n] for n in ('rope_scaling', 'rope_parameters') if raw.get(n)]
  rope = given[0] if given else {}
  if given[1:] and given[1] != rope:
    accepted = 'must be equal to rope_parameters'
    raise _field_error(directory, 'rope_scaling', rope, accepted)
  rope_type = rope.get('rope_type', rope.get('type', 'default'))
  if rope_type not in list(_ROPE):
    raise _field_error(
      directory,
      'rope_type',
      rope_type,
      f'only {" and ".join(_ROPE)} are supported',
    )
  rest = {name: rope[name] for name in rope if name not in _ROPE[rope_type]}
  _check_neutral(directory, rest, _NEUTRAL_ROPE)
  return rope | {'rope_type': rope_type}


def _theta(directory: str, raw: dict, rope: dict) -> float:
  """Returns the base of the rotary angles."""
  # Later files have rope_theta within rope_parameters.
  given = [fields.get('rope_theta') for fields in (rope, raw)]
  given = [theta for theta in given if theta is not None] or [1e4]
  theta = given[0]
  if not _is_number(theta) or not 1 < theta < _MAX_THETA:
    accepted = 'must be a finite number above 1'
    raise _field_error(directory, 'rope_theta', theta, accepted)
  if given[-1] != theta:
    accepted = f'must be equal to rope_theta={theta} in the rotary parameters'
    raise _field_error(directory, 'rope_theta', given[-1], accepted)
  return float(theta)


def _yarn(directory: str, rope: dict) -> qwen.Yarn | None:
  """Returns the YaRN scaling of the rotary angles, or None without it."""
  if rope['rope_type'] == 'default':
    return None
  factor, length = (rope.get(name) for name in _YARN_REQUIRED)
  fast, slow = rope.get('beta_fast') or 32, rope.get('beta_slow') or 1
  scale = rope.get('attention_factor')
  for name, value, is_valid, accepted in (
    ('factor', factor, _is_number(factor) and factor >= 1, 'at least 1'),
    (_YARN_REQUIRED[1], length, _is_count(length), 'an integer above 0'),
    ('beta_slow', slow, _is_number(slow) and slow > 0, 'above 0'),
    ('beta_fast', fast, _is_number(fast) and fast > slow, 'above beta_slow'),
    (
      'attention_factor',
      scale,
      scale is None or (_is_number(scale) and scale > 0),
      'above 0',
    ),
  ):
    if not is_valid:
      raise _field_error(directory, name, value, f'of yarn must be {accepted}')
  return qwen.Yarn(
    factor=float(factor),
    original_length=length,
    beta_fast=float(fast),
    beta_slow=float(slow),
    attention_factor=None if scale is None else float(scale),
  )


def _tensors(config: qwen.QwenConfig) -> Iterator[_Tensor]:
  """Yields the tensors of a checkpoint of a network."""
  shapes = parameters.shapes(config)
  for name, theirs in _TOP_NAMES.items():
    if name in shapes:
      yield _Tensor((name,), (), theirs, shapes[name], False)
  for (group, name), (theirs, transposed) in _LAYER_NAMES.items():
    if name not in shapes['layers'].get(group, {}):
      continue
    # 1 for tensors of an expert, 0 for others.
    shape, expert_dims = shapes['layers'][group][name], theirs.count('{}')
    stored = _stored_shape(name, shape[1 + expert_dims :], transposed)
    for index in _indices(shape[: 1 + expert_dims]):
      full_name = f'model.layers.{index[0]}.{theirs.format(*index[1:])}'
      path = ('layers', group, name)
      yield _Tensor(path, index, full_name, stored, transposed)


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


def _files(directory: str) -> list[pathlib.Path]:
  """Returns the safetensors files of a checkpoint."""
  root = pathlib.Path(directory)
  existing = sorted(root.glob('*.safetensors'))
  if not (root / _INDEX).is_file():
    if not existing:
      raise ValueError(
        f'model.path={directory}: no *.safetensors files; needs '
        f'model.safetensors, or {_INDEX} and its files (pytorch_model.bin and '
        'other formats are not supported)'
      )
    return existing
  indexed = sorted({root / file for file in _index(root / _INDEX).values()})
  missing = [path.name for path in indexed if not path.is_file()]
  if missing:
    raise ValueError(
      f'model.path={directory}: {missing[0]} of {_INDEX} does not exist '
      f'({len(missing)} missing); needs all files of the index'
    )
  if extra := sorted(set(existing) - set(indexed)):
    raise ValueError(
      f'model.path={directory}: {extra[0].name} is not in {_INDEX}; the folder '
      'must contain one checkpoint'
    )
  return indexed


def _index(path: pathlib.Path) -> dict[str, str]:
  """Returns the file of each tensor, by the tensor's name."""
  try:
    index = json.loads(path.read_text(encoding='utf-8'))['weight_map']
    index = {str(name): str(file) for name, file in index.items()}
  except (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
  ) as error:
    raise ValueError(
      f'{path}: not an index of safetensors files ({error}); must have a '
      'weight_map'
    ) from error
  for file in index.values():
    if file in ('', '.', '..') or '/' in file or '\\' in file:
      raise ValueError(
        f'{path}: weight_map contains {json.dumps(file)}; must be a file in '
        'the same folder'
      )
  return index


class _Stored(NamedTuple):
  """A tensor's entry in the header of a safetensors file."""

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]


def _stored_tensors(directory: str) -> dict[str, _Stored]:
  """Returns the tensors of a checkpoint by name, from the files' headers."""
  stored: dict[str, _Stored] = {}
  for path in _files(directory):
    with _open(path) as tensors:
      for name in tensors.keys():  # noqa: SIM118  (not a dict)
        if name in stored:
          raise ValueError(
            f'model.path={directory}: {name} is in {stored[name].path.name} '
            f'and in {path.name}; must be in one file'
          )
        entry = tensors.get_slice(name)
        shape = tuple(entry.get_shape())
        stored[name] = _Stored(path, entry.get_dtype(), shape)
  return stored


def _open(path: pathlib.Path):
  try:
    return safetensors.safe_open(path, framework='np')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'{path}: not a readable safetensors file: {error}') from (
      error
    )


def check(directory: str, config: qwen.QwenConfig) -> None:
  """Checks that a checkpoint's tensors match a config.

  Reads only the headers of the files, except for tied embeddings: if the
  checkpoint stores both, their values are compared.

  Args:
    directory: the checkpoint.
    config: shape of its model.

  Raises:
    ValueError: in one line that names the first differences, with shapes.
  """
  stored = _stored_tensors(directory)
  if (pathlib.Path(directory) / _ADAPTER).is_file():
    raise ValueError(
      f'model.path={directory}: contains {_ADAPTER}, an adapter that would not '
      'be loaded; merge it into the weights, or remove it'
    )
  differences = [
    *itertools.islice(_differences(stored, config), _MAX_NAMED + 1)
  ]
  if differences:
    more = '; and more' if differences[_MAX_NAMED:] else ''
    shown = '; '.join(differences[:_MAX_NAMED])
    raise ValueError(f'model.path={directory}: {shown}{more}')
  if config.tie_embeddings and _TOP_NAMES['unembed'] in stored:
    _check_tied(directory, stored)


def _differences(
  stored: dict[str, _Stored], config: qwen.QwenConfig
) -> Iterator[str]:
  """Yields the differences between stored tensors and those of a network.

  This is lazy: a wrong config.json may ask for a billion tensors.
  """
  expected = {}
  for tensor in _tensors(config):
    expected[tensor.name] = tensor.shape
    if tensor.name not in stored:
      yield f'{tensor.name} {tensor.shape} is missing'
  if config.tie_embeddings and _TOP_NAMES['unembed'] in stored:
    expected[_TOP_NAMES['unembed']] = expected[_TOP_NAMES['embed']]
  for name, (_, dtype, shape) in stored.items():
    if name not in expected:
      if not name.endswith('rotary_emb.inv_freq'):
        yield f'{json.dumps(name)[1:-1]} is unknown'
    elif shape != expected[name]:
      yield (
        f'{name} is {shape} in the file and {expected[name]} by config.json'
      )
    elif dtype not in _DTYPES:
      yield (
        f'{name} is {dtype} in the file; must be one of {", ".join(_DTYPES)}'
      )


def _check_tied(directory: str, stored: dict[str, _Stored]) -> None:
  """Refuses an unembedding that differs from the embedding it is tied to."""
  entries = [stored[_TOP_NAMES[name]] for name in ('embed', 'unembed')]
  with (
    _open(entries[0].path) as embed_file,
    _open(entries[1].path) as unembed_file,
  ):
    slices = [
      embed_file.get_slice(_TOP_NAMES['embed']),
      unembed_file.get_slice(_TOP_NAMES['unembed']),
    ]
    # Both are large, so they are compared in blocks of rows.
    num_rows = entries[0].shape[0]
    for start in range(0, num_rows, _TIED_ROWS):
      block = slice(start, min(start + _TIED_ROWS, num_rows))
      if not np.array_equal(*(tensor[block] for tensor in slices)):
        raise ValueError(
          f'model.path={directory}: {_TOP_NAMES["unembed"]} differs from '
          f'{_TOP_NAMES["embed"]} and tie_word_embeddings is true; must be '
          'equal, or tie_word_embeddings false'
        )


def load(
  directory: str,
  config: qwen.QwenConfig,
  mesh: jax.sharding.Mesh,
  *,
  dtype: str = 'float32',
) -> dict:
  """Loads a checkpoint's parameters, sharded over the mesh, without adapters.

  Host memory holds one tensor at a time, and a copy while it is transposed.

  Args:
    directory: the checkpoint.
    config: shape of its model.
    mesh: the devices.
    dtype: type of the parameters.

  Raises:
    ValueError: if tensors are missing, unknown, of a wrong shape or not finite;
      in one line.
  """
  check(directory, config)
  stored = _stored_tensors(directory)
  shapes = parameters.shapes(config)
  shardings = mesh_lib.shardings(mesh, parameters.logical_axes(config))
  params: dict = {}
  for tensor in console.progress_bar(
    list(_tensors(config)), desc=f'reading {directory}'
  ):
    *groups, last = tensor.path
    node = params
    for key in groups:
      node = node.setdefault(key, {})
    shape, sharding = _get(shapes, tensor.path), _get(shardings, tensor.path)
    depth = len(tensor.index)
    part_sharding = jax.NamedSharding(mesh, jax.P(*sharding.spec[depth:]))
    with _open(stored[tensor.name].path) as file:
      values = file.get_tensor(tensor.name)
    values = values.T if tensor.transposed else values
    part = mesh_lib.place(values.reshape(shape[depth:]), part_sharding)
    if not depth:
      node[last], finite = _cast(part, sharding, dtype)
    else:
      if last not in node:
        node[last] = _zeros(shape, sharding, dtype)
      node[last], finite = _insert(node[last], part, tensor.index, sharding)
    # Fetching blocks until the tensor is written; otherwise tensors would
    # accumulate in memory.
    if not mesh_lib.to_host(finite):
      raise ValueError(
        f'model.path={directory}: {tensor.name} contains NaN or infinity, or '
        f'numbers too large for {dtype}; must be finite'
      )
    del values, part
  return params


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(
  part: jax.Array, sharding: jax.NamedSharding, dtype: str
) -> tuple[jax.Array, jax.Array]:
  """Returns a tensor cast to a type, and whether all its values are finite."""
  part = part.astype(dtype)
  array = jax.lax.with_sharding_constraint(part, sharding)
  return array, _is_finite(part, sharding)


def _is_finite(part: jax.Array, sharding: jax.NamedSharding) -> jax.Array:
  replicated = jax.NamedSharding(sharding.mesh, jax.P())
  finite = jnp.isfinite(part).all()
  return jax.lax.with_sharding_constraint(finite, replicated)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(
  shape: tuple[int, ...], sharding: jax.NamedSharding, dtype: str
) -> jax.Array:
  return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _insert(
  stack: jax.Array,
  part: jax.Array,
  index: tuple[int, ...],
  sharding: jax.NamedSharding,
) -> tuple[jax.Array, jax.Array]:
  """Returns the stack with `part` at `index`, and whether `part` is finite."""
  part = part.astype(stack.dtype)
  stack = stack.at[index].set(part)
  stack = jax.lax.with_sharding_constraint(stack, sharding)
  return stack, _is_finite(part, sharding)


def _split(config: qwen.QwenConfig, itemsize: int) -> dict[str, list[_Tensor]]:
  """Returns the tensors of each file of an export, by file name."""
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
  """Returns whether a path has the form ORGANISATION/NAME[@REVISION]."""
  return bool(_HUB_NAME.fullmatch(path))


def _is_complete(folder: pathlib.Path, *, only_config: bool) -> bool:
  """Returns whether all files of a checkpoint exist; does not check them."""
  if only_config:
    return (folder / 'config.json').is_file()
  index = folder / _INDEX
  if not index.is_file():
    return any(folder.glob('*.safetensors'))
  return all((folder / file).is_file() for file in _index(index).values())


@functools.cache
def download(name: str, *, only_config: bool = False) -> str:
  """Returns the local folder of a model on the hub; downloads it if needed.

  A cached model is used even if the hub has a newer revision, so that a resumed
  run continues with the same model.

  Args:
    name: organisation/name or organisation/name@revision.
    only_config: whether config.json is enough.

  Raises:
    ValueError: if the model does not exist or the hub cannot be reached; in one
      line.
  """
  name, _, revision = name.partition('@')
  options = {
    'revision': revision or None,
    'allow_patterns': 'config.json' if only_config else _HUB_FILES,
  }
  # Not cached, or incomplete.
  with contextlib.suppress(Exception):
    folder = huggingface_hub.snapshot_download(
      name, local_files_only=True, **options
    )
    if _is_complete(pathlib.Path(folder), only_config=only_config):
      return folder
  try:
    return huggingface_hub.snapshot_download(name, **options)
  except Exception as error:  # From the hub, its HTTP client or the disk.
    reason = ' '.join(str(error).split())[:160]
    raise ValueError(
      f'model.path={name}: no such folder, and not available from the hub '
      f'({type(error).__name__}: {reason}); must be a folder, or a name on the '
      'hub with a connection to it (HF_HUB_OFFLINE unset)'
    ) from error


def _get(tree: dict, path: tuple[str, ...]):
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
  """Writes a model as a directory that `transformers` loads.

  All processes must call this; the main process writes.

  Args:
    directory: the target; created if missing. Other weights in it are removed.
    config: shape of the model.
    params: parameters of the model; adapters are merged.
    tokenizer_directory: directory whose tokenizer files are copied; None: no
      tokenizer.
    dtype: type of the tensors in the files.
  """
  adapters = config.adapters
  config = dataclasses.replace(config, adapters=None)
  root = pathlib.Path(directory)
  is_main = distributed.is_main_process()
  if is_main:
    root.mkdir(parents=True, exist_ok=True)
    # Files of an earlier export would be loaded together with the new files.
    for path in (*root.glob('*.safetensors'), root / _INDEX):
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
    _write_json(root, config, dtype, shards)
    _copy_tokenizer(tokenizer_directory, root)


def save_adapters(
  directory: str, config: qwen.QwenConfig, adapters: dict, base: str
) -> None:
  """Writes adapters as a directory that `peft` loads.

  All processes must call this; the main process writes.

  Args:
    directory: the target; created if missing.
    config: shape of the model.
    adapters: parameters of the adapters; see `lora.split`.
    base: the base model, a folder or a name on the hub.
  """
  tensors, targets = {}, set()
  for (group, name), (theirs, _) in _LAYER_NAMES.items():
    arrays = adapters['layers'].get(group, {})
    if name + lora.A not in arrays:
      continue
    targets.add(theirs.split('.')[1])
    for suffix, ours in (('lora_A', lora.A), ('lora_B', lora.B)):
      stack = mesh_lib.to_host(arrays[name + ours])
      # [layers, in.., rank] and [layers, rank, out..]; (out, in) in the file.
      rank = config.adapters.rank
      shape = (-1, rank) if ours == lora.A else (rank, -1)
      for layer, matrix in enumerate(stack):
        tensor_name = theirs.replace('.weight', f'.{suffix}.weight')
        tensors[f'base_model.model.model.layers.{layer}.{tensor_name}'] = (
          np.ascontiguousarray(matrix.reshape(shape).T, np.float32)
        )
  if not distributed.is_main_process():
    return
  root = pathlib.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  path = root / 'adapter_model.safetensors'
  with files.as_os_errors(path):
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


def _write_json(root, config, dtype, shards: dict[str, list[_Tensor]]) -> None:
  """Writes config.json and, for several weight files, their index."""
  contents = {'config.json': _config_json(config, dtype)}
  if len(shards) > 1:
    weight_map = {
      tensor.name: file for file, part in shards.items() for tensor in part
    }
    size = sum(math.prod(tensor.shape) for tensor in _tensors(config))
    contents[_INDEX] = {
      'metadata': {'total_size': size * np.dtype(dtype).itemsize},
      'weight_map': weight_map,
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


def _export(
  params: dict, tensor: _Tensor, dtype: str, adapters: lora.Lora | None
) -> np.ndarray:
  """Returns a tensor in the file's layout, with its adapter merged."""
  *groups, name = tensor.path
  group, shape = _get(params, groups), tensor.shape
  names = (name, name + lora.A, name + lora.B)
  if adapters and names[1] in group:
    # One layer at a time, in float32.
    part = {n: group[n][tensor.index][None].astype('float32') for n in names}
    leaf = _merge(adapters, part)[name][0]
  else:
    leaf = group[name][tensor.index] if tensor.index else group[name]
  host = mesh_lib.to_host(leaf)
  if tensor.transposed:
    host = host.reshape(shape[::-1]).T
  return np.ascontiguousarray(host.reshape(shape), dtype)


def _config_json(config: qwen.QwenConfig, dtype: str) -> dict:
  """Returns the config.json of a network; the inverse of `read_config`."""
  family = 'qwen3' if config.qk_norm else 'qwen2'
  architecture = f'{family.capitalize()}ForCausalLM'
  if config.num_experts:
    family, architecture = 'qwen3_moe', 'Qwen3MoeForCausalLM'
  content = {
    'architectures': [architecture],
    'model_type': family,
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
