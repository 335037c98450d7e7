"""Shapes of published checkpoints, for estimates without a download."""

import dataclasses

from gigpo_jax.models import qwen, qwen_config


def _shape(sizes: str, **kwargs) -> qwen.QwenConfig:
  """Returns the shape of a network.

  Args:
    sizes: width, MLP width, layers, heads, key/value heads, head size and
      vocabulary, separated by spaces.
    **kwargs: other fields of the config.
  """
  width, mlp, layers, heads, kv_heads, head, vocabulary = map(
    int, sizes.split()
  )
  return qwen.QwenConfig(
    vocab_size=vocabulary,
    hidden_size=width,
    intermediate_size=mlp,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head,
    **kwargs,
  )


def _hybrid(sizes: str, value_heads: int, **kwargs) -> qwen.QwenConfig:
  """Returns the shape of a Qwen3.5 network: every fourth layer has attention.

  Args:
    sizes: see `_shape`.
    value_heads: heads of values in the other layers.
    **kwargs: other fields of the config.
  """
  shape = _shape(
    sizes,
    **_QWEN3,
    attention_gate=True,
    centered_norms=True,
    rope_theta=1e7,
    delta=qwen_config.Delta(16, value_heads, key_size=128, value_size=128),
    **kwargs,
  )
  return dataclasses.replace(
    shape,
    rotary_dim=shape.head_dim // 4,
    delta_layers=tuple(n for n in range(shape.num_layers) if (n + 1) % 4),
  )


_UNTIED = {'tie_embeddings': False}
_QWEN3 = {'qkv_bias': False, 'qk_norm': True}
_EXPERTS = {'num_experts': 128, 'experts_per_token': 8}

SHAPES = {
  'Qwen2.5-0.5B': _shape('896 4864 24 14 2 64 151936'),
  'Qwen2.5-1.5B': _shape('1536 8960 28 12 2 128 151936'),
  'Qwen2.5-3B': _shape('2048 11008 36 16 2 128 151936'),
  'Qwen2.5-7B': _shape('3584 18944 28 28 4 128 152064', **_UNTIED),
  'Qwen2.5-14B': _shape('5120 13824 48 40 8 128 152064', **_UNTIED),
  'Qwen2.5-32B': _shape('5120 27648 64 40 8 128 152064', **_UNTIED),
  'Qwen2.5-72B': _shape('8192 29568 80 64 8 128 152064', **_UNTIED),
  'Qwen3-0.6B': _shape('1024 3072 28 16 8 128 151936', **_QWEN3),
  'Qwen3-1.7B': _shape('2048 6144 28 16 8 128 151936', **_QWEN3),
  'Qwen3-4B': _shape('2560 9728 36 32 8 128 151936', **_QWEN3),
  'Qwen3-8B': _shape('4096 12288 36 32 8 128 151936', **_QWEN3, **_UNTIED),
  'Qwen3-14B': _shape('5120 17408 40 40 8 128 151936', **_QWEN3, **_UNTIED),
  'Qwen3-32B': _shape('5120 25600 64 64 8 128 151936', **_QWEN3, **_UNTIED),
  'Qwen3-30B-A3B': _shape(
    '2048 768 48 32 4 128 151936', **_QWEN3, **_UNTIED, **_EXPERTS
  ),
  'Qwen3.5-9B': _hybrid('4096 12288 32 16 4 256 248320', 32, **_UNTIED),
  'Qwen3.5-35B-A3B': _hybrid(
    '2048 512 40 16 2 256 248320',
    32,
    **_UNTIED,
    num_experts=256,
    experts_per_token=8,
    shared_size=512,
  ),
  'Qwen3.5-27B': _hybrid('5120 17408 64 24 4 256 248320', 48, **_UNTIED),
}


def find(name: str) -> qwen.QwenConfig | None:
  """Returns the shape of a checkpoint by name, or None if it is unknown.

  Args:
    name: such as Qwen3-4B-Base; the longest matching prefix is used.
  """
  prefixes = [n for n in SHAPES if name.lower().startswith(n.lower())]
  return SHAPES[max(prefixes, key=len)] if prefixes else None
