"""Tests that environments, which workers import, never load jax."""

import pathlib
import subprocess
import sys

import pytest

import envs

ROOT = pathlib.Path(envs.__file__).parents[1]
MODULES = sorted(
  '.'.join(path.relative_to(ROOT).with_suffix('').parts)
  for path in (ROOT / 'envs').rglob('*.py')
)


def _loaded(names: list[str], play: str = '') -> set[str]:
  """Returns the forbidden packages that are loaded with the modules."""
  code = (
    'import importlib, sys\n'
    f'for name in {names!r}: importlib.import_module(name)\n'
    f'{play}\n'
    "print(*{'jax', 'jaxlib', 'flax', 'gigpo_jax'} & set(sys.modules))"
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT,
  )
  return set(done.stdout.split())


def test_all_modules_of_envs_are_found():
  known = {'envs.base', 'envs.toy', 'envs.worker', 'envs.webshop.env'}
  assert known <= set(MODULES)


def test_no_module_of_envs_loads_jax_or_the_trainer():
  # Each module is imported without the others, as in a worker.
  code = """
import importlib, sys
for module in sys.argv[1:]:
  for name in [n for n in sys.modules if n.split('.')[0] == 'envs']:
    del sys.modules[name]
  importlib.import_module(module)
  loaded = {'jax', 'jaxlib', 'flax', 'gigpo_jax'} & set(sys.modules)
  assert not loaded, f'{module} loads {loaded}'
"""
  done = subprocess.run(
    [sys.executable, '-c', code, *MODULES],
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  ('name', 'kwargs'),
  [
    ('gymnasium', {'id': 'FrozenLake-v1', 'observe': 'render'}),
    ('search_qa', {}),
    ('textarena', {'id': 'TowerOfHanoi-v0'}),
  ],
)
def test_libraries_of_environments_do_not_load_jax(name, kwargs):
  play = (
    f'env = envs.make({name!r}, **{kwargs!r})\n'
    'env.reset(base.Task("train", 0))\n'
    'env.step("<think>a</think><search>b</search><action>down</action>")'
  )
  assert _loaded([], f'import envs\nfrom envs import base\n{play}') == set()


def test_the_check_detects_jax():
  assert 'jax' in _loaded(['jax'])
