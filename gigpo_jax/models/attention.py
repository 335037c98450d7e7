"""Causal attention within a sequence, and of queries over a cache.

A sequence may hold several texts, and texts may branch: a prompt with several
completions, each of which attends to the prompt and to itself. `Segments` says
which tokens attend to which.

Shapes: **B** sequences, **L** tokens, **S** cache slots, **H** query heads,
**K** key/value heads, **Q** = H / K query heads of one key/value head, **E**
head size.
"""

import functools
import math

import flax.struct
import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import block_attention

# xla: matmuls and a softmax, on any platform. blockwise: the same in
# loops that skip blocks without pairs, for CPUs. splash: a TPU kernel. cudnn: a
# kernel for NVIDIA GPUs. All but xla never store a row's scores.
IMPLEMENTATIONS = ('xla', 'blockwise', 'splash', 'cudnn')

# The platform of each kernel.
PLATFORMS = {'splash': 'tpu', 'cudnn': 'gpu'}

# Compute capabilities: of the first GPUs that compute in bfloat16, and of the
# first on which cuDNN's attention has heads of up to 256 instead of 128.
_AMPERE, _HOPPER = 8.0, 9.0

# Score of a masked position, before the softmax.
_MASKED = -1e30

# Number of blocks of queries, and the minimum size of a block in tokens.
_QUERY_BLOCKS = 4
_MIN_QUERIES = 32

# Block sizes of the TPU kernel, in queries and keys; it uses the largest size
# that divides the padded row.
_KERNEL_BLOCKS = (512, 384, 256, 128)


@flax.struct.dataclass
class Segments:
  """Which tokens of a sequence attend to which.

  Token i attends to token j if j <= i < ends[j]. Texts that branch are written
  in depth-first order, so that the tokens that continue token j are the ones
  directly after it.

  Attributes:
    ends: index at which the texts end that contain the token, [B, L] int32;
      the same for all tokens of a text without branches.
    tree: whether the tokens of a text have different ends, because texts branch
      or attention has a window.
  """

  ends: jax.Array
  tree: bool = flax.struct.field(pytree_node=False, default=False)


def limit_to_window(
  segments: Segments | None, window: int, shape: tuple[int, int]
) -> Segments | None:
  """Returns segments in which a token attends to the last tokens only.

  Args:
    segments: the texts of each sequence, without branches; None: each sequence
      is one text.
    window: number of tokens, with the token itself; 0: all.
    shape: [B, L].

  Raises:
    ValueError: if texts branch; the tokens of a text are then not adjacent.
  """
  if not window or window >= shape[1]:
    return segments
  ends_BL = jnp.broadcast_to(jnp.arange(shape[1]) + window, shape)
  if segments is not None:
    if segments.tree:
      raise ValueError('attention with a window does not support branches')
    ends_BL = jnp.minimum(ends_BL, segments.ends)
  return Segments(ends_BL.astype(jnp.int32), tree=True)


def has_kernels(platform: str, dtype: str, capability: float) -> bool:
  """Returns whether an accelerator has kernels for a type of activations.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'.
    dtype: type of the activations.
    capability: compute capability of an NVIDIA GPU; 0 for other GPUs.
  """
  is_known = platform == 'tpu' or (platform == 'gpu' and capability >= _AMPERE)
  return is_known and dtype == 'bfloat16'


def default_implementation(
  platform: str, dtype: str, head_size: int, capability: float = math.inf
) -> str:
  """Returns the implementation for a device and a network.

  Args:
    platform: see `has_kernels`.
    dtype: see `has_kernels`.
    head_size: size of a head.
    capability: see `has_kernels`.
  """
  if platform == 'cpu':
    return 'blockwise'
  if not has_kernels(platform, dtype, capability):
    return 'xla'
  if platform == 'tpu':
    return 'splash'
  largest = 128 if capability < _HOPPER else 256
  return 'cudnn' if head_size <= largest and head_size % 8 == 0 else 'xla'


def self_attention(
  q_BLHE: jax.Array,
  k_BLKE: jax.Array,
  v_BLKE: jax.Array,
  segments: Segments | None = None,
  *,
  implementation: str = 'xla',
  interpret: bool = False,
) -> jax.Array:
  """Returns causal grouped-query attention in each sequence, [B, L, H, E].

  Args:
    q_BLHE: queries.
    k_BLKE: keys.
    v_BLKE: values.
    segments: the texts of each sequence; None: each sequence is one text.
    implementation: one of IMPLEMENTATIONS; without segments, blockwise is xla.
    interpret: whether to interpret the TPU kernel, which is slow but needs no
      TPU.
  """
  no_blocks = implementation == 'blockwise' and segments is None
  if implementation == 'xla' or no_blocks:
    return _by_xla(q_BLHE, k_BLKE, v_BLKE, segments)
  if implementation == 'cudnn':
    return _by_cudnn(q_BLHE, k_BLKE, v_BLKE, segments)
  axes = (mesh.BATCH, None, mesh.RULES['heads'])
  if implementation == 'blockwise':
    kernel = block_attention.attend
  else:
    tree = segments is not None and segments.tree
    kernel = functools.partial(_by_splash, tree=tree, interpret=interpret)
  if segments is None:
    return mesh.shard_map(kernel, (axes,) * 3, axes)(q_BLHE, k_BLKE, v_BLKE)
  return mesh.shard_map(kernel, (*(axes,) * 3, (mesh.BATCH,)), axes)(
    q_BLHE, k_BLKE, v_BLKE, segments.ends
  )


def cached_attention(
  q_BLHE: jax.Array,
  k_BKES: jax.Array,
  v_BKSE: jax.Array,
  seen_BLS: jax.Array,
  scales_BKS: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """Returns attention of L queries per row over a cache, [B, L, H, E].

  Args:
    q_BLHE: queries.
    k_BKES: cached keys.
    v_BKSE: cached values.
    seen_BLS: whether each query attends to each slot.
    scales_BKS: scales of int8 keys and values; None: they have the queries'
      type.
  """
  b, length, h, e = q_BLHE.shape
  k, dtype = k_BKES.shape[1], q_BLHE.dtype
  q_BKQLE = q_BLHE.reshape(b, length, k, h // k, e).transpose(0, 2, 3, 1, 4)
  scores_BKQLS = jnp.einsum(
    'BKQLE,BKES->BKQLS',
    q_BKQLE,
    k_BKES.astype(dtype),
    preferred_element_type=jnp.float32,
  )
  if scales_BKS is not None:
    scores_BKQLS *= scales_BKS[0][:, :, None, None]
  weights_BKQLS, total = _weigh(scores_BKQLS, seen_BLS[:, None, None], e**-0.5)
  if scales_BKS is not None:
    weights_BKQLS *= scales_BKS[1][:, :, None, None]
  out_BKQLE = jnp.einsum(
    'BKQLS,BKSE->BKQLE',
    weights_BKQLS.astype(dtype),
    v_BKSE.astype(dtype),
    preferred_element_type=jnp.float32,
  )
  out_BKQLE = (out_BKQLE / total).astype(dtype)
  return out_BKQLE.transpose(0, 3, 1, 2, 4).reshape(b, length, h, e)


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


def _by_xla(q_BLHE, k_BLKE, v_BLKE, segments: Segments | None) -> jax.Array:
  """Computes attention by blocks of queries, each with the keys up to its end.

  Blocks save up to three eighths of the products and of the memory. If the
  tokens of a sequence are sharded over devices, all queries are one block.
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
    if segments is not None:
      ends_B11S = segments.ends[:, None, None, :end]
      seen = seen & (jnp.arange(start, end)[:, None] < ends_B11S)[:, :, None]
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


def _by_cudnn(q_BLHE, k_BLKE, v_BLKE, segments: Segments | None) -> jax.Array:
  attend = functools.partial(
    jax.nn.dot_product_attention, is_causal=True, implementation='cudnn'
  )
  if segments is None:
    return attend(q_BLHE, k_BLKE, v_BLKE)
  # With a mask, cuDNN has gradients for even lengths only.
  length, odd = q_BLHE.shape[1], q_BLHE.shape[1] % 2
  q_BLHE, k_BLKE, v_BLKE = (
    jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0)))
    for x in (q_BLHE, k_BLKE, v_BLKE)
  )
  ends_BL = jnp.pad(
    segments.ends, ((0, 0), (0, odd)), constant_values=length + 1
  )
  mask = jnp.arange(length + odd)[:, None] < ends_BL[:, None, None]
  return attend(q_BLHE, k_BLKE, v_BLKE, mask=mask)[:, :length]


def _by_splash(
  q_BLHE, k_BLKE, v_BLKE, ends_BL=None, *, tree: bool, interpret: bool
) -> jax.Array:
  """Computes attention by the TPU kernel.

  Without branches, the end of a text identifies it: ends are the kernel's
  segment ids. With branches, the kernel reads a mask of each sequence and skips
  its empty blocks.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  b, length, h, e = q_BLHE.shape
  k = k_BLKE.shape[2]
  padded = -(-length // _KERNEL_BLOCKS[-1]) * _KERNEL_BLOCKS[-1]
  q_BLHE, k_BLKE, v_BLKE = (
    jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
    for x in (q_BLHE * e**-0.5, k_BLKE, v_BLKE)
  )
  q_BKQLE = q_BLHE.reshape(b, padded, k, h // k, e).transpose(0, 2, 3, 1, 4)
  k_BKLE, v_BKLE = k_BLKE.swapaxes(1, 2), v_BLKE.swapaxes(1, 2)
  make = functools.partial(
    splash.make_splash_mqa_single_device,
    block_sizes=_block_sizes(padded),
    interpret=interpret,
  )
  if ends_BL is not None:
    ends_BL = jnp.pad(
      ends_BL, ((0, 0), (0, padded - length)), constant_values=padded
    )
  if not tree:
    causal = splash.CausalMask((padded, padded))
    kernel = make(splash.MultiHeadMask([causal] * (h // k)))
    attend = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    ids = None if ends_BL is None else splash.SegmentIds(ends_BL, ends_BL)
    out_BKQLE = jax.vmap(attend)(q_BKQLE, k_BKLE, v_BKLE, ids)
  else:
    index = jnp.arange(padded)

    def attend(args):
      q_KQLE, k_KLE, v_KLE, ends_L = args
      seen_LL = (index <= index[:, None]) & (index[:, None] < ends_L)
      kernel = make(seen_LL[None])  # One mask for all heads.
      # A traced value under `jit`, on which the kernel would branch.
      kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
      return jax.vmap(kernel)(q_KQLE, k_KLE, v_KLE)

    out_BKQLE = jax.lax.map(attend, (q_BKQLE, k_BKLE, v_BKLE, ends_BL))
  out_BLHE = out_BKQLE.transpose(0, 3, 1, 2, 4).reshape(b, padded, h, e)
  return out_BLHE[:, :length].astype(v_BLKE.dtype)


def _block_sizes(length: int):
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  block = next(n for n in _KERNEL_BLOCKS if length % n == 0)
  return splash.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
