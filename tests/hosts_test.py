"""Two processes that both hold the parameters, sampling alone or together."""

import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import sampler
from gigpo_jax.models import qwen

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  dtype='float32',
  remat=False,
)
_PROGRAM = """
import sys
import jax
jax.config.update('jax_enable_preemption_service', False)
number, port, tensor = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f'127.0.0.1:{port}', 2, number)
import numpy as np
from gigpo_jax import mesh as mesh_lib
from gigpo_jax import sampler
from gigpo_jax.models import qwen
sys.path.insert(0, 'tests')
import hosts_test as shared
mesh = mesh_lib.make_mesh(1, 2, 1)
axes = mesh_lib.shardings(mesh, qwen.logical_axes(shared.CONFIG))
host = shared.make_params()
params = jax.tree.map(
  lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]),
  host, axes)
assert not params['embed'].is_fully_addressable
engine = shared.make_sampler(mesh, tensor=tensor)
assert engine._shared == (tensor == 2)
engine.warm_up(params)
compiled = engine.compilations
ours = [r for n, r in enumerate(shared.make_requests()) if n % 2 == number]
for completion in engine.generate(params, ours[:4 - number]):
  print('ids', *completion.ids)
# One by one, for the second process has the same number of them again.
for request in ours[4 - number:]:
  for completion in engine.generate(params, [request]):
    print('ids', *completion.ids)
assert engine.compilations == compiled, engine.compilations - compiled
"""


def make_params() -> dict:
  params = qwen.init(CONFIG, jax.random.key(0))
  params['embed'] = 12 * params['embed']
  return jax.tree.map(np.asarray, params)


def make_requests() -> list[sampler.Request]:
  rng = np.random.default_rng(0)
  return [
    sampler.Request(
      rng.integers(8, 30, 3 + n % 5).astype(np.int32), (0, 0, n, 0, 0)
    )
    for n in range(11)
  ]


def make_sampler(mesh: jax.sharding.Mesh, **kwargs) -> sampler.Sampler:
  return sampler.Sampler(
    CONFIG,
    mesh,
    seed=0,
    prompt_buckets=(8,),
    batch_buckets=(8,),
    max_completion_tokens=12,
    stop_ids=(7,),
    vocab_size=32,
    **kwargs,
  )


@pytest.mark.parametrize('tensor', [1, 2])
def test_two_processes_sample_what_one_does(tensor):
  expected = make_sampler(mesh_lib.make_mesh(8, 1, 1)).generate(
    make_params(), make_requests()
  )
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = str(free.getsockname()[1])
  running = [
    subprocess.Popen(
      [sys.executable, '-c', _PROGRAM, str(number), port, str(tensor)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=ROOT,
      env={'JAX_PLATFORMS': 'cpu', 'PATH': '', 'HOME': str(ROOT)},
    )
    for number in range(2)
  ]
  try:
    told = [process.communicate(timeout=300) for process in running]
  finally:
    for process in running:
      process.kill()
  for number, (output, errors) in enumerate(told):
    assert running[number].returncode == 0, errors
    # Libraries print as well.
    lines = [x.split() for x in output.splitlines() if x.startswith('ids ')]
    found = [list(map(int, ids)) for _, *ids in lines]
    assert found == [c.ids.tolist() for c in expected[number::2]]
