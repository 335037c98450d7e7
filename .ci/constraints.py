"""Writes constraints.txt: the tested version of every package that is needed.

    python .ci/constraints.py

Run it with the interpreter that has passed the tests, after
`pip install -e '.[test]'`. Packages of the project's own closure only, without
local paths and local builds.
"""

import importlib.metadata
import pathlib
import platform
import runpy

import setuptools
from packaging import requirements, utils

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ('alfworld', 'docs', 'gymnasium', 'search', 'test', 'textarena')
HEAD = """\
# The versions that the tests pass with, Python {python}; use as
#   pip install -c constraints.txt -e '.[test]'
# Written by `python .ci/constraints.py`.
"""


def declared() -> list[str]:
  """Returns the requirements of setup.py, those of the extras included."""
  found: dict = {}
  setuptools.setup = found.update
  runpy.run_path(str(ROOT / 'setup.py'))
  extras = [line for name in EXTRAS for line in found['extras_require'][name]]
  return found['install_requires'] + extras


def closure(lines: list[str]) -> dict[str, str]:
  """Returns the installed versions of what the requirements bring, by name."""
  found: dict[str, str] = {}
  asked = [(requirements.Requirement(line), ('',)) for line in lines]
  seen = set()
  while asked:
    requirement, extras = asked.pop()
    marker = requirement.marker
    if marker and not any(marker.evaluate({'extra': e}) for e in extras):
      continue
    name = utils.canonicalize_name(requirement.name)
    wanted = ('', *sorted(requirement.extras))
    if (name, wanted) in seen:
      continue
    seen.add((name, wanted))
    package = importlib.metadata.distribution(name)
    found[name] = package.version
    asked += [
      (requirements.Requirement(line), wanted)
      for line in package.requires or ()
    ]
  return found


if __name__ == '__main__':
  versions = closure(declared())
  pins = [f'{n}=={v}\n' for n, v in sorted(versions.items()) if '+' not in v]
  head = HEAD.format(python='.'.join(platform.python_version_tuple()[:2]))
  (ROOT / 'constraints.txt').write_text(head + ''.join(pins))
