"""Tests that the modules, files and fields named in documents exist."""

import ast
import collections
import json
import re

import ml_collections
import pytest
from programs import PROJECT

from configs import base

PACKAGES = ('benchmarks', 'configs', 'envs', 'gigpo_jax', 'launch')
PAGES = [
  *(PROJECT / name for name in ('README.md', 'CONTRIBUTING.md')),
  *(PROJECT / 'docs').rglob('*.md'),
  *(PROJECT / 'notebooks').glob('*.ipynb'),
]
# The table of old names, which are not checked.
RENAMED = re.compile(r'^## Renamed\n.*?(?=^## |\Z)', re.MULTILINE | re.DOTALL)


def _read(path) -> str:
  text = path.read_text()
  if path.suffix == '.ipynb':
    cells = json.loads(text)['cells']
    return '\n'.join(''.join(cell['source']) for cell in cells)
  return RENAMED.sub('', text)


def _has_name(path, name: str) -> bool:
  """Returns whether a module defines, imports or sets a name."""
  tree = ast.parse(path.read_text())
  names = {'__getattr__'} if name in ('NAMES', 'REGISTRY') else set()
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      names.add(node.name)
    elif isinstance(node, ast.alias):
      names.add(node.name.split('.')[-1])
    elif isinstance(node, ast.Name | ast.Attribute):
      names.add(getattr(node, 'id', None) or node.attr)
  return name in names


def _exists(dotted: str) -> bool:
  """Returns whether a dotted name is a module or a name in a module."""
  path, parts = PROJECT, dotted.split('.')
  while parts and (path / parts[0]).is_dir():
    path /= parts.pop(0)
  if path == PROJECT:
    return False
  if parts and (path / f'{parts[0]}.py').is_file():
    path /= f'{parts.pop(0)}.py'
  elif (path / '__init__.py').is_file():
    path /= '__init__.py'
  return not parts or (path.is_file() and _has_name(path, parts[0]))


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_modules_of_documents_exist(path):
  text = _read(path)
  dotted = re.findall(
    rf'(?<![\w/.])((?:{"|".join(PACKAGES)})(?:\.[A-Za-z_]\w*)+)', text
  )
  # Paths such as envs/base.py are checked as files.
  names = {name for name in dotted if not name.endswith(('.py', '.md'))}
  names |= set(re.findall(rf'python -m ((?:{"|".join(PACKAGES)})[\w.]*)', text))
  missing = {name for name in names if not _exists(name.rstrip('.'))}
  assert not missing


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_names_in_imported_modules_exist(path):
  text = _read(path)
  imports = re.findall(
    rf'^from ((?:{"|".join(PACKAGES)})[\w.]*) import ([\w, ]+)$', text, re.M
  )
  # A page may import two modules of a name, in different programs.
  modules = collections.defaultdict(set)
  for package, names in imports:
    for name, alias in re.findall(r'(\w+)(?: as (\w+))?', names):
      modules[alias or name].add(f'{package}.{name}')
  missing = {
    f'{alias}.{name}'
    for alias, dotted in modules.items()
    for name in re.findall(rf'(?<![\w."\'/]){alias}\.([A-Za-z_]\w*)', text)
    if name != 'py' and not any(_exists(f'{m}.{name}') for m in dotted)
  }
  assert not missing


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_files_of_documents_exist(path):
  folders = '|'.join((*PACKAGES, 'docker', 'docs', 'examples', 'tests'))
  paths = re.findall(
    rf'(?<![\w/.])((?:{folders})/[\w/.-]+\.(?:py|sh|md|csv))\b', _read(path)
  )
  missing = {
    name
    for name in paths
    if 'NAME' not in name and not (PROJECT / name).exists()
  }
  assert not missing


def _fields(config: ml_collections.ConfigDict, prefix: str = '') -> set[str]:
  fields = set()
  for name, value in config.items():
    fields.add(f'{prefix}{name}')
    if isinstance(value, ml_collections.ConfigDict):
      fields |= _fields(value, f'{prefix}{name}.')
  return fields


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_config_fields_of_documents_exist(path):
  config = base.get_config()
  known = _fields(config)
  sections = [name for name in known if '.' not in name]
  text = _read(path)
  flags = set(re.findall(r'--config\.([a-z_]\w*(?:\.\w+)*)=', text))
  quoted = set(
    re.findall(rf'`((?:{"|".join(sections)})\.[a-z]\w*(?:\.\w+)*)[`=]', text)
  )
  # Environments and algorithms have options of their own.
  missing = {
    name
    for name in (flags | quoted) - known
    if not name.startswith(('env.', 'algorithm.'))
    and not (name in quoted and _is_module(name))
  }
  assert not missing


def _is_module(name: str) -> bool:
  """Returns whether a name in the form of a field is a file or a module."""
  is_file = name.endswith(('.bak', '.csv', '.json', '.jsonl', '.md', '.py'))
  return is_file or _exists(f'gigpo_jax.{name}')


def test_lines_of_documents_are_short():
  paths = [*PROJECT.glob('*.md'), *PROJECT.glob('docs/**/*.md')]
  paths += [*PROJECT.glob('benchmarks/*/*.md'), *PROJECT.glob('tests/*/*.md')]
  assert paths
  long = [
    f'{path.relative_to(PROJECT)}:{index}'
    for path in paths
    for index, line in enumerate(path.read_text().splitlines(), 1)
    if len(line) > 120
  ]
  assert not long
