"""Saves and restores all that a resumed run needs.

Parameters, optimizer state and the number of the iteration: tasks, keys and
environments are functions of that number, so nothing else has to be kept.
"""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def abstract(state: Any) -> Any:
  """Returns shapes, types and shardings of a state, as `restore` wants."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


class Checkpointer:
  """Checkpoints of a run, newest last; a context manager.

  Writing goes on in the background; a checkpoint that was not finished is not
  there at the next start.

  Args:
    directory: where they live; local or gs://.
    keep: how many of the newest to keep.
  """

  def __init__(self, directory: str | pathlib.Path, *, keep: int = 2):
    path = str(directory)
    if '://' not in path:
      path = str(pathlib.Path(path).resolve())
    self._directory = path
    self._manager = ocp.CheckpointManager(
      path,
      # Named, so that a fresh process can read metadata before it restores.
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'host': ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, cleanup_tmp_directories=True
      ),
    )

  def __enter__(self) -> 'Checkpointer':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def save(self, iteration: int, state: Any, host: dict) -> None:
    """Begins to write the state after an iteration.

    Args:
      iteration: its number.
      state: tree of arrays; may be donated as soon as this returns.
      host: plain values, written as JSON.
    """
    self._manager.save(
      iteration,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)
      ),
    )

  def latest(self) -> int | None:
    """Returns the iteration of the newest finished checkpoint."""
    return self._manager.latest_step()

  def restore(
    self, abstract_state: Any, *, partial: bool = False
  ) -> tuple[int, Any, dict]:
    """Returns (iteration, state, host) of the newest checkpoint.

    Args:
      abstract_state: of `abstract`; its shardings may be of another mesh than
        the one that saved.
      partial: whether the checkpoint may hold more, by the first name, which
        is passed over.

    Raises:
      ValueError: in one line, if there is no checkpoint or it is of another
        model.
    """
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
    """Waits until what was begun is written."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and frees the writers."""
    self._manager.wait_until_finished()
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
