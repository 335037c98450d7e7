"""Devices that need not exist: TPU slices and GPUs, for compilation.

libtpu compiles for a TPU without one. jax's CUDA plugin compiles for a GPU of
which it has a description.
"""

import os
import re

import jax

from gigpo_jax.tools import tpu_time

# Without these variables, libtpu looks for a slice and for other hosts.
ENVIRON = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
  'TPU_STDERR_LOG_LEVEL': '3',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}

# Name of a GPU and bytes of its cache, by chip.
_GPUS = {
  'h100': ('NVIDIA H100 80GB HBM3', 50 * 2**20),
  'h200': ('NVIDIA H200', 60 * 2**20),
}
# XLA's GpuTargetConfigProto of Hopper GPUs.
_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {rate}
  l2_cache_size: {cache}
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 20 }}
platform_name: "CUDA"
device_description_str: "{name}"
"""


def is_gpu(topology: str) -> bool:
  """Returns whether a topology names GPUs."""
  return topology.partition(':')[0] in _GPUS


def check(topology: str) -> None:
  """Checks the name of a topology.

  Raises:
    ValueError: in one line, if it is not like v5e:4x4 or h100:8.
  """
  sizes = r'[1-9]\d*' if is_gpu(topology) else r'[1-9]\d*(x[1-9]\d*)+'
  if not re.fullmatch(rf'({"|".join(tpu_time.CHIPS)}):{sizes}', topology):
    raise ValueError(
      f'--topology={topology}: unknown; must be like v5e:4x4, v5p:2x2x1, '
      'v6e:2x4, h100:8 or h200:1'
    )


def make_devices(topology: str) -> list[jax.Device]:
  """Returns the devices of a topology.

  Raises:
    ValueError: in one line, if they cannot be described here.
  """
  for name, value in ENVIRON.items():
    os.environ.setdefault(name, value)
  from jax.experimental import topologies

  chip, _, sizes = topology.partition(':')
  if is_gpu(topology):
    platform, package = 'cuda', 'cuda13'
    (name, cache), rates = _GPUS[chip], tpu_time.CHIPS[chip]
    target = _TARGET.format(
      name=name,
      cache=cache,
      memory=int(rates.memory),
      rate=int(rates.memory_rate),
    )
    options = {'topology': f'1x1x{sizes}', 'target_config': target}
  else:
    platform, package = 'tpu', 'tpu'
    options = {'chips_per_host_bounds': [1, 1, 1]} if sizes == '1x1' else {}
  try:
    described = topologies.get_topology_desc(topology, platform, **options)
  except Exception as error:
    reason = ' '.join(str(error).split())[:160]
    raise ValueError(
      f'--topology={topology}: {reason}; must exist, and its compiler must be '
      f"installed (pip install 'jax[{package}]')"
    ) from error
  return list(described.devices)


def host_devices(
  topology: str, devices: list[jax.Device], tensor: int
) -> list[jax.Device]:
  """Returns the devices that sample together: of one host, or all devices.

  The devices of a host are replaced by a slice of the same size, because the
  compiler does not accept a part of a slice.

  Args:
    topology: name of the topology.
    devices: its devices.
    tensor: devices that a copy of the model is sharded over for sampling.
  """
  count = sum(d.process_index == devices[0].process_index for d in devices)
  if count == len(devices) or count % tensor:
    return devices
  chip, _, sizes = topology.partition(':')
  host_sizes = {4: '2x2', 8: '2x4'}[count] + 'x1' * (sizes.count('x') - 1)
  return make_devices(f'{chip}:{host_sizes}')
