"""Errors that end a run, explained in one line."""

import contextlib
import errno
import pathlib
from collections.abc import Iterator

import jax

# Errors of a disk that is full, missing or not writable.
_DISK = (
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EFBIG,
  errno.EROFS,
  errno.EACCES,
  errno.EPERM,
  errno.EIO,
)


class RunError(Exception):
  """The reason why a run cannot continue, in one line.

  Saved files are intact.
  """


class PluginError(Exception):
  """An error in the code of an algorithm, a loss or a plug-in."""


@contextlib.contextmanager
def show_traceback(field: str) -> Iterator[None]:
  """Makes a ValueError of a plug-in one that is printed with its traceback.

  The author of the code needs the line; other ValueErrors are one line.

  Args:
    field: config field that names the plug-in.
  """
  try:
    yield
  except ValueError as error:
    raise PluginError(f'{field}: its code raised {error!r}') from error


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
  """Returns whether a program did not fit into the memory of a device."""
  return 'RESOURCE_EXHAUSTED' in str(error)


@contextlib.contextmanager
def explain_out_of_memory(field: str, remedy: str) -> Iterator[None]:
  """Turns an out-of-memory error into a ValueError with a remedy.

  Args:
    field: config field that controls the memory.
    remedy: advice, as an imperative.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if not is_out_of_memory(error):
      raise
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(
      f'{field}: the device has too little memory ({reason}); {remedy}, or '
      'use more devices'
    ) from error


@contextlib.contextmanager
def explain_disk_errors(workdir: str) -> Iterator[None]:
  """Turns disk errors in a work directory into a one-line `RunError`."""
  try:
    yield
  except OSError as error:
    # An error about a file elsewhere, such as the model, is another mistake.
    file = pathlib.Path(error.filename or workdir).resolve()
    inside = file.is_relative_to(pathlib.Path(workdir).resolve())
    if error.errno not in _DISK or not inside:
      raise
    raise RunError(
      f'{workdir}: cannot be written ({error}); saved files are intact. Free '
      'space or repair the disk, then rerun the same command to resume'
    ) from error
