"""Files that a host makes once and that all its processes share, or map.

They are kept in folders below $GIGPO_JAX_CACHE, or ~/.cache/gigpo_jax.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable

import filelock
import numpy as np

Arrays = dict[str, np.ndarray]


def place(name: str, *key: object) -> pathlib.Path:
  """Returns the folder of what is made from the values of `key`.

  Args:
    name: what it is, for people.
    *key: all that it is a function of.
  """
  home = os.environ.get('GIGPO_JAX_CACHE') or '~/.cache/gigpo_jax'
  digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
  return pathlib.Path(home).expanduser() / f'{name}-{digest}'


def ensure(
  folder: pathlib.Path, make: Callable[[pathlib.Path], None]
) -> pathlib.Path:
  """Returns a folder, made where it is not there yet.

  One process makes it while others wait. It appears all at once; what a
  killed process left is thrown away.

  Args:
    folder: where it is kept.
    make: writes its files into the folder it is given.

  Raises:
    ValueError: in one line, if the folder cannot be written.
  """
  try:
    if not folder.is_dir():
      folder.parent.mkdir(parents=True, exist_ok=True)
      with filelock.FileLock(folder.with_name(f'{folder.name}.lock')):
        if not folder.is_dir():
          _make(folder, make)
  except OSError as error:
    raise _unusable(folder, error) from error
  return folder


def load(
  folder: pathlib.Path, make: Callable[[pathlib.Path], Arrays]
) -> Arrays:
  """Returns the arrays of a folder, mapped; makes them where there are none.

  Args:
    folder: where they are kept; see `ensure`.
    make: returns them; may write files of bytes into the folder it is given,
      which then are arrays too.

  Raises:
    ValueError: in one line, if the folder cannot be written.
  """

  def write(beside: pathlib.Path) -> None:
    for name, values in make(beside).items():
      np.save(beside / f'{name}.npy', values)

  ensure(folder, write)
  try:
    return {path.stem: _map(path) for path in folder.iterdir()}
  except OSError as error:
    raise _unusable(folder, error) from error


def _unusable(folder: pathlib.Path, error: OSError) -> ValueError:
  return ValueError(f'GIGPO_JAX_CACHE={folder.parent}: cannot be used: {error}')


def _make(folder: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
  beside = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(beside, ignore_errors=True)
  beside.mkdir()
  try:
    make(beside)
    beside.rename(folder)
  finally:
    shutil.rmtree(beside, ignore_errors=True)


def _map(path: pathlib.Path) -> np.ndarray:
  if path.suffix == '.npy':
    mapped = np.load(path, mmap_mode='r')
  else:
    mapped = np.memmap(path, np.uint8, mode='r')
  # The same memory without numpy's slow class for it.
  return mapped.view(np.ndarray)
