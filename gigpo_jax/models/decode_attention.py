"""Attention of few queries per row over a cache: plain, or by a kernel.

The kernels read each row's cache up to the row's own position; the plain
implementation reads all slots. Both kernels sum over blocks of slots of a fixed
size, so the result of a row depends neither on the other rows nor on the length
of the cache.

Shapes: **B** rows, **S** cache slots, **H** query heads, **K** key/value heads,
**L** queries of a row, **Q** = H / K query heads of one key/value head, **E**
head size, **N** layers of a stack, **P** parts of the cache, **W** padded
queries of one key/value head, L Q of which are real.
"""

import functools
import math

import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import attention

# xla: matmuls over all slots, on any platform. triton: our kernel for
# GPUs. paged: JAX's paged attention, a kernel for TPUs.
IMPLEMENTATIONS = ('xla', 'triton', 'paged')

# Scales of an int8 cache.
_SCALES = ('k_scale', 'v_scale')

# Slots that one program of the GPU kernel processes, and the slots and queries
# of its products.
_PART, _BLOCK, _MIN_QUERIES = 4096, 64, 16
# Most queries of a key/value head that the GPU kernel keeps in registers.
_MAX_QUERIES = 64
# Warps of a program, and blocks whose loads overlap. Two blocks of heads larger
# than 128 fill the shared memory.
_WARPS, _STAGES = 4, 3

# Page sizes of the TPU kernel in slots; it uses the largest size that divides
# the cache. Smaller pages would not be aligned with tiles of bfloat16.
_PAGES = (256, 128, 64, 32, 16)
# The slots of a row are a multiple of this.
_SLOT_MULTIPLES = {'triton': _BLOCK, 'paged': _PAGES[-1]}

# The platform of each kernel.
PLATFORMS = {'triton': 'gpu', 'paged': 'tpu'}

# Score of a masked position, before the softmax.
_MASKED = -1e30
# Sum of the weights of an empty part.
_EMPTY = 1e-30


def reads_heads(implementation: str) -> bool:
  """Returns whether each head's slots must be adjacent in a TPU's memory.

  Args:
    implementation: one of IMPLEMENTATIONS.
  """
  return implementation == 'paged'


def default_implementation(
  platform: str,
  dtype: str,
  head_size: int,
  capability: float = math.inf,
  window: int = 0,
) -> str:
  """Returns the implementation for a device and a network.

  The TPU's kernel was never measured and is no default.

  Args:
    platform: see `attention.has_kernels`.
    dtype: see `attention.has_kernels`.
    head_size: size of a head.
    capability: see `attention.has_kernels`.
    window: see `attend`.
  """
  has_kernel = attention.has_kernels(platform, dtype, capability)
  fits = not window and not head_problem('triton', head_size)
  return 'triton' if platform == 'gpu' and has_kernel and fits else 'xla'


def head_problem(implementation: str, size: int) -> str | None:
  """Returns which sizes of heads are accepted instead, if this one is not.

  Args:
    implementation: one of IMPLEMENTATIONS.
    size: size of a head.
  """
  if implementation == 'triton' and (size < 16 or size & (size - 1)):
    return 'must be a power of two from 16'
  if implementation == 'paged' and size % 128:
    return 'must be a multiple of 128'
  return None


def reads_all_slots(implementation: str) -> bool:
  """Returns whether attention also reads the slots after a row's position.

  Args:
    implementation: one of IMPLEMENTATIONS.
  """
  return implementation == 'xla'


def num_slots(implementation: str, positions: int) -> int:
  """Returns the slots of a row that holds a number of positions.

  Args:
    implementation: one of IMPLEMENTATIONS.
    positions: needed positions.
  """
  multiple = _SLOT_MULTIPLES.get(implementation, 1)
  return -(-positions // multiple) * multiple


def attend(
  q_BLHE: jax.Array,
  stack: dict[str, jax.Array],
  layer: jax.Array,
  positions_BL: jax.Array,
  *,
  implementation: str = 'xla',
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """Returns attention of L queries per row over a cache, [B, L, H, E].

  Args:
    q_BLHE: queries.
    stack: keys and values of several layers; see `kv_cache`. Kernels need a
      multiple of slots, see `num_slots`.
    layer: index of the layer in the stack.
    positions_BL: position of each query; it attends to the slots up to it.
      Kernels need consecutive positions.
    implementation: one of IMPLEMENTATIONS. More queries than a kernel is for
      use xla: than one for TPUs, than `_MAX_QUERIES` of a key/value head for
      GPUs.
    window: number of slots, with its own, that a query attends to; 0: all.
      Kernels support 0 only.
    interpret: whether to interpret the GPU kernel, which needs no GPU.
  """
  if not _has_kernel(implementation, q_BLHE.shape, stack['k'].shape[2]):
    slots, last_BL1 = jnp.arange(stack['k'].shape[-1]), positions_BL[..., None]
    seen_BLS = slots <= last_BL1
    if window:
      seen_BLS &= slots > last_BL1 - window
    scales = [stack[name][layer] for name in _SCALES if name in stack]
    return attention.cached_attention(
      q_BLHE, stack['k'][layer], stack['v'][layer], seen_BLS, scales or None
    )
  if window:
    raise ValueError(f'{implementation} does not support a window')
  length = stack['k'].shape[-1]
  if length != num_slots(implementation, length):
    raise ValueError(
      f'{implementation} does not support {length} slots; must be '
      f'{num_slots(implementation, length)}'
    )
  kernel = {
    'triton': functools.partial(_by_triton, interpret=interpret),
    'paged': _by_paged,
  }[implementation]
  heads = (mesh.BATCH, None, mesh.RULES['heads'])
  cache = (None, mesh.BATCH, mesh.RULES['kv_heads'])
  arrays = [stack[name] for name in ('k', 'v', *_SCALES) if name in stack]
  axes = (heads, (), (mesh.BATCH,), *[cache] * len(arrays))
  # An idle slot may keep a position beyond a cache that became shorter.
  positions_B = jnp.minimum(positions_BL[:, 0], length - 1)
  return mesh.shard_map(kernel, axes, heads)(
    q_BLHE, layer, positions_B, *arrays
  )


def _has_kernel(implementation: str, shape: tuple, num_kv_heads: int) -> bool:
  """Returns whether a kernel is for queries of a shape [B, L, H, E]."""
  _, queries, heads, _ = shape
  if implementation == 'triton':
    return queries * heads // num_kv_heads <= _MAX_QUERIES or queries == 1
  return implementation == 'paged' and queries == 1


def _by_triton(
  q_BLHE, layer, positions_B, k_NBKES, v_NBKSE, *scales_NBKS, interpret: bool
) -> jax.Array:
  """Computes the parts of the cache by a kernel, then their weighted mean."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  _, b, k, _, length = k_NBKES.shape
  _, size, heads, e = q_BLHE.shape
  parts = pl.cdiv(length, _PART)
  # All queries of a key/value head next to each other.
  q_BLKQE = q_BLHE.reshape(b, size, k, -1, e)
  q_BIE = q_BLKQE.swapaxes(1, 2).reshape(b, -1, e)
  arrays = (layer.reshape(1), positions_B, q_BIE)
  arrays += (k_NBKES, v_NBKSE, *scales_NBKS)
  shape = (parts, *q_BIE.shape)
  out_PBIE, log_total_PBI = pl.pallas_call(
    functools.partial(_triton_kernel, heads=heads // k, scale=e**-0.5),
    grid=(b, k, parts),
    out_shape=[
      jax.ShapeDtypeStruct(shape, q_BLHE.dtype if parts == 1 else jnp.float32),
      jax.ShapeDtypeStruct(shape[:-1], jnp.float32),
    ],
    compiler_params=triton.CompilerParams(
      num_warps=_WARPS, num_stages=_STAGES if e <= 128 else 2
    ),
    interpret=interpret,
    name='decode_attention',
  )(*arrays)
  out_BIE = out_PBIE[0]
  if parts > 1:
    weights_PBI = jax.nn.softmax(log_total_PBI, axis=0)
    out_BIE = jnp.sum(out_PBIE * weights_PBI[..., None], axis=0)
  out_BKLQE = out_BIE.astype(q_BLHE.dtype).reshape(b, k, size, -1, e)
  return out_BKLQE.swapaxes(1, 2).reshape(q_BLHE.shape)


def _triton_kernel(
  layer_ref, positions_ref, q_ref, k_ref, v_ref, *refs, heads: int, scale: float
) -> None:
  """Attends from the queries of a key/value head to a part of a row's cache.

  Args:
    layer_ref: index of the layer, [1].
    positions_ref: position of each row's first query, [B].
    q_ref: queries of all rows, [B, K L Q, E].
    k_ref: all keys, [N, B, K, E, S].
    v_ref: all values, [N, B, K, S, E].
    *refs: scales of keys and values if they are int8, [N, B, K, S]; then the
      outputs: attention over each part [P, B, K L Q, E], and the logarithm of
      the sum of its weights [P, B, K L Q].
    heads: Q.
    scale: scale of the scores.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  *scale_refs, out_ref, log_total_ref = refs
  row, head, part = (pl.program_id(axis) for axis in range(3))
  at = (layer_ref[0], row, head)
  first = part * _PART
  # Zeros after the queries, up to the rows that a product needs.
  count = q_ref.shape[1] // k_ref.shape[2]
  padded = max(_MIN_QUERIES, pl.next_power_of_2(count))
  queries, own_W = pl.ds(head * count, padded), jnp.arange(padded) < count
  position_W = positions_ref[row] + jnp.arange(padded) // heads
  last = positions_ref[row] + count // heads - 1
  end = jnp.minimum(first + _PART, jnp.minimum(last + 1, k_ref.shape[4]))
  q_WE = triton.load(q_ref.at[row, queries, :], mask=own_W[:, None], other=0)

  def add_block(i: jax.Array, sums: tuple) -> tuple:
    out_WE, largest_W, total_W = sums
    start = first + i * _BLOCK
    # Without masks, which would split the loads into single elements. Blocks
    # end inside the cache, and what follows the row's position is finite.
    slots = pl.ds(start, _BLOCK)
    k_ES = triton.load(k_ref.at[*at, :, slots])
    v_SE = triton.load(v_ref.at[*at, slots, :])
    scores_WS = scale * triton.dot(q_WE, k_ES.astype(q_WE.dtype))
    if scale_refs:
      k_scale_S, v_scale_S = (triton.load(x.at[*at, slots]) for x in scale_refs)
      scores_WS *= k_scale_S
    seen_WS = start + jnp.arange(_BLOCK) <= position_W[:, None]
    scores_WS = jnp.where(seen_WS, scores_WS, _MASKED)
    new_W = jnp.maximum(largest_W, jnp.max(scores_WS, axis=1))
    weights_WS = jnp.exp(scores_WS - new_W[:, None])
    shrink_W = jnp.exp(largest_W - new_W)
    total_W = total_W * shrink_W + jnp.sum(weights_WS, axis=1)
    if scale_refs:
      weights_WS *= v_scale_S
    added_WE = triton.dot(
      weights_WS.astype(q_WE.dtype), v_SE.astype(q_WE.dtype)
    )
    return out_WE * shrink_W[:, None] + added_WE, new_W, total_W

  out_WE, largest_W, total_W = jax.lax.fori_loop(
    0,
    pl.cdiv(jnp.maximum(end - first, 0), _BLOCK),
    add_block,
    (
      jnp.zeros(q_WE.shape, jnp.float32),
      jnp.full(q_WE.shape[:1], _MASKED, jnp.float32),
      jnp.zeros(q_WE.shape[:1], jnp.float32),
    ),
  )
  # A part after the row's position is empty; its weight becomes 0.
  total_W = jnp.maximum(total_W, _EMPTY)
  out_WE = (out_WE / total_W[:, None]).astype(out_ref.dtype)
  triton.store(out_ref.at[part, row, queries, :], out_WE, mask=own_W[:, None])
  triton.store(
    log_total_ref.at[part, row, queries],
    largest_W + jnp.log(total_W),
    mask=own_W,
  )


def _by_paged(q_B1HE, layer, positions_B, k_NBKES, v_NBKSE) -> jax.Array:
  """Computes attention by JAX's paged attention.

  Each head of a row is a sequence of one head, and its pages are adjacent. With
  the layout of `mesh.cache_formats`, the pages are the cache itself.
  """
  from jax.experimental.pallas.ops.tpu import paged_attention

  _, b, k, e, length = k_NBKES.shape
  page = next(size for size in _PAGES if length % size == 0)
  per_row = length // page
  first_I = (layer * b * k + jnp.arange(b * k)) * per_row
  out_IQE = paged_attention.paged_attention(
    q_B1HE.reshape(b * k, -1, e) * e**-0.5,
    k_NBKES.swapaxes(3, 4).reshape(1, -1, page, e),
    v_NBKSE.reshape(1, -1, page, e),
    jnp.repeat(positions_B + 1, k),
    (first_I[:, None] + jnp.arange(per_row)).astype(jnp.int32),
    pages_per_compute_block=1,
  )
  return out_IQE.astype(q_B1HE.dtype).reshape(q_B1HE.shape)
