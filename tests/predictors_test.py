"""Tests of benchmarks/predictors.py."""

import importlib
import pathlib
import sys

import numpy as np
import pytest

from gigpo_jax import metrics

_BENCHMARKS = str(pathlib.Path(__file__).parents[1] / 'benchmarks')


@pytest.fixture(name='predictors')
def fixture_predictors(monkeypatch):
  """Imports the module; the folder `benchmarks` is no package."""
  monkeypatch.syspath_prepend(_BENCHMARKS)
  module = importlib.import_module('predictors')
  yield module
  del sys.modules['predictors']


def test_an_expert_without_noise_and_one_with_noise(
  predictors, monkeypatch, capsys
):
  rows = []
  for noise in ('0', '0.5'):
    command = ['predictors.py', '--config=configs/keydoor.py:tiny']
    command += ['--set', 'rollout.groups=4', f'--expert_noise={noise}']
    monkeypatch.setattr(sys, 'argv', command)
    predictors.main()
    *_, row = capsys.readouterr().out.strip().splitlines()
    rows.append([cell.strip() for cell in row.strip('|').split('|')])
  perfect, noisy = rows
  # All 32 episodes succeed along the same way, so nothing is compared.
  assert perfect[1:3] == ['32', '100.0% [51.0%, 100.0%]']
  assert perfect[4:] == ['0.0%', '0.0%', 'nan', '100.0%']
  values = [float(cell.partition('%')[0]) for cell in noisy[2:]]
  success, steps, revisits, singletons, correlation, zero_variance = values
  assert 0 < success < 100 and 0 < revisits < 100 and 0 < singletons < 100
  assert steps > float(perfect[3]) and 0 < correlation <= 1
  assert zero_variance < 100


def test_settings_of_configs_and_sweeps(predictors):
  runs = predictors.find_runs(
    ['configs/keydoor.py:mini', 'configs/keydoor.py:mini,grpo'],
    'configs/sweeps/keydoor.py',
    ['env.history_length=3', 'seed=3', 'env.prompt_style=paper'],
  )
  assert list(runs)[:4] == [
    *('keydoor', 'keydoor mini,grpo'),
    *('keydoor horizon 16', 'keydoor horizon 48'),
  ]
  assert len(runs) == 11
  config = runs['keydoor horizon 16'].load()
  assert (config.env.max_steps, config.env.history_length) == (16, 3)
  assert (config.seed, config.env.prompt_style) == (3, 'paper')
  assert config.rollout.groups == 64 and config.algorithm.name == 'gigpo'


@pytest.mark.parametrize(
  ('successes', 'independent'),
  [
    # Means 1, 0, 1 and 0 have variance 1/3, their mean 1/12: 1/4 / (1/12) = 3
    # is below the number of groups.
    ([[1, 1], [0, 0], [1, 1], [0, 0]], 4),
    # Means 1, 1/2, 0 and 1/2 have variance 1/6, their mean 1/24.
    ([[1, 1], [1, 0], [0, 0], [0, 1]], 6),
    # Means without variance: all episodes count, or only the groups.
    ([[1, 0], [0, 1], [1, 0], [1, 0]], 8),
    ([[1, 1], [1, 1]], 2),
  ],
)
def test_interval_of_success_counts_groups(predictors, successes, independent):
  successes = np.array(successes, bool)
  expected = metrics.wilson(successes.mean() * independent, independent)
  assert predictors.success_interval(successes) == pytest.approx(expected)


def test_a_missing_folder_is_refused_before_the_episodes(
  predictors, monkeypatch, capsys
):
  command = ['predictors.py', '--config=none.py', '--output=no/a.json']
  monkeypatch.setattr(sys, 'argv', command)
  with pytest.raises(SystemExit):
    predictors.main()
  assert '--output=no/a.json: no such folder' in capsys.readouterr().err
