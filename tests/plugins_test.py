"""Tests that central modules name no environment or algorithm."""

import ast
import dataclasses
import importlib
import pathlib
import re

import numpy as np
import pytest

import envs
from configs import base, variants
from gigpo_jax import (
  algorithms,
  batch,
  losses,
  modulators,
  options,
  plugins,
  selectors,
)
from gigpo_jax import config as config_lib
from gigpo_jax.run import config_fields

PROJECT = pathlib.Path(envs.__file__).parents[1]
ROOMS = ('run', 'programs', 'runtime')
CENTRAL = (
  'configs/base.py',
  'configs/sizes.py',
  'configs/variants.py',
  'envs/__init__.py',
  'envs/base.py',
  'envs/checks.py',
  'envs/play.py',
  'gigpo_jax/modulators/__init__.py',
  'gigpo_jax/selectors/__init__.py',
  *(
    str(path.relative_to(PROJECT))
    for room in ('gigpo_jax', *(f'gigpo_jax/{n}' for n in ROOMS), 'launch')
    for path in sorted(PROJECT.glob(f'{room}/*.py'))
  ),
)
FAMILIES = (modulators.FAMILY, selectors.FAMILY)
REGISTRIES = [
  envs.REGISTRY,
  algorithms.REGISTRY,
  losses.REGISTRY,
  *(family.registry for family in FAMILIES),
]
# `truncated` is also a word of rows and metrics, `endpoint` a module.
NAMES = set().union(*REGISTRIES) - {'truncated', 'mismatch', 'endpoint'}


def _strings_and_names(tree: ast.Module) -> list[str]:
  """Returns the strings, names and imports of a module, without docstrings."""
  documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
  docstrings = {
    id(node.body[0].value)
    for node in ast.walk(tree)
    if isinstance(node, documented) and ast.get_docstring(node) is not None
  }
  words = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      words += [] if id(node) in docstrings else [node.value]
    elif isinstance(node, ast.Name | ast.Attribute | ast.alias):
      words.append(getattr(node, 'id', getattr(node, 'attr', '')))
      words.append(getattr(node, 'name', ''))
    elif isinstance(node, ast.ImportFrom):
      words.append(node.module or '')
  return words


def _registered_names(path: str) -> set[str]:
  """Returns the environments and algorithms that a module names."""
  tree = ast.parse((PROJECT / path).read_text())
  # A literal registry contains the names.
  tree.body = [
    node
    for node in tree.body
    if not (
      isinstance(node, ast.Assign)
      and ast.unparse(node.targets[0]) == 'REGISTRY'
    )
  ]
  words = {
    word
    for text in _strings_and_names(tree)
    for word in re.findall(r'\w+', text)
  }
  return words & NAMES


@pytest.mark.parametrize('path', CENTRAL)
def test_no_central_module_names_an_environment_or_algorithm(path: str):
  # Defaults, functions that are named after them, and examples of commands.
  allowed = {
    'configs/base.py': {'gigpo', 'policy_gradient'},
    'gigpo_jax/advantages.py': {'gigpo'},
    'gigpo_jax/losses.py': {'policy_gradient'},
    'gigpo_jax/teacher.py': {'policy_gradient'},
    'launch/command.py': {'alfworld'},
  }
  assert _registered_names(path) <= allowed.get(path, set())


def test_the_default_algorithm_is_named_once():
  tree = ast.parse((PROJECT / 'configs/base.py').read_text())
  assert _strings_and_names(tree).count(base.DEFAULT_ALGORITHM) == 1


@pytest.mark.parametrize(
  'path', sorted(PROJECT.glob('configs/**/*.py')), ids=lambda path: path.stem
)
def test_configs_do_not_import_the_trainer(path: pathlib.Path):
  for node in ast.walk(ast.parse(path.read_text())):
    modules = [alias.name for alias in getattr(node, 'names', [])]
    modules += [getattr(node, 'module', None) or '']
    assert not any(module.startswith('gigpo_jax') for module in modules)


@pytest.mark.parametrize('registry', REGISTRIES)
def test_registries_are_sorted(registry):
  assert list(registry) == sorted(registry)


@pytest.mark.parametrize(
  'path', [*algorithms.REGISTRY.values(), *modulators.REGISTRY.values()]
)
def test_a_method_that_reads_success_says_so(path: str):
  module = importlib.import_module(path)
  method = getattr(module, 'Algorithm', None) or module.Modulator
  if re.search(r'\.success\b', pathlib.Path(module.__file__).read_text()):
    assert plugins.reads_success(method)


def test_presets_are_for_known_variants():
  for name in envs.REGISTRY:
    assert envs.presets(name).keys() <= set(variants.PRESETS)
  for name in algorithms.REGISTRY:
    presets = getattr(variants._algorithm(name), 'PRESETS', {})
    assert presets.keys() <= {name, *variants.PRESETS}


@pytest.mark.parametrize(
  ('section', 'path'),
  [(s, path) for s, paths in config_lib.SECTIONS.items() for path in paths],
)
def test_configs_list_the_defaults_of_options(section: str, path: str):
  module, _, name = path.partition(':')
  config = base.get_config()
  values = config_fields.get(config, section) if section else config
  for field in dataclasses.fields(
    getattr(importlib.import_module(module), name)
  ):
    if dataclasses.is_dataclass(field.default):
      continue  # A separate section.
    assert values[field.name] == field.default, field.name
    assert type(values[field.name]) is type(field.default), field.name


def test_configs_list_the_defaults_of_algorithms():
  values = base.get_config().algorithm
  for name in algorithms.REGISTRY:
    for option, default in options.defaults(
      variants._algorithm(name).Algorithm
    ).items():
      assert values[option] == default, (name, option)


@pytest.mark.parametrize('family', FAMILIES, ids=lambda family: family.field)
def test_configs_list_the_defaults_of_plugins(family: plugins.Family):
  section, _, field = family.field.partition('.')
  values = base.get_config()[section]
  assert values[field] == ()
  owners = {}
  for name in family.registry:
    for option in dataclasses.fields(family.find(name)):
      assert values[option.name] == option.default, (name, option.name)
      assert owners.setdefault(option.name, name) == name
  others = set()
  if section == 'algorithm':
    modules = map(variants._algorithm, algorithms.REGISTRY)
    others = {o for m in modules for o in options.defaults(m.Algorithm)}
  assert not others & set(owners)


class Returning:
  """An algorithm of another project that returns a given output."""

  needs_values = False

  def __init__(self, output):
    self.output = output

  def compute_advantages(self, rows):
    return self.output


@pytest.mark.parametrize(
  ('output', 'message'),
  [
    (np.zeros(2), 'returned ndarray; must be algorithms.AlgorithmOutput'),
    (None, 'returned NoneType; must be algorithms.AlgorithmOutput'),
    (
      algorithms.AlgorithmOutput(np.array([0.0, np.nan]), {}),
      'returned 1 values that are not finite; must be numbers',
    ),
    (
      algorithms.AlgorithmOutput(np.zeros(2), {'advantage/x': 'high'}),
      'returned advantage/x, a str; must be a number',
    ),
    (
      algorithms.AlgorithmOutput(np.zeros(2), {'advantage/x': np.zeros(2)}),
      'returned advantage/x, a ndarray; must be a number',
    ),
    (
      algorithms.AlgorithmOutput(np.zeros(2), {'train/success_rate': 1.0}),
      'returned train/success_rate, a metric of the trainer; must have another',
    ),
    (
      algorithms.AlgorithmOutput(np.zeros(2), {'iteration': 1.0}),
      'returned iteration, a metric of the trainer; must have another',
    ),
  ],
)
def test_wrong_results_of_an_algorithm_are_refused(output, message):
  sizes = {'max_prompt_tokens': 2, 'max_completion_tokens': 2}
  rows = batch.pack([[1], [2]], [[1], [2]], row_multiple=2, **sizes)
  with pytest.raises(ValueError, match=f'^algorithm.name: {message}'):
    algorithms.compute(Returning(output), rows, None, {})
