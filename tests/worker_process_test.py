"""Tests of worker processes: output, time limits, no orphans."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pools
import psutil
import pytest

from envs import base

# A program that is started in the background may ignore SIGINT by default.
SCRIPT = """
import signal, sys, time
from envs import base, toy
from gigpo_jax import env_pool
if __name__ == '__main__':
  signal.signal(signal.SIGINT, signal.default_int_handler)
  pool = env_pool.EnvPool('toy', {}, num_envs=4, num_workers=2,
                          step_timeout_secs=9, reset_timeout_secs=9)
  pool.reset(0, base.Task('train', 0)); pool.receive()
  print('pids', *[w.pid for w in pool._workers], flush=True)
  time.sleep(60)
"""


# A hung worker does not notice that its pipe is closed.
HANGING = SCRIPT.replace("'toy', {}", "'toy', {'faults': {0: 'hang'}}").replace(
  'time.sleep(60)', "pool.step(0, ''); time.sleep(60)"
)


@pytest.mark.parametrize('code', [SCRIPT, HANGING], ids=['idle', 'hung'])
@pytest.mark.parametrize('sent', ['SIGINT', 'SIGTERM', 'SIGKILL'])
def test_no_orphans_when_the_parent_is_ended(
  tmp_path: pathlib.Path, sent: str, code: str
):
  script = tmp_path / 'parent.py'
  script.write_text(code)
  parent = subprocess.Popen(
    [sys.executable, str(script)],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  with parent:
    pids = [int(word) for word in parent.stdout.readline().split()[1:]]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    os.kill(parent.pid, getattr(signal, sent))
    parent.wait(timeout=20)
  end = time.monotonic() + 10
  while any(psutil.pid_exists(p) for p in pids) and time.monotonic() < end:
    time.sleep(0.05)
  assert not any(psutil.pid_exists(pid) for pid in pids)


def test_output_of_simulators_stays_out_of_stdout(tmp_path: pathlib.Path):
  script = tmp_path / 'parent.py'
  script.write_text(
    SCRIPT.replace("'toy', {}", "'toy', {'faults': {0: 'print'}}").replace(
      'time.sleep(60)', "pool.step(0, ''); pool.receive(); pool.close()"
    )
  )
  done = subprocess.run(
    [sys.executable, str(script)], capture_output=True, text=True, check=True
  )
  assert 'noise' not in done.stdout
  for stream in ('stdout', 'descriptor', 'stderr'):
    assert stream in done.stderr


def test_sets_have_the_same_order_in_all_workers():
  with pools.make_faulty({0: 'hash'}, num_envs=2, num_workers=2) as pool:
    history = pools.play(pool, {0: 0, 1: 0})
  assert history[0][-1].metrics and history[0] == history[1]


def test_variables_of_workers_are_not_left_in_the_trainer(monkeypatch):
  monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
  monkeypatch.setenv('MKL_NUM_THREADS', '3')
  before = dict(os.environ)
  with pools.make(1, 1):
    assert dict(os.environ) == before


def _pids(path: pathlib.Path) -> list[int]:
  return [int(line) for line in path.read_text().split()]


def _all_end(pids: list[int]) -> bool:
  """Returns whether the processes end or are zombies within ten seconds."""

  def alive(pid: int) -> bool:
    try:
      return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
      return False

  end = time.monotonic() + 10
  while any(map(alive, pids)) and time.monotonic() < end:
    time.sleep(0.05)
  return not any(map(alive, pids))


@pytest.mark.parametrize('how', ['close', 'hang', 'exit'])
def test_child_processes_end_with_their_worker(tmp_path, monkeypatch, how: str):
  path = tmp_path / 'pids'
  monkeypatch.setenv('FAULTY_PIDS', str(path))
  faults = {0: 'children', 4: how}
  with pools.make_faulty(faults, num_envs=2, step_timeout_secs=0.5) as pool:
    pool.reset(0, base.Task('train', 0))
    pools.gather(pool, {0})
    pids = _pids(path)
    assert len(pids) == 3 and all(map(psutil.pid_exists, pids))
    if how != 'close':
      pools.play(pool, {1: 4})
      assert pool.restarts == 1
      assert _all_end(pids)
  assert _all_end(_pids(path))


CHILDREN = """
import time
import faulty_env
from envs import base
from gigpo_jax import env_pool
if __name__ == '__main__':
  pool = env_pool.EnvPool(
    'faulty', {'plan': faulty_env.Plan({0: 'children'})}, num_envs=1,
    num_workers=1, step_timeout_secs=9, reset_timeout_secs=9)
  pool.reset(0, base.Task('train', 0)); pool.receive()
  print('ready', flush=True)
  time.sleep(60)
"""


def test_child_processes_end_with_a_killed_trainer(tmp_path):
  script, path = tmp_path / 'parent.py', tmp_path / 'pids'
  script.write_text(CHILDREN)
  folders = [str(pathlib.Path(__file__).parent), os.environ.get('PYTHONPATH')]
  environ = {
    'PYTHONPATH': os.pathsep.join(filter(None, folders)),
    'FAULTY_PIDS': str(path),
  }
  with subprocess.Popen(
    [sys.executable, str(script)],
    stdout=subprocess.PIPE,
    env=os.environ | environ,
  ) as parent:
    assert parent.stdout.readline() == b'ready\n'
    parent.kill()
  pids = _pids(path)
  assert len(pids) == 3
  assert _all_end(pids)


STOPPED = """
import sys, time
from envs import base
from gigpo_jax import env_pool
if __name__ == '__main__':
  pool = env_pool.EnvPool('toy', {'step_secs': 2.0}, num_envs=1, num_workers=1,
                          step_timeout_secs=4, reset_timeout_secs=9)
  pool.reset(0, base.Task('train', 0)); pool.receive()
  pool.step(0, '')
  print(pool._workers[0].pid, flush=True)
  if sys.argv[1] == 'busy':
    time.sleep(1.5)
  pool.receive()
  print(*[f.cause for f in pool.failures], flush=True)
"""


@pytest.mark.parametrize(
  'state', [pytest.param('waiting', marks=pytest.mark.slow), 'busy']
)
def test_time_limits_exclude_the_time_of_a_stopped_trainer(tmp_path, state):
  script = tmp_path / 'parent.py'
  script.write_text(STOPPED)
  with subprocess.Popen(
    [sys.executable, str(script), state], stdout=subprocess.PIPE, text=True
  ) as parent:
    pids = [int(parent.stdout.readline()), parent.pid]  # Worker, trainer.
    time.sleep(0.5)
    for pid in pids:
      os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(parent.pid, signal.SIGCONT)
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGCONT)
    assert parent.stdout.readline() == '\n'
