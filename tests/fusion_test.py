"""Tests of fused matrices: columns, logits, shards and number of products."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import fusion, kv_cache, lora, parameters, qwen

CONFIG = qwen.QwenConfig(
  vocab_size=48,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  dtype='float32',
  remat='none',
)
SHAPES = {
  'qwen2': {},
  'qwen3': {'qkv_bias': False, 'qk_norm': True},
  'experts': {'num_experts': 2, 'experts_per_token': 1},
  'one key/value head': {'num_kv_heads': 1},
  'adapters': {'adapters': lora.Lora(3, 6.0, ('q', 'v', 'up', 'down'))},
}


def _params(config: qwen.QwenConfig) -> dict:
  """Returns random parameters of which none is zero or one."""
  leaves, treedef = jax.tree.flatten(
    parameters.shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  rng = np.random.default_rng(0)
  return jax.tree.unflatten(
    treedef,
    [jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for shape in leaves],
  )


def test_each_key_value_head_has_its_queries_keys_and_values():
  config = dataclasses.replace(CONFIG, head_dim=1, fused=2)
  # One layer, one input; the four query heads are 0 to 3.
  parts = [
    np.array(columns).reshape(1, 1, -1, 1)
    for columns in ((0, 1, 2, 3), (10, 11), (20, 21))
  ]
  fused = fusion.join_arrays(config, 'qkv', parts)
  expected = [0, 1, 10, 20, 2, 3, 11, 21]
  np.testing.assert_array_equal(fused[0, 0], expected)
  for part, split in zip(
    parts, fusion.split(config, 'qkv', fused), strict=True
  ):
    np.testing.assert_array_equal(split, part)


@pytest.mark.parametrize(
  'name',
  [
    'experts',
    pytest.param('adapters', marks=pytest.mark.slow),
    pytest.param('qwen2', marks=pytest.mark.slow),
    pytest.param('qwen3', marks=pytest.mark.slow),
    pytest.param('one key/value head', marks=pytest.mark.slow),
  ],
)
def test_fused_parameters_decode_the_same_logits(name):
  config = dataclasses.replace(CONFIG, **SHAPES[name])
  fused = dataclasses.replace(config, fused=config.num_kv_heads)
  params = _params(config)
  tokens = np.random.default_rng(0).integers(0, 48, (3, 7), np.int32)
  logits = []
  for c, p in ((config, params), (fused, parameters.fuse(fused, params))):
    assert jax.tree.map(np.shape, p) == parameters.shapes(c)
    unstacked = parameters.unstack_layers(c, p)
    cache = kv_cache.resize(reference.prefill(c, unstacked, tokens), 3, 9)
    decode = jax.jit(functools.partial(reference.decode, c))
    decoded, _ = decode(unstacked, cache, tokens[:, -1], np.full(3, 6))
    logits.append(decoded)
  np.testing.assert_allclose(
    logits[1], logits[0], rtol=0, atol=2e-6 * np.abs(logits[0]).max()
  )
  expected = reference.logits(
    config, params, reference.hidden_states(config, params, tokens)
  )[:, -1]
  np.testing.assert_allclose(
    logits[1], expected, rtol=0, atol=2e-5 * np.abs(expected).max()
  )


def _decode_text(config: qwen.QwenConfig, mesh: jax.sharding.Mesh) -> str:
  """Returns the optimized program of a decoding step of four slots."""
  params = reference.init(CONFIG, jax.random.key(0))
  if config.fused:
    params = parameters.fuse(config, params)
  axes = parameters.unstack_axes(config, parameters.logical_axes(config))
  cache = kv_cache.new(config, 4, 12)
  shardings = (
    mesh_lib.shardings(mesh, axes),
    jax.tree.map(lambda _: mesh_lib.cache_sharding(mesh), cache),
    mesh_lib.batch_sharding(mesh),
    mesh_lib.batch_sharding(mesh),
  )
  inputs = (
    parameters.unstack_layers(config, params),
    cache,
    jnp.zeros(4, jnp.int32),
    jnp.zeros(4, jnp.int32),
  )
  with jax.set_mesh(mesh):
    step = jax.jit(lambda *args: reference.decode(config, *args))
    placed = jax.device_put(inputs, shardings)
    return step.lower(*placed).compile().as_text()


def test_a_step_has_three_products_fewer_per_layer_and_no_more_collectives():
  config = dataclasses.replace(CONFIG, qkv_bias=True)
  mesh = mesh_lib.make_mesh(2, 2, 2)
  texts = [
    _decode_text(c, mesh)
    for c in (config, dataclasses.replace(config, fused=2))
  ]
  products, collectives = (
    [len(re.findall(pattern, text)) for text in texts]
    for pattern in (
      r' dot\(',
      r' (?:all-\w+|collective-permute|reduce-scatter)(?:-start)?\(',
    )
  )
  assert products[0] - products[1] == 3 * config.num_layers
  assert 0 < collectives[1] <= collectives[0]
