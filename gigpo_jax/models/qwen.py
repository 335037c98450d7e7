"""The Qwen2, Qwen2.5 and Qwen3 decoder in Flax, dense or mixture of experts.

All functions are pure. Parameters are one nested dict of float32 arrays with
the layers stacked on the first dimension. The sampler, the learner, checkpoints
and safetensors files share it. Compute is in `dtype`; norms, rotary angles,
attention weights and logits are float32.

Shapes: **B** rows, **L** tokens, **P** prompt tokens, **C** completion tokens,
**S** cache slots, **V** vocabulary, **D** width, **H** query heads, **K**
key/value heads, **Q** = H / K query heads of one key/value head, **E** head
size, **F** MLP width, **N** layers, **X** experts, **R** rank of an adapter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gigpo_jax import mesh
from gigpo_jax.models import attention, experts, lora

# Activations that the backward pass recomputes. none: none of them; matrices:
# all except the products with parameters; layer: the whole layer.
REMATS = ('none', 'matrices', 'layer')

# Most rows and smallest vocabulary for which the logits are computed
# transposed on a CPU.
_FEW_ROWS, _LARGE_VOCABULARY = 32, 2**15

# Deeper networks run their layers in a loop, which compiles one layer only.
_MAX_UNROLLED = 8

# Depth up to which the sampler keeps each layer's arrays apart, by platform.
# On a GPU, compiling a layer is cheap, and a loop's copies out of its stacks
# would dominate the time of a decoding step.
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
class QwenConfig:
  """Shape of a network; names follow Hugging Face's config.json.

  Attributes:
    qkv_bias: whether queries, keys and values have biases (Qwen2).
    qk_norm: whether each head's queries and keys are normalized (Qwen3).
    yarn: scaling of the rotary angles for longer rows; None: no scaling.
    max_positions: longest supported row in tokens; only written to exports.
    num_experts: X, experts of a layer; 0: a dense MLP.
    experts_per_token: experts that each token is routed to.
    normalized_experts: whether a token's expert weights are normalized to sum
      to one.
    value_head: whether the output is one value per token (a critic) rather
      than logits; see `values`.
    adapters: low-rank adapters of a frozen network; None: the whole network is
      trained.
    dtype: compute type, 'bfloat16' or 'float32'; parameters stay float32.
    remat: one of REMATS.
    attention: implementation of attention within a row, one of
      `attention.IMPLEMENTATIONS`.
    max_split: depth up to which `prefill` and `decode` take each layer's
      arrays apart; see `unstack_layers`.
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
  qk_norm: bool = False
  yarn: Yarn | None = None
  max_positions: int = 32768
  num_experts: int = 0
  experts_per_token: int = 0
  normalized_experts: bool = True
  value_head: bool = False
  adapters: lora.Lora | None = None
  dtype: str = 'bfloat16'
  remat: str = 'layer'
  attention: str = 'xla'
  max_split: int = _MAX_UNROLLED


def platform_fields(platform: str) -> dict[str, Any]:
  """Returns the fields of a bfloat16 network that suit a platform.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'.
  """
  return {
    'attention': attention.default_implementation(platform),
    'max_split': _MAX_SPLIT.get(platform, _MAX_UNROLLED),
  }


# Keys and values of the layers: stacks of {'k': [N, B, K, E, S], 'v': [N, B, K,
# S, E]}, the layouts in which a decoding step multiplies them.
Cache = tuple[dict[str, jax.Array], ...]


def _layers_per_stack(config: QwenConfig) -> int:
  """Returns how many layers share one stack of the cache.

  A stack of several layers is scanned, which copies each layer's keys and
  values out of it at each step. Stacks of one layer are read in place, which is
  twice as fast, but each layer is compiled.
  """
  return 1 if config.num_layers <= config.max_split else config.num_layers


def unstack_layers(config: QwenConfig, params: dict) -> dict:
  """Returns parameters for `prefill` and `decode`: one tree for each stack.

  Call it once, before the decoding loop: inside the loop, each step would copy
  the layers' weights out of their stack.
  """
  size = _layers_per_stack(config)
  stacks = (
    jax.tree.map(lambda leaf, n=n: leaf[n : n + size], params['layers'])
    for n in range(0, config.num_layers, size)
  )
  return params | {'layers': list(stacks)}


def unstack_axes(config: QwenConfig, axes: dict) -> dict:
  """Returns the logical axes of the result of `unstack_layers`."""
  num_stacks = -(-config.num_layers // _layers_per_stack(config))
  return axes | {'layers': [axes['layers']] * num_stacks}


def _layer_table(c: QwenConfig) -> dict[str, dict[str, tuple]]:
  """Returns the shape and logical axes of each array of one layer."""
  d, h, k, e = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
  f = c.intermediate_size
  biases = {
    'q_bias': ((h, e), ('heads', 'head')),
    'k_bias': ((k, e), ('kv_heads', 'head')),
    'v_bias': ((k, e), ('kv_heads', 'head')),
  }
  head_norms = {'q': ((e,), (None,)), 'k': ((e,), (None,))}
  mlp = {
    'gate': ((d, f), ('embed', 'mlp')),
    'up': ((d, f), ('embed', 'mlp')),
    'down': ((f, d), ('mlp', 'embed')),
  }
  if c.num_experts:
    # Each expert has the arrays of an MLP.
    mlp = {
      name: ((c.num_experts, *shape), ('experts', *axes))
      for name, (shape, axes) in mlp.items()
    } | {'router': ((d, c.num_experts), ('embed', None))}
  table = {
    'attention': {
      'q': ((d, h, e), ('embed', 'heads', 'head')),
      'k': ((d, k, e), ('embed', 'kv_heads', 'head')),
      'v': ((d, k, e), ('embed', 'kv_heads', 'head')),
      **(biases if c.qkv_bias else {}),
      'o': ((h, e, d), ('heads', 'head', 'embed')),
    },
    'experts' if c.num_experts else 'mlp': mlp,
    'norm': {
      'attention': ((d,), (None,)),
      'mlp': ((d,), (None,)),
      **(head_norms if c.qk_norm else {}),
    },
  }
  for group, names in table.items():
    table[group] = names | _adapter_table(c, group, names)
  return table


def _adapter_table(c: QwenConfig, group: str, names: dict) -> dict[str, tuple]:
  """Returns shape and logical axes of the adapters in a layer's group."""
  if group == 'experts':
    return {}
  table = {}
  for name in c.adapters.targets if c.adapters else ():
    if (group, name) in _CONTRACTED:
      shape, axes = names[name]
      inner = len(_CONTRACTED[group, name])
      rank = c.adapters.rank
      table[name + lora.A] = (*shape[:inner], rank), (*axes[:inner], None)
      table[name + lora.B] = (rank, *shape[inner:]), (None, *axes[inner:])
  return table


def _table(c: QwenConfig) -> dict[str, Any]:
  """Returns (shape, logical axes) of every parameter.

  This is the only definition of the network's parameters.
  """
  table: dict[str, Any] = {
    'embed': ((c.vocab_size, c.hidden_size), ('vocab', 'embed')),
    'layers': jax.tree.map(
      lambda leaf: ((c.num_layers, *leaf[0]), ('layers', *leaf[1])),
      _layer_table(c),
      is_leaf=lambda x: isinstance(x, tuple),
    ),
    'norm': ((c.hidden_size,), (None,)),
  }
  if c.value_head:
    table['value'] = ((c.hidden_size,), (None,))
  elif not c.tie_embeddings:
    table['unembed'] = ((c.vocab_size, c.hidden_size), ('vocab', 'embed'))
  return table


def _table_column(config: QwenConfig, column: int) -> dict[str, Any]:
  return jax.tree.map(
    lambda leaf: leaf[column],
    _table(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def shapes(config: QwenConfig) -> dict[str, Any]:
  """Returns the shape of every parameter, as a tree of tuples."""
  return _table_column(config, 0)


def logical_axes(config: QwenConfig) -> dict[str, Any]:
  """Returns the logical axes of every parameter, as a tree of tuples."""
  return _table_column(config, 1)


def max_tensor_shards(config: QwenConfig) -> int:
  """Returns the number whose divisors are the valid sizes of axis `tensor`."""
  return math.gcd(
    config.num_heads,
    config.num_kv_heads,
    config.intermediate_size,
    config.vocab_size,
  )


def init(config: QwenConfig, key: jax.Array) -> dict[str, Any]:
  """Returns random parameters; consumes the key.

  Weights are normal with standard deviation 0.02, as in Qwen. Output
  projections are divided by the square root of twice the depth. Norms are one;
  biases and a critic's value head are zero. An adapter's first matrix is
  uniform with standard deviation (3 * inputs)^(-1/2), its second matrix zero.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(
    shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  keys = jax.random.split(key, len(leaves))

  def make(path: tuple, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    names = [entry.key for entry in path]
    if 'norm' in names:
      return jnp.ones(shape, jnp.float32)
    if names[-1].endswith(('bias', 'value', lora.B)):
      return jnp.zeros(shape, jnp.float32)
    if names[-1].endswith(lora.A):
      bound = math.prod(shape[1:-1]) ** -0.5
      return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    scale = 0.02
    if names[-1] in ('o', 'down'):
      scale /= (2 * config.num_layers) ** 0.5
    return scale * jax.random.normal(key, shape, jnp.float32)

  arrays = [
    make(path, shape, key)
    for (path, shape), key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(treedef, arrays)


# Suffix of the name of a quantized array's scales.
_SCALE = '_scale'

# Contracted dimensions of each matrix, not counting that of the layers.
_CONTRACTED = {
  ('attention', 'q'): (0,),
  ('attention', 'k'): (0,),
  ('attention', 'v'): (0,),
  ('attention', 'o'): (0, 1),
  ('mlp', 'gate'): (0,),
  ('mlp', 'up'): (0,),
  ('mlp', 'down'): (0,),
  ('experts', 'gate'): (1,),
  ('experts', 'up'): (1,),
  ('experts', 'down'): (1,),
}


def _map_quantized(
  tree: dict,
  matrix: Callable,
  other: Callable,
  depth: int = 0,
  group: str = '',
) -> dict:
  """Returns a tree with the structure of quantized parameters.

  Args:
    tree: parameters, or their logical axes.
    matrix: maps a matrix and its contracted dimensions to (leaf, its scales).
    other: maps any other leaf to its new leaf.
    depth: number of leading dimensions for layers, 0 or 1.
    group: key of `tree` in its parent.
  """
  quantized = {}
  for name, leaf in tree.items():
    if isinstance(leaf, dict):
      quantized[name] = _map_quantized(
        leaf, matrix, other, int(name == 'layers') or depth, name
      )
    elif name in ('embed', 'unembed'):
      quantized[name], quantized[name + _SCALE] = matrix(leaf, (1,))
    elif (group, name) in _CONTRACTED:
      axes = tuple(axis + depth for axis in _CONTRACTED[group, name])
      quantized[name], quantized[name + _SCALE] = matrix(leaf, axes)
    else:
      quantized[name] = other(leaf)
  return quantized


def quantize(config: QwenConfig, params: dict) -> dict:
  """Returns parameters with int8 matrices, for inference.

  Quantization is symmetric, of weights only, with one scale per output channel:
  w = scale * q with q in [-127, 127]. Norms and biases are cast to the compute
  type.
  """

  def matrix(
    w: jax.Array, axes: tuple[int, ...]
  ) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(jnp.abs(w), axis=axes, keepdims=True)
    scale = jnp.maximum(largest.astype(jnp.float32), 1e-30) / 127
    return jnp.round(w / scale).astype(jnp.int8), scale

  return _map_quantized(params, matrix, lambda x: x.astype(config.dtype))


def quantized_axes(config: QwenConfig) -> dict:
  """Returns the logical axes of the parameters that `quantize` returns."""

  def matrix(names: tuple, axes: tuple[int, ...]) -> tuple[tuple, tuple]:
    kept = (None if n in axes else name for n, name in enumerate(names))
    return names, tuple(kept)

  return _map_quantized(logical_axes(config), matrix, lambda names: names)


def _dequantize(
  array: jax.Array, scale: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
  """Returns an array, dequantized if it has a scale, in the compute type."""
  if scale is None:
    return array.astype(dtype)
  return array.astype(dtype) * scale.astype(dtype)


class _Parameters(nn.Module):
  """A named group of Flax parameters."""

  table: Any

  @nn.compact
  def __call__(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
    return {
      name: _dequantize(
        self.param(name, nn.initializers.zeros, shape, jnp.float32),
        self.get_variable('params', name + _SCALE),
        dtype,
      )
      for name, (shape, _) in self.table.items()
    }


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def _project(
  config: QwenConfig, w: dict[str, jax.Array], name: str, x_BLI: jax.Array
) -> jax.Array:
  """Multiplies [B, L, I] by a matrix and adds the output of its adapter.

  Rows and tokens are flattened into one dimension: XLA's CPU backend takes
  three times as long for the weight gradient of a product with two batch
  dimensions.
  """
  b, length, width = x_BLI.shape
  x_NI = x_BLI.reshape(b * length, width)
  # Output dimensions: the last for 'o', all but the first for the others.
  outer = w[name].shape[-1:] if name == 'o' else w[name].shape[1:]
  y_NO = checkpoint_name(x_NI @ w[name].reshape(width, -1), 'matrix')
  if name + lora.A in w:
    a_IR, b_RO = w[name + lora.A], w[name + lora.B]
    rank = a_IR.shape[-1]
    y_NO += config.adapters.scale * (
      (x_NI @ a_IR.reshape(width, rank)) @ b_RO.reshape(rank, -1)
    )
  return y_NO.reshape(b, length, *outer)


def _rotary(positions_BL: jax.Array, config: QwenConfig) -> jax.Array:
  """Returns cos and sin of a head's rotary angles, float32 [2, B, L, 1, E]."""
  half, yarn = config.head_dim // 2, config.yarn
  powers = jnp.arange(half, dtype=jnp.float32) / half
  periods, factor = config.rope_theta**powers, 1.0
  if yarn:
    ramp = _yarn_ramp(config)
    periods /= 1 - ramp + ramp / yarn.factor
    factor = yarn.attention_factor
    if factor is None:
      factor = 0.1 * math.log(yarn.factor) + 1
  angles = positions_BL[..., None, None] / periods
  rotary = factor * jnp.stack([jnp.cos(angles), jnp.sin(angles)])
  return jnp.concatenate([rotary, rotary], axis=-1)


def _yarn_ramp(config: QwenConfig) -> jax.Array:
  """Returns YaRN's weight of the divided angle in [0, 1], [E/2]."""
  yarn, half = config.yarn, config.head_dim // 2

  def dimension(turns: float) -> float:
    """Returns the dimension that makes `turns` turns in `original_length`."""
    period = yarn.original_length / (turns * 2 * math.pi)
    return half * math.log(period) / math.log(config.rope_theta)

  low = max(math.floor(dimension(yarn.beta_fast)), 0)
  high = min(math.ceil(dimension(yarn.beta_slow)), config.head_dim - 1)
  ramp = (jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 1e-3)
  return jnp.clip(ramp, 0, 1)


def _rotate(x_BLHE: jax.Array, rotary: jax.Array) -> jax.Array:
  """Applies rotary position embeddings to queries or keys."""
  (cos, sin), half = rotary, x_BLHE.shape[-1] // 2
  x = x_BLHE.astype(jnp.float32)

  def concatenate(x: jax.Array) -> jax.Array:
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)

  def multiply(x: jax.Array) -> jax.Array:
    zeros, ones = jnp.zeros((half, half)), jnp.eye(half)
    rotation = jnp.block([[zeros, ones], [-ones, zeros]])
    return (x.reshape(-1, 2 * half) @ rotation).reshape(x.shape)

  # XLA's CPU backend concatenates one element at a time, which is slower than
  # a product with a matrix of 0 and 1.
  rotated = jax.lax.platform_dependent(x, cpu=multiply, default=concatenate)
  return (x * cos + rotated * sin).astype(x_BLHE.dtype)


class _Layer(nn.Module):
  """One decoder layer, the body of a scan.

  Attributes:
    config: shape of the network.
    keep: whether to return the keys and values, for a cache.
  """

  config: QwenConfig
  keep: bool = False

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, dict | None],
    layer: jax.Array,
    positions_BL: jax.Array,
    branches_BL: jax.Array | None,
    rotary: jax.Array,
    at_SN: jax.Array | None = None,
  ) -> tuple[tuple[jax.Array, dict | None], tuple | None]:
    """Applies the layer.

    Args:
      carry: (x_BLD, cache), see `_layers`.
      layer: index of this layer within the stack.
      positions_BL: see `_layers`.
      branches_BL: see `_layers`.
      rotary: see `_rotary`.
      at_SN: indices of the tokens to return; see `gather_tokens`. None: all.

    Returns:
      ((output, cache), keys and values if `keep`, else None).
    """
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    (x_BLD, cache), table = carry, _layer_table(self.config)
    norm = _Parameters(table['norm'], name='norm')(jnp.float32)
    w = _Parameters(table['attention'], name='attention')(dtype)

    y_BLD = _rms_norm(x_BLD, norm['attention'], c.rms_norm_eps)
    q_BLHE, k_BLKE, v_BLKE = (_project(c, w, name, y_BLD) for name in 'qkv')
    if c.qkv_bias:
      q_BLHE, k_BLKE = q_BLHE + w['q_bias'], k_BLKE + w['k_bias']
      v_BLKE = v_BLKE + w['v_bias']
    if c.qk_norm:
      q_BLHE = _rms_norm(q_BLHE, norm['q'], c.rms_norm_eps)
      k_BLKE = _rms_norm(k_BLKE, norm['k'], c.rms_norm_eps)
    q_BLHE, k_BLKE = _rotate(q_BLHE, rotary), _rotate(k_BLKE, rotary)
    if cache is None:
      heads_BLHE = attention.self_attention(
        q_BLHE, k_BLKE, v_BLKE, branches_BL, implementation=c.attention
      )
    else:
      # Each row writes at its own position. XLA does this scatter in place; a
      # slice update at a traced layer would copy the cache.
      rows, slots = jnp.arange(x_BLD.shape[0]), positions_BL[:, 0]
      cache = {
        'k': cache['k'].at[layer, rows, :, :, slots].set(k_BLKE[:, 0]),
        'v': cache['v'].at[layer, rows, :, slots].set(v_BLKE[:, 0]),
      }
      seen_BS = jnp.arange(cache['k'].shape[-1]) <= positions_BL
      heads_BLHE = attention.cached_attention(
        q_BLHE, cache['k'][layer], cache['v'][layer], seen_BS
      )
    heads_BLA = heads_BLHE.reshape(*x_BLD.shape[:2], -1)
    if at_SN is not None:
      # From here on, the layer treats each token on its own.
      x_BLD = gather_tokens(x_BLD, at_SN)
      heads_BLA = gather_tokens(heads_BLA, at_SN)
    x_BLD = x_BLD + _project(c, w, 'o', heads_BLA)
    y_BLD = _rms_norm(x_BLD, norm['mlp'], c.rms_norm_eps)
    x_BLD = x_BLD + self._mlp(table, y_BLD)
    kept = (k_BLKE, v_BLKE) if self.keep else None
    return (mesh.constrain_rows(x_BLD), cache), kept

  def _mlp(self, table: dict, x_BLD: jax.Array) -> jax.Array:
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    if c.num_experts:
      w = _Parameters(table['experts'], name='experts')(dtype)
      return experts.apply_experts(
        x_BLD,
        w['router'],
        w['gate'],
        w['up'],
        w['down'],
        per_token=c.experts_per_token,
        normalized=c.normalized_experts,
      )
    w = _Parameters(table['mlp'], name='mlp')(dtype)
    gate_BLF = jax.nn.silu(_project(c, w, 'gate', x_BLD))
    return _project(c, w, 'down', gate_BLF * _project(c, w, 'up', x_BLD))


def gather_tokens(x_BLD: jax.Array, at_SN: jax.Array) -> jax.Array:
  """Gathers N tokens from each of S shards of the rows, [S, N, D].

  Args:
    x_BLD: rows of tokens; shard s has rows s * B / S to (s + 1) * B / S - 1.
    at_SN: indices into the B / S * L tokens of a shard.
  """
  flat = x_BLD.reshape(at_SN.shape[0], -1, x_BLD.shape[-1])
  return mesh.constrain_rows(
    jnp.take_along_axis(flat, at_SN[..., None], axis=1)
  )


def _layers(
  config: QwenConfig,
  params: dict,
  x_BLD: jax.Array,
  positions_BL: jax.Array,
  branches_BL: jax.Array | None = None,
  *,
  cache: dict | None = None,
  keep: bool = False,
) -> tuple[jax.Array, dict | None, tuple | None]:
  """Applies a stack of layers by one scan.

  Args:
    config: shape of the network.
    params: stacked parameters of the layers, which may be a part of the
      network's layers.
    x_BLD: input.
    positions_BL: position of each token in its row and in the cache, [B, L],
      or [1, L] for the same positions in all rows.
    branches_BL: branch of each token, see `attention`; None: one branch.
    cache: keys and values of these layers; None: attention within the row.
    keep: whether to return the keys and values of the tokens.

  Returns:
    (output [B, L, D], the cache with the tokens' keys and values written, keys
    and values [N, B, L, K, E] each, or None).
  """
  length = _depth(params)
  stack = nn.scan(
    _layer_class(config),
    variable_axes={'params': 0},
    split_rngs={'params': True},
    in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
    length=length,
    # A loop copies its residuals into stacks and back.
    unroll=length if length <= _MAX_UNROLLED else 1,
  )
  (x_BLD, cache), kept = stack(config, keep).apply(
    {'params': params},
    (x_BLD, cache),
    jnp.arange(length),
    positions_BL,
    branches_BL,
    _rotary(positions_BL, config),
  )
  return x_BLD, cache, kept


def _depth(params: dict) -> int:
  return jax.tree.leaves(params)[0].shape[0]


def _layer_class(config: QwenConfig) -> type[nn.Module]:
  """Returns `_Layer`, rematerialized as the config says."""
  policies = {
    'matrices': jax.checkpoint_policies.save_only_these_names('matrix'),
    'layer': jax.checkpoint_policies.nothing_saveable,
  }
  if config.remat == 'none':
    return _Layer
  return nn.remat(_Layer, prevent_cse=False, policy=policies[config.remat])


def _last_layer(
  config: QwenConfig,
  params: dict,
  x_BLD: jax.Array,
  positions_BL: jax.Array,
  branches_BL: jax.Array | None,
  at_SN: jax.Array,
) -> jax.Array:
  """Applies a layer and returns its output for some tokens only, [S, N, D].

  Args:
    config: shape of the network.
    params: parameters of one layer, not stacked.
    x_BLD: see `_layers`.
    positions_BL: see `_layers`.
    branches_BL: see `_layers`.
    at_SN: indices of the tokens; see `gather_tokens`.
  """
  (x_SND, _), _ = _layer_class(config)(config).apply(
    {'params': params},
    (x_BLD, None),
    jnp.int32(0),
    positions_BL,
    branches_BL,
    _rotary(positions_BL, config),
    at_SN,
  )
  return x_SND


def adds_in_place(config: QwenConfig) -> bool:
  """Returns whether `hidden_states` accepts `sums` of gradients."""
  return config.remat == 'layer' and config.adapters is None


@jax.custom_vjp
def accumulate_gradients(params: dict, sums: dict) -> dict:
  """Returns the parameters; `sums` is added to their gradient."""
  del sums
  return params


accumulate_gradients.defvjp(
  lambda params, sums: (params, sums),
  lambda sums, grads: (jax.tree.map(jnp.add, sums, grads), None),
)


def _layers_adding_gradients(
  config: QwenConfig,
  params: dict,
  sums: dict,
  x_BLD: jax.Array,
  positions_BL: jax.Array,
  branches_BL: jax.Array | None,
  at_SN: jax.Array,
) -> jax.Array:
  """Applies the layers and adds the gradient of their parameters to `sums`.

  The backward pass adds each layer's gradient to `sums` as soon as it is
  computed, so memory never holds a second gradient of the whole network.
  Otherwise this equals `_layers` with remat 'layer', followed by `_last_layer`.
  """
  # This loop saves the input of each layer and recomputes the rest.
  config, last = dataclasses.replace(config, remat='none'), _depth(params) - 1

  def layer(params: dict, n: jax.Array | int) -> dict:
    return jax.tree.map(lambda leaf: leaf[n], params)

  def inner(layer: dict, x_BLD: jax.Array, positions_BL, branches_BL, _):
    stack = jax.tree.map(lambda leaf: leaf[None], layer)
    return _layers(config, stack, x_BLD, positions_BL, branches_BL)[0]

  outer = functools.partial(_last_layer, config)

  def forward(params: dict, sums: dict, x_BLD: jax.Array, *where):
    def step(x_BLD: jax.Array, n: jax.Array):
      return inner(layer(params, n), x_BLD, *where), x_BLD

    x_BLD, inputs_NBLD = jax.lax.scan(step, x_BLD, jnp.arange(last))
    x_SND = outer(layer(params, last), x_BLD, *where)
    return x_SND, (params, sums, inputs_NBLD, x_BLD, where)

  def backward(residuals: tuple, grad_SND: jax.Array) -> tuple:
    params, sums, inputs_NBLD, x_BLD, where = residuals

    def layer_backward(apply, n, x_BLD, grad, sums):
      _, vjp = jax.vjp(
        lambda layer, x_BLD: apply(layer, x_BLD, *where),
        layer(params, n),
        x_BLD,
      )
      grads, grad_BLD = vjp(grad)
      return grad_BLD, jax.tree.map(lambda s, g: s.at[n].add(g), sums, grads)

    def step(m: jax.Array, carry: tuple) -> tuple:
      n = last - 1 - m
      return layer_backward(inner, n, inputs_NBLD[n], *carry)

    carry = layer_backward(outer, last, x_BLD, grad_SND, sums)
    if last:  # A loop over no layers has no inputs to trace its body with.
      carry = jax.lax.fori_loop(0, last, step, carry)
    grad_BLD, sums = carry
    return sums, None, grad_BLD, None, None, None

  @jax.custom_vjp
  def run(params, sums, x_BLD, *where):
    return forward(params, sums, x_BLD, *where)[0]

  run.defvjp(forward, backward)
  return run(params, sums, x_BLD, positions_BL, branches_BL, at_SN)


def _embed(config: QwenConfig, params: dict, tokens_BL: jax.Array) -> jax.Array:
  scale = params.get('embed' + _SCALE)
  scale = None if scale is None else scale[tokens_BL]
  x_BLD = _dequantize(params['embed'][tokens_BL], scale, config.dtype)
  return mesh.constrain_rows(x_BLD)


def hidden_states(
  config: QwenConfig,
  params: dict,
  tokens_BL: jax.Array,
  positions_BL: jax.Array | None = None,
  branches_BL: jax.Array | None = None,
  at_SN: jax.Array | None = None,
  *,
  sums: dict | None = None,
) -> jax.Array:
  """Returns the last layer's normalized output, [B, L, D] in the compute type.

  With `at_SN`, the output is of those tokens only, [S, N, D]. Unless the layers
  run in a loop, the last layer then skips the computation of other tokens.

  A token attends to earlier tokens of its own branch and of branch 0.

  Args:
    config: shape of the network.
    params: parameters of the network.
    tokens_BL: rows, padded right with any tokens.
    positions_BL: position of each token in its text; None: 0, 1, ..
    branches_BL: 0 for tokens of a prompt, and a different number above 0 for
      each of its completions; None: all are 0.
    at_SN: indices of the tokens to return; see `gather_tokens`. None: all.
    sums: tree like the parameters of the layers; the gradient of those
      parameters is then `sums` plus its own value. Requires `adds_in_place` and
      `at_SN`. None: the plain gradient.
  """
  x_BLD = _embed(config, params, tokens_BL)
  if positions_BL is None:
    positions_BL = jnp.arange(tokens_BL.shape[1])[None]
  where, layers = (positions_BL, branches_BL), params['layers']
  if sums is not None:
    x = _layers_adding_gradients(config, layers, sums, x_BLD, *where, at_SN)
  elif at_SN is None or _depth(layers) > _MAX_UNROLLED:
    x, _, _ = _layers(config, layers, x_BLD, *where)
    x = x if at_SN is None else gather_tokens(x, at_SN)
  else:
    first = jax.tree.map(lambda leaf: leaf[:-1], layers)
    last = jax.tree.map(lambda leaf: leaf[-1], layers)
    if _depth(first):
      x_BLD, _, _ = _layers(config, first, x_BLD, *where)
    x = _last_layer(config, last, x_BLD, *where, at_SN)
  return _rms_norm(x, params['norm'], config.rms_norm_eps)


def logits(config: QwenConfig, params: dict, hidden: jax.Array) -> jax.Array:
  """Returns next-token logits, float32 [..., V], for hidden states [..., D]."""
  name = 'embed' if config.tie_embeddings else 'unembed'
  matrix = _dequantize(params[name], params.get(name + _SCALE), config.dtype)
  # Flattened for the same reason as in `_project`.
  rows_ND = hidden.reshape(-1, config.hidden_size)

  def multiply(rows_ND: jax.Array, matrix_VD: jax.Array) -> jax.Array:
    return jnp.einsum(
      'ND,VD->NV', rows_ND, matrix_VD, preferred_element_type=jnp.float32
    )

  def multiply_transposed(
    rows_ND: jax.Array, matrix_VD: jax.Array
  ) -> jax.Array:
    flat_VN = jnp.einsum(
      'VD,ND->VN', matrix_VD, rows_ND, preferred_element_type=jnp.float32
    )
    # Without the barrier, XLA would undo the transposition.
    return jax.lax.optimization_barrier(flat_VN).T

  # With few rows and a large matrix, the transposed product is twice as fast on
  # a CPU.
  if rows_ND.shape[0] <= _FEW_ROWS and config.vocab_size >= _LARGE_VOCABULARY:
    flat_NV = jax.lax.platform_dependent(
      rows_ND, matrix, cpu=multiply_transposed, default=multiply
    )
  else:
    flat_NV = multiply(rows_ND, matrix)
  return flat_NV.reshape(*hidden.shape[:-1], config.vocab_size)


def values(params: dict, hidden: jax.Array) -> jax.Array:
  """Returns a critic's values, float32 [...], for hidden states [..., D]."""
  return jnp.sum(hidden.astype(jnp.float32) * params['value'], axis=-1)


def token_log_probs(
  config: QwenConfig,
  params: dict,
  hidden_BCD: jax.Array,
  targets_BC: jax.Array,
  *,
  count: jax.Array | int | None = None,
  temperature: float = 1.0,
  chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
  """Returns each target's log-probability and entropy, both float32 [B, C].

  Logits exist for `chunk` positions of each row at a time only. The backward
  pass recomputes them chunk by chunk.

  Args:
    config: shape of the network.
    params: parameters of the network.
    hidden_BCD: hidden state before each target.
    targets_BC: token ids.
    count: number of leading positions to compute; results after them may be 0.
      None: all positions.
    temperature: divides the logits; the temperature of sampling.
    chunk: positions of a row whose logits exist at a time.
  """
  b, c, d = hidden_BCD.shape
  chunk = min(chunk, c)
  num_chunks = -(-c // chunk)
  padding = num_chunks * chunk - c
  hidden = jnp.pad(hidden_BCD, ((0, 0), (0, padding), (0, 0)))
  targets = jnp.pad(targets_BC, ((0, 0), (0, padding)))

  @jax.checkpoint
  def chunk_log_probs(
    x_BID: jax.Array, targets_BI: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    scaled_BIV = logits(config, params, x_BID) / temperature
    total_BI = jax.nn.logsumexp(scaled_BIV, axis=-1)
    # A comparison instead of a gather: its gradient needs no scatter, and a
    # sharded vocabulary is not gathered.
    vocabulary = jnp.arange(config.vocab_size)
    is_target_BIV = targets_BI[..., None] == vocabulary
    chosen_BI = jnp.sum(jnp.where(is_target_BIV, scaled_BIV, 0.0), axis=-1)
    probs_BIV = jnp.exp(scaled_BIV - total_BI[..., None])
    mean_BI = jnp.sum(probs_BIV * scaled_BIV, axis=-1)
    return chosen_BI - total_BI, total_BI - mean_BI

  if num_chunks == 1:
    return chunk_log_probs(hidden_BCD, targets_BC)

  def compute_or_skip(args: tuple) -> tuple[jax.Array, jax.Array]:
    start, x_BID, targets_BI = args
    if count is None:
      return chunk_log_probs(x_BID, targets_BI)
    zeros_BI = jnp.zeros(targets_BI.shape, jnp.float32)
    return jax.lax.cond(
      start < count,
      chunk_log_probs,
      lambda *_: (zeros_BI, zeros_BI),
      x_BID,
      targets_BI,
    )

  log_probs, entropies = (
    x.swapaxes(0, 1).reshape(b, -1)
    for x in jax.lax.map(
      compute_or_skip,
      (
        jnp.arange(num_chunks) * chunk,
        hidden.reshape(b, num_chunks, chunk, d).swapaxes(0, 1),
        targets.reshape(b, num_chunks, chunk).swapaxes(0, 1),
      ),
    )
  )
  return log_probs[:, :c], entropies[:, :c]


def new_cache(config: QwenConfig, num_rows: int, length: int) -> Cache:
  """Returns an empty cache of `num_rows` rows with `length` slots each."""
  size = _layers_per_stack(config)
  shape = (size, num_rows, config.num_kv_heads)
  k = jnp.zeros((*shape, config.head_dim, length), config.dtype)
  v = jnp.zeros((*shape, length, config.head_dim), config.dtype)
  return tuple({'k': k, 'v': v} for _ in range(0, config.num_layers, size))


def resize_cache(cache: Cache, num_rows: int, length: int) -> Cache:
  """Returns the cache padded or truncated to another number of rows and slots.

  Args:
    cache: keys and values.
    num_rows: new number of rows.
    length: new number of slots of a row.
  """

  def resize(x: jax.Array, axis: int, size: int) -> jax.Array:
    if size <= x.shape[axis]:
      return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)

  return tuple(
    {
      'k': resize(resize(stack['k'], 1, num_rows), 4, length),
      'v': resize(resize(stack['v'], 1, num_rows), 3, length),
    }
    for stack in cache
  )


def prefill(config: QwenConfig, params: dict, tokens_BP: jax.Array) -> Cache:
  """Prefills prompts; returns a cache of B rows with P slots.

  It computes no logits: the first decoding step processes a prompt's last token
  again and returns them. Rows with a copied prompt therefore need no prefill.

  Args:
    config: shape of the network.
    params: parameters of the network; see `unstack_layers`.
    tokens_BP: prompts from position 0, padded right.
  """
  x_BPD = _embed(config, params, tokens_BP)
  positions_1P = jnp.arange(tokens_BP.shape[1])[None]
  cache = []
  for layers in params['layers']:
    x_BPD, _, (k_NBPKE, v_NBPKE) = _layers(
      config, layers, x_BPD, positions_1P, keep=True
    )
    cache.append(
      {'k': k_NBPKE.transpose(0, 1, 3, 4, 2), 'v': v_NBPKE.swapaxes(2, 3)}
    )
  return tuple(cache)


def insert(cache: Cache, rows: Cache, slots_B: jax.Array) -> Cache:
  """Returns the cache with rows written into some of its rows.

  Args:
    cache: keys and values.
    rows: B rows to write, maybe of another length; positions beyond the length
      of the cache are dropped.
    slots_B: row of the cache for each of `rows`; rows past the end are dropped.
  """
  length = min(cache[0]['k'].shape[-1], rows[0]['k'].shape[-1])
  return tuple(
    {
      'k': stack['k']
      .at[:, slots_B, :, :, :length]
      .set(new['k'][..., :length], mode='drop'),
      'v': stack['v']
      .at[:, slots_B, :, :length]
      .set(new['v'][:, :, :, :length], mode='drop'),
    }
    for stack, new in zip(cache, rows, strict=True)
  )


def copy_rows(cache: Cache, sources_B: jax.Array, slots_B: jax.Array) -> Cache:
  """Returns the cache with rows copied; slots past the end are dropped."""
  rows = tuple(
    {name: x[:, sources_B] for name, x in stack.items()} for stack in cache
  )
  return insert(cache, rows, slots_B)


def decode(
  config: QwenConfig,
  params: dict,
  cache: Cache,
  tokens_B: jax.Array,
  positions_B: jax.Array,
) -> tuple[jax.Array, Cache]:
  """Decodes one token of each row; returns (logits [B, V], cache).

  Args:
    config: shape of the network.
    params: parameters of the network; see `unstack_layers`.
    cache: keys and values of the earlier positions.
    tokens_B: the token at each row's position.
    positions_B: position of that token in its row.
  """
  x_B1D = _embed(config, params, tokens_B[:, None])
  stacks = []
  for layers, stack in zip(params['layers'], cache, strict=True):
    x_B1D, stack, _ = _layers(
      config, layers, x_B1D, positions_B[:, None], cache=stack
    )
    stacks.append(stack)
  x_BD = _rms_norm(x_B1D[:, 0], params['norm'], config.rms_norm_eps)
  return logits(config, params, x_BD), tuple(stacks)
