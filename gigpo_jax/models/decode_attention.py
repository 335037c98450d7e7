"""Attention of one query per row over a cache: plain, or by a kernel.

The kernels read each row's cache up to the row's own position; the plain
implementation reads all slots. Both kernels sum over blocks of slots of a fixed
size, so the result of a row depends neither on the other rows nor on the length
of the cache.

Shapes: **B** rows, **S** cache slots, **H** query heads, **K** key/value heads,
**Q** = H / K query heads of one key/value head, **E** head size, **N** layers
of a stack, **P** parts of the cache, **W** padded query heads.
"""

import functools

import jax
import jax.numpy as jnp

from gigpo_jax import mesh
from gigpo_jax.models import attention

# xla: matrix products over all slots, on any platform. triton: our kernel for
# GPUs. paged: JAX's paged attention, a kernel for TPUs.
IMPLEMENTATIONS = ('xla', 'triton', 'paged')

# Scales of an int8 cache.
_SCALES = ('k_scale', 'v_scale')

# Slots that one program of the GPU kernel processes, and the slots and queries
# of its products.
_PART, _BLOCK, _MIN_QUERIES = 256, 64, 16

# Page sizes of the TPU kernel in slots; it uses the largest size that divides
# the cache. Smaller pages would not be aligned with tiles of bfloat16.
_PAGES = (256, 128, 64, 32, 16)
SLOT_MULTIPLE = _PAGES[-1]

# The platform of each kernel.
PLATFORMS = {'triton': 'gpu', 'paged': 'tpu'}
# The size of a head is a multiple of this. Triton needs powers of two from 16.
HEAD_MULTIPLES = {'triton': 16, 'paged': 128}

# Score of a masked position, before the softmax.
_MASKED = -1e30


def reads_heads(implementation: str) -> bool:
  """Returns whether each head's slots must be adjacent in a TPU's memory.

  Args:
    implementation: one of IMPLEMENTATIONS.
  """
  return implementation == 'paged'


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
    stack: keys and values of several layers; see `kv_cache`.
    layer: index of the layer in the stack.
    positions_BL: position of each query; it attends to the slots up to it.
    implementation: one of IMPLEMENTATIONS; kernels are for one query per row,
      more queries use xla.
    window: number of slots, with its own, that a query attends to; 0: all.
      Kernels support 0 only.
    interpret: whether to interpret the GPU kernel, which needs no GPU.
  """
  if implementation == 'xla' or q_BLHE.shape[1] > 1:
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
  kernel = {
    'triton': functools.partial(_by_triton, interpret=interpret),
    'paged': _by_paged,
  }[implementation]
  heads = (mesh.BATCH, None, mesh.RULES['heads'])
  cache = (None, mesh.BATCH, mesh.RULES['kv_heads'])
  arrays = [stack[name] for name in ('k', 'v', *_SCALES) if name in stack]
  axes = (heads, (), (mesh.BATCH,), *[cache] * len(arrays))
  # An idle slot may keep a position beyond a cache that became shorter.
  positions_B = jnp.minimum(positions_BL[:, 0], stack['k'].shape[-1] - 1)
  return mesh.shard_map(kernel, axes, heads)(
    q_BLHE, layer, positions_B, *arrays
  )


def _by_triton(
  q_B1HE, layer, positions_B, k_NBKES, v_NBKSE, *scales_NBKS, interpret: bool
) -> jax.Array:
  """Computes the parts of the cache by a kernel, then adds them up."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  _, b, k, e, length = k_NBKES.shape
  q = q_B1HE.shape[2] // k
  parts = pl.cdiv(length, _PART)
  padded = max(_MIN_QUERIES, pl.next_power_of_2(q))
  q_BKWE = jnp.pad(
    q_B1HE.reshape(b, k, q, e), ((0, 0), (0, 0), (0, padded - q), (0, 0))
  )
  arrays = (k_NBKES, v_NBKSE, *scales_NBKS)
  shape = (b, k, parts, padded)

  def part(*sizes: int):
    return pl.BlockSpec(
      (None, None, None, *sizes), lambda i, j, p: (i, j, p, *[0] * len(sizes))
    )

  def all_of(x: jax.Array):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

  out_BKPWE, largest_BKPW, total_BKPW = pl.pallas_call(
    functools.partial(_triton_kernel, scale=e**-0.5),
    grid=(b, k, parts),
    in_specs=[
      pl.BlockSpec((1,), lambda *_: (0,)),
      pl.BlockSpec((1,), lambda i, j, p: (i,)),
      pl.BlockSpec((None, None, padded, e), lambda i, j, p: (i, j, 0, 0)),
      *map(all_of, arrays),
    ],
    out_specs=[part(padded, e), part(padded), part(padded)],
    out_shape=[
      jax.ShapeDtypeStruct((*shape, e), jnp.float32),
      jax.ShapeDtypeStruct(shape, jnp.float32),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ],
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    interpret=interpret,
    name='decode_attention',
  )(layer.reshape(1), positions_B, q_BKWE, *arrays)
  weights_BKPW = jnp.exp(largest_BKPW - largest_BKPW.max(2, keepdims=True))
  out_BKWE = jnp.sum(out_BKPWE * weights_BKPW[..., None], axis=2)
  total_BKW = jnp.sum(total_BKPW * weights_BKPW, axis=2)
  out_BKQE = (out_BKWE / total_BKW[..., None])[:, :, :q]
  return out_BKQE.astype(q_B1HE.dtype).reshape(q_B1HE.shape)


def _triton_kernel(layer_ref, position_ref, q_ref, *refs, scale: float) -> None:
  """Attends from the queries of a key/value head to a part of a row's cache.

  Args:
    layer_ref: index of the layer, [1].
    position_ref: the row's position, [1].
    q_ref: queries, [W, E].
    *refs: all keys and values, their scales if they are int8; then the outputs:
      weighted sum of the values [W, E], not normalized, the largest score [W]
      and the sum of the weights [W].
    scale: scale of the scores.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  k_ref, v_ref, *scale_refs, out_ref, largest_ref, total_ref = refs
  row, head, part = (pl.program_id(axis) for axis in range(3))
  at = (layer_ref[0], row, head)
  first = part * _PART
  end = jnp.minimum(first + _PART, position_ref[0] + 1)
  q_WE = q_ref[...]

  def add_block(i: jax.Array, sums: tuple) -> tuple:
    out_WE, largest_W, total_W = sums
    start = first + i * _BLOCK
    seen, slots = start + jnp.arange(_BLOCK) < end, pl.ds(start, _BLOCK)
    load = functools.partial(triton.load, other=0)
    k_ES = load(k_ref.at[*at, :, slots], mask=seen[None])
    v_SE = load(v_ref.at[*at, slots, :], mask=seen[:, None])
    scores_WS = scale * triton.dot(q_WE, k_ES.astype(q_WE.dtype))
    if scale_refs:
      k_scale_S, v_scale_S = (
        load(x.at[*at, slots], mask=seen) for x in scale_refs
      )
      scores_WS *= k_scale_S
    scores_WS = jnp.where(seen, scores_WS, _MASKED)
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

  blocks = pl.cdiv(jnp.maximum(end - first, 0), _BLOCK)
  out_ref[...], largest_ref[...], total_ref[...] = jax.lax.fori_loop(
    0,
    blocks,
    add_block,
    (
      jnp.zeros(q_WE.shape, jnp.float32),
      jnp.full(q_WE.shape[:1], _MASKED, jnp.float32),
      jnp.zeros(q_WE.shape[:1], jnp.float32),
    ),
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
