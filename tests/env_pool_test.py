"""The pool with the toy corridor: order, faults, replacement, no orphans."""

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
  """Walks right in every environment; returns all answers by environment."""
  for env, index in tasks.items():
    pool.reset(env, base.Task('train', index))
  history = {env: [answer] for env, answer in _gather(pool, set(tasks)).items()}
  running = {e for e, h in history.items() if _goes_on(h[-1])}
  while running:
    for env in running:
      pool.step(env, RIGHT)
    for env, answer in _gather(pool, running).items():
      history[env].append(answer)
    running = {e for e in running if _goes_on(history[e][-1])}
  return history


def _goes_on(answer) -> bool:
  if isinstance(answer, env_pool.Failure):
    return False
  return isinstance(answer, base.Observation) or not answer.done


@pytest.mark.parametrize('num_workers', [1, 2])
def test_workers_answer_as_this_process_does(num_workers: int):
  tasks = dict(enumerate([0, 0, 1, 1, 2, 2, 3, 3]))
  with _pool(0, 8) as local, _pool(num_workers, 8, envs_per_group=2) as remote:
    expected = _play(local, tasks)
    assert _play(remote, tasks) == expected
  assert expected[0][-1].success and expected[0][-1].reward == 10


def test_128_environments_on_2_workers():
  with _pool(2, 128, envs_per_group=8) as pool:
    history = _play(pool, {env: env // 8 for env in range(128)})
  assert all(h[-1].success for h in history.values())


def test_an_exception_ends_its_own_episode_only():
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


def test_an_exception_in_reset_is_a_failure():
  with _pool(env={'faults': {1: 'raise_at_reset'}}) as pool:
    history = _play(pool, {0: 0, 1: 1})
  assert 'the corridor is closed' in history[1][0].reason
  assert history[0][-1].success


@pytest.mark.parametrize('fault', ['exit', 'hang'])
def test_a_lost_worker_is_replaced_and_the_others_go_on(fault: str):
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
def test_neighbours_of_a_lost_environment_go_on_as_if_nothing_was(fault):
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
  for number in (0, 2, 3):
    assert history[number] == expected[number]


def test_an_environment_that_cannot_be_played_again_fails_in_one_line():
  env = {'faults': {8: 'exit', 0: 'moody'}, 'fault_step': 1}
  with _pool(1, 3, env=env) as pool:
    history = _play(pool, {0: 8, 1: 0, 2: 1})
    assert history[2][-1].success
    assert 'went differently' in history[1][-1].reason
    assert len(pool.failures) == 2
    # Nothing of that episode turns up in the next.
    again = _play(pool, {1: 2})
  assert again[1][-1].success and len(again[1]) == 3


@pytest.mark.parametrize('fault', ['unpicklable', 'print'])
def test_odd_answers(fault: str):
  with _pool(env={'faults': {1: fault}}) as pool:
    history = _play(pool, {0: 0, 1: 1})
  assert history[0][-1].success
  if fault == 'print':
    assert history[1][-1].success
  else:
    assert isinstance(history[1][-1], env_pool.Failure)


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'reward': 1e30}, 'reward=1e+30: must be a number within +-1,000,000'),
    ({'reward': -1.1e6}, 'reward=-1100000.0: must be a number within'),
    ({'score': 10**400}, 'must be a number within +-1,000,000'),
    ({'metrics': {'x': -1e13}}, 'x=-10000000000000.0: must be a number'),
    ({'reward': 1e6, 'score': -1e6, 'metrics': {'x': 1e12}}, ''),
  ],
)
def test_numbers_out_of_bounds_name_the_environment(monkeypatch, changes, said):
  step = toy.Env.step
  monkeypatch.setattr(
    toy.Env, 'step', lambda *args: dataclasses.replace(step(*args), **changes)
  )
  with _pool(0, 1) as pool:
    pool.reset(0, base.Task('train', 0))
    pool.step(0, RIGHT)
    (_, _), (_, answer) = pool.receive()
  if said:
    assert answer.cause == 'garbage'
    assert answer.reason.startswith('env.name=toy: ') and said in answer.reason
  else:
    assert isinstance(answer, base.StepResult)


def test_prepare_is_never_answered():
  with _pool() as pool:
    pool.prepare(0, base.Task('train', 3))
    assert _play(pool, {0: 0})[0][-1].success


def test_an_idle_worker_is_recycled():
  with _pool(1, 2, max_resets_per_worker=2) as pool:
    first = pool._workers[0].process.pid
    _play(pool, {0: 0, 1: 0})
    assert pool._workers[0].process.pid == first
    _play(pool, {0: 0, 1: 0})
    assert pool._workers[0].process.pid != first
    assert pool.restarts == 0


def test_a_worker_is_replaced_while_episodes_are_running():
  # Of different lengths, so that it is never idle.
  with _pool(0, 4) as pool:
    expected = [_play(pool, {0: index})[0] for index in range(12)]
  with _pool(1, 4, max_resets_per_worker=5) as pool:
    found = _all_of(pool, 48, range(12))
    assert 8 <= pool.recycled <= 10 and pool.restarts == 0
  assert found == [expected[n % 12] for n in range(48)]


def _all_of(
  pool: env_pool.EnvPool,
  number: int,
  tasks: range,
  after: Callable[[int], None] = lambda begun: None,
) -> list[list]:
  """Walks right in so many episodes, each env on its own.

  Calls `after` at the end of each, with how many have begun.
  """
  found = [[] for _ in range(number)]
  waiting, under_way = list(reversed(range(number))), {}
  while waiting or under_way:
    for env in range(pool.num_envs):
      if env not in under_way and waiting:
        under_way[env] = waiting.pop()
        pool.reset(env, base.Task('train', tasks[under_way[env] % len(tasks)]))
    for env, answer in pool.receive():
      found[under_way[env]].append(answer)
      if _goes_on(answer):
        pool.step(env, RIGHT)
      else:
        del under_way[env]
        after(number - len(waiting))
  return found


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


# A program started in the background may have been told to ignore SIGINT.
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


# A hung worker never finds its pipe closed.
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
def test_faults_that_must_not_take_the_worker_along(fault: str):
  with _pool(env={'faults': {0: fault}}) as pool:
    history = _play(pool, {0: 0, 1: 1})
    assert pool.restarts == 0
  assert history[1][-1].success
  if fault == 'huge':
    assert history[0][-1].success
  else:
    assert history[0][-1].reason.startswith('SystemExit: the walker left')


def test_an_error_in_prepare_surfaces_at_the_reset_only():
  with _pool(env={'faults': {1: 'raise_at_prepare'}}) as pool:
    pool.reset(0, base.Task('train', 3))
    _gather(pool, {0})
    # During an episode of the same environment, which goes on: room 3 is next
    # to the goal.
    pool.prepare(0, base.Task('train', 1))
    pool.step(0, RIGHT)
    assert _gather(pool, {0})[0].success
    assert pool.failures == []


def test_a_hung_worker_with_a_full_pipe_does_not_block_the_parent():
  # 64 x 16 kB are five times what a pipe holds.
  envs = set(range(64))
  with _pool(1, 64, env={'faults': {0: 'hang'}}, step_timeout_secs=0.5) as pool:
    # All hang: the first five are waited for, one after another.
    for env in envs:
      pool.reset(env, base.Task('train', 0))
    _gather(pool, envs)
    begin = time.monotonic()
    for env in envs:
      pool.step(env, 'x' * 16_000)
    answers = _gather(pool, envs)
    assert pool.restarts == 5
    assert time.monotonic() - begin < 60
  assert {type(a) for a in answers.values()} == {env_pool.Failure}


def test_large_messages_both_ways_do_not_lock_up():
  envs = set(range(32))
  with _pool(1, 32, env={'faults': {0: 'huge'}}) as pool:
    for env in envs:
      pool.reset(env, base.Task('train', 0))
    _gather(pool, envs)
    for env in envs:
      pool.step(env, RIGHT + 'x' * 100_000)
    answers = _gather(pool, envs)
  assert all(len(a.observation.text) > 1_000_000 for a in answers.values())


def test_a_time_limit_counts_a_call_and_not_its_queue():
  # Eight calls one after the other take longer than the limit of one.
  with _pool(1, 8, env={'step_secs': 0.2}, step_timeout_secs=1.0) as pool:
    history = _play(pool, dict.fromkeys(range(8), 3))
  assert all(h[-1].success for h in history.values())


def test_a_slow_caller_is_not_the_workers_fault():
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
def test_an_environment_that_cannot_be_made_is_refused_in_one_line(
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


def test_a_worker_killed_between_calls_costs_no_episode():
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


def test_what_simulators_print_stays_out_of_stdout(tmp_path: pathlib.Path):
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
    places = [pool._place(env) for env in range(12)]
  assert places == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]


def _faulty(faults: dict[int, str], **kwargs):
  # In a plan, by which a worker finds the module.
  options = {'env': {'plan': faulty_env.Plan(faults)}} | kwargs
  return _pool(name='faulty', **options)


@pytest.mark.parametrize('fault', faulty_env.FAULTS)
def test_a_fault_ends_its_own_episode_and_is_named(fault: str):
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
    # Everything can be used again.
    assert _play(pool, {0: 0, 1: 4 * 5, 2: 8})[1][-1].success


@pytest.mark.parametrize('fault', faulty_env.WORKER_FAULTS)
def test_a_worker_that_breaks_the_protocol_is_replaced(fault: str):
  cause, said = faulty_env.WORKER_FAULTS[fault]
  with _pool(0, 4) as pool:
    expected = _play(pool, {0: 0, 1: 4, 2: 8})
  with _faulty({4: fault}, step_timeout_secs=2.0) as pool:
    history = _play(pool, {0: 0, 1: 4, 2: 8})
    assert [history[0], history[2]] == [expected[0], expected[2]]
    assert [f.cause for f in pool.failures] == [cause]
    assert said in pool.failures[0].reason and pool.restarts == 1


def test_answers_hold_plain_values_alone():
  with _faulty({4: 'unreadable'}) as pool:
    history = _play(pool, {0: 4})[0]
  assert {type(a.action) for a in history[1:]} == {str}
  assert {type(a.reward) for a in history[1:]} == {float}


def test_what_an_exception_says_is_cut_and_stripped():
  with _faulty({4: 'garble'}) as pool:
    failure = _play(pool, {0: 4})[0][-1]
  assert failure.reason.startswith('RuntimeError: [2Jlong \\ud800xxx')
  assert failure.reason.isprintable()
  assert len(failure.reason) < 2200
  assert failure.reason.endswith(')') and '(faulty_env.py:' in failure.reason


def _pids(path: pathlib.Path) -> list[int]:
  return [int(line) for line in path.read_text().split()]


def _all_end(pids: list[int]) -> bool:
  """Whether the processes end within a few seconds; one may be a zombie."""

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
def test_what_an_environment_started_ends_with_its_worker(
  tmp_path, monkeypatch, how: str
):
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
      # One that left its group outlives a worker that ended by itself.
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


def test_what_an_environment_started_ends_with_a_killed_trainer(tmp_path):
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
def test_time_limits_leave_out_the_time_of_a_stopped_trainer(tmp_path, doing):
  script = tmp_path / 'parent.py'
  script.write_text(STOPPED)
  with subprocess.Popen(
    [sys.executable, str(script), doing], stdout=subprocess.PIPE, text=True
  ) as parent:
    both = [int(parent.stdout.readline()), parent.pid]  # Worker, trainer.
    time.sleep(0.5)
    for pid in both:
      os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(parent.pid, signal.SIGCONT)
    time.sleep(0.3)
    os.kill(both[0], signal.SIGCONT)
    assert parent.stdout.readline() == '\n'


def test_a_worker_that_has_grown_is_replaced_between_episodes():
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


def test_many_deaths_among_neighbours_cost_nobody_else():
  # More than an episode may wait for ones that hang.
  dying = {index: 'exit' for index in range(4, 100, 8)}
  with _faulty(dying, num_workers=1, num_envs=26) as pool:
    tasks = dict(enumerate([0, 1, *dying, *dying]))
    history = _play(pool, tasks)
    assert pool.restarts == 24
  assert history[0][-1].success and history[1][-1].success


def test_workers_that_are_replaced_leave_nothing_behind():
  process, open_files = psutil.Process(), []
  with _pool(1, 1, max_resets_per_worker=1) as pool:
    for index in range(12):
      _play(pool, {0: index % 4})
      open_files.append(process.num_fds())
    assert pool.recycled >= 10
  # One or two may be on their way out.
  assert max(open_files) <= open_files[0] + 6


@pytest.mark.slow
def test_soak_of_two_thousand_episodes():
  """Loses nothing and leaks nothing, though every twentieth goes wrong."""
  number, envs = 2000, 16
  kinds = [fault for fault, cause in faulty_env.FAULTS.items() if cause]
  faults = {
    index: kinds[index // 20 % len(kinds)] for index in range(4, number, 20)
  }
  env = {'plan': faulty_env.Plan(faults), 'num_tasks': number}
  with _pool(0, 1, env={'num_tasks': number}) as pool:
    expected = [_play(pool, {0: index})[0] for index in range(number)]
  parent, marks = psutil.Process(), []
  with _pool(2, envs, name='faulty', env=env, step_timeout_secs=1.0) as pool:

    def mark(begun: int) -> None:
      if begun % 500 == 0 and begun > len(marks) * 500:
        workers = [psutil.Process(w.process.pid) for w in pool._workers]
        marks.append(
          (
            parent.memory_info().rss / 2**20,
            sum(w.memory_info().rss / 2**20 for w in workers),
            len(parent.children(recursive=True)),
            parent.num_fds(),
          )
        )

    found = _all_of(pool, number, range(number), mark)
    causes = collections.Counter(f.cause for f in pool.failures)
  assert len(found) == number
  for index in range(number):
    if index in faults:
      failure = found[index][-1]
      assert failure.task.index == index
      assert failure.cause == faulty_env.FAULTS[faults[index]]
      assert found[index][:-1] == expected[index][: len(found[index]) - 1]
    else:
      assert found[index] == expected[index]
  assert causes.total() == len(faults) == number // 20
  (memory, of_workers, *counts), *later = marks
  assert len(later) == 3
  for more, more_of_workers, *others in later:
    assert more < memory + 10 and more_of_workers < of_workers + 20
    assert others == counts
