"""Tests that the wheel installs and its commands run in another folder."""

import pathlib
import shutil
import sys

import programs
import pytest
import small_runs

PACKAGES = ('configs', 'envs', 'gigpo_jax', 'launch')
FILES = (
  'setup.py',
  'pyproject.toml',
  'README.md',
  'LICENSE',
  'THIRD_PARTY.md',
)


def _pip(*arguments: str) -> None:
  programs.run([sys.executable, '-m', 'pip', '--quiet', *arguments])


def _install(folder: pathlib.Path) -> pathlib.Path:
  """Builds and installs the wheel; returns a folder with its contents only."""
  source, installed = folder / 'source', folder / 'installed'
  # Build from a copy, because a build writes files into the source tree.
  for name in PACKAGES:
    shutil.copytree(programs.PROJECT / name, source / name)
  for name in FILES:
    shutil.copy(programs.PROJECT / name, source)
  options = ('--no-deps', '--no-build-isolation', f'--wheel-dir={folder}')
  _pip('wheel', *options, str(source))
  (wheel,) = folder.glob('gigpo_jax-*.whl')
  _pip('install', '--no-deps', f'--target={installed}', str(wheel))
  return installed


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_commands_of_the_wheel_run_from_another_folder(tmp_path):
  installed, folder = _install(tmp_path), tmp_path / 'elsewhere'
  folder.mkdir()

  def run(*command: str) -> str:
    return programs.run(
      [sys.executable, *command],
      folder,
      timeout=600,
      PYTHONPATH=str(installed),
    )

  names = ', '.join(PACKAGES)
  files = run('-c', f'import {names}; [print(p.__file__) for p in ({names})]')
  assert all(line.startswith(str(installed)) for line in files.split())
  run(
    str(installed / 'bin/gigpo-train'),
    '--config=configs/alfworld.py:smoke',
    '--workdir=smoke',
    *small_runs.SMALL,
  )
  assert (folder / 'smoke/learning_curve.png').stat().st_size
  assert (folder / 'smoke/policy/model.safetensors').stat().st_size
  run(
    str(installed / 'bin/gigpo-view'),
    '--workdir=smoke',
    '--export=run.html',
  )
  assert 'iterations/0' in (folder / 'run.html').read_text()
