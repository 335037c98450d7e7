"""Tests that mistakes in a user's module are reported in one line."""

import sys
import types

import algorithm_rows
import numpy as np
import pytest

import envs
from configs import base, variants
from envs import checks, rewards
from gigpo_jax import algorithms, losses, modulators, plugins, selectors
from gigpo_jax import config as config_lib
from gigpo_jax.runtime import errors

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
  'no_int': ("int('x')", 'ValueError', 'no_int.py:3'),
  'quit_early': ('import sys; sys.exit(0)', 'SystemExit: 0 (quit_early.py:3)'),
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


@pytest.mark.parametrize(
  ('field', 'arguments', 'expected'),
  [
    ('name', 'outputs', r'too many .*; must be a function of \(outputs, tok'),
    ('reward.functions', 'prompts, completions', 'missing .*completions'),
    ('filter.select', 'advantages, rows', 'too many .*rows, signals'),
  ],
)
def test_a_function_of_other_arguments(
  tmp_path, monkeypatch, field, arguments, expected
):
  (tmp_path / 'of_others.py').write_text(
    f'def loss({arguments}): ...\nreward = select = loss\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'of_others', raising=False)
  with pytest.raises(ValueError, match=f'^{field}=of_others.*: {expected}'):
    IMPORTERS[field]('of_others')


def test_a_function_without_a_signature_is_accepted():
  assert checks.import_named(
    'env.observe', 'builtins:max', accepted='', takes=('observation',)
  )


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


def test_ctrl_c_in_a_module_is_no_mistake():
  with (
    pytest.raises(KeyboardInterrupt),
    envs.explain_errors('env.name=own', 'tasks', ''),
  ):
    raise KeyboardInterrupt


CLASS = """
import dataclasses

@dataclasses.dataclass
class Algorithm:
  {fields}
  def __call__(self, *args): ...
  def compute_advantages(self, rows): ...
"""
INCOMPLETE = {
  'algorithm.name=mine: ': lambda: algorithms.make('mine'),
  'name=mine:Algorithm: ': lambda: losses.make('mine:Algorithm'),
  'filter.select=mine:Algorithm: ': lambda: selectors.FAMILY.make(
    {'select': ('mine:Algorithm',)}
  ),
}


@pytest.mark.parametrize('start', INCOMPLETE)
@pytest.mark.parametrize(
  ('fields', 'expected'),
  [
    ('scale: float', "missing a required argument: 'scale'; must have a def"),
    ('scale: float = 1.0', 'has no .*; must have '),
  ],
)
def test_incomplete_classes_are_refused(
  tmp_path, monkeypatch, start, fields, expected
):
  (tmp_path / 'mine.py').write_text(CLASS.format(fields=fields))
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'mine', raising=False)
  with pytest.raises(ValueError, match=f'^{start}{expected}') as raised:
    INCOMPLETE[start]()
  assert len(str(raised.value).splitlines()) == 1
  sys.modules.pop('mine')


def test_an_algorithm_is_a_class(tmp_path, monkeypatch):
  (tmp_path / 'instance.py').write_text('Algorithm = object()\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match='=instance: the module has no class'):
    algorithms.make('instance')


# Value of a function that must yield lines: start of the line about it.
NO_LINES = {
  "'not allowed'": 'returned no lines; it must yield a line for each problem',
  'None': 'returned no lines; it must yield a line for each problem',
  '[1, 2]': 'returned no lines; it must yield a line for each problem',
  '1 / 0': 'raises ZeroDivisionError: division by zero (of_lines.py:2)',
}
LINES_OF = {
  'check_options': ('env.name', lambda name, _: envs.check_options(name, {})),
  'check_installation': (
    'env.name',
    lambda name, _: envs.check_installation(name, {}),
  ),
  'conflicts': ('env.name', lambda _, config: envs.conflicts(config)),
  'conflicts of an algorithm': (
    'algorithm.name',
    lambda _, config: algorithms.conflicts(config),
  ),
}


@pytest.mark.parametrize('call', LINES_OF)
@pytest.mark.parametrize('value', NO_LINES)
def test_a_function_without_lines_is_one_line(
  tmp_path, monkeypatch, call, value
):
  function = call.partition(' ')[0]
  (tmp_path / 'of_lines.py').write_text(
    f'def {function}(given):\n  return {value}\n'
    'def tasks(split): ...\nclass Env: ...\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'of_lines', raising=False)
  config = base.get_config()
  config.env.name = config.algorithm.name = 'of_lines'
  field, lines = LINES_OF[call]
  (line,) = lines('of_lines', config)
  assert line.startswith(f'{field}=of_lines: {function} {NO_LINES[value]}')
  sys.modules.pop('of_lines')


def test_an_explained_error_of_conflicts_is_the_line():
  def conflicts(config):
    raise ValueError(f'rollout.groups={config}: too few')

  module = types.SimpleNamespace(conflicts=conflicts)
  lines = envs.own_lines(module, 'conflicts', 1, 'algorithm.name=mine')
  assert [*lines] == ['rollout.groups=1: too few']


@pytest.mark.parametrize(
  ('code', 'expected'),
  [
    ('agents = lambda kwargs: kwargs.no', 'agents raises AttributeError: '),
    ("agents = lambda kwargs: 'ab'", "agents returned 'ab'; it must return a "),
    ('agents = lambda kwargs: 2', 'agents returned 2; it must return a tuple '),
    ('uses_tools = lambda kwargs: 1 / 0', 'uses_tools raises ZeroDivisionErr'),
    ('answer_start = lambda kwargs: 1 / 0', 'answer_start raises ZeroDivisio'),
    ("ANCHORS = 'observation'", "ANCHORS='observation' is a text; must be a"),
    ("CONTEXTS = 'history'", "CONTEXTS='history' is a text; must be a tuple"),
  ],
)
def test_mistakes_of_an_environment_are_one_line(
  tmp_path, monkeypatch, code, expected
):
  (tmp_path / 'mistaken.py').write_text(
    f'{code}\ndef tasks(split): ...\nclass Env: ...\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'mistaken', raising=False)
  with pytest.raises(ValueError, match='^env.name=mistaken: ') as error:
    for call in (envs.agents, envs.uses_tools, envs.answer_start):
      call('mistaken', {})
  assert f'mistaken: {expected}' in str(error.value)
  assert len(str(error.value).splitlines()) == 1
  sys.modules.pop('mistaken')


@pytest.mark.parametrize('family', [modulators.FAMILY, selectors.FAMILY])
def test_a_function_has_no_conflicts(tmp_path, monkeypatch, family):
  (tmp_path / 'plain.py').write_text(
    'def change(advantages, rows, signals):\n  return advantages\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  config = base.get_config()
  config.update_from_flattened_dict({family.field: ('plain:change',)})
  assert not list(family.conflicts(config))


def _compute(function, rows):
  def compute_advantages(rows):
    return algorithms.AlgorithmOutput(function(None, rows, None), {})

  algorithm = types.SimpleNamespace(
    compute_advantages=compute_advantages, needs_values=False
  )
  algorithms.compute(algorithm, rows, None, {})


def _modulate(function, rows):
  chain = [plugins.Function(function)]
  modulators.apply(chain, np.ones(10), rows, plugins.Signals())


def _select(function, rows):
  chain = [plugins.Function(function)]
  selectors.apply(chain, np.ones(10), rows, plugins.Signals())


CALLS = {
  'algorithm.name': _compute,
  'algorithm.modulators': _modulate,
  'filter.select': _select,
}


@pytest.mark.parametrize('field', CALLS)
@pytest.mark.parametrize('result', [None, np.zeros(3, bool), np.zeros((10, 2))])
def test_results_of_another_shape_are_refused(field, result):
  rows = algorithm_rows.golden_rows()
  with pytest.raises(ValueError, match=f'^{field}: returned shape ') as raised:
    CALLS[field](lambda *_: result, rows)
  assert str(raised.value).endswith('(10, 1), one per completion token')


def test_indices_of_rows_are_no_selection():
  rows = algorithm_rows.golden_rows()
  with pytest.raises(ValueError, match='^filter.select: returned int64; must'):
    _select(lambda *_: np.arange(10), rows)


@pytest.mark.parametrize('field', CALLS)
def test_a_value_error_of_own_code_is_no_wrong_option(field):
  # `launch/command.py` prints a ValueError without its traceback.
  rows = algorithm_rows.golden_rows()
  with pytest.raises(errors.PluginError, match=f'{field}: .*could not be'):
    CALLS[field](lambda *_: np.zeros(2) + np.zeros(3), rows)


def test_a_text_instead_of_a_number_is_refused():
  with pytest.raises(ValueError, match=r'^step_weight=x: out of range; must'):
    algorithms.make('gigpo', step_weight='x')


def test_an_environment_with_data_whose_config_names_no_folder(
  tmp_path, monkeypatch
):
  (tmp_path / 'own_data.py').write_text(
    'from envs import base, toy\n'
    'DATA = base.Data("OWN_DATA", "no games; get them")\n'
    'tasks = toy.tasks\n'
    'class Env:\n'
    '  def __init__(self, data_dir=None): ...\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delenv('OWN_DATA', raising=False)
  config = base.get_config()
  config.env.name = 'own_data'
  with pytest.raises(ValueError, match=r'^env.data_dir=: no games.*\$OWN_DATA'):
    config_lib.validate(config, needs_model=False)
  monkeypatch.setenv('OWN_DATA', str(tmp_path))
  assert config_lib.env_kwargs(config) == {'data_dir': str(tmp_path)}


def test_a_preset_with_a_field_outside_of_sections(tmp_path, monkeypatch):
  (tmp_path / 'long_grpo.py').write_text(
    'from gigpo_jax.algorithms.grpo import Algorithm\n'
    'PRESETS = {"long_grpo": {"num_iterations": 300, "loss.kl_weight": 0.0}}\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  config = base.get_config()
  config.algorithm.name = 'long_grpo'
  assert [field for _, field, *_ in variants.unapplied(config)] == [
    'num_iterations',
    'loss.kl_weight',
  ]
  variants.use_algorithm(config, 'long_grpo')
  assert (config.num_iterations, config.loss.kl_weight) == (300, 0.0)
  assert not list(variants.unapplied(config))
