"""The accelerators of this host, and the memory allocator of the process.

Nothing here starts a device.
"""

import ctypes
import importlib.util
import os
import pathlib
import sys

# M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of glibc: allocate nothing with
# mmap, return nothing to the system, grow the heap by 256 MiB at a time.
_MALLOC = {-4: 0, -1: 2**31 - 1, -2: 2**28}
# M_ARENA_MAX: a single heap. With many cores, threads would wait for it.
_ONE_HEAP, _MANY_CORES = {-8: 1}, 8

# Device files under /dev.
_TPU_NODES = ('accel[0-9]*', 'vfio/[0-9]*')
_GPU_NODES = ('nvidia[0-9]*', 'kfd')


def has_tpu() -> bool:
  """Returns whether jax will use a TPU."""
  allowed = os.environ.get('JAX_PLATFORMS', '') in ('', 'tpu', 'tpu,cpu')
  exists = allowed and _any_exists(_TPU_NODES)
  return exists and bool(importlib.util.find_spec('libtpu'))


def has_accelerator() -> bool:
  """Returns whether jax will use an accelerator, judging by device files."""
  allowed = os.environ.get('JAX_PLATFORMS', '') != 'cpu'
  return allowed and _any_exists(_TPU_NODES + _GPU_NODES)


def _any_exists(patterns: tuple[str, ...]) -> bool:
  return any(any(pathlib.Path('/dev').glob(pattern)) for pattern in patterns)


def keep_freed_memory() -> None:
  """Makes the process keep freed memory for later use, without accelerator.

  On a CPU, a program allocates its memory anew for each call. Zeroed pages from
  the system would take a fifth of the time. Call this before threads start.
  """
  if sys.platform != 'linux' or has_accelerator():
    return
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  few_cores = len(os.sched_getaffinity(0)) < _MANY_CORES
  if mallopt:
    options = _MALLOC | (_ONE_HEAP if few_cores else {})
    for option, value in options.items():
      mallopt(option, value)
