"""Dimension letters and symbols of the project, and reductions over rows.

Shape key. **G** groups, **N** episodes per group, **T** steps per episode
(cap), **R** rows, **P** prompt tokens, **C** completion tokens, **L** = P + C
tokens, **V** vocabulary, **B** rows in a microbatch. In models: **D** width,
**H** query heads, **K** key/value heads... see models/qwen.py.

Symbols of the paper (arXiv:2505.10978) and their names here: gamma `discount`,
omega `step_weight`, epsilon of the clip `clip_epsilon`, beta `kl_weight`,
the invalid-action penalty c `invalid_penalty`.

Two-float numbers: a pair (high, low) of float32 whose exact sum is the value,
precise to about 45 bits. Returns are stored in this form because dividing by
a standard deviation near 0 magnifies the rounding errors of float32. float64
is not available under jit.
"""

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

typechecked = jaxtyping.jaxtyped(typechecker=beartype.beartype)

TwoFloat = tuple[Float[Array, '*S'], Float[Array, '*S']]

# Relative difference up to which sums of float32 count as equal.
_EQUAL_WITHIN = 2.0**-18


@typechecked
def segment_sum(
  values: Float[Array, ' R'],
  segments: Int[Array, ' R'],
  mask: Bool[Array, ' R'],
) -> Float[Array, ' R']:
  """Returns, for each row, the sum of values where mask is True in its segment.

  Args:
    values: the summands; may be NaN where mask is False.
    segments: in [0, R); see `segment_ids`.
    mask: True for the rows to sum.
  """
  counted = jnp.where(mask, values, 0)
  return jax.ops.segment_sum(counted, segments, len(segments))[segments]


@typechecked
def segment_count(
  segments: Int[Array, ' R'], mask: Bool[Array, ' R']
) -> Int[Array, ' R']:
  """Returns, for each row, how many rows of its segment have mask True."""
  counted = mask.astype(jnp.int32)
  return jax.ops.segment_sum(counted, segments, len(segments))[segments]


@typechecked
def segment_first(
  segments: Int[Array, ' R'], mask: Bool[Array, ' R']
) -> Int[Array, ' R']:
  """Returns, for each row, the index of its segment's first row with mask True.

  For a segment without such rows, the index is an arbitrary row; the caller
  masks it out.
  """
  last = len(segments) - 1
  position = jnp.where(mask, jnp.arange(len(segments)), last)
  first = jax.ops.segment_min(position, segments, len(segments))
  return jnp.clip(first[segments], 0, last)


@typechecked
def segment_ids(*keys: Int[Array, ' R']) -> Int[Array, ' R']:
  """Returns ids in [0, R) that are equal where all keys are equal.

  Ids increase with the keys in lexicographic order; the first key is the most
  significant. O(R log R).
  """
  order = jnp.lexsort(keys[::-1])
  changes = jnp.zeros(len(order), bool)
  for key in keys:
    ordered = key[order]
    changes |= jnp.concatenate([changes[:1] & False, jnp.diff(ordered) != 0])
  dense = jnp.cumsum(changes, dtype=jnp.int32)
  return jnp.zeros_like(dense).at[order].set(dense)


@typechecked
def sum_tolerance(
  values: Float[Array, ' R'], segments: Int[Array, ' R']
) -> Float[Array, ' R']:
  """Returns the difference up to which sums of a segment count as equal.

  Equal sums of float32 may differ in their last bits, which the division by a
  standard deviation near 0 would magnify; see `advantages.group_normalize`.

  Args:
    values: numbers as large as the terms of the sums.
    segments: in [0, R); values of one segment are compared.
  """
  largest = jax.ops.segment_max(jnp.abs(values), segments, len(segments))
  return _EQUAL_WITHIN * largest[segments]


@typechecked
def two_sum(
  a: Float[Array, '*S'], b: Float[Array, '*S']
) -> tuple[Float[Array, '*S'], Float[Array, '*S']]:
  """Returns fl(a + b) and its rounding error, exactly (Knuth)."""
  total = a + b
  b_part = total - a
  return total, (a - (total - b_part)) + (b - b_part)


def two_add(a: TwoFloat, b: TwoFloat) -> TwoFloat:
  """Returns the elementwise sum a + b of two-float numbers."""
  high, error = two_sum(a[0], b[0])
  low, low_error = two_sum(a[1], b[1])
  high, error = two_sum(high, error + low)
  return two_sum(high, error + low_error)


def two_multiply(a: TwoFloat, b: TwoFloat) -> TwoFloat:
  """Returns the elementwise product a * b of two-float numbers.

  Each factor is split into its top 12 bits and the rest, also of 12 bits, whose
  products are exact. The result therefore stays correct if the compiler
  contracts products and sums into fused multiply-adds, which break the textbook
  two-product.
  """
  a_top, a_rest = _split(a[0])
  b_top, b_rest = _split(b[0])
  middle, middle_error = two_sum(a_top * b_rest, a_rest * b_top)
  high, error = two_sum(a_top * b_top, middle)
  small = middle_error + a_rest * b_rest + (a[0] * b[1] + a[1] * b[0])
  return two_sum(high, error + small)


def _split(a):
  bits = jax.lax.bitcast_convert_type(a, jnp.int32)
  top = jax.lax.bitcast_convert_type(bits & ~0xFFF, jnp.float32)
  return top, a - top


@typechecked
def two_power(
  base: tuple[Float[Array, ''], Float[Array, '']],
  exponent: Int[Array, ' R'],
) -> tuple[Float[Array, ' R'], Float[Array, ' R']]:
  """Returns base^exponent by repeated squaring; exponents are at least 0."""
  ones = jnp.ones(exponent.shape, jnp.float32)

  def apply_bit(k, carry):
    power, squared = carry
    odd = (exponent >> k) & 1 == 1
    multiplied = two_multiply(power, squared)
    power = tuple(
      jnp.where(odd, *pair) for pair in zip(multiplied, power, strict=True)
    )
    return power, two_multiply(squared, squared)

  initial = ((ones, 0 * ones), tuple(half * ones for half in base))
  # Stops at the highest bit of the largest exponent, which is usually 1.
  _, power = jax.lax.while_loop(
    lambda carry: jnp.any(exponent >> carry[0] > 0),
    lambda carry: (carry[0] + 1, apply_bit(*carry)),
    (0, initial),
  )
  return power[0]


def two_float(values: ArrayLike) -> TwoFloat:
  """Returns numbers as two-float; float64 host arrays keep about 45 bits."""
  if isinstance(values, jax.Array):
    values = values.astype(jnp.float32)
    return values, jnp.zeros_like(values)
  values = np.asarray(values, np.float64)
  high = values.astype(np.float32)
  return jnp.asarray(high), jnp.asarray((values - high).astype(np.float32))


def keys32(ids: ArrayLike) -> Int[Array, 'R ...']:
  """Returns ids as int32 [R], or wide ids as their words, int32 [R, K].

  Args:
    ids: see `ids32`. Pass hashes as uint32 or uint64 [R, K]: their words are
      only reinterpreted here, and compared word by word under jit.
  """
  if not isinstance(ids, jax.Array):
    array = np.asarray(ids)
    if array.ndim > 1 and array.dtype.kind in 'iu':
      contiguous = np.ascontiguousarray(array, array.dtype)
      return jnp.asarray(contiguous.view(np.int32))
  elif ids.ndim > 1:
    return jax.lax.bitcast_convert_type(ids, jnp.int32)
  return ids32(ids)


def ids32(ids: ArrayLike, *, padding: bool = False) -> Int[Array, ' R']:
  """Returns int32 ids that are equal exactly where the given ids are.

  Args:
    ids: integers [R], of any width outside jit. Wide integers are replaced by
      dense ids, since jax would silently truncate them to their low half. With
      shape [R, K], each row of integers is one id.
    padding: whether -1, or a row of -1, marks padding and becomes -1.
  """
  if isinstance(ids, jax.core.Tracer):
    return ids.astype(jnp.int32)
  array = np.asarray(ids)
  if array.dtype.kind == 'f':
    # numpy returns floats for a list that no integer type can hold.
    array = np.asarray(ids, object)
  if array.ndim == 1 and np.can_cast(array.dtype, np.int32):
    return jnp.asarray(array.astype(np.int32))
  axis = 0 if array.ndim > 1 else None
  _, dense = np.unique(array, axis=axis, return_inverse=True)
  if padding:
    is_padding = np.all(array == -1, axis=tuple(range(1, array.ndim)))
    dense = np.where(is_padding, -1, dense)
  return jnp.asarray(dense.astype(np.int32))
