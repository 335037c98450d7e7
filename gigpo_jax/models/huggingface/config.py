"""Read and write config.json.

A field that may change the network and is not supported is an error.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from gigpo_jax import options
from gigpo_jax.models import layer_runs
from gigpo_jax.models.huggingface import fields, hybrid
from gigpo_jax.models.qwen_config import DTYPES, REMATS, QwenConfig, Yarn

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
  'decoder_sparse_step',
  'mlp_only_layers',
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
  'decoder_sparse_step',
)
# Fields that hold true or false.
_FLAGS = (
  'tie_word_embeddings',
  'norm_topk_prob',
  'attention_bias',
  'use_sliding_window',
)
# Fields that say which layers have a sliding window.
_LAYER_FIELDS = ('sliding_window', 'max_window_layers', 'layer_types')
_FULL, _SLIDING = 'full_attention', 'sliding_attention'
# All fields that `read_config` uses.
_READ = (
  *_COUNTS,
  *_FLAGS,
  'rms_norm_eps',
  'model_type',
  *_LAYER_FIELDS,
  'mlp_only_layers',
  'rope_theta',
  'rope_scaling',
  'rope_parameters',
)

# Fields that may change the network, with the values that do not change it.
# Null never changes it. A field that is in none of these lists is refused.
_NEUTRAL = {
  'hidden_act': ('silu', 'swish'),
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

# Fields that never change the network. They concern training, memory and
# outputs, generation, and notes.
_WITHOUT_EFFECT = frozenset(
  """
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

# Largest base of the rotary angles (float32).
_MAX_THETA = 1e38

# Fields of QwenConfig that depend on model_type.
_FAMILIES = {
  'qwen2': {'qkv_bias': True, 'qk_norm': False},
  'qwen3': {'qkv_bias': False, 'qk_norm': True},
  'qwen3_moe': {'qkv_bias': False, 'qk_norm': True},
  **hybrid.FAMILIES,
}
# Default size of a head, by model_type; others divide hidden_size.
_HEAD_DIMS = {'qwen3': 128, **dict.fromkeys(hybrid.FAMILIES, hybrid.HEAD_DIM)}
# Families with experts.
_MIXTURES = ('qwen3_moe', *hybrid.EXPERTS)
_ARCHITECTURES = {
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'qwen3_moe': 'Qwen3MoeForCausalLM',
  **hybrid.ARCHITECTURES,
}


def read_config(
  directory: str,
  *,
  dtype: str = 'bfloat16',
  remat: str = 'none',
  **choices: Any,
) -> QwenConfig:
  """Returns the shape of a checkpoint's model from its config.json.

  Args:
    directory: the checkpoint.
    dtype: compute type.
    remat: activations that the backward pass recomputes; see `qwen_config`.
    **choices: other fields of the result that config.json does not define.

  Raises:
    ValueError: if an argument is unknown, config.json is missing or invalid, or
      the model is not supported; in one line.
  """
  options.check_choice('dtype', dtype, DTYPES)
  options.check_choice('remat', remat, REMATS)
  path = pathlib.Path(directory) / 'config.json'
  if not path.is_file():
    missing = 'config.json' if path.parent.is_dir() else 'such folder'
    raise ValueError(
      f'model.path={directory}: no {missing}; needs a Hugging Face '
      'directory with config.json, *.safetensors and a tokenizer, or a name on '
      'the hub: organisation/name'
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
  raw = hybrid.text_part(directory, raw, _WITHOUT_EFFECT)
  family = raw.get('model_type')
  if not isinstance(family, str) or family not in _FAMILIES:
    raise ValueError(
      f'model.path={directory}: model_type {family} is not supported; must be '
      'qwen2 (Qwen2, Qwen2.5), qwen3, qwen3_moe, qwen3_next, qwen3_5 or '
      'qwen3_5_moe'
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


def _check_fields(directory: str, raw: dict) -> None:
  """Refuses unsupported fields of config.json that may change the network."""
  family, neutral = raw['model_type'], dict(_NEUTRAL)
  neutral['architectures'] = ([_ARCHITECTURES[family]], [])
  known = {*_READ, *_WITHOUT_EFFECT}
  if family not in _MIXTURES:
    known -= {*_EXPERTS_FIELDS}
  if family in hybrid.FAMILIES:
    more = hybrid.neutral(family)
    known = (known | hybrid.FIELDS) - {*more}
    neutral |= more
  if family in hybrid.EXPERTS:
    known |= hybrid.EXPERTS_FIELDS
  rest = {name: raw[name] for name in raw if name not in known}
  fields.check_neutral(directory, rest, neutral)


def _read_shape(directory: str, raw: dict, **choices: Any) -> QwenConfig:
  family, heads = raw['model_type'], raw['num_attention_heads']
  if family in _MIXTURES:
    mlp = _experts(directory, raw)
  else:
    mlp = {'intermediate_size': raw['intermediate_size']}
  if family in hybrid.EXPERTS:
    mlp |= hybrid.experts(directory, raw)
  is_hybrid = family in hybrid.FAMILIES
  rope = _rope(directory, raw, hybrid.ROPE if is_hybrid else ())
  kv_heads = raw['num_key_value_heads'] or heads
  if heads % kv_heads:
    accepted = f'must divide into num_attention_heads={heads}'
    raise fields.error(directory, 'num_key_value_heads', kv_heads, accepted)
  default = _HEAD_DIMS.get(family, raw['hidden_size'] // heads)
  head_dim = raw.get('head_dim') or default
  if not head_dim or head_dim % 2:
    accepted = 'must be even, for rotary positions'
    raise fields.error(directory, 'head_dim', head_dim, accepted)
  if is_hybrid:
    layers = hybrid.layers(directory, raw, rope, head_dim)
  else:
    layers = _windows(directory, raw)
  return QwenConfig(
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
    **_FAMILIES[family] | _biases(raw),
    **layers,
    yarn=_yarn(directory, rope),
    max_positions=raw.get('max_position_embeddings') or 32768,
    **choices,
  )


def _check_numbers(directory: str, raw: dict) -> None:
  path = pathlib.Path(directory) / 'config.json'
  others = hybrid.MISSING.get(raw['model_type'], ())
  missing = [n for n in _REQUIRED if n not in others and raw.get(n) is None]
  # Null means num_attention_heads.
  if 'num_key_value_heads' not in raw:
    missing.append('num_key_value_heads')
  if missing:
    raise ValueError(f'{path}: lacks {", ".join(missing)}; all are required')
  for names, is_valid, accepted in (
    (_COUNTS, fields.is_count, 'an integer above 0, at most 2147483647'),
    (_FLAGS, lambda value: isinstance(value, bool), 'true or false'),
    (
      ['rms_norm_eps'],
      lambda value: fields.is_number(value) and 0 < value < 1,
      'a number between 0 and 1',
    ),
  ):
    for name in names:
      if raw.get(name) is not None and not is_valid(raw[name]):
        raise fields.error(directory, name, raw[name], f'must be {accepted}')


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
    raise fields.error(directory, 'num_local_experts', given[-1], accepted)
  if per_token > num_experts:
    accepted = f'must be at most num_experts={num_experts}'
    raise fields.error(directory, 'num_experts_per_tok', per_token, accepted)
  return {
    'intermediate_size': raw['moe_intermediate_size'],
    'num_experts': num_experts,
    'experts_per_token': per_token,
    'normalized_experts': bool(raw.get('norm_topk_prob')),
    **_dense_layers(directory, raw),
  }


def _biases(raw: dict) -> dict:
  """Returns the fields of QwenConfig for the biases of attention."""
  # transformers ignores the field for Qwen2, which always has some biases.
  if raw['model_type'] == 'qwen2' or not raw.get('attention_bias'):
    return {}
  return {'qkv_bias': True, 'o_bias': True}


def _dense_layers(directory: str, raw: dict) -> dict:
  """Returns the fields of QwenConfig for dense layers among experts."""
  count, step = raw['num_hidden_layers'], raw.get('decoder_sparse_step') or 1
  listed = raw.get('mlp_only_layers') or []
  if not isinstance(listed, list) or not all(
    type(n) is int and 0 <= n < count for n in listed
  ):
    accepted = f'must be a list of layers, from 0 to {count - 1}'
    raise fields.error(directory, 'mlp_only_layers', listed, accepted)
  if step == 1 and not listed:
    return {}
  fields.check_depth(directory, raw)
  dense = tuple(n for n in range(count) if n in listed or (n + 1) % step)
  if len(dense) == count:
    name = 'mlp_only_layers' if step == 1 else 'decoder_sparse_step'
    accepted = 'must leave a layer with experts; without any, use qwen3'
    raise fields.error(directory, name, raw[name], accepted)
  return {'dense_layers': dense, 'dense_size': raw['intermediate_size']}


def _windows(directory: str, raw: dict) -> dict:
  """Returns the fields of QwenConfig for attention with a window.

  A layer has a window if its type says so, else from `max_window_layers` on; a
  mixture of experts has windows in all layers.
  """
  count, types = raw['num_hidden_layers'], raw.get('layer_types')
  if types is not None and (
    not isinstance(types, list)
    or len(types) != count
    or not all(name in (_FULL, _SLIDING) for name in types)
  ):
    accepted = f'must be a list of {count} times {_FULL} or {_SLIDING}'
    raise fields.error(directory, 'layer_types', types, accepted)
  is_used = bool(raw.get('use_sliding_window'))
  # The defaults are those of transformers; null means no windows.
  size, first = (
    raw.get('sliding_window', 4096),
    raw.get('max_window_layers', 28),
  )
  if types is not None and not is_used and _SLIDING in types:
    accepted = f'{_SLIDING} needs use_sliding_window=true'
    raise fields.error(directory, 'layer_types', types, accepted)
  if not is_used or (size is None and _SLIDING not in (types or ())):
    return {}
  if not fields.is_count(size):
    accepted = 'must be an integer above 0, at most 2147483647'
    raise fields.error(directory, 'sliding_window', size, accepted)
  if raw['model_type'] == 'qwen3_moe':
    return {'window': size}
  if type(first) is not int or first < 0:
    accepted = 'must be an integer from 0'
    raise fields.error(directory, 'max_window_layers', first, accepted)
  if types is None and first >= count:
    return {}
  fields.check_depth(directory, raw)
  layers = tuple(
    n
    for n in range(count)
    if (n >= first if types is None else types[n] == _SLIDING)
  )
  if not layers:
    return {}
  # () are all layers.
  return {
    'window': size,
    'window_layers': layers if len(layers) < count else (),
  }


def _rope(directory: str, raw: dict, more: Sequence[str]) -> dict:
  """Returns the fields of config.json for the rotary angles.

  Args:
    directory: the checkpoint.
    raw: fields of config.json.
    more: fields that the family accepts besides _ROPE.
  """
  # Files of 2024 and 2025 have rope_scaling, later files rope_parameters.
  given = [raw[n] for n in ('rope_scaling', 'rope_parameters') if raw.get(n)]
  rope = given[0] if given else {}
  if given[1:] and given[1] != rope:
    accepted = 'must be equal to rope_parameters'
    raise fields.error(directory, 'rope_scaling', rope, accepted)
  rope_type = rope.get('rope_type', rope.get('type', 'default'))
  if rope_type not in list(_ROPE):
    raise fields.error(
      directory,
      'rope_type',
      rope_type,
      f'only {" and ".join(_ROPE)} are supported',
    )
  known = {*_ROPE[rope_type], *more}
  rest = {name: rope[name] for name in rope if name not in known}
  fields.check_neutral(directory, rest, _NEUTRAL_ROPE)
  return rope | {'rope_type': rope_type}


def _theta(directory: str, raw: dict, rope: dict) -> float:
  """Returns the base of the rotary angles."""
  # Later files have rope_theta within rope_parameters.
  given = [values.get('rope_theta') for values in (rope, raw)]
  given = [theta for theta in given if theta is not None] or [1e4]
  theta = given[0]
  if not fields.is_number(theta) or not 1 < theta < _MAX_THETA:
    accepted = 'must be a finite number above 1'
    raise fields.error(directory, 'rope_theta', theta, accepted)
  if given[-1] != theta:
    accepted = f'must be equal to rope_theta={theta} in the rotary parameters'
    raise fields.error(directory, 'rope_theta', given[-1], accepted)
  return float(theta)


def _yarn(directory: str, rope: dict) -> Yarn | None:
  """Returns the YaRN scaling of the rotary angles, or None without it."""
  if rope['rope_type'] == 'default':
    return None
  factor, length = (rope.get(name) for name in _YARN_REQUIRED)
  fast, slow = (
    default if rope.get(name) is None else rope[name]
    for name, default in (('beta_fast', 32), ('beta_slow', 1))
  )
  scale = rope.get('attention_factor')
  for name, value, is_valid, accepted in (
    ('factor', factor, fields.is_number(factor) and factor >= 1, 'at least 1'),
    (_YARN_REQUIRED[1], length, fields.is_count(length), 'an integer above 0'),
    ('beta_slow', slow, fields.is_number(slow) and slow > 0, 'above 0'),
    (
      'beta_fast',
      fast,
      fields.is_number(fast) and fast > slow,
      'above beta_slow',
    ),
    (
      'attention_factor',
      scale,
      scale is None or (fields.is_number(scale) and scale > 0),
      'above 0',
    ),
  ):
    if not is_valid:
      raise fields.error(directory, name, value, f'of yarn must be {accepted}')
  return Yarn(
    factor=float(factor),
    original_length=length,
    beta_fast=float(fast),
    beta_slow=float(slow),
    attention_factor=None if scale is None else float(scale),
  )


def to_json(config: QwenConfig, dtype: str) -> dict:
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
    'use_sliding_window': config.window > 0,
  }
  if config.qk_norm:
    content['attention_bias'] = config.o_bias
  if config.window:
    content['sliding_window'] = config.window
    if not config.num_experts:
      content['layer_types'] = [
        _SLIDING if layer_runs.config_of(config, n).window else _FULL
        for n in range(config.num_layers)
      ]
  if config.num_experts:
    content |= {
      'moe_intermediate_size': config.intermediate_size,
      'num_experts': config.num_experts,
      'num_experts_per_tok': config.experts_per_token,
      'norm_topk_prob': config.normalized_experts,
      'decoder_sparse_step': 1,
      'mlp_only_layers': list(config.dense_layers),
    }
  if config.dense_layers:
    content['intermediate_size'] = config.dense_size
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
  if config.delta:
    return hybrid.to_json(config, content)
  return content
