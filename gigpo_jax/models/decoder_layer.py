"""One decoder layer: attention, and an MLP or a mixture of experts.

Shapes: as in `qwen`; **I** inputs of a matrix.
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
  experts,
  fusion,
  kv_cache,
  lora,
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
    return {
      name: quantization.dequantize(
        self.param(name, nn.initializers.zeros, shape, jnp.float32),
        self.get_variable('params', name + quantization.SCALE),
        dtype,
      )
      for name, (shape, _) in self.table.items()
    }


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """Returns x / root mean square of its last dimension * weight."""
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


class Layer(nn.Module):
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
    agents_BL: jax.Array | None,
    at_SN: jax.Array | None = None,
  ) -> tuple[tuple[jax.Array, dict | None], tuple | None]:
    """Applies the layer.

    Args:
      carry: (x_BLD, cache): the input, and the cache or None.
      layer: index of this layer within the cache's stack.
      positions_BL: position of each token in its text.
      segments: see `attention.self_attention`.
      cos_sin: see `rotary.cos_and_sin`.
      agents_BL: agent of each token; None without adapters of agents.
      at_SN: indices of the tokens to return; see `gather_tokens`. None: all.

    Returns:
      ((output, cache), keys and values if `keep`, else None).
    """
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    (x_BLD, cache), table = carry, parameters.layer_table(self.config)
    norm = _Arrays(table['norm'], name='norm')(jnp.float32)
    w = _Arrays(table['attention'], name='attention')(dtype)

    y_BLD = rms_norm(x_BLD, norm['attention'], c.rms_norm_eps)
    q_BLHE, k_BLKE, v_BLKE = _project_parts(c, w, 'qkv', y_BLD, agents_BL)
    if c.qk_norm:
      q_BLHE = rms_norm(q_BLHE, norm['q'], c.rms_norm_eps)
      k_BLKE = rms_norm(k_BLKE, norm['k'], c.rms_norm_eps)
    q_BLHE, k_BLKE = (
      rotary.rotate(q_BLHE, cos_sin),
      rotary.rotate(k_BLKE, cos_sin),
    )
    if cache is None:
      segments = attention.limit_to_window(segments, c.window, x_BLD.shape[:2])
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
        q_BLHE,
        cache,
        layer,
        positions_BL,
        implementation=kernel,
        window=c.window,
      )
    heads_BLA = heads_BLHE.reshape(*x_BLD.shape[:2], -1)
    if at_SN is not None:
      # The rest of the layer processes each token independently.
      x_BLD = gather_tokens(x_BLD, at_SN)
      heads_BLA = gather_tokens(heads_BLA, at_SN)
      if agents_BL is not None:
        agents_BL = gather_tokens(agents_BL[..., None], at_SN)[..., 0]
    x_BLD = x_BLD + _project(c, w, 'o', heads_BLA, agents_BL)
    y_BLD = rms_norm(x_BLD, norm['mlp'], c.rms_norm_eps)
    x_BLD = x_BLD + self._mlp(table, y_BLD, agents_BL)
    kept = (k_BLKE, v_BLKE) if self.keep else None
    return (mesh.constrain_rows(x_BLD), cache), kept

  def _mlp(
    self, table: dict, x_BLD: jax.Array, agents_BL: jax.Array | None
  ) -> jax.Array:
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    if c.num_experts:
      return experts.apply_experts(
        x_BLD,
        _Arrays(table['experts'], name='experts')(dtype),
        per_token=c.experts_per_token,
        normalized=c.normalized_experts,
        adapters=c.adapters,
        agents_BL=agents_BL,
      )
    w = _Arrays(table['mlp'], name='mlp')(dtype)
    gate_BLF, up_BLF = _project_parts(c, w, 'gate_up', x_BLD, agents_BL)
    return _project(c, w, 'down', jax.nn.silu(gate_BLF) * up_BLF, agents_BL)


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
