"""Compiled programs: kept between processes, and counted while they compile."""

import contextlib
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator

import jax

from envs import cache
from gigpo_jax import hosts

_FOLDER_VARIABLE = 'JAX_COMPILATION_CACHE_DIR'
# Options that keep small programs as well, unless the user sets their variable.
_OPTIONS = {
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}
# Least recently used programs above this are deleted at start.
_MAX_BYTES = 8 << 30
# Between two lines about the progress, where there is no terminal for a bar.
_LINE_SECS = 10.0


def keep_programs() -> None:
  """Keeps compiled programs on disk, so that the next process compiles nothing.

  They are in a folder of $GIGPO_JAX_CACHE, or of ~/.cache/gigpo_jax; a folder
  that the user chose by JAX_COMPILATION_CACHE_DIR wins. Starts no device.
  """
  for name, value in _OPTIONS.items():
    if name.upper() not in os.environ:
      jax.config.update(name, value)
  if _FOLDER_VARIABLE in os.environ or jax.config.jax_compilation_cache_dir:
    return
  folder = cache.place('programs', _processor())
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
      return  # Of another user.
    _trim(folder, _MAX_BYTES)
  except OSError:
    return  # A cache is no condition for a run.
  jax.config.update('jax_compilation_cache_dir', str(folder))


def _processor() -> str:
  """Returns what programs for this host's processor may use of it.

  Hosts of different processors may share a home directory.
  """
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = []
  found = {
    line
    for line in lines
    if line.startswith(('flags', 'Features', 'model name'))
  }
  return f'{platform.machine()} {platform.processor()} {sorted(found)}'


def _trim(folder: pathlib.Path, max_bytes: int) -> None:
  """Deletes the least recently used files, down to half of the limit."""
  found = [(path, path.stat()) for path in folder.iterdir()]
  total = sum(stat.st_size for _, stat in found)
  if total <= max_bytes:
    return
  found.sort(key=lambda item: max(item[1].st_atime, item[1].st_mtime))
  for path, stat in found:
    # Another process may have deleted it.
    path.unlink(missing_ok=True)
    total -= stat.st_size
    if total <= max_bytes / 2:
      return


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
  """Shows how many programs are compiled; yields what counts one.

  A bar in a terminal, elsewhere a line now and then.
  """
  begin = shown = time.monotonic()
  done = 0
  with hosts.bar(total=total, desc='compiling', unit='program') as bar:

    def advance() -> None:
      nonlocal done, shown
      done += 1
      bar.update()
      now = time.monotonic()
      if bar.disable and now - shown >= _LINE_SECS and done < total:
        shown = now
        hosts.say(f'compiled {done} of {total} programs, {now - begin:.0f} s')

    yield advance
  hosts.say(f'compiled {done} programs in {time.monotonic() - begin:.0f} s')
