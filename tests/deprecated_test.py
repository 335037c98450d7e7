"""Tests that old names work for one release, with a warning."""

import json
import runpy
import sys
import types

import ml_collections
import numpy as np
import preloaded
import pytest

import envs
from configs import alfworld, base, sizes, variants
from gigpo_jax import (
  advantages,
  algorithms,
  anchors,
  deprecated,
  metrics,
  rollout,
  trajectory,
)
from gigpo_jax import config as config_lib
from gigpo_jax.algorithms import gigpo
from gigpo_jax.run import config_fields, run_config
from gigpo_jax.tools import results, sweep_runs, sweep_table

OLD, NEW = 'filter.without_spread', 'filter.drop_zero_variance'
RENAMED = f'{OLD} is deprecated .*; use {NEW}'
_CONFIG_FILE = """
from configs import alfworld

def get_config(arg=''):
  config = alfworld.get_config(arg)
  config.filter.without_spread = True
  return config
"""


@pytest.mark.parametrize(
  ('module', 'old', 'new'),
  [
    (advantages, 'Described', 'RowSegments'),
    (advantages, 'inputs', 'device_inputs'),
    (advantages, 'gigpo_parts', 'gigpo_components'),
    (advantages, 'parts_of', 'make_components'),
    (anchors, 'KINDS', 'ANCHORS'),
    (anchors, 'similar', 'merge_similar'),
    (rollout, 'Clock', 'RolloutClock'),
    (rollout, 'Roller', 'EpisodeRunner'),
  ],
)
def test_old_names_of_modules_work_with_a_warning(module, old, new):
  with pytest.warns(deprecated.RenamedWarning, match=f'{old} .* use .*{new}'):
    assert getattr(module, old) is getattr(module, new)
  with pytest.raises(AttributeError, match='has no attribute'):
    _ = module.no_such_name


@pytest.mark.parametrize('name', ['use_tiny_policy', 'warm_start'])
def test_old_names_of_configs_work_with_a_warning(name: str):
  with pytest.warns(DeprecationWarning, match=f'use configs.sizes.{name}'):
    assert getattr(base, name) is getattr(sizes, name)
  with pytest.warns(DeprecationWarning, match='use configs.variants.parse'):
    assert base.parse_variants is variants.parse


def test_old_parameters_work_with_a_warning():
  with pytest.warns(deprecated.RenamedWarning, match=r'use .*assign_ids'):
    ids = anchors.number([(0, ['a', 'b'])], kind='turn')
  assert ids[0].tolist() == [0, 1]
  with pytest.warns(deprecated.RenamedWarning, match='AlgorithmOutput'):
    output = algorithms.Credit(np.zeros(1), {}, links=np.ones((1, 1), bool))
  with pytest.warns(deprecated.RenamedWarning, match='use value_mask'):
    assert output.links is output.value_mask


def test_segments_are_described_by_the_old_name():
  ones = [1.0, 1.0]
  inputs = advantages.device_inputs(ones, *4 * [[0, 1]], ones, 0.9, 0.1)
  with pytest.warns(deprecated.RenamedWarning, match='use .*segment_rows'):
    described = advantages.describe(*inputs, penalty_scope='reward')
  expected = advantages.segment_rows(inputs, penalty_scope='reward')
  assert described.returns[0].tolist() == expected.returns[0].tolist()


def test_old_members_work_with_a_warning(monkeypatch):
  episode = trajectory.Trajectory(None, 'heat', 0, 0, ())
  with pytest.warns(deprecated.RenamedWarning, match='use task_type'):
    assert episode.kind == 'heat'
  calls = []
  for name in ('run', 'prefetch'):
    monkeypatch.setattr(
      rollout.EpisodeRunner, name, lambda *args, **kwargs: calls.append(kwargs)
    )
  runner = rollout.EpisodeRunner(None, None, None, 1, 'error')
  with pytest.warns(deprecated.RenamedWarning, match='use run'):
    runner.collect({}, [], kind=str)
  with pytest.warns(deprecated.RenamedWarning, match='use prefetch'):
    runner.prepare([], num_members=2)
  assert runner.task_type is str
  assert calls == [{}, {'num_members': 2}]


def test_algorithm_that_defines_credit_works(monkeypatch):
  class Algorithm(gigpo.Algorithm):
    def credit(self, rows, values=None):
      return 'own', super().credit(rows, values)

  module = types.ModuleType('own_algorithm')
  module.Algorithm = Algorithm
  monkeypatch.setitem(sys.modules, 'own_algorithm', module)
  monkeypatch.setattr(envs, 'can_import', lambda name: True)
  with pytest.warns(deprecated.RenamedWarning, match='use compute_advantages'):
    algorithm = algorithms.make('own_algorithm')
  monkeypatch.setattr(
    gigpo.Algorithm, 'compute_advantages', lambda self, rows: 'inherited'
  )
  with pytest.warns(deprecated.RenamedWarning, match='use compute_advantages'):
    assert algorithm.compute_advantages(None) == ('own', 'inherited')


def test_algorithm_that_overrides_parts_works(monkeypatch):
  class Algorithm(gigpo.Algorithm):
    def parts(self, rows):
      return advantages.Components(*(x + 1 for x in super().parts(rows)))

  module = types.ModuleType('own_parts')
  module.Algorithm = Algorithm
  monkeypatch.setitem(sys.modules, 'own_parts', module)
  monkeypatch.setattr(envs, 'can_import', lambda name: True)
  with pytest.warns(deprecated.RenamedWarning, match='use components'):
    algorithm = algorithms.make('own_parts')
  columns = [1.0, 0.0], [0, 0], [0, 1], [0, 0], [0, 0], [True, True]
  rows = types.SimpleNamespace(
    steps_taken=lambda: columns, groups=np.zeros(2, int)
  )
  with pytest.warns(deprecated.RenamedWarning, match='use components'):
    output = algorithm.compute_advantages(rows)
  expected = gigpo.Algorithm().compute_advantages(rows).components
  np.testing.assert_array_equal(output.components.returns, expected.returns + 1)


def test_output_has_its_components_as_parts():
  columns = [1.0, 0.0], [0, 0], [0, 1], [0, 0], [0, 0], [True, True]
  rows = types.SimpleNamespace(
    steps_taken=lambda: columns, groups=np.zeros(2, int)
  )
  output = gigpo.Algorithm().compute_advantages(rows)
  with pytest.warns(deprecated.RenamedWarning, match='use components'):
    assert output.parts is output.components


def test_environment_with_kind_works(monkeypatch):
  class Tasks:
    def __len__(self):
      return 9

    def kind(self, index):
      return f'kind {index}'

  module = types.ModuleType('own_env')
  module.Env, module.tasks = object, lambda split: Tasks()
  monkeypatch.setitem(sys.modules, 'own_env', module)
  monkeypatch.setattr(envs, 'can_import', lambda name: True)
  with pytest.warns(DeprecationWarning, match='rename it to task_type'):
    tasks = envs.tasks('own_env', 'train')
  assert tasks.task_type(3) == 'kind 3'


def test_old_field_of_a_config_file_works_with_a_warning(tmp_path):
  (tmp_path / 'own.py').write_text(_CONFIG_FILE)
  get_config = runpy.run_path(str(tmp_path / 'own.py'))['get_config']
  config = get_config('tiny').lock()
  with pytest.warns(deprecated.RenamedWarning, match=RENAMED):
    config_lib.validate(config)
  assert config.filter.drop_zero_variance
  assert 'without_spread' not in config.filter
  config = get_config('tiny')
  with pytest.warns(deprecated.RenamedWarning):
    deprecated.update(config, given={NEW: False})
  assert not config.filter.drop_zero_variance


def test_a_run_with_defaults_of_an_older_release_resumes(tmp_path):
  config = base.get_config()
  run_config.save(config, str(tmp_path))
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  stored = json.loads((tmp_path / 'config.json').read_text())
  stored['model']['decode_attention'] = 'xla'
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  run_config.check_resume(config, str(tmp_path))
  config.model.decode_attention = 'triton'
  problem = r'config: model.decode_attention=triton \(was xla\);'
  with pytest.raises(ValueError, match=problem):
    run_config.check_resume(config, str(tmp_path))


def test_the_old_default_of_a_weight_is_a_choice_in_new_configs(tmp_path):
  config = base.get_config()
  config.algorithm.episode_weight = 0.0
  run_config.save(config, str(tmp_path))
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  config.algorithm.episode_weight = None
  with pytest.raises(ValueError, match=r'episode_weight=None \(was 0.0\)'):
    run_config.check_resume(config, str(tmp_path))
  stored = json.loads((tmp_path / 'config.json').read_text())
  del stored['algorithm']['step_lambda']
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  run_config.check_resume(config, str(tmp_path))


def test_old_field_of_a_stored_config_equals_the_new_field(tmp_path):
  config = alfworld.get_config('tiny')
  config.filter.drop_zero_variance = True
  run_config.save(config, str(tmp_path))
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  stored = json.loads((tmp_path / 'config.json').read_text())
  stored['filter']['without_spread'] = stored['filter'].pop(
    'drop_zero_variance'
  )
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  run_config.check_resume(config, str(tmp_path))
  config.filter.drop_zero_variance = False
  with pytest.raises(ValueError, match=rf'{NEW}=False \(was True\)'):
    run_config.check_resume(config, str(tmp_path))


def test_old_field_of_a_sweep_works_with_a_warning():
  run = sweep_runs.Run('x', 'configs/alfworld.py:tiny', 0, ((OLD, True),))
  with pytest.warns(deprecated.RenamedWarning, match=RENAMED):
    assert run.load().filter.drop_zero_variance


def test_new_sections_are_created():
  old, new = 'a.b', 'c.d.e'
  stored = {'a': {'b': 1, 'x': 2}}
  deprecated._move(stored, old, new)
  assert stored == {'a': {'x': 2}, 'c': {'d': {'e': 1}}}


def test_fields_that_the_config_lacks_keep_their_names():
  config = ml_collections.ConfigDict({'filter': {}})
  assert deprecated.renamed({OLD: 1, 'seed': 2}, config) == {OLD: 1, 'seed': 2}
  assert deprecated.flag(f'--config.{OLD}=1', config) == f'--config.{OLD}=1'


@pytest.mark.parametrize('own', [False, True])
def test_old_flag_works_and_is_reported_in_one_line(tmp_path, own: bool):
  (tmp_path / 'own.py').write_text(_CONFIG_FILE)
  process = preloaded.Process(
    [
      sys.executable,
      'launch/train.py',
      f'--config={tmp_path / "own.py" if own else "configs/alfworld.py"}:tiny',
      f'--config.{OLD}=True',
      '--config.filter.max_refills=-1',
      f'--workdir={tmp_path / "run"}',
    ]
  )
  _, errors = process.communicate(timeout=120)
  warning, error = errors.splitlines()
  assert warning == (
    f'{OLD} is deprecated and is removed in the next release; use {NEW}'
  )
  assert error.startswith('filter.max_refills=-1: ')


@pytest.mark.parametrize(('old', 'new'), deprecated.FIELDS.items())
def test_every_old_field_has_a_new_one(old: str, new: str):
  config = alfworld.get_config('tiny')
  with pytest.warns(deprecated.RenamedWarning, match=f'{old} .* use {new}'):
    assert deprecated.renamed({old: 1}, config) == {new: 1}
  section, _, name = old.rpartition('.')
  value = not config_fields.get(config, new)
  config[section][name] = type(config_fields.get(config, new))(value)
  with pytest.warns(deprecated.RenamedWarning, match=f'{old} .* use {new}'):
    deprecated.update(config)
  assert config_fields.get(config, new) == value


def test_old_metrics_are_read_under_their_new_names(tmp_path):
  old = {'iteration': 0} | dict.fromkeys(deprecated.METRICS, 0.5)
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(old) + '\n')
  expected = {'iteration': 0} | dict.fromkeys(deprecated.METRICS.values(), 0.5)
  assert metrics.read(tmp_path) == [expected]
  path = results.PROJECT / 'docs/results/credit.csv'
  text = path.read_text()
  for name, new in deprecated.METRICS.items():
    text = text.replace(new, name)
  (tmp_path / 'old.csv').write_text(text)
  read = sweep_table.read(tmp_path / 'old.csv')
  assert read == sweep_table.read(path)
  assert read[1]['advantage/zero_variance_groups'] is not None
