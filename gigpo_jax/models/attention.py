"""Causal attention within a row, and attention of one query over a cache.

The tokens of a row may belong to several branches: a prompt (branch 0) and
completions (branches 1, 2, ..). Each completion attends to the prompt and to
itself, but not to the other completions.

Shapes: **B** rows, **L** tokens, **S** cache slots, **H** query heads, **K**
key/value heads, **Q** = H / K query heads of one key/value head, **E** head
size.
"""

import functools

import jax
import jax.numpy as jnp

from gigpo_jax import mesh

# xla: matrix products and a softmax, on any platform. splash: a TPU kernel.
# cudnn: a kernel for NVIDIA GPUs. The kernels never store a row's scores.
IMPLEMENTATIONS = ('xla', 'splash', 'cudnn')

# Score of a masked position, before the softmax.
_MASKED = -1e30

# Number of blocks of queries, and the minimum size of a block in tokens.
_QUERY_BLOCKS = 4
_MIN_QUERIES = 32

# Block sizes of the TPU kernel, in queries and keys; it uses the largest size
# that divides the padded row.
_KERNEL_BLOCKS = (512, 384, 256, 128)


def default_implementation(platform: str) -> str:
  """Returns the implementation for a platform: 'cpu', 'gpu' or 'tpu'."""
  return {'tpu': 'splash', 'gpu': 'cudnn'}.get(platform, 'xla')


def self_attention(
  q_BLHE: jax.Array,
  k_BLKE: jax.Array,
  v_BLKE: jax.Array,
  branches_BL: jax.Array | None = None,
  *,
  implementation: str = 'xla',
  interpret: bool = False,
) -> jax.Array:
  """Returns causal grouped-query attention among a row's tokens, [B, L, H, E].

  Args:
    q_BLHE: queries.
    k_BLKE: keys.
    v_BLKE: values.
    branches_BL: branch of each token; None: branch 0 for all. With branches,
      the implementation is always 'xla'.
    implementation: one of IMPLEMENTATIONS.
    interpret: whether to interpret the TPU kernel, which is slow but needs no
      TPU.
  """
  if implementation == 'xla' or branches_BL is not None:
    return _by_xla(q_BLHE, k_BLKE, v_BLKE, branches_BL)
  if implementation == 'cudnn':
    return jax.nn.dot_product_attention(
      q_BLHE, k_BLKE, v_BLKE, is_causal=True, implementation='cudnn'
    )
  axes = (mesh.BATCH, None, mesh.RULES['heads'])
  return mesh.shard_map(
    functools.partial(_by_splash, interpret=interpret), (axes,) * 3, axes
  )(q_BLHE, k_BLKE, v_BLKE)


def cached_attention(
  q_B1HE: jax.Array, k_BKES: jax.Array, v_BKSE: jax.Array, seen_BS: jax.Array
) -> jax.Array:
  """Returns attention of one query per row over a cache, [B, 1, H, E].

  Args:
    q_B1HE: queries.
    k_BKES: cached keys.
    v_BKSE: cached values.
    seen_BS: whether the query attends to each slot.
  """
  b, _, h, e = q_B1HE.shape
  k = k_BKES.shape[1]
  scores_BKQS = jnp.einsum(
    'BKQE,BKES->BKQS',
    q_B1HE.reshape(b, k, h // k, e),
    k_BKES,
    preferred_element_type=jnp.float32,
  )
  weights_BKQS, total = _weigh(scores_BKQS, seen_BS[:, None, None], e**-0.5)
  out_BKQE = jnp.einsum(
    'BKQS,BKSE->BKQE',
    weights_BKQS.astype(v_BKSE.dtype),
    v_BKSE,
    preferred_element_type=jnp.float32,
  )
  return (out_BKQE / total).astype(v_BKSE.dtype).reshape(b, 1, h, e)


def _weigh(
  scores: jax.Array, seen: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
  """Returns the softmax of scaled scores as (numerator, denominator), float32.

  The caller divides the weighted sum of the values, which has fewer elements
  than the scores.
  """
  scores = jnp.where(seen, scores * scale, _MASKED)
  largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  numerator = jnp.exp(scores - largest)
  return numerator, jnp.sum(numerator, axis=-1, keepdims=True)


def _by_xla(q_BLHE, k_BLKE, v_BLKE, branches_BL) -> jax.Array:
  """Computes attention by blocks of queries, each with the keys up to its end.

  Blocks save up to three eighths of the products and of the memory. If a row's
  tokens are sharded over devices, all queries are one block.
  """
  b, length, h, e = q_BLHE.shape
  k = k_BLKE.shape[2]
  q_BKQLE = q_BLHE.reshape(b, length, k, h // k, e).transpose(0, 2, 3, 1, 4)
  k_BKLE, v_BKLE = k_BLKE.swapaxes(1, 2), v_BLKE.swapaxes(1, 2)
  block = max(_MIN_QUERIES, -(-length // _QUERY_BLOCKS))
  if mesh.axis_size('sequence') > 1:
    # Each device holds a part of the queries and gathers all keys and values.
    block = length
    k_BKLE, v_BKLE = (
      mesh.constrain(x, (mesh.BATCH, mesh.RULES['kv_heads']))
      for x in (k_BKLE, v_BKLE)
    )
  outputs = []
  for start in range(0, length, block):
    end = min(start + block, length)
    scores_BKQIS = jnp.einsum(
      'BKQIE,BKSE->BKQIS',
      q_BKQLE[..., start:end, :],
      k_BKLE[:, :, :end],
      preferred_element_type=jnp.float32,
    )
    seen = jnp.arange(end) <= jnp.arange(start, end)[:, None]
    if branches_BL is not None:
      keys_B1S = branches_BL[:, None, :end]
      same = keys_B1S == branches_BL[:, start:end, None]
      seen = (seen & (same | (keys_B1S == 0)))[:, None, None]
    weights_BKQIS, total = _weigh(scores_BKQIS, seen, e**-0.5)
    out_BKQIE = jnp.einsum(
      'BKQIS,BKSE->BKQIE',
      weights_BKQIS.astype(v_BLKE.dtype),
      v_BKLE[:, :, :end],
      preferred_element_type=jnp.float32,
    )
    outputs.append((out_BKQIE / total).astype(v_BLKE.dtype))
  out_BKQLE = jnp.concatenate(outputs, axis=3)
  return out_BKQLE.transpose(0, 3, 1, 2, 4).reshape(b, length, h, e)


def _by_splash(q_BLHE, k_BLKE, v_BLKE, *, interpret: bool) -> jax.Array:
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  b, length, h, e = q_BLHE.shape
  k = k_BLKE.shape[2]
  padded = -(-length // _KERNEL_BLOCKS[-1]) * _KERNEL_BLOCKS[-1]
  q_BLHE, k_BLKE, v_BLKE = (
    jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
    for x in (q_BLHE * e**-0.5, k_BLKE, v_BLKE)
  )
  block = next(n for n in _KERNEL_BLOCKS if padded % n == 0)
  kernel = splash.make_splash_mqa_single_device(
    splash.MultiHeadMask([splash.CausalMask((padded, padded))] * (h // k)),
    block_sizes=splash.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    interpret=interpret,
  )
  q_BKQLE = q_BLHE.reshape(b, padded, k, h // k, e).transpose(0, 2, 3, 1, 4)
  out_BKQLE = jax.vmap(jax.vmap(kernel))(
    q_BKQLE, k_BLKE.swapaxes(1, 2), v_BLKE.swapaxes(1, 2)
  )
  out_BLHE = out_BKQLE.transpose(0, 3, 1, 2, 4).reshape(b, padded, h, e)
  return out_BLHE[:, :length].astype(v_BLKE.dtype)
