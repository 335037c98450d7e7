"""Tests of the installation: bounds, tested versions, licences of data."""

import importlib.metadata
import pathlib
import re

import setuptools
from packaging import requirements, utils
from programs import PROJECT

# Packages with calendar versions, which have no next major version.
NO_UPPER_BOUND = {'regex'}
# Extras of tools, which a user of the package does not install.
TOOLS = {'docs', 'test'}
# They are not in constraints.txt, because the tests pass without them.
NOT_PINNED = {'minigrid', 'peft', 'scienceworld', 'torch', 'verifiers', 'wandb'}


def _metadata(monkeypatch) -> dict:
  """Returns the arguments that setup.py passes to setuptools."""
  metadata = {}
  monkeypatch.setattr(setuptools, 'setup', metadata.update)
  path = PROJECT / 'setup.py'
  exec(compile(path.read_text(), str(path), 'exec'), {'__file__': str(path)})
  return metadata


def _constraints() -> dict[str, requirements.Requirement]:
  lines = (PROJECT / 'constraints.txt').read_text().splitlines()
  pins = [
    requirements.Requirement(line)
    for line in lines
    if line and not line.startswith('#')
  ]
  return {utils.canonicalize_name(r.name): r for r in pins}


def test_dependencies_have_bounds_around_the_tested_version(monkeypatch):
  metadata, tested = _metadata(monkeypatch), _constraints()
  extras = metadata['extras_require']
  dependencies = list(metadata['install_requires'])
  dependencies += [
    r for name in extras if name not in TOOLS for r in extras[name]
  ]
  for requirement in map(requirements.Requirement, dependencies):
    operators = {s.operator for s in requirement.specifier}
    if '==' not in operators:
      assert '>=' in operators, requirement
      assert '<' in operators or requirement.name in NO_UPPER_BOUND, requirement
    name = utils.canonicalize_name(requirement.name)
    if name in tested:
      (pin,) = tested[name].specifier
      assert pin.operator == '==' and pin.version in requirement.specifier
    else:
      assert name in NOT_PINNED, f'{requirement}: not in constraints'


def test_workflows_install_the_tested_versions():
  folder = PROJECT / '.github' / 'workflows'
  texts = [path.read_text() for path in folder.glob('*.yml')]
  installs = re.findall('pip install.*-e .*', '\n'.join(texts))
  installs += re.findall(
    'pip install.*-e .*', (PROJECT / '.ci/run').read_text()
  )
  assert len(installs) >= 2
  assert all('-c constraints.txt' in line for line in installs), installs


def test_constraints_include_the_dependencies_of_packages(monkeypatch):
  tested = _constraints()
  # The constraints list every dependency of these packages.
  for name in (
    'jax',
    'flax',
    'transformers',
    'flask',
    'gymnasium',
    'textarena',
  ):
    for line in importlib.metadata.requires(name) or ():
      requirement = requirements.Requirement(line)
      if not requirement.marker or requirement.marker.evaluate({'extra': ''}):
        assert utils.canonicalize_name(requirement.name) in tested, line


def test_included_data_is_listed_with_its_licence():
  page = (PROJECT / 'THIRD_PARTY.md').read_text()
  rows = re.search(r'## Data files\n(.*?)\n## ', page, re.DOTALL)[1]
  listed = tuple(re.findall(r'`([^`]+)`', rows))
  code = {'.py', '.sh', '.pyc', '.typed', '.md'}
  files = [
    path.relative_to(PROJECT).as_posix()
    for folder in ('configs', 'docs', 'envs', 'examples', 'gigpo_jax')
    + ('benchmarks', 'notebooks', 'launch', 'tests')
    for path in (PROJECT / folder).rglob('*')
    if path.is_file() and path.suffix not in code
  ]
  assert files
  missing = [path for path in files if not path.startswith(listed)]
  assert not missing, f'not in THIRD_PARTY.md: {missing}'
  for path in listed:
    if not path.endswith('.sh'):
      assert pathlib.Path(PROJECT, path).exists(), path
