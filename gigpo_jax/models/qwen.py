"""The Qwen2, Qwen2.5 and Qwen3 decoder in Flax, dense or of experts.

Pure functions.

Parameters are one nested dict of float32 arrays, layers stacked on the first
dimension; sampler, learner, checkpoint and safetensors share it. Compute is in
`dtype`; norms, rotary angles, attention weights and logits are float32.

Shapes. **B** rows, **L** tokens, **P** prompt tokens, **C** completion tokens,
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

# What the backward pass computes again, rather than keeping it. none: nothing;
# matrices: all but the products with parameters; layer: all of a layer.
REMATS = ('none', 'matrices', 'layer')

# Rows and vocabulary between which logits are multiplied the other way round.
_FEW_ROWS, _LARGE_VOCABULARY = 32, 2**15

# Deeper networks go through their layers in a loop, for which there is but one
# layer to compile.
_MAX_UNROLLED = 8

# Up to how many layers the sampler has each one's arrays by themselves. On a
# GPU, which compiles a layer in no time, a loop's copies out of its stacks are
# most of what decoding costs.
_MAX_SPLIT = {'gpu': 128}


@dataclasses.dataclass(frozen=True)
class Yarn:
  """Rotary angles for longer rows than were trained (arXiv:2309.00071).

  Slow angles are divided by `factor`, fast ones stay, those between are mixed.

  Attributes:
    factor: how many times longer.
    original_length: tokens of a row as trained.
    beta_fast: turns within `original_length` from which an angle stays.
    beta_slow: turns up to which it is divided.
    attention_factor: of cosines and sines; None is 0.1 ln(factor) + 1.
  """

  factor: float
  original_length: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class QwenConfig:
  """Shape of a network; names as in Hugging Face's config.json.

  Attributes:
    qkv_bias: whether queries, keys and values have biases (Qwen2).
    qk_norm: whether each head's queries and keys are normed (Qwen3).
    yarn: how rotary angles are stretched; None: they are not.
    max_positions: tokens of a row that the network is meant for; told in an
      export, and otherwise of no effect.
    num_experts: X, of a layer; 0: one MLP for all tokens.
    experts_per_token: how many of them a token goes to.
    normalized_experts: whether their weights are made to add up to one.
    value_head: whether a token has one number, rather than one for each word;
      see `values`.
    adapters: low-rank, of a frozen network; None: all of it is trained.
    dtype: compute type, 'bfloat16' or 'float32'; parameters stay float32.
    remat: one of REMATS.
    attention: among a row's tokens, one of `attention.IMPLEMENTATIONS`.
    max_split: depth up to which each layer's arrays are by themselves in what
      `prefill` and `decode` take; see `split_layers`.
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


def suited(platform: str) -> dict[str, Any]:
  """Returns fields of a bfloat16 network for 'cpu', 'gpu' or 'tpu'."""
  return {
    'attention': attention.best(platform),
    'max_split': _MAX_SPLIT.get(platform, _MAX_UNROLLED),
  }


# Keys and values of layers: stacks of {'k': [N, B, K, E, S], 'v': [N, B, K, S,
# E]}, the orders in which a decoding step multiplies them.
Cache = tuple[dict[str, jax.Array], ...]


def _layers_per_stack(config: QwenConfig) -> int:
  """Returns how many layers share one stack of the cache.

  A stack of many is scanned, which copies a layer's keys and values out of it
  at each step; stacks of one are read in place, twice as fast, and cost a
  compilation of each layer.
  """
  return 1 if config.num_layers <= config.max_split else config.num_layers


def split_layers(config: QwenConfig, params: dict) -> dict:
  """Returns parameters for `prefill` and `decode`: a tree for each stack.

  Done once, before a loop: in it each step would copy a layer's weights out
  of their stack.
  """
  size = _layers_per_stack(config)
  stacks = (
    jax.tree.map(lambda leaf, n=n: leaf[n : n + size], params['layers'])
    for n in range(0, config.num_layers, size)
  )
  return params | {'layers': list(stacks)}


def split_axes(config: QwenConfig, axes: dict) -> dict:
  """Returns the logical axes of what `split_layers` returns."""
  number = -(-config.num_layers // _layers_per_stack(config))
  return axes | {'layers': [axes['layers']] * number}


def _layer_table(c: QwenConfig) -> dict[str, dict[str, tuple]]:
  """Shape and logical axes of each array of one layer."""
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
  """Shape and logical axes of the adapters of a group of one layer."""
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
  """(shape, logical axes) of every parameter; the one place that says so."""
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


def _of_table(config: QwenConfig, part: int) -> dict[str, Any]:
  return jax.tree.map(
    lambda leaf: leaf[part],
    _table(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def shapes(config: QwenConfig) -> dict[str, Any]:
  """Returns the shape of every parameter, as a tree of tuples."""
  return _of_table(config, 0)


def logical_axes(config: QwenConfig) -> dict[str, Any]:
  """Returns the logical axes of every parameter, as a tree of tuples."""
  return _of_table(config, 1)


def cuttable(config: QwenConfig) -> int:
  """Returns a multiple of every number of parts the model can be cut into."""
  return math.gcd(
    config.num_heads,
    config.num_kv_heads,
    config.intermediate_size,
    config.vocab_size,
  )


def init(config: QwenConfig, key: jax.Array) -> dict[str, Any]:
  """Returns random parameters; consumes the key.

  Normal with deviation 0.02 as Qwen's own, output projections scaled down by
  the square root of twice the depth; norms one, biases zero. Of an adapter the
  first matrix is uniform, with deviation (3 times its inputs)^(-1/2), the
  second zero, as a critic's values are.
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
      end = math.prod(shape[1:-1]) ** -0.5
      return jax.random.uniform(key, shape, jnp.float32, -end, end)
    scale = 0.02
    if names[-1] in ('o', 'down'):
      scale /= (2 * config.num_layers) ** 0.5
    return scale * jax.random.normal(key, shape, jnp.float32)

  arrays = [
    make(path, shape, key)
    for (path, shape), key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(treedef, arrays)


# Name of a quantized array's scales: its own and this.
_SCALE = '_scale'

# Dimensions that a matrix is multiplied over, without that of the layers.
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


def _quantized(
  tree: dict,
  matrix: Callable,
  other: Callable,
  depth: int = 0,
  group: str = '',
) -> dict:
  """Returns a tree like `quantize`'s.

  Args:
    tree: of arrays, or of their axes.
    matrix: makes a leaf and its scale's of a matrix and what it contracts.
    other: makes a leaf of another.
    depth: dimensions of a leaf that stand before those of a layer.
    group: its name in the tree above.
  """
  found = {}
  for name, leaf in tree.items():
    if isinstance(leaf, dict):
      found[name] = _quantized(
        leaf, matrix, other, int(name == 'layers') or depth, name
      )
    elif name in ('embed', 'unembed'):
      found[name], found[name + _SCALE] = matrix(leaf, (1,))
    elif (group, name) in _CONTRACTED:
      axes = tuple(axis + depth for axis in _CONTRACTED[group, name])
      found[name], found[name + _SCALE] = matrix(leaf, axes)
    else:
      found[name] = other(leaf)
  return found


def quantize(config: QwenConfig, params: dict) -> dict:
  """Returns parameters for inference whose matrices are int8.

  Weights only, symmetric, a scale for each output channel: w = scale * q with
  q in [-127, 127]. Norms and biases are cast to the compute type.
  """

  def matrix(
    w: jax.Array, axes: tuple[int, ...]
  ) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(jnp.abs(w), axis=axes, keepdims=True)
    scale = jnp.maximum(largest.astype(jnp.float32), 1e-30) / 127
    return jnp.round(w / scale).astype(jnp.int8), scale

  return _quantized(params, matrix, lambda x: x.astype(config.dtype))


def quantized_axes(config: QwenConfig) -> dict:
  """Returns the logical axes of `quantize`'s arrays."""

  def matrix(names: tuple, axes: tuple[int, ...]) -> tuple[tuple, tuple]:
    kept = (None if n in axes else name for n, name in enumerate(names))
    return names, tuple(kept)

  return _quantized(logical_axes(config), matrix, lambda names: names)


def _whole(
  array: jax.Array, scale: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
  """Returns an array in the compute type, quantized or not."""
  if scale is None:
    return array.astype(dtype)
  return array.astype(dtype) * scale.astype(dtype)


class _Parameters(nn.Module):
  """A named group of arrays, as Flax keeps them."""

  table: Any

  @nn.compact
  def __call__(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
    return {
      name: _whole(
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
  """Multiplies [B, L, I] by a matrix of a group, and adds its adapter's.

  Rows and tokens are folded together: XLA's CPU backend is three times as
  slow on the weight gradient of a product with two batch dimensions.
  """
  b, length, width = x_BLI.shape
  x_NI = x_BLI.reshape(b * length, width)
  # Dimensions that are not multiplied over, which 'o' has at its end.
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
    stretched = _stretched(config)
    periods /= 1 - stretched + stretched / yarn.factor
    factor = yarn.attention_factor
    if factor is None:
      factor = 0.1 * math.log(yarn.factor) + 1
  angles = positions_BL[..., None, None] / periods
  rotary = factor * jnp.stack([jnp.cos(angles), jnp.sin(angles)])
  return jnp.concatenate([rotary, rotary], axis=-1)


def _stretched(config: QwenConfig) -> jax.Array:
  """Returns how far each rotary angle is one that YaRN divides, [E/2]."""
  yarn, half = config.yarn, config.head_dim // 2

  def place(turns: float) -> float:
    """Where an angle turns so often within the original length."""
    period = yarn.original_length / (turns * 2 * math.pi)
    return half * math.log(period) / math.log(config.rope_theta)

  low = max(math.floor(place(yarn.beta_fast)), 0)
  high = min(math.ceil(place(yarn.beta_slow)), config.head_dim - 1)
  ramp = (jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 1e-3)
  return jnp.clip(ramp, 0, 1)


def _rotate(x_BLHE: jax.Array, rotary: jax.Array) -> jax.Array:
  """Turns the first half of a head's numbers against the second."""
  (cos, sin), half = rotary, x_BLHE.shape[-1] // 2
  x = x_BLHE.astype(jnp.float32)

  def join(x: jax.Array) -> jax.Array:
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)

  def multiply(x: jax.Array) -> jax.Array:
    zeros, ones = jnp.zeros((half, half)), jnp.eye(half)
    turn = jnp.block([[zeros, ones], [-ones, zeros]])
    return (x.reshape(-1, 2 * half) @ turn).reshape(x.shape)

  # A CPU joins halves number by number: slower than a product with 0 and 1.
  turned = jax.lax.platform_dependent(x, cpu=multiply, default=join)
  return (x * cos + turned * sin).astype(x_BLHE.dtype)


class _Layer(nn.Module):
  """One decoder layer, scanned over.

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
    """Args as `_layers`; `layer` is this layer's number within the stack.

    With `at_SN`, places of tokens, what comes out is of these only.
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
      heads_BLHE = attention.among(
        q_BLHE, k_BLKE, v_BLKE, branches_BL, implementation=c.attention
      )
    else:
      # Each row writes at its own position: a scatter, which XLA does in
      # place where a slice update at a traced layer would copy the cache.
      rows, slots = jnp.arange(x_BLD.shape[0]), positions_BL[:, 0]
      cache = {
        'k': cache['k'].at[layer, rows, :, :, slots].set(k_BLKE[:, 0]),
        'v': cache['v'].at[layer, rows, :, slots].set(v_BLKE[:, 0]),
      }
      seen_BS = jnp.arange(cache['k'].shape[-1]) <= positions_BL
      heads_BLHE = attention.on_cache(
        q_BLHE, cache['k'][layer], cache['v'][layer], seen_BS
      )
    heads_BLA = heads_BLHE.reshape(*x_BLD.shape[:2], -1)
    if at_SN is not None:
      # Tokens from here on know nothing of each other.
      x_BLD, heads_BLA = take(x_BLD, at_SN), take(heads_BLA, at_SN)
    x_BLD = x_BLD + _project(c, w, 'o', heads_BLA)
    y_BLD = _rms_norm(x_BLD, norm['mlp'], c.rms_norm_eps)
    x_BLD = x_BLD + self._mlp(table, y_BLD)
    kept = (k_BLKE, v_BLKE) if self.keep else None
    return (mesh.constrain_rows(x_BLD), cache), kept

  def _mlp(self, table: dict, x_BLD: jax.Array) -> jax.Array:
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    if c.num_experts:
      w = _Parameters(table['experts'], name='experts')(dtype)
      return experts.mix(
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


def take(x_BLD: jax.Array, at_SN: jax.Array) -> jax.Array:
  """Returns tokens by their places among those of a shard's rows, [S, N, D].

  Args:
    x_BLD: rows of tokens, those of a shard one after another.
    at_SN: places, in the B / S rows of a shard joined into one.
  """
  joined = x_BLD.reshape(at_SN.shape[0], -1, x_BLD.shape[-1])
  return mesh.constrain_rows(
    jnp.take_along_axis(joined, at_SN[..., None], axis=1)
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
    params: of the layers, stacked; maybe fewer than the network's.
    x_BLD: what goes in.
    positions_BL: place of each token in its row, and in the cache; one row
      of them serves all.
    branches_BL: of each token, see `attention`; None: all of one.
    cache: keys and values of these layers; None attends among the tokens.
    keep: whether to return the keys and values of the tokens.

  Returns:
    what comes out [B, L, D]; the cache with the tokens written; keys and
    values [N, B, L, K, E] each, or None.
  """
  length = _depth(params)
  stack = nn.scan(
    _layer_class(config),
    variable_axes={'params': 0},
    split_rngs={'params': True},
    in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
    length=length,
    # A loop copies what it keeps for the backward pass into stacks and back.
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
  """Returns `_Layer`, which the backward pass may compute again."""
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
  """Applies a layer, of which nothing but some tokens is needed, [S, N, D].

  Args:
    config: shape of the network.
    params: of one layer, not stacked.
    x_BLD: as of `_layers`, like the next two.
    positions_BL: the same.
    branches_BL: the same.
    at_SN: which tokens; see `take`.
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
  """Whether `hidden_states` has a use for sums of gradients."""
  return config.remat == 'layer' and config.adapters is None


@jax.custom_vjp
def adding(params: dict, sums: dict) -> dict:
  """Returns the parameters; their gradient is then added to the sums."""
  del sums
  return params


adding.defvjp(
  lambda params, sums: (params, sums),
  lambda sums, grads: (jax.tree.map(jnp.add, sums, grads), None),
)


def _layers_adding(
  config: QwenConfig,
  params: dict,
  sums: dict,
  x_BLD: jax.Array,
  positions_BL: jax.Array,
  branches_BL: jax.Array | None,
  at_SN: jax.Array,
) -> jax.Array:
  """Applies the layers; their parameters' gradient is added to the sums.

  A layer's gradient goes to its place in them as soon as it is there, so that
  memory never holds a second one of the whole network. Else as `_layers`, where
  all of a layer is computed again, and `_last_layer`.
  """
  # This loop keeps what goes into a layer, and computes the rest again.
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

  def backward(kept: tuple, change_SND: jax.Array) -> tuple:
    params, sums, inputs_NBLD, x_BLD, where = kept

    def back(apply, n, x_BLD, change, sums):
      _, pull = jax.vjp(
        lambda layer, x_BLD: apply(layer, x_BLD, *where),
        layer(params, n),
        x_BLD,
      )
      grads, change_BLD = pull(change)
      return change_BLD, jax.tree.map(lambda s, g: s.at[n].add(g), sums, grads)

    def step(m: jax.Array, carry: tuple) -> tuple:
      n = last - 1 - m
      return back(inner, n, inputs_NBLD[n], *carry)

    carry = back(outer, last, x_BLD, change_SND, sums)
    if last:  # None before it have nothing to be traced with.
      carry = jax.lax.fori_loop(0, last, step, carry)
    change_BLD, sums = carry
    return sums, None, change_BLD, None, None, None

  @jax.custom_vjp
  def run(params, sums, x_BLD, *where):
    return forward(params, sums, x_BLD, *where)[0]

  run.defvjp(forward, backward)
  return run(params, sums, x_BLD, positions_BL, branches_BL, at_SN)


def _embed(config: QwenConfig, params: dict, tokens_BL: jax.Array) -> jax.Array:
  scale = params.get('embed' + _SCALE)
  scale = None if scale is None else scale[tokens_BL]
  x_BLD = _whole(params['embed'][tokens_BL], scale, config.dtype)
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
  """Returns the last layer's normed output, [B, L, D] in the compute type.

  Of some tokens only where `at_SN` says which, [S, N, D]: what the last layer
  would compute of the others, it then leaves out, unless the layers are a loop.

  A token sees those before it, of its branch or of branch 0.

  Args:
    config: shape of the network.
    params: its parameters.
    tokens_BL: rows, padded right with anything.
    positions_BL: of each token in its text; None: 0, 1, ..
    branches_BL: 0 for a prompt, and for each completion of it another number;
      None: all are 0.
    at_SN: places of tokens; see `take`.
    sums: like the layers' parameters, whose gradient is then these and their
      own; only where `adds_in_place`, and with `at_SN`. None: their own.
  """
  x_BLD = _embed(config, params, tokens_BL)
  if positions_BL is None:
    positions_BL = jnp.arange(tokens_BL.shape[1])[None]
  where, layers = (positions_BL, branches_BL), params['layers']
  if sums is not None:
    x = _layers_adding(config, layers, sums, x_BLD, *where, at_SN)
  elif at_SN is None or _depth(layers) > _MAX_UNROLLED:
    x, _, _ = _layers(config, layers, x_BLD, *where)
    x = x if at_SN is None else take(x, at_SN)
  else:
    first = jax.tree.map(lambda leaf: leaf[:-1], layers)
    last = jax.tree.map(lambda leaf: leaf[-1], layers)
    if _depth(first):
      x_BLD, _, _ = _layers(config, first, x_BLD, *where)
    x = _last_layer(config, last, x_BLD, *where, at_SN)
  return _rms_norm(x, params['norm'], config.rms_norm_eps)


def logits(config: QwenConfig, params: dict, hidden: jax.Array) -> jax.Array:
  """Returns next-token logits, float32 [..., V], of hidden states [..., D]."""
  name = 'embed' if config.tie_embeddings else 'unembed'
  matrix = _whole(params[name], params.get(name + _SCALE), config.dtype)
  # Flat for the same reason as in `_project`.
  rows_ND = hidden.reshape(-1, config.hidden_size)

  def multiply(rows_ND: jax.Array, matrix_VD: jax.Array) -> jax.Array:
    return jnp.einsum(
      'ND,VD->NV', rows_ND, matrix_VD, preferred_element_type=jnp.float32
    )

  def multiply_turned(rows_ND: jax.Array, matrix_VD: jax.Array) -> jax.Array:
    flat_VN = jnp.einsum(
      'VD,ND->VN', matrix_VD, rows_ND, preferred_element_type=jnp.float32
    )
    # Or XLA would turn it back.
    return jax.lax.optimization_barrier(flat_VN).T

  # Few rows by a large matrix: twice as fast the other way round on a CPU.
  if rows_ND.shape[0] <= _FEW_ROWS and config.vocab_size >= _LARGE_VOCABULARY:
    flat_NV = jax.lax.platform_dependent(
      rows_ND, matrix, cpu=multiply_turned, default=multiply
    )
  else:
    flat_NV = multiply(rows_ND, matrix)
  return flat_NV.reshape(*hidden.shape[:-1], config.vocab_size)


def values(params: dict, hidden: jax.Array) -> jax.Array:
  """Returns a critic's values, float32 [...], of hidden states [..., D]."""
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
  """Returns log-probability of each target and entropy, float32 [B, C] both.

  Logits exist for `chunk` positions of each row at a time only, in the backward
  pass too, where they are computed again.

  Args:
    config: shape of the network.
    params: its parameters.
    hidden_BCD: hidden state before each target.
    targets_BC: token ids.
    count: positions of a row from here on need not be computed, and may be 0;
      None: all are.
    temperature: divides the logits; of the distribution that was sampled.
    chunk: positions of a row whose logits exist at a time.
  """
  b, c, d = hidden_BCD.shape
  chunk = min(chunk, c)
  chunks = -(-c // chunk)
  missing = chunks * chunk - c
  hidden = jnp.pad(hidden_BCD, ((0, 0), (0, missing), (0, 0)))
  targets = jnp.pad(targets_BC, ((0, 0), (0, missing)))

  @jax.checkpoint
  def of_chunk(
    x_BID: jax.Array, targets_BI: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    scaled_BIV = logits(config, params, x_BID) / temperature
    total_BI = jax.nn.logsumexp(scaled_BIV, axis=-1)
    # A comparison, not a gather: its gradient is no scatter, and a vocabulary
    # cut over devices stays where it is.
    vocabulary = jnp.arange(config.vocab_size)
    is_target_BIV = targets_BI[..., None] == vocabulary
    chosen_BI = jnp.sum(jnp.where(is_target_BIV, scaled_BIV, 0.0), axis=-1)
    probs_BIV = jnp.exp(scaled_BIV - total_BI[..., None])
    mean_BI = jnp.sum(probs_BIV * scaled_BIV, axis=-1)
    return chosen_BI - total_BI, total_BI - mean_BI

  if chunks == 1:
    return of_chunk(hidden_BCD, targets_BC)

  def unless_empty(args: tuple) -> tuple[jax.Array, jax.Array]:
    start, x_BID, targets_BI = args
    if count is None:
      return of_chunk(x_BID, targets_BI)
    nothing = jnp.zeros(targets_BI.shape, jnp.float32)
    return jax.lax.cond(
      start < count,
      of_chunk,
      lambda *_: (nothing, nothing),
      x_BID,
      targets_BI,
    )

  log_probs, entropies = (
    x.swapaxes(0, 1).reshape(b, -1)
    for x in jax.lax.map(
      unless_empty,
      (
        jnp.arange(chunks) * chunk,
        hidden.reshape(b, chunks, chunk, d).swapaxes(0, 1),
        targets.reshape(b, chunks, chunk).swapaxes(0, 1),
      ),
    )
  )
  return log_probs[:, :c], entropies[:, :c]


def new_cache(config: QwenConfig, num_rows: int, length: int) -> Cache:
  """Returns an empty cache of `num_rows` rows that hold `length` tokens."""
  size = _layers_per_stack(config)
  shape = (size, num_rows, config.num_kv_heads)
  k = jnp.zeros((*shape, config.head_dim, length), config.dtype)
  v = jnp.zeros((*shape, length, config.head_dim), config.dtype)
  return tuple({'k': k, 'v': v} for _ in range(0, config.num_layers, size))


def resize_cache(cache: Cache, num_rows: int, length: int) -> Cache:
  """Returns a cache with rows and room added or cut off at the end."""

  def to(x: jax.Array, axis: int, size: int) -> jax.Array:
    if size <= x.shape[axis]:
      return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)

  return tuple(
    {
      'k': to(to(stack['k'], 1, num_rows), 4, length),
      'v': to(to(stack['v'], 1, num_rows), 3, length),
    }
    for stack in cache
  )


def prefill(config: QwenConfig, params: dict, tokens_BP: jax.Array) -> Cache:
  """Reads prompts; returns a cache of as many rows and tokens.

  No logits: the first step of decoding reads a prompt's last token again and
  gives them, so that a copied prompt needs no reading at all.

  Args:
    config: shape of the network.
    params: its parameters; see `split_layers`.
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
  """Returns the cache with rows put into slots; what does not fit is dropped.

  Args:
    cache: [.., S slots, ..].
    rows: what to put there, maybe of another length.
    slots_B: where; from S on, nowhere.
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
  """Returns the cache with rows copied; to slots past the end, not."""
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
  """Reads one more token a row; returns (logits [B, V], cache).

  Args:
    config: shape of the network.
    params: its parameters; see `split_layers`.
    cache: keys and values of the positions before.
    tokens_B: the token at each row's position.
    positions_B: where it stands in its row.
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
