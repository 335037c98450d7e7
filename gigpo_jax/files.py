"""Files that are there whole or not at all, and what a disk can refuse."""

import contextlib
import errno
import itertools
import json
import os
import pathlib
import socket
from collections.abc import Iterator

import filelock

# Of what a run keeps and reads back: config.json, checkpoints, episodes. Files
# without a version are of version 0, which differs in nothing else.
VERSION = 1
_LOCK, _OWNER = '.lock', '.lock_owner.json'


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


def open_to_umask(folder: pathlib.Path) -> None:
  """Gives files the permissions that the umask allows.

  Some libraries write for the owner only.
  """
  # A folder that this process made has those of the umask.
  mode = folder.stat().st_mode & 0o666
  for path in folder.rglob('*'):
    if path.is_file():
      path.chmod(mode)


def read_object(path: pathlib.Path) -> dict:
  """Returns what a JSON file holds.

  Raises:
    OSError: if it cannot be read.
    ValueError: if that is no object.
  """
  found = json.loads(path.read_text(encoding='utf-8'))
  if not isinstance(found, dict):
    raise ValueError(f'{path}: holds no JSON object')
  return found


def take_version(found: dict, name: str | pathlib.Path) -> dict:
  """Returns an object without its version.

  Raises:
    ValueError: in one line, if a later release has written it.
  """
  version = found.get('version', 0)
  if not isinstance(version, int) or not 0 <= version <= VERSION:
    raise ValueError(
      f'{name}: has version {version!r:.40}, of a newer release; this one '
      f'reads up to {VERSION}'
    )
  return {key: value for key, value in found.items() if key != 'version'}


def read_stored(path: pathlib.Path) -> dict:
  """Returns what a JSON file of a run holds, without its version.

  Raises:
    ValueError: in one line with the file's name, if it is damaged.
  """
  try:
    return take_version(read_object(path), path)
  except (OSError, RecursionError, UnicodeError, json.JSONDecodeError) as error:
    raise ValueError(f'{path}: cannot be read ({error})') from error


def free_name(path: pathlib.Path) -> pathlib.Path:
  """Returns the first name that is free: PATH.bak, PATH.bak.1, ..."""
  names = (f'{path.name}.bak{f".{n}" if n else ""}' for n in itertools.count())
  return next(p for n in names if not (p := path.with_name(n)).exists())


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
  """Locks a folder for this process until the end of the context.

  The system releases the lock of a killed process. Where the file system has no
  locks, prints a line and continues without one.

  Raises:
    ValueError: in one line, if another process holds the lock.
  """
  lock = filelock.FileLock(folder / _LOCK, timeout=0)
  owner = folder / _OWNER
  try:
    lock.acquire()
  except filelock.Timeout:
    raise ValueError(
      f'--workdir={folder}: in use by {_owner(owner)}; give another --workdir, '
      'or wait until that process ends'
    ) from None
  except (OSError, NotImplementedError) as error:
    print(
      f'{folder}: cannot be locked ({error}); make sure that no other process '
      'writes to this folder',
      flush=True,
    )
    yield
    return
  try:
    with contextlib.suppress(OSError):
      put(owner, json.dumps({'pid': os.getpid(), 'host': socket.gethostname()}))
    yield
  finally:
    with contextlib.suppress(OSError):
      owner.unlink()
    lock.release()


def _owner(path: pathlib.Path) -> str:
  """Returns the process that holds a lock, in words."""
  try:
    owner = read_object(path)
    return f'process {owner["pid"]} on host {owner["host"]}'
  except (OSError, ValueError, KeyError):  # Between two of its writes.
    return 'another process'


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
