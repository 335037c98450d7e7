"""Tests of Hugging Face directories: loading, saving and refused files."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import huggingface_hub
import jax
import numpy as np
import pytest
import reference
import safetensors.numpy
import transformers

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface, qwen
from gigpo_jax.models.huggingface import export
from gigpo_jax.run import model_check

YARN = qwen.Yarn(4.0, 16, beta_fast=8.0, attention_factor=0.7)


def _config(tied: bool = True, **kwargs) -> qwen.QwenConfig:
  return qwen.QwenConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rope_theta=5e5,
    dtype='float32',
    remat='none',
    tie_embeddings=tied,
    **kwargs,
  )


@pytest.fixture(
  name='saved',
  params=[
    {},
    {'tied': False, 'yarn': YARN, 'max_positions': 64},
    {'qkv_bias': False, 'qk_norm': True},
  ],
  ids=['tied', 'untied', 'qwen3'],
)
def fixture_saved(request, tmp_path):
  config = _config(**request.param)
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params, dtype='float32')
  return tmp_path, config, params


@pytest.fixture(name='mesh')
def fixture_mesh():
  return mesh_lib.make_mesh(2, 2, 2)


def test_round_trip_is_exact(saved, mesh):
  directory, config, params = saved
  assert huggingface.read_config(str(directory), dtype='float32') == config
  loaded = huggingface.load(str(directory), config, mesh)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert loaded['layers']['mlp']['up'].sharding.spec == jax.P(
    None, 'fsdp', 'tensor'
  )


def test_an_index_over_several_files_is_read(saved, mesh):
  directory, config, params = saved
  path = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  names = sorted(tensors)
  parts = {'a.safetensors': names[::2], 'b.safetensors': names[1::2]}
  for file, part in parts.items():
    safetensors.numpy.save_file({n: tensors[n] for n in part}, directory / file)
  weight_map = {n: file for file, part in parts.items() for n in part}
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': weight_map})
  )
  path.unlink()
  loaded = huggingface.load(str(directory), config, mesh)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_transformers_loads_the_export_and_gives_the_same_logits(saved, mesh):
  torch = pytest.importorskip('torch', reason='parity needs PyTorch')
  import transformers

  directory, config, params = saved
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32
  ).eval()
  family = 'Qwen3' if config.qk_norm else 'Qwen2'
  assert type(model).__name__ == f'{family}ForCausalLM'
  tokens = np.arange(12)[None] % 40
  with torch.no_grad():
    expected = model(torch.tensor(tokens)).logits.numpy()
  hidden = reference.hidden_states(config, params, tokens)
  logits = reference.logits(config, params, hidden)
  np.testing.assert_allclose(logits, expected, atol=2e-5)


def test_bfloat16_export_rounds(tmp_path, mesh):
  config = _config()
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params)
  loaded = huggingface.load(str(tmp_path), config, mesh)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(
      a, np.asarray(b).astype('bfloat16').astype(np.float32)
    ),
    loaded,
    params,
  )


@pytest.mark.parametrize('stored', [None, {'eos_token_id': 2, 'top_k': 20}])
def test_generate_stops_at_the_tokens_of_the_sampler(tmp_path, stored):
  start, policy = tmp_path / 'start', tmp_path / 'policy'
  start.mkdir()
  if stored:
    (start / 'generation_config.json').write_text(json.dumps(stored))
  config = _config()
  huggingface.save(
    str(policy),
    config,
    reference.init(config, jax.random.key(0)),
    tokenizer_directory=str(start),
    stop_ids=(2, 7),
  )
  generation = transformers.GenerationConfig.from_pretrained(policy)
  assert generation.eos_token_id == [2, 7]
  assert generation.top_k == (20 if stored else None)


def test_rope_theta_may_be_in_rope_parameters(tmp_path):
  huggingface.save(
    str(tmp_path), _config(), reference.init(_config(), jax.random.key(0))
  )
  path = tmp_path / 'config.json'
  raw = json.loads(path.read_text())
  raw['rope_parameters'] = {
    'rope_theta': raw.pop('rope_theta'),
    'rope_type': 'default',
  }
  del raw['head_dim']
  path.write_text(json.dumps(raw))
  config = huggingface.read_config(str(tmp_path))
  assert (config.rope_theta, config.head_dim) == (5e5, 4)


def _edit(directory: pathlib.Path, change) -> None:
  path = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      lambda t: t.pop('model.norm.weight'),
      r'model\.norm\.weight \(16,\) is missing',
    ),
    (lambda t: t.update(odd=np.zeros(2)), 'odd is unknown'),
    (
      lambda t: t.update({'model.norm.weight': np.zeros(3)}),
      r'model\.norm\.weight is \(3,\) in the file and \(16,\) by config\.json',
    ),
  ],
  ids=['missing', 'unknown', 'shape'],
)
def test_wrong_tensors_are_named(saved, mesh, change, message: str):
  directory, config, _ = saved
  _edit(directory, change)
  with pytest.raises(ValueError, match=message):
    huggingface.load(str(directory), config, mesh)


def test_unsupported_models_are_refused(tmp_path):
  with pytest.raises(ValueError, match='^dtype=fp16: unknown; must be one of'):
    huggingface.read_config(str(tmp_path), dtype='fp16')
  with pytest.raises(ValueError, match='no config.json; needs'):
    huggingface.read_config(str(tmp_path))
  (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
  with pytest.raises(ValueError, match='model_type llama is not supported'):
    huggingface.read_config(str(tmp_path))
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='not JSON'):
    huggingface.read_config(str(tmp_path))


_CONFIG = {
  'architectures': ['Qwen2ForCausalLM'],
  'model_type': 'qwen2',
  'vocab_size': 40,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-6,
}
_QWEN3 = {'model_type': 'qwen3', 'architectures': ['Qwen3ForCausalLM']}
_EXPERTS = {
  'model_type': 'qwen3_moe',
  'architectures': ['Qwen3MoeForCausalLM'],
  'moe_intermediate_size': 8,
  'num_experts': 4,
  'num_experts_per_tok': 2,
}


def _read(directory: pathlib.Path, *changes: dict) -> qwen.QwenConfig:
  raw = dict(_CONFIG)
  for change in changes:
    raw |= change
  (directory / 'config.json').write_text(json.dumps(raw))
  return huggingface.read_config(str(directory))


def _yarn(**changes) -> dict:
  plain = {
    'rope_type': 'yarn',
    'factor': 4.0,
    'original_max_position_embeddings': 16,
  }
  return {'rope_scaling': plain | changes}


_INF, _NAN = float('inf'), float('nan')
_REFUSED = [
  ({'hidden_act': 'gelu'}, 'hidden_act="gelu"; only "silu" is'),
  (
    {'use_sliding_window': True, 'sliding_window': 0},
    'sliding_window=0; must be an integer above 0',
  ),
  (
    {
      'use_sliding_window': True,
      'sliding_window': None,
      'layer_types': ['full_attention', 'sliding_attention'],
    },
    'sliding_window=null; must be an integer above 0',
  ),
  (
    {
      'use_sliding_window': True,
      'sliding_window': 4,
      'max_window_layers': -1,
    },
    'max_window_layers=-1; must be an integer from 0',
  ),
  (
    {'layer_types': ['full_attention', 'sliding_attention']},
    'layer_types=.*sliding_attention',
  ),
  ({'layer_types': ['full_attention', 'linear_attention']}, 'layer_types='),
  ({'layer_types': ['full_attention']}, 'layer_types='),
  ({'layer_types': 'sliding_attention'}, 'layer_types='),
  ({'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config='),
  ({'architectures': ['Qwen2ForTokenClassification']}, 'architectures='),
  ({'auto_map': {'AutoModelForCausalLM': 'a.B'}}, 'auto_map='),
  ({'is_causal': False}, 'is_causal=false; only true is'),
  ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5; only 1 is'),
  ({'num_experts': 8}, 'num_experts=8; unknown'),
  ({'logit_scale': 0.5}, 'logit_scale=0.5; unknown field that may change'),
  ({'a\nb': 'c\n' * 99}, r'a\\nb="c\\n'),
  ({'tie_word_embeddings': 'false'}, 'tie_word_embeddings="false"; must be'),
  ({'num_hidden_layers': True}, 'num_hidden_layers=true; must be an integer'),
  ({'num_hidden_layers': 10**12}, 'num_hidden_layers=1000000000000; must be'),
  ({'num_key_value_heads': 3}, 'num_key_value_heads=3; must divide into'),
  ({'head_dim': 5}, 'head_dim=5; must be even'),
  ({'num_attention_heads': 32, 'num_key_value_heads': 32}, 'head_dim=0; must'),
  ({'rms_norm_eps': _NAN}, 'rms_norm_eps=NaN; must be a number'),
  ({'rms_norm_eps': 10**400}, 'rms_norm_eps=1000.*; must be a number'),
  ({'rope_theta': _INF}, 'rope_theta=Infinity; must be a finite'),
  ({'rope_theta': 10**400}, 'rope_theta=1000.*; must be a finite'),
  (
    {'rope_theta': 1e6, 'rope_parameters': {'rope_theta': 1e4}},
    'rope_theta=1000000.0; must be equal to',
  ),
  (
    {
      'rope_scaling': {'rope_type': 'default'},
      'rope_parameters': {'rope_type': 'yarn'},
    },
    'rope_scaling=.*; must be equal to',
  ),
  ({'rope_scaling': {'type': 'linear', 'factor': 2}}, 'rope_type="linear"'),
  ({'rope_scaling': {'mrope_section': [1]}}, 'mrope_section='),
  (
    {'rope_parameters': {'full_attention': {'rope_theta': 1e6}}},
    'full_attention=',
  ),
  (_yarn(factor=None), 'factor=null; of yarn must be at least 1'),
  (_yarn(factor=0.5), 'factor=0.5; of yarn must be'),
  (_yarn(factor=_NAN), 'factor=NaN; of yarn must be'),
  (_yarn(factor=_INF), 'factor=Infinity; of yarn must be'),
  (_yarn(original_max_position_embeddings=0), 'embeddings=0; of yarn must be'),
  (_yarn(beta_fast=1, beta_slow=2), 'beta_fast=1; of yarn must be'),
  (_yarn(beta_slow=-1), 'beta_slow=-1; of yarn must be'),
  (_yarn(beta_fast=0), 'beta_fast=0; of yarn must be'),
  (_yarn(attention_factor=_NAN), 'attention_factor=NaN; of yarn must be'),
  (_yarn(attention_factor=0), 'attention_factor=0; of yarn must be'),
  (_yarn(mscale=1), 'mscale=1; only 0 is'),
  (_yarn(truncate=False), 'truncate=false; only true is'),
  ({'rope_scaling': ['yarn']}, 'does not describe a model'),
  (_QWEN3 | {'attention_bias': 1}, 'attention_bias=1; must be true or false'),
  (_EXPERTS | {'mlp_only_layers': [2]}, 'mlp_only_layers=.2.; must be a list'),
  (_EXPERTS | {'mlp_only_layers': [0, 1]}, 'must leave a layer with experts'),
  (_EXPERTS | {'decoder_sparse_step': 3}, 'decoder_sparse_step=3; must leave'),
  (
    _EXPERTS | {'decoder_sparse_step': 2, 'num_hidden_layers': 10**6},
    'num_hidden_layers=1000000; must be at most 1024',
  ),
  (_EXPERTS | {'num_experts_per_tok': 5}, 'num_experts_per_tok=5; must be at'),
  (_EXPERTS | {'num_local_experts': 5}, 'num_local_experts=5; must be equal'),
  (_EXPERTS | {'norm_topk_prob': 1}, 'norm_topk_prob=1; must be true or'),
  (_EXPERTS | {'num_experts': None}, 'lacks num_experts; a mixture of experts'),
  ({'vocab_size': None}, 'lacks vocab_size; all are required'),
]


@pytest.mark.parametrize(('change', 'message'), _REFUSED)
def test_an_unsupported_field_is_refused(tmp_path, change, message):
  with pytest.raises(ValueError, match=message) as error:
    _read(tmp_path, change)
  assert len(str(error.value).splitlines()) == 1
  assert len(str(error.value)) < 400  # noqa: PLR2004


_WINDOW = {'use_sliding_window': True}


@pytest.mark.parametrize(
  ('change', 'window', 'layers'),
  [
    # transformers' defaults: 4096 tokens, from layer 28 on.
    (_WINDOW, 0, ()),
    (_WINDOW | {'max_window_layers': 1}, 4096, (1,)),
    (_WINDOW | {'max_window_layers': 0, 'sliding_window': 7}, 7, ()),
    (_WINDOW | {'max_window_layers': 1, 'sliding_window': None}, 0, ()),
    (_WINDOW | {'layer_types': ['sliding_attention'] * 2}, 4096, ()),
    (_WINDOW | {'layer_types': ['full_attention'] * 2}, 0, ()),
    ({'sliding_window': 7, 'max_window_layers': 0}, 0, ()),
    (_EXPERTS | _WINDOW | {'max_window_layers': 1}, 4096, ()),
  ],
)
def test_layers_with_a_window(tmp_path, change, window, layers):
  config = _read(tmp_path, change)
  assert (config.window, config.window_layers) == (window, layers)


# Other fields that published checkpoints have.
_PUBLISHED = {
  '_name_or_path': 'a',
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': [151645, 151643],
  'hidden_act': 'silu',
  'initializer_range': 0.02,
  'layer_types': ['full_attention'] * 2,
  'max_window_layers': 28,
  'quantization_config': None,
  'rope_scaling': None,
  'sliding_window': 32768,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.43.1',
  'use_cache': True,
  'use_mrope': False,
  'use_sliding_window': False,
}


@pytest.mark.parametrize('family', [{}, _QWEN3, _EXPERTS])
def test_fields_without_effect_are_accepted(tmp_path, family):
  config = _read(tmp_path, family, _PUBLISHED)
  assert config == _read(tmp_path, family)


def test_configs_that_transformers_writes_are_accepted(tmp_path):
  import transformers

  for name in ('Qwen2Config', 'Qwen3Config', 'Qwen3MoeConfig'):
    sizes = {
      key: value
      for key, value in (_CONFIG | _EXPERTS).items()
      if isinstance(value, int) and hasattr(getattr(transformers, name)(), key)
    }
    hf_config = getattr(transformers, name)(**sizes)
    hf_config.save_pretrained(tmp_path)
    config = huggingface.read_config(str(tmp_path))
    assert config.rope_theta == hf_config.rope_parameters['rope_theta']
    assert config.num_kv_heads == hf_config.num_key_value_heads
    # All fields, not only those that differ from the defaults of transformers.
    (tmp_path / 'config.json').write_text(json.dumps(hf_config.to_dict()))
    assert huggingface.read_config(str(tmp_path)) == config


def test_null_key_value_heads_equal_the_query_heads(tmp_path):
  import transformers

  hf_config = transformers.Qwen2Config(
    num_attention_heads=4, num_key_value_heads=None
  )
  config = _read(tmp_path, {'num_key_value_heads': None})
  assert (
    config.num_kv_heads == hf_config.num_key_value_heads == config.num_heads
  )
  (tmp_path / 'config.json').write_text(
    json.dumps({k: _CONFIG[k] for k in _CONFIG if k != 'num_key_value_heads'})
  )
  with pytest.raises(ValueError, match='lacks num_key_value_heads'):
    huggingface.read_config(str(tmp_path))


def test_a_billion_layers_or_experts_are_refused_within_a_second(tmp_path):
  config = _config()
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params)
  largest = 2**31 - 1
  for sizes in (
    {'num_layers': 10**9},
    {'num_layers': largest, 'num_experts': largest, 'experts_per_token': 2},
  ):
    start = time.monotonic()
    with pytest.raises(ValueError, match='is missing.*; and more$'):
      huggingface.check(str(tmp_path), dataclasses.replace(config, **sizes))
    assert time.monotonic() - start < 1


def test_an_index_without_its_files_is_refused(saved):
  directory, config, _ = saved
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': {'model.norm.weight': 'gone.safetensors'}})
  )
  with pytest.raises(
    ValueError, match=r'gone\.safetensors of .* does not exist'
  ):
    huggingface.check(str(directory), config)


def test_an_index_that_names_the_wrong_file_is_refused(saved):
  directory, config, _ = saved
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  norm = tensors.pop('model.norm.weight')
  safetensors.numpy.save_file(tensors, directory / 'model.safetensors')
  safetensors.numpy.save_file({'odd': norm}, directory / 'b.safetensors')
  weight_map = dict.fromkeys(tensors, 'model.safetensors')
  weight_map['model.norm.weight'] = 'b.safetensors'
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': weight_map})
  )
  with pytest.raises(ValueError, match=r'model\.norm\.weight .* is missing'):
    huggingface.check(str(directory), config)


@pytest.mark.parametrize('file', ['../a.safetensors', '/a.safetensors', '..'])
def test_an_index_of_files_outside_its_folder_is_refused(saved, file: str):
  directory, config, _ = saved
  folder = directory / 'model'
  folder.mkdir()
  path = directory / 'model.safetensors'
  names = safetensors.numpy.load_file(path)
  path.rename(directory / 'a.safetensors')
  (folder / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': dict.fromkeys(names, file)})
  )
  with pytest.raises(ValueError, match='must be a file in the same folder'):
    huggingface.check(str(folder), config)


def test_a_second_file_of_the_same_tensors_is_refused(saved):
  directory, config, _ = saved
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  other = {name: tensor + 1 for name, tensor in tensors.items()}
  safetensors.numpy.save_file(other, directory / 'z.safetensors')
  with pytest.raises(ValueError, match=r'is in model\.safetensors and in z'):
    huggingface.check(str(directory), config)
  # So is a file that is not in the index.
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': dict.fromkeys(tensors, 'model.safetensors')})
  )
  with pytest.raises(ValueError, match=r'z\.safetensors is not in model\.s'):
    huggingface.check(str(directory), config)


@pytest.mark.parametrize('dtype', ['int8', 'int32', 'complex64', 'bool'])
def test_tensors_of_other_types_are_refused(saved, dtype: str):
  directory, config, _ = saved
  norm = {'model.norm.weight': np.ones(16, dtype)}
  _edit(directory, lambda tensors: tensors.update(norm))
  with pytest.raises(
    ValueError, match=r'weight is [A-Z0-9]+ in the file; must be one of'
  ):
    huggingface.check(str(directory), config)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
  'name', ['model.norm.weight', 'model.layers.1.mlp.up_proj.weight']
)
def test_weights_that_are_not_finite_are_refused(tmp_path, mesh, value, name):
  config = _config()
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params)
  _edit(tmp_path, lambda tensors: tensors[name].flat.__setitem__(7, value))
  with pytest.raises(ValueError, match=f'{name} contains NaN or infinity'):
    huggingface.load(str(tmp_path), config, mesh)


def test_a_tied_unembedding_must_equal_the_embedding(tmp_path):
  directory, config = tmp_path, _config()
  params = reference.init(config, jax.random.key(0))
  huggingface.save(str(directory), config, params)
  embed = np.array(params['embed'].astype('bfloat16'))
  _edit(directory, lambda t: t.update({'lm_head.weight': embed}))
  huggingface.check(str(directory), config)
  embed[-1, -1] += 1
  _edit(directory, lambda t: t.update({'lm_head.weight': embed}))
  with pytest.raises(ValueError, match=r'lm_head\.weight differs from'):
    huggingface.check(str(directory), config)


def test_an_adapter_next_to_the_weights_is_refused(saved):
  directory, config, _ = saved
  (directory / 'adapter_config.json').write_text('{}')
  with pytest.raises(ValueError, match='an adapter that would not be loaded'):
    huggingface.check(str(directory), config)


def test_tokenizer_files_are_copied(saved, tmp_path_factory):
  _, config, params = saved
  source, target = (tmp_path_factory.mktemp(name) for name in ('a', 'b'))
  (source / 'tokenizer.json').write_text('{"of": "a"}')
  (source / 'other.txt').write_text('not a tokenizer file')
  huggingface.save(str(target), config, params, str(source))
  assert sorted(path.name for path in target.iterdir()) == [
    'config.json',
    'model.safetensors',
    'tokenizer.json',
  ]
  assert (target / 'tokenizer.json').read_text() == '{"of": "a"}'


def test_a_directory_without_safetensors_is_refused(saved):
  directory, config, _ = saved
  (directory / 'model.safetensors').unlink()
  (directory / 'pytorch_model.bin').write_bytes(b'x')
  with pytest.raises(ValueError, match=r'no \*\.safetensors files'):
    huggingface.check(str(directory), config)
  (directory / 'model.safetensors').write_bytes(b'not safetensors')
  with pytest.raises(ValueError, match='not a readable safetensors file'):
    huggingface.check(str(directory), config)


def test_a_large_export_is_split_and_loaded(saved, mesh, monkeypatch):
  directory, config, params = saved
  monkeypatch.setattr(export, 'FILE_BYTES', 3000)
  huggingface.save(str(directory), config, params, dtype='float32')
  index = json.loads((directory / 'model.safetensors.index.json').read_text())
  files = sorted(path.name for path in directory.glob('*.safetensors'))
  assert files == sorted(set(index['weight_map'].values()))
  assert len(files) > 3 and 'model.safetensors' not in files
  assert files[0] == f'model-00001-of-{len(files):05}.safetensors'
  sizes = [safetensors.numpy.load_file(directory / file) for file in files]
  total = sum(x.nbytes for tensors in sizes for x in tensors.values())
  assert index['metadata']['total_size'] == total
  loaded = huggingface.load(str(directory), config, mesh)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  # Another export into the same directory removes all its files.
  monkeypatch.setattr(export, 'FILE_BYTES', 10**9)
  huggingface.save(str(directory), config, params, dtype='float32')
  assert [p.name for p in directory.glob('*.safetensors*')] == [
    'model.safetensors'
  ]


_READ = """
import sys
import jax, numpy as np
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface
config = huggingface.read_config(sys.argv[1], dtype='float32')
mesh = mesh_lib.make_mesh(1, -1, 1)
jax.block_until_ready(jax.numpy.zeros(8) + 1)
def peak():
  # Not ru_maxrss, which starts at the value of the parent process.
  lines = open('/proc/self/status').read().splitlines()
  return next(1024 * int(x.split()[1]) for x in lines if 'VmHWM' in x)
before = peak()
params = huggingface.load(sys.argv[1], config, mesh)
size = sum(x.nbytes for x in jax.tree.leaves(params))
print('above', peak() - before - size)
"""


@pytest.mark.slow
@pytest.mark.skipif(
  not os.path.exists('/proc/self/status'), reason='reads Linux /proc'
)
def test_loading_needs_little_more_memory_than_the_parameters(tmp_path):
  config = dataclasses.replace(
    _config(), hidden_size=512, intermediate_size=4096, num_layers=24
  )
  shapes = jax.eval_shape(lambda: reference.init(config, jax.random.key(0)))
  params = jax.tree.map(lambda x: jax.numpy.ones(x.shape, x.dtype), shapes)
  huggingface.save(str(tmp_path), config, params, dtype='float32')
  largest = 4 * 512 * 4096
  process = subprocess.run(
    [sys.executable, '-c', _READ, str(tmp_path)],
    capture_output=True,
    text=True,
    check=True,
    env=os.environ | {'XLA_FLAGS': ''},
  )
  above = int(process.stdout.split('above')[1])
  # The largest tensor as read, transposed and on the device (the same memory on
  # a CPU), and compiled programs. A stack of all layers would be 24 tensors.
  assert above < 4 * largest + 130 * 2**20


def _cache(root: pathlib.Path, directory: pathlib.Path) -> None:
  """Creates a hub cache that contains a directory as team/small."""
  repository = root / 'models--team--small'
  snapshot = repository / 'snapshots' / ('0' * 40)
  snapshot.parent.mkdir(parents=True)
  snapshot.symlink_to(directory)
  (repository / 'refs').mkdir()
  (repository / 'refs' / 'main').write_text('0' * 40)


def test_a_name_on_the_hub_is_looked_up_in_the_cache(
  saved, tmp_path_factory, monkeypatch
):
  directory, config, _ = saved
  root = tmp_path_factory.mktemp('hub')
  _cache(root, directory)
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(root))
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  huggingface.download.cache_clear()
  folder = model_check.model_directory('team/small')
  assert huggingface.read_config(folder, dtype='float32') == config
  with pytest.raises(ValueError, match='model.path=team/other: no such') as e:
    model_check.model_directory('team/other')
  assert len(str(e.value).splitlines()) == 1
  assert model_check.model_directory('a/b/c') == 'a/b/c'


def test_fingerprints_differ_between_models_and_revisions(
  saved, tmp_path_factory
):
  root = tmp_path_factory.mktemp('folders')
  folders = {
    name: root / name
    for name in (
      'one',
      'copy',
      'config',
      'weights',
      'longer',
      'snapshots/a',
      'snapshots/b',
    )
  }
  for folder in folders.values():
    shutil.copytree(saved[0], folder)
  with (folders['config'] / 'config.json').open('a') as file:
    file.write(' ')
  with (folders['longer'] / 'model.safetensors').open('ab') as file:
    file.write(b' ')
  with (folders['weights'] / 'model.safetensors').open('r+b') as file:
    file.seek(-1, os.SEEK_END)
    last = file.read(1)
    file.seek(-1, os.SEEK_END)
    file.write(bytes([last[0] ^ 1]))
  (folders['copy'] / 'chat_template.jinja').write_text('a')
  fingerprints = {
    name: huggingface.fingerprints(str(folder))
    for name, folder in folders.items()
  }
  assert fingerprints['one']['files'] == fingerprints['copy']['files']
  models = {each['files'] for each in fingerprints.values()}
  assert len(models) == len(fingerprints) - 1
  # Only one has other files of the tokenizer.
  texts = [each['tokenizer files'] for each in fingerprints.values()]
  assert texts.count(fingerprints['copy']['tokenizer files']) == 1
  assert len(set(texts)) == 2


@pytest.mark.parametrize(
  ('names', 'is_complete'),
  [
    (('model.safetensors', 'tokenizer_config.json'), True),
    (('model.safetensors',), False),
    (('model-00001-of-00004.safetensors', 'tokenizer_config.json'), False),
    (('tokenizer_config.json',), False),
  ],
)
def test_an_incomplete_cache_is_completed(
  tmp_path, monkeypatch, names, is_complete
):
  for name in names:
    (tmp_path / name).touch()
  calls = []

  def snapshot_download(_, *, local_files_only=False, **__):
    calls.append(local_files_only)
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
  huggingface.download.cache_clear()
  assert huggingface.download('team/small') == str(tmp_path)
  assert calls == ([True] if is_complete else [True, False])
  huggingface.download.cache_clear()


def test_an_unsupported_cached_model_is_refused_by_its_config(
  tmp_path, monkeypatch
):
  model = tmp_path / 'model'
  model.mkdir()
  (model / 'config.json').write_text(json.dumps(_CONFIG | {'hidden_act': 'x'}))
  _cache(tmp_path, model)
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  huggingface.download.cache_clear()
  folder = huggingface.download('team/small', only_config=True)
  with pytest.raises(ValueError, match='hidden_act="x"; only "silu"'):
    huggingface.read_config(folder)
