"""Tests of the mesh: sizes, sharding rules, placement of rows."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import parameters, qwen
from gigpo_jax.run import model_builders

CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
)


@pytest.mark.parametrize(
  ('sizes', 'expected'),
  [
    ((1, -1, 1), (1, 8, 1)),
    ((-1, 2, 2), (2, 2, 2)),
    ((1, 1, -1), (1, 1, 8)),
    ((8, -1, 1), (8, 1, 1)),
    ((2, 4, 1), (2, 4, 1)),
  ],
)
def test_one_axis_takes_the_remaining_devices(sizes, expected):
  mesh = mesh_lib.make_mesh(*sizes)
  assert tuple(mesh.shape[n] for n in ('data', 'fsdp', 'tensor')) == expected
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@dataclasses.dataclass(frozen=True)
class Chip:
  """A chip of a v6e."""

  id: int
  process_index: int
  coords: tuple[int, int, int]
  slice_index: int
  core_on_chip: int = 0
  platform: str = 'tpu'
  device_kind: str = 'TPU v6 lite'


def make_slice(size: int, index: int = 0) -> list[Chip]:
  """Returns size x size chips, four per host."""
  return [
    Chip(n, n // 4, (n // size, n % size, 0), index) for n in range(size * size)
  ]


def test_an_axis_may_have_a_part_of_a_dimension_of_the_torus():
  # As for 7B on 64 chips, with two copies of the parameters.
  mesh = mesh_lib.make_mesh(2, -1, 1, devices=make_slice(8))
  assert mesh.devices.shape == (2, 32, 1, 1, 1)
  hosts = [device.process_index for device in mesh.devices.flat]
  assert hosts == sorted(hosts)


def test_chips_of_several_slices_are_refused():
  devices = make_slice(2) + make_slice(2, index=1)
  with pytest.raises(ValueError, match='^mesh: the chips are of several slice'):
    mesh_lib.make_mesh(1, -1, 1, devices=devices)
  # On GPUs, the number of slices does not matter.
  gpus = [dataclasses.replace(chip, platform='gpu') for chip in devices]
  assert mesh_lib.make_mesh(1, -1, 1, devices=gpus).devices.size == 8


GIB = 2**30


@pytest.mark.parametrize(
  ('devices', 'step', 'width', 'state_gib', 'copies'),
  [
    # An eighth of 16 GiB is 2 GiB: 7B (16 bytes per parameter, 114 GiB) needs
    # 57 chips, 1.5B (23 GiB) 12 chips, 0.5B (7.4 GiB) 4 chips.
    (16, 4, 3584, 114, 1),
    (64, 4, 3584, 114, 1),
    (256, 4, 3584, 114, 4),
    (16, 4, 1536, 23, 1),
    (64, 4, 1536, 23, 4),
    (16, 4, 896, 7.4, 4),
    # A part of 4 does not divide a width of 7 x 2: the next is 14, of 28.
    (28, 2, 14, 7.4, 2),
    # One host.
    (8, 8, 896, 7.4, 1),
  ],
)
def test_parts_of_hosts_hold_copies(devices, step, width, state_gib, copies):
  found = mesh_lib.replicas(
    devices,
    step,
    width=width,
    state_bytes=state_gib * GIB,
    device_bytes=16 * GIB,
  )
  assert found == copies
  unknown = mesh_lib.replicas(
    devices, step, width=width, state_bytes=1, device_bytes=None
  )
  assert unknown == 1


@pytest.mark.parametrize(
  ('sizes', 'expected'),
  [
    ({}, (2, 2, 1)),
    ({'data': 1}, (1, 4, 1)),
    ({'fsdp': 4}, (1, 4, 1)),
    ({'fsdp': 2}, (2, 2, 1)),
    ({'fsdp': 1, 'tensor': -1}, (1, 1, 4)),
    ({'tensor': 2}, (2, 1, 2)),
  ],
)
def test_mesh_of_an_experiment(monkeypatch, sizes, expected):
  # 2 hosts of 2 devices; each device holds the state in an eighth of 1 GiB.
  config = base.get_config()
  config.mesh.update(sizes)
  devices = [
    types.SimpleNamespace(process_index=n // 2, device=device)
    for n, device in enumerate(jax.devices()[:4])
  ]
  make_mesh = mesh_lib.make_mesh
  monkeypatch.setattr(
    mesh_lib,
    'make_mesh',
    lambda devices, **sizes: make_mesh(
      **sizes, devices=[x.device for x in devices]
    ),
  )
  mesh = model_builders.make_mesh(config, CONFIG, devices, GIB)
  found = tuple(mesh.shape[name] for name in ('data', 'fsdp', 'tensor'))
  assert found == expected


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ((3, 1, 1), 'mesh.data=3: does not fit 8 device'),
    ((1, -1, 3), 'mesh.tensor=3: does not fit 8 device'),
    ((2, 8, 1), 'mesh.fsdp=8: does not fit 8 device'),
    (
      (2, 2, 1),
      'mesh.data=2: with fsdp=2, expert=1, sequence=1, tensor=1',
    ),
    ((0, -1, 1), 'mesh.data=0: does not fit'),
    ((1, -2, 1), 'mesh.fsdp=-2: does not fit'),
    ((-1, 1, -1), 'mesh.tensor=-1: a second -1'),
  ],
)
def test_impossible_sizes_are_refused_in_one_line(sizes, message: str):
  with pytest.raises(ValueError) as error:
    mesh_lib.make_mesh(*sizes)
  text = str(error.value)
  assert message in text
  assert 'data x fsdp x expert x sequence x tensor must be 8' in text
  assert len(text.splitlines()) == 1


@pytest.mark.parametrize('tied', [True, False], ids=['tied', 'untied'])
def test_every_axis_of_the_model_has_a_rule(tied: bool):
  config = dataclasses.replace(CONFIG, tie_embeddings=tied)
  axes, shapes = parameters.logical_axes(config), parameters.shapes(config)
  leaves = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
  sizes = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
  assert len(leaves) == len(sizes)
  for leaf, shape in zip(leaves, sizes, strict=True):
    assert len(leaf) == len(shape)
    assert set(leaf) <= set(mesh_lib.RULES)


def test_parameters_are_sharded_by_the_rules():
  mesh = mesh_lib.make_mesh(2, 2, 2)
  axes = parameters.logical_axes(CONFIG)
  placed = jax.device_put(
    parameters.init(CONFIG, jax.random.key(0)), mesh_lib.shardings(mesh, axes)
  )

  def shard_shape(*path: str) -> tuple[int, ...]:
    leaf = placed
    for name in path:
      leaf = leaf[name]
    return leaf.addressable_shards[0].data.shape

  # Width 16 over fsdp 2; vocabulary, heads and MLP over tensor 2.
  assert shard_shape('embed') == (16, 8)
  assert shard_shape('layers', 'attention', 'q') == (2, 8, 2, 4)
  assert shard_shape('layers', 'attention', 'k') == (2, 8, 1, 4)
  assert shard_shape('layers', 'attention', 'q_bias') == (2, 2, 4)
  assert shard_shape('layers', 'mlp', 'down') == (2, 12, 8)
  assert shard_shape('norm') == (16,)


def test_the_sampling_mesh_has_the_same_devices_and_no_fsdp():
  mesh = mesh_lib.make_mesh(1, 4, 2)
  for tensor, data in ((1, 8), (2, 4), (4, 2), (8, 1)):
    sampling = mesh_lib.sampling_mesh(mesh, tensor)
    assert sampling.shape['data'] == data
    assert sampling.shape['tensor'] == tensor
    assert sampling.size == 8
    np.testing.assert_array_equal(
      sampling.devices.ravel(), mesh.devices.ravel()
    )
    assert mesh_lib.on_one_host(sampling)
  with pytest.raises(ValueError, match='rollout.tensor=3: does not divide 8'):
    mesh_lib.sampling_mesh(mesh, 3)


@pytest.mark.parametrize(
  ('parameter_bytes', 'device_bytes', 'max_tensor_shards', 'tensor'),
  [
    (10**9, None, 8, 2),  # Unknown memory: the mesh's own `tensor`.
    (8, 16, 8, 2),  # 8 / 2 bytes are a quarter of 16.
    (9, 16, 8, 4),
    (17, 16, 24, 8),
    (17, 16, 12, 4),  # 8 does not divide 12.
    (10**9, 16, 16, 8),  # There are only 8 devices.
  ],
)
def test_sampling_tensor_depends_on_device_memory(
  parameter_bytes, device_bytes, max_tensor_shards, tensor
):
  mesh = mesh_lib.make_mesh(1, -1, 2)
  chosen = mesh_lib.sampling_tensor(
    mesh, parameter_bytes, device_bytes, max_tensor_shards
  )
  assert chosen == tensor


def test_rows_are_sharded_over_data_and_fsdp():
  mesh = mesh_lib.make_mesh(2, 2, 2)
  rows = {'a': np.arange(24).reshape(8, 3), 'b': np.arange(4)}
  placed = mesh_lib.place_rows(mesh, rows)
  assert mesh_lib.batch_shards(mesh) == 4
  assert placed['a'].addressable_shards[0].data.shape == (2, 3)
  assert placed['b'].addressable_shards[0].data.shape == (1,)
  jax.tree.map(np.testing.assert_array_equal, placed, rows)
  with pytest.raises(ValueError, match='6 rows do not divide into 4 shards'):
    mesh_lib.place_rows(mesh, np.zeros((6, 2)))


def test_activations_are_constrained_only_under_a_mesh():
  x = jnp.zeros((8, 2))
  assert jax.jit(mesh_lib.constrain_rows)(x).sharding.is_fully_replicated
  mesh = mesh_lib.make_mesh(2, 4, 1)
  with jax.set_mesh(mesh):
    sharded = jax.jit(mesh_lib.constrain_rows)(x)
  assert sharded.addressable_shards[0].data.shape == (1, 2)
