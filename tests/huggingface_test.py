"""Hugging Face directories in and out, and what is refused."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy

from gigpo_jax import config as config_lib
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface, qwen

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
  params = qwen.init(config, jax.random.key(0))
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
  whole = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(whole)
  names = sorted(tensors)
  parts = {'a.safetensors': names[::2], 'b.safetensors': names[1::2]}
  for file, part in parts.items():
    safetensors.numpy.save_file({n: tensors[n] for n in part}, directory / file)
  weight_map = {n: file for file, part in parts.items() for n in part}
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': weight_map})
  )
  whole.unlink()
  loaded = huggingface.load(str(directory), config, mesh)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_transformers_loads_the_export_and_gives_the_same_tokens(saved, mesh):
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
  hidden = qwen.hidden_states(config, params, tokens)
  found = qwen.logits(config, params, hidden)
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_bfloat16_export_rounds(tmp_path, mesh):
  config = _config()
  params = qwen.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params)
  loaded = huggingface.load(str(tmp_path), config, mesh)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(
      a, np.asarray(b).astype('bfloat16').astype(np.float32)
    ),
    loaded,
    params,
  )


def test_both_spellings_of_rope_theta(tmp_path):
  huggingface.save(
    str(tmp_path), _config(), qwen.init(_config(), jax.random.key(0))
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
  with pytest.raises(ValueError, match='no config.json there'):
    huggingface.read_config(str(tmp_path))
  (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
  with pytest.raises(ValueError, match='model_type llama is not supported'):
    huggingface.read_config(str(tmp_path))
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='not JSON'):
    huggingface.read_config(str(tmp_path))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'use_sliding_window': True}, 'use_sliding_window is not supported'),
    ({'rope_scaling': {'type': 'yarn'}}, 'rotary scaling .* is not supported'),
    ({'rope_scaling': {'type': 'linear'}}, 'known: none .*, or yarn with'),
    (
      {
        'rope_scaling': {
          'type': 'yarn',
          'factor': 4,
          'original_max_position_embeddings': 16,
          'truncate': False,
        }
      },
      'known: none .*, or yarn with',
    ),
    ({'model_type': 'qwen3', 'attention_bias': True}, 'attention_bias is not'),
    ({'vocab_size': None}, 'lacks vocab_size; all are needed'),
  ],
  ids=['window', 'yarn', 'linear', 'ramp', 'bias', 'lacking'],
)
def test_unsupported_configs_are_refused(saved, change: dict, message: str):
  directory, _, _ = saved
  path = directory / 'config.json'
  raw = json.loads(path.read_text()) | change
  path.write_text(
    json.dumps({key: value for key, value in raw.items() if value is not None})
  )
  with pytest.raises(ValueError, match=message):
    huggingface.read_config(str(directory))


def test_an_index_without_its_files_is_refused(saved):
  directory, config, _ = saved
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': {'model.norm.weight': 'gone.safetensors'}})
  )
  with pytest.raises(ValueError, match='names gone.safetensors, which is not'):
    huggingface.check(str(directory), config)


def test_an_index_that_names_the_wrong_file_is_refused(saved):
  directory, config, _ = saved
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  gone = tensors.pop('model.norm.weight')
  safetensors.numpy.save_file(tensors, directory / 'model.safetensors')
  safetensors.numpy.save_file({'odd': gone}, directory / 'b.safetensors')
  weight_map = dict.fromkeys(tensors, 'model.safetensors')
  weight_map['model.norm.weight'] = 'b.safetensors'
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': weight_map})
  )
  with pytest.raises(
    ValueError, match=r'model\.norm\.weight is missing from b\.safetensors'
  ):
    huggingface.check(str(directory), config)


def test_tokenizer_files_go_along(saved, tmp_path_factory):
  _, config, params = saved
  source, target = (tmp_path_factory.mktemp(name) for name in ('a', 'b'))
  (source / 'tokenizer.json').write_text('{"of": "a"}')
  (source / 'other.txt').write_text('not one')
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
  with pytest.raises(ValueError, match=r'no \*\.safetensors there'):
    huggingface.check(str(directory), config)
  (directory / 'model.safetensors').write_bytes(b'not one')
  with pytest.raises(ValueError, match='not a readable safetensors file'):
    huggingface.check(str(directory), config)


def test_a_large_export_is_split_and_read_again(saved, mesh, monkeypatch):
  directory, config, params = saved
  monkeypatch.setattr(huggingface, 'FILE_BYTES', 3000)
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
  # An export over it leaves nothing of it.
  monkeypatch.setattr(huggingface, 'FILE_BYTES', 10**9)
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
  # Not ru_maxrss, which begins at that of the process it was started from.
  lines = open('/proc/self/status').read().splitlines()
  return next(1024 * int(x.split()[1]) for x in lines if 'VmHWM' in x)
before = peak()
params = huggingface.load(sys.argv[1], config, mesh)
size = sum(x.nbytes for x in jax.tree.leaves(params))
print('above', peak() - before - size)
"""


@pytest.mark.skipif(
  not os.path.exists('/proc/self/status'), reason='reads Linux /proc'
)
def test_reading_needs_little_more_than_the_parameters(tmp_path):
  config = dataclasses.replace(
    _config(), hidden_size=512, intermediate_size=4096, num_layers=24
  )
  params = qwen.init(config, jax.random.key(0))
  huggingface.save(str(tmp_path), config, params, dtype='float32')
  largest = 4 * 512 * 4096
  done = subprocess.run(
    [sys.executable, '-c', _READ, str(tmp_path)],
    capture_output=True,
    text=True,
    check=True,
    env=os.environ | {'XLA_FLAGS': ''},
  )
  above = int(done.stdout.split('above')[1])
  # Read, transposed, and on the device, which here is the same memory; and
  # programs. A stack of all layers would be 24 of them.
  assert above < 4 * largest + 130 * 2**20


def _cache(root: pathlib.Path, directory: pathlib.Path) -> None:
  """Makes a cache of the hub that holds a directory as team/small."""
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
  huggingface.fetch.cache_clear()
  found = config_lib.model_directory('team/small')
  assert huggingface.read_config(found, dtype='float32') == config
  with pytest.raises(ValueError, match='model.path=team/other: no such') as e:
    config_lib.model_directory('team/other')
  assert len(str(e.value).splitlines()) == 1
  assert config_lib.model_directory('a/b/c') == 'a/b/c'
