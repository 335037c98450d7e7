"""Two processes: sampling alone or together, and a whole training run."""

import contextlib
import io
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import programs
import pytest
import safetensors.numpy

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import metrics, sampler
from gigpo_jax.models import parameters, qwen
from gigpo_jax.runtime import console, distributed, files, hardware

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
  remat='none',
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
from gigpo_jax.models import parameters
sys.path.insert(0, 'tests')
import distributed_test as shared
mesh = mesh_lib.make_mesh(1, 2, 1)
axes = mesh_lib.shardings(mesh, parameters.logical_axes(shared.CONFIG))
host = shared.make_params()
params = jax.tree.map(
  lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]),
  host, axes)
assert not params['embed'].is_fully_addressable
engine = shared.make_sampler(mesh, tensor=tensor)
assert engine.is_shared == (tensor == 2)
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
  params = parameters.init(CONFIG, jax.random.key(0))
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
  port = str(_free_port())
  running = [
    subprocess.Popen(
      [sys.executable, '-c', _PROGRAM, str(number), port, str(tensor)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=ROOT,
      env=os.environ
      | {'PATH': '', 'HOME': str(ROOT), 'XLA_FLAGS': programs.QUICK},
    )
    for number in range(2)
  ]
  try:
    told = [process.communicate(timeout=300) for process in running]
  finally:
    _end(*running)
  for number, (output, errors) in enumerate(told):
    assert running[number].returncode == 0, errors
    # Libraries print as well.
    lines = [x.split() for x in output.splitlines() if x.startswith('ids ')]
    found = [list(map(int, ids)) for _, *ids in lines]
    assert found == [c.ids.tolist() for c in expected[number::2]]


_LOCKS = """
import sys
from gigpo_jax.runtime import distributed
distributed.initialize()
try:
  with distributed.lock(sys.argv[1]):
    # The others are in here as well.
    print('state', *distributed.all_gather_objects('held'), flush=True)
except ValueError as error:
  print('state', str(error).split('in use by ')[1].split(' on ')[0])
"""


@pytest.mark.parametrize('held', [False, True])
def test_processes_of_a_run_share_a_lock(tmp_path, held):
  address = f'127.0.0.1:{_free_port()}'
  names = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': '2'}
  with contextlib.ExitStack() as stack:
    if held:
      stack.enter_context(files.lock(tmp_path))
    running = [
      subprocess.Popen(
        [sys.executable, '-c', _LOCKS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | names | {'JAX_PROCESS_ID': str(number)},
      )
      for number in range(2)
    ]
    try:
      told = [process.communicate(timeout=300) for process in running]
    finally:
      _end(*running)
  expected = f'state process {os.getpid()}' if held else 'state held held'
  for output, errors in told:
    assert expected in output.splitlines(), errors


# A process with as many virtual devices as there are processes otherwise.
_TRAIN = (
  'launch/train.py',
  '--config=configs/alfworld.py:smoke',
  '--config.num_iterations=1',
  '--config.rollout.groups=3',
  '--config.rollout.episodes_per_group=4',
  '--config.rollout.batch_buckets=(8,)',
  '--config.rollout.prompt_buckets=(320,)',
  '--config.learner.length_buckets=(360,)',
  '--config.evaluation.num_tasks=5',
  '--config.evaluation.every=1',
  '--config.env.max_steps=5',
)


_IMITATE = (
  'launch/sft.py',
  '--config=configs/alfworld.py:smoke',
  '--config.sft.num_episodes=6',
  '--config.sft.model.layers=1',
  '--config.sft.report_rows=32',
  '--config.learner.length_buckets=(360,)',
)


def _start(workdir, *flags, program=_TRAIN, **variables) -> subprocess.Popen:
  xla = os.environ.get('XLA_FLAGS', '').split()
  xla = [x for x in xla if 'device_count' not in x]
  xla.append(f'--xla_force_host_platform_device_count={variables["devices"]}')
  names = {key: str(x) for key, x in variables.items() if key.isupper()}
  return subprocess.Popen(
    [sys.executable, *program, f'--workdir={workdir}', *flags],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=os.environ | names | {'XLA_FLAGS': ' '.join(xla)},
  )


def _end(*processes: subprocess.Popen) -> None:
  for process in processes:
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]


def _processes(workdir, *flags, **kwargs) -> list[subprocess.Popen]:
  address = f'127.0.0.1:{_free_port()}'
  return [
    _start(
      workdir,
      *flags,
      **{'devices': 1} | kwargs,
      JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES=2,
      JAX_PROCESS_ID=number,
    )
    for number in range(2)
  ]


@pytest.fixture(name='alone', scope='module')
def fixture_alone(tmp_path_factory):
  """A run of one process with as many devices as two processes have."""
  workdir = tmp_path_factory.mktemp('alone')
  process = _start(workdir, devices=2)
  try:
    _, errors = process.communicate(timeout=500)
  finally:
    _end(process)
  assert process.returncode == 0, errors
  return workdir


@pytest.mark.parametrize(
  ('flag', 'devices'),
  [
    ('--config.rollout.tensor=0', 1),
    ('--config.rollout.tensor=2', 1),
    # Several devices a process.
    pytest.param('--config.rollout.tensor=0', 4, marks=pytest.mark.slow),
  ],
  ids=['alone', 'shared', 'several'],
)
def test_two_processes_train_what_one_does(alone, tmp_path, flag, devices):
  together = _processes(tmp_path, flag, devices=devices)
  try:
    told = [p.communicate(timeout=500) for p in together]
  finally:
    _end(*together)
  for process, (_, errors) in zip(together, told, strict=True):
    assert process.returncode == 0, errors
  # The first process speaks for both.
  assert 'iteration    0' in told[0][0] and 'iteration' not in told[1][0]
  one, two = metrics.read(alone), metrics.read(tmp_path)
  assert [line['iteration'] for line in one] == [0, 1]
  _assert_the_same(one, two)
  params = [
    safetensors.numpy.load_file(workdir / 'policy/model.safetensors')
    for workdir in (alone, tmp_path)
  ]
  assert params[0].keys() == params[1].keys()
  for name, x in params[0].items():
    # Exported in bfloat16: an eighth bit may round the other way.
    np.testing.assert_allclose(
      params[1][name].astype(np.float32), x.astype(np.float32), rtol=8e-3
    )


def _assert_the_same(one: list[dict], two: list[dict]) -> None:
  for a, b in zip(one, two, strict=True):
    names = {n for n in a if not n.startswith(('time/', 'rollout/'))}
    assert names == {n for n in b if not n.startswith(('time/', 'rollout/'))}
    for name in names:
      np.testing.assert_allclose(
        b[name], a[name], rtol=1e-4, atol=1e-5, err_msg=name
      )


def test_two_processes_make_the_warm_start_that_one_makes(tmp_path):
  alone = _start(tmp_path / 'one', program=_IMITATE, devices=2)
  together = _processes(tmp_path / 'two', program=_IMITATE)
  try:
    told = [p.communicate(timeout=300) for p in (alone, *together)]
  finally:
    _end(alone, *together)
  for process, (_, errors) in zip((alone, *together), told, strict=True):
    assert process.returncode == 0, errors
  assert 'warm start: ' in told[1][0] and 'warm start' not in told[2][0]
  one, two = (metrics.read(tmp_path / name) for name in ('one', 'two'))
  assert len(one) > 1
  _assert_the_same(one, two)


def test_when_one_process_is_lost_the_other_ends(tmp_path):
  processes = _processes(tmp_path)
  try:
    for line in processes[0].stdout:
      if 'compiling' in line:
        break
    processes[1].kill()
    processes[0].communicate(timeout=200)
    assert processes[0].returncode != 0
  finally:
    _end(*processes)


_LONGER = (
  '--config.num_iterations=4',
  '--config.evaluation.every=0',
  '--config.checkpoint.every=9',
)


def _until(process: subprocess.Popen, printed: str) -> None:
  for line in process.stdout:
    if printed in line:
      return
  raise AssertionError(process.stderr.read())


@pytest.mark.slow
def test_processes_leave_together_and_others_go_on(tmp_path):
  together = _processes(tmp_path, *_LONGER)
  # Of other numbers of processes and devices.
  alone = again = None
  try:
    _until(together[0], 'iteration    0')
    # One of them alone is told.
    together[1].send_signal(signal.SIGTERM)
    told = [p.communicate(timeout=300) for p in together]
    assert [p.returncode for p in together] == [0, 0], told
    assert 'is saved; rerun the same command to resume' in told[0][0]
    done = len(metrics.read(tmp_path))
    assert 1 <= done < 4
    alone = _start(tmp_path, *_LONGER, devices=4)
    _until(alone, f'resuming {tmp_path} after iteration {done - 1}')
    _until(alone, f'iteration    {done}')
    alone.send_signal(signal.SIGTERM)
    alone.communicate(timeout=300)
    assert alone.returncode == 0
    again = _processes(tmp_path, *_LONGER)
    told = [p.communicate(timeout=300) for p in again]
    assert [p.returncode for p in again] == [0, 0], told
    assert f'resuming {tmp_path}' in told[0][0]
  finally:
    _end(*together, *filter(None, [alone]), *(again or ()))
  numbers = [line['iteration'] for line in metrics.read(tmp_path)]
  assert numbers == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 2])
def test_a_run_goes_on_with_other_devices(tmp_path, devices):
  flags = ('--config.evaluation.every=0',)
  for name, numbers in (('whole', (4, 4)), ('parts', (4, devices))):
    for iterations, number in zip((1, 2), numbers, strict=True):
      run = _start(
        tmp_path / name,
        f'--config.num_iterations={iterations}',
        *flags,
        devices=number,
      )
      try:
        _, errors = run.communicate(timeout=300)
      finally:
        _end(run)
      assert run.returncode == 0, errors
  whole, parts = (metrics.read(tmp_path / name) for name in ('whole', 'parts'))
  assert len(whole) == 2
  _assert_the_same(whole, parts)


def test_half_of_the_variables_are_refused(monkeypatch):
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', '127.0.0.1:1')
  with pytest.raises(ValueError, match=r'\$JAX_NUM_PROCESSES=: not set'):
    distributed.initialize()


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize('terminal', [True, False])
def test_the_bar_tells_episodes_and_tokens_and_is_quiet_elsewhere(
  terminal, monkeypatch
):
  out = Terminal() if terminal else io.StringIO()
  clock = [0.0]
  monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
  with console.progress_bar(
    total=4, unit='episode', file=out, mininterval=0
  ) as bar:
    told = console.count_episodes(bar, lambda: 600)
    clock[0] = 3.0
    told(3)
    bar.refresh()
  shown = out.getvalue()
  assert ('3/4' in shown and '200 tokens/s' in shown) == terminal
  assert bool(shown) == terminal


@pytest.mark.skipif(sys.platform != 'linux', reason='glibc is told')
@pytest.mark.parametrize(
  ('accelerator', 'platforms', 'cores', 'told'),
  [
    (False, '', 2, {-4, -1, -2, -8}),
    # Threads of many cores would wait for one heap.
    (False, '', 16, {-4, -1, -2}),
    (True, '', 2, set()),
    (True, 'cpu', 2, {-4, -1, -2, -8}),
  ],
)
def test_memory_is_kept_where_programs_run_on_a_cpu(
  monkeypatch, accelerator, platforms, cores, told
):
  found = {}

  class Library:
    def __init__(self, name):
      self.mallopt = found.__setitem__

  monkeypatch.setattr(hardware.ctypes, 'CDLL', Library)
  monkeypatch.setattr(hardware, '_any_exists', lambda _: accelerator)
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(cores))
  monkeypatch.setenv('JAX_PLATFORMS', platforms)
  hardware.keep_freed_memory()
  assert found.keys() == told
