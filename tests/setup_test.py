"""What a user installs: bounds of dependencies, tested versions, licences."""

import importlib.metadata
import pathlib
import re

import setuptools
from packaging import requirements, utils
from programs import PROJECT

# Metadata of calendar versions has no major version to stop at.
NO_UPPER_BOUND = {'regex'}
# Tools of tests and documentation; they do not run in a user's experiments.
TOOLS = {'docs', 'parity', 'test', 'cuda', 'tpu'}


def _metadata(monkeypatch) -> dict:
  """Returns the arguments that setup.py gives to setuptools."""
  found = {}
  monkeypatch.setattr(setuptools, 'setup', found.update)
  path = PROJECT / 'setup.py'
  exec(compile(path.read_text(), str(path), 'exec'), {'__file__': str(path)})
  return found


def _constraints() -> dict[str, requirements.Requirement]:
  lines = (PROJECT / 'constraints.txt').read_text().splitlines()
  found = [
    requirements.Requirement(line)
    for line in lines
    if line and not line.startswith('#')
  ]
  return {utils.canonicalize_name(r.name): r for r in found}


def test_dependencies_have_bounds_and_the_tested_version_is_within(monkeypatch):
  metadata, tested = _metadata(monkeypatch), _constraints()
  extras = metadata['extras_require']
  wanted = list(metadata['install_requires'])
  wanted += [r for name in extras if name not in TOOLS for r in extras[name]]
  for requirement in map(requirements.Requirement, wanted):
    signs = {s.operator for s in requirement.specifier}
    if '==' not in signs:
      assert '>=' in signs, requirement
      assert '<' in signs or requirement.name in NO_UPPER_BOUND, requirement
    name = utils.canonicalize_name(requirement.name)
    if name in tested:
      (pin,) = tested[name].specifier
      assert pin.operator == '==' and pin.version in requirement.specifier
    else:
      assert requirement.name == 'wandb', f'{requirement}: not in constraints'


def test_constraints_have_no_paths_and_cover_what_is_needed(monkeypatch):
  tested = _constraints()
  # Every package that is needed by one in the list is in it, too.
  for name in (
    'jax',
    'flax',
    'transformers',
    'flask',
    'gymnasium',
    'textarena',
  ):
    for line in importlib.metadata.requires(name) or ():
      needed = requirements.Requirement(line)
      if not needed.marker or needed.marker.evaluate({'extra': ''}):
        assert utils.canonicalize_name(needed.name) in tested, line


def test_included_data_is_listed_with_its_licence():
  page = (PROJECT / 'THIRD_PARTY.md').read_text()
  rows = re.search(r'## Data files\n(.*?)\n## ', page, re.DOTALL)[1]
  listed = tuple(re.findall(r'`([^`]+)`', rows))
  code = {'.py', '.sh', '.pyc', '.typed', '.md'}
  found = [
    path.relative_to(PROJECT).as_posix()
    for folder in ('configs', 'docs', 'envs', 'examples', 'gigpo_jax')
    + ('benchmarks', 'notebooks', 'launch', 'tests')
    for path in (PROJECT / folder).rglob('*')
    if path.is_file() and path.suffix not in code
  ]
  assert found
  missing = [path for path in found if not path.startswith(listed)]
  assert not missing, f'not in THIRD_PARTY.md: {missing}'
  for path in listed:
    if not path.endswith('.sh'):
      assert pathlib.Path(PROJECT, path).exists(), path
