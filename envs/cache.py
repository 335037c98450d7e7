"""Arrays that a host makes once and that all its processes map.

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


def place(*key: object) -> pathlib.Path:
  """Returns the folder of what is made from the values of `key`."""
  home = os.environ.get('GIGPO_JAX_CACHE') or '~/.cache/gigpo_jax'
  digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
  return pathlib.Path(home).expanduser() / f'webshop-{digest}'


def load(
  folder: pathlib.Path, make: Callable[[pathlib.Path], Arrays]
) -> Arrays:
  """Returns the arrays of a folder, mapped; makes them where there are none.

  One process makes them while others wait. They appear all at once; what a
  killed process left is thrown away.

  Args:
    folder: where they are kept.
    make: returns them; may write files of bytes into the folder it is given,
      which then are arrays too.

  Raises:
    ValueError: in one line, if the folder cannot be written.
  """
  try:
    if not folder.is_dir():
      folder.parent.mkdir(parents=True, exist_ok=True)
      with filelock.FileLock(folder.with_name(f'{folder.name}.lock')):
        if not folder.is_dir():
          _make(folder, make)
    arrays = {path.stem: _map(path) for path in folder.iterdir()}
  except OSError as error:
    raise ValueError(
      f'GIGPO_JAX_CACHE={folder.parent}: cannot be used: {error}'
    ) from error
  return arrays


def _make(folder: pathlib.Path, make: Callable[[pathlib.Path], Arrays]) -> None:
  beside = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(beside, ignore_errors=True)
  beside.mkdir()
  try:
    for name, values in make(beside).items():
      np.save(beside / f'{name}.npy', values)
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
