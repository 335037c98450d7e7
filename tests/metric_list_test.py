"""Tests that the list of metrics agrees with its page and with the code."""

import ast
import functools
import re

import pytest
from programs import PROJECT

from gigpo_jax import deprecated
from gigpo_jax.tools import metric_list

# A metric inside a loss, which no run writes, and a media type.
INTERNAL = {'value/clipped'}
OTHERS = INTERNAL | {'application/json'}
NAMES = [
  prefix + metric.name
  for section in metric_list.SECTIONS
  for prefix in section.prefixes
  for metric in section.metrics
]
# The form of a metric's name, whatever its prefix.
FULL = re.compile(r'[a-z_]+/[a-z0-9_/]*[a-z0-9]')


def _sources() -> list[ast.Module]:
  return [
    ast.parse(path.read_text())
    for folder in ('gigpo_jax', 'envs')
    for path in sorted((PROJECT / folder).rglob('*.py'))
    if path.name != 'metric_list.py'
  ]


@functools.cache
def _texts() -> tuple[set[str], list[tuple[str, re.Pattern]]]:
  """Returns constants and field names, and (text, pattern) of f-strings."""
  words, forms = set(), []
  for node in (node for source in _sources() for node in ast.walk(source)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      words.add(node.value)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      words.add(node.target.id)
    elif isinstance(node, ast.JoinedStr):
      parts = [
        part.value if isinstance(part, ast.Constant) else None
        for part in node.values
      ]
      pattern = ''.join(re.escape(p) if p else '(.+)' for p in parts)
      forms.append((''.join(p or '' for p in parts), re.compile(pattern)))
  return words, forms


def _is_written(name: str) -> bool:
  """Returns whether the code contains the name or can compose it."""
  words, forms = _texts()
  if name in words:
    return True
  for text, pattern in forms:
    match = pattern.fullmatch(name)
    if match and '/' in text:
      # Both parts of f'{prefix}/{name}' must occur somewhere.
      filled = {part for part in match.groups() if part[0] != '<'}
      if re.search('/[a-z]', text) or filled <= words:
        return True
  return False


def test_page_is_up_to_date():
  page = (PROJECT / 'docs' / 'metrics.md').read_text()
  assert page == metric_list.page(), 'run python -m gigpo_jax.tools.metric_list'


def test_metric_names_are_unique():
  assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize('name', NAMES)
def test_listed_metric_is_in_the_code(name):
  # For a family, look for the part before the placeholder.
  prefix, _, rest = name.partition('/')
  assert _is_written(rest if '<' in rest else name), f'{prefix}: {rest}'


def test_metric_in_the_code_is_listed():
  named = {text for text in _texts()[0] if FULL.fullmatch(text)}
  named -= OTHERS | deprecated.METRICS.keys()
  assert len(named) > 60
  unlisted = sorted(name for name in named if not metric_list.find(name))
  assert not unlisted, f'add to gigpo_jax/tools/metric_list.py: {unlisted}'


def test_metric_families_match_by_placeholder():
  assert metric_list.find('train/success_rate/pick two').unit == 'share'
  assert metric_list.find('eval/failed_episodes/hung').unit == 'episodes'
  assert metric_list.find('train/success_rate/') is None
  assert metric_list.find('train/nothing') is None
  assert metric_list.find('success_rate') is None
