"""Tests of the package: imports, names, modules from outside the project."""

import pathlib
import subprocess
import sys

import pytest

import envs
import gigpo_jax
from gigpo_jax import algorithms

PROJECT = pathlib.Path(gigpo_jax.__file__).parents[1]
ENV = """
class Env:
  reset = step = close = print


class Tasks(list):
  def task_type(self, index):
    return 'all'


def tasks(split):
  return Tasks([split])
"""
ALGORITHM = (
  'import dataclasses\n\n\n@dataclasses.dataclass(frozen=True)\n'
  'class Algorithm:\n  weight: float = 1.0\n'
  '  needs_values = needs_group = compute_advantages = None\n'
)


def test_import_does_not_load_jax():
  code = 'import sys, gigpo_jax; print("jax" in sys.modules, dir(gigpo_jax))'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout.startswith('False') and "'advantages'" in done.stdout


def test_commands_import_slow_libraries_when_they_use_them():
  code = (
    'import sys, gigpo_jax.train, gigpo_jax.tools.sweep\n'
    'slow = ("torch", "transformers", "scipy.stats")\n'
    'print([name for name in slow if name in sys.modules])'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout == '[]\n'


def test_public_names_are_modules():
  for name in gigpo_jax.__all__:
    assert getattr(gigpo_jax, name).__name__ == f'gigpo_jax.{name}'
  with pytest.raises(
    AttributeError, match='gigpo_jax has no attribute vantage'
  ):
    gigpo_jax.__getattr__('vantage')


def _write_module(
  folder: pathlib.Path, monkeypatch, name: str, text: str
) -> None:
  (folder / f'{name}.py').write_text(text)
  monkeypatch.syspath_prepend(folder)


def test_a_module_can_be_an_environment(tmp_path, monkeypatch):
  _write_module(tmp_path, monkeypatch, 'outside_env', ENV)
  assert type(envs.make('outside_env')).__name__ == 'Env'
  assert envs.tasks('outside_env', 'train') == ['train']


def test_a_module_can_be_an_algorithm_with_new_options(tmp_path, monkeypatch):
  _write_module(tmp_path, monkeypatch, 'outside_algorithm', ALGORITHM)
  algorithm = algorithms.make('outside_algorithm', weight=2.0)
  assert algorithm.weight == 2.0


@pytest.mark.parametrize('name', ['json', 'no.such', '', '.json', 'alfred'])
def test_other_names_are_refused(name):
  with pytest.raises(ValueError, match=f'^env.name={name}: .*must'):
    envs.check(name)
  with pytest.raises(ValueError, match=f'^algorithm.name={name}: .*must'):
    algorithms.make(name)


def test_included_configs_load_from_any_folder(tmp_path):
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'launch.train',
      '--config=configs/alfworld.py:tiny',
      '--config.rollout.groups=0',
    ],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert done.stderr.startswith('rollout.groups=0: out of range')
  assert len(done.stderr.splitlines()) == 1
  assert not list(tmp_path.iterdir())
