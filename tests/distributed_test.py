"""Tests of several processes: sampling, locks, training, lost processes."""

import contextlib
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import preloaded
import programs
import pytest
import safetensors.numpy
import tiny_sampler
from tiny_sampler import CONFIG

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import metrics, sampler
from gigpo_jax.runtime import console, distributed, files, hardware
from gigpo_jax.runtime import errors as errors_lib

ROOT = pathlib.Path(__file__).parents[1]


def make_params() -> dict:
  return jax.tree.map(np.asarray, tiny_sampler.params())


def make_requests() -> list[sampler.Request]:
  rng = np.random.default_rng(0)
  return [
    sampler.Request(
      rng.integers(8, 30, 3 + n % 5).astype(np.int32), (0, 0, n, 0, 0)
    )
    for n in range(11)
  ]


def make_sampler(mesh: jax.sharding.Mesh, **kwargs) -> sampler.Sampler:
  options = {
    'seed': 0,
    'prompt_buckets': (8,),
    'batch_buckets': (8,),
    'max_completion_tokens': 12,
    'stop_ids': (7,),
    'vocab_size': 32,
  }
  return sampler.Sampler(CONFIG, mesh, **(options | kwargs))


# Of conversations. Their cache is prefilled in chunks.
LONG = {'prompt_buckets': (16, 48), 'prefill_chunk': 8}


def play_conversations(
  engine: sampler.Sampler, params: dict, members: Sequence[int]
) -> list[list[list[int]]]:
  """Returns the completions of each turn, by member."""
  prompts = {
    member: np.random.default_rng(member % 2).integers(8, 30, 9 + member % 2)
    for member in members
  }
  turns = []
  for turn in range(3):
    requests = [
      sampler.Request(
        prompt.astype(np.int32), (0, 1, 2, m, turn), conversation=(0, 1, 2, m)
      )
      for m, prompt in prompts.items()
    ]
    completions = engine.generate(params, requests)
    turns.append([c.ids.tolist() for c in completions])
    for m, completion in zip(prompts, completions, strict=True):
      reply = np.random.default_rng((m, turn)).integers(8, 30, 3)
      prompts[m] = np.concatenate([prompts[m], completion.ids, reply])
  return turns


@pytest.mark.slow
@pytest.mark.parametrize('tensor', [1, 2])
def test_two_processes_reuse_their_caches(tensor):
  one = make_sampler(mesh_lib.make_mesh(8, 1, 1), **LONG)
  turns = play_conversations(one, make_params(), range(8))
  for index, sampled in enumerate(_sample_together(tensor, 'all')):
    assert sampled == [ids for turn in turns for ids in turn[index::2]]


@pytest.mark.slow
@pytest.mark.parametrize('tensor', [1, 2])
def test_two_processes_sample_the_tokens_of_one_process(tensor):
  expected = make_sampler(mesh_lib.make_mesh(8, 1, 1)).generate(
    make_params(), make_requests()
  )
  for index, sampled in enumerate(_sample_together(tensor, 'none')):
    assert sampled == [c.ids.tolist() for c in expected[index::2]]


def _sample_together(tensor: int, reuse: str) -> Iterator[list[list[int]]]:
  """Yields the completions that each of two processes prints."""
  port = str(_free_port())
  command = [sys.executable, 'tests/sample_together.py']
  running = [
    preloaded.Process(
      [*command, str(index), port, str(tensor), reuse],
      PATH='',
      HOME=str(ROOT),
      XLA_FLAGS=programs.QUICK,
    )
    for index in range(2)
  ]
  for output, _ in _wait(*running):
    # Libraries print other lines.
    lines = [x.split() for x in output.splitlines() if x.startswith('ids ')]
    yield [list(map(int, ids)) for _, *ids in lines]


_LOCKS = """
import pathlib, sys, time
from gigpo_jax.runtime import distributed
distributed._SHARED_SECS = 1
distributed.initialize()
workdir = pathlib.Path(sys.argv[1])
try:
  with distributed.lock(workdir):
    # The other process is also inside this block.
    print('state', *distributed.all_gather_objects('held'), flush=True)
    with distributed.atomic_directory(workdir / 'policy') as folder:
      if distributed.is_main_process():
        time.sleep(1)
        pathlib.Path(folder).mkdir()
    # The other process has finished the directory.
    print('exists', (workdir / 'policy').is_dir())
except ValueError as error:
  print('refused', error)
"""


def _lock_together(*workdirs: pathlib.Path) -> Iterator[tuple[str, str]]:
  """Yields output and errors of processes that run _LOCKS on their folder."""
  address = f'127.0.0.1:{_free_port()}'
  names = {
    'JAX_COORDINATOR_ADDRESS': address,
    'JAX_NUM_PROCESSES': str(len(workdirs)),
  }
  running = [
    subprocess.Popen(
      [sys.executable, '-c', _LOCKS, str(workdir)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=ROOT,
      env=os.environ | names | {'JAX_PROCESS_ID': str(index)},
    )
    for index, workdir in enumerate(workdirs)
  ]
  yield from _wait(*running)


@pytest.mark.parametrize('held', [False, True])
def test_processes_of_a_run_share_a_lock(tmp_path, held):
  with contextlib.ExitStack() as stack:
    if held:
      stack.enter_context(files.lock(tmp_path))
    outputs = list(_lock_together(tmp_path, tmp_path))
  for output, errors in outputs:
    if held:
      assert f'in use by process {os.getpid()}' in output, errors
    else:
      assert output.splitlines()[-2:] == ['state held held', 'exists True'], (
        errors
      )


def test_a_work_directory_that_is_not_shared_is_refused(tmp_path):
  for name in 'ab':
    (tmp_path / name).mkdir()
  for output, errors in _lock_together(tmp_path / 'a', tmp_path / 'b'):
    assert 'process 1 does not see the files of process 0' in output, errors
  assert not list((tmp_path / 'a').glob('.shared*'))


# The single process has as many virtual devices as there are processes.
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


_SFT = (
  'launch/sft.py',
  '--config=configs/alfworld.py:smoke',
  '--config.sft.num_episodes=6',
  '--config.sft.model.layers=1',
  '--config.sft.report_rows=32',
  '--config.learner.length_buckets=(360,)',
)


def _start(workdir, *flags, program=_TRAIN, **variables) -> preloaded.Process:
  xla = os.environ.get('XLA_FLAGS', '').split()
  xla = [x for x in xla if 'device_count' not in x]
  # Compilation takes longer than one iteration.
  xla.append(programs.QUICK)
  xla.append(f'--xla_force_host_platform_device_count={variables["devices"]}')
  names = {key: str(x) for key, x in variables.items() if key.isupper()}
  return preloaded.Process(
    [sys.executable, *program, f'--workdir={workdir}', *flags],
    XLA_FLAGS=' '.join(xla),
    **names,
  )


def _kill(*processes: preloaded.Process | subprocess.Popen) -> None:
  for process in processes:
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()


def _wait(
  *processes: preloaded.Process | subprocess.Popen,
  timeout: float = 300,
  status: int = 0,
) -> list[tuple[str, str]]:
  """Returns output and errors of processes that must end with a status."""
  try:
    outputs = [process.communicate(timeout=timeout) for process in processes]
  finally:
    _kill(*processes)
  for process, (_, errors) in zip(processes, outputs, strict=True):
    assert process.returncode == status, errors
  return outputs


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]


def _processes(
  workdir,
  *flags,
  count: int = 2,
  own: Sequence[Sequence[str]] | None = None,
  **kwargs,
) -> list[preloaded.Process]:
  """Starts the processes of a run.

  Args:
    workdir: its work directory.
    *flags: flags of all processes.
    count: number of processes.
    own: further flags of each process.
    **kwargs: see `_start`.
  """
  address = f'127.0.0.1:{_free_port()}'
  return [
    _start(
      workdir,
      *flags,
      *(own[index] if own else ()),
      **{'devices': 1} | kwargs,
      JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES=count,
      JAX_PROCESS_ID=index,
    )
    for index in range(count)
  ]


@pytest.fixture(name='alone', scope='module')
def fixture_alone(tmp_path_factory):
  """Returns the work directory of a run of one process with two devices."""
  workdir = tmp_path_factory.mktemp('alone')
  _wait(_start(workdir, devices=2), timeout=500)
  return workdir


@pytest.mark.parametrize(
  ('flag', 'devices'),
  [
    # Slow, and a part of continuous integration.
    pytest.param('--config.rollout.tensor=0', 1, marks=pytest.mark.slow),
    # Two minutes; the sampling of both processes together is tested above.
    pytest.param('--config.rollout.tensor=2', 1, marks=pytest.mark.slow),
    # Several devices per process.
    pytest.param('--config.rollout.tensor=0', 4, marks=pytest.mark.slow),
  ],
  ids=['alone', 'shared', 'several'],
)
def test_two_processes_train_like_one_process(alone, tmp_path, flag, devices):
  together = _processes(tmp_path, flag, devices=devices)
  _finish(together)
  _assert_equal_runs(alone, tmp_path)


@pytest.mark.slow
def test_two_processes_evaluate_and_export_like_one_process(alone, tmp_path):
  program = ('launch/evaluate.py', *_TRAIN[1:])
  written = []
  for name, start in (('one', _start), ('two', _processes)):
    workdir, exported = tmp_path / name, tmp_path / f'{name}-exported'
    flags = (f'--checkpoint={alone}', f'--export={exported}')
    devices = 2 if name == 'one' else 1
    processes = start(workdir, *flags, program=program, devices=devices)
    processes = processes if name == 'two' else [processes]
    (printed, _), *_ = _wait(*processes)
    assert 'success' in printed and f'exported to {exported}/policy' in printed
    (model,) = (exported / 'policy').glob('*.safetensors')
    report = json.loads((workdir / 'evaluation.json').read_text())
    written.append((report['policies'], model.read_bytes()))
  assert written[0] == written[1]


def test_hosts_with_different_configs_are_refused(tmp_path):
  # The number of workers is no part of the experiment.
  own = [
    ('--config.optimizer.learning_rate=0.5', '--config.pool.num_workers=1'),
    ('--config.optimizer.learning_rate=0.25', '--config.pool.num_workers=2'),
  ]
  for _, errors in _wait(*_processes(tmp_path, own=own), status=2):
    assert errors.splitlines()[-1] == (
      'optimizer.learning_rate=0.5: is 0.25 in process 1; must be the same on '
      'every host'
    )
  assert not (tmp_path / 'config.json').exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('script', 'differs', 'name', 'output'),
  [
    ('train', 'tasks', 'env.name=tests.hosts_env: split ', 'config.json'),
    (
      'sft',
      'expert',
      'checksum of trained tokens and rewards=[',
      'policy',
    ),
  ],
)
def test_hosts_with_different_data_are_refused(
  tmp_path, script, differs, name, output
):
  program = (
    f'launch/{script}.py',
    '--config=configs/keydoor.py:smoke',
    '--config.env.name=tests.hosts_env',
    '--config.sft.num_episodes=20',
  )
  processes = _processes(tmp_path, program=program, HOSTS_DIFFER=differs)
  for _, errors in _wait(*processes, status=2):
    line = errors.splitlines()[-1]
    assert line.startswith(name)
    assert line.endswith('in process 1; must be the same on every host')
  assert not (tmp_path / output).exists()


@pytest.mark.slow
def test_eight_processes_train_like_one_process(tmp_path):
  # 12 episodes of 3 groups: most processes play a part of a group.
  one, eight = tmp_path / 'one', tmp_path / 'eight'
  _finish([_start(one, devices=8)])
  _finish(_processes(eight, count=8))
  _assert_equal_runs(one, eight)


@pytest.mark.slow
def test_two_processes_carry_groups_over_like_one_process(tmp_path):
  flags = (
    '--config.num_iterations=4',
    '--config.evaluation.every=3',
    '--config.evaluation.inside_rollout=True',
    '--config.rollout.carry_over=2',
    '--config.loss.tis_clip=2.0',
  )
  one, two = tmp_path / 'one', tmp_path / 'two'
  _finish([_start(one, *flags, devices=2)])
  _finish(_processes(two, *flags))
  _assert_equal_runs(one, two)
  assert metrics.read(two)[3]['carry/staleness_max'] == 2


def _finish(processes: list[preloaded.Process]) -> None:
  """Waits for the processes of a run and checks what they print."""
  outputs = _wait(*processes, timeout=900)
  # Only the main process prints.
  printed = ['iteration    0' in output for output, _ in outputs]
  assert printed == [True] + [False] * (len(processes) - 1)


def _assert_equal_runs(one: pathlib.Path, other: pathlib.Path) -> None:
  metrics_of_one, metrics_of_other = metrics.read(one), metrics.read(other)
  iterations = [line['iteration'] for line in metrics_of_one]
  assert iterations == list(range(len(iterations))) and len(iterations) > 1
  _assert_equal_metrics(metrics_of_one, metrics_of_other)
  params = [
    safetensors.numpy.load_file(workdir / 'policy/model.safetensors')
    for workdir in (one, other)
  ]
  assert params[0].keys() == params[1].keys()
  for name, x in params[0].items():
    # The export is in bfloat16, so its last bit may differ. In float32, sums
    # in another order differ by the last bit of a typical parameter, 1e-8.
    np.testing.assert_allclose(
      params[1][name].astype(np.float32),
      x.astype(np.float32),
      rtol=8e-3,
      atol=5e-8,
    )


def _assert_equal_metrics(one: list[dict], two: list[dict]) -> None:
  for a, b in zip(one, two, strict=True):
    names = {n for n in a if not n.startswith(('time/', 'rollout/'))}
    assert names == {n for n in b if not n.startswith(('time/', 'rollout/'))}
    for name in names:
      np.testing.assert_allclose(
        b[name], a[name], rtol=1e-4, atol=1e-5, err_msg=name
      )


@pytest.mark.slow
def test_two_processes_warm_start_like_one_process(tmp_path):
  alone = _start(tmp_path / 'one', program=_SFT, devices=2)
  together = _processes(tmp_path / 'two', program=_SFT)
  outputs = _wait(alone, *together)
  assert 'warm start: ' in outputs[1][0] and 'warm start' not in outputs[2][0]
  one, two = (metrics.read(tmp_path / name) for name in ('one', 'two'))
  assert len(one) > 1
  _assert_equal_metrics(one, two)


def test_a_process_ends_if_the_other_is_killed(tmp_path):
  processes = _processes(tmp_path)
  try:
    for line in processes[0].stdout:
      if 'compiling' in line:
        break
    processes[1].kill()
    _, said = processes[0].communicate(timeout=200)
    assert processes[0].returncode == 1
    assert len(said.splitlines()) == 1
    assert said.startswith('another process has ended or cannot be reached (')
    assert said.endswith('rerun the same command in every process\n')
  finally:
    _kill(*processes)


def test_other_errors_are_no_lost_process(monkeypatch):
  lost = 'UNKNOWN: Gloo AllGather failed:\n Connection closed by peer'
  monkeypatch.setattr(distributed, 'is_multi_process', lambda: True)
  with (
    pytest.raises(errors_lib.RunError, match='another process .* failed: Conn'),
    distributed.explain_lost_process(),
  ):
    raise ValueError(lost)
  for is_multi, text in ((True, 'rollout.groups=0: Gloo'), (False, lost)):
    monkeypatch.setattr(distributed, 'is_multi_process', lambda x=is_multi: x)
    with pytest.raises(ValueError), distributed.explain_lost_process():
      raise ValueError(text)


_LONGER = (
  '--config.num_iterations=4',
  '--config.evaluation.every=0',
  '--config.checkpoint.every=9',
)


def _read_until(process: preloaded.Process, text: str) -> None:
  for line in process.stdout:
    if text in line:
      return
  raise AssertionError(process.stderr.read())


@pytest.mark.slow
def test_preempted_processes_exit_and_others_resume(tmp_path):
  together = _processes(tmp_path, *_LONGER)
  # The run resumes with other numbers of processes and devices.
  alone = resumed = None
  try:
    _read_until(together[0], 'iteration    0')
    # Only one process receives the signal.
    together[1].send_signal(signal.SIGTERM)
    outputs = [p.communicate(timeout=300) for p in together]
    assert [p.returncode for p in together] == [0, 0], outputs
    assert 'is saved; rerun the same command to resume' in outputs[0][0]
    done = len(metrics.read(tmp_path))
    assert 1 <= done < 4
    alone = _start(tmp_path, *_LONGER, devices=4)
    _read_until(alone, f'resuming {tmp_path} after iteration {done - 1}')
    _read_until(alone, f'iteration    {done}')
    alone.send_signal(signal.SIGTERM)
    alone.communicate(timeout=300)
    assert alone.returncode == 0
    resumed = _processes(tmp_path, *_LONGER)
    outputs = [p.communicate(timeout=300) for p in resumed]
    assert [p.returncode for p in resumed] == [0, 0], outputs
    assert f'resuming {tmp_path}' in outputs[0][0]
  finally:
    _kill(*together, *filter(None, [alone]), *(resumed or ()))
  iterations = [line['iteration'] for line in metrics.read(tmp_path)]
  assert iterations == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 2])
def test_a_run_resumes_with_another_number_of_devices(tmp_path, devices):
  flags = ('--config.evaluation.every=0',)
  for name, counts in (('same', (4, 4)), ('changed', (4, devices))):
    for iterations, count in zip((1, 2), counts, strict=True):
      run = _start(
        tmp_path / name,
        f'--config.num_iterations={iterations}',
        *flags,
        devices=count,
      )
      _wait(run)
  same, changed = (
    metrics.read(tmp_path / name) for name in ('same', 'changed')
  )
  assert len(same) == 2
  _assert_equal_metrics(same, changed)


def test_a_partial_set_of_variables_is_refused(monkeypatch):
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', '127.0.0.1:1')
  with pytest.raises(ValueError, match=r'\$JAX_NUM_PROCESSES=: not set'):
    distributed.initialize()


@pytest.mark.parametrize(
  ('address', 'index', 'message'),
  [
    ('node0', '0', r'\$JAX_COORDINATOR_ADDRESS=node0: has no port'),
    ('node0:1', '2', r'\$JAX_PROCESS_ID=2: must be below \$JAX_NUM_PROCESSES'),
  ],
)
def test_a_wrong_variable_is_named(monkeypatch, address, index, message):
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', address)
  monkeypatch.setenv('JAX_NUM_PROCESSES', '2')
  monkeypatch.setenv('JAX_PROCESS_ID', index)
  with pytest.raises(ValueError, match=message):
    distributed.initialize()


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize('exists', [False, True])
def test_an_unused_accelerator_is_reported(monkeypatch, capsys, exists):
  monkeypatch.setattr(hardware, 'has_accelerator', lambda: exists)
  distributed.start_devices()
  assert ('but jax uses the CPU' in capsys.readouterr().out) == exists


@pytest.mark.slow
def test_a_run_without_its_platform_ends_in_one_line(tmp_path):
  done = subprocess.run(
    [sys.executable, *_TRAIN, f'--workdir={tmp_path}'],
    cwd=programs.PROJECT,
    env=os.environ | {'JAX_PLATFORMS': 'cuda'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  line = done.stderr.splitlines()[-1]
  assert line.startswith('$JAX_PLATFORMS=cuda: cannot be used')
  assert 'Traceback' not in done.stderr


@pytest.mark.parametrize(
  ('change', 'differs'),
  [
    (lambda x: x, False),
    (lambda x: x * np.float32(1 + 1e-6), False),  # Rounding.
    (lambda x: x + np.random.default_rng(1).normal(size=x.shape), True),
    (lambda x: x[::-1], True),
  ],
)
def test_advantages_that_differ_between_processes(monkeypatch, change, differs):
  own = np.random.default_rng(0).normal(size=6400).astype(np.float32)
  sent = []
  monkeypatch.setattr(distributed, 'is_multi_process', lambda: True)
  monkeypatch.setattr(
    distributed, 'all_gather_objects', lambda x: sent.append(x) or [*sent]
  )
  distributed.check_close({'advantages': own})
  context = contextlib.nullcontext()
  if differs:
    context = pytest.raises(ValueError, match='^advantages: differ in proces')
  with context:
    distributed.check_close({'advantages': change(own)})


@pytest.mark.parametrize('platform', ['cuda', 'abacus'])
def test_a_missing_platform_is_named(platform):
  code = 'from gigpo_jax.runtime import distributed as d; d.start_devices()'
  process = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | {'JAX_PLATFORMS': platform},
  )
  if process.returncode == 0:
    pytest.skip(f'this machine has {platform}')
  last = process.stderr.splitlines()[-1]
  assert last.startswith(f'ValueError: $JAX_PLATFORMS={platform}: cannot be us')
  assert last.endswith(
    'must be a platform of this machine, such as cpu, or unset'
  )


@pytest.mark.parametrize('terminal', [True, False])
def test_progress_bar_is_shown_on_a_terminal_only(terminal, monkeypatch):
  out = Terminal() if terminal else io.StringIO()
  clock = [0.0]
  monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
  with console.progress_bar(
    total=4, unit='episode', file=out, mininterval=0
  ) as bar:
    count = console.count_episodes(bar, lambda: 600)
    clock[0] = 3.0
    count(3)
    bar.refresh()
  shown = out.getvalue()
  assert ('3/4' in shown and '200 tokens/s' in shown) == terminal
  assert bool(shown) == terminal


@pytest.mark.skipif(sys.platform != 'linux', reason='needs glibc')
@pytest.mark.parametrize(
  ('accelerator', 'platforms', 'cores', 'options'),
  [
    (False, '', 2, {-4, -1, -2, -8}),
    # On many cores, threads would wait for a single heap.
    (False, '', 16, {-4, -1, -2}),
    (True, '', 2, set()),
    (True, 'cpu', 2, {-4, -1, -2, -8}),
  ],
)
def test_freed_memory_is_kept_on_a_cpu(
  monkeypatch, accelerator, platforms, cores, options
):
  calls = {}

  class Library:
    def __init__(self, name):
      self.mallopt = calls.__setitem__

  monkeypatch.setattr(hardware.ctypes, 'CDLL', Library)
  monkeypatch.setattr(hardware, '_any_exists', lambda _: accelerator)
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(cores))
  monkeypatch.setenv('JAX_PLATFORMS', platforms)
  hardware.keep_freed_memory()
  assert calls.keys() == options
