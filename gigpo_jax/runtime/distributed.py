"""Several processes, usually one per host, that run one experiment together.

Every process runs the same program on its own slice of the episodes; then all
processes gather the trajectories, so that every later number is the same on
each of them. Arrays are sharded over all devices.
"""

import contextlib
import os
import pathlib
import pickle
import re
import shutil
import sys
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from gigpo_jax.runtime import errors, files, hardware

# A network file system may show a new file late.
_SHARED_SECS = 60.0

# Largest difference of sums of arrays, relative to the sum of absolute values.
_MAX_DIFFERENCE = 1e-4

# How long to wait for the others, one of which may download the model.
_CONNECT_SECS = 1800
# Parts of an error of a collective after another process has ended: on CPUs, on
# GPUs, and of jax.
_LOST = re.compile(
  'Gloo .*failed|remote process exited|coordination service|heartbeat'
)
_VARIABLES = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')


def initialize() -> None:
  """Connects the processes of a multi-process run; otherwise does nothing.

  The processes of a Cloud TPU slice are detected. Elsewhere, set the
  environment variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID.

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
    address, *counts = values
    for name, value in zip(_VARIABLES[1:], counts, strict=True):
      if not value.isdecimal():
        raise ValueError(f'${name}={value}: must be a number')
    if not re.fullmatch(r'.+:\d+', address):
      raise ValueError(
        f'${_VARIABLES[0]}={address}: has no port; must be HOST:PORT'
      )
    count, index = map(int, counts)
    if index >= count:
      raise ValueError(
        f'${_VARIABLES[2]}={index}: must be below ${_VARIABLES[1]}={count}'
      )
    if count > 1:
      print(f'waiting for {count} processes at {address}', flush=True)
    # A cluster that jax detects, such as Slurm, would choose one device.
    jax.distributed.initialize(
      address,
      count,
      index,
      cluster_detection_method='deactivate',
      initialization_timeout=_CONNECT_SECS,
    )
  elif len(missing) < len(_VARIABLES):
    raise ValueError(
      f'${missing[0]}=: not set; several hosts need {", ".join(_VARIABLES)}'
    )
  elif hardware.has_tpu():
    _initialize_slice()


def _initialize_slice() -> None:
  try:
    jax.distributed.initialize(initialization_timeout=_CONNECT_SECS)
  except (ValueError, RuntimeError, OSError) as error:
    # A single TPU host may lack the metadata of a slice.
    if jax.process_count() > 1:
      raise ValueError(
        f'the hosts cannot connect to each other ({error}); set '
        f'{", ".join(_VARIABLES)}'
      ) from error


def start_devices() -> None:
  """Starts the devices of this process; warns if an accelerator is unused.

  Raises:
    ValueError: in one line, if the platforms in JAX_PLATFORMS have none.
  """
  try:
    platform = jax.devices()[0].platform
  # Without a plugin for CUDA, jax asserts that there is a device.
  except (RuntimeError, AssertionError) as error:
    platforms = os.environ.get('JAX_PLATFORMS')
    if not platforms:
      raise
    reason = str(error).partition(' (set JAX_PLATFORMS')[0] or 'not installed'
    raise ValueError(
      f'$JAX_PLATFORMS={platforms}: cannot be used ({reason}); must be a '
      'platform of this machine, such as cpu, or unset'
    ) from error
  if platform == 'cpu' and hardware.has_accelerator():
    print(
      'this machine has an accelerator, but jax uses the CPU; install '
      "'gigpo_jax[cuda]' or 'gigpo_jax[tpu]', or set JAX_PLATFORMS=cpu",
      flush=True,
    )


def is_main_process() -> bool:
  """Returns whether this process prints, and writes shared files.

  A single process starts no device for this.
  """
  return not is_multi_process() or jax.process_index() == 0


def is_multi_process() -> bool:
  """Returns whether there are other processes; starts no device."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


@contextlib.contextmanager
def lock(workdir: str | pathlib.Path) -> Iterator[None]:
  """Locks a work directory for all processes of this experiment.

  The main process holds the lock. A single process starts no device for this.

  Raises:
    ValueError: in one line, in every process, if another experiment holds it,
      or the processes do not share the folder.
  """
  alone = not is_multi_process()
  with contextlib.ExitStack() as stack:
    refused = ''
    if is_main_process():
      try:
        stack.enter_context(files.lock(pathlib.Path(workdir)))
      except ValueError as error:
        refused = str(error)
    if not alone:
      refused = all_gather_objects(refused)[0]
    if refused:
      raise ValueError(refused)
    if not alone:
      _check_shared(pathlib.Path(workdir))
    yield


def _check_shared(workdir: pathlib.Path) -> None:
  """Checks that every process sees a file that the main process writes."""
  file = workdir / f'.shared_{all_gather_objects(uuid.uuid4().hex)[0]}'
  if is_main_process():
    file.touch()
  barrier()
  deadline = time.monotonic() + _SHARED_SECS
  while not file.exists() and time.monotonic() < deadline:
    time.sleep(0.2)
  visible = all_gather_objects(file.exists())
  if is_main_process():
    file.unlink()
  if not all(visible):
    raise ValueError(
      f'--workdir={workdir}: process {visible.index(False)} does not see the '
      'files of process 0; must be a folder that all hosts share'
    )


@contextlib.contextmanager
def atomic_directory(path: pathlib.Path) -> Iterator[str]:
  """Yields a temporary directory that replaces `path` at the end.

  A directory with files that the new one lacks is kept under another name. A
  link stays, and what it points to is replaced.
  """
  path = path.resolve()
  partial = path.with_name(path.name + '.tmp')
  if is_main_process():
    shutil.rmtree(partial, ignore_errors=True)
  yield str(partial)
  if is_main_process():
    files.open_to_umask(partial)
    files.remove_or_keep(path, files.relative_paths(partial))
    partial.rename(path)
  barrier()  # The others may read it next.


def process_slice(size: int) -> range:
  """Returns the indices below `size` that belong to this process."""
  return equal_slice(size, jax.process_index(), jax.process_count())


def equal_slice(size: int, part: int, parts: int) -> range:
  """Returns the indices below `size` of one of several nearly equal parts."""
  return range(size * part // parts, size * (part + 1) // parts)


def block_on_cpu(arrays: Any) -> Any:
  """Returns arrays; in a multi-process run on CPUs, waits for them first.

  On CPUs, jax (0.10, 0.11) may deadlock if several programs with collectives
  run at once. Accelerators run them in order.
  """
  if jax.process_count() > 1 and jax.default_backend() == 'cpu':
    jax.block_until_ready(arrays)
  return arrays


def all_gather_objects(value: Any) -> list[Any]:
  """Returns the values of all processes in order; every process must call it.

  Args:
    value: a picklable value.
  """
  if jax.process_count() == 1:
    return [value]
  # The gathered arrays pass through the memory of every device.
  data = np.frombuffer(zlib.compress(pickle.dumps(value), 1), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(data)])).ravel()
  # Round the size up, because every size is compiled.
  padded = np.zeros(1 << max(12, int(sizes.max() - 1).bit_length()), np.uint8)
  padded[: len(data)] = data
  rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
  return [
    pickle.loads(zlib.decompress(row[: int(size)].tobytes()))
    for row, size in zip(rows, sizes, strict=True)
  ]


def barrier() -> None:
  """Waits until every process calls it; a single process starts no device."""
  if is_multi_process():
    all_gather_objects(None)


def check_same(values: Mapping[str, Any]) -> None:
  """Checks that all processes have the same values; all of them must call it.

  Args:
    values: picklable values by the names of their options.

  Raises:
    ValueError: in one line, in every process, if they differ.
  """
  first, *others = all_gather_objects(dict(values))
  for process, other in enumerate(others, 1):
    for name in sorted(first.keys() | other.keys()):
      if first.get(name) != other.get(name):
        raise ValueError(
          f'{name}={first.get(name)}: is {other.get(name)} in process {process}'
          '; must be the same on every host'
        )


def check_close(arrays: Mapping[str, np.ndarray]) -> None:
  """Checks that all processes have nearly the same arrays; all must call it.

  The last bits may differ between machines. Sums are compared in which a number
  counts by its position.

  Args:
    arrays: the arrays by name.

  Raises:
    ValueError: in one line, in every process, if they differ.
  """
  if not is_multi_process():
    return

  def sums(array: np.ndarray) -> tuple[float, float]:
    flat = np.asarray(array, float).ravel()
    return np.abs(flat).sum(), flat @ np.linspace(0.5, 1, flat.size)

  first, *others = all_gather_objects({k: sums(x) for k, x in arrays.items()})
  for process, other in enumerate(others, 1):
    for name, (size, total) in first.items():
      if abs(other[name][1] - total) > _MAX_DIFFERENCE * size:
        raise ValueError(
          f'{name}: differ in process {process}; modules of your own must '
          'compute the same on every host, and draw random numbers from a seed '
          'that all hosts share'
        )


@contextlib.contextmanager
def explain_lost_process() -> Iterator[None]:
  """Turns the error after another process has ended into a RunError."""
  try:
    yield
  # On CPUs, the error of a collective is a ValueError.
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    if not (is_multi_process() and _LOST.search(str(error))):
      raise
    reason = ' '.join(str(error).split())[:200]
    raise errors.RunError(
      f'another process has ended or cannot be reached ({reason}); its own '
      'output says why; then rerun the same command in every process'
    ) from error


def exit_process(status: int) -> NoReturn:
  """Ends this process, without cleanup if there are others.

  The others wait for it in their next collective and stop when the connection
  breaks. A regular exit would wait for them.
  """
  if is_multi_process():
    os._exit(status)
  sys.exit(status)
