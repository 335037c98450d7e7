"""Tests of attention: all implementations, and sequences of several texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import attention, block_attention


def _arrays(length: int, *, rows=2, heads=4, kv_heads=2, size=64):
  rng = np.random.default_rng(length)
  return tuple(
    jnp.asarray(rng.normal(size=(rows, length, count, size)), jnp.float32)
    for count in (heads, kv_heads, kv_heads)
  )


def _attend(*arrays, **options):
  """Compiles attention once, instead of each of its operations."""
  options = {'interpret': True} | options
  attend = functools.partial(attention.self_attention, **options)
  return jax.jit(attend)(*arrays)


def _reference(q, k, v, seen):
  """Returns attention computed head by head in float64; seen is [B, L, L]."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros_like(q)
  for h in range(q.shape[2]):
    kv = h // (q.shape[2] // k.shape[2])
    scores = np.einsum('bie,bje->bij', q[:, :, h], k[:, :, kv])
    scores = np.where(seen, scores / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out[:, :, h] = np.einsum('bij,bje->bie', weights, v[:, :, kv])
  return out


@pytest.mark.parametrize('length', [5, 33, 130])
@pytest.mark.parametrize('implementation', ['xla', 'splash'])
def test_attention_is_causal(implementation, length):
  q, k, v = _arrays(length)
  output = _attend(q, k, v, implementation=implementation)
  seen = np.tril(np.ones((length, length), bool))[None]
  np.testing.assert_allclose(output, _reference(q, k, v, seen), atol=2e-6)


def _fake_cudnn(monkeypatch):
  """Replaces cuDNN by JAX's own implementation; returns the list of calls."""
  original, requested = jax.nn.dot_product_attention, []

  def fake_attention(*args, implementation, **kwargs):
    requested.append(implementation)
    return original(*args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', fake_attention)
  return requested


@pytest.mark.parametrize('length', [5, 130])
def test_cudnn_attention_is_causal(monkeypatch, length):
  """Runs cuDNN on a GPU, and JAX's own implementation elsewhere."""
  on_gpu = jax.default_backend() == 'gpu'
  requested = [] if on_gpu else _fake_cudnn(monkeypatch)
  dtype = jnp.bfloat16 if on_gpu else jnp.float32
  q, k, v = (x.astype(dtype) for x in _arrays(length))
  output = attention.self_attention(q, k, v, implementation='cudnn')
  seen = np.tril(np.ones((length, length), bool))[None]
  np.testing.assert_allclose(
    np.asarray(output, np.float32),
    _reference(q, k, v, seen),
    atol=2e-2 if on_gpu else 2e-6,
  )
  assert on_gpu or requested == ['cudnn']


@pytest.mark.parametrize('length', [32, 33])
def test_gradients_by_cudnn_are_lowered_without_a_gpu(monkeypatch, length):
  cudnn = 'jax._src.cudnn.fused_attention_stablehlo'
  monkeypatch.setattr(f'{cudnn}.check_cudnn_version', lambda: 91100)
  q, k, v = (x.astype(jnp.bfloat16) for x in _arrays(length))
  segments, _ = _segments(length, tree=False)

  def loss(q, k, v):
    output = attention.self_attention(q, k, v, segments, implementation='cudnn')
    return output.astype(jnp.float32).sum()

  gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, v)
  text = gradients.lower(lowering_platforms=('cuda',)).as_text()
  assert '__cudnn$fmhaScaleBiasSoftmaxBackward' in text


def test_gradients_of_the_kernel_equal_those_of_xla():
  arrays = _arrays(40, rows=1)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape))

  def gradients(implementation):
    def loss(q, k, v):
      output = attention.self_attention(
        q, k, v, implementation=implementation, interpret=True
      )
      return jnp.sum(output * weights)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

  for a, b in zip(gradients('splash'), gradients('xla'), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_kernel_runs_on_each_device_of_a_mesh():
  arrays = _arrays(16, rows=8)
  alone = attention.self_attention(*arrays)
  mesh = mesh_lib.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    output = jax.jit(
      lambda *x: attention.self_attention(
        *x, implementation='splash', interpret=True
      )
    )(*jax.device_put(arrays, mesh_lib.batch_sharding(mesh)))
  np.testing.assert_allclose(output, alone, atol=2e-6)


def _segments(length, *, tree):
  """Returns sequences of texts, and which tokens attend to which, by hand."""
  third = length // 3
  ends = np.full((2, length), length, np.int32)
  seen = np.tril(np.ones((2, length, length), bool))
  # Two texts, or a prompt with two completions.
  ends[0, : 2 * third] = 2 * third
  seen[0, 2 * third :, : 2 * third] = False
  if tree:
    ends[0, :third] = length
    seen[0, 2 * third :, :third] = True
  # A short text, and padding.
  ends[1, :third] = third
  seen[1, third:, :third] = False
  return attention.Segments(jnp.asarray(ends), tree=tree), seen


# The longer sequences exceed a block of queries, so that texts start inside it.
@pytest.mark.parametrize('length', [11, 90, 300])
@pytest.mark.parametrize('tree', [False, True])
@pytest.mark.parametrize('implementation', attention.IMPLEMENTATIONS)
def test_texts_attend_to_themselves(monkeypatch, implementation, tree, length):
  if jax.default_backend() != 'gpu':
    _fake_cudnn(monkeypatch)
  arrays = _arrays(length)
  segments, seen = _segments(length, tree=tree)
  output = _attend(*arrays, segments, implementation=implementation)
  np.testing.assert_allclose(output, _reference(*arrays, seen), atol=2e-6)


@pytest.mark.parametrize('implementation', attention.IMPLEMENTATIONS)
def test_texts_attend_to_a_window(monkeypatch, implementation):
  if jax.default_backend() != 'gpu':
    _fake_cudnn(monkeypatch)
  length, window = 150, 40
  arrays, index = _arrays(length), np.arange(length)
  segments, seen = _segments(length, tree=False)
  seen &= index[:, None] - index < window
  segments = attention.limit_to_window(segments, window, (2, length))
  output = _attend(*arrays, segments, implementation=implementation)
  np.testing.assert_allclose(output, _reference(*arrays, seen), atol=2e-6)


def test_blocks_without_pairs_are_skipped(monkeypatch):
  monkeypatch.setattr(block_attention, '_BLOCK', 2)
  # Texts of 3 and 2 tokens; a prompt of 2 with completions of 2 and 4.
  ends = jnp.array([[3, 3, 3, 5, 5, 6, 7, 8], [8, 8, 4, 4, 8, 8, 8, 8]])
  plan = block_attention._make_plan(ends, 4)
  np.testing.assert_array_equal(plan.count, [1, 2, 2, 1, 1, 2, 2, 3])
  seen = [list(k[:n]) for k, n in zip(plan.keys, plan.count, strict=True)]
  # The blocks of the second sequence are 4 to 7; its completions do not attend
  # to each other.
  assert seen == [[0], [0, 1], [1, 2], [3], [4], [4, 5], [4, 6], [4, 6, 7]]


@pytest.mark.parametrize(
  'tree', [pytest.param(False, marks=pytest.mark.slow), True]
)
@pytest.mark.parametrize(
  'implementation',
  [pytest.param('splash', marks=pytest.mark.slow), 'blockwise'],
)
def test_gradients_with_several_texts(implementation, tree):
  arrays = _arrays(140)
  segments, _ = _segments(140, tree=tree)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape))

  def gradients(implementation):
    def loss(q, k, v):
      output = attention.self_attention(
        q, k, v, segments, implementation=implementation, interpret=True
      )
      return jnp.sum(output * weights)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

  for a, b in zip(gradients(implementation), gradients('xla'), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_kernels_of_accelerators_need_bfloat16():
  assert attention.default_implementation('tpu', 'bfloat16', 128) == 'splash'
  assert attention.default_implementation('tpu', 'float32', 128) == 'xla'
  assert attention.default_implementation('gpu', 'float32', 128) == 'xla'
