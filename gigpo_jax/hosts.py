"""Several processes, usually one a host, that run one experiment together.

All run the same program. Each plays the episodes of its own share of the
groups, then all tell each other what was played, so that from there on every
process computes with the same numbers; arrays are cut over all devices.
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
import tqdm
from jax.experimental import multihost_utils

from gigpo_jax import files

# M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of glibc: nothing by mmap, nothing
# given back, heaps that grow by 256 MiB.
_MALLOC = {-4: 0, -1: 2**31 - 1, -2: 2**28}
# M_ARENA_MAX: one heap, for which the threads of many cores would wait.
_ONE_HEAP, _MANY_CORES = {-8: 1}, 8
# Of accelerators, under /dev.
_TPU_NODES = ('accel[0-9]*', 'vfio/[0-9]*')
_GPU_NODES = ('nvidia[0-9]*', 'kfd')

_VARIABLES = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')


class Stopped(Exception):
  """What keeps a run from going on, in one line; all saved is intact."""


def join() -> None:
  """Joins the other processes of an experiment, where there are any.

  On a Cloud TPU slice they are found without help; elsewhere the environment
  variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID say who they are.

  Raises:
    ValueError: in one line, if only some of the variables are set.
  """
  values = [os.environ.get(name) for name in _VARIABLES]
  missing = [n for n, v in zip(_VARIABLES, values, strict=True) if not v]
  if jax.distributed.is_initialized():
    return
  # Its handler swallows SIGTERM.
  jax.config.update('jax_enable_preemption_service', False)
  if not missing:
    address, *numbers = values
    for name, value in zip(_VARIABLES[1:], numbers, strict=True):
      if not value.isdecimal():
        raise ValueError(f'${name}={value}: must be a number')
    jax.distributed.initialize(address, *map(int, numbers))
  elif len(missing) < len(_VARIABLES):
    raise ValueError(
      f'${missing[0]}=: not set; several hosts need {", ".join(_VARIABLES)}'
    )
  elif _has_tpu():
    _join_slice()


def _join_slice() -> None:
  try:
    jax.distributed.initialize()
  except (ValueError, RuntimeError, OSError) as error:
    # A chip without the cloud's answers about its neighbours.
    if jax.process_count() > 1:
      raise ValueError(
        f'several hosts, which do not find each other ({error}); set '
        f'{", ".join(_VARIABLES)}'
      ) from error


def _has_tpu() -> bool:
  wanted = os.environ.get('JAX_PLATFORMS', '') in ('', 'tpu', 'tpu,cpu')
  found = wanted and _is_there(_TPU_NODES)
  return found and bool(importlib.util.find_spec('libtpu'))


def _is_there(nodes: tuple[str, ...]) -> bool:
  return any(any(pathlib.Path('/dev').glob(node)) for node in nodes)


def first() -> bool:
  """Whether this process is the one that writes and prints."""
  return jax.process_index() == 0


def several() -> bool:
  """Whether there are other processes; starts no device to find out."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


def keep_memory() -> None:
  """Lets freed memory of this process wait for its next use, on a CPU.

  A program there asks for its memory anew each time it runs; the system would
  give it page by page, empty, which takes a fifth of the time. To be called
  before there are threads.
  """
  if sys.platform != 'linux' or _has_accelerator():
    return
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  few = len(os.sched_getaffinity(0)) < _MANY_CORES
  if mallopt:
    for option, value in (_MALLOC | (_ONE_HEAP if few else {})).items():
      mallopt(option, value)


def _has_accelerator() -> bool:
  """Whether jax will find one, as far as can be told without starting it."""
  wanted = os.environ.get('JAX_PLATFORMS', '') != 'cpu'
  return wanted and _is_there(_TPU_NODES + _GPU_NODES)


@contextlib.contextmanager
def locked(workdir: str | pathlib.Path) -> Iterator[None]:
  """Locks a work directory for all processes of this experiment.

  The main process holds the lock; the others wait for its answer. A single
  process starts no device for this.

  Raises:
    ValueError: in one line, in every process, if another experiment holds it.
  """
  alone = not several()
  with contextlib.ExitStack() as stack:
    refused = ''
    if alone or first():
      try:
        stack.enter_context(files.locked(pathlib.Path(workdir)))
      except ValueError as error:
        refused = str(error)
    if not alone:
      refused = tell_all(refused)[0]
    if refused:
      raise ValueError(refused)
    yield


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[str]:
  """Gives a folder to write into, which gets its name when it is whole."""
  beside = path.with_suffix('.tmp')
  if first():
    shutil.rmtree(beside, ignore_errors=True)
  yield str(beside)
  if first():
    files.open_to_umask(pathlib.Path(beside))
    shutil.rmtree(path, ignore_errors=True)
    beside.rename(path)


def say(line: str) -> None:
  """Prints a line in the first process."""
  if first():
    print(line, flush=True)


def bar(steps: Iterable | None = None, **kwargs) -> tqdm.tqdm:
  """Returns a progress bar, seen in the first process's terminal alone."""
  disable = None if first() else True
  return tqdm.tqdm(steps, leave=False, disable=disable, **kwargs)


def advance(bar: tqdm.tqdm, tokens: Callable[[], int]) -> Callable[[int], None]:
  """Returns what moves a bar of episodes on, and has it tell tokens a second.

  Args:
    bar: of `bar`.
    tokens: returns how many were sampled so far.
  """
  begin = time.monotonic()

  def told(episodes: int) -> None:
    rate = tokens() / max(time.monotonic() - begin, 1e-9)
    bar.set_postfix_str(f'{rate:.0f} tokens/s', refresh=False)
    bar.update(episodes)

  return told


def share(number: int) -> range:
  """Returns this process's part of so many things, one after another."""
  count, process = jax.process_count(), jax.process_index()
  return range(number * process // count, number * (process + 1) // count)


def settle(arrays: Any) -> Any:
  """Returns arrays, which processes on CPUs wait for.

  There jax (0.10, 0.11) may hang if several programs that exchange numbers are
  under way; on accelerators they queue up.
  """
  if jax.process_count() > 1 and jax.default_backend() == 'cpu':
    jax.block_until_ready(arrays)
  return arrays


def tell_all(value: Any) -> list[Any]:
  """Returns what each process has put in, in their order; all must call it.

  Args:
    value: anything that can be pickled.
  """
  if jax.process_count() == 1:
    return [value]
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(data)])).ravel()
  # Of few sizes, for each is compiled.
  padded = np.zeros(1 << max(12, int(sizes.max() - 1).bit_length()), np.uint8)
  padded[: len(data)] = data
  rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
  return [
    pickle.loads(row[: int(size)].tobytes())
    for row, size in zip(rows, sizes, strict=True)
  ]


def leave(status: int) -> NoReturn:
  """Ends this process; at once, if there are others.

  They wait for it in their next exchange; that the connection breaks is what
  stops them. Leaving in order would wait for them.
  """
  if several():
    os._exit(status)
  sys.exit(status)
