"""Hugging Face directories in and out: config.json and safetensors.

Tensors are read one by one, transposed to our layout, put on the mesh and
cast to float32 there; names that are missing, unknown or of another shape are
refused with both shapes. Needs no torch.
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

from gigpo_jax import files as files_lib
from gigpo_jax import hosts
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import lora, qwen

# Largest file of an export, and what a download of the hub is to bring.
FILE_BYTES = 5 * 10**9
_HUB_FILES = ['*.safetensors', '*.json', '*.jinja', 'vocab.*', 'merges.txt']
# Characters of a value, and differences, that an error names.
_MAX_SHOWN, _MAX_NAMED = 80, 4
# Rows of an embedding that are compared at once.
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

# Fields of config.json. Needed: of each network, and of a mixture of experts.
_NEEDED = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'rms_norm_eps',
)
_EXPERTS_NEEDED = ('moe_intermediate_size', 'num_experts_per_tok')
_OF_EXPERTS = (
  *_EXPERTS_NEEDED,
  'num_experts',
  'num_local_experts',
  'norm_topk_prob',
)
# Whole numbers above 0, and true or false.
_COUNTS = (
  *(name for name in _NEEDED if name != 'rms_norm_eps'),
  *_EXPERTS_NEEDED,
  'num_experts',
  'num_local_experts',
  'num_key_value_heads',
  'head_dim',
  'max_position_embeddings',
)
_FLAGS = ('tie_word_embeddings', 'norm_topk_prob')
_READ = (
  *_COUNTS,
  *_FLAGS,
  'rms_norm_eps',
  'model_type',
  'rope_theta',
  'rope_scaling',
  'rope_parameters',
)

# Fields that may change the network, with the values that do not. Null never
# does. A field that is nowhere in these lists is refused.
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

# Fields that never change the network: of sliding windows, which are refused
# where they are used; of training; of memory and outputs; of generation; notes.
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
# Names of fields that transformers keeps to itself begin so.
_PRIVATE = '_'

# The same of the rotary angles, by their type.
_YARN_NEEDED = ('factor', 'original_max_position_embeddings')
_ROPE = {
  'default': ('rope_type', 'type', 'rope_theta'),
  'yarn': (
    *('rope_type', 'type', 'rope_theta', *_YARN_NEEDED),
    *('beta_fast', 'beta_slow', 'attention_factor'),
  ),
}
_NEUTRAL_ROPE = {
  'mscale': (0,),
  'mscale_all_dim': (0,),
  'truncate': (True,),
  'partial_rotary_factor': (1,),
}

# Largest count, which fits int32, and base of rotary angles, which fits
# float32.
_MAX_COUNT, _MAX_THETA = 2**31 - 1, 1e38

# What is particular to a model_type.
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

# Types of tensors that are read, as safetensors names them.
_DTYPES = ('BF16', 'F16', 'F32', 'F64')

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
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(raw, dict):
    raise ValueError(f'{path}: holds no JSON object; must be a config.json')
  kind = raw.get('model_type')
  if not isinstance(kind, str) or kind not in _FAMILIES:
    raise ValueError(
      f'model.path={directory}: model_type {kind} is not supported; known: '
      'qwen2 (Qwen2, Qwen2.5), qwen3, qwen3_moe'
    )
  _check_numbers(directory, raw)
  _check_fields(directory, raw)
  try:
    return _read_shape(directory, raw, dtype=dtype, remat=remat, **choices)
  except (AttributeError, ArithmeticError, TypeError) as error:
    raise ValueError(
      f'{path}: cannot be a model ({error}); must be as Hugging Face writes it'
    ) from error


def _refused(
  directory: str, name: str, value: object, accepted: str
) -> ValueError:
  """Returns the error of a field of config.json, in one line."""
  field = f'{json.dumps(name)[1:-1]}={_shown(value)}'
  return ValueError(
    f'model.path={directory}: config.json has {field}; {accepted}'
  )


def _shown(value: object) -> str:
  """Returns a value as JSON, in one line, cut."""
  text = json.dumps(value)
  return text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}..'


def _check_fields(directory: str, raw: dict) -> None:
  """Refuses fields of config.json that may change the network."""
  kind, neutral = raw['model_type'], dict(_NEUTRAL)
  neutral['architectures'] = ([_ARCHITECTURES[kind]], [])
  layers = raw.get('layer_types')
  if isinstance(layers, list) and len(layers) == raw['num_hidden_layers']:
    neutral['layer_types'] = (['full_attention'] * len(layers),)
  if kind == 'qwen2':
    # Without effect in transformers: its tensors tell.
    neutral['attention_bias'] = (False, True)
  known = {*_READ, *_WITHOUT_EFFECT}
  if kind != 'qwen3_moe':
    known -= {*_OF_EXPERTS}
  rest = {name: raw[name] for name in raw if name not in known}
  _check_neutral(directory, rest, neutral)


def _check_neutral(directory: str, fields: dict, neutral: dict) -> None:
  """Refuses fields with another value than those that change nothing."""
  for name, value in fields.items():
    if value is None or name.startswith(_PRIVATE):
      continue
    if name not in neutral:
      raise _refused(
        directory,
        name,
        value,
        'unknown, it may change the network; remove it if it does not',
      )
    if value not in neutral[name]:
      only = _shown(neutral[name][0] if neutral[name] else None)
      raise _refused(directory, name, value, f'only {only} is supported')


def _read_shape(directory: str, raw: dict, **choices) -> qwen.QwenConfig:
  kind, heads = raw['model_type'], raw['num_attention_heads']
  mlp = {'intermediate_size': raw['intermediate_size']}
  if kind == 'qwen3_moe':
    mlp = _experts(directory, raw)
  rope = _rope(directory, raw)
  kv_heads = raw['num_key_value_heads'] or heads
  if heads % kv_heads:
    accepted = f'must divide into num_attention_heads={heads}'
    raise _refused(directory, 'num_key_value_heads', kv_heads, accepted)
  head_dim = 128 if kind == 'qwen3' else raw['hidden_size'] // heads
  head_dim = raw.get('head_dim') or head_dim
  if not head_dim or head_dim % 2:
    accepted = 'must be even, for rotary positions'
    raise _refused(directory, 'head_dim', head_dim, accepted)
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
    **_FAMILIES[kind],
    yarn=_yarn(directory, rope),
    max_positions=raw.get('max_position_embeddings') or 32768,
    **choices,
  )


def _check_numbers(directory: str, raw: dict) -> None:
  path = pathlib.Path(directory) / 'config.json'
  missing = [name for name in _NEEDED if raw.get(name) is None]
  if 'num_key_value_heads' not in raw:  # Null is as many as heads.
    missing.append('num_key_value_heads')
  if missing:
    raise ValueError(f'{path}: lacks {", ".join(missing)}; all are needed')
  for names, right, accepted in (
    (_COUNTS, _is_count, 'a whole number above 0, at most 2147483647'),
    (_FLAGS, lambda value: isinstance(value, bool), 'true or false'),
    (
      ['rms_norm_eps'],
      lambda value: _is_number(value) and 0 < value < 1,
      'a number between 0 and 1',
    ),
  ):
    for name in names:
      if raw.get(name) is not None and not right(raw[name]):
        raise _refused(directory, name, raw[name], f'must be {accepted}')


def _is_number(value: object) -> bool:
  """Whether a value is a finite number, and not true or false."""
  return type(value) in (int, float) and -math.inf < value < math.inf


def _is_count(value: object) -> bool:
  return type(value) is int and 0 < value <= _MAX_COUNT


def _experts(directory: str, raw: dict) -> dict:
  """Returns the fields of a mixture of experts."""
  names = ('num_experts', 'num_local_experts')
  given = [raw[name] for name in names if raw.get(name) is not None]
  missing = [name for name in _EXPERTS_NEEDED if raw.get(name) is None]
  if not given or missing:
    path = pathlib.Path(directory) / 'config.json'
    lacks = (*missing, 'num_experts')[0]
    raise ValueError(f'{path}: lacks {lacks}; all of an expert are needed')
  number, chosen = given[0], raw['num_experts_per_tok']
  if given[-1] != number:
    accepted = f'must be equal to num_experts={number}'
    raise _refused(directory, 'num_local_experts', given[-1], accepted)
  if chosen > number:
    accepted = f'must be at most num_experts={number}'
    raise _refused(directory, 'num_experts_per_tok', chosen, accepted)
  return {
    'intermediate_size': raw['moe_intermediate_size'],
    'num_experts': number,
    'experts_per_token': chosen,
    'normalized_experts': bool(raw.get('norm_topk_prob')),
  }


def _rope(directory: str, raw: dict) -> dict:
  """Returns the fields of the rotary angles."""
  # Files of 2024-25 have rope_scaling, later files rope_parameters.
  given = [raw[n] for n in ('rope_scaling', 'rope_parameters') if raw.get(n)]
  rope = given[0] if given else {}
  if given[1:] and given[1] != rope:
    accepted = 'must be equal to rope_parameters'
    raise _refused(directory, 'rope_scaling', rope, accepted)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind not in list(_ROPE):
    raise _refused(
      directory, 'rope_type', kind, f'only {" and ".join(_ROPE)} are supported'
    )
  rest = {name: rope[name] for name in rope if name not in _ROPE[kind]}
  _check_neutral(directory, rest, _NEUTRAL_ROPE)
  return rope | {'rope_type': kind}


def _theta(directory: str, raw: dict, rope: dict) -> float:
  """Returns the base of the rotary angles."""
  # Later files have it among the fields of the rotary angles.
  given = [fields.get('rope_theta') for fields in (rope, raw)]
  given = [theta for theta in given if theta is not None] or [1e4]
  theta = given[0]
  if not _is_number(theta) or not 1 < theta < _MAX_THETA:
    accepted = 'must be a finite number above 1'
    raise _refused(directory, 'rope_theta', theta, accepted)
  if given[-1] != theta:
    accepted = f'must be equal to rope_theta={theta} of its rotary parameters'
    raise _refused(directory, 'rope_theta', given[-1], accepted)
  return float(theta)


def _yarn(directory: str, rope: dict) -> qwen.Yarn | None:
  """Returns how rotary angles are stretched; None: not at all."""
  if rope['rope_type'] == 'default':
    return None
  factor, length = (rope.get(name) for name in _YARN_NEEDED)
  fast, slow = rope.get('beta_fast') or 32, rope.get('beta_slow') or 1
  scale = rope.get('attention_factor')
  for name, value, right, accepted in (
    ('factor', factor, _is_number(factor) and factor >= 1, 'at least 1'),
    (_YARN_NEEDED[1], length, _is_count(length), 'a whole number above 0'),
    ('beta_slow', slow, _is_number(slow) and slow > 0, 'above 0'),
    ('beta_fast', fast, _is_number(fast) and fast > slow, 'above beta_slow'),
    (
      'attention_factor',
      scale,
      scale is None or (_is_number(scale) and scale > 0),
      'above 0',
    ),
  ):
    if not right:
      raise _refused(directory, name, value, f'of yarn must be {accepted}')
  return qwen.Yarn(
    factor=float(factor),
    original_length=length,
    beta_fast=float(fast),
    beta_slow=float(slow),
    attention_factor=None if scale is None else float(scale),
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
    for index in _indices(whole[: 1 + each]):
      full = f'model.layers.{index[0]}.{theirs.format(*index[1:])}'
      path = ('layers', group, name)
      yield _Tensor(path, index, full, stored, transposed)


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
  """Yields every index; `np.ndindex` would first list them all."""
  if not shape:
    yield ()
    return
  for first in range(shape[0]):
    for rest in _indices(shape[1:]):
      yield first, *rest


def _stored_shape(
  name: str, shape: tuple[int, ...], transposed: bool
) -> tuple[int, ...]:
  """Shape of a tensor in the file: heads flattened, (out, in)."""
  if not transposed:
    return (math.prod(shape),)
  # Output projections flatten their two leading dimensions, others the last.
  rows = shape[-1] if name == 'o' else math.prod(shape[1:])
  return rows, math.prod(shape) // rows


def _files(directory: str) -> list[pathlib.Path]:
  """Returns the files of a checkpoint's tensors."""
  root = pathlib.Path(directory)
  there = sorted(root.glob('*.safetensors'))
  if not (root / _INDEX).is_file():
    if not there:
      raise ValueError(
        f'model.path={directory}: no *.safetensors there; needs '
        f'model.safetensors, or {_INDEX} and its parts (pytorch_model.bin and '
        'other formats are not read)'
      )
    return there
  named = sorted({root / file for file in _index(root / _INDEX).values()})
  absent = [path.name for path in named if not path.is_file()]
  if absent:
    raise ValueError(
      f'model.path={directory}: {_INDEX} names {absent[0]}, which is not '
      f'there ({len(absent)} such); needs all of them'
    )
  if extra := sorted(set(there) - set(named)):
    raise ValueError(
      f'model.path={directory}: {extra[0].name} is not in {_INDEX}; must hold '
      'one checkpoint'
    )
  return named


def _index(path: pathlib.Path) -> dict[str, str]:
  """Returns which file has which tensor."""
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
      f'{path}: not an index of safetensors files ({error}); needs weight_map'
    ) from error
  for file in index.values():
    if file in ('', '.', '..') or '/' in file or '\\' in file:
      raise ValueError(
        f'{path}: names {json.dumps(file)}; must be a file in the same folder'
      )
  return index


class _Stored(NamedTuple):
  """What the header of a file tells of a tensor."""

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]


def _stored_tensors(directory: str) -> dict[str, _Stored]:
  """Returns the tensors of a checkpoint by name, from the files' headers."""
  found: dict[str, _Stored] = {}
  for path in _files(directory):
    with _open(path) as tensors:
      for name in tensors.keys():  # noqa: SIM118  (not a dict)
        if name in found:
          raise ValueError(
            f'model.path={directory}: {name} is in {found[name].path.name} and '
            f'in {path.name}; must be in one file'
          )
        part = tensors.get_slice(name)
        shape = tuple(part.get_shape())
        found[name] = _Stored(path, part.get_dtype(), shape)
  return found


def _open(path: pathlib.Path):
  try:
    return safetensors.safe_open(path, framework='np')
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'{path}: not a readable safetensors file: {error}') from (
      error
    )


def check(directory: str, config: qwen.QwenConfig) -> None:
  """Compares a checkpoint's tensors with what the config says.

  Reads headers only, and values where the two ends of a tied network differ.

  Raises:
    ValueError: in one line that names the first differences, with shapes.
  """
  stored = _stored_tensors(directory)
  if (pathlib.Path(directory) / _ADAPTER).is_file():
    raise ValueError(
      f'model.path={directory}: holds {_ADAPTER}, an adapter that would not be '
      'loaded; merge it into the weights, or remove it'
    )
  found = [*itertools.islice(_differences(stored, config), _MAX_NAMED + 1)]
  if found:
    more = '; and more' if found[_MAX_NAMED:] else ''
    shown = '; '.join(found[:_MAX_NAMED])
    raise ValueError(f'model.path={directory}: {shown}{more}')
  if config.tie_embeddings and _TOP_NAMES['unembed'] in stored:
    _check_tied(directory, stored)


def _differences(
  stored: dict[str, _Stored], config: qwen.QwenConfig
) -> Iterator[str]:
  """Yields how the tensors of files differ from those of a network.

  One by one, for config.json may ask for a billion of them.
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
      yield f'{name} is {dtype} in the file; known: {", ".join(_DTYPES)}'


def _check_tied(directory: str, stored: dict[str, _Stored]) -> None:
  """Refuses an unembedding that differs from the embedding it is tied to."""
  ends = [stored[_TOP_NAMES[name]] for name in ('embed', 'unembed')]
  with _open(ends[0].path) as one, _open(ends[1].path) as other:
    slices = [
      one.get_slice(_TOP_NAMES['embed']),
      other.get_slice(_TOP_NAMES['unembed']),
    ]
    # A part at a time: both are large.
    rows = ends[0].shape[0]
    for start in range(0, rows, _TIED_ROWS):
      part = slice(start, min(start + _TIED_ROWS, rows))
      if not np.array_equal(*(each[part] for each in slices)):
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
  """Returns a checkpoint's parameters, sharded over the mesh; no adapters.

  One tensor at a time is in host memory, twice while it is transposed.

  Args:
    directory: the checkpoint.
    config: shape of its model.
    mesh: the devices.
    dtype: of the parameters.

  Raises:
    ValueError: in one line, if tensors are missing, unknown, misshapen or not
      finite.
  """
  check(directory, config)
  stored = _stored_tensors(directory)
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
    with _open(stored[tensor.name].path) as file:
      values = file.get_tensor(tensor.name)
    values = values.T if tensor.transposed else values
    part = mesh_lib.place(values.reshape(shape[depth:]), one)
    if not depth:
      node[last], finite = _cast(part, sharding, dtype)
    else:
      if last not in node:
        node[last] = _zeros(shape, sharding, dtype)
      node[last], finite = _written(node[last], part, tensor.index, sharding)
    # This waits for the tensor: they would pile up.
    if not mesh_lib.fetch(finite):
      raise ValueError(
        f'model.path={directory}: {tensor.name} holds NaN or infinity, or '
        f'numbers too large for {dtype}; must be finite'
      )
    del values, part
  return params


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(
  part: jax.Array, sharding: jax.NamedSharding, dtype: str
) -> tuple[jax.Array, jax.Array]:
  """Returns a tensor in another type, and whether all of it is finite."""
  part = part.astype(dtype)
  whole = jax.lax.with_sharding_constraint(part, sharding)
  return whole, _is_finite(part, sharding)


def _is_finite(part: jax.Array, sharding: jax.NamedSharding) -> jax.Array:
  everywhere = jax.NamedSharding(sharding.mesh, jax.P())
  finite = jnp.isfinite(part).all()
  return jax.lax.with_sharding_constraint(finite, everywhere)


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
) -> tuple[jax.Array, jax.Array]:
  """Returns a stack with a part put in, and whether the part is finite."""
  part = part.astype(stack.dtype)
  stack = stack.at[index].set(part)
  stack = jax.lax.with_sharding_constraint(stack, sharding)
  return stack, _is_finite(part, sharding)


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


def _is_whole(folder: pathlib.Path, *, only_config: bool) -> bool:
  """Whether all files of a checkpoint are there, right or not."""
  if only_config:
    return (folder / 'config.json').is_file()
  index = folder / _INDEX
  if not index.is_file():
    return any(folder.glob('*.safetensors'))
  return all((folder / file).is_file() for file in _index(index).values())


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
    if _is_whole(pathlib.Path(folder), only_config=only_config):
      return folder
  try:
    return huggingface_hub.snapshot_download(name, **options)
  except Exception as error:  # Of the hub, of its HTTP client, of the disk.
    reason = ' '.join(str(error).split())[:160]
    raise ValueError(
      f'model.path={name}: no such folder here, and the hub does not provide '
      f'it ({type(error).__name__}: {reason}); needs a folder, or a name on '
      'the hub and a connection to it (HF_HUB_OFFLINE unset)'
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
