"""Files that are there whole or not at all, and what a disk can refuse."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Iterator


def put(path: pathlib.Path, text: str) -> None:
  """Writes a file; neither a kill nor a power cut leaves half of it."""
  beside = path.with_name(path.name + '.tmp')
  beside.write_text(text, encoding='utf-8')
  settle(beside, path)


def settle(beside: pathlib.Path, path: pathlib.Path) -> None:
  """Gives a file that is written its name, once it is on the disk."""
  with beside.open('rb') as file:
    os.fsync(file.fileno())
  os.replace(beside, path)


def read_object(path: pathlib.Path) -> dict:
  """Returns what a JSON file holds.

  Raises:
    OSError: if it cannot be read.
    ValueError: if that is no object.
  """
  found = json.loads(path.read_text(encoding='utf-8'))
  if not isinstance(found, dict):
    raise ValueError('holds no JSON object')
  return found


@contextlib.contextmanager
def written(path: str | pathlib.Path) -> Iterator[None]:
  """Makes errors of libraries that write files errors of the system.

  ArrayRecord, safetensors and tokenizers each have another one for a full disk.
  """
  try:
    yield
  except OSError:
    raise
  except Exception as error:
    told = ' '.join(str(error).split())
    raise OSError(errno.EIO, told, str(path)) from error
