"""Checkpoints of a run.

A checkpoint holds the state on the devices and plain values of the host. A
manifest, written last, lists the sizes of its files and the hashes of all files
but large ones of arrays. The arrays have checksums, which the devices compute
when they save and restore, so that no host reads their large files back. A
checkpoint that does not match its manifest or its checksums is reported and
skipped.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from gigpo_jax import options
from gigpo_jax.runtime import console, distributed, errors, files

_MANIFEST = 'manifest.json'
_METADATA = '_CHECKPOINT_METADATA'  # Orbax's own file.
_UNFINISHED = '.orbax-checkpoint-tmp'  # Part of the name of a partial folder.
_ITEMS = ('state', 'host')
_CHECKSUMS = 'checksums'  # Name of the arrays' checksums in the plain values.
# Larger files of the state have no hashes: their arrays have checksums.
_MAX_HASHED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of checkpoints, `config.checkpoint`; see configs/base.py."""

  every: int = options.number(5, low=1)
  keep: int = options.number(2, low=1)

  def __post_init__(self):
    options.check(self)


def abstract_state(state: Any) -> Any:
  """Returns the shapes, dtypes and shardings of a state."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


@jax.jit
def _checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns a number for each array that depends on all bits, uint32.

  It does not depend on the sharding, because the sum is modulo 2 ** 32.
  """

  def checksum(x: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    index = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(x.shape):
      iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
      index = index * jnp.uint32(size) + iota
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)

  return {name: checksum(x) for name, x in arrays.items()}


def _find_checksums(state: Any) -> dict[str, int]:
  """Returns the checksum of each array by name; computed by the devices."""
  # A program runs on one set of devices.
  groups: dict[frozenset, dict[str, jax.Array]] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    devices = frozenset(x.sharding.device_set)
    groups.setdefault(devices, {})[_name(path)] = x
  sums = [distributed.block_on_cpu(_checksums(x)) for x in groups.values()]
  return {
    name: int(x) for group in jax.device_get(sums) for name, x in group.items()
  }


def warm_up(state: Any) -> None:
  """Compiles the checksums of a state, so that saving it compiles nothing."""
  _find_checksums(state)


def find_damage(folder: pathlib.Path, *, contents: bool = True) -> str:
  """Returns how a checkpoint's files are damaged; '' if they are intact.

  Args:
    folder: folder of the checkpoint.
    contents: whether to compare the hashes of files and not only sizes.
  """
  if not (folder / _MANIFEST).is_file():
    return f'has no {_MANIFEST}'
  try:
    entries = _entries(files.read_stored(folder / _MANIFEST))
    for item in _ITEMS:
      if not any(name.startswith(f'{item}/') for name in entries):
        return f'{_MANIFEST} lists no file of {item}/'
    for name, (size, digest) in entries.items():
      path = folder / name
      if not path.is_file():
        return f'{name} is missing'
      if path.stat().st_size != size:
        return f'{name} has {path.stat().st_size} bytes, not {size}'
      # Older releases hashed no plain values above 1 MiB.
      is_hashed = contents and digest and _is_hashed(name, size)
      if is_hashed and _digest(path) != digest:
        return f'{name} has changed since it was written'
  except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
    return f'cannot be read ({error})'
  return ''


def _entries(manifest: dict) -> dict[str, tuple[int, str]]:
  """Returns size and digest of each file; version 0 had them at top level."""
  return manifest['files'] if 'files' in manifest else manifest


def _restore_metadata(folder: pathlib.Path) -> None:
  """Restores Orbax's metadata file from the manifest if it is damaged.

  Orbax writes the file again after renaming the checkpoint. It therefore has no
  digest, and a kill may truncate it. The manifest has its earlier contents.
  """
  # Without a manifest it is not used, as after a kill while it was deleted.
  if not (folder / _MANIFEST).is_file():
    return
  path = folder / _METADATA
  with contextlib.suppress(OSError, ValueError):
    handlers = files.read_object(path).get('item_handlers')
    if isinstance(handlers, dict) and handlers.keys() == set(_ITEMS):
      return
  metadata = {}
  with contextlib.suppress(ValueError):
    metadata = files.read_stored(folder / _MANIFEST).get('metadata', {})
  files.write_atomic(path, json.dumps(metadata))
  console.log(f'{path}: was damaged, restored from {_MANIFEST}')


def check_folder(folder: pathlib.Path) -> bool:
  """Returns whether a folder has checkpoints, without devices.

  Raises:
    ValueError: in one line, if all of them are damaged, or it is no folder.
  """
  if folder.exists() and not folder.is_dir():
    raise ValueError(f'{folder}: is a file; must be a folder, or not exist')
  saved = files.numbered_folders(folder)
  if saved and all(find_damage(folder / str(n), contents=False) for n in saved):
    raise _all_damaged(folder, saved)
  return bool(saved)


def describe_resume(folder: pathlib.Path) -> str:
  """Returns where the same command resumes, for a message."""
  for n in reversed(files.numbered_folders(folder)):
    if not find_damage(folder / str(n), contents=False):
      return f'the same command resumes after iteration {n}'
  return 'there is no checkpoint yet; the same command starts again'


def _write_problem(error: Exception) -> str:
  """Returns the system's message in an error of writing, in one line.

  TensorStore puts quoted paths before it and details, as [NAME='...'], after.
  """
  line = ' '.join(str(error).split())
  return re.sub(r" \[\w[\w ]*='.*", '', line).rpartition('": ')[2]


def _all_damaged(folder: pathlib.Path, iterations: list[int]) -> ValueError:
  return ValueError(
    f'{folder}: all checkpoints are damaged ({sorted(iterations)}); give '
    'another --workdir, or move them away to start again'
  )


def _digest(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'blake2b').hexdigest()


def _is_hashed(name: str, size: int) -> bool:
  """Returns whether a file has a digest: all but large ones of arrays.

  Args:
    name: path of the file in the checkpoint.
    size: its size in bytes.
  """
  return size <= _MAX_HASHED_BYTES or not name.startswith('state/')


def _entry(folder: pathlib.Path, name: str) -> tuple[int, str]:
  """Returns the size of a file, and its digest or '' if it has none."""
  path = folder / name
  size = path.stat().st_size
  return size, _digest(path) if _is_hashed(name, size) else ''


def _write_manifest(folder: pathlib.Path) -> None:
  paths = [
    path
    for item in _ITEMS
    for path in sorted((folder / item).rglob('*'))
    if path.is_file()
  ]
  names = [path.relative_to(folder).as_posix() for path in paths]
  entries = {name: _entry(folder, name) for name in names}
  manifest = {
    'version': files.VERSION,
    'files': entries,
    'metadata': files.read_object(folder / _METADATA),
  }
  files.write_atomic(folder / _MANIFEST, json.dumps(manifest))


class _Unfinished(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """A folder being written: gets its manifest before its final name."""

  async def finalize(self) -> None:
    folder = pathlib.Path(self.get())
    if all(
      (folder / item).is_dir() for item in _ITEMS
    ):  # Not an item's folder.
      _write_manifest(folder)
    await super().finalize()


class _Retention:
  """Orbax's policy that keeps the newest checkpoints and another one.

  Attributes:
    other: iteration of the other one; None for none.
  """

  def __init__(self, keep: int):
    self.other: int | None = None
    self._newest = ocp.checkpoint_managers.LatestN(keep)

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list:
    newest = self._newest.should_preserve(checkpoints, context=context)
    return [
      is_new or info.step == self.other
      for info, is_new in zip(checkpoints, newest, strict=True)
    ]


class Checkpointer:
  """The checkpoints of a run; a context manager.

  Checkpoints are written in the background. Unfinished ones are ignored at the
  next start.

  Attributes:
    newest: iteration of the checkpoint last restored or saved by this object;
      None before that.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    keep: int = 2,
    read_only: bool = False,
  ):
    """Opens the checkpoints of a folder.

    Args:
      directory: a local or mounted folder.
      keep: number of checkpoints to keep; older ones are deleted.
      read_only: whether to change nothing, because a run may be writing.
    """
    self.newest: int | None = None
    self._directory = pathlib.Path(directory).resolve()
    # How each checkpoint that was looked at is damaged; '': intact.
    self._damage: dict[int, str] = {}
    for path in sorted(self._directory.glob(f'*{_UNFINISHED}*')):
      console.log(f'{path}: unfinished, skipped')
    if distributed.is_main_process() and not read_only:
      for iteration in files.numbered_folders(self._directory):
        _restore_metadata(self._directory / str(iteration))
    distributed.barrier()
    self._retention = _Retention(keep)
    self._manager = ocp.CheckpointManager(
      str(self._directory),
      # With handlers, a new process can read metadata before it restores.
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'host': ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._retention,
        read_only=read_only,
        cleanup_tmp_directories=not read_only,
        temporary_path_class=_Unfinished,
      ),
    )

  def __enter__(self) -> 'Checkpointer':
    return self

  def __exit__(self, error_type: type | None, *exception) -> None:
    if error_type is None:
      self.close()
      return
    # Keep the first error.
    with contextlib.suppress(Exception):
      self.close()

  def save(
    self, iteration: int, state: Any, host: dict, *, other: int | None = None
  ) -> None:
    """Starts to write the state after an iteration.

    Args:
      iteration: index of the iteration.
      state: tree of arrays; may be donated as soon as this returns.
      host: plain values, written as JSON.
      other: iteration of a checkpoint to keep besides the newest ones.

    Raises:
      errors.RunError: in one line, if this checkpoint or the previous one
        cannot be written.
    """
    self._clear(iteration)
    host = host | {_CHECKSUMS: _find_checksums(state)}
    self._retention.other = other
    with self._explain_errors():
      self._manager.save(
        iteration,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)
        ),
      )
    self.newest = iteration

  def _clear(self, iteration: int) -> None:
    """Renames damaged checkpoints of iterations that are run again."""
    later = [
      n for n, reason in self._damage.items() if reason and n >= iteration
    ]
    if not later:
      return
    if distributed.is_main_process():
      for n in later:
        path = self._directory / str(n)
        path.rename(files.free_name(path, 'damaged'))
    distributed.barrier()
    self._manager.reload()
    self._damage.clear()

  @contextlib.contextmanager
  def _explain_errors(self) -> Iterator[None]:
    """Turns errors of writing a checkpoint into a one-line RunError."""
    try:
      yield
    except (OSError, ValueError) as error:  # Disk, tensorstore.
      saved = files.numbered_folders(self._directory)
      start = f'iteration {saved[-1]}' if saved else 'the start'
      raise errors.RunError(
        f'{self._directory}: a checkpoint cannot be written '
        f'({_write_problem(error)}); free space or repair the disk, then rerun '
        f'the same command to resume from {start}'
      ) from error

  def latest(self, until: int | None = None) -> int | None:
    """Returns the iteration of the newest intact checkpoint, if any.

    Args:
      until: the last iteration that counts; None for all.

    Raises:
      ValueError: in one line, if there are checkpoints and all are damaged.
    """
    saved = self._saved(until)
    for iteration in saved:
      if iteration not in self._damage:
        folder = self._directory / str(iteration)
        reason = distributed.all_gather_objects(
          distributed.is_main_process() and find_damage(folder)
        )[0]
        self._report_damage(iteration, reason)
      if not self._damage[iteration]:
        return iteration
    if saved:
      raise _all_damaged(self._directory, saved)
    return None

  def newest_until(self, iteration: int) -> int:
    """Returns the newest checkpoint up to an iteration; -1 if there is none.

    Damaged checkpoints count, and one that is being written.
    """
    return next(iter(self._saved(iteration)), -1)

  def _saved(self, until: int | None) -> list[int]:
    """Returns the iterations of checkpoints up to one, newest first.

    They are those that the main process sees: a network file system may show
    others a new checkpoint late.
    """
    saved = sorted(self._manager.all_steps(), reverse=True)
    saved = distributed.all_gather_objects(saved)[0]
    return [n for n in saved if until is None or n <= until]

  def _report_damage(self, iteration: int, reason: str) -> None:
    """Records whether a checkpoint is damaged, and prints how."""
    self._damage[iteration] = reason
    if reason:
      folder = self._directory / str(iteration)
      console.log(f'{folder}: damaged, skipped: {reason}')

  def check(self, abstract_state: Any) -> None:
    """Checks that the newest checkpoint, if any, fits a state.

    Raises:
      ValueError: in one line, if it does not.
    """
    if (iteration := self.latest()) is not None:
      self._compare(iteration, abstract_state)

  def restore(
    self,
    abstract_state: Any,
    *,
    iteration: int | None = None,
    or_earlier: bool = False,
    partial: bool = False,
  ) -> tuple[int, Any, dict]:
    """Returns (iteration, state, host) of a checkpoint.

    Args:
      abstract_state: shapes, dtypes and shardings, see the function
        `abstract_state`; the mesh may differ from that of the saved state.
      iteration: iteration of the checkpoint; None for the newest intact one.
      or_earlier: whether the newest intact one up to `iteration` is restored.
      partial: whether to ignore further entries of the checkpoint, on the first
        two levels; `abstract_state` is then a dictionary of dictionaries.

    Raises:
      ValueError: in one line, if there is no intact checkpoint, or it is of
        another model.
    """
    wanted, is_exact = iteration, iteration is not None and not or_earlier
    while True:
      iteration = wanted if is_exact else self.latest(wanted)
      if iteration is None:
        raise ValueError(f'{self._directory}: has no checkpoint')
      state, host, reason = self._read(iteration, abstract_state, partial)
      if not reason:
        break
      del state  # The next one needs the memory.
      if is_exact:
        raise ValueError(f'{self._directory}/{wanted}: damaged: {reason}')
      self._report_damage(iteration, reason)
    self.newest = iteration
    return iteration, state, host

  def _read(
    self, iteration: int, abstract_state: Any, partial: bool
  ) -> tuple[Any, dict, str]:
    """Returns (state, host, how the checkpoint is damaged or '')."""
    wanted = abstract_state
    if partial:
      abstract_state = self._add_entries(iteration, wanted)
    self._compare(iteration, abstract_state)
    try:
      restored = self._manager.restore(
        iteration,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(abstract_state),
          host=ocp.args.JsonRestore(),
        ),
      )
      state, host = restored['state'], dict(restored['host'])
    except (OSError, ValueError) as error:  # Disk, tensorstore.
      reason = f'cannot be read ({" ".join(str(error).split())[-120:]})'
      if distributed.is_multi_process():
        # The other processes may be waiting in Orbax for this one.
        raise errors.RunError(
          f'{self._directory}/{iteration}: {reason} by process '
          f'{jax.process_index()}; rerun the same command, or rename this '
          'folder to resume from an earlier checkpoint'
        ) from error
      return None, {}, reason
    if partial:
      state = {
        name: {key: state[name][key] for key in entry}
        for name, entry in wanted.items()
      }
    # Older checkpoints have no checksums.
    saved = host.pop(_CHECKSUMS, {})
    for name, checksum in _find_checksums(state).items() if saved else ():
      if saved.get(name) != checksum:
        return None, {}, f'{name} has changed since it was written'
    return state, host, ''

  def _add_entries(self, iteration: int, wanted: dict) -> dict:
    """Returns an abstract state with the further entries of a checkpoint."""
    saved = jax.tree.map(
      # Takes no memory; Orbax reads an array for it into the host's.
      lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape),
      dict(self._manager.item_metadata(iteration)['state']),
      is_leaf=lambda x: hasattr(x, 'shape'),
    )
    return saved | {
      name: {**saved.get(name, {}), **entry} for name, entry in wanted.items()
    }

  def _compare(self, iteration: int, abstract_state: Any) -> None:
    saved = _leaves(self._manager.item_metadata(iteration)['state'])
    wanted = _leaves(abstract_state)
    for name in sorted(saved.keys() | wanted.keys()):
      there, here = saved.get(name), wanted.get(name)
      if there == here:
        continue
      # Report the shape or the dtype, whichever differs, or a missing leaf.
      index = 0 if not (there and here) or there[0] != here[0] else 1
      there, here = (
        leaf[index] if leaf else 'missing' for leaf in (there, here)
      )
      raise ValueError(
        f'{self._directory}/{iteration}: {name} is {there} in the checkpoint '
        f'and {here} in this model; give another folder, or the model of that '
        'run'
      )

  def wait(self) -> None:
    """Waits until all checkpoints are written.

    Raises:
      errors.RunError: in one line, if one cannot be written.
    """
    with self._explain_errors():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for the checkpoints and frees the writers."""
    with self._explain_errors():
      self._manager.close()


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
  """Returns shape and dtype of each leaf by name."""
  leaves = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=lambda x: hasattr(x, 'shape')
  )
  return {
    _name(path): (tuple(leaf.shape), np.dtype(leaf.dtype).name)
    for path, leaf in leaves
  }


def _name(path: tuple) -> str:
  # In a saved tree, attributes and indices are keys.
  def part(key: Any) -> str:
    for attribute in ('name', 'key', 'idx'):
      if hasattr(key, attribute):
        return str(getattr(key, attribute))
    return str(key)

  return '/'.join(part(key) for key in path)
