"""Devices as a mesh, and which array dimension lives on which mesh axis.

One table maps logical axes, the names that models give to the dimensions of
their arrays, to mesh axes. Changing the parallelism is editing the table.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from gigpo_jax import hosts

AXES = ('data', 'fsdp', 'expert', 'sequence', 'tensor')

# Rows of a batch are spread over these; their tokens over `sequence`.
BATCH = ('data', 'fsdp', 'expert')

# Logical axis of a parameter: the mesh axis it is cut along.
RULES: dict[str | None, str | None] = {
  'layers': None,
  'vocab': 'tensor',
  'embed': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head': None,
  'mlp': 'tensor',
  'experts': 'expert',
  None: None,
}


def make_mesh(
  data: int,
  fsdp: int,
  tensor: int,
  *,
  expert: int = 1,
  sequence: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """Returns a mesh of devices.

  Args:
    data: size of the axis over which parameters are copied and rows split.
    fsdp: size of the axis over which parameters and rows are split.
    tensor: size of the axis over which heads and MLP columns are split.
    expert: size of the axis over which experts and rows are split.
    sequence: size of the axis over which the tokens of a row are split.
      One of the five may be -1: all devices that remain.
    devices: which; None: all there are.

  Raises:
    ValueError: if the sizes do not make up the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  given = (data, fsdp, expert, sequence, tensor)
  sizes = dict(zip(AXES, given, strict=True))
  available = len(devices)
  accepted = f'{" x ".join(AXES)} must be {available}, one may be -1'
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
    others = ', '.join(f'{k}={v}' for k, v in sizes.items() if k != 'data')
    raise ValueError(
      f'mesh.data={data}: with {others} does not make up {available} '
      f'device(s); {accepted}'
    )
  mesh = jax.make_mesh(
    tuple(sizes.values()),
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
    devices=devices,
  )
  # A host's devices follow each other, so that it can sample by itself: the
  # order that suits a torus goes through several hosts and back.
  order = sorted(mesh.devices.flat, key=lambda device: device.process_index)
  return jax.sharding.Mesh(
    np.array(order).reshape(mesh.devices.shape),
    AXES,
    axis_types=mesh.axis_types,
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


def described(shapes: Any, shardings: Any) -> Any:
  """Returns arrays' shapes and types with shardings, as `jax.jit` lowers them.

  Args:
    shapes: tree of arrays, or of what has a shape and a type.
    shardings: a tree of the same form.
  """
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def sampling_mesh(mesh: jax.sharding.Mesh, tensor: int) -> jax.sharding.Mesh:
  """Returns the same devices, in the same order, as `data` and `tensor`.

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
  return _of_devices(mesh.devices.reshape(-1, tensor))


def sampling_tensor(
  mesh: jax.sharding.Mesh,
  parameter_bytes: int,
  device_bytes: int | None,
  cuttable: int,
) -> int:
  """Returns over how many devices sampling should cut a model.

  The fewest, doubling from the mesh's own `tensor` as far as a host has it,
  that leave three quarters of a device's memory to the cache and to training.

  Args:
    mesh: the devices.
    parameter_bytes: of the model as it is sampled from.
    device_bytes: memory of a device; None, unknown, is taken for enough.
    cuttable: a multiple of every number into which the model can be cut.
  """
  tensor = math.gcd(mesh.shape['tensor'], len(mesh.local_devices))
  while (
    device_bytes
    and parameter_bytes / tensor > device_bytes / 4
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
  groups = mesh.devices.reshape(-1, mesh.shape['tensor'])
  return _of_devices(
    np.array([group for group in groups if group[0].process_index == here])
  )


def _of_devices(devices: np.ndarray) -> jax.sharding.Mesh:
  data, tensor = devices.shape
  return jax.sharding.Mesh(
    devices.reshape(data, 1, 1, 1, tensor),
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
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


def on_tpu(mesh: jax.sharding.Mesh) -> bool:
  """Whether a mesh is one of TPUs."""
  return mesh.devices.flat[0].platform == 'tpu'


def cache_formats(mesh: jax.sharding.Mesh, cache: Any) -> Any:
  """Returns sharding, and on TPUs the order in memory, of each cache array.

  In another order a TPU could not write a token in place: it would copy the
  whole cache before and after each step.

  Args:
    mesh: of devices that sample.
    cache: tree of {'k': [N, B, K, E, S], 'v': [N, B, K, S, E]}.
  """
  sharding = cache_sharding(mesh)
  if not on_tpu(mesh):
    return jax.tree.map(lambda _: sharding, cache)

  def format_of(path: tuple, array: jax.Array) -> Format:
    heads = array.shape[2] // mesh.shape[RULES['kv_heads']]
    room, head = (4, 3) if path[-1].key == 'k' else (3, 4)
    # What stands last but one is padded; a single head is out of the way.
    one, more = (2, 0, 1, room, head), (0, 1, room, 2, head)
    return Format(Layout(one if heads == 1 else more), sharding)

  return jax.tree_util.tree_map_with_path(format_of, cache)


def everywhere(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of arrays that each device has whole."""
  return NamedSharding(mesh, PartitionSpec())


def place_rows(mesh: jax.sharding.Mesh, arrays: Any) -> Any:
  """Puts host arrays on the devices, their rows spread over BATCH.

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
        f'({" x ".join(BATCH)}); must be a multiple'
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
  return math.prod(mesh.shape[axis] for axis in BATCH)


def parts(axis: str) -> int:
  """Returns the size of an axis of the mesh in use; 1 without a mesh."""
  return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def constrain(x: jax.Array, axes: tuple) -> jax.Array:
  """Keeps an array cut as told over the mesh in use; without one, as it is.

  Args:
    x: the array.
    axes: for each dimension mesh axes, or None; the rest is not cut.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def constrain_rows(x: jax.Array) -> jax.Array:
  """Keeps rows [B, ...], and their tokens [B, L, ...], spread over devices."""
  return constrain(x, row_axes(x))


def row_axes(x: jax.Array) -> tuple:
  """Returns the mesh axes of rows [B, ...], and of tokens [B, L, ...]."""
  tokens = x.ndim > 2 and x.shape[1] % parts('sequence') == 0  # noqa: PLR2004
  return (BATCH, 'sequence') if tokens else (BATCH,)


def on_each_device(
  function: Callable, inputs: tuple[tuple, ...], outputs: tuple
) -> Callable:
  """Returns a function that runs on each device's parts of its arguments.

  Args:
    function: of arrays; may exchange over the mesh's axes.
    inputs: for each argument, the mesh axes of its dimensions.
    outputs: those of the result.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  return jax.shard_map(
    function,
    in_specs=tuple(PartitionSpec(*axes) for axes in inputs),
    out_specs=PartitionSpec(*outputs),
    check_vma=False,
  )
