"""One decoder layer: attention or a state, and an MLP or a mixture of experts.

Shapes: as in `qwen`; **A** outputs of all heads, **I** inputs of a matrix.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gigpo_jax import mesh
from gigpo_jax.models import (
  attention,
  decode_attention,
  delta_net,
  experts,
  fusion,
  kv_cache,
  lora,
  normalization,
  parameters,
  quantization,
  rotary,
)
from gigpo_jax.models.qwen_config import QwenConfig


class _Arrays(nn.Module):
  """A named group of Flax parameters."""

  table: Any

  @nn.compact
  def __call__(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Returns the arrays in a type, and the scales of quantized matrices."""
    arrays = {}
    for name, (shape, _) in self.table.items():
      array = self.param(name, nn.initializers.zeros, shape, jnp.float32)
      arrays[name] = array.astype(dtype)
      scale = self.get_variable('params', name + quantization.SCALE)
      if scale is not None:
        arrays[name + quantization.SCALE] = scale
    return arrays


def _multiply(w: dict, name: str, x_BLI: jax.Array) -> jax.Array:
  """Multiplies [B, L, I] by a matrix.

  Rows and tokens are flattened into one dimension: XLA's CPU backend takes
  three times as long for the weight gradient of a product with two batch
  dimensions.
  """
  b, length, width = x_BLI.shape
  # Output dimensions: the last for 'o', all but the first for the others.
  outer = w[name].shape[-1:] if name == 'o' else w[name].shape[1:]
  y_NO = quantization.matmul(
    x_BLI.reshape(b * length, width),
    w[name].reshape(width, -1),
    w.get(name + quantization.SCALE),
  )
  return checkpoint_name(y_NO, 'matrix').reshape(b, length, *outer)


def _adapt(
  config: QwenConfig,
  w: dict,
  name: str,
  x_BLI: jax.Array,
  y: jax.Array,
  agents_BL: jax.Array | None,
) -> jax.Array:
  """Adds the output of a matrix's adapter, if any, to a product [B, L, ..]."""
  if name + lora.A not in w:
    return y
  a_IR, b_RO = w[name + lora.A], w[name + lora.B]
  x_NI, rank = x_BLI.reshape(-1, x_BLI.shape[-1]), a_IR.shape[-1]
  agents_N = None if agents_BL is None else agents_BL.reshape(-1)
  low_NR = lora.select(config.adapters, x_NI @ a_IR.reshape(-1, rank), agents_N)
  product_NO = config.adapters.scale * (low_NR @ b_RO.reshape(rank, -1))
  return y + product_NO.reshape(y.shape)


def _project(
  config: QwenConfig,
  w: dict,
  name: str,
  x_BLI: jax.Array,
  agents_BL: jax.Array | None,
) -> jax.Array:
  """Multiplies [B, L, I] by a matrix and adds its adapter's output and bias."""
  y = _adapt(config, w, name, x_BLI, _multiply(w, name, x_BLI), agents_BL)
  return y + w[name + fusion.BIAS] if name + fusion.BIAS in w else y


def _project_parts(
  config: QwenConfig,
  w: dict,
  name: str,
  x_BLI: jax.Array,
  agents_BL: jax.Array | None,
) -> list[jax.Array]:
  """Multiplies [B, L, I] by the parts of 'qkv' or 'gate_up'; see `fusion`."""
  names = fusion.PARTS[name]
  if config.fused:
    y_BLO = _multiply(w, name, x_BLI)
    if name + fusion.BIAS in w:
      y_BLO += w[name + fusion.BIAS]
    products = fusion.split(config, name, y_BLO)
    return [
      _adapt(config, w, part, x_BLI, y, agents_BL)
      for part, y in zip(names, products, strict=True)
    ]
  return [_project(config, w, part, x_BLI, agents_BL) for part in names]


def _normalize(
  config: QwenConfig, weight: jax.Array, x: jax.Array
) -> jax.Array:
  return normalization.rms_norm(
    x, weight, config.rms_norm_eps, centered=config.centered_norms
  )


def _queries_keys_values(
  config: QwenConfig,
  w: dict,
  norm: dict,
  x_BLD: jax.Array,
  cos_sin: jax.Array,
  agents_BL: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Returns queries, keys, values, and the gates [B, L, A] of outputs or None.

  Args:
    config: shape of the network.
    w: arrays of the group 'attention'.
    norm: arrays of the group 'norm'.
    x_BLD: normalized input.
    cos_sin: see `rotary.cos_and_sin`.
    agents_BL: agent of each token; None without adapters of agents.
  """
  q_BLHE, k_BLKE, v_BLKE = _project_parts(config, w, 'qkv', x_BLD, agents_BL)
  gate_BLA = None
  if config.attention_gate:
    rows = *x_BLD.shape[:2], config.num_heads
    q_BLHE, gate = jnp.split(q_BLHE.reshape(*rows, -1), 2, axis=-1)
    gate_BLA = gate.reshape(*x_BLD.shape[:2], -1)
  if config.qk_norm:
    q_BLHE = _normalize(config, norm['q'], q_BLHE)
    k_BLKE = _normalize(config, norm['k'], k_BLKE)
  q_BLHE, k_BLKE = (rotary.rotate(x, cos_sin) for x in (q_BLHE, k_BLKE))
  return q_BLHE, k_BLKE, v_BLKE, gate_BLA


def _attend(
  config: QwenConfig,
  q_BLHE: jax.Array,
  k_BLKE: jax.Array,
  v_BLKE: jax.Array,
  cache: dict | None,
  layer: jax.Array,
  positions_BL: jax.Array,
  segments: attention.Segments | None,
) -> tuple[jax.Array, dict | None]:
  """Returns the outputs of attention [B, L, A], and the cache; see `Layer`."""
  rows = q_BLHE.shape[:2]
  if cache is None:
    segments = attention.limit_to_window(segments, config.window, rows)
    heads_BLHE = attention.self_attention(
      q_BLHE, k_BLKE, v_BLKE, segments, implementation=config.attention
    )
    return heads_BLHE.reshape(*rows, -1), None
  kernel = config.decode_attention
  cache = kv_cache.write(
    cache,
    layer,
    positions_BL,
    k_BLKE,
    v_BLKE,
    by_head=decode_attention.reads_heads(kernel),
  )
  heads_BLHE = decode_attention.attend(
    q_BLHE,
    cache,
    layer,
    positions_BL,
    implementation=kernel,
    window=config.window,
  )
  return heads_BLHE.reshape(*rows, -1), cache


def _mix(
  config: QwenConfig,
  w: dict,
  x_BLD: jax.Array,
  cache: dict | None,
  layer: jax.Array,
  positions_BL: jax.Array,
  agents_BL: jax.Array | None,
  counts_B: jax.Array | None,
) -> tuple[jax.Array, dict | None, dict]:
  """Returns the outputs of a `delta_net` [B, L, A], the cache, and the state.

  Args:
    config: shape of the network.
    w: arrays of the group 'delta'.
    x_BLD: normalized input.
    cache: see `Layer`.
    layer: see `Layer`.
    positions_BL: see `Layer`.
    agents_BL: see `Layer`.
    counts_B: see `Layer`.
  """
  projected = tuple(
    _project(config, w, name, x_BLD, agents_BL) for name in ('qkvz', 'ba')
  )
  heads, state = delta_net.mix(
    config.delta,
    w,
    projected,
    positions_BL,
    eps=config.rms_norm_eps,
    counts_B=counts_B,
    state=None if cache is None else kv_cache.read_state(cache, layer),
  )
  if cache is not None:
    cache = kv_cache.write_state(cache, layer, state)
  return heads.reshape(*x_BLD.shape[:2], -1), cache, state


class Layer(nn.Module):
  """One decoder layer, the body of a scan.

  Attributes:
    config: shape of the network.
    keep: whether to return what a cache holds of the tokens.
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
    agents_BL: jax.Array | None,
    counts_B: jax.Array | None,
    at_SN: jax.Array | None = None,
  ) -> tuple[tuple[jax.Array, dict | None], dict | None]:
    """Applies the layer.

    Args:
      carry: (x_BLD, cache): the input, and the cache or None.
      layer: index of this layer within the cache's stack.
      positions_BL: position of each token in its text.
      segments: see `attention.self_attention`.
      cos_sin: see `rotary.cos_and_sin`.
      agents_BL: agent of each token; None without adapters of agents.
      counts_B: number of tokens of each row that change its state; None: all.
      at_SN: indices of the tokens to return; see `gather_tokens`. None: all.

    Returns:
      ((output, cache), arrays of `kv_cache.from_kept` if `keep`, else None).
    """
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    (x_BLD, cache), table = carry, parameters.layer_table(self.config)
    norm = _Arrays(table['norm'], name='norm')(jnp.float32)
    group = 'delta' if c.delta else 'attention'
    w = _Arrays(table[group], name=group)(dtype)

    y_BLD = _normalize(c, norm['attention'], x_BLD)
    if c.delta:
      heads_BLA, cache, kept = _mix(
        c, w, y_BLD, cache, layer, positions_BL, agents_BL, counts_B
      )
    else:
      q_BLHE, k_BLKE, v_BLKE, gate = _queries_keys_values(
        c, w, norm, y_BLD, cos_sin, agents_BL
      )
      heads_BLA, cache = _attend(
        c, q_BLHE, k_BLKE, v_BLKE, cache, layer, positions_BL, segments
      )
      kept = {'k': k_BLKE, 'v': v_BLKE}
      if gate is not None:
        heads_BLA *= jax.nn.sigmoid(gate)
    if at_SN is not None:
      # The rest of the layer processes each token independently.
      x_BLD = gather_tokens(x_BLD, at_SN)
      heads_BLA = gather_tokens(heads_BLA, at_SN)
      if agents_BL is not None:
        agents_BL = gather_tokens(agents_BL[..., None], at_SN)[..., 0]
    x_BLD = x_BLD + _project(c, w, 'o', heads_BLA, agents_BL)
    y_BLD = _normalize(c, norm['mlp'], x_BLD)
    x_BLD = x_BLD + self._mlp(table, y_BLD, agents_BL)
    return (mesh.constrain_rows(x_BLD), cache), kept if self.keep else None

  def _mlp(
    self, table: dict, x_BLD: jax.Array, agents_BL: jax.Array | None
  ) -> jax.Array:
    c, dtype = self.config, jnp.dtype(self.config.dtype)

    def apply_mlp(w: dict) -> jax.Array:
      gate_BLF, up_BLF = _project_parts(c, w, 'gate_up', x_BLD, agents_BL)
      return _project(c, w, 'down', jax.nn.silu(gate_BLF) * up_BLF, agents_BL)

    if not c.num_experts:
      return apply_mlp(_Arrays(table['mlp'], name='mlp')(dtype))
    w = _Arrays(table['experts'], name='experts')(dtype)
    y_BLD = experts.apply_experts(
      x_BLD,
      quantization.dequantize_all(w),
      per_token=c.experts_per_token,
      normalized=c.normalized_experts,
      adapters=c.adapters,
      agents_BL=agents_BL,
    )
    if c.shared_size:
      w = _Arrays(table['shared'], name='shared')(dtype)
      weight_BL1 = jax.nn.sigmoid(_multiply(w, 'mix', x_BLD))
      y_BLD += weight_BL1 * apply_mlp(w)
    return y_BLD


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
