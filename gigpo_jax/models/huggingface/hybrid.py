"""config.json of networks with layers that have a state: Qwen3-Next, Qwen3.5.

Published checkpoints also have a vision tower and layers that predict several
tokens (MTP). Only the text part is read, and exports have only that part.
"""

from collections.abc import Collection
from typing import Any

from gigpo_jax.models.huggingface import fields
from gigpo_jax.models.qwen_config import Delta, QwenConfig

# Fields of QwenConfig, and class of transformers, by model_type.
_HYBRID = {
  'qkv_bias': False,
  'qk_norm': True,
  'attention_gate': True,
  'centered_norms': True,
}
_TEXT, _MOE, _NEXT = 'qwen3_5_text', 'qwen3_5_moe_text', 'qwen3_next'
FAMILIES: dict[str, dict[str, Any]] = dict.fromkeys(
  (_TEXT, _MOE, _NEXT), _HYBRID
)
ARCHITECTURES = {
  _TEXT: 'Qwen3_5ForCausalLM',
  _MOE: 'Qwen3_5MoeForCausalLM',
  _NEXT: 'Qwen3NextForCausalLM',
}
# Families with experts in all layers, and in most layers.
EXPERTS = (_MOE, _NEXT)
# Fields that a family has not.
MISSING = {
  _MOE: ('intermediate_size', 'decoder_sparse_step', 'mlp_only_layers')
}

# model_type of a checkpoint with a vision tower: (that of its text part, its
# class).
_WITH_VISION = {
  'qwen3_5': (_TEXT, 'Qwen3_5ForConditionalGeneration'),
  'qwen3_5_moe': (_MOE, 'Qwen3_5MoeForConditionalGeneration'),
}
_VISION_FIELDS = (
  *('text_config', 'vision_config', 'model_type', 'tie_word_embeddings'),
  *('image_token_id', 'video_token_id', 'language_model_only'),
  *('vision_start_token_id', 'vision_end_token_id'),
)

# Sizes of the layers with a state, with the defaults of transformers.
_SIZES = {
  'linear_num_key_heads': 16,
  'linear_num_value_heads': 32,
  'linear_key_head_dim': 128,
  'linear_value_head_dim': 128,
  'linear_conv_kernel_dim': 4,
}
# Default size of a head of attention, and share of it that is rotated.
HEAD_DIM, _ROTATED = 256, 0.25
# Which layers have attention if layer_types is missing: every fourth.
_INTERVAL = 'full_attention_interval'
_FULL, _LINEAR = 'full_attention', 'linear_attention'

# Fields that `layers` uses, or that do not change the network.
FIELDS = frozenset(
  (
    *_SIZES,
    *('layer_types', _INTERVAL, 'partial_rotary_factor', 'mamba_ssm_dtype'),
    *('mtp_num_hidden_layers', 'mtp_use_dedicated_embeddings'),
  )
)
# Default width of the MLP next to the experts.
_SHARED, _SHARED_SIZE = 'shared_expert_intermediate_size', 512
EXPERTS_FIELDS = frozenset((_SHARED,))
# Fields that may change the network, with their accepted values.
_NEUTRAL = {'attn_output_gate': (True,), 'output_gate_type': ('swish', 'silu')}
# Only Qwen3-Next may have dense layers among experts.
_NO_DENSE_LAYERS = {'mlp_only_layers': ([],), 'decoder_sparse_step': (1,)}
# Fields of the rotary angles. The sections only matter for images.
ROPE = ('partial_rotary_factor', 'mrope_section', 'mrope_interleaved')


def neutral(family: str) -> dict[str, tuple]:
  """Returns the fields of a family that must have one of some values."""
  return _NEUTRAL | ({} if family == _NEXT else _NO_DENSE_LAYERS)


def text_part(
  directory: str, raw: dict, without_effect: Collection[str]
) -> dict:
  """Returns the fields of the text part of a config.json.

  Args:
    directory: the checkpoint.
    raw: fields of config.json; without a vision tower, they are returned.
    without_effect: fields that never change a network.
  """
  family, text = raw.get('model_type'), raw.get('text_config')
  if not isinstance(family, str) or family not in _WITH_VISION:
    return raw
  text_family, architecture = _WITH_VISION[family]
  known = {*_VISION_FIELDS, *without_effect}
  rest = {name: raw[name] for name in raw if name not in known}
  accepted = {'architectures': ([architecture],)}
  fields.check_neutral(directory, rest, accepted)
  if not isinstance(text, dict):
    accepted = f'must be the fields of {text_family}'
    raise fields.error(directory, 'text_config', text, accepted)
  tied = raw.get('tie_word_embeddings')
  return {
    'model_type': text_family,
    **text,
    **({} if tied is None else {'tie_word_embeddings': tied}),
  }


def layers(
  directory: str, raw: dict, rope: dict, head_dim: int
) -> dict[str, Any]:
  """Returns the fields of QwenConfig for the kinds of layers.

  Args:
    directory: the checkpoint.
    raw: fields of config.json.
    rope: fields of the rotary angles.
    head_dim: size of a head of attention.
  """
  fields.check_depth(directory, raw)
  sizes = []
  for name, default in _SIZES.items():
    size = default if raw.get(name) is None else raw[name]
    if not fields.is_count(size):
      raise fields.error(directory, name, size, 'must be an integer above 0')
    sizes.append(size)
  if sizes[1] % sizes[0]:
    accepted = f'must be a multiple of linear_num_key_heads={sizes[0]}'
    name = 'linear_num_value_heads'
    raise fields.error(directory, name, sizes[1], accepted)
  types = _layer_types(directory, raw)
  indices = tuple(n for n, name in enumerate(types) if name == _LINEAR)
  return {
    'delta': Delta(*sizes, joined=raw['model_type'] == _NEXT)
    if indices
    else None,
    'delta_layers': indices,
    'rotary_dim': _rotary_dim(directory, raw, rope, head_dim),
  }


def experts(directory: str, raw: dict) -> dict[str, Any]:
  """Returns the fields of QwenConfig for experts that those of Qwen3 lack."""
  size = _SHARED_SIZE if raw.get(_SHARED) is None else raw[_SHARED]
  if not fields.is_count(size):
    raise fields.error(directory, _SHARED, size, 'must be an integer above 0')
  normalized = raw.get('norm_topk_prob')
  is_normalized = raw['model_type'] == _MOE or normalized in (None, True)
  return {'shared_size': size, 'normalized_experts': is_normalized}


def _layer_types(directory: str, raw: dict) -> list[str]:
  count, types = raw['num_hidden_layers'], raw.get('layer_types')
  if types is None:
    interval = raw.get(_INTERVAL) or 4
    if not fields.is_count(interval):
      accepted = 'must be an integer above 0'
      raise fields.error(directory, _INTERVAL, interval, accepted)
    types = [_LINEAR if n % interval else _FULL for n in range(1, count + 1)]
  if (
    not isinstance(types, list)
    or len(types) != count
    or {*types} != {_FULL, _LINEAR}
  ):
    accepted = f'must be {count} times {_LINEAR} or {_FULL}, each at least once'
    raise fields.error(directory, 'layer_types', types, accepted)
  return types


def _rotary_dim(directory: str, raw: dict, rope: dict, head_dim: int) -> int:
  """Returns the number of elements of a head that are rotated."""
  name = 'partial_rotary_factor'
  given = [x[name] for x in (rope, raw) if x.get(name) is not None]
  given = given or [_ROTATED]
  share = given[0]
  if not fields.is_number(share) or not 0 < share <= 1:
    accepted = 'must be above 0 and at most 1'
    raise fields.error(directory, name, share, accepted)
  size = int(head_dim * share)
  if size % 2 or not size or given[-1] != share:
    accepted = (
      f'must be one number that makes head_dim={head_dim} times it even'
    )
    raise fields.error(directory, name, given[-1], accepted)
  return size


def to_json(config: QwenConfig, content: dict[str, Any]) -> dict[str, Any]:
  """Returns the config.json of a network with a state.

  Args:
    config: shape of the network.
    content: the fields that Qwen3 would have.
  """
  delta, family = config.delta, _MOE if config.num_experts else _TEXT
  family = _NEXT if delta.joined else family
  sizes = (
    *(delta.key_heads, delta.value_heads),
    *(delta.key_size, delta.value_size, delta.kernel),
  )
  rotated = (config.rotary_dim or config.head_dim) / config.head_dim
  shared = {_SHARED: config.shared_size} if config.num_experts else {}
  missing = (*MISSING.get(family, ()), 'rope_scaling')
  rope = content.get('rope_scaling', {'rope_type': 'default'})
  return {name: x for name, x in content.items() if name not in missing} | {
    'architectures': [ARCHITECTURES[family]],
    'model_type': family,
    **shared,
    **dict(zip(_SIZES, sizes, strict=True)),
    'layer_types': [
      _LINEAR if n in config.delta_layers else _FULL
      for n in range(config.num_layers)
    ],
    'rope_parameters': rope
    | {
      'rope_theta': config.rope_theta,
      'partial_rotary_factor': rotated,
    },
  }
