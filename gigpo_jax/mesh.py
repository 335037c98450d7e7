"""Devices as a mesh, and which array dimension lives on which mesh axis.

One table maps logical axes, the names that models give to the dimensions of
their arrays, to mesh axes. Changing the parallelism is editing the table.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from gigpo_jax import hosts

AXES = ('data', 'fsdp', 'tensor')

# Rows of a batch are spread over both; parameters over `fsdp` and `tensor`.
BATCH = ('data', 'fsdp')

# Logical axis of a parameter: the mesh axis it is cut along.
RULES: dict[str | None, str | None] = {
  'layers': None,
  'vocab': 'tensor',
  'embed': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head': None,
  'mlp': 'tensor',
  None: None,
}


def make_mesh(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
  """Returns a mesh of all devices.

  Args:
    data: size of the axis over which parameters are copied and rows split.
    fsdp: size of the axis over which parameters and rows are split.
    tensor: size of the axis over which heads and MLP columns are split.
      One of the three may be -1: all devices that remain.

  Raises:
    ValueError: if the sizes do not make up the number of devices.
  """
  sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
  available = jax.device_count()
  accepted = f'data x fsdp x tensor must be {available}, one may be -1'
  remaining, open_axes = available, []
  for name, size in sizes.items():
    if size == -1:
      open_axes.append(name)
    elif size < 1 or remaining % size:
      raise ValueError(
        f'mesh.{name}={size}: does not make up {available} device(s); '
        f'{accepted}'
      )
    else:
      remaining //= size
  if len(open_axes) > 1:
    raise ValueError(f'mesh.{open_axes[1]}=-1: a second -1; {accepted}')
  if open_axes:
    sizes[open_axes[0]] = remaining
  elif remaining > 1:
    raise ValueError(
      f'mesh.data={data}: with fsdp={fsdp}, tensor={tensor} does not make up '
      f'{available} device(s); {accepted}'
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def shardings(mesh: jax.sharding.Mesh, axes: dict) -> dict:
  """Returns the sharding of each leaf.

  Args:
    mesh: the devices.
    axes: tree whose leaves are tuples of logical axes, one a dimension.
  """

  def spec(leaf: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in leaf)))

  return jax.tree.map(spec, axes, is_leaf=lambda x: isinstance(x, tuple))


def sampling_mesh(mesh: jax.sharding.Mesh, tensor: int) -> jax.sharding.Mesh:
  """Returns the same devices, in the same order, as (data, 1, tensor).

  Sampling reads all parameters for every token, so they are cut over `tensor`
  alone, and each group of that many devices has them whole. A group is of
  devices that follow each other in the mesh, and so mostly of one host.

  Raises:
    ValueError: if `tensor` does not divide the devices.
  """
  if mesh.size % tensor:
    raise ValueError(
      f'rollout.tensor={tensor}: does not divide {mesh.size} device(s); must '
      'be a divisor'
    )
  return _of_devices(mesh.devices.reshape(-1, 1, tensor))


def sampling_tensor(
  mesh: jax.sharding.Mesh,
  parameter_bytes: int,
  device_bytes: int | None,
  cuttable: int,
) -> int:
  """Returns over how many devices sampling should cut a model.

  The fewest, doubling from the mesh's own `tensor` as far as a host has it,
  that leave at least half of a device's memory to the cache and to training.

  Args:
    mesh: the devices.
    parameter_bytes: of the model as it is sampled from.
    device_bytes: memory of a device; None, unknown, is taken for enough.
    cuttable: a multiple of every number into which the model can be cut.
  """
  tensor = math.gcd(mesh.shape['tensor'], len(mesh.local_devices))
  while (
    device_bytes
    and parameter_bytes / tensor > device_bytes / 2
    and math.gcd(mesh.size, cuttable) % (2 * tensor) == 0
  ):
    tensor *= 2
  return tensor


def device_bytes(mesh: jax.sharding.Mesh) -> int | None:
  """Returns the memory of the smallest device; None where they do not tell."""
  stats = mesh.local_devices[0].memory_stats() or {}
  found = hosts.tell_all(stats.get('bytes_limit'))
  return None if None in found else min(found)


def on_one_host(mesh: jax.sharding.Mesh) -> bool:
  """Whether no tensor group has devices of several processes."""
  return all(
    len({device.process_index for device in group}) == 1
    for group in mesh.devices.reshape(-1, mesh.shape['tensor'])
  )


def local_mesh(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
  """Returns this process's part of a mesh that is `on_one_host`."""
  here = jax.process_index()
  groups = mesh.devices.reshape(-1, 1, mesh.shape['tensor'])
  return _of_devices(
    np.array([g for g in groups if g[0, 0].process_index == here])
  )


def _of_devices(devices: np.ndarray) -> jax.sharding.Mesh:
  return jax.sharding.Mesh(
    devices, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES)
  )


def localize(tree: Any, local: jax.sharding.Mesh) -> Any:
  """Returns arrays on the local mesh, made of the parts that are here.

  Args:
    tree: of arrays on a mesh of all processes, cut along `tensor` at most.
    local: of `local_mesh`.
  """

  def move(array: jax.Array) -> jax.Array:
    return jax.make_array_from_single_device_arrays(
      array.shape,
      NamedSharding(local, array.sharding.spec),
      [shard.data for shard in array.addressable_shards],
    )

  return jax.tree.map(move, tree)


def check(
  mesh: jax.sharding.Mesh, shapes: dict, axes: dict, *, field: str = 'mesh'
) -> None:
  """Refuses a mesh over which a parameter cannot be cut evenly.

  Args:
    mesh: the devices.
    shapes: tree of the parameters' shapes.
    axes: tree of their logical axes.
    field: of the config that has the mesh's sizes.

  Raises:
    ValueError: in one line naming mesh axis and dimension.
  """

  def is_leaf(x: object) -> bool:
    return isinstance(x, tuple)

  for shape, names in zip(
    jax.tree.leaves(shapes, is_leaf=is_leaf),
    jax.tree.leaves(axes, is_leaf=is_leaf),
    strict=True,
  ):
    for size, name in zip(shape, names, strict=True):
      parts = mesh.shape[RULES[name]] if RULES[name] else 1
      if size % parts:
        raise ValueError(
          f"{field}.{RULES[name]}={parts}: does not divide the model's {size} "
          f'{name}; must be a divisor'
        )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of arrays whose first dimension is rows."""
  return NamedSharding(mesh, PartitionSpec(BATCH))


def cache_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of a cache: [layers, rows, key/value heads, ...]."""
  return NamedSharding(mesh, PartitionSpec(None, BATCH, RULES['kv_heads']))


def everywhere(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of arrays that each device has whole."""
  return NamedSharding(mesh, PartitionSpec())


def place_rows(mesh: jax.sharding.Mesh, arrays: Any) -> Any:
  """Puts host arrays on the devices, their rows spread over (data, fsdp).

  Args:
    mesh: the devices; where they are of several processes, each has to call
      this with the same arrays.
    arrays: tree of arrays whose first dimension is rows.

  Raises:
    ValueError: if the rows do not divide into equal parts.
  """
  shards = batch_shards(mesh)
  for array in jax.tree.leaves(arrays):
    if array.shape[0] % shards:
      raise ValueError(
        f'{array.shape[0]} rows do not divide over {shards} parts of the mesh '
        '(data x fsdp); must be a multiple'
      )
  return place(arrays, batch_sharding(mesh))


def place(arrays: Any, sharding: NamedSharding) -> Any:
  """Puts a tree of host arrays, the same in all processes, on the devices."""
  if sharding.is_fully_addressable:
    return jax.device_put(arrays, sharding)
  return jax.tree.map(
    lambda x: jax.make_array_from_callback(
      x.shape, sharding, lambda index: x[index]
    ),
    arrays,
  )


def fetch(array: jax.Array) -> np.ndarray:
  """Returns an array whole; all processes that hold it must call this."""
  if array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return multihost_utils.process_allgather(array, tiled=True)


def batch_shards(mesh: jax.sharding.Mesh) -> int:
  """Returns into how many parts rows are split; must divide their number."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def constrain_rows(x: jax.Array) -> jax.Array:
  """Keeps rows spread over the mesh in use; without a mesh, does nothing."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH))
