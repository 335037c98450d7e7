"""The device mesh, and the sharding of array dimensions over its axes.

Models give the dimensions of their arrays names, the logical axes. The table
RULES maps logical axes to mesh axes; edit it to change the parallelism.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from gigpo_jax import options
from gigpo_jax.runtime import distributed

AXES = ('data', 'fsdp', 'expert', 'sequence', 'tensor')

# Mesh axes that the rows of a batch are sharded over. Their tokens are sharded
# over `sequence`.
BATCH = ('data', 'fsdp', 'expert')

# The mesh axis that each logical axis of a parameter is sharded over.
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


# Largest share of a device's memory for its part of the parameters and of the
# optimizer's state, if these are sharded over a part of the devices only.
_STATE_SHARE = 1 / 8


def _axis(default: int, low: int = 1, note: str = '') -> Any:
  return options.field(
    default,
    lambda size: size >= low or size == -1,
    f'must be at least {low}{note}, or -1 for the remaining devices',
  )


@dataclasses.dataclass(frozen=True)
class Options:
  """Devices per axis of the mesh, `config.mesh`; see configs/base.py."""

  data: int = _axis(0, 0, ' (0 is automatic)')
  fsdp: int = _axis(-1)
  expert: int = _axis(1)
  sequence: int = _axis(1)
  tensor: int = _axis(1)

  def __post_init__(self):
    options.check(self)
    free = [name for name in AXES if getattr(self, name) == -1]
    if len(free) > 1:
      raise ValueError(
        f'{free[0]}=-1: {free[1]} is -1, too; at most one axis may be -1'
      )


def replicas(
  num_devices: int,
  step: int,
  *,
  width: int,
  state_bytes: float,
  device_bytes: float | None,
) -> int:
  """Returns in how many parts of the devices to copy the parameters (HSDP).

  Within a part, each device gathers the parameters from the others. With
  smaller parts, it receives less, over shorter distances. A part consists of
  entire hosts. It is the smallest in which parameters and optimizer state take
  at most an eighth of each device's memory; activations, gradients and the
  sampler need the rest. Without such a part there is one, of all devices.

  Args:
    num_devices: devices that shard parameters or copy them.
    step: the devices of a part are a multiple of this number.
    width: the model's width, which the devices of a part must divide.
    state_bytes: size of parameters and optimizer state.
    device_bytes: memory of a device; None: unknown, there is one part.
  """
  for shards in range(step, num_devices, step):
    if num_devices % shards or width % shards or not device_bytes:
      continue
    if state_bytes / shards <= _STATE_SHARE * device_bytes:
      return num_devices // shards
  return 1


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
    data: size of the axis that replicates parameters and shards rows.
    fsdp: size of the axis that shards parameters and rows.
    tensor: size of the axis that shards heads and MLP columns.
    expert: size of the axis that shards experts and rows.
    sequence: size of the axis that shards the tokens of a row. One of the five
      sizes may be -1, for all remaining devices.
    devices: the devices; None: all.

  Raises:
    ValueError: in one line, if the product of the sizes is not the number of
      devices, or the devices are of several TPU slices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = _axis_sizes((data, fsdp, expert, sequence, tensor), len(devices))
  on_tpu = devices[0].platform == 'tpu'
  if on_tpu and len({getattr(x, 'slice_index', 0) for x in devices}) > 1:
    raise ValueError('mesh: the chips are of several slices; must be of one')
  # An axis may have a part of a dimension of the torus, such as 16 of 8 x 8
  # chips; jax.make_mesh allows this on some TPUs only.
  grid = mesh_utils.create_device_mesh(
    tuple(sizes.values()), devices, allow_split_physical_axes=True
  )
  # Keep the devices of a host adjacent, so that each host can sample on its
  # own. The order for a torus alternates between hosts.
  order = sorted(grid.flat, key=lambda device: device.process_index)
  return jax.sharding.Mesh(
    np.array(order).reshape(grid.shape),
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def _axis_sizes(given: tuple[int, ...], available: int) -> dict[str, int]:
  """Returns the size of each of AXES; a size of -1 is computed."""
  sizes = dict(zip(AXES, given, strict=True))
  accepted = f'{" x ".join(AXES)} must be {available}; one size may be -1'
  remaining, free_axes = available, []
  for name, size in sizes.items():
    if size == -1:
      free_axes.append(name)
    elif size < 1 or remaining % size:
      raise ValueError(
        f'mesh.{name}={size}: does not fit {available} device(s); {accepted}'
      )
    else:
      remaining //= size
  if len(free_axes) > 1:
    raise ValueError(f'mesh.{free_axes[1]}=-1: a second -1; {accepted}')
  if free_axes:
    sizes[free_axes[0]] = remaining
  elif remaining > 1:
    others = ', '.join(f'{k}={v}' for k, v in sizes.items() if k != 'data')
    raise ValueError(
      f'mesh.data={given[0]}: with {others} does not use all {available} '
      f'device(s); {accepted}'
    )
  return sizes


def shardings(mesh: jax.sharding.Mesh, axes: dict) -> dict:
  """Returns the sharding of each leaf of a tree.

  Args:
    mesh: the devices.
    axes: tree whose leaves are tuples with a logical axis for each dimension.
  """

  def spec(leaf: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in leaf)))

  return jax.tree.map(spec, axes, is_leaf=lambda x: isinstance(x, tuple))


def with_shardings(shapes: Any, shardings: Any) -> Any:
  """Returns a tree of `jax.ShapeDtypeStruct` with shardings, for lowering.

  Args:
    shapes: tree of arrays, or of objects with a shape and a dtype.
    shardings: tree of shardings with the same structure.
  """
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def sampling_mesh(mesh: jax.sharding.Mesh, tensor: int) -> jax.sharding.Mesh:
  """Returns the same devices, in order, as a mesh of `data` and `tensor` only.

  Sampling reads all parameters for every token, so they are sharded over
  `tensor` only, and each group of `tensor` devices has a copy of them. A group
  consists of adjacent devices of the mesh, which usually belong to one host.

  Args:
    mesh: the devices.
    tensor: devices of a group.

  Raises:
    ValueError: if `tensor` does not divide the number of devices.
  """
  if mesh.size % tensor:
    raise ValueError(
      f'rollout.tensor={tensor}: does not divide {mesh.size} device(s); must '
      'be a divisor'
    )
  return _sampling_mesh(mesh.devices.reshape(-1, tensor))


def sampling_tensor(
  mesh: jax.sharding.Mesh,
  parameter_bytes: int,
  device_bytes: int | None,
  max_tensor_shards: int,
) -> int:
  """Returns the number of devices to shard a model over for sampling.

  The number starts at the part of the mesh's `tensor` axis within a host, and
  doubles until the parameters take at most a quarter of a device's memory; the
  rest is for the cache and for training.

  Args:
    mesh: the devices.
    parameter_bytes: size of the model in the sampler's type.
    device_bytes: memory of a device; None: unknown, assumed to be enough.
    max_tensor_shards: see `parameters.max_tensor_shards`.
  """
  tensor = math.gcd(mesh.shape['tensor'], len(mesh.local_devices))
  while (
    device_bytes
    and parameter_bytes / tensor > device_bytes / 4
    and math.gcd(mesh.size, max_tensor_shards) % (2 * tensor) == 0
  ):
    tensor *= 2
  return tensor


def device_bytes() -> int | None:
  """Returns the memory of the smallest device, or None if it is unknown."""
  stats = jax.local_devices()[0].memory_stats() or {}
  limits = distributed.all_gather_objects(stats.get('bytes_limit'))
  return None if None in limits else min(limits)


def bytes_per_device(tree: Any) -> float:
  """Returns the bytes of a device's shards of arrays, or of abstract arrays."""
  return math.fsum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def on_one_host(mesh: jax.sharding.Mesh) -> bool:
  """Returns whether each tensor group has devices of one process only."""
  return all(
    len({device.process_index for device in group}) == 1
    for group in mesh.devices.reshape(-1, mesh.shape['tensor'])
  )


def local_mesh(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
  """Returns this process's part of a mesh that is `on_one_host`."""
  process = jax.process_index()
  groups = mesh.devices.reshape(-1, mesh.shape['tensor'])
  return _sampling_mesh(
    np.array([group for group in groups if group[0].process_index == process])
  )


def _sampling_mesh(devices: np.ndarray) -> jax.sharding.Mesh:
  """Returns a mesh of devices [data, tensor]."""
  data, tensor = devices.shape
  return jax.sharding.Mesh(
    devices.reshape(data, 1, 1, 1, tensor),
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def localize(tree: Any, local: jax.sharding.Mesh) -> Any:
  """Returns arrays on the local mesh, made of this process's shards.

  Args:
    tree: arrays on a mesh of all processes, sharded over `tensor` at most.
    local: the result of `local_mesh`.
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
  """Checks that a mesh divides every parameter into equal shards.

  Args:
    mesh: the devices.
    shapes: tree of the parameters' shapes.
    axes: tree of their logical axes.
    field: section of the config that sets the sizes of the mesh.

  Raises:
    ValueError: if the mesh does not; in one line that names axis and dimension.
  """

  def is_leaf(x: object) -> bool:
    return isinstance(x, tuple)

  for shape, names in zip(
    jax.tree.leaves(shapes, is_leaf=is_leaf),
    jax.tree.leaves(axes, is_leaf=is_leaf),
    strict=True,
  ):
    for size, name in zip(shape, names, strict=True):
      shards = mesh.shape[RULES[name]] if RULES[name] else 1
      if size % shards:
        raise ValueError(
          f"{field}.{RULES[name]}={shards}: does not divide the model's {size} "
          f'{name}; must be a divisor'
        )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of arrays whose first dimension is rows."""
  return NamedSharding(mesh, PartitionSpec(BATCH))


def cache_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of a cache: [layers, rows, key/value heads, ...]."""
  return NamedSharding(mesh, PartitionSpec(None, BATCH, RULES['kv_heads']))


def on_tpu(mesh: jax.sharding.Mesh) -> bool:
  """Returns whether the devices of a mesh are TPUs."""
  return mesh.devices.flat[0].platform == 'tpu'


def heads_are_padded(heads: int, dtype: Any) -> bool:
  """Returns whether a TPU would pad a dimension of heads within a cache.

  A tile holds four int8. With padding, two heads take as much memory as in
  bfloat16.

  Args:
    heads: key/value heads of a device.
    dtype: type of the cache.
  """
  return jnp.dtype(dtype) == jnp.int8 and heads % 4 > 0


def cache_formats(
  mesh: jax.sharding.Mesh, cache: Any, *, by_head: bool = False
) -> Any:
  """Returns the sharding and, on TPUs, the memory layout of each cache array.

  With another layout, a TPU could not write a token in place and would copy the
  entire cache before and after each step.

  Args:
    mesh: the devices that sample.
    cache: tree of {'k': [N, B, K, E, S], 'v': [N, B, K, S, E]}, and of other
      arrays [N, B, K, ..].
    by_head: whether the slots of a head are adjacent, for a kernel.
  """
  sharding = cache_sharding(mesh)
  if not on_tpu(mesh):
    return jax.tree.map(lambda _: sharding, cache)

  def format_of(path: tuple, array: jax.Array) -> Format:
    if path[-1].key not in ('k', 'v'):
      return sharding
    heads = array.shape[2] // mesh.shape[RULES['kv_heads']]
    slots, head = (4, 3) if path[-1].key == 'k' else (3, 4)
    if by_head or heads_are_padded(heads, array.dtype):
      return Format(Layout((0, 1, 2, slots, head)), sharding)
    # The second-minor dimension is padded, so it must not be a single head.
    one_head, several = (2, 0, 1, slots, head), (0, 1, slots, 2, head)
    return Format(Layout(one_head if heads == 1 else several), sharding)

  return jax.tree_util.tree_map_with_path(format_of, cache)


def replicated_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of arrays that are replicated on every device."""
  return NamedSharding(mesh, PartitionSpec())


def place_rows(mesh: jax.sharding.Mesh, arrays: Any) -> Any:
  """Places host arrays on the devices with their rows sharded over BATCH.

  Args:
    mesh: the devices; every process of the mesh must call this with the same
      arrays.
    arrays: tree of arrays whose first dimension is rows.

  Raises:
    ValueError: if the rows do not divide into equal shards.
  """
  shards = batch_shards(mesh)
  for array in jax.tree.leaves(arrays):
    if array.shape[0] % shards:
      raise ValueError(
        f'{array.shape[0]} rows do not divide into {shards} shards of the mesh '
        f'({" x ".join(BATCH)}); must be a multiple of {shards}'
      )
  return place(arrays, batch_sharding(mesh))


def place(arrays: Any, sharding: NamedSharding) -> Any:
  """Places host arrays, the same in all processes, on the devices.

  Args:
    arrays: tree of host arrays.
    sharding: sharding of every array.
  """
  if sharding.is_fully_addressable:
    return jax.device_put(arrays, sharding)
  return jax.tree.map(
    lambda x: jax.make_array_from_callback(
      x.shape, sharding, lambda index: x[index]
    ),
    arrays,
  )


def to_host(array: jax.Array) -> np.ndarray:
  """Returns a copy of an array on the host.

  If the array is sharded over several processes, all of them must call this.
  """
  if array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return multihost_utils.process_allgather(array, tiled=True)


def batch_shards(mesh: jax.sharding.Mesh) -> int:
  """Returns the number of shards of the rows; must divide the rows."""
  return math.prod(mesh.shape[axis] for axis in BATCH)


def axis_size(axis: str) -> int:
  """Returns the size of an axis of the current mesh; 1 without a mesh."""
  return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def constrain(x: jax.Array, axes: tuple) -> jax.Array:
  """Constrains the sharding of an array over the current mesh, if any.

  Args:
    x: the array.
    axes: mesh axes of each dimension, or None; later dimensions are not
      sharded.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def constrain_rows(x: jax.Array) -> jax.Array:
  """Constrains the sharding of rows [B, ...] or of their tokens [B, L, ...]."""
  return constrain(x, row_axes(x))


def row_axes(x: jax.Array) -> tuple:
  """Returns the mesh axes of rows [B, ...] or of their tokens [B, L, ...]."""
  has_tokens = (
    x.ndim > 2 and x.shape[1] % axis_size('sequence') == 0  # noqa: PLR2004
  )
  return (BATCH, 'sequence') if has_tokens else (BATCH,)


def shard_map(
  function: Callable, inputs: tuple[tuple, ...], outputs: tuple
) -> Callable:
  """Returns the function mapped over the devices of the current mesh.

  Without a mesh, returns the function itself.

  Args:
    function: takes and returns each device's shards; may use collectives over
      the axes of the mesh.
    inputs: mesh axes of the dimensions of each argument.
    outputs: mesh axes of the dimensions of the result.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  return jax.shard_map(
    function,
    in_specs=tuple(PartitionSpec(*axes) for axes in inputs),
    out_specs=PartitionSpec(*outputs),
    check_vma=False,
  )
