"""Rotary position embeddings, with YaRN for longer rows.

Shapes: **B** rows, **L** tokens, **H** heads, **E** head size.
"""

import math

import jax
import jax.numpy as jnp

from gigpo_jax.models.qwen_config import QwenConfig


def cos_and_sin(positions_BL: jax.Array, config: QwenConfig) -> jax.Array:
  """Returns cos and sin of a head's rotary angles, float32 [2, B, L, 1, E].

  E is the number of elements that are rotated.
  """
  half, yarn = _size(config) // 2, config.yarn
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


def _size(config: QwenConfig) -> int:
  """Returns the number of elements of a head that are rotated."""
  return config.rotary_dim or config.head_dim


def _yarn_ramp(config: QwenConfig) -> jax.Array:
  """Returns YaRN's weight of the divided angle in [0, 1], [E/2]."""
  yarn, half = config.yarn, _size(config) // 2

  def dimension(turns: float) -> float:
    """Returns the dimension that makes `turns` turns in `original_length`."""
    period = yarn.original_length / (turns * 2 * math.pi)
    return half * math.log(period) / math.log(config.rope_theta)

  low = max(math.floor(dimension(yarn.beta_fast)), 0)
  high = min(math.ceil(dimension(yarn.beta_slow)), _size(config) - 1)
  # Negative where original_length is a few tokens, as in transformers.
  width = high - low or 1e-3
  ramp = (jnp.arange(half, dtype=jnp.float32) - low) / width
  return jnp.clip(ramp, 0, 1)


def rotate(x_BLHE: jax.Array, rotary: jax.Array) -> jax.Array:
  """Applies rotary position embeddings to the leading elements of heads."""
  (cos, sin), half = rotary, rotary.shape[-1] // 2
  x, rest = jnp.split(x_BLHE, [2 * half], axis=-1)
  x = x.astype(jnp.float32)

  def concatenate(x: jax.Array) -> jax.Array:
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)

  def multiply(x: jax.Array) -> jax.Array:
    zeros, ones = jnp.zeros((half, half)), jnp.eye(half)
    rotation = jnp.block([[zeros, ones], [-ones, zeros]])
    return (x.reshape(-1, 2 * half) @ rotation).reshape(x.shape)

  # XLA's CPU backend concatenates one element at a time, which is slower than
  # a product with a matrix of 0 and 1.
  rotated = jax.lax.platform_dependent(x, cpu=multiply, default=concatenate)
  x = (x * cos + rotated * sin).astype(x_BLHE.dtype)
  return jnp.concatenate([x, rest], axis=-1) if rest.shape[-1] else x
