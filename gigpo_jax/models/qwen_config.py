"""The shape of a Qwen network and the choices of its computation."""

import dataclasses
import math
from typing import Any

from gigpo_jax.models import attention, decode_attention, lora

# Types in which a network computes.
DTYPES = ('bfloat16', 'float32')
# Activations that the backward pass recomputes, fastest first. none: no
# activations; matrices: all except the matmuls with parameters; layer: all
# activations of a layer.
REMATS = ('none', 'matrices', 'layer')

# Deeper networks run their layers in a loop, which compiles one layer only.
MAX_UNROLLED = 8
# Maximum depth at which the sampler unstacks the layers, by platform. On a GPU,
# compiling a layer is cheap, and a loop's copies out of the stacks would
# dominate the time of a decoding step.
_MAX_SPLIT = {'gpu': 128}


@dataclasses.dataclass(frozen=True)
class Yarn:
  """Rotary angles for rows longer than in training (YaRN, arXiv:2309.00071).

  Low frequencies are divided by `factor`, high frequencies stay the same, and
  those between are interpolated.

  Attributes:
    factor: ratio of the longest row to `original_length`.
    original_length: tokens of the longest row in training.
    beta_fast: turns within `original_length` from which an angle is unchanged.
    beta_slow: turns within `original_length` up to which an angle is divided.
    attention_factor: scale of cosines and sines; None: 0.1 ln(factor) + 1.
  """

  factor: float
  original_length: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class Delta:
  """Shape of a layer that mixes tokens by a state; see `delta_net`.

  Attributes:
    key_heads: number of heads of queries and keys.
    value_heads: number of heads of values, a multiple of `key_heads`.
    key_size: size of a query and of a key.
    value_size: size of a value.
    kernel: tokens of the convolution, with the token itself.
    joined: whether files hold all projections of a key head together; only
      their layout differs (Qwen3-Next).
  """

  key_heads: int
  value_heads: int
  key_size: int
  value_size: int
  kernel: int = 4
  joined: bool = False

  @property
  def ratio(self) -> int:
    """Returns the number of value heads of a key head."""
    return self.value_heads // self.key_heads

  @property
  def widths(self) -> dict[str, int]:
    """Returns the columns of each part of a key head's projections."""
    values = self.ratio * self.value_size
    keys = {'q': self.key_size, 'k': self.key_size, 'v': values}
    return keys | {'z': values, 'b': self.ratio, 'a': self.ratio}

  @property
  def mixed_size(self) -> int:
    """Returns the inputs of the convolution for a key head."""
    return 2 * self.key_size + self.ratio * self.value_size


@dataclasses.dataclass(frozen=True)
class QwenConfig:
  """Shape of a network; names follow Hugging Face's config.json.

  Attributes:
    qkv_bias: whether queries, keys and values have biases (Qwen2).
    o_bias: whether the output projection of attention has a bias.
    qk_norm: whether each head's queries and keys are normalized (Qwen3).
    attention_gate: whether the queries' matrix also has a gate for each output
      of a head.
    centered_norms: whether norms multiply by 1 + weight; the norm within
      `delta` does not.
    rotary_dim: leading elements of a head that are rotated; 0: all.
    yarn: scaling of the rotary angles for longer rows; None: no scaling.
    max_positions: longest supported row in tokens; only written to exports.
    num_experts: X, experts of a layer; 0: a dense MLP.
    experts_per_token: experts that each token is routed to.
    shared_size: width of an MLP next to the experts, which processes every
      token; 0: there is none.
    dense_layers: indices of layers with a dense MLP in a mixture of experts.
    dense_size: width of these MLPs.
    normalized_experts: whether a token's expert weights are normalized to sum
      to one.
    window: number of the last tokens, with itself, that a token attends to; 0:
      all.
    window_layers: indices of the layers with a window; (): all layers.
    delta: shape of layers that mix tokens by a state instead of attention;
      None: there are none.
    delta_layers: indices of these layers; (): all layers.
    value_head: whether the output is one value per token (a critic) rather
      than logits; see `values`.
    adapters: low-rank adapters of a frozen network; None: all parameters are
      trained.
    dtype: compute type, one of DTYPES; parameters stay float32.
    remat: one of REMATS.
    attention: implementation of attention within a row, one of
      `attention.IMPLEMENTATIONS`.
    fused: number of groups of columns if q, k and v are one matrix, as are gate
      and up; a multiple of the devices that share a copy of the model. It is
      the form of the sampler's copy; see `fusion`. 0: separate matrices.
    decode_attention: implementation of attention over a cache, one of
      `decode_attention.IMPLEMENTATIONS`.
    cache: type of a cache, one of `kv_cache.TYPES`.
    max_split: maximum depth at which `prefill` and `decode` take unstacked
      layers; see `parameters.unstack_layers`.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 1e6
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = True
  qkv_bias: bool = True
  o_bias: bool = False
  qk_norm: bool = False
  attention_gate: bool = False
  centered_norms: bool = False
  rotary_dim: int = 0
  yarn: Yarn | None = None
  max_positions: int = 32768
  num_experts: int = 0
  experts_per_token: int = 0
  normalized_experts: bool = True
  shared_size: int = 0
  dense_layers: tuple[int, ...] = ()
  dense_size: int = 0
  window: int = 0
  window_layers: tuple[int, ...] = ()
  delta: Delta | None = None
  delta_layers: tuple[int, ...] = ()
  value_head: bool = False
  adapters: lora.Lora | None = None
  dtype: str = 'bfloat16'
  remat: str = 'layer'
  attention: str = 'xla'
  fused: int = 0
  decode_attention: str = 'xla'
  cache: str = 'model'
  max_split: int = MAX_UNROLLED


def platform_fields(
  config: QwenConfig, platform: str, capability: float = math.inf
) -> dict[str, Any]:
  """Returns the fields of a network that suit a device.

  Args:
    config: shape of the network, with its type of activations.
    platform: 'cpu', 'gpu' or 'tpu'.
    capability: see `attention.has_kernels`.
  """
  device = platform, config.dtype, config.head_dim, capability
  return {
    'attention': attention.default_implementation(*device),
    'decode_attention': decode_attention.default_implementation(
      *device, config.window
    ),
    'max_split': _MAX_SPLIT.get(platform, MAX_UNROLLED),
  }
