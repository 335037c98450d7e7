"""Tests of the pool: order, faults, replacement of workers."""

import collections
import dataclasses
import os
import signal
import time

import faulty_env
import pools
import psutil
import pytest

from envs import base, messages, toy
from gigpo_jax import env_pool
from gigpo_jax.runtime import worker_process


@pytest.mark.parametrize('num_workers', [1, 2])
def test_workers_reply_as_this_process_does(num_workers: int):
  tasks = dict(enumerate([0, 0, 1, 1, 2, 2, 3, 3]))
  with (
    pools.make(0, 8) as local,
    pools.make(num_workers, 8, envs_per_group=2) as remote,
  ):
    expected = pools.play(local, tasks)
    assert pools.play(remote, tasks) == expected
  assert expected[0][-1].success and expected[0][-1].reward == 10


def test_128_environments_on_2_workers():
  with pools.make(2, 128, envs_per_group=8) as pool:
    history = pools.play(pool, {env: env // 8 for env in range(128)})
  assert all(h[-1].success for h in history.values())


def test_exception_ends_only_its_episode():
  with pools.make(env={'faults': {1: 'raise'}}) as pool:
    history = pools.play(pool, {0: 0, 1: 1, 2: 2})
    failure = history[1][-1]
    assert failure.task == base.Task('train', 1)
    assert failure.last_action == pools.RIGHT
    assert failure.reason.startswith('RuntimeError: the floor gave way (toy.py')
    assert history[0][-1].success and history[2][-1].success
    assert (pool.restarts, len(pool.failures)) == (0, 1)
    # The environment can be used again.
    assert pools.play(pool, {1: 2})[1][-1].success


def test_exception_in_reset_is_a_failure():
  with pools.make(env={'faults': {1: 'raise_at_reset'}}) as pool:
    history = pools.play(pool, {0: 0, 1: 1})
  assert 'the corridor is closed' in history[1][0].reason
  assert history[0][-1].success


@pytest.mark.parametrize('fault', ['exit', 'hang'])
def test_lost_worker_is_replaced_and_others_continue(fault: str):
  timeout = 30.0 if fault == 'exit' else 0.5
  with pools.make(
    2, 4, env={'faults': {7: fault}}, step_timeout_secs=timeout
  ) as pool:
    history = pools.play(pool, {0: 7, 1: 0, 3: 1})
    assert isinstance(history[0][-1], env_pool.Failure)
    expected = 'died (exit code 3)' if fault == 'exit' else 'longer than 0.5 s'
    assert expected in history[0][-1].reason
    assert history[1][-1].success and history[3][-1].success
    assert pool.restarts == 1
    assert pools.play(pool, {0: 0})[0][-1].success


@pytest.mark.parametrize('fault', ['exit', 'hang'])
def test_neighbours_of_a_lost_environment_are_replayed(fault):
  timeout = 30.0 if fault == 'exit' else 0.5
  tasks = {0: 0, 1: 8, 2: 1, 3: 0}
  with pools.make(0, 4) as pool:
    expected = pools.play(pool, tasks)
  env = {'faults': {8: fault}, 'fault_step': 1}
  with pools.make(1, 4, env=env, step_timeout_secs=timeout) as pool:
    history = pools.play(pool, tasks)
    assert [f.env for f in pool.failures] == [1]
    assert pool.restarts == 1
    # The number of replays is limited unless a worker dies.
    assert pool._replays[0] == (fault == 'hang')
    pool.reset(0, base.Task('train', 0))
    assert pool._replays[0] == 0
  assert isinstance(history[1][2], env_pool.Failure)
  for env_index in (0, 2, 3):
    assert history[env_index] == expected[env_index]


@pytest.mark.parametrize('num_workers', [0, 1])
def test_replies_to_an_earlier_episode_are_dropped(num_workers: int):
  with pools.make(num_workers, 1) as pool:
    for index in (0, 3):
      pool.reset(0, base.Task('train', index))
    ((env, observation),) = pool.receive()
    assert (env, observation.anchor) == (0, 'You are in room 3 of 5.')
    pool.step(0, pools.RIGHT)
    assert pools.gather(pool, {0})[0].success


def test_differing_replay_is_a_failure():
  env = {'faults': {8: 'exit', 0: 'moody'}, 'fault_step': 1}
  with pools.make(1, 3, env=env) as pool:
    history = pools.play(pool, {0: 8, 1: 0, 2: 1})
    assert history[2][-1].success
    assert 'differs when it is replayed' in history[1][-1].reason
    assert len(pool.failures) == 2
    # The next episode receives no reply of the failed episode.
    next_history = pools.play(pool, {1: 2})
  assert next_history[1][-1].success and len(next_history[1]) == 3


@pytest.mark.parametrize('fault', ['unpicklable', 'print'])
def test_unusual_replies(fault: str):
  with pools.make(env={'faults': {1: fault}}) as pool:
    history = pools.play(pool, {0: 0, 1: 1})
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
  with pools.make(0, 1) as pool:
    pool.reset(0, base.Task('train', 0))
    pool.step(0, pools.RIGHT)
    (_, _), (_, answer) = pool.receive()
  if reason:
    assert answer.cause == 'garbage'
    assert answer.reason.startswith('env.name=toy: ')
    assert reason in answer.reason
  else:
    assert isinstance(answer, base.StepResult)


def test_an_episode_that_is_over_takes_no_step():
  with pools.make(0, 1) as pool:
    assert pools.play(pool, {0: 3})[0][-1].done
    with pytest.raises(RuntimeError, match='env=0: no episode is running'):
      pool.step(0, pools.RIGHT)


def test_prepare_has_no_reply():
  with pools.make() as pool:
    pool.prepare(0, base.Task('train', 3))
    assert pools.play(pool, {0: 0})[0][-1].success


def test_idle_worker_is_recycled():
  # The number of the worker's environments is a lower bound of the limit.
  with pools.make(1, 2, max_resets_per_worker=1) as pool:
    first = pool._workers[0].pid
    pools.play(pool, {0: 0, 1: 0})
    assert pool._workers[0].pid == first
    pools.play(pool, {0: 0, 1: 0})
    assert pool._workers[0].pid != first
    assert pool.restarts == 0


def test_worker_is_recycled_while_episodes_are_running():
  # The episodes have different lengths, so the worker is never idle.
  with pools.make(0, 4) as pool:
    expected = [pools.play(pool, {0: index})[0] for index in range(12)]
  with pools.make(1, 4, max_resets_per_worker=5) as pool:
    histories = pools.play_async(pool, 48, range(12))
    assert 8 <= pool.recycled <= 10 and pool.restarts == 0
  assert histories == [expected[n % 12] for n in range(48)]


def test_timeout_of_receive():
  with pools.make(env={'faults': {0: 'hang'}}) as pool:
    _gather_one = pool.reset(0, base.Task('train', 0))
    assert _gather_one is None
    pools.gather(pool, {0})
    pool.step(0, pools.RIGHT)
    assert pool.receive(timeout_secs=0.2) == []


def test_a_time_limit_of_a_year():
  with pools.make(step_timeout_secs=3e7, reset_timeout_secs=3e7) as pool:
    assert len(pools.play(pool, {0: 0})[0]) > 1


def test_closing_twice_leaves_no_process():
  pool = pools.make(2)
  pids = [w.pid for w in pool._workers]
  pool.close()
  pool.close()
  assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize('fault', ['sys_exit', 'huge'])
def test_faults_that_keep_the_worker(fault: str):
  with pools.make(env={'faults': {0: fault}}) as pool:
    history = pools.play(pool, {0: 0, 1: 1})
    assert pool.restarts == 0
  assert history[1][-1].success
  if fault == 'huge':
    assert history[0][-1].success
  else:
    assert history[0][-1].reason.startswith('SystemExit: the walker left')


def test_error_in_prepare_is_reported_by_reset_only():
  with pools.make(env={'faults': {1: 'raise_at_prepare'}}) as pool:
    pool.reset(0, base.Task('train', 3))
    pools.gather(pool, {0})
    # The environment's running episode must continue: room 3 is next to the
    # goal.
    pool.prepare(0, base.Task('train', 1))
    pool.step(0, pools.RIGHT)
    assert pools.gather(pool, {0})[0].success
    assert pool.failures == []


def test_hung_worker_with_a_full_pipe_does_not_block_the_parent():
  # 64 x 16 kB are more than a pipe's buffer holds.
  envs = set(range(64))
  with pools.make(
    1, 64, env={'faults': {0: 'hang'}}, step_timeout_secs=0.5
  ) as pool:
    # All hang: the pool waits for the first five, one after another.
    for env in envs:
      pool.reset(env, base.Task('train', 0))
    pools.gather(pool, envs)
    start = time.monotonic()
    for env in envs:
      pool.step(env, 'x' * 16_000)
    answers = pools.gather(pool, envs)
    assert pool.restarts == 5
    assert time.monotonic() - start < 60
  assert {type(a) for a in answers.values()} == {env_pool.Failure}


def test_a_stopped_worker_with_much_to_read_does_not_block_the_parent():
  with pools.make(1, 1, step_timeout_secs=1) as pool:
    pool.reset(0, base.Task('train', 0))
    pools.gather(pool, {0})
    os.kill(pool._workers[0].pid, signal.SIGSTOP)
    pool.step(0, 'x' * 2_000_000)  # More than a pipe's buffer holds.
    answers = pools.gather(pool, {0})
  assert answers[0].cause == 'hung'


def test_a_large_reply_is_not_late_because_it_was_read_late():
  with pools.make(
    1, 1, env={'faults': {0: 'huge'}}, step_timeout_secs=0.5
  ) as pool:
    pool.reset(0, base.Task('train', 0))
    pools.gather(pool, {0})
    for _ in range(2):
      pool.step(0, pools.RIGHT)
      time.sleep(1)  # The trainer is busy for longer than the limit.
      (answer,) = pools.gather(pool, {0}).values()
      assert len(answer.observation.text) > 200_000
    assert pool.restarts == 0


def _step_twice(pool, pause_secs):
  """Returns the last answer, and how often a busy caller asked for answers."""
  pool.reset(0, base.Task('train', 0))
  pools.gather(pool, {0})
  rounds = 0
  for _ in range(2):
    pool.step(0, '')
    answers = []
    while not answers:
      time.sleep(pause_secs)
      answers = pool.receive(0.0)
      rounds += 1
  ((_, answer),) = answers
  return answer, rounds


def test_a_dripping_reply_is_late_although_the_caller_is_busy(monkeypatch):
  monkeypatch.setattr(env_pool, '_DRAIN_SECS', 0.0)
  with pools.make_faulty(
    {0: 'drip'}, num_envs=1, step_timeout_secs=0.5
  ) as pool:
    answer, _ = _step_twice(pool, 0.02)
  assert answer.cause == 'hung'


@pytest.mark.parametrize('drain_secs', [0.05, 0.0])
def test_a_busy_caller_reads_a_large_reply_in_time(monkeypatch, drain_secs):
  # Without time to drain it, the reply takes several times the limit.
  monkeypatch.setattr(env_pool, '_DRAIN_SECS', drain_secs)
  with pools.make_faulty(
    {0: 'large'}, num_envs=1, step_timeout_secs=0.4
  ) as pool:
    answer, rounds = _step_twice(pool, 0.3)
    assert len(answer.observation.prompt) == 10**6
    assert pool.restarts == 0
  assert (rounds < 5) == bool(drain_secs)


def test_large_messages_in_both_directions_do_not_deadlock():
  envs = set(range(32))
  with pools.make(1, 32, env={'faults': {0: 'huge'}}) as pool:
    for env in envs:
      pool.reset(env, base.Task('train', 0))
    pools.gather(pool, envs)
    for env in envs:
      pool.step(env, pools.RIGHT + 'x' * 100_000)
    answers = pools.gather(pool, envs)
  assert all(len(a.observation.text) > 200_000 for a in answers.values())


def test_time_limit_excludes_queueing():
  # Eight consecutive calls take longer than the limit of a single call.
  with pools.make(1, 8, env={'step_secs': 0.2}, step_timeout_secs=1.0) as pool:
    history = pools.play(pool, dict.fromkeys(range(8), 3))
  assert all(h[-1].success for h in history.values())


def test_time_limit_excludes_the_time_before_a_call():
  with pools.make(1, 1, env={'step_secs': 0.1}, step_timeout_secs=0.5) as pool:
    pool.reset(0, base.Task('train', 0))
    pools.gather(pool, {0})
    time.sleep(0.6)
    pool.step(0, pools.RIGHT)
    assert pools.is_running(pools.gather(pool, {0})[0])


def test_slow_caller_does_not_cause_a_timeout():
  with pools.make(1, 2, step_timeout_secs=0.3) as pool:
    for env in (0, 1):
      pool.reset(env, base.Task('train', 0))
    pools.gather(pool, {0, 1})
    for env in (0, 1):
      pool.step(env, pools.RIGHT)
    time.sleep(0.6)
    answers = pools.gather(pool, {0, 1})
  assert not pool.failures and len(answers) == 2


@pytest.mark.parametrize('num_workers', [0, 2])
@pytest.mark.parametrize(
  'name, kwargs, message',
  [
    ('toy', {'room': 3}, "TypeError: .* unexpected keyword argument 'room'"),
    ('toy', {'faults': {0: 'odd'}}, 'ValueError: faults=odd: must be one of'),
    ('alfred', {}, 'unknown; must be one of '),
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
  with pools.make(2, 4) as pool:
    for env in range(4):
      pool.reset(env, base.Task('train', 0))
    pools.gather(pool, set(range(4)))
    # The supervisor ends after the worker, whose pipe is closed by then.
    os.kill(pool._workers[0].pid, signal.SIGKILL)
    pool._workers[0].process.join()
    for env in range(4):
      pool.step(env, pools.RIGHT)
    answers = []
    while len(answers) < 4:
      answers += pool.receive()
    assert {env for env, _ in answers} == {0, 1, 2, 3}
    assert len({repr(answer) for _, answer in answers}) == 1
    assert answers[0][1].metrics['room'] == 1
    assert (pool.failures, pool.restarts) == ([], 1)
    assert pools.play(pool, {0: 0})[0][-1].success


def test_replays_after_deaths_between_calls_are_limited(monkeypatch):
  monkeypatch.setattr(env_pool, '_MAX_REPLAYS', 1)
  replies = []
  with pools.make(1, 1) as pool:
    pool.reset(0, base.Task('train', 0))
    pools.gather(pool, {0})
    for _ in range(2):
      os.kill(pool._workers[0].pid, signal.SIGKILL)
      pool._workers[0].process.join()
      pool.step(0, pools.RIGHT)
      replies.append(pools.gather(pool, {0})[0])
    assert pool.restarts == 2
  assert pools.is_running(replies[0])
  assert replies[1].cause == 'neighbours'


def test_groups_share_a_worker():
  with pools.make(2, 12, envs_per_group=3) as pool:
    workers = [pool._worker_index(env) for env in range(12)]
  assert workers == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
  # The last group may be smaller. No worker is without a group.
  with pools.make(4, 3, envs_per_group=2) as pool:
    assert [pool._worker_index(env) for env in range(3)] == [0, 0, 1]
    assert len(pool._workers) == 2


@pytest.mark.parametrize('fault', faulty_env.FAULTS)
def test_fault_ends_only_its_episode_and_is_reported(fault: str):
  cause = faulty_env.FAULTS[fault]
  timeout = 0.5 if fault == 'hang' else 30.0
  with pools.make(0, 4) as pool:
    expected = pools.play(pool, {0: 0, 1: 4, 2: 8})
  with pools.make_faulty({4: fault}, step_timeout_secs=timeout) as pool:
    history = pools.play(pool, {0: 0, 1: 4, 2: 8})
    assert [history[0], history[2]] == [expected[0], expected[2]]
    assert [f.cause for f in pool.failures] == ([cause] if cause else [])
    assert pool.restarts == (cause in ('died', 'hung'))
    if cause:
      assert str(history[1][-1]).startswith(f'{cause}: ')
      assert len(str(history[1][-1]).splitlines()) == 1
    else:
      assert history[1] == expected[1]
    # All environments remain usable.
    assert pools.play(pool, {0: 0, 1: 4 * 5, 2: 8})[1][-1].success


@pytest.mark.parametrize('fault', faulty_env.WORKER_FAULTS)
def test_worker_that_breaks_the_protocol_is_replaced(fault: str):
  cause, reason = faulty_env.WORKER_FAULTS[fault]
  with pools.make(0, 4) as pool:
    expected = pools.play(pool, {0: 0, 1: 4, 2: 8})
  with pools.make_faulty({4: fault}, step_timeout_secs=2.0) as pool:
    history = pools.play(pool, {0: 0, 1: 4, 2: 8})
    assert [history[0], history[2]] == [expected[0], expected[2]]
    assert [f.cause for f in pool.failures] == [cause]
    assert reason in pool.failures[0].reason and pool.restarts == 1


def test_replies_hold_plain_values():
  with pools.make_faulty({4: 'unreadable'}) as pool:
    history = pools.play(pool, {0: 4})[0]
  assert {type(a.action) for a in history[1:]} == {str}
  assert {type(a.reward) for a in history[1:]} == {float}


@pytest.mark.parametrize(
  'name',
  ['anchor', 'text', 'task', 'actions[1]', 'actions', 'action', 'final_anchor'],
)
def test_texts_other_than_prompts_are_bounded(monkeypatch, name: str):
  def reply(count: int) -> bytes:
    texts = collections.defaultdict(str, {name: 'x' * count})
    observation = base.Observation(
      prompt='x' * (messages.MAX_TEXT_CHARS + 1),
      short_prompt='',
      anchor=texts['anchor'],
      text=texts['text'],
      task=texts['task'],
      actions=('', texts['actions[1]'])
      if name != 'actions'
      else ('x' * (count // 2), 'x' * (count - count // 2)),
    )
    result = base.StepResult(
      observation,
      0.0,
      True,
      texts['action'],
      False,
      False,
      final_anchor=texts['final_anchor'],
    )
    return messages.encode(1, 'step', result)

  status, _ = messages.decode(
    reply(messages.MAX_TEXT_CHARS)[messages.HEADER.size :], 'step'
  )
  assert status == messages.REPLY
  with pytest.raises(messages.UnusableReplyError, match='character') as error:
    reply(messages.MAX_TEXT_CHARS + 1)
  assert name in str(error.value)
  # The trainer checks again.
  with monkeypatch.context() as patch:
    patch.setattr(messages, 'MAX_TEXT_CHARS', 2 * messages.MAX_TEXT_CHARS)
    forged = reply(messages.MAX_TEXT_CHARS)
  status, reason = messages.decode(forged[messages.HEADER.size :], 'step')
  assert status == messages.GARBAGE and name in reason


def test_the_number_of_actions_is_bounded():
  def reply(count: int) -> bytes:
    observation = base.Observation('', '', '', '', actions=('',) * count)
    return messages.encode(1, 'reset', observation)

  body = reply(messages.MAX_ACTIONS)[messages.HEADER.size :]
  assert messages.decode(body, 'reset')[0] == messages.REPLY
  with pytest.raises(
    messages.UnusableReplyError, match='^16,385 actions of a turn; at most 16,3'
  ):
    reply(messages.MAX_ACTIONS + 1)


def test_exception_messages_are_truncated_and_cleaned():
  with pools.make_faulty({4: 'garble'}) as pool:
    failure = pools.play(pool, {0: 4})[0][-1]
  assert failure.reason.startswith('RuntimeError: [2Jlong \\ud800xxx')
  assert failure.reason.isprintable()
  assert len(failure.reason) < 2200
  assert failure.reason.endswith(')') and '(faulty_env.py:' in failure.reason


def test_worker_over_the_memory_limit_is_recycled():
  leaks = dict.fromkeys(range(8), 'leak')
  with pools.make_faulty(leaks, max_worker_mib=10_000) as pool:
    start = psutil.Process(pool._workers[0].pid).memory_info().rss
  with pools.make_faulty(leaks, max_worker_mib=start / 2**20 + 40) as pool:
    first = pool._workers[0].pid
    for _ in range(6):
      history = pools.play(pool, {0: 0, 1: 1, 2: 2, 3: 3})
      assert all(h[-1].success for h in history.values())
    assert pool.recycled >= 1 and (pool.restarts, pool.failures) == (0, [])
    assert pool._workers[0].pid != first


def test_many_deaths_do_not_fail_other_episodes():
  # More deaths than the maximum number of replays after hangs.
  dying = {index: 'exit' for index in range(4, 100, 8)}
  with pools.make_faulty(dying, num_workers=1, num_envs=26) as pool:
    tasks = dict(enumerate([0, 1, *dying, *dying]))
    history = pools.play(pool, tasks)
    assert pool.restarts == 24
  assert history[0][-1].success and history[1][-1].success


def test_replaced_workers_leak_no_file_descriptors():
  process = psutil.Process()
  with pools.make(1, 1, max_resets_per_worker=1) as pool:
    pools.play(pool, {0: 0})
    open_files = process.num_fds()
    for index in range(12):
      pools.play(pool, {0: index % 4})
    assert pool.recycled >= 10
    # On a busy machine, dismissed workers take a while to exit.
    for dismissed, _ in pool._dismissed:
      dismissed.join(worker_process.CLOSE_TIMEOUT_SECS)
    pool._reap()
    assert process.num_fds() <= open_files


def test_unknown_environments_are_refused():
  with pools.make(0, 2) as pool:
    for method in (pool.reset, pool.prepare):
      with pytest.raises(IndexError, match='env=2: .* the pool has 2 env'):
        method(2, base.Task('train', 0))


def test_a_failure_that_was_not_received_takes_a_step():
  with pools.make(0, 1, env={'faults': {1: 'raise_at_reset'}}) as pool:
    pool.reset(0, base.Task('train', 1))
    pool.step(0, pools.RIGHT)
    ((_, failure),) = pool.receive()
  assert failure.cause == 'raised'


def test_a_failure_names_the_last_response():
  env, last = {'faults': {0: 'raise'}, 'fault_step': 1}, 'x' * 99 + 'last'
  with pools.make(0, 1, env=env) as pool:
    pool.reset(0, base.Task('train', 0))
    for response in ('first', last):
      pool.step(0, response)
    *_, (_, failure) = pool.receive()
    assert failure.last_action == last
    assert str(failure).endswith(f', after {last[-60:]!r}')
    with pytest.raises(RuntimeError, match='receive: no call is pending'):
      pool.receive()


def test_a_death_in_an_earlier_episode_does_not_fail_the_next():
  with pools.make(1, 1, env={'faults': {7: 'exit'}}) as pool:
    pool.reset(0, base.Task('train', 7))
    pools.gather(pool, {0})
    pool.step(0, pools.RIGHT)
    assert pools.play(pool, {0: 0})[0][-1].success
    assert (pool.failures, pool.restarts) == ([], 1)


def test_a_call_after_a_death_does_not_excuse_it():
  with pools.make(1, 2, env={'faults': {7: 'exit'}}) as pool:
    for env, index in enumerate((7, 0)):
      pool.reset(env, base.Task('train', index))
    pools.gather(pool, {0, 1})
    pool.step(0, pools.RIGHT)
    pool._workers[0].process.join()
    pool.step(1, pools.RIGHT)
    answers = pools.gather(pool, {0, 1})
    assert answers[0].cause == 'died' and pools.is_running(answers[1])
    assert pool.restarts == 1


def test_a_replacement_that_cannot_start_fails_its_episodes():
  with pools.make(1, 2, env={'faults': {7: 'exit'}}) as pool:
    for env, index in enumerate((0, 7)):
      pool.reset(env, base.Task('train', index))
    pools.gather(pool, {0, 1})
    kwargs, pool._kwargs = pool._kwargs, {'room': 3}
    pool.step(1, pools.RIGHT)
    answers = pools.gather(pool, {0, 1})
    assert (answers[0].cause, answers[1].cause) == ('raised', 'died')
    assert 'unexpected keyword' in answers[0].reason
    # The next call starts another worker.
    pool._kwargs = kwargs
    assert pools.play(pool, {0: 0})[0][-1].success
    assert pool.restarts == 2


def test_a_starting_worker_is_not_recycled():
  with pools.make(1, 1, max_resets_per_worker=1) as pool:
    for _ in range(4):
      pool.reset(0, base.Task('train', 0))
    pools.gather(pool, {0})
    assert pool.recycled == 1


def test_resumed_episodes_count_as_resets():
  task = base.Task('train', 0)
  with pools.make(1, 1, max_resets_per_worker=1) as pool:
    pool.reset(0, task)
    first = pools.gather(pool, {0})[0]
    for _ in range(2):
      pool.resume(0, task, [], [first])
      pool.step(0, pools.RIGHT)
      assert pools.is_running(pools.gather(pool, {0})[0])
    assert pool.recycled == 2


def test_a_worker_is_recycled_before_it_prepares():
  with pools.make(1, 1, max_resets_per_worker=1) as pool:
    pools.play(pool, {0: 0})
    pool.prepare(0, base.Task('train', 1))
    assert pool.recycled == 1


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
  with pools.make(0, 1, env={'num_tasks': num_episodes}) as pool:
    expected = [
      pools.play(pool, {0: index})[0] for index in range(num_episodes)
    ]
  parent, samples = psutil.Process(), []
  with pools.make(
    2, envs, name='faulty', env=env, step_timeout_secs=1.0
  ) as pool:

    def record(num_started: int) -> None:
      if num_started % 500 == 0 and num_started > len(samples) * 500:
        workers = [psutil.Process(w.pid) for w in pool._workers]
        samples.append(
          (
            parent.memory_info().rss / 2**20,
            sum(w.memory_info().rss / 2**20 for w in workers),
            len(parent.children(recursive=True)),
            parent.num_fds(),
          )
        )

    histories = pools.play_async(
      pool, num_episodes, range(num_episodes), record
    )
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
