"""The Qwen2, Qwen2.5 and Qwen3 decoder in Flax, dense or mixture of experts.

All functions are pure and take the parameters as one tree; see `parameters`.
Compute is in `dtype`; norms, rotary angles, attention weights and logits are
float32.

Shapes: **B** rows, **L** tokens, **P** prompt tokens, **C** completion tokens,
**S** cache slots, **V** vocabulary, **D** width, **H** query heads, **K**
key/value heads, **Q** = H / K query heads of one key/value head, **E** head
size, **F** MLP width, **N** layers, **R** rank of an adapter.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gigpo_jax import mesh
from gigpo_jax.models import (
  attention,
  decode_attention,
  experts,
  fusion,
  head,
  kv_cache,
  layer_gradients,
  lora,
  parameters,
  quantization,
  qwen_config,
  rotary,
)
from gigpo_jax.models.qwen_config import QwenConfig, Yarn

__all__ = ['QwenConfig', 'Yarn']


class _Parameters(nn.Module):
  """A named group of Flax parameters."""

  table: Any

  @nn.compact
  def __call__(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
    return {
      name: quantization.dequantize(
        self.param(name, nn.initializers.zeros, shape, jnp.float32),
        self.get_variable('params', name + quantization.SCALE),
        dtype,
      )
      for name, (shape, _) in self.table.items()
    }


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def _multiply(w: dict, name: str, x_BLI: jax.Array) -> jax.Array:
  """Multiplies [B, L, I] by a matrix.

  Rows and tokens are flattened into one dimension: XLA's CPU backend takes
  three times as long for the weight gradient of a product with two batch
  dimensions.
  """
  b, length, width = x_BLI.shape
  # Output dimensions: the last for 'o', all but the first for the others.
  outer = w[name].shape[-1:] if name == 'o' else w[name].shape[1:]
  y_NO = x_BLI.reshape(b * length, width) @ w[name].reshape(width, -1)
  return checkpoint_name(y_NO, 'matrix').reshape(b, length, *outer)


def _adapt(
  config: QwenConfig, w: dict, name: str, x_BLI: jax.Array, y: jax.Array
) -> jax.Array:
  """Adds the output of a matrix's adapter, if any, to a product [B, L, ..]."""
  if name + lora.A not in w:
    return y
  a_IR, b_RO = w[name + lora.A], w[name + lora.B]
  x_NI, rank = x_BLI.reshape(-1, x_BLI.shape[-1]), a_IR.shape[-1]
  low_NR = x_NI @ a_IR.reshape(-1, rank)
  product_NO = config.adapters.scale * (low_NR @ b_RO.reshape(rank, -1))
  return y + product_NO.reshape(y.shape)


def _project(
  config: QwenConfig, w: dict, name: str, x_BLI: jax.Array
) -> jax.Array:
  """Multiplies [B, L, I] by a matrix and adds the output of its adapter."""
  return _adapt(config, w, name, x_BLI, _multiply(w, name, x_BLI))


def _project_parts(
  config: QwenConfig, w: dict, name: str, x_BLI: jax.Array
) -> list[jax.Array]:
  """Multiplies [B, L, I] by the parts of 'qkv' or 'gate_up'; see `fusion`."""
  names = fusion.PARTS[name]
  if config.fused:
    y_BLO = _multiply(w, name, x_BLI)
    if name + fusion.BIAS in w:
      y_BLO += w[name + fusion.BIAS]
    products = fusion.split(config, name, y_BLO)
    return [
      _adapt(config, w, part, x_BLI, y)
      for part, y in zip(names, products, strict=True)
    ]
  products = [_project(config, w, part, x_BLI) for part in names]
  return [
    y + w[part + fusion.BIAS] if part + fusion.BIAS in w else y
    for part, y in zip(names, products, strict=True)
  ]


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
    segments: attention.Segments | None,
    cos_sin: jax.Array,
    at_SN: jax.Array | None = None,
  ) -> tuple[tuple[jax.Array, dict | None], tuple | None]:
    """Applies the layer.

    Args:
      carry: (x_BLD, cache), see `_layers`.
      layer: index of this layer within the stack.
      positions_BL: see `_layers`.
      segments: see `_layers`.
      cos_sin: see `rotary.cos_and_sin`.
      at_SN: indices of the tokens to return; see `gather_tokens`. None: all.

    Returns:
      ((output, cache), keys and values if `keep`, else None).
    """
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    (x_BLD, cache), table = carry, parameters.layer_table(self.config)
    norm = _Parameters(table['norm'], name='norm')(jnp.float32)
    w = _Parameters(table['attention'], name='attention')(dtype)

    y_BLD = _rms_norm(x_BLD, norm['attention'], c.rms_norm_eps)
    q_BLHE, k_BLKE, v_BLKE = _project_parts(c, w, 'qkv', y_BLD)
    if c.qk_norm:
      q_BLHE = _rms_norm(q_BLHE, norm['q'], c.rms_norm_eps)
      k_BLKE = _rms_norm(k_BLKE, norm['k'], c.rms_norm_eps)
    q_BLHE, k_BLKE = (
      rotary.rotate(q_BLHE, cos_sin),
      rotary.rotate(k_BLKE, cos_sin),
    )
    if cache is None:
      heads_BLHE = attention.self_attention(
        q_BLHE, k_BLKE, v_BLKE, segments, implementation=c.attention
      )
    else:
      kernel = c.decode_attention
      cache = kv_cache.write(
        cache,
        layer,
        positions_BL,
        k_BLKE,
        v_BLKE,
        by_head=decode_attention.reads_heads(kernel),
      )
      heads_BLHE = decode_attention.attend(
        q_BLHE, cache, layer, positions_BL, implementation=kernel
      )
    heads_BLA = heads_BLHE.reshape(*x_BLD.shape[:2], -1)
    if at_SN is not None:
      # The rest of the layer processes each token independently.
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
    gate_BLF, up_BLF = _project_parts(c, w, 'gate_up', x_BLD)
    return _project(c, w, 'down', jax.nn.silu(gate_BLF) * up_BLF)


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
  segments: attention.Segments | None = None,
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
    segments: texts of each sequence; see `attention.self_attention`.
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
    unroll=length if length <= qwen_config.MAX_UNROLLED else 1,
  )
  (x_BLD, cache), kept = stack(config, keep).apply(
    {'params': params},
    (x_BLD, cache),
    jnp.arange(length),
    positions_BL,
    segments,
    rotary.cos_and_sin(positions_BL, config),
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
  segments: attention.Segments | None,
  at_SN: jax.Array,
) -> jax.Array:
  """Applies a layer and returns its output for some tokens only, [S, N, D].

  Args:
    config: shape of the network.
    params: parameters of one layer, not stacked.
    x_BLD: see `_layers`.
    positions_BL: see `_layers`.
    segments: see `_layers`.
    at_SN: indices of the tokens; see `gather_tokens`.
  """
  (x_SND, _), _ = _layer_class(config)(config).apply(
    {'params': params},
    (x_BLD, None),
    jnp.int32(0),
    positions_BL,
    segments,
    rotary.cos_and_sin(positions_BL, config),
    at_SN,
  )
  return x_SND


def adds_in_place(config: QwenConfig) -> bool:
  """Returns whether `hidden_states` accepts `sums` of gradients."""
  return config.remat == 'layer' and config.adapters is None


def _layers_accumulating_gradients(
  config: QwenConfig,
  params: dict,
  sums: dict,
  x_BLD: jax.Array,
  *where: jax.Array | None,
) -> jax.Array:
  """Applies the layers and adds the gradient of their parameters to `sums`.

  Otherwise this equals `_layers` with remat 'layer', followed by `_last_layer`.

  Args:
    config: shape of the network.
    params: stacked parameters of all layers.
    sums: tree like `params`.
    x_BLD: see `_layers`.
    *where: positions_BL, segments and at_SN of `_last_layer`.
  """
  # This loop saves the input of each layer and recomputes the rest.
  config = dataclasses.replace(config, remat='none')

  def inner(layer: dict, x_BLD: jax.Array, positions_BL, segments, _):
    stack = jax.tree.map(lambda leaf: leaf[None], layer)
    return _layers(config, stack, x_BLD, positions_BL, segments)[0]

  outer = functools.partial(_last_layer, config)
  return layer_gradients.apply_layers(inner, outer, params, sums, x_BLD, *where)


def _embed(config: QwenConfig, params: dict, tokens_BL: jax.Array) -> jax.Array:
  scale = params.get('embed' + quantization.SCALE)
  scale = None if scale is None else scale[tokens_BL]
  x_BLD = quantization.dequantize(
    params['embed'][tokens_BL], scale, config.dtype
  )
  return mesh.constrain_rows(x_BLD)


def hidden_states(
  config: QwenConfig,
  params: dict,
  tokens_BL: jax.Array,
  positions_BL: jax.Array | None = None,
  segments: attention.Segments | None = None,
  at_SN: jax.Array | None = None,
  *,
  sums: dict | None = None,
) -> jax.Array:
  """Returns the last layer's normalized output, [B, L, D] in the compute type.

  With `at_SN`, the output is of those tokens only, [S, N, D]. Unless the layers
  run in a loop, the last layer then skips the computation of other tokens.

  Args:
    config: shape of the network.
    params: parameters of the network.
    tokens_BL: rows, padded right with any tokens.
    positions_BL: position of each token in its text; None: 0, 1, ..
    segments: texts of each sequence; None: each sequence is one text.
    at_SN: indices of the tokens to return; see `gather_tokens`. None: all.
    sums: tree like the parameters of the layers; the gradient of those
      parameters is then `sums` plus its own value. Requires `adds_in_place` and
      `at_SN`. None: the plain gradient.
  """
  x_BLD = _embed(config, params, tokens_BL)
  if positions_BL is None:
    positions_BL = jnp.arange(tokens_BL.shape[1])[None]
  where, layers = (positions_BL, segments), params['layers']
  if sums is not None:
    x = _layers_accumulating_gradients(
      config, layers, sums, x_BLD, *where, at_SN
    )
  elif at_SN is None or _depth(layers) > qwen_config.MAX_UNROLLED:
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
  matrix = quantization.dequantize(
    params[name], params.get(name + quantization.SCALE), config.dtype
  )
  # Flattened for the same reason as in `_project`.
  rows_ND = hidden.reshape(-1, config.hidden_size)

  flat_NV = head.multiply(rows_ND, matrix, params[name])
  return flat_NV.reshape(*hidden.shape[:-1], config.vocab_size)


def values(params: dict, hidden: jax.Array) -> jax.Array:
  """Returns a critic's values, float32 [...], for hidden states [..., D]."""
  return jnp.sum(hidden.astype(jnp.float32) * params['value'], axis=-1)


def _chunk_log_probs(
  config: QwenConfig,
  params: dict,
  temperature: float,
  x_BID: jax.Array,
  targets_BI: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probability and entropy of targets, [B, I] each."""
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
  chunk_log_probs = jax.checkpoint(
    functools.partial(_chunk_log_probs, config, params, temperature)
  )
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

  chunks = (
    jnp.arange(num_chunks) * chunk,
    hidden.reshape(b, num_chunks, chunk, d).swapaxes(0, 1),
    targets.reshape(b, num_chunks, chunk).swapaxes(0, 1),
  )
  log_probs, entropies = (
    x.swapaxes(0, 1).reshape(b, -1)
    for x in jax.lax.map(compute_or_skip, chunks)
  )
  return log_probs[:, :c], entropies[:, :c]


def prefill(
  config: QwenConfig, params: dict, tokens_BP: jax.Array
) -> kv_cache.Cache:
  """Prefills prompts; returns a cache of B rows with P slots.

  It computes no logits: the first decoding step processes a prompt's last token
  again and returns them. Rows with a copied prompt therefore need no prefill.

  Args:
    config: shape of the network.
    params: parameters of the network; see `parameters.unstack_layers`.
    tokens_BP: prompts from position 0, padded right.
  """
  x_BPD = _embed(config, params, tokens_BP)
  positions_1P = jnp.arange(tokens_BP.shape[1])[None]
  cache = []
  for layers in params['layers']:
    x_BPD, _, (k_NBPKE, v_NBPKE) = _layers(
      config, layers, x_BPD, positions_1P, keep=True
    )
    cache.append(kv_cache.from_tokens(config, k_NBPKE, v_NBPKE))
  return tuple(cache)


def extend(
  config: QwenConfig,
  params: dict,
  cache: kv_cache.Cache,
  tokens_BL: jax.Array,
  positions_BL: jax.Array,
) -> kv_cache.Cache:
  """Prefills L tokens of each row at an offset; returns the cache.

  Each token attends to the cache up to its own position.

  Args:
    config: shape of the network.
    params: parameters of the network; see `parameters.unstack_layers`.
    cache: keys and values of the earlier positions.
    tokens_BL: the tokens at each row's positions.
    positions_BL: positions of these tokens in their row; positions past the end
      of the cache are dropped.
  """
  return _cached_layers(config, params, cache, tokens_BL, positions_BL)[1]


def _cached_layers(
  config: QwenConfig,
  params: dict,
  cache: kv_cache.Cache,
  tokens_BL: jax.Array,
  positions_BL: jax.Array,
) -> tuple[jax.Array, kv_cache.Cache]:
  """Applies the layers over a cache; returns (output [B, L, D], cache)."""
  x_BLD, stacks = _embed(config, params, tokens_BL), []
  for layers, stack in zip(params['layers'], cache, strict=True):
    x_BLD, stack, _ = _layers(config, layers, x_BLD, positions_BL, cache=stack)
    stacks.append(stack)
  return x_BLD, tuple(stacks)


def decode(
  config: QwenConfig,
  params: dict,
  cache: kv_cache.Cache,
  tokens_B: jax.Array,
  positions_B: jax.Array,
) -> tuple[jax.Array, kv_cache.Cache]:
  """Decodes one token of each row; returns (logits [B, V], cache).

  Args:
    config: shape of the network.
    params: parameters of the network; see `parameters.unstack_layers`.
    cache: keys and values of the earlier positions.
    tokens_B: the token at each row's position.
    positions_B: position of that token in its row.
  """
  x_B1D, cache = _cached_layers(
    config, params, cache, tokens_B[:, None], positions_B[:, None]
  )
  x_BD = _rms_norm(x_B1D[:, 0], params['norm'], config.rms_norm_eps)
  return logits(config, params, x_BD), cache
