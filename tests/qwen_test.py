"""Tests of the decoder: parity with transformers, and internal consistency."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import (
  attention,
  head,
  huggingface,
  kv_cache,
  parameters,
  quantization,
  qwen,
  qwen_config,
  rotary,
)

TINY = qwen.QwenConfig(
  vocab_size=97,
  hidden_size=32,
  intermediate_size=48,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  dtype='float32',
  remat='none',
)


def _tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 97, (rows, length), np.int32)


def _params(config: qwen.QwenConfig, scale: float = 4.0) -> dict:
  """Returns random weights, large enough that attention is not uniform."""
  params = reference.init(config, jax.random.key(0))
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(
      scale * np.asarray(x) + 0.1 * rng.standard_normal(x.shape, np.float32)
    ),
    params,
  )


@pytest.fixture(name='torch')
def fixture_torch():
  return pytest.importorskip('torch', reason='parity needs PyTorch')


# A row of 80 tokens is five times the length "as trained".
YARN = {
  'rope_type': 'yarn',
  'factor': 5.0,
  'original_max_position_embeddings': 16,
}


def _reference(  # noqa: PLR0913
  torch,
  tied: bool,
  heads: int,
  kv_heads: int,
  seed: int,
  family: str = 'Qwen2',
  rope: dict | None = None,
):
  import transformers

  torch.manual_seed(seed)
  options = {'head_dim': 12} if family != 'Qwen2' else {}
  if family == 'Qwen3Moe':
    options |= {
      'num_experts': 6,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 20,
      'norm_topk_prob': tied,
    }
  if rope:
    options['rope_parameters'] = rope | {'rope_theta': 1e4}
  config = getattr(transformers, f'{family}Config')(
    **options,
    vocab_size=97,
    hidden_size=8 * heads,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=heads,
    num_key_value_heads=kv_heads,
    max_position_embeddings=128,
    tie_word_embeddings=tied,
    initializer_range=0.2,
  )
  model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim == 1:  # Biases start at zero, norms at one.
        parameter.add_(0.1 * torch.randn_like(parameter))
  return model


@pytest.mark.parametrize(
  ('tied', 'heads', 'kv_heads', 'family', 'rope'),
  [
    (True, 4, 2, 'Qwen2', None),
    pytest.param(False, 4, 4, 'Qwen2', None, marks=pytest.mark.slow),
    pytest.param(False, 7, 1, 'Qwen2', YARN, marks=pytest.mark.slow),
    pytest.param(True, 4, 2, 'Qwen3', None, marks=pytest.mark.slow),
    pytest.param(
      *(False, 5, 5, 'Qwen3', YARN | {'attention_factor': 0.7}),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      *(False, 4, 1, 'Qwen3', YARN | {'beta_fast': 8.0, 'beta_slow': 2.0}),
      marks=pytest.mark.slow,
    ),
    pytest.param(False, 4, 2, 'Qwen3Moe', None, marks=pytest.mark.slow),
    (True, 3, 1, 'Qwen3Moe', YARN),
  ],
)
def test_logits_agree_with_transformers(  # noqa: PLR0913
  torch, tmp_path, tied, heads, kv_heads, family, rope
):
  seed = heads
  model = _reference(torch, tied, heads, kv_heads, seed, family, rope)
  model.save_pretrained(tmp_path)
  config = huggingface.read_config(str(tmp_path), dtype='float32')
  mesh = mesh_lib.make_mesh(1, -1, 1)
  params = huggingface.load(str(tmp_path), config, mesh)
  params = jax.tree.map(jnp.asarray, jax.device_get(params))
  # Long enough that attention processes its queries in three blocks.
  tokens = _tokens(3, 80, seed)
  with torch.no_grad():
    expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  tolerance = 2e-5 * np.abs(expected).max()

  full = reference.logits(
    config,
    params,
    reference.hidden_states(config, params, tokens),
  )
  np.testing.assert_allclose(full, expected, rtol=0, atol=tolerance)

  # Prompts of different lengths, then step by step with the cache; the first
  # step processes a prompt's last token again.
  lengths = np.array([5, 9, 12], np.int32)
  params = parameters.unstack_layers(config, params)
  cache = reference.prefill(config, params, tokens[:, :12])
  cache = kv_cache.resize(cache, 3, 24)
  decode = jax.jit(lambda c, t, p: reference.decode(config, params, c, t, p))
  for step in range(12):
    position = lengths + step - 1
    logits, cache = decode(cache, tokens[np.arange(3), position], position)
    for row in range(3):
      np.testing.assert_allclose(
        logits[row],
        expected[row, lengths[row] + step - 1],
        rtol=0,
        atol=tolerance,
      )


@pytest.mark.parametrize(
  ('theta', 'length'), [(1e4, 40), (1e6, 32768), (2.0, 4096), (10.0, 128)]
)
def test_yarn_has_the_angles_of_transformers(torch, theta, length):
  from transformers import Qwen2Config, modeling_rope_utils

  rope = YARN | {
    'rope_theta': theta,
    'original_max_position_embeddings': length,
  }
  frequencies, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS['yarn'](
    Qwen2Config(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
  )
  config = dataclasses.replace(
    TINY, head_dim=16, rope_theta=theta, yarn=qwen.Yarn(5.0, length)
  )
  positions = np.arange(9)[None]
  cosines, _ = rotary.cos_and_sin(positions, config)
  expected = factor * np.cos(positions[..., None] * frequencies.numpy())
  np.testing.assert_allclose(cosines[:, :, 0, :8], expected, atol=1e-5)


@pytest.mark.parametrize(
  ('seed', 'family'),
  [
    pytest.param(0, 'Qwen2', marks=pytest.mark.slow),
    pytest.param(1, 'Qwen2', marks=pytest.mark.slow),
    (2, 'Qwen3'),
  ],
)
def test_greedy_sampling_equals_generate(torch, tmp_path, seed, family):
  model = _reference(torch, seed != 1, 4, 2, seed, family)
  model.save_pretrained(tmp_path)
  config = huggingface.read_config(str(tmp_path), dtype='float32')
  mesh = mesh_lib.make_mesh(1, -1, 1)
  params = huggingface.load(str(tmp_path), config, mesh)
  prompts = [_tokens(1, 4 + 3 * i, seed + i)[0] for i in range(4)]
  reference.assert_greedy_equals_generate(
    model, config, params, prompts, tokens=20, stop_id=3
  )


def test_logits_agree_with_stored_logits_of_transformers():
  """Checks parity without PyTorch, with stored logits of transformers.

  Each weight is a function of its index alone, so both libraries can generate
  the same weights; see `_sines`.
  """
  config = qwen.QwenConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    dtype='float32',
    remat='none',
  )
  params = _sines(config)
  tokens = np.array([[1, 5, 9, 2, 7]], np.int32)
  hidden = reference.hidden_states(config, params, tokens)
  last = reference.logits(config, params, hidden)[0, -1]
  np.testing.assert_allclose(last, GOLDEN_LOGITS, rtol=0, atol=2e-5)


def _sines(config: qwen.QwenConfig) -> dict:
  leaves, treedef = jax.tree.flatten(
    parameters.shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  arrays = [
    np.sin(np.arange(np.prod(shape)) * (0.37 + 0.11 * n))
    .reshape(shape)
    .astype(np.float32)
    for n, shape in enumerate(leaves)
  ]
  return jax.tree.unflatten(treedef, arrays)


# Printed by transformers 5.23 with torch 2.13 from the same weights.
GOLDEN_LOGITS = np.array(
  [
    *(-0.970596, 1.151841, -1.295207, 1.39598, -1.450845, 1.457999),
    *(-1.417206, 1.329808, -1.198678, 1.02813, -0.823771),
  ],
  np.float32,
)


def test_padding_and_other_rows_change_nothing():
  params, tokens = _params(TINY), _tokens(2, 16)
  batch = reference.hidden_states(TINY, params, tokens)
  changed = tokens.copy()
  changed[0, 10:] = 0
  alone = reference.hidden_states(TINY, params, changed[:1])
  np.testing.assert_allclose(batch[0, :10], alone[0, :10], atol=1e-5)


@pytest.mark.parametrize(('min_size', 'blocks'), [(1, 4), (3, 7), (64, 4)])
def test_blocks_of_queries_change_nothing(monkeypatch, min_size, blocks):
  params, tokens = _params(TINY), _tokens(2, 23)
  monkeypatch.setattr(attention, '_QUERY_BLOCKS', 1)
  expected = reference.hidden_states(TINY, params, tokens)
  monkeypatch.setattr(attention, '_QUERY_BLOCKS', blocks)
  monkeypatch.setattr(attention, '_MIN_QUERIES', min_size)
  hidden = reference.hidden_states(TINY, params, tokens)
  np.testing.assert_allclose(
    hidden, expected, rtol=0, atol=1e-5 * np.abs(expected).max()
  )


@pytest.mark.parametrize(
  ('dtype', 'unrolled'),
  [
    ('float32', 8),
    pytest.param('bfloat16', 0, marks=pytest.mark.slow),
    pytest.param('float32', 0, marks=pytest.mark.slow),
    pytest.param('bfloat16', 8, marks=pytest.mark.slow),
  ],
)
def test_decoding_equals_one_forward_pass(monkeypatch, unrolled, dtype):
  monkeypatch.setattr(qwen_config, 'MAX_UNROLLED', unrolled)
  config = dataclasses.replace(TINY, dtype=dtype, max_split=unrolled)
  params, tokens = _params(config, scale=2.0), _tokens(3, 20)
  hidden = reference.hidden_states(config, params, tokens)
  expected = np.asarray(reference.logits(config, params, hidden))
  # bfloat16 rounds by up to 2^-8 per operation; errors add up over layers.
  limit = (2e-5 if dtype == 'float32' else 0.05) * np.abs(expected).max()
  lengths = np.array([4, 9, 12], np.int32)
  params = parameters.unstack_layers(config, params)
  # The rows are in other slots of a longer cache, and one row is a copy.
  cache = kv_cache.insert(
    kv_cache.new(config, 6, 20),
    reference.prefill(config, params, tokens[:, :12]),
    jnp.array([4, 0, 5]),
  )
  rows = kv_cache.take_rows(cache, jnp.array([4, 9]))
  cache = kv_cache.insert(cache, rows, jnp.array([1, 9]))
  cache = tuple(
    {name: x[:, jnp.array([1, 0, 5])] for name, x in stack.items()}
    for stack in cache
  )
  assert len(cache) == (1 if unrolled == 0 else config.num_layers)
  step = jax.jit(lambda c, t, p: reference.decode(config, params, c, t, p))
  rows = np.arange(3)
  for n in range(8):
    at = lengths + n - 1
    logits, cache = step(cache, tokens[rows, at], at)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected[rows, at], rtol=0, atol=limit)


@pytest.mark.parametrize('chunk', [1, 5, 64])
def test_token_log_probs_equal_the_log_softmax_of_logits(chunk: int):
  params, tokens = _params(TINY), _tokens(2, 13)
  hidden = reference.hidden_states(TINY, params, tokens)
  targets = _tokens(2, 13, seed=5)
  log_probs, entropy = jax.jit(
    lambda *args: qwen.token_log_probs(
      TINY, *args, temperature=0.7, chunk=chunk
    )
  )(params, hidden, targets)
  logits = np.asarray(reference.logits(TINY, params, hidden), np.float64) / 0.7
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  chosen = np.take_along_axis(probs, targets[..., None], -1)[..., 0]
  np.testing.assert_allclose(log_probs, np.log(chosen), atol=1e-4)
  expected = -(probs * np.log(np.maximum(probs, 1e-300))).sum(-1)
  np.testing.assert_allclose(entropy, expected, atol=1e-4)


def test_completion_log_probs_use_the_hidden_state_before_each_token():
  params, tokens = _params(TINY), _tokens(2, 16)
  log_probs, _ = reference.completion_log_probs(
    TINY, params, tokens, np.array([4, 9]), max_completion=5
  )
  hidden = reference.hidden_states(TINY, params, tokens)
  full = jax.nn.log_softmax(reference.logits(TINY, params, hidden))
  for row, prompt in enumerate((4, 9)):
    for c in range(5):
      expected = full[row, prompt + c - 1, tokens[row, prompt + c]]
      np.testing.assert_allclose(log_probs[row, c], expected, atol=1e-5)


@pytest.mark.parametrize('layers', [1, 3, 9])
def test_hidden_states_of_selected_tokens_equal_the_full_output(layers):
  config = dataclasses.replace(TINY, num_layers=layers)
  params, tokens = _params(config), _tokens(4, 16)
  full = reference.hidden_states(config, params, tokens)
  # Two shards of two rows each; the first row of a shard has indices 0 to 15.
  at = np.array([[3, 15, 16, 31, 0], [20, 7, 7, 8, 30]])
  some = reference.hidden_states(config, params, tokens, at_SN=at)
  expected = [
    [full[2 * shard + index // 16, index % 16] for index in indices]
    for shard, indices in enumerate(at)
  ]
  np.testing.assert_allclose(some, np.array(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
  'remat', ['matrices', pytest.param('layer', marks=pytest.mark.slow)]
)
def test_remat_changes_nothing(remat):
  params, tokens = _params(TINY), _tokens(2, 12)

  def loss(config, params):
    log_probs, _ = reference.completion_log_probs(
      config,
      params,
      tokens,
      np.array([4, 6]),
      max_completion=5,
    )
    return log_probs.sum()

  plain = jax.jit(jax.grad(lambda p: loss(TINY, p)))(params)
  config = dataclasses.replace(TINY, remat=remat)
  rematerialized = jax.jit(jax.grad(lambda p: loss(config, p)))(params)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4),
    plain,
    rematerialized,
  )


EXPERTS = dataclasses.replace(
  TINY,
  num_experts=4,
  experts_per_token=2,
  intermediate_size=16,
  qkv_bias=False,
  qk_norm=True,
)


@pytest.mark.parametrize(
  ('shape', 'sizes'),
  [
    pytest.param(TINY, {'data': 8}, marks=pytest.mark.slow),
    pytest.param(TINY, {'fsdp': 8}, marks=pytest.mark.slow),
    (TINY, {'data': 2, 'fsdp': 2, 'tensor': 2}),
    pytest.param(TINY, {'fsdp': 4, 'tensor': 2}, marks=pytest.mark.slow),
    (TINY, {'fsdp': 2, 'sequence': 2, 'tensor': 2}),
    pytest.param(EXPERTS, {'fsdp': 8}, marks=pytest.mark.slow),
    (EXPERTS, {'fsdp': 2, 'expert': 2, 'tensor': 2}),
    (EXPERTS, {'expert': 4, 'sequence': 2}),
  ],
  ids=lambda x: str(x) if isinstance(x, dict) else str(x.num_experts),
)
def test_a_mesh_of_eight_devices_equals_one_device(shape, sizes):
  config = dataclasses.replace(shape, vocab_size=104)
  params, tokens = _params(config), _tokens(8, 12)
  expected = reference.hidden_states(config, params, tokens)
  mesh = mesh_lib.make_mesh(**{'data': 1, 'fsdp': 1, 'tensor': 1} | sizes)
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, parameters.logical_axes(config))
  )
  rows = jax.device_put(tokens, mesh_lib.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    hidden = jax.jit(lambda p, t: qwen.hidden_states(config, p, t))(
      placed, rows
    )
  # Devices sum in another order; the tolerance is that of float32 to float64.
  np.testing.assert_allclose(
    hidden, expected, rtol=0, atol=2e-5 * np.abs(expected).max()
  )


def test_logits_of_all_positions_never_exist_at_once():
  # Logits of 4096 positions would be by far the largest array.
  params = jax.eval_shape(lambda: parameters.init(TINY, jax.random.key(0)))
  hidden = jax.ShapeDtypeStruct((2, 4096, 32), jnp.float32)
  targets = jax.ShapeDtypeStruct((2, 4096), jnp.int32)

  def loss(params, hidden, targets):
    log_probs, entropies = qwen.token_log_probs(
      TINY, params, hidden, targets, temperature=1.0, chunk=64
    )
    return log_probs.sum() + entropies.sum()

  text = jax.jit(jax.grad(loss)).lower(params, hidden, targets).as_text()
  assert '2x64x97xf32' in text or '128x97xf32' in text
  for full in ('2x4096x97x', '8192x97x', '64x2x64x97x', '64x128x97x'):
    assert full not in text


def test_bfloat16_compute_stays_near_float32():
  params, tokens = _params(TINY, scale=1.0), _tokens(2, 12)
  exact = reference.hidden_states(TINY, params, tokens)
  half = dataclasses.replace(TINY, dtype='bfloat16')
  rough = reference.hidden_states(half, params, tokens)
  assert rough.dtype == jnp.bfloat16
  assert np.abs(np.asarray(rough, np.float32) - exact).mean() < 0.02


def test_norms_of_heads_are_not_quantized():
  config = dataclasses.replace(TINY, qkv_bias=False, qk_norm=True)
  params = _params(config)
  quantized = quantization.quantize(config, params)
  assert set(quantized['layers']['norm']) == {'attention', 'mlp', 'q', 'k'}
  assert quantized['layers']['attention']['q'].dtype == jnp.int8
  np.testing.assert_array_equal(
    quantized['layers']['norm']['q'], params['layers']['norm']['q']
  )
  axes = jax.tree.leaves(
    quantization.quantized_axes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  assert [len(names) for names in axes] == [
    x.ndim for x in jax.tree.leaves(quantized)
  ]


def test_bfloat16_weights_are_quantized_in_float32():
  half = dataclasses.replace(TINY, dtype='bfloat16', tie_embeddings=False)
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params(half))
  quantized = quantization.quantize(half, params)
  for name in ('embed', 'unembed'):
    exact = np.asarray(params[name], np.float32)
    scale = quantized[name + quantization.SCALE]
    assert quantized[name].dtype == jnp.int8 and scale.dtype == jnp.float32
    # One scale for each token; half a step of rounding.
    largest = np.abs(exact).max(axis=1, keepdims=True)
    np.testing.assert_allclose(127 * scale, largest, rtol=1e-6)
    assert (np.abs(quantized[name] * scale - exact) <= 0.5001 * scale).all()


@pytest.mark.parametrize('tied', [True, False])
def test_quantized_matrices_are_scaled_after_the_product(tied):
  # A GPU would write scaled matrices to memory in each step.
  half = dataclasses.replace(TINY, dtype='bfloat16', tie_embeddings=tied)
  quantized = quantization.quantize(half, _params(half))
  quantized = parameters.unstack_layers(half, quantized)
  cache = kv_cache.new(half, 2, 16)
  decode = jax.jit(functools.partial(qwen.decode, half))
  zeros = jnp.zeros((2, 1), jnp.int32)
  text = decode.lower(quantized, cache, zeros, zeros).as_text()
  results = re.findall(r'stablehlo.multiply .*: tensor<([\dx]+)xb?f\d+>', text)
  sizes = {math.prod(map(int, shape.split('x'))) for shape in results}
  matrices = [x for x in jax.tree.leaves(quantized) if x.dtype == jnp.int8]
  assert len(matrices) > 6 and sizes
  assert not sizes & {x.size for x in matrices}


def test_inference_computes_in_the_compute_type():
  half = dataclasses.replace(TINY, dtype='bfloat16')
  quantized = quantization.quantize(half, _params(half))
  assert quantized['norm'].dtype == jnp.bfloat16
  embed, scale = quantized['embed'], quantized['embed_scale']
  for array, scales in ((embed, scale), (scale, None)):
    matrix = quantization.dequantize(array, scales, jnp.bfloat16)
    assert matrix.dtype == jnp.bfloat16


def test_transposed_logits_of_a_large_vocabulary_are_the_same(monkeypatch):
  params = _params(TINY)
  hidden = jax.random.normal(jax.random.key(2), (5, 1, 32))

  def logits_and_gradient(hidden):
    logits = qwen.logits(TINY, params, hidden)
    return logits, jax.grad(lambda h: qwen.logits(TINY, params, h).max())(
      hidden
    )

  expected = jax.jit(logits_and_gradient)(hidden)
  monkeypatch.setattr(head, '_LARGE_VOCABULARY', 97)
  transposed = jax.jit(lambda hidden: logits_and_gradient(hidden))(hidden)
  for a, b in zip(expected, transposed, strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
