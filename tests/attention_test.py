"""Attention in all its implementations, and a row of several completions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import attention


def _arrays(length: int, *, rows=2, heads=4, kv_heads=2, size=64):
  rng = np.random.default_rng(length)
  return tuple(
    jnp.asarray(rng.normal(size=(rows, length, number, size)), jnp.float32)
    for number in (heads, kv_heads, kv_heads)
  )


def _slow(q, k, v, seen):
  """Attention of each head by itself, in float64; seen is [B, L, L]."""
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
def test_a_token_sees_those_before_it(implementation, length):
  q, k, v = _arrays(length)
  found = attention.among(
    q, k, v, implementation=implementation, interpret=True
  )
  seen = np.tril(np.ones((length, length), bool))[None]
  np.testing.assert_allclose(found, _slow(q, k, v, seen), atol=2e-6)


@pytest.mark.parametrize('length', [5, 130])
def test_cudnn_is_asked_for_the_same(monkeypatch, length):
  """On a GPU by itself; elsewhere jax computes what cuDNN is asked for."""
  on_gpu = jax.default_backend() == 'gpu'
  original, asked = jax.nn.dot_product_attention, []

  def instead(*args, implementation, **kwargs):
    asked.append(implementation)
    return original(
      *args, implementation='cudnn' if on_gpu else 'xla', **kwargs
    )

  monkeypatch.setattr(jax.nn, 'dot_product_attention', instead)
  dtype = jnp.bfloat16 if on_gpu else jnp.float32
  q, k, v = (x.astype(dtype) for x in _arrays(length))
  found = attention.among(q, k, v, implementation='cudnn')
  seen = np.tril(np.ones((length, length), bool))[None]
  np.testing.assert_allclose(
    np.asarray(found, np.float32),
    _slow(q, k, v, seen),
    atol=2e-2 if on_gpu else 2e-6,
  )
  assert asked == ['cudnn']


def test_gradients_of_the_kernel_are_those_of_xla():
  arrays = _arrays(40, rows=1)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape))

  def gradients(implementation):
    def loss(q, k, v):
      found = attention.among(
        q, k, v, implementation=implementation, interpret=True
      )
      return jnp.sum(found * weights)

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

  for a, b in zip(gradients('splash'), gradients('xla'), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_kernel_runs_on_each_device_of_a_mesh():
  arrays = _arrays(16, rows=8)
  alone = attention.among(*arrays)
  mesh = mesh_lib.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    found = jax.jit(
      lambda *x: attention.among(*x, implementation='splash', interpret=True)
    )(*jax.device_put(arrays, mesh_lib.batch_sharding(mesh)))
  np.testing.assert_allclose(found, alone, atol=2e-6)


# Longer than a block of queries, so that completions begin within one.
@pytest.mark.parametrize('length', [11, 90])
def test_completions_see_their_prompt_and_themselves(length):
  q, k, v = _arrays(length)
  third = length // 3
  branches = np.zeros((2, length), np.int32)
  branches[0, third:], branches[0, 2 * third :] = 1, 2
  branches[1, third + 1 :] = 1
  causal = np.tril(np.ones((length, length), bool))
  same = branches[:, None] == branches[:, :, None]
  seen = causal & (same | (branches[:, None] == 0))
  found = attention.among(q, k, v, jnp.asarray(branches))
  np.testing.assert_allclose(found, _slow(q, k, v, seen), atol=2e-6)
