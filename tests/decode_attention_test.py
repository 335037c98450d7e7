"""Tests of attention over a cache: kernels, int8, and independence of rows."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import sampler
from gigpo_jax.models import decode_attention, kv_cache, parameters, qwen
from gigpo_jax.tools import topology

CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  rope_theta=1e4,
  dtype='float32',
  remat='none',
)
# Positions of three rows: one slot, a part and a half, all slots.
POSITIONS = np.array([[0], [383], [511]])


def _inputs(*, dtype='float32', cache='model', heads=6, size=128, length=512):
  """Returns queries and a stack of two layers, of three rows."""
  config = dataclasses.replace(
    CONFIG,
    num_heads=heads,
    head_dim=size,
    dtype=dtype,
    cache=cache,
    max_split=0,
  )
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (2, 3, length, config.num_kv_heads, size)
  q, k, v = (
    jax.random.normal(key, s).astype(dtype)
    for key, s in zip(keys, ((3, 1, heads, size), shape, shape), strict=True)
  )
  return q, kv_cache.from_tokens(config, k, v)


def _attend(q, stack, positions=POSITIONS, **kwargs) -> np.ndarray:
  run = jax.jit(functools.partial(decode_attention.attend, **kwargs))
  output = run(q, stack, jnp.int32(1), jnp.asarray(positions))
  assert output.dtype == q.dtype
  return np.asarray(output, np.float32)


def _attend_by(kernel, *args, **kwargs) -> np.ndarray:
  """Interprets a kernel."""
  if kernel == 'triton':
    return _attend(*args, implementation=kernel, interpret=True, **kwargs)
  with pltpu.force_tpu_interpret_mode():
    return _attend(*args, implementation=kernel, **kwargs)


@pytest.mark.parametrize(
  ('kernel', 'options'),
  [
    ('triton', {}),
    ('triton', {'heads': 2, 'size': 64}),
    # More queries of a key/value head than the smallest product has.
    ('triton', {'heads': 34, 'size': 16}),
    ('triton', {'dtype': 'bfloat16'}),
    ('triton', {'cache': 'int8'}),
    ('paged', {'dtype': 'bfloat16'}),
    ('paged', {'dtype': 'bfloat16', 'heads': 16}),
  ],
  ids=str,
)
def test_kernels_equal_the_plain_implementation(kernel, options):
  q, stack = _inputs(**options)
  expected = _attend(q, stack)
  # bfloat16 rounds by up to 2^-8 of a value.
  limit = 2e-6 if q.dtype == jnp.float32 else np.abs(expected).max() / 128
  np.testing.assert_allclose(
    _attend_by(kernel, q, stack), expected, rtol=0, atol=limit
  )


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'size': 16, 'cache': 'int8'},
    {'size': 16, 'dtype': 'bfloat16'},
    # More queries of a key/value head than the kernel keeps.
    {'size': 16, 'heads': 34},
  ],
  ids=str,
)
@pytest.mark.parametrize('part', [4096, 128])
def test_a_kernel_equals_the_plain_implementation_for_drafts(
  monkeypatch, options, part
):
  monkeypatch.setattr(decode_attention, '_PART', part)
  q, stack = _inputs(**options)
  queries = jnp.concatenate([q, -q, q / 2, q + 1, 2 * q], axis=1)
  # The queries of the second row are in two parts. The last ones of the third
  # are beyond the cache.
  first = np.array([[0], [126], [509]])
  positions = first + np.arange(5)
  expected = _attend(queries, stack, positions)
  output = _attend_by('triton', queries, stack, positions)
  limit = np.abs(expected).max() / 128 if q.dtype == jnp.bfloat16 else 2e-6
  for row, used in enumerate((5, 5, 3)):
    np.testing.assert_allclose(
      output[row, :used], expected[row, :used], rtol=0, atol=limit
    )
  assert np.isfinite(output).all()
  # A query's result is the same, bit for bit, whatever the others are.
  others = _attend_by('triton', queries.at[:, 1:].set(3), stack, positions)
  np.testing.assert_array_equal(output[:, 0], others[:, 0])


def test_plain_attention_by_hand():
  q, stack = _inputs(size=16, length=40)
  k, v = (np.asarray(stack[name], np.float64)[1, 1] for name in 'kv')
  # Query head 4 belongs to key/value head 1; position 6 is the seventh slot.
  for window, first in ((0, 0), (3, 4)):
    scores = np.asarray(q, np.float64)[1, 0, 4] @ k[1][:, first:7] / 4
    weights = np.exp(scores - scores.max())
    expected = weights @ v[1][first:7] / weights.sum()
    output = _attend(q, stack, [[0], [6], [39]], window=window)
    np.testing.assert_allclose(output[1, 0, 4], expected, atol=2e-6)


@pytest.mark.parametrize('window', [0, 3])
def test_each_query_attends_up_to_its_own_position(window):
  q, stack = _inputs(size=16, length=64)
  queries = np.concatenate([q, -q], axis=1)
  positions = np.array([[0, 9], [5, 6], [63, 40]])
  outputs = _attend(queries, stack, positions, window=window)
  for n in (0, 1):
    each = slice(n, n + 1)
    alone = _attend(queries[:, each], stack, positions[:, each], window=window)
    np.testing.assert_allclose(outputs[:, each], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize('kernel', ['xla', 'triton'])
def test_products_of_bfloat16_are_summed_in_float32(kernel):
  q, stack = _inputs(size=16, dtype='bfloat16')
  # Scores of 64.25, 64, 64, ..; in bfloat16, the product 257 would be 256.
  k = jnp.full_like(stack['k'], 16).at[..., 0, 0].set(17)
  v = jnp.zeros_like(stack['v']).at[..., 0, :].set(1)
  positions = [[1], [1], [256]]
  output = _attend_by(kernel, jnp.ones_like(q), {'k': k, 'v': v}, positions)
  first = np.exp(0.25)
  np.testing.assert_allclose(output[0], first / (first + 1), rtol=2**-8)
  # The mean of 257 ones; in bfloat16, their sum would be 256.
  stack = {'k': jnp.zeros_like(k), 'v': jnp.ones_like(v)}
  output = _attend_by(kernel, q, stack, positions)
  np.testing.assert_array_equal(output, np.ones_like(output))


@pytest.mark.parametrize('kernel', ['xla', 'triton'])
def test_attention_with_low_scores_only(kernel):
  q, stack = _inputs(size=16)
  # All scores are -400, and e^-400 would be 0.
  stack |= {'k': jnp.full_like(stack['k'], -100)}
  output = _attend_by(kernel, jnp.ones_like(q), stack, [[0], [1], [2]])
  expected = np.asarray(stack['v'])[1, 2, :, :3].mean(axis=1)
  np.testing.assert_allclose(output[2, 0, ::3], expected, atol=2e-6)


def test_a_kernels_row_depends_neither_on_other_rows_nor_on_the_length():
  q, stack = _inputs(size=16)
  short = {
    'k': stack['k'][..., :448],
    'v': stack['v'][:, :, :, :448] + 0,
  }
  full = _attend_by('triton', q, stack)
  other = _attend_by('triton', q, short, positions=[[447], [383], [2]])
  np.testing.assert_array_equal(full[1], other[1])
  assert np.abs(full[0] - other[0]).max() > 0.1


@pytest.mark.parametrize('kernel', ['triton', 'paged'])
def test_an_idle_row_beyond_a_shorter_cache_reads_only_the_cache(kernel):
  # 320 positions: one of the kernel's parts is incomplete.
  dtype = 'bfloat16' if kernel == 'paged' else 'float32'
  q, stack = _inputs(length=320, dtype=dtype)
  beyond = np.array([[0], [319], [500]])
  output = _attend_by(kernel, q, stack, beyond)
  expected = _attend(q, stack, np.minimum(beyond, 319))
  np.testing.assert_allclose(output, expected, atol=1e-2)


@pytest.mark.parametrize(
  ('length', 'window', 'problem'),
  [
    (64, 3, 'triton does not support a window'),
    (72, 0, 'triton does not support 72 slots; must be 128'),
  ],
)
def test_caches_that_a_kernel_cannot_read_are_refused(length, window, problem):
  q, stack = _inputs(size=16, length=length)
  with pytest.raises(ValueError, match=problem):
    _attend_by('triton', q, stack, [[0], [1], [2]], window=window)


def test_int8_keys_and_values_are_rounded_by_half_a_step():
  _, exact = _inputs(size=16, length=40)
  _, rounded = _inputs(size=16, length=40, cache='int8')
  for name, axis in (('k', 3), ('v', 4)):
    scale = np.expand_dims(rounded[name + '_scale'], axis)
    assert rounded[name].dtype == jnp.int8
    assert np.abs(rounded[name]).max() == 127
    error = np.abs(rounded[name] * scale - exact[name])
    assert (error <= 0.5001 * scale).all()
    largest = np.abs(exact[name]).max(axis, keepdims=True)
    np.testing.assert_allclose(127 * scale, largest, rtol=1e-6)


@pytest.mark.parametrize('cache', kv_cache.TYPES)
def test_heads_are_written_one_by_one(cache):
  _, stack = _inputs(size=16, length=8, cache=cache)
  tokens = jax.random.normal(jax.random.key(3), (2, 3, 2, 2, 16))
  slots = jnp.array([[2, 3], [7, 8], [9, 10]])
  args = (stack, jnp.int32(1), slots, *tokens)
  written = kv_cache.write(*args)
  by_head = kv_cache.write(*args, by_head=True)
  jax.tree.map(np.testing.assert_array_equal, by_head, written)
  changed = np.argwhere(np.asarray(written['k'] != stack['k']).any((2, 3)))
  # (layer, row, slot); slots from 8 on do not exist.
  np.testing.assert_array_equal(changed, [[1, 0, 2], [1, 0, 3], [1, 1, 7]])


def _sampler(mesh=None, **options) -> sampler.Sampler:
  return sampler.Sampler(
    dataclasses.replace(CONFIG, **options),
    mesh or mesh_lib.make_mesh(1, -1, 1),
    seed=0,
    prompt_buckets=(16,),
    batch_buckets=(8,),
    max_completion_tokens=8,
    stop_ids=(7,),
    vocab_size=30,
  )


def _requests(**sampling) -> list[sampler.Request]:
  rng = np.random.default_rng(0)
  return [
    sampler.Request(
      rng.integers(8, 30, 5 + i % 9).astype(np.int32),
      (0, 1, 2, i, 3),
      sampler.Sampling(**sampling),
    )
    for i in range(11)
  ]


def test_writing_bfloat16_converts_nothing():
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  cache, rows = kv_cache.new(config, 6, 20), kv_cache.new(config, 2, 12)
  insert = jax.jit(kv_cache.insert).lower(cache, rows, jnp.array([4, 9]))
  positions = jnp.zeros((6, 1), jnp.int32)
  tokens = jnp.zeros((6, 1, config.num_kv_heads, config.head_dim), jnp.bfloat16)
  args = cache[0], jnp.int32(0), positions, tokens, tokens
  write = jax.jit(kv_cache.write).lower(*args)
  for lowered in (insert, write):
    assert 'f32' not in lowered.compile().as_text()


@pytest.fixture(name='params', scope='module')
def fixture_params():
  params = reference.init(CONFIG, jax.random.key(0))
  return params | {'embed': 12 * params['embed']}


@pytest.mark.parametrize(
  'options', [{'cache': 'int8'}, {'decode_attention': 'triton'}], ids=str
)
@pytest.mark.slow
def test_other_requests_and_a_mesh_do_not_change_tokens(
  monkeypatch, params, options
):
  interpreted = functools.partial(decode_attention.attend, interpret=True)
  monkeypatch.setattr(decode_attention, 'attend', interpreted)
  requests, engine = _requests(), _sampler(**options)
  together = engine.generate(params, requests)
  alone = [engine.generate(params, [request])[0] for request in requests[:4]]
  mesh = mesh_lib.make_mesh(2, 2, 2)
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, parameters.logical_axes(CONFIG))
  )
  sharded = _sampler(mesh, **options).generate(placed, requests)
  for a, b in (
    *zip(together, alone, strict=False),
    *zip(together, sharded, strict=True),
  ):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


def test_an_int8_cache_is_smaller_and_close(params):
  requests = _requests(temperature=0.0)
  exact, rounded = _sampler(), _sampler(cache='int8')
  pairs = list(
    zip(
      exact.generate(params, requests),
      rounded.generate(params, requests),
      strict=True,
    )
  )
  differences = [abs(a.log_probs[0] - b.log_probs[0]) for a, b in pairs]
  assert 0 < max(differences) < 0.02
  sizes = [
    sum(x.nbytes for x in jax.tree.leaves(engine._cache.slots[0]))
    for engine in (exact, rounded)
  ]
  # Per head and token: 16 float32, against 16 int8 and a float32.
  assert sizes[1] * 64 == sizes[0] * 20


@pytest.mark.parametrize('queries', [1, 5])
@pytest.mark.parametrize('cache', kv_cache.TYPES)
def test_the_gpu_kernel_is_lowered_without_a_gpu(cache, queries):
  q, stack = _inputs(dtype='bfloat16', cache=cache)
  q = jnp.repeat(q, queries, axis=1)
  run = functools.partial(decode_attention.attend, implementation='triton')
  device = jax.sharding.AbstractDevice('NVIDIA H100 80GB HBM3', None, 'gpu')
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    lowered = (
      jax.jit(run)
      .trace(q, stack, jnp.int32(1), POSITIONS + jnp.arange(queries))
      .lower(lowering_platforms=('cuda',))
    )
  assert lowered.as_text().count('@__gpu$xla.gpu.triton(') == 1


@pytest.mark.slow
@pytest.mark.skipif(
  not importlib.util.find_spec('libtpu'), reason="needs pip install '.[tpu]'"
)
@pytest.mark.parametrize('layers', [2, 12], ids=['unstacked', 'scanned'])
@pytest.mark.parametrize('heads', [4, 8])
def test_the_tpu_kernel_uses_the_cache_in_place(monkeypatch, layers, heads):
  for name, value in topology.ENVIRON.items():
    monkeypatch.setenv(name, value)
  devices = topologies.get_topology_desc('v5e:2x2', platform='tpu').devices
  model = dataclasses.replace(
    CONFIG,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=heads // 2,
    head_dim=128,
    dtype='bfloat16',
    decode_attention='paged',
  )
  mesh = mesh_lib.make_mesh(1, 2, 2, devices=devices)
  engine = sampler.Sampler(
    model,
    mesh,
    seed=0,
    prompt_buckets=(768,),
    batch_buckets=(64,),
    max_completion_tokens=256,
    stop_ids=(7,),
    vocab_size=30,
  )
  shapes = jax.eval_shape(lambda: parameters.init(model, jax.random.key(0)))
  params = mesh_lib.with_shardings(
    shapes, mesh_lib.shardings(mesh, parameters.logical_axes(model))
  )
  memory = engine.lower(params, {})['decode'].compile().memory_analysis()
  cache = 2 * layers * 64 * 1024 * (heads // 2) * 128 * 2 // mesh.size
  assert memory.argument_size_in_bytes > cache
  assert memory.temp_size_in_bytes < cache / 8


def test_parts_of_a_long_cache_add_up(monkeypatch):
  monkeypatch.setattr(decode_attention, '_PART', 128)
  q, stack = _inputs(size=16)
  # Rows with one, three and four parts of the cache.
  expected = _attend(q, stack)
  np.testing.assert_allclose(
    _attend_by('triton', q, stack), expected, rtol=0, atol=2e-6
  )


def test_parts_of_bfloat16_are_rounded_once(monkeypatch):
  monkeypatch.setattr(decode_attention, '_PART', 256)
  q, stack = _inputs(size=16, dtype='bfloat16')
  k, v = (jnp.zeros_like(stack[name]) for name in 'kv')
  # The parts have the means 1 + 2^-8 and 1 + 2^-7, together 1 + 3/4 * 2^-7. If
  # the first were rounded to 1, the result would be 1, too.
  v = v.at[..., :128, :].set(1).at[..., 128:, :].set(1 + 2**-7)
  output = _attend_by('triton', q, {'k': k, 'v': v}, [[511]] * 3)
  np.testing.assert_array_equal(output, np.full_like(output, 1 + 2**-7))


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (('gpu', 'bfloat16', 128), 'triton'),
    (('gpu', 'bfloat16', 128, 7.5), 'xla'),
    (('gpu', 'bfloat16', 80), 'xla'),
    (('gpu', 'bfloat16', 128, 9.0, 4096), 'xla'),
    (('gpu', 'float32', 128), 'xla'),
    (('tpu', 'bfloat16', 128), 'xla'),
    (('cpu', 'bfloat16', 128), 'xla'),
  ],
)
def test_the_kernel_for_gpus_is_the_default_where_it_applies(
  arguments, expected
):
  assert decode_attention.default_implementation(*arguments) == expected


@pytest.mark.parametrize(
  ('kernel', 'refused', 'accepted'),
  [('xla', (), (8, 80)), ('triton', (8, 80), (16,)), ('paged', (64,), (128,))],
)
def test_kernels_accept_some_sizes_of_heads(kernel, refused, accepted):
  assert all(decode_attention.head_problem(kernel, n) for n in refused)
  assert not any(decode_attention.head_problem(kernel, n) for n in accepted)
