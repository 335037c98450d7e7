"""Saves and restores all that a resumed run needs.

Parameters, optimizer state and the number of the iteration: tasks, keys and
environments are functions of that number, so nothing else has to be kept.

A checkpoint holds a manifest, sizes and hashes of its files, that is written
last. What does not agree with its manifest is named and passed over.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gigpo_jax import options
from gigpo_jax.runtime import console, distributed, errors, files

_MANIFEST = 'manifest.json'
_METADATA = '_CHECKPOINT_METADATA'  # of Orbax
_UNFINISHED = '.orbax-checkpoint-tmp'  # in the name of a folder
_ITEMS = ('state', 'host')


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of checkpoints, `config.checkpoint`; see configs/base.py."""

  every: int = options.number(5, low=1)
  keep: int = options.number(2, low=1)

  def __post_init__(self):
    options.check(self)


def abstract_state(state: Any) -> Any:
  """Returns shapes, types and shardings of a state, as `restore` wants."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


def find_damage(folder: pathlib.Path, *, contents: bool = True) -> str:
  """Returns what is wrong with a checkpoint; '' if it is whole.

  Args:
    folder: of the checkpoint.
    contents: whether files are read, and not just measured.
  """
  if not (folder / _MANIFEST).is_file():
    return f'has no {_MANIFEST}'
  try:
    listed = _listed(files.read_stored(folder / _MANIFEST))
    for item in _ITEMS:
      if not any(name.startswith(f'{item}/') for name in listed):
        return f'{_MANIFEST} lists no file of {item}/'
    for name, (size, digest) in listed.items():
      path = folder / name
      if not path.is_file():
        return f'{name} is missing'
      if path.stat().st_size != size:
        return f'{name} has {path.stat().st_size} bytes, not {size}'
      if contents and _digest(path) != digest:
        return f'{name} has other contents than were written'
  except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
    return f'cannot be read ({error})'
  return ''


def _listed(manifest: dict) -> dict[str, tuple[int, str]]:
  """Returns size and digest of each file; version 0 had them at the top."""
  return manifest['files'] if 'files' in manifest else manifest


def _restore_metadata(folder: pathlib.Path) -> None:
  """Writes Orbax's file about a checkpoint again, if it is damaged.

  Orbax changes it once more when the checkpoint has its name, so that it has no
  digest, and a kill may tear it; the manifest holds what it was before.
  """
  path = folder / _METADATA
  with contextlib.suppress(OSError, ValueError, RecursionError):
    described = files.read_object(path).get('item_handlers')
    if isinstance(described, dict) and described.keys() == set(_ITEMS):
      return
  metadata = {}
  with contextlib.suppress(ValueError):
    metadata = files.read_stored(folder / _MANIFEST).get('metadata', {})
  files.write_atomic(path, json.dumps(metadata))
  console.log(f'{path}: was damaged, restored from {_MANIFEST}')


def check_folder(folder: pathlib.Path) -> bool:
  """Returns whether there are checkpoints; takes no device, reads no contents.

  Raises:
    ValueError: in one line, if none of them is whole, or it is no folder.
  """
  if folder.exists() and not folder.is_dir():
    raise ValueError(
      f'{folder}: a file is in the way; must be a folder, or gone'
    )
  found = _numbers(folder)
  if found and all(find_damage(folder / str(n), contents=False) for n in found):
    raise _none_whole(folder, found)
  return bool(found)


def _numbers(folder: pathlib.Path) -> list[int]:
  """Returns the iterations of a folder's checkpoints, whole or not."""
  paths = folder.iterdir() if folder.is_dir() else ()
  return sorted(int(p.name) for p in paths if p.name.isdecimal() and p.is_dir())


def describe_resume(folder: pathlib.Path) -> str:
  """Returns where the same command resumes; takes no device."""
  for n in reversed(_numbers(folder)):
    if not find_damage(folder / str(n), contents=False):
      return f'the same command resumes after iteration {n}'
  return 'there is no checkpoint yet; the same command starts again'


def _none_whole(folder: pathlib.Path, found: list[int]) -> ValueError:
  return ValueError(
    f'{folder}: none of the checkpoints {sorted(found)} is whole; give another '
    '--workdir, or move them away to begin anew'
  )


def _digest(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'blake2b').hexdigest()


def _write_manifest(folder: pathlib.Path) -> None:
  found = [
    path
    for item in _ITEMS
    for path in sorted((folder / item).rglob('*'))
    if path.is_file()
  ]
  listed = {
    str(path.relative_to(folder)): (path.stat().st_size, _digest(path))
    for path in found
  }
  manifest = {
    'version': files.VERSION,
    'files': listed,
    'metadata': files.read_object(folder / _METADATA),
  }
  files.write_atomic(folder / _MANIFEST, json.dumps(manifest))


class _Unfinished(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """A folder being written: it gets its manifest, then its name."""

  async def finalize(self) -> None:
    folder = pathlib.Path(self.get())
    if all((folder / item).is_dir() for item in _ITEMS):  # Not one of these.
      _write_manifest(folder)
    await super().finalize()


class Checkpointer:
  """Checkpoints of a run, newest last; a context manager.

  Writing goes on in the background; a checkpoint that was not finished is not
  there at the next start.

  Args:
    directory: where they live; a local or mounted folder.
    keep: how many of the newest to keep.
    read_only: whether to leave all as it is, for another may be writing.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    keep: int = 2,
    read_only: bool = False,
  ):
    self._directory = pathlib.Path(directory).resolve()
    # Whether a checkpoint is whole is looked up once.
    self._damage: dict[int, str] = {}
    for path in sorted(self._directory.glob(f'*{_UNFINISHED}*')):
      console.log(f'{path}: was not finished, passed over')
    if distributed.is_main_process() and not read_only:
      for number in _numbers(self._directory):
        _restore_metadata(self._directory / str(number))
    if distributed.is_multi_process():
      distributed.all_gather_objects(None)  # All wait for the files.
    self._manager = ocp.CheckpointManager(
      str(self._directory),
      # Named, so that a fresh process can read metadata before it restores.
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'host': ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
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
    # What went wrong first is what counts.
    with contextlib.suppress(Exception):
      self.close()

  def save(self, iteration: int, state: Any, host: dict) -> None:
    """Begins to write the state after an iteration.

    Args:
      iteration: its number.
      state: tree of arrays; may be donated as soon as this returns.
      host: plain values, written as JSON.

    Raises:
      errors.RunError: in one line, if this or the one before cannot be written.
    """
    self._clear(iteration)
    with self._explained():
      self._manager.save(
        iteration,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)
        ),
      )

  def _clear(self, iteration: int) -> None:
    """Puts aside damaged checkpoints that a run has got to again."""
    later = [n for n, wrong in self._damage.items() if wrong and n >= iteration]
    if not later:
      return
    if distributed.is_main_process():
      for n in later:
        aside = self._directory / f'{n}.damaged'
        shutil.rmtree(aside, ignore_errors=True)
        (self._directory / str(n)).rename(aside)
    distributed.all_gather_objects(None)  # All wait until they are gone.
    self._manager.reload()
    self._damage.clear()

  @contextlib.contextmanager
  def _explained(self) -> Iterator[None]:
    """Says in one line that, and why, a checkpoint is not written."""
    try:
      yield
    except (OSError, ValueError) as error:  # Of the disk, of tensorstore.
      there = _numbers(self._directory)
      # What the system said comes last.
      reason = ' '.join(str(error).split())[-120:]
      raise errors.RunError(
        f'{self._directory}: a checkpoint cannot be written ({reason}); make '
        'room or mend it, then the same command goes on from '
        + (f'iteration {there[-1]}' if there else 'the start')
      ) from error

  def latest(self) -> int | None:
    """Returns the iteration of the newest checkpoint that is whole.

    Raises:
      ValueError: in one line, if there are some and none is whole.
    """
    found = sorted(self._manager.all_steps(), reverse=True)
    for iteration in found:
      if iteration not in self._damage:
        folder = self._directory / str(iteration)
        wrong = distributed.all_gather_objects(
          distributed.is_main_process() and find_damage(folder)
        )[0]
        self._damage[iteration] = wrong
        if wrong:
          console.log(f'{folder}: damaged, passed over: {wrong}')
      if not self._damage[iteration]:
        return iteration
    if found:
      raise _none_whole(self._directory, found)
    return None

  def check(self, abstract_state: Any) -> None:
    """Looks whether the newest checkpoint, if there is one, can be restored.

    Raises:
      ValueError: in one line, if it cannot.
    """
    if (iteration := self.latest()) is not None:
      self._compare(iteration, abstract_state)

  def restore(
    self,
    abstract_state: Any,
    *,
    iteration: int | None = None,
    partial: bool = False,
  ) -> tuple[int, Any, dict]:
    """Returns (iteration, state, host) of a checkpoint.

    Args:
      abstract_state: of `abstract`; its shardings may be of another mesh than
        the one that saved.
      iteration: which one; None is the newest that is whole.
      partial: whether the checkpoint may hold more, by the first name, which
        is passed over.

    Raises:
      ValueError: in one line, if there is no checkpoint or it is of another
        model.
    """
    if iteration is None:
      iteration = self.latest()
    if iteration is None:
      raise ValueError(f'{self._directory}: there is no checkpoint')
    wanted = abstract_state
    if partial:
      abstract_state = self._further(iteration) | abstract_state
    self._compare(iteration, abstract_state)
    restored = self._manager.restore(
      iteration,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state),
        host=ocp.args.JsonRestore(),
      ),
    )
    state = restored['state']
    if partial:
      state = {name: state[name] for name in wanted}
    return iteration, state, restored['host']

  def _further(self, iteration: int) -> dict:
    """Returns what a checkpoint holds, to be put on one device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
      dict(self._manager.item_metadata(iteration)['state']),
      is_leaf=lambda x: hasattr(x, 'shape'),
    )

  def _compare(self, iteration: int, abstract_state: Any) -> None:
    saved = _leaves(self._manager.item_metadata(iteration)['state'])
    wanted = _leaves(abstract_state)
    for name in sorted(saved.keys() | wanted.keys()):
      there, here = saved.get(name), wanted.get(name)
      if there == here:
        continue
      # Of shape and type the one that differs, or that the leaf is missing.
      what = 0 if not (there and here) or there[0] != here[0] else 1
      there, here = (
        leaf[what] if leaf else 'missing' for leaf in (there, here)
      )
      raise ValueError(
        f'{self._directory}/{iteration}: {name} is {there} there and {here} in '
        'this model; give another --workdir'
      )

  def wait(self) -> None:
    """Waits until what was begun is written.

    Raises:
      errors.RunError: in one line, if it cannot be.
    """
    with self._explained():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and frees the writers."""
    with self._explained():
      self._manager.close()


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
  """Returns shape and type of each leaf, by name."""
  leaves = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=lambda x: hasattr(x, 'shape')
  )
  return {
    _name(path): (tuple(leaf.shape), np.dtype(leaf.dtype).name)
    for path, leaf in leaves
  }


def _name(path: tuple) -> str:
  # A saved tree has lost its classes: attributes and indices are keys there.
  def part(key: Any) -> str:
    for attribute in ('name', 'key', 'idx'):
      if hasattr(key, attribute):
        return str(getattr(key, attribute))
    return str(key)

  return '/'.join(part(key) for key in path)
