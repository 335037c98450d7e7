"""Tests of docs/methods.md."""

import importlib
import pathlib
import re

import pytest

from configs import base
from gigpo_jax.run import config_fields
from gigpo_jax.tools import method_table

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
  lines = [
    'experiment,name,seed,iteration,eval/success_rate',
    'alfworld,grpo,0,0,0.1',
    'alfworld,grpo,0,56,0.4',
    'alfworld,grpo,1,56,0.5',
    'webshop,grpo,0,80,0.9',
  ]
  (folder / 'main.csv').write_text('\n'.join(lines))
  monkeypatch.setattr(method_table, 'PROJECT', pathlib.Path(tmp_path))
  # Mean of 40 and 50, standard error 7.07 / sqrt(2); one seed is no result.
  assert method_table._measured('grpo', 'alfworld') == '45.0 ± 5.0'
  assert method_table._measured('grpo', 'webshop') == '–'
  assert method_table._measured('gigpo', 'alfworld') == '–'
  # Tests have more tasks than the evaluations of a run.
  lines = [
    'experiment,name,seed,tasks,success',
    'alfworld,grpo,0,512,0.42',
    'alfworld,grpo,1,512,0.44',
  ]
  (folder / 'credit_tests.csv').write_text('\n'.join(lines))
  assert method_table._measured('grpo', 'alfworld') == '43.0 ± 1.0'
