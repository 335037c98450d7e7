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

import flax.linen as nn
import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import (
  attention,
  chunks,
  decoder_layer,
  head,
  kv_cache,
  layer_gradients,
  layer_runs,
  normalization,
  parameters,
  quantization,
  qwen_config,
  rotary,
)
from gigpo_jax.models.qwen_config import QwenConfig, Yarn

__all__ = ['QwenConfig', 'Yarn']


def _layers(
  config: QwenConfig,
  params: dict,
  x_BLD: jax.Array,
  positions_BL: jax.Array,
  segments: attention.Segments | None = None,
  agents_BL: jax.Array | None = None,
  *,
  counts_B: jax.Array | None = None,
  cache: dict | None = None,
  keep: bool = False,
) -> tuple[jax.Array, dict | None, dict | None]:
  """Applies a stack of layers by one scan.

  Args:
    config: shape of the network.
    params: stacked parameters of the layers, which may be a part of the
      network's layers.
    x_BLD: input.
    positions_BL: position of each token in its row and in the cache, [B, L],
      or [1, L] for the same positions in all rows.
    segments: texts of each sequence; see `attention.self_attention`.
    agents_BL: agent of each token; None without adapters of agents.
    counts_B: number of tokens of each row that change its state; None: all.
    cache: cache of these layers; None: attention within the row.
    keep: whether to return what a cache holds of the tokens.

  Returns:
    (output [B, L, D], the cache with the tokens written, arrays of
    `kv_cache.from_kept` or None).
  """
  length = _depth(params)
  stack = nn.scan(
    _layer_class(config),
    variable_axes={'params': 0},
    split_rngs={'params': True},
    in_axes=(0, *[nn.broadcast] * 5),
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
    agents_BL,
    counts_B,
  )
  return x_BLD, cache, kept


def _depth(params: dict) -> int:
  return jax.tree.leaves(params)[0].shape[0]


def _layer_class(config: QwenConfig) -> type[nn.Module]:
  """Returns `decoder_layer.Layer`, rematerialized as the config says."""
  policies = {
    'matrices': jax.checkpoint_policies.save_only_these_names('matrix'),
    'layer': jax.checkpoint_policies.nothing_saveable,
  }
  if config.remat == 'none':
    return decoder_layer.Layer
  return nn.remat(
    decoder_layer.Layer, prevent_cse=False, policy=policies[config.remat]
  )


def _last_layer(
  config: QwenConfig,
  params: dict,
  x_BLD: jax.Array,
  positions_BL: jax.Array,
  segments: attention.Segments | None,
  agents_BL: jax.Array | None,
  at_SN: jax.Array,
) -> jax.Array:
  """Applies a layer and returns its output for some tokens only, [S, N, D].

  Args:
    config: shape of the network.
    params: parameters of one layer, not stacked.
    x_BLD: see `_layers`.
    positions_BL: see `_layers`.
    segments: see `_layers`.
    agents_BL: see `_layers`.
    at_SN: indices of the tokens; see `decoder_layer.gather_tokens`.
  """
  (x_SND, _), _ = _layer_class(config)(config).apply(
    {'params': params},
    (x_BLD, None),
    jnp.int32(0),
    positions_BL,
    segments,
    rotary.cos_and_sin(positions_BL, config),
    agents_BL,
    None,
    at_SN,
  )
  return x_SND


def adds_in_place(config: QwenConfig) -> bool:
  """Returns whether `hidden_states` accepts `sums` of gradients."""
  is_one_run = len(layer_runs.runs(config)) == 1
  return config.remat == 'layer' and config.adapters is None and is_one_run


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
    *where: positions_BL, segments, agents_BL and at_SN of `_last_layer`.
  """
  # This loop saves the input of each layer and recomputes the rest.
  config = dataclasses.replace(config, remat='none')

  def inner(layer: dict, x_BLD: jax.Array, *where):
    stack = jax.tree.map(lambda leaf: leaf[None], layer)
    return _layers(config, stack, x_BLD, *where[:-1])[0]

  outer = functools.partial(_last_layer, config)
  return layer_gradients.apply_layers(inner, outer, params, sums, x_BLD, *where)


def _embed(config: QwenConfig, params: dict, tokens_BL: jax.Array) -> jax.Array:
  scale = params.get('embed' + quantization.SCALE)
  scale = None if scale is None else scale[tokens_BL]
  x_BLD = quantization.dequantize(
    params['embed'][tokens_BL], scale, config.dtype
  )
  return mesh.constrain_rows(x_BLD)


def _final_norm(config: QwenConfig, params: dict, x: jax.Array) -> jax.Array:
  return normalization.rms_norm(
    x, params['norm'], config.rms_norm_eps, centered=config.centered_norms
  )


def hidden_states(
  config: QwenConfig,
  params: dict,
  tokens_BL: jax.Array,
  positions_BL: jax.Array | None = None,
  segments: attention.Segments | None = None,
  at_SN: jax.Array | None = None,
  *,
  agents_BL: jax.Array | None = None,
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
    at_SN: indices of the tokens to return; see `decoder_layer.gather_tokens`.
      None: all.
    agents_BL: agent of each token; None without adapters of agents.
    sums: tree like the parameters of the layers; the gradient of those
      parameters is then `sums` plus its own value. Requires `adds_in_place` and
      `at_SN`. None: the plain gradient.
  """
  x_BLD = _embed(config, params, tokens_BL)
  if positions_BL is None:
    positions_BL = jnp.arange(tokens_BL.shape[1])[None]
  where = positions_BL, segments, agents_BL
  *runs, last_run = [
    (run, layer_runs.take(config, params['layers'], run.start, run.stop))
    for run in layer_runs.runs(config)
  ]
  for run, layers in runs:
    x_BLD, _, _ = _layers(run.config, layers, x_BLD, *where)
  run, layers = last_run
  if sums is not None:
    x = _layers_accumulating_gradients(
      run.config, layers, sums, x_BLD, *where, at_SN
    )
  elif at_SN is None or _depth(layers) > qwen_config.MAX_UNROLLED:
    x, _, _ = _layers(run.config, layers, x_BLD, *where)
    x = x if at_SN is None else decoder_layer.gather_tokens(x, at_SN)
  else:
    first = jax.tree.map(lambda leaf: leaf[:-1], layers)
    last = jax.tree.map(lambda leaf: leaf[-1], layers)
    if _depth(first):
      x_BLD, _, _ = _layers(run.config, first, x_BLD, *where)
    x = _last_layer(run.config, last, x_BLD, *where, at_SN)
  return _final_norm(config, params, x)


def logits(config: QwenConfig, params: dict, hidden: jax.Array) -> jax.Array:
  """Returns next-token logits, float32 [..., V], for hidden states [..., D]."""
  scale_V1 = params.get(_head_name(config) + quantization.SCALE)
  result = _logits(hidden, *_head_weights(config, params))
  return result if scale_V1 is None else result * scale_V1[:, 0]


def _head_name(config: QwenConfig) -> str:
  return 'embed' if config.tie_embeddings else 'unembed'


def _head_weights(
  config: QwenConfig, params: dict
) -> tuple[jax.Array, jax.Array]:
  """Returns the matrix of the vocabulary, in the compute type and as stored.

  It is without scales, if it is quantized.
  """
  matrix_VD = params[_head_name(config)]
  return matrix_VD.astype(config.dtype), matrix_VD


def _logits(
  hidden: jax.Array, matrix_VD: jax.Array, parameter_VD: jax.Array
) -> jax.Array:
  # Flattened for the same reason as in `decoder_layer._multiply`.
  rows_ND = hidden.reshape(-1, hidden.shape[-1])
  flat_NV = head.multiply(rows_ND, matrix_VD, parameter_VD)
  return flat_NV.reshape(*hidden.shape[:-1], matrix_VD.shape[0])


def values(params: dict, hidden: jax.Array) -> jax.Array:
  """Returns a critic's values, float32 [...], for hidden states [..., D]."""
  return jnp.sum(hidden.astype(jnp.float32) * params['value'], axis=-1)


def _chunk_log_probs(
  temperature: float,
  parameter_VD: jax.Array,
  x_BID: jax.Array,
  matrix_VD: jax.Array,
  targets_BI: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probability and entropy of targets, [B, I] each."""
  scaled_BIV = _logits(x_BID, matrix_VD, parameter_VD) / temperature
  total_BI = jax.nn.logsumexp(scaled_BIV, axis=-1)
  # A comparison instead of a gather: its gradient needs no scatter, and a
  # sharded vocabulary is not gathered.
  vocabulary = jnp.arange(matrix_VD.shape[0])
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
  count = c if count is None else count
  matrix_VD, parameter_VD = _head_weights(config, params)
  outputs = chunks.map_chunks(
    functools.partial(_chunk_log_probs, temperature),
    parameter_VD,
    hidden.reshape(b, num_chunks, chunk, d).swapaxes(0, 1),
    (matrix_VD,),
    (targets.reshape(b, num_chunks, chunk).swapaxes(0, 1),),
    jnp.minimum(-(-count // chunk), num_chunks),
  )
  log_probs, entropies = (x.swapaxes(0, 1).reshape(b, -1) for x in outputs)
  return log_probs[:, :c], entropies[:, :c]


def prefill(
  config: QwenConfig,
  params: dict,
  tokens_BP: jax.Array,
  agents_B: jax.Array | None = None,
  *,
  counts_B: jax.Array | None = None,
) -> kv_cache.Cache:
  """Prefills prompts; returns a cache of B rows with P slots.

  It computes no logits: the first decoding step processes a prompt's last token
  again and returns them. Rows with a copied prompt therefore need no prefill.

  Args:
    config: shape of the network.
    params: parameters of the network; see `parameters.unstack_layers`.
    tokens_BP: prompts from position 0, padded right.
    agents_B: agent of each row; None without adapters of agents.
    counts_B: number of tokens before a prompt's last; None: P - 1.
  """
  if counts_B is None:
    counts_B = jnp.full(tokens_BP.shape[0], tokens_BP.shape[1] - 1)
  agents_BP = _per_token(agents_B, tokens_BP)
  x_BPD = _embed(config, params, tokens_BP)
  positions_1P = jnp.arange(tokens_BP.shape[1])[None]
  cache = []
  for stack_config, layers in _stacks(config, params):
    x_BPD, _, kept = _layers(
      stack_config,
      layers,
      x_BPD,
      positions_1P,
      None,
      agents_BP,
      counts_B=counts_B,
      keep=True,
    )
    cache.append(kv_cache.from_kept(stack_config, kept))
  return tuple(cache)


def _stacks(config: QwenConfig, params: dict) -> list[tuple[QwenConfig, dict]]:
  """Returns shape and parameters of each stack of unstacked layers."""
  size = parameters.layers_per_stack(config)
  return [
    (layer_runs.config_of(config, n * size), layers)
    for n, layers in enumerate(params['layers'])
  ]


def _per_token(agents_B: jax.Array | None, tokens_BL: jax.Array):
  """Returns the agent of each token, [B, L]; None without agents."""
  if agents_B is None:
    return None
  return jnp.broadcast_to(agents_B[:, None], tokens_BL.shape)


def extend(
  config: QwenConfig,
  params: dict,
  cache: kv_cache.Cache,
  tokens_BL: jax.Array,
  positions_BL: jax.Array,
  agents_B: jax.Array | None = None,
  *,
  counts_B: jax.Array | None = None,
) -> kv_cache.Cache:
  """Prefills L tokens of each row at an offset; returns the cache.

  Each token attends to the cache up to its own position. A state continues
  that of the prompt, which is replaced.

  Args:
    config: shape of the network.
    params: parameters of the network; see `parameters.unstack_layers`.
    cache: keys and values of the earlier positions.
    tokens_BL: the tokens at each row's positions.
    positions_BL: positions of these tokens in their row; positions past the end
      of the cache are dropped.
    agents_B: agent of each row; None without adapters of agents.
    counts_B: number of leading tokens of each row to prefill; None: all.
  """
  cache = kv_cache.start(cache)
  where = positions_BL, _per_token(agents_B, tokens_BL), counts_B
  return kv_cache.keep_prompt(
    _cached_layers(config, params, cache, tokens_BL, *where)[1]
  )


def _cached_layers(
  config: QwenConfig,
  params: dict,
  cache: kv_cache.Cache,
  tokens_BL: jax.Array,
  positions_BL: jax.Array,
  agents_BL: jax.Array | None,
  counts_B: jax.Array | None = None,
) -> tuple[jax.Array, kv_cache.Cache]:
  """Applies the layers over a cache; returns (output [B, L, D], cache)."""
  x_BLD, stacks = _embed(config, params, tokens_BL), []
  for (stack_config, layers), stack in zip(
    _stacks(config, params), cache, strict=True
  ):
    x_BLD, stack, _ = _layers(
      stack_config,
      layers,
      x_BLD,
      positions_BL,
      None,
      agents_BL,
      counts_B=counts_B,
      cache=stack,
    )
    stacks.append(stack)
  return x_BLD, tuple(stacks)


def decode(
  config: QwenConfig,
  params: dict,
  cache: kv_cache.Cache,
  tokens_BL: jax.Array,
  positions_BL: jax.Array,
  agents_B: jax.Array | None = None,
) -> tuple[jax.Array, kv_cache.Cache]:
  """Decodes L tokens of each row; returns (logits [B, L, V], cache).

  Args:
    config: shape of the network.
    params: parameters of the network; see `parameters.unstack_layers`.
    cache: keys and values of the earlier positions.
    tokens_BL: consecutive tokens of each row; one if the network has a state.
    positions_BL: positions of these tokens in their row; positions past the end
      of the cache are dropped.
    agents_B: agent of each row; None without adapters of agents.
  """
  where = positions_BL, _per_token(agents_B, tokens_BL)
  x_BLD, cache = _cached_layers(config, params, cache, tokens_BL, *where)
  x_BLD = _final_norm(config, params, x_BLD)
  return logits(config, params, x_BLD), cache
