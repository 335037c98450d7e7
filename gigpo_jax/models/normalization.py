"""Root mean square normalization (arXiv:1910.07467)."""

import jax
import jax.numpy as jnp


def rms_norm(
  x: jax.Array, weight: jax.Array, eps: float, *, centered: bool = False
) -> jax.Array:
  """Returns x / root mean square of its last dimension * weight.

  Args:
    x: vectors.
    weight: one factor for each element of a vector.
    eps: added to the mean square.
    centered: whether the factor is 1 + weight, which is applied in float32.
  """
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  if centered:
    return (x32 * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
  return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)
