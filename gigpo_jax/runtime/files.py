"""Atomic files, locks, CSVs, and versions of stored JSON."""

import contextlib
import csv
import errno
import hashlib
import io
import itertools
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator

import filelock

# Version of the files that a run reads back: config.json, checkpoints,
# episodes. Files without a version are of version 0, which has the same
# contents otherwise.
VERSION = 1
_LOCK, _OWNER = '.lock', '.lock_owner.json'


def write_atomic(path: pathlib.Path, text: str) -> None:
  """Writes a file so that it is never half written, even after a power cut."""
  with replacing(path) as partial:
    partial.write_text(text, encoding='utf-8')


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the path of a new file, which replaces `path` at the end.

  If that fails, as on a full disk, the earlier file stays. A link stays, and
  what it points to is replaced. A device is written directly.
  """
  path = path.resolve()
  if path.exists() and not path.is_file():
    yield path
    return
  partial = path.with_name(path.name + '.tmp')
  try:
    yield partial
    rename_synced(partial, path)
  except OSError:
    with contextlib.suppress(OSError):
      partial.unlink()
    raise


def rename_synced(partial: pathlib.Path, path: pathlib.Path) -> None:
  """Renames a file after flushing its contents to the disk."""
  with partial.open('rb') as file:
    os.fsync(file.fileno())
  os.replace(partial, path)


def open_to_umask(folder: pathlib.Path) -> None:
  """Gives all files of a folder the permissions that the umask allows.

  Some libraries write files that only the owner can read.
  """
  # The folder itself was created with the permissions of the umask.
  mode = folder.stat().st_mode & 0o666
  for path in folder.rglob('*'):
    if path.is_file():
      path.chmod(mode)


def fingerprint(paths: Iterable[pathlib.Path], name: str = '') -> str:
  """Returns a short text that differs between sets of files.

  Of each file, it reads the size and 64 evenly spaced KiB.

  Args:
    paths: the files, of different names.
    name: further text that distinguishes sets.
  """
  digest = hashlib.sha256(name.encode())
  for path in sorted(paths):
    size = path.stat().st_size
    digest.update(f' {path.name} {size} '.encode())
    with path.open('rb') as file:
      for part in range(64):
        file.seek(max(0, size - 1024) * part // 63)
        digest.update(file.read(1024))
  return digest.hexdigest()[:12]


def read_object(path: pathlib.Path) -> dict:
  """Returns the object in a JSON file.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if it is not JSON, or another value than an object.
  """
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except (RecursionError, ValueError) as error:
    raise ValueError(f'{path}: cannot be read ({error})') from error
  if not isinstance(values, dict):
    raise ValueError(f'{path}: holds no JSON object')
  return values


def take_version(values: dict, name: str | pathlib.Path) -> dict:
  """Returns a stored object without its version.

  Raises:
    ValueError: in one line, if a newer release wrote it.
  """
  version = values.get('version', 0)
  if not isinstance(version, int) or not 0 <= version <= VERSION:
    raise ValueError(
      f'{name}: has version {version!r:.40}, of a newer release; this '
      f'release reads versions up to {VERSION}'
    )
  return {key: value for key, value in values.items() if key != 'version'}


def read_stored(path: pathlib.Path) -> dict:
  """Returns the object in a JSON file of a run, without its version.

  Raises:
    ValueError: in one line with the file's name, if the file is damaged.
  """
  try:
    return take_version(read_object(path), path)
  except OSError as error:
    raise ValueError(f'{path}: cannot be read ({error})') from error


def read_csv(path: str | pathlib.Path) -> list[dict[str, str]]:
  """Returns the lines of a CSV that has a header.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if its end is missing, or a line has more or fewer fields than
      the header.
    csv.Error: if it is not a CSV.
  """
  with open(path, newline='', encoding='utf-8') as file:
    text = file.read()
  if not text.endswith('\n'):
    raise ValueError(
      'the end is missing, or the line break after the last line'
      if text
      else 'empty'
    )
  reader = csv.DictReader(io.StringIO(text, newline=''), strict=True)
  lines = []
  for line in reader:
    # DictReader's keys and values for fields too many and too few.
    if None in line or None in line.values():
      raise ValueError(
        f'line {reader.line_num} does not have {len(reader.fieldnames)} fields'
      )
    lines.append(line)
  return lines


def free_name(path: pathlib.Path, ending: str = 'bak') -> pathlib.Path:
  """Returns the first unused name among PATH.bak, PATH.bak.1, ..."""
  first = f'{path.name}.{ending}'
  names = (f'{first}.{n}' if n else first for n in itertools.count())
  return next(p for n in names if not (p := path.with_name(n)).exists())


def relative_paths(folder: pathlib.Path) -> set[pathlib.Path]:
  """Returns the paths, in a folder, of all of its files and folders."""
  return {path.relative_to(folder) for path in folder.rglob('*')}


def remove_or_keep(
  path: pathlib.Path, replaced: Collection[pathlib.Path]
) -> None:
  """Removes a folder; keeps it under another name if it has further files.

  Args:
    path: the folder, which may not exist.
    replaced: paths in it that the caller writes anew; see `relative_paths`.
  """
  if not path.exists():
    return
  if path.is_dir() and relative_paths(path) <= set(replaced):
    shutil.rmtree(path)
    return
  kept = free_name(path)
  path.rename(kept)
  print(f'{path}: has further files; kept as {kept}', flush=True)


def numbered_folders(folder: pathlib.Path) -> list[int]:
  """Returns the numbers that name folders in a folder, which may not exist."""
  paths = folder.iterdir() if folder.is_dir() else ()
  return sorted(int(p.name) for p in paths if p.name.isdecimal() and p.is_dir())


def back_up(path: pathlib.Path) -> pathlib.Path:
  """Copies a file to an unused name, see `free_name`; returns its path."""
  return pathlib.Path(shutil.copy2(path, free_name(path)))


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
  """Locks a folder for this process until the end of the context.

  The system releases the lock of a killed process. Where the file system has no
  locks, prints a line and continues without one.

  Raises:
    ValueError: in one line, if another process holds the lock.
  """
  file_lock = filelock.FileLock(folder / _LOCK, timeout=0)
  owner = folder / _OWNER
  try:
    file_lock.acquire()
  except filelock.Timeout:
    raise ValueError(
      f'--workdir={folder}: in use by {_owner(owner)}; use another --workdir, '
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
      values = {'pid': os.getpid(), 'host': socket.gethostname()}
      write_atomic(owner, json.dumps(values))
    yield
  finally:
    with contextlib.suppress(OSError):
      owner.unlink()
    file_lock.release()


def _owner(path: pathlib.Path) -> str:
  """Returns the process that holds a lock, for an error message."""
  try:
    owner = read_object(path)
    return f'process {owner["pid"]} on host {owner["host"]}'
  except (OSError, ValueError, KeyError):  # The file is not written yet.
    return 'another process'


@contextlib.contextmanager
def as_os_errors(path: str | pathlib.Path) -> Iterator[None]:
  """Turns errors of libraries that write files into OSError.

  ArrayRecord, safetensors and tokenizers report a full disk each in their own
  way.
  """
  try:
    yield
  except OSError:
    raise
  except Exception as error:
    reason = ' '.join(str(error).split())
    raise OSError(errno.EIO, reason, str(path)) from error
