"""Writes constraints.txt: the tested version of every dependency.

    python .ci/constraints.py

Run it with the interpreter that has passed the tests, after
`pip install -e '.[test]'`. The file lists direct and indirect dependencies,
without local paths and local builds.
"""

import importlib.metadata
import pathlib
import platform
import runpy

import setuptools
from packaging import requirements, utils

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = (
  'alfworld',
  'docs',
  'gymnasium',
  'mcp',
  'openenv',
  'search',
  'test',
  'textarena',
)
HEAD = """\
# The versions that the tests pass with, Python {python}; use as
#   pip install -c constraints.txt -e '.[test]'
# Written by `python .ci/constraints.py`.
"""


def declared() -> list[str]:
  """Returns the requirements of setup.py, including those of EXTRAS."""
  metadata: dict = {}
  setuptools.setup = metadata.update
  runpy.run_path(str(ROOT / 'setup.py'))
  extras = [
    line for name in EXTRAS for line in metadata['extras_require'][name]
  ]
  return metadata['install_requires'] + extras


def closure(lines: list[str]) -> dict[str, str]:
  """Returns the installed versions of all dependencies, by name."""
  versions: dict[str, str] = {}
  pending = [(requirements.Requirement(line), ('',)) for line in lines]
  seen = set()
  while pending:
    requirement, extras = pending.pop()
    marker = requirement.marker
    if marker and not any(marker.evaluate({'extra': e}) for e in extras):
      continue
    name = utils.canonicalize_name(requirement.name)
    extra_names = ('', *sorted(requirement.extras))
    if (name, extra_names) in seen:
      continue
    seen.add((name, extra_names))
    package = importlib.metadata.distribution(name)
    versions[name] = package.version
    pending += [
      (requirements.Requirement(line), extra_names)
      for line in package.requires or ()
    ]
  return versions


if __name__ == '__main__':
  versions = closure(declared())
  pins = [f'{n}=={v}\n' for n, v in sorted(versions.items()) if '+' not in v]
  head = HEAD.format(python='.'.join(platform.python_version_tuple()[:2]))
  (ROOT / 'constraints.txt').write_text(head + ''.join(pins))
