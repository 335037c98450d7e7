"""Files that are built once per machine and shared by all its processes.

Folders are kept under $GIGPO_JAX_CACHE, or ~/.cache/gigpo_jax.
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
  """Returns the cache folder of something that is built from `key`.

  Args:
    name: prefix of the folder name, for people.
    *key: everything that the contents depend on; its repr is hashed.
  """
  home = os.environ.get('GIGPO_JAX_CACHE') or '~/.cache/gigpo_jax'
  digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
  return pathlib.Path(home).expanduser() / f'{name}-{digest}'


def ensure(
  folder: pathlib.Path, make: Callable[[pathlib.Path], None]
) -> pathlib.Path:
  """Returns a cache folder; builds it first if it does not exist.

  One process builds while the others wait for its lock. The finished folder is
  renamed into place, so it is never visible half written. A partial folder of
  a killed process is deleted.

  Args:
    folder: path of the folder.
    make: writes the files into the folder that it is passed.

  Raises:
    ValueError: in one line, if the folder cannot be written, or `make` cannot
      use a file.
  """
  try:
    if not folder.is_dir():
      folder.parent.mkdir(parents=True, exist_ok=True)
      with filelock.FileLock(folder.with_name(f'{folder.name}.lock')):
        if not folder.is_dir():
          _build(folder, make)
  except OSError as error:
    raise _unusable(folder, error) from error
  return folder


def load(
  folder: pathlib.Path, make: Callable[[pathlib.Path], Arrays]
) -> Arrays:
  """Returns the arrays of a cache folder, memory-mapped; builds them if needed.

  Args:
    folder: path of the folder; see `ensure`.
    make: returns the arrays. It may also write files of raw bytes into the
      folder that it is passed; each is loaded as a uint8 array.

  Raises:
    ValueError: in one line, if the folder cannot be written.
  """

  def write(partial_folder: pathlib.Path) -> None:
    for name, values in make(partial_folder).items():
      np.save(partial_folder / f'{name}.npy', values)

  ensure(folder, write)
  try:
    return {path.stem: _map(path) for path in folder.iterdir()}
  except OSError as error:
    raise _unusable(folder, error) from error


def _unusable(folder: pathlib.Path, error: OSError) -> ValueError:
  return ValueError(
    f'GIGPO_JAX_CACHE={folder.parent}: cannot be used: {error}; must be a '
    'folder that can be written'
  )


def _build(folder: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
  partial_folder = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(partial_folder, ignore_errors=True)
  partial_folder.mkdir()
  try:
    make(partial_folder)
    partial_folder.rename(folder)
  except OSError as error:
    # `make` also reads files and starts programs outside of the cache.
    path = str(error.filename or folder)
    if not pathlib.Path(path).is_relative_to(folder.parent):
      raise ValueError(f'{path}: cannot be used: {error.strerror}') from error
    raise
  finally:
    shutil.rmtree(partial_folder, ignore_errors=True)


def _map(path: pathlib.Path) -> np.ndarray:
  if path.suffix == '.npy':
    mapped = np.load(path, mmap_mode='r')
  else:
    mapped = np.memmap(path, np.uint8, mode='r')
  # A plain array over the same memory: indexing a np.memmap is slower.
  return mapped.view(np.ndarray)
