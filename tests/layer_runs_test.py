"""Tests of layers that differ: windows, states, dense layers in mixtures."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny_learner

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import models, sampler
from gigpo_jax.models import (
  attention,
  huggingface,
  kv_cache,
  layer_runs,
  lora,
  parameters,
  qwen,
)
from gigpo_jax.models.huggingface import layout

# All that a mixture may have: dense layers 0 and 2, biases, and windows.
MIXED = {
  'num_experts': 4,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 16,
  'norm_topk_prob': True,
  'decoder_sparse_step': 2,
  'attention_bias': True,
  'use_sliding_window': True,
  'sliding_window': 7,
}
CASES = {
  'mixed': ('Qwen3Moe', MIXED),
  'first': (
    'Qwen3Moe',
    MIXED | {'decoder_sparse_step': 1, 'mlp_only_layers': [0]},
  ),
  'window': (
    'Qwen2',
    {'use_sliding_window': True, 'sliding_window': 5, 'max_window_layers': 2},
  ),
  'types': (
    'Qwen3',
    {
      'attention_bias': True,
      'use_sliding_window': True,
      'sliding_window': 9,
      'layer_types': [
        'sliding_attention',
        'full_attention',
        'sliding_attention',
        'full_attention',
      ],
    },
  ),
  'hybrid': (
    'Qwen3_5Text',
    {
      'num_hidden_layers': 5,
      'linear_num_key_heads': 2,
      'linear_num_value_heads': 4,
      'linear_key_head_dim': 8,
      'linear_value_head_dim': 6,
      'attention_bias': True,
      # The norm after the rule magnifies rounding errors of small outputs.
      'initializer_range': 0.05,
    },
  ),
}
_HYBRID = {
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 6,
  'num_experts': 4,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 16,
  'shared_expert_intermediate_size': 12,
  'initializer_range': 0.05,
}
CASES |= {
  'hybrid experts': ('Qwen3_5MoeText', _HYBRID),
  'next': (
    'Qwen3Next',
    _HYBRID | {'mlp_only_layers': [1], 'norm_topk_prob': False},
  ),
}
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != 'mixed']


def _model(name: str, directory):
  """Writes random weights; returns transformers' model and our parameters."""
  torch = pytest.importorskip('torch', reason='parity needs PyTorch')
  import transformers

  family, options = CASES[name]
  torch.manual_seed(0)
  sizes = {
    'vocab_size': 48,
    'hidden_size': 32,
    'intermediate_size': 40,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 128,
    'initializer_range': 0.2,
    'tie_word_embeddings': False,
  }
  head = {} if family == 'Qwen2' else {'head_dim': 16}
  config = getattr(transformers, f'{family}Config')(**sizes | head | options)
  family = family.removesuffix('Text')
  model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim == 1:  # Biases start at zero, norms at one.
        parameter.add_(0.1 * torch.randn_like(parameter))
  model.save_pretrained(directory)
  ours = huggingface.read_config(str(directory), dtype='float32')
  mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  params = huggingface.load(str(directory), ours, mesh)
  return model, ours, jax.tree.map(jnp.asarray, jax.device_get(params))


def _tokens(rows: int, length: int) -> np.ndarray:
  return np.random.default_rng(0).integers(0, 48, (rows, length), np.int32)


def _gradients(model, config, params: dict) -> dict:
  """Returns transformers' gradients in the layout of our parameters."""
  stored = {n: p.grad.numpy() for n, p in model.named_parameters()}
  # transformers 5 joins the matrices of the experts.
  for name in [n for n in stored if n.endswith('experts.gate_up_proj')]:
    for n, (gate, up) in enumerate(np.split(x, 2) for x in stored.pop(name)):
      prefix = name.replace('gate_up_proj', f'{n}.')
      stored[f'{prefix}gate_proj.weight'] = gate
      stored[f'{prefix}up_proj.weight'] = up
  for name in [n for n in stored if n.endswith('experts.down_proj')]:
    for n, down in enumerate(stored.pop(name)):
      stored[name.replace('down_proj', f'{n}.down_proj.weight')] = down
  grads = jax.tree.map(lambda x: np.full(x.shape, np.nan), params)
  for tensor in layout.tensors(config):
    part = layout.leaf(grads, tensor.path)[tensor.index]
    value = tensor.to_ours(stored.pop(tensor.name), part.shape)
    first = tensor.columns[0] if tensor.columns else 0
    part[..., first : first + value.shape[-1]] = value
  assert not stored
  return grads


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_logits_and_gradients_agree_with_transformers(tmp_path, name):
  model, config, params = _model(name, tmp_path)
  import torch

  tokens = _tokens(2, 40)
  output = model(torch.tensor(tokens, dtype=torch.long)).logits
  expected = output.detach().numpy()
  output.square().mean().backward()

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def run(params):
    logits = qwen.logits(
      config, params, qwen.hidden_states(config, params, tokens)
    )
    return jnp.mean(jnp.square(logits)), logits

  (_, logits), grads = run(params)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * scale)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=2e-4 * np.abs(b).max() + 1e-8
    ),
    jax.device_get(grads),
    _gradients(model, config, params),
  )
  # Token by token over the cache, from prompts of different lengths.
  lengths = np.array([3, 12], np.int32)
  stacks = parameters.unstack_layers(config, params)
  cache = reference.prefill(
    config, stacks, tokens[:, :12], counts_B=lengths - 1
  )
  cache = kv_cache.resize(cache, 2, 24)
  decode = jax.jit(functools.partial(reference.decode, config))
  for step in range(12):
    at = lengths + step - 1
    one, cache = decode(stacks, cache, tokens[np.arange(2), at], at)
    np.testing.assert_allclose(
      one, expected[np.arange(2), at], rtol=0, atol=2e-5 * scale
    )


@pytest.mark.parametrize('name', ['mixed', *SLOW])
def test_a_saved_network_is_the_same(tmp_path, name):
  model, config, params = _model(name, tmp_path / 'a')
  huggingface.save(str(tmp_path / 'b'), config, params, dtype='float32')
  assert huggingface.read_config(str(tmp_path / 'b'), dtype='float32') == config
  import torch
  import transformers

  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'b', dtype=torch.float32
  ).eval()
  expected = model.state_dict()
  assert loaded.state_dict().keys() == expected.keys()
  for key, weights in loaded.state_dict().items():
    assert torch.equal(weights, expected[key]), key


SHAPE = dataclasses.replace(
  tiny_learner.EXPERTS,
  num_layers=3,
  dense_layers=(0, 2),
  dense_size=12,
  window=3,
  window_layers=(1, 2),
  o_bias=True,
)


def test_runs_by_hand():
  # Kinds of the layers: dense; experts with a window; dense with a window.
  runs = layer_runs.runs(SHAPE)
  assert [(run.start, run.stop) for run in runs] == [(0, 1), (1, 2), (2, 3)]
  assert [run.config.num_experts for run in runs] == [0, 4, 0]
  assert [run.config.window for run in runs] == [0, 3, 3]
  assert layer_runs.layers_of(SHAPE, 'mlp') == (0, 2)
  assert layer_runs.layers_of(SHAPE, 'experts') == (1,)
  layers = {
    'norm': {'mlp': np.arange(3)},
    'mlp': {'up': np.array([0, 2]), 'down': np.array([5, 7])},
    'experts': {'up': np.ones(1)},
  }
  taken = layer_runs.take(SHAPE, layers, 2, 3)
  assert taken == {'norm': {'mlp': [2]}, 'mlp': {'up': [2], 'down': [7]}}
  # One token uses 2 of the 4 experts of one layer.
  idle = 2 * 3 * SHAPE.hidden_size * SHAPE.intermediate_size
  assert models.num_active_parameters(SHAPE) == (
    models.num_parameters(SHAPE) - idle
  )


def _update(config, **axes):
  mesh = tiny_learner.make_mesh(**axes)
  subject = tiny_learner.sgd(devices=mesh, config=config)
  state, _ = tiny_learner.step(
    subject,
    tiny_learner.make_rows(),
    state=tiny_learner.start(subject, config),
  )
  return jax.device_get(state.params)


@pytest.mark.parametrize(
  'axes',
  [
    {'data': 2, 'fsdp': 2, 'tensor': 2},
    {'fsdp': 2, 'expert': 2},
    {'data': 2, 'sequence': 2},
  ],
  ids=str,
)
@pytest.mark.slow
def test_a_mesh_does_not_change_the_update(axes):
  config = dataclasses.replace(SHAPE, remat='layer')
  tiny_learner.assert_trees_close(
    _update(config, **axes), _update(config), 1e-6
  )


@pytest.mark.slow
@pytest.mark.parametrize('weights', ['model', 'int8'])
def test_the_sampler_reports_the_log_probs_of_the_learner(weights):
  params = reference.init(SHAPE, jax.random.key(0))
  prompt = np.arange(1, 9, dtype=np.int32)
  sample = sampler.Sampler(
    SHAPE,
    mesh_lib.make_mesh(1, -1, 1),
    weights=weights,
    seed=0,
    prompt_buckets=(8,),
    batch_buckets=(8,),
    max_completion_tokens=6,
    stop_ids=(),
    vocab_size=32,
  ).generate(params, [sampler.Request(prompt, (0, 0, 0, 0, 0))])[0]
  log_probs, _ = reference.completion_log_probs(
    SHAPE,
    params,
    np.concatenate([prompt, sample.ids])[None],
    np.array([8]),
    max_completion=6,
  )
  tolerance = 1e-5 if weights == 'model' else 0.05
  np.testing.assert_allclose(sample.log_probs, log_probs[0], atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['types', 'hybrid', 'hybrid experts', 'next'])
def test_greedy_sampling_equals_generate(name, tmp_path):
  model, config, params = _model(name, tmp_path)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 48, n).astype(np.int32) for n in (1, 4, 9, 16)]
  reference.assert_greedy_equals_generate(
    model, config, params, prompts, tokens=12
  )


def test_shared_prompts_have_no_window():
  segments = attention.Segments(jnp.full((1, 8), 8), tree=True)
  with pytest.raises(ValueError, match='does not support branches'):
    attention.limit_to_window(segments, 4, (1, 8))


ADAPTED = dataclasses.replace(SHAPE, adapters=lora.Lora(rank=2, alpha=6.0))


def _adapted_params() -> dict:
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32),
    reference.init(ADAPTED, jax.random.key(0)),
  )


@pytest.mark.slow
def test_merged_adapters_of_experts_give_the_same_logits():
  params, tokens = _adapted_params(), _tokens(2, 9) % 32
  assert params['layers']['experts']['down_a'].shape == (1, 4, 8, 2)
  assert params['layers']['experts']['down_b'].shape == (1, 4, 2, 16)
  merged = lora.merge(ADAPTED.adapters, params)
  plain = lora.split(params)[1]
  hidden = functools.partial(reference.hidden_states, tokens=tokens)
  got = hidden(ADAPTED, params)
  np.testing.assert_allclose(got, hidden(SHAPE, merged), atol=2e-4)
  # By hand: the matrix of expert 3 in the only layer with experts.
  arrays = params['layers']['experts']
  expected = arrays['up'][0, 3] + 3 * (
    arrays['up_a'][0, 3] @ arrays['up_b'][0, 3]
  )
  np.testing.assert_allclose(
    merged['layers']['experts']['up'][0, 3], expected, atol=1e-5
  )
  base = hidden(SHAPE, plain)
  assert np.abs(got - base).max() > 0.1


@pytest.mark.slow
def test_adapters_of_experts_are_trained_and_sharded():
  axes = {'fsdp': 2, 'expert': 2, 'tensor': 2}
  one, many = _update(ADAPTED), _update(ADAPTED, **axes)
  tiny_learner.assert_trees_close(one, many, 1e-6)
  assert np.abs(one['layers']['experts']['down_b']).max() > 0


def test_adapters_of_experts_are_exported_per_expert(tmp_path):
  adapters, _ = lora.split(_adapted_params())
  huggingface.save_adapters(str(tmp_path), ADAPTED, adapters, 'base')
  from safetensors.numpy import load_file

  tensors = load_file(tmp_path / 'adapter_model.safetensors')
  prefix = 'base_model.model.model.layers'
  np.testing.assert_array_equal(
    tensors[f'{prefix}.1.mlp.experts.3.down_proj.lora_A.weight'],
    adapters['layers']['experts']['down_a'][0, 3].T,
  )
  np.testing.assert_array_equal(
    tensors[f'{prefix}.2.mlp.up_proj.lora_B.weight'],
    adapters['layers']['mlp']['up_b'][1].T,
  )
  config = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert 'down_proj' in config['target_modules']
