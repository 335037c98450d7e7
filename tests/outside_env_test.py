"""Tests that an environment needs one folder and one registry line only.

The tests copy ALFWorld's folder out of the tree under another name, register
the copy with one line and train on it.
"""

import json
import shutil
import sys

import programs
import pytest

from configs import alfworld, variants
from envs.alfworld import games
from gigpo_jax import config as config_lib

_SCRIPT = """
import sys

import envs

envs.REGISTRY['house'] = 'house.env'

if __name__ == '__main__':
  from configs import alfworld, variants
  from gigpo_jax import train

  config = alfworld.get_config('smoke')
  config.env.name, config.env.data_dir = 'house', ''
  variants.apply(config, ['sampo', 'rloo'])
  config.num_iterations, config.evaluation.every = 1, 0
  config.rollout.groups, config.env.max_steps = 2, 3
  config.rollout.prompt_buckets = (320,)
  config.learner.length_buckets = (360,)
  config.evaluation.split, config.evaluation.num_tasks = 'train', 2
  train.train(config, sys.argv[1])
"""


@pytest.fixture(name='outside')
def fixture_outside(tmp_path):
  """Returns a folder with the copied package `house` and its data."""
  folder = tmp_path / 'outside'
  shutil.copytree(
    programs.PROJECT / 'envs/alfworld',
    folder / 'house',
    ignore=shutil.ignore_patterns('__pycache__'),
  )
  for path in (folder / 'house').glob('*.py'):
    text = path.read_text().replace('ALFWORLD_DATA', 'HOUSE_DATA')
    path.write_text(text.replace('envs.alfworld', 'house'))
  games.main(['--out', str(folder / 'data'), '--num', '4'])
  (folder / 'train_house.py').write_text(_SCRIPT)
  return folder


@pytest.mark.slow
def test_copied_environment_trains(tmp_path, outside):
  programs.run(
    [sys.executable, str(outside / 'train_house.py'), str(tmp_path / 'run')],
    PYTHONPATH=f'{programs.PROJECT}:{outside}',
    HOUSE_DATA=str(outside / 'data'),
    XLA_FLAGS=programs.QUICK,
  )
  stored = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert stored['env']['name'] == 'house'
  assert stored['algorithm']['name'] == 'rloo'
  # The environment's own preset of the variant `sampo`.
  assert stored['algorithm']['anchor'] == 'observation_and_actions'
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(lines[0])['train/failed_episodes'] == 0


def test_copied_environment_reports_its_data(monkeypatch, outside):
  monkeypatch.syspath_prepend(str(outside))
  monkeypatch.delenv('HOUSE_DATA', raising=False)
  config = alfworld.get_config('smoke')
  config.env.name, config.env.data_dir = 'house.env', ''
  variants.apply(config, ['sampo'])
  assert list(config_lib._missing_environment(config)) == [
    'env.data_dir=: no ALFWorld games; run `alfworld-download` and set '
    '$HOUSE_DATA or env.data_dir to its folder, or use env.data_dir=generated'
  ]
  monkeypatch.setenv('HOUSE_DATA', str(outside / 'data'))
  kwargs = config_lib.env_kwargs(config)
  assert kwargs['data_dir'] == str(outside / 'data')
  assert kwargs['anchor'] == 'observation_and_actions'
  config.env.engine = 'unity'
  assert 'env.engine=unity: unknown; must be one of textworld, native' in (
    list(config_lib._environment(config))
  )
