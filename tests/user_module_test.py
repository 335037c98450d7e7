"""Tests that mistakes in a user's module are reported in one line."""

import pytest

import envs
from envs import checks, rewards
from gigpo_jax import algorithms, losses, selectors

# Code of a module, and what the error of its import says.
BROKEN = {
  'missing_package': ('import no_such_package', "No module named 'no_such_pa"),
  'raising': (
    "\nraise RuntimeError('no\\nlicence')",
    'no licence (raising.py:2',
  ),
  'torn': ('def (:', 'torn.py, line 1'),
  'leaving': ('import sys\nsys.exit(3)', 'SystemExit: 3 (leaving.py:2'),
}
IMPORTERS = {
  'env.name': envs.check,
  'algorithm.name': algorithms.make,
  'name': lambda name: losses.make(name=f'{name}:loss'),
  'reward.functions': lambda name: rewards.make(f'{name}:reward', {}),
  'filter.select': lambda name: selectors.FAMILY.make(
    {'select': (f'{name}:select',)}
  ),
  'env.observe': lambda name: checks.import_named(
    'env.observe', f'{name}:observe', accepted='a function'
  ),
}
TASKS = {
  'range_tasks': ('return range(9)', 'its tasks, a range, have no task_type'),
  'no_length': ('return object()', 'have no __len__; must have'),
  'no_file': ("open('/none')", 'FileNotFoundError', 'no_file.py:3'),
}


@pytest.mark.parametrize('field', IMPORTERS)
@pytest.mark.parametrize('name', BROKEN)
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, name, field):
  code, expected = BROKEN[name]
  (tmp_path / f'{name}.py').write_text(code)
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError) as raised:  # noqa: PT011
    IMPORTERS[field](name)
  text = str(raised.value)
  assert text.startswith(f'{field}={name}') and expected in text
  assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
  'field', ('name', 'reward.functions', 'filter.select', 'env.observe')
)
def test_a_name_that_is_no_function(tmp_path, monkeypatch, field):
  (tmp_path / 'not_callable.py').write_text(
    'import os\nloss = reward = select = observe = os.path\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match=f'^{field}=not_callable') as raised:
    IMPORTERS[field]('not_callable')
  assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize('name', TASKS)
def test_tasks_that_cannot_be_listed(tmp_path, monkeypatch, name):
  code, *expected = TASKS[name]
  (tmp_path / f'{name}.py').write_text(
    f'Env = None\ndef tasks(split, **kwargs):\n  {code}\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match=f'^env.name={name}: ') as raised:
    envs.tasks(name, 'train')
  assert all(words in str(raised.value) for words in expected)
  assert len(str(raised.value).splitlines()) == 1
