"""Compiled programs: in parallel, kept on disk, with progress."""

import concurrent.futures
import contextlib
import os
import pathlib
import platform
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax

from envs import cache
from gigpo_jax.runtime import console

_FOLDER_VARIABLE = 'JAX_COMPILATION_CACHE_DIR'
# Options that also cache small programs, unless the user sets their variables.
_OPTIONS = {
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}
# Size above which the least recently used programs are deleted.
_MAX_BYTES = 8 << 30
# Seconds between two lines of progress, where no terminal shows a bar.
_LINE_SECS = 10.0
# Maximum number of programs that compile at once; each needs memory.
_MAX_THREADS = 16

# Lowers a program, from arrays or from their shapes.
Lowering = Callable[[], jax.stages.Lowered]


class Compiler:
  """Compiles programs in the background, several at once.

  One thread traces programs in their order, others compile them. Every process
  starts its programs in the same order, because XLA's autotuning exchanges its
  results between the processes of a run on GPUs.

  A context manager. On exit, programs that have not started are cancelled.

  Attributes:
    start: `time.monotonic()` of its creation.
  """

  def __init__(self):
    self.start = time.monotonic()
    self._programs: list[concurrent.futures.Future] = []
    self._tracer = concurrent.futures.ThreadPoolExecutor(1)
    self._pool = concurrent.futures.ThreadPoolExecutor(_num_threads())

  def __enter__(self) -> 'Compiler':
    return self

  def __exit__(self, *exception) -> None:
    for program in self._programs:
      program.cancel()
    for executor in (self._tracer, self._pool):
      executor.shutdown(wait=False, cancel_futures=True)

  def submit(self, lower: Lowering) -> concurrent.futures.Future:
    """Starts the compilation of a program.

    Args:
      lower: lowers the program; called in another thread, so it sets the mesh.
    """
    program: concurrent.futures.Future = concurrent.futures.Future()

    def compile_lowered(lowered: jax.stages.Lowered) -> None:
      if program.set_running_or_notify_cancel():
        with _errors_to(program):
          program.set_result(lowered.compile())

    def trace() -> None:
      if not program.cancelled():
        with _errors_to(program):
          self._pool.submit(compile_lowered, lower())

    self._programs.append(program)
    self._tracer.submit(trace)
    return program


@contextlib.contextmanager
def _errors_to(future: concurrent.futures.Future) -> Iterator[None]:
  """Stores an exception in a future."""
  try:
    yield
  except BaseException as error:
    future.set_exception(error)


def wait(programs: Iterable[concurrent.futures.Future]) -> None:
  """Waits for programs of a `Compiler`; raises the first error."""
  for program in concurrent.futures.as_completed(programs):
    program.result()


class ProgramTable:
  """Compiled programs by key.

  A key is the name of a program and everything that its shapes, types and
  shardings depend on, such as ('decode', 32, 1024).
  """

  def __init__(self):
    self._programs: dict[Hashable, concurrent.futures.Future] = {}

  def __len__(self) -> int:
    return sum(not program.cancelled() for program in self._programs.values())

  def compile(
    self, compiler: Compiler, lowerings: Mapping[Hashable, Lowering]
  ) -> list[concurrent.futures.Future]:
    """Starts the compilation of the programs that are missing.

    Args:
      compiler: compiles in the background.
      lowerings: functions that lower the programs from shapes, by key; the
        slowest programs should come first.

    Returns:
      One future per program of `lowerings`.
    """
    for key, lower in lowerings.items():
      if self._find(key) is None:
        self._programs[key] = compiler.submit(lower)
    return [self._programs[key] for key in lowerings]

  def run(
    self, key: Hashable, lower: Lowering, *args: Any, **kwargs: Any
  ) -> Any:
    """Runs a program; waits for its compilation, or compiles it if missing.

    Args:
      key: its key.
      lower: lowers the program.
      *args: its arguments.
      **kwargs: further arguments.
    """
    program = self._find(key)
    if program is None:
      program = concurrent.futures.Future()
      program.set_result(lower().compile())
      self._programs[key] = program
    return program.result()(*args, **kwargs)

  def _find(self, key: Hashable) -> concurrent.futures.Future | None:
    """Returns a program, unless it is missing or was cancelled."""
    program = self._programs.get(key)
    return None if program is None or program.cancelled() else program


def _num_threads() -> int:
  """Returns the number of programs to compile at once."""
  if hasattr(os, 'sched_getaffinity'):
    return min(len(os.sched_getaffinity(0)), _MAX_THREADS)
  return min(os.cpu_count() or 1, _MAX_THREADS)


def enable_cache() -> None:
  """Keeps compiled programs on disk for later processes.

  They are in a folder of $GIGPO_JAX_CACHE, or of ~/.cache/gigpo_jax, unless
  the user chose one with JAX_COMPILATION_CACHE_DIR. Starts no device.
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
      return  # It belongs to another user.
  except OSError:
    return  # A run works without the cache.
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # Another process may delete files at the same time.
  with contextlib.suppress(OSError):
    _trim(folder, _MAX_BYTES)


def _processor() -> str:
  """Returns the features of this host's processor that programs depend on.

  Hosts with different processors may share a home directory.
  """
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = []
  features = {
    line
    for line in lines
    if line.startswith(('flags', 'Features', 'model name'))
  }
  return f'{platform.machine()} {platform.processor()} {sorted(features)}'


def _trim(folder: pathlib.Path, max_bytes: int) -> None:
  """Deletes the least recently used files, down to half of the limit."""
  # XLA's caches for GPUs are in folders of this one.
  files = []
  for path in folder.rglob('*'):
    # Another process may have deleted it.
    with contextlib.suppress(FileNotFoundError):
      if path.is_file():
        files.append((path, path.stat()))
  total = sum(stat.st_size for _, stat in files)
  if total <= max_bytes:
    return
  files.sort(key=lambda item: max(item[1].st_atime, item[1].st_mtime))
  for path, stat in files:
    path.unlink(missing_ok=True)
    total -= stat.st_size
    if total <= max_bytes / 2:
      return


@contextlib.contextmanager
def progress(total: int, start: float) -> Iterator[Callable[[], None]]:
  """Shows the progress of compilation: a bar, or lines without a terminal.

  Args:
    total: number of programs.
    start: when compilation started, by `time.monotonic()`.

  Yields:
    A function to call after each program.
  """
  last_line = start
  done = 0
  with console.progress_bar(
    total=total, desc='compiling', unit='program'
  ) as bar:

    def advance() -> None:
      nonlocal done, last_line
      done += 1
      bar.update()
      now = time.monotonic()
      if bar.disable and now - last_line >= _LINE_SECS and done < total:
        last_line = now
        console.log(f'compiled {done} of {total} programs, {now - start:.0f} s')

    yield advance
  console.log(f'compiled {done} programs in {time.monotonic() - start:.0f} s')
