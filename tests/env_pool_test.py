"""Tests of the pool: order, faults, replacement of workers, no orphans."""

import collections
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import faulty_env
import psutil
import pytest

from envs import base, toy
from gigpo_jax import env_pool

RIGHT = '<think>on</think><action>right</action>'


def _pool(num_workers: int = 1, num_envs: int = 4, **kwargs):
  options = {'step_timeout_secs': 30.0, 'reset_timeout_secs': 30.0}
  return env_pool.EnvPool(
    kwargs.pop('name', 'toy'),
    kwargs.pop('env', {}),
    num_envs=num_envs,
    num_workers=num_workers,
    **(options | kwargs),
  )


def _gather(pool: env_pool.EnvPool, envs: set[int]) -> dict:
  answers = {}
  while envs - answers.keys():
    answers.update(pool.receive())
  return answers


def _play(pool: env_pool.EnvPool, tasks: dict[int, int]) -> dict[int, list]:
  """Sends `right` in every environment; returns all replies by environment."""
  for env, index in tasks.items():
    pool.reset(env, base.Task('train', index))
  history = {env: [answer] for env, answer in _gather(pool, set(tasks)).items()}
  running = {e for e, h in history.items() if _continues(h[-1])}
  while running:
    for env in running:
      pool.step(env, RIGHT)
    for env, answer in _gather(pool, running).items():
      history[env].append(answer)
    running = {e for e in running if _continues(history[e][-1])}
  return history


def _continues(answer) -> bool:
  if isinstance(answer, env_pool.Failure):
    return False
  return isinstance(answer, base.Observation) or not answer.done


@pytest.mark.parametrize('num_workers', [1, 2])
def test_workers_reply_as_this_process_does(num_workers: int):
  tasks = dict(enumerate([0, 0, 1, 1, 2, 2, 3, 3]))
  with _pool(0, 8) as local, _pool(num_workers, 8, envs_per_group=2) as remote:
    expected = _play(local, tasks)
    assert _play(remote, tasks) == expected
  assert expected[0][-1].success and expected[0][-1].reward == 10


def test_128_environments_on_2_workers():
  with _pool(2, 128, envs_per_group=8) as pool:
    history = _play(pool, {env: env // 8 for env in range(128)})
  assert all(h[-1].success for h in history.values())


def test_exception_ends_only_its_episode():
  with _pool(env={'faults': {1: 'raise'}}) as pool:
    history = _play(pool, {0: 0, 1: 1, 2: 2})
    failure = history[1][-1]
    assert failure.task == base.Task('train', 1)
    assert failure.last_action == RIGHT
    assert failure.reason.startswith('RuntimeError: the floor gave way (toy.py')
    assert history[0][-1].success and history[2][-1].success
    assert (pool.restarts, len(pool.failures)) == (0, 1)
    # The environment can be used again.
    assert _play(pool, {1: 2})[1][-1].success


def test_exception_in_reset_is_a_failure():
  with _pool(env={'faults': {1: 'raise_at_reset'}}) as pool:
    history = _play(pool, {0: 0, 1: 1})
  assert 'the corridor is closed' in history[1][0].reason
  assert history[0][-1].success


@pytest.mark.parametrize('fault', ['exit', 'hang'])
def test_lost_worker_is_replaced_and_others_continue(fault: str):
  timeout = 30.0 if fault == 'exit' else 0.5
  with _pool(
    2, 4, env={'faults': {7: fault}}, step_timeout_secs=timeout
  ) as pool:
    history = _play(pool, {0: 7, 1: 0, 3: 1})
    assert isinstance(history[0][-1], env_pool.Failure)
    expected = 'died (exit code 3)' if fault == 'exit' else 'longer than 0.5 s'
    assert expected in history[0][-1].reason
    assert history[1][-1].success and history[3][-1].success
    assert pool.restarts == 1
    assert _play(pool, {0: 0})[0][-1].success


@pytest.mark.parametrize('fault', ['exit', 'hang'])
def test_neighbours_of_a_lost_environment_are_replayed(fault):
  timeout = 30.0 if fault == 'exit' else 0.5
  tasks = {0: 0, 1: 8, 2: 1, 3: 0}
  with _pool(0, 4) as pool:
    expected = _play(pool, tasks)
  env = {'faults': {8: fault}, 'fault_step': 1}
  with _pool(1, 4, env=env, step_timeout_secs=timeout) as pool:
    history = _play(pool, tasks)
    assert [f.env for f in pool.failures] == [1]
    assert pool.restarts == 1
  assert isinstance(history[1][2], env_pool.Failure)
  for env_index in (0, 2, 3):
    assert history[env_index] == expected[env_index]


def test_differing_replay_is_a_failure():
  env = {'faults': {8: 'exit', 0: 'moody'}, 'fault_step': 1}
  with _pool(1, 3, env=env) as pool:
    history = _play(pool, {0: 8, 1: 0, 2: 1})
    assert history[2][-1].success
    assert 'differs when it is replayed' in history[1][-1].reason
    assert len(pool.failures) == 2
    # The next episode gets no reply of that episode.
    again = _play(pool, {1: 2})
  assert again[1][-1].success and len(again[1]) == 3


@pytest.mark.parametrize('fault', ['unpicklable', 'print'])
def test_unusual_replies(fault: str):
  with _pool(env={'faults': {1: fault}}) as pool:
    history = _play(pool, {0: 0, 1: 1})
  assert history[0][-1].success
  if fault == 'print':
    assert history[1][-1].success
  else:
    assert isinstance(history[1][-1], env_pool.Failure)


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({'reward': 1e30}, 'reward=1e+30: must be a number within +-1,000,000'),
    ({'reward': -1.1e6}, 'reward=-1100000.0: must be a number within'),
    ({'score': 10**400}, 'must be a number within +-1,000,000'),
    ({'metrics': {'x': -1e13}}, 'x=-10000000000000.0: must be a number'),
    ({'reward': 1e6, 'score': -1e6, 'metrics': {'x': 1e12}}, ''),
  ],
)
def test_numbers_out_of_bounds_name_the_environment(
  monkeypatch, changes, reason
):
  step = toy.Env.step
  monkeypatch.setattr(
    toy.Env, 'step', lambda *args: dataclasses.replace(step(*args), **changes)
  )
  with _pool(0, 1) as pool:
    pool.reset(0, base.Task('train', 0))
    pool.step(0, RIGHT)
    (_, _), (_, answer) = pool.receive()
  if reason:
    assert answer.cause == 'garbage'
    assert answer.reason.startswith('env.name=toy: ')
    assert reason in answer.reason
  else:
    assert isinstance(answer, base.StepResult)


def test_prepare_has_no_reply():
  with _pool() as pool:
    pool.prepare(0, base.Task('train', 3))
    assert _play(pool, {0: 0})[0][-1].success


def test_idle_worker_is_recycled():
  with _pool(1, 2, max_resets_per_worker=2) as pool:
    first = pool._workers[0].process.pid
    _play(pool, {0: 0, 1: 0})
    assert pool._workers[0].process.pid == first
    _play(pool, {0: 0, 1: 0})
    assert pool._workers[0].process.pid != first
    assert pool.restarts == 0


def test_worker_is_recycled_while_episodes_are_running():
  # The episodes have different lengths, so the worker is never idle.
  with _pool(0, 4) as pool:
    expected = [_play(pool, {0: index})[0] for index in range(12)]
  with _pool(1, 4, max_resets_per_worker=5) as pool:
    histories = _play_async(pool, 48, range(12))
    assert 8 <= pool.recycled <= 10 and pool.restarts == 0
  assert histories == [expected[n % 12] for n in range(48)]


def _play_async(
  pool: env_pool.EnvPool,
  num_episodes: int,
  tasks: range,
  on_end: Callable[[int], None] = lambda num_started: None,
) -> list[list]:
  """Sends `right` in each episode, without waiting for other environments.

  Calls `on_end` after each episode with the number of started episodes.
  """
  histories = [[] for _ in range(num_episodes)]
  waiting, running = list(reversed(range(num_episodes))), {}
  while waiting or running:
    for env in range(pool.num_envs):
      if env not in running and waiting:
        running[env] = waiting.pop()
        pool.reset(env, base.Task('train', tasks[running[env] % len(tasks)]))
    for env, answer in pool.receive():
      histories[running[env]].append(answer)
      if _continues(answer):
        pool.step(env, RIGHT)
      else:
        del running[env]
        on_end(num_episodes - len(waiting))
  return histories


def test_timeout_of_receive():
  with _pool(env={'faults': {0: 'hang'}}) as pool:
    _gather_one = pool.reset(0, base.Task('train', 0))
    assert _gather_one is None
    _gather(pool, {0})
    pool.step(0, RIGHT)
    assert pool.receive(timeout_secs=0.2) == []


def test_closing_twice_leaves_no_process():
  pool = _pool(2)
  pids = [w.process.pid for w in pool._workers]
  pool.close()
  pool.close()
  assert not any(psutil.pid_exists(pid) for pid in pids)


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
  print('pids', *[w.process.pid for w in pool._workers], flush=True)
  time.sleep(60)
"""


# A hung worker never notices that its pipe is closed.
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


@pytest.mark.parametrize('fault', ['sys_exit', 'huge'])
def test_faults_that_keep_the_worker(fault: str):
  with _pool(env={'faults': {0: fault}}) as pool:
    history = _play(pool, {0: 0, 1: 1})
    assert pool.restarts == 0
  assert history[1][-1].success
  if fault == 'huge':
    assert history[0][-1].success
  else:
    assert history[0][-1].reason.startswith('SystemExit: the walker left')


def test_error_in_prepare_is_reported_by_reset_only():
  with _pool(env={'faults': {1: 'raise_at_prepare'}}) as pool:
    pool.reset(0, base.Task('train', 3))
    _gather(pool, {0})
    # The environment's running episode must continue: room 3 is next to the
    # goal.
    pool.prepare(0, base.Task('train', 1))
    pool.step(0, RIGHT)
    assert _gather(pool, {0})[0].success
    assert pool.failures == []


def test_hung_worker_with_a_full_pipe_does_not_block_the_parent():
  # 64 x 16 kB are more than a pipe's buffer holds.
  envs = set(range(64))
  with _pool(1, 64, env={'faults': {0: 'hang'}}, step_timeout_secs=0.5) as pool:
    # All hang: the pool waits for the first five, one after another.
    for env in envs:
      pool.reset(env, base.Task('train', 0))
    _gather(pool, envs)
    start = time.monotonic()
    for env in envs:
      pool.step(env, 'x' * 16_000)
    answers = _gather(pool, envs)
    assert pool.restarts == 5
    assert time.monotonic() - start < 60
  assert {type(a) for a in answers.values()} == {env_pool.Failure}


def test_large_messages_in_both_directions_do_not_deadlock():
  envs = set(range(32))
  with _pool(1, 32, env={'faults': {0: 'huge'}}) as pool:
    for env in envs:
      pool.reset(env, base.Task('train', 0))
    _gather(pool, envs)
    for env in envs:
      pool.step(env, RIGHT + 'x' * 100_000)
    answers = _gather(pool, envs)
  assert all(len(a.observation.text) > 1_000_000 for a in answers.values())


def test_time_limit_excludes_queueing():
  # Eight consecutive calls take longer than the limit of a single call.
  with _pool(1, 8, env={'step_secs': 0.2}, step_timeout_secs=1.0) as pool:
    history = _play(pool, dict.fromkeys(range(8), 3))
  assert all(h[-1].success for h in history.values())


def test_slow_caller_does_not_cause_a_timeout():
  with _pool(1, 2, step_timeout_secs=0.3) as pool:
    for env in (0, 1):
      pool.reset(env, base.Task('train', 0))
    _gather(pool, {0, 1})
    for env in (0, 1):
      pool.step(env, RIGHT)
    time.sleep(0.6)
    answers = _gather(pool, {0, 1})
  assert not pool.failures and len(answers) == 2


@pytest.mark.parametrize('num_workers', [0, 2])
@pytest.mark.parametrize(
  'name, kwargs, message',
  [
    ('toy', {'room': 3}, "TypeError: .* unexpected keyword argument 'room'"),
    ('toy', {'faults': {0: 'odd'}}, 'ValueError: faults=odd: must be one of'),
    ('alfred', {}, 'unknown environment; must be one of '),
  ],
)
def test_failed_construction_is_reported_in_one_line(
  num_workers: int, name: str, kwargs: dict, message: str
):
  with pytest.raises(ValueError, match=f'^env.name={name}: .*{message}') as e:
    env_pool.EnvPool(
      name,
      kwargs,
      num_envs=2,
      num_workers=num_workers,
      step_timeout_secs=5,
      reset_timeout_secs=5,
    )
  assert '\n' not in str(e.value)


def test_worker_killed_between_calls_loses_no_episode():
  with _pool(2, 4) as pool:
    for env in range(4):
      pool.reset(env, base.Task('train', 0))
    _gather(pool, set(range(4)))
    pool._workers[0].process.kill()
    pool._workers[0].process.join()
    for env in range(4):
      pool.step(env, RIGHT)
    answers = []
    while len(answers) < 4:
      answers += pool.receive()
    assert {env for env, _ in answers} == {0, 1, 2, 3}
    assert len({repr(answer) for _, answer in answers}) == 1
    assert answers[0][1].metrics['room'] == 1
    assert (pool.failures, pool.restarts) == ([], 1)
    assert _play(pool, {0: 0})[0][-1].success


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


def test_groups_share_a_worker():
  with _pool(2, 12, envs_per_group=3) as pool:
    workers = [pool._worker_index(env) for env in range(12)]
  assert workers == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]


def _faulty(faults: dict[int, str], **kwargs):
  # A worker that unpickles the plan registers the module.
  options = {'env': {'plan': faulty_env.Plan(faults)}} | kwargs
  return _pool(name='faulty', **options)


@pytest.mark.parametrize('fault', faulty_env.FAULTS)
def test_fault_ends_only_its_episode_and_is_reported(fault: str):
  cause = faulty_env.FAULTS[fault]
  timeout = 0.5 if fault == 'hang' else 30.0
  with _pool(0, 4) as pool:
    expected = _play(pool, {0: 0, 1: 4, 2: 8})
  with _faulty({4: fault}, step_timeout_secs=timeout) as pool:
    history = _play(pool, {0: 0, 1: 4, 2: 8})
    assert [history[0], history[2]] == [expected[0], expected[2]]
    assert [f.cause for f in pool.failures] == ([cause] if cause else [])
    assert pool.restarts == (cause in ('died', 'hung'))
    if cause:
      assert str(history[1][-1]).startswith(f'{cause}: ')
      assert len(str(history[1][-1]).splitlines()) == 1
    else:
      assert history[1] == expected[1]
    # All environments remain usable.
    assert _play(pool, {0: 0, 1: 4 * 5, 2: 8})[1][-1].success


@pytest.mark.parametrize('fault', faulty_env.WORKER_FAULTS)
def test_worker_that_breaks_the_protocol_is_replaced(fault: str):
  cause, reason = faulty_env.WORKER_FAULTS[fault]
  with _pool(0, 4) as pool:
    expected = _play(pool, {0: 0, 1: 4, 2: 8})
  with _faulty({4: fault}, step_timeout_secs=2.0) as pool:
    history = _play(pool, {0: 0, 1: 4, 2: 8})
    assert [history[0], history[2]] == [expected[0], expected[2]]
    assert [f.cause for f in pool.failures] == [cause]
    assert reason in pool.failures[0].reason and pool.restarts == 1


def test_replies_hold_plain_values():
  with _faulty({4: 'unreadable'}) as pool:
    history = _play(pool, {0: 4})[0]
  assert {type(a.action) for a in history[1:]} == {str}
  assert {type(a.reward) for a in history[1:]} == {float}


def test_exception_messages_are_truncated_and_cleaned():
  with _faulty({4: 'garble'}) as pool:
    failure = _play(pool, {0: 4})[0][-1]
  assert failure.reason.startswith('RuntimeError: [2Jlong \\ud800xxx')
  assert failure.reason.isprintable()
  assert len(failure.reason) < 2200
  assert failure.reason.endswith(')') and '(faulty_env.py:' in failure.reason


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
  with _faulty(faults, num_envs=2, step_timeout_secs=0.5) as pool:
    pool.reset(0, base.Task('train', 0))
    _gather(pool, {0})
    pids = _pids(path)
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    if how != 'close':
      _play(pool, {1: 4})
      assert pool.restarts == 1
      # A child outside the group survives a worker that exits by itself.
      assert _all_end(pids if how == 'hang' else pids[:1])
  if how == 'exit':
    os.kill(pids[1], signal.SIGKILL)
  assert _all_end(pids + _pids(path)[:-1])


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
  pid, detached = _pids(path)
  os.kill(detached, signal.SIGKILL)
  assert _all_end([pid])


STOPPED = """
import sys, time
from envs import base
from gigpo_jax import env_pool
if __name__ == '__main__':
  pool = env_pool.EnvPool('toy', {'step_secs': 2.0}, num_envs=1, num_workers=1,
                          step_timeout_secs=4, reset_timeout_secs=9)
  pool.reset(0, base.Task('train', 0)); pool.receive()
  pool.step(0, '')
  print(pool._workers[0].process.pid, flush=True)
  if sys.argv[1] == 'busy':
    time.sleep(1.5)
  pool.receive()
  print(*[f.cause for f in pool.failures], flush=True)
"""


@pytest.mark.parametrize('doing', ['waiting', 'busy'])
def test_time_limits_exclude_the_time_of_a_stopped_trainer(tmp_path, doing):
  script = tmp_path / 'parent.py'
  script.write_text(STOPPED)
  with subprocess.Popen(
    [sys.executable, str(script), doing], stdout=subprocess.PIPE, text=True
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


def test_worker_over_the_memory_limit_is_recycled():
  leaks = dict.fromkeys(range(8), 'leak')
  with _faulty(leaks, max_worker_mib=10_000) as pool:
    start = psutil.Process(pool._workers[0].process.pid).memory_info().rss
  with _faulty(leaks, max_worker_mib=start / 2**20 + 40) as pool:
    first = pool._workers[0].process.pid
    for _ in range(6):
      history = _play(pool, {0: 0, 1: 1, 2: 2, 3: 3})
      assert all(h[-1].success for h in history.values())
    assert pool.recycled >= 1 and (pool.restarts, pool.failures) == (0, [])
    assert pool._workers[0].process.pid != first


def test_many_deaths_do_not_fail_other_episodes():
  # More deaths than the maximum number of replays after hangs.
  dying = {index: 'exit' for index in range(4, 100, 8)}
  with _faulty(dying, num_workers=1, num_envs=26) as pool:
    tasks = dict(enumerate([0, 1, *dying, *dying]))
    history = _play(pool, tasks)
    assert pool.restarts == 24
  assert history[0][-1].success and history[1][-1].success


def test_replaced_workers_leak_no_file_descriptors():
  process, open_files = psutil.Process(), []
  with _pool(1, 1, max_resets_per_worker=1) as pool:
    for index in range(12):
      _play(pool, {0: index % 4})
      open_files.append(process.num_fds())
    assert pool.recycled >= 10
  # One or two dismissed workers may not have exited yet.
  assert max(open_files) <= open_files[0] + 6


@pytest.mark.slow
def test_soak_of_two_thousand_episodes():
  """Loses no episode and leaks nothing, with a fault in every 20th episode."""
  num_episodes, envs = 2000, 16
  names = [fault for fault, cause in faulty_env.FAULTS.items() if cause]
  faults = {
    index: names[index // 20 % len(names)]
    for index in range(4, num_episodes, 20)
  }
  env = {'plan': faulty_env.Plan(faults), 'num_tasks': num_episodes}
  with _pool(0, 1, env={'num_tasks': num_episodes}) as pool:
    expected = [_play(pool, {0: index})[0] for index in range(num_episodes)]
  parent, samples = psutil.Process(), []
  with _pool(2, envs, name='faulty', env=env, step_timeout_secs=1.0) as pool:

    def record(num_started: int) -> None:
      if num_started % 500 == 0 and num_started > len(samples) * 500:
        workers = [psutil.Process(w.process.pid) for w in pool._workers]
        samples.append(
          (
            parent.memory_info().rss / 2**20,
            sum(w.memory_info().rss / 2**20 for w in workers),
            len(parent.children(recursive=True)),
            parent.num_fds(),
          )
        )

    histories = _play_async(pool, num_episodes, range(num_episodes), record)
    causes = collections.Counter(f.cause for f in pool.failures)
  assert len(histories) == num_episodes
  for index in range(num_episodes):
    if index in faults:
      failure = histories[index][-1]
      assert failure.task.index == index
      assert failure.cause == faulty_env.FAULTS[faults[index]]
      assert (
        histories[index][:-1] == expected[index][: len(histories[index]) - 1]
      )
    else:
      assert histories[index] == expected[index]
  assert causes.total() == len(faults) == num_episodes // 20
  (memory, worker_memory, *num_resources), *later = samples
  assert len(later) == 3
  for memory_later, worker_memory_later, *num_resources_later in later:
    assert (
      memory_later < memory + 10 and worker_memory_later < worker_memory + 20
    )
    assert num_resources_later == num_resources
