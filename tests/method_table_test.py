"""Tests of docs/methods.md."""

import importlib
import re

import pytest

from configs import base
from gigpo_jax.run import config_fields
from gigpo_jax.tools import method_table, outcomes, sweep_table

PAGE = method_table.PROJECT / 'docs' / 'methods.md'


def test_the_page_is_current():
  text = PAGE.read_text(encoding='utf-8')
  assert text == method_table.page(), 'run python -m gigpo_jax.algorithms'


def test_the_fields_of_the_page_exist():
  config = base.get_config()
  missing = object()
  for field in method_table.config_fields():
    section, _, name = field.rpartition('.')
    assert config_fields.get(config, section).get(name, missing) is not missing


@pytest.mark.parametrize('title', method_table.FAMILIES)
def test_every_method_has_a_formula_and_a_test(title: str):
  family = method_table.FAMILIES[title]
  (path,) = re.findall(r'`(tests/\w+\.py)`', family.text)
  tests = (PAGE.parents[1] / path).read_text(encoding='utf-8')
  assert 'REGISTRY' in tests
  for name, module in family.registry.items():
    plugin = getattr(importlib.import_module(module), family.class_name)
    assert plugin.__doc__.count('\n') == 0 or '\n\n' in plugin.__doc__
    # By name in the registry's tests, and in tests of its own.
    assert re.search(rf'\b{name}\b', tests), name


def test_docstrings_explain_options():
  class Base:
    """One line.

    Attributes:
      first: of the base.
      second: of the base.
    """

  class Derived(Base):
    """One line.

    A paragraph.

    Attributes:
      second: of the class,
        in two lines.
      third: last.

    Another paragraph: not an attribute.
    """

  assert method_table.explanations(Derived) == {
    'first': 'of the base.',
    'second': 'of the class, in two lines.',
    'third': 'last.',
  }


def test_measured_rows_come_from_the_results(tmp_path, monkeypatch):
  folder = tmp_path / 'docs' / 'results'
  folder.mkdir(parents=True)
  rows = [
    {'experiment': experiment, 'name': 'grpo', 'seed': seed}
    | {'iteration': iteration, 'eval/success_rate': rate}
    for experiment, seed, iteration, rate in (
      ('alfworld', 0, 0, 0.1),
      ('alfworld', 0, 56, 0.4),
      ('alfworld', 1, 56, 0.5),
      ('alfworld', 2, 56, 0.6),
      ('webshop', 0, 80, 0.9),
      ('webshop', 1, 80, 0.9),
    )
  ]
  sweep_table.write(folder / 'main.csv', rows)
  monkeypatch.setattr(method_table, 'PROJECT', tmp_path)
  # Mean of 40, 50 and 60, standard error 10 / sqrt(3); two seeds are too few.
  assert method_table._measured('grpo', 'alfworld') == '50.0 ± 5.8'
  assert method_table._measured('grpo', 'webshop') == '–'
  assert method_table._measured('gigpo', 'alfworld') == '–'


def test_tests_replace_evaluations(tmp_path, monkeypatch):
  # Tests have more tasks than the evaluations of a run.
  folder = tmp_path / 'docs' / 'results'
  folder.mkdir(parents=True)
  rows = [
    {'experiment': 'alfworld', 'name': 'grpo', 'seed': seed}
    | {'iteration': 56, 'eval/success_rate': 0.9}
    for seed in range(3)
  ]
  sweep_table.write(folder / 'main.csv', rows)
  results = [
    outcomes.Result('alfworld', 'grpo', seed, 512, rate)
    for seed, rate in enumerate((0.42, 0.43, 0.44))
  ]
  outcomes.write(folder / 'credit_tests.csv', results)
  monkeypatch.setattr(method_table, 'PROJECT', tmp_path)
  assert method_table._measured('grpo', 'alfworld') == '43.0 ± 0.6'
