"""Tests of Qwen3.5 checkpoints: vision towers, exports and refused fields."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import safetensors.numpy
from hybrid_test import CONFIG

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface, lora, qwen

TEXT = {
  'model_type': 'qwen3_5_text',
  'vocab_size': 40,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 6,
  'linear_value_head_dim': 8,
  'rms_norm_eps': 1e-6,
}
# Fields of the published files.
PUBLISHED = {
  'attention_bias': False,
  'attn_output_gate': True,
  'dtype': 'bfloat16',
  'eos_token_id': 248044,
  'full_attention_interval': 4,
  'hidden_act': 'silu',
  'mamba_ssm_dtype': 'float32',
  'max_position_embeddings': 262144,
  'mlp_only_layers': [],
  'mtp_num_hidden_layers': 1,
  'mtp_use_dedicated_embeddings': False,
  'partial_rotary_factor': 0.25,
  'rope_parameters': {
    'mrope_interleaved': True,
    'mrope_section': [11, 11, 10],
    'partial_rotary_factor': 0.25,
    'rope_theta': 10000000,
    'rope_type': 'default',
  },
}
VISION = {
  'architectures': ['Qwen3_5ForConditionalGeneration'],
  'model_type': 'qwen3_5',
  'image_token_id': 248056,
  'language_model_only': False,
  'video_token_id': 248057,
  'vision_start_token_id': 248053,
  'vision_end_token_id': 248054,
  'vision_config': {'depth': 27},
  'tie_word_embeddings': True,
}


def _read(directory: pathlib.Path, raw: dict) -> qwen.QwenConfig:
  (directory / 'config.json').write_text(json.dumps(raw))
  return huggingface.read_config(str(directory))


def test_the_text_part_of_a_published_config(tmp_path):
  config = _read(tmp_path, VISION | {'text_config': TEXT | PUBLISHED})
  assert config.tie_embeddings
  assert (config.rotary_dim, config.rope_theta) == (2, 1e7)
  assert config.delta_layers == (0, 1, 2)
  assert config.delta.widths == {'q': 6, 'k': 6, 'v': 16, 'z': 16} | {
    'b': 2,
    'a': 2,
  }
  types = ['linear_attention', 'full_attention'] * 2
  config = _read(tmp_path, TEXT | {'layer_types': types})
  assert config.delta_layers == (0, 2)


def test_the_text_part_of_a_published_mixture(tmp_path):
  mixture = {
    'model_type': 'qwen3_5_moe_text',
    'num_experts': 8,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 12,
    'shared_expert_intermediate_size': 20,
    'router_aux_loss_coef': 0.001,
  }
  text = TEXT | PUBLISHED | mixture
  del text['intermediate_size']
  vision = VISION | {
    'model_type': 'qwen3_5_moe',
    'architectures': ['Qwen3_5MoeForConditionalGeneration'],
  }
  config = _read(tmp_path, vision | {'text_config': text})
  assert (config.intermediate_size, config.shared_size) == (12, 20)
  assert config.normalized_experts and not config.dense_layers
  text |= {'model_type': 'qwen3_next', 'intermediate_size': 24}
  text |= {'mlp_only_layers': [1], 'norm_topk_prob': False}
  config = _read(tmp_path, text)
  assert config.delta.joined and not config.normalized_experts
  assert (config.dense_layers, config.dense_size) == ((1,), 24)


REFUSED = [
  (TEXT | {'attn_output_gate': False}, 'attn_output_gate=false; only true'),
  (
    TEXT | {'linear_num_value_heads': 3},
    'must be a multiple of linear_num_key',
  ),
  (TEXT | {'linear_conv_kernel_dim': 0}, 'linear_conv_kernel_dim=0; must be'),
  (TEXT | {'layer_types': ['linear_attention'] * 4}, 'layer_types='),
  (TEXT | {'layer_types': ['sliding_attention'] * 4}, 'layer_types='),
  (TEXT | {'layer_types': ['full_attention'] * 4}, 'layer_types='),
  (TEXT | {'full_attention_interval': 9}, 'layer_types='),
  (TEXT | {'full_attention_interval': 'x'}, 'full_attention_interval="x"'),
  (TEXT | {'partial_rotary_factor': 0.4}, 'partial_rotary_factor=0.4; must'),
  (TEXT | {'partial_rotary_factor': 2}, 'partial_rotary_factor=2; must be'),
  # The default is a quarter.
  (TEXT | {'head_dim': 12}, 'partial_rotary_factor=0.25; must be one number'),
  (TEXT | {'num_hidden_layers': 2000}, 'num_hidden_layers=2000; must be at'),
  (TEXT | {'logit_scale': 2}, 'logit_scale=2; unknown field'),
  (TEXT | {'mlp_only_layers': [1]}, 'mlp_only_layers=.1.; only .. is'),
  (TEXT | {'num_experts': 4}, 'num_experts=4; unknown field'),
  (
    TEXT | {'model_type': 'qwen3_5_moe_text'},
    'lacks moe_intermediate_size; a mixture',
  ),
  (VISION, 'text_config=null; must be the fields of qwen3_5_text'),
  (VISION | {'text_config': TEXT, 'fusion': 1}, 'fusion=1; unknown field'),
  ({'model_type': 'qwen4_exp'}, 'qwen4_exp is not supported; must be'),
]


@pytest.mark.parametrize(('raw', 'message'), REFUSED)
def test_another_network_is_refused(tmp_path, raw, message):
  with pytest.raises(ValueError, match=message) as error:
    _read(tmp_path, raw)
  assert len(str(error.value).splitlines()) == 1


def _load(directory: pathlib.Path) -> tuple[qwen.QwenConfig, dict]:
  config = huggingface.read_config(str(directory), dtype='float32')
  mesh = mesh_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  params = huggingface.load(str(directory), config, mesh)
  return config, jax.tree.map(jnp.asarray, jax.device_get(params))


def _add(directory: pathlib.Path, **arrays: np.ndarray) -> None:
  path = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path) | arrays
  safetensors.numpy.save_file(tensors, path, metadata={'format': 'pt'})


def test_only_the_text_part_is_loaded_and_exported(tmp_path):
  torch = pytest.importorskip('torch', reason='parity needs PyTorch')
  import transformers

  torch.manual_seed(0)
  sizes = TEXT | {'initializer_range': 0.05}
  vision = {'depth': 1, 'hidden_size': 16, 'num_heads': 2}
  vision |= {'intermediate_size': 16, 'out_hidden_size': 16}
  model = transformers.Qwen3_5ForConditionalGeneration(
    transformers.Qwen3_5Config(text_config=sizes, vision_config=vision)
  ).eval()
  model.save_pretrained(tmp_path / 'a')
  _add(tmp_path / 'a', **{'mtp.norm.weight': np.ones(16, np.float32)})
  config, params = _load(tmp_path / 'a')
  tokens = np.random.default_rng(0).integers(1, 40, (2, 20), np.int32)
  padded = np.pad(tokens, ((0, 0), (5, 0)))
  # Padding on the left, as for `generate`, does not enter the state.
  mask = np.pad(np.ones_like(tokens), ((0, 0), (5, 0)))
  with torch.no_grad():
    expected = (
      model(
        torch.tensor(padded, dtype=torch.long),
        attention_mask=torch.tensor(mask, dtype=torch.long),
      )
      .logits[:, 5:]
      .numpy()
    )
  hidden = reference.hidden_states(config, params, tokens)
  logits = reference.logits(config, params, hidden)
  np.testing.assert_allclose(logits, expected, atol=1e-5)
  huggingface.save(str(tmp_path / 'b'), config, params, dtype='float32')
  exported = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'b', dtype=torch.float32
  ).eval()
  assert type(exported).__name__ == 'Qwen3_5ForCausalLM'
  with torch.no_grad():
    actual = exported(torch.tensor(tokens, dtype=torch.long)).logits
  np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_other_parts_are_refused_in_other_networks(tmp_path):
  config = dataclasses.replace(CONFIG, delta=None, delta_layers=())
  config = dataclasses.replace(
    config, attention_gate=False, centered_norms=False, rotary_dim=0
  )
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params)
  _add(tmp_path, **{'mtp.norm.weight': np.ones(16, np.float32)})
  with pytest.raises(ValueError, match=r'mtp\.norm\.weight is unknown'):
    huggingface.check(str(tmp_path), config)


def test_a_saved_network_is_loaded_exactly(tmp_path):
  params = reference.init(CONFIG, jax.random.key(0))
  huggingface.save(str(tmp_path), CONFIG, params, dtype='float32')
  config, loaded = _load(tmp_path)
  assert config == dataclasses.replace(CONFIG, remat='none')
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  # By hand: head 1's values of the projection, rows 8 + 8 + 8 on in the file.
  stored = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  np.testing.assert_array_equal(
    stored['model.layers.2.linear_attn.in_proj_qkv.weight'][24:32],
    np.asarray(params['layers']['delta']['qkvz'])[1, :, 1, 8:16].T,
  )


def test_matrices_of_all_experts_are_read(tmp_path):
  config = dataclasses.replace(
    CONFIG, num_experts=3, experts_per_token=2, shared_size=20
  )
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params, dtype='float32')
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  # The form of the published files: one tensor for all experts of a layer.
  for layer in range(3):
    prefix = f'model.layers.{layer}.mlp.experts.'
    taken = [
      [tensors.pop(f'{prefix}{x}.{name}_proj.weight') for x in range(3)]
      for name in ('gate', 'up', 'down')
    ]
    gate_up = [np.concatenate(pair) for pair in zip(*taken[:2], strict=True)]
    tensors[f'{prefix}gate_up_proj'] = np.stack(gate_up)
    tensors[f'{prefix}down_proj'] = np.stack(taken[2])
  safetensors.numpy.save_file(tensors, path)
  loaded_config, loaded = _load(tmp_path)
  assert loaded_config == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_matrix_of_gates_and_ups_of_other_sizes_is_refused(tmp_path):
  config = dataclasses.replace(
    CONFIG, num_experts=1, experts_per_token=1, shared_size=20
  )
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params)
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  prefix = 'model.layers.1.mlp.experts.'
  joint = np.concatenate(
    [tensors.pop(f'{prefix}0.{name}_proj.weight') for name in ('gate', 'up')]
    + [np.zeros((1, 16), jnp.bfloat16)]
  )
  safetensors.numpy.save_file(
    tensors | {f'{prefix}gate_up_proj': joint[None]}, path
  )
  with pytest.raises(ValueError, match='experts.gate_up_proj is unknown'):
    huggingface.check(str(tmp_path), config)


def test_adapters_of_the_projections_are_exported(tmp_path):
  config = dataclasses.replace(
    CONFIG, adapters=lora.Lora(rank=2, targets=('q', 'k', 'v', 'o'))
  )
  adapters, _ = lora.split(reference.init(config, jax.random.key(0)))
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape)), adapters
  )
  huggingface.save_adapters(str(tmp_path), config, adapters, 'base')
  tensors = safetensors.numpy.load_file(tmp_path / 'adapter_model.safetensors')
  prefix = 'base_model.model.model.layers.2.linear_attn.'
  layer = {k: v[1] for k, v in adapters['layers']['delta'].items()}
  z = tensors[f'{prefix}in_proj_z.lora_B.weight']
  a = tensors[f'{prefix}in_proj_z.lora_A.weight']
  product = layer['qkvz_a'] @ layer['qkvz_b'].reshape(2, -1)
  product = product.reshape(16, 2, -1)[..., 16:]
  np.testing.assert_allclose((z @ a).T, product.reshape(16, -1), atol=1e-5)
  named = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert named['target_modules'] == [
    *('in_proj_qkv', 'in_proj_z', 'k_proj', 'o_proj', 'out_proj'),
    *('q_proj', 'v_proj'),
  ]
