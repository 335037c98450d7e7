"""Tests of the turn loop with the toy corridor and a scripted sampler."""

import dataclasses
import re
import time
import types

import jax
import numpy as np
import pools
import pytest
import reference

from envs import base, toy
from gigpo_jax import (
  env_pool,
  mesh,
  metrics,
  reward_functions,
  rollout,
  sampler,
  tokenizer,
)
from gigpo_jax.models import qwen
from gigpo_jax.runtime import console, distributed

RIGHT = '<think>on</think><action>right</action>'
LEFT = '<think>back</think><action>left</action>'


class ScriptedSampler:
  """A sampler whose completions depend on member and step; records requests.

  A step completes at most `at_once` requests, the latest first.
  """

  def __init__(self, text: tokenizer.Tokenizer, at_once: int = 100):
    self.stats = sampler.Stats()
    self._text, self._at_once = text, at_once
    self._queue: list[tuple[int, sampler.Request]] = []
    self.waves: list[list[tuple[int, ...]]] = []
    # Sampling options by stream, in the order of the requests.
    self.requests: dict[tuple[int, ...], sampler.Sampling] = {}
    self.compilations = 0
    self.is_shared, self.text_size = False, 0
    self._tickets = 0

  @property
  def busy(self) -> bool:
    return bool(self._queue)

  def load(self, params, base=None, *, trace=False):
    del params, base, trace

  def finish(self):
    assert not self.busy

  def end_conversation(self, conversation):
    del conversation

  def take_stats(self):
    return sampler.Stats()

  def submit(self, request) -> int:
    self._tickets += 1
    self.requests[request.stream] = request.sampling
    self._queue.append((self._tickets, request))
    return self._tickets

  def step(self):
    if not self._queue:
      return []
    completed = self._queue[-self._at_once :]
    del self._queue[-self._at_once :]
    self.waves.append([request.stream for _, request in completed])
    return [(ticket, self._complete(request)) for ticket, request in completed]

  def _complete(self, request) -> sampler.Completion:
    _, _, _, member, step = request.stream
    response = LEFT if (member, step) == (1, 0) else RIGHT
    (ids,) = self._text.encode([response])
    ids = np.concatenate([ids, self._text.end_of_turn])
    log_probs = -np.arange(len(ids), dtype=np.float32)
    reason = 'length' if response == LEFT else 'stop'
    return sampler.Completion(ids, log_probs, log_probs, reason)


@pytest.fixture(name='text', scope='module')
def fixture_text(tmp_path_factory):
  directory = str(tmp_path_factory.mktemp('tokenizer'))
  texts = [RIGHT, LEFT, 'Step 1. You are in room 2 of 5. Go left or right.']
  tokenizer.train(texts * 9, directory, vocab_size=330)
  return tokenizer.Tokenizer(directory)


def _run(  # noqa: PLR0913
  text,
  *,
  num_envs=4,
  num_workers=0,
  tasks=(0, 3),
  faults=None,
  fault_step=0,
  schedule='lockstep',
  at_once=100,
  step_timeout_secs=30.0,
  scorer=None,
  **options,
):
  script = ScriptedSampler(text, at_once)
  with env_pool.EnvPool(
    'toy',
    {'faults': faults or {}, 'fault_step': fault_step},
    num_envs=num_envs,
    num_workers=num_workers,
    step_timeout_secs=step_timeout_secs,
    reset_timeout_secs=30,
    envs_per_group=2,
  ) as pool:
    runner = rollout.EpisodeRunner(
      pool,
      script,
      text,
      200,
      'error',
      schedule,
      scorer=scorer,
      task_type=lambda task: f'type{task.index}',
      **options,
    )
    trajectories = runner.run(
      {},
      [base.Task('train', index) for index in tasks],
      episodes_per_group=2,
      stream=(rollout.TRAIN, 6),
      sampling=sampler.Sampling(),
    )
  return trajectories, script


class Notice(console.EndlessNotice):
  """Counts checks and records when it starts again."""

  def __init__(self):
    super().__init__()
    self.lengths, self.checks, self.restarts = [], 0, []

  def restart(self):
    self.restarts.append(self.checks)

  def check(self, reason):
    self.checks += 1
    self.lengths.append(int(re.search(r'(\d+) turns', reason())[1]))


def test_the_notice_knows_the_longest_episode_and_every_end(text):
  notice = Notice()
  trajectories, _ = _run(text, endless_notice=notice)
  turns = [len(t.steps) for t in trajectories]
  # Lockstep: a check of a round of turns sees the results of the one before.
  assert notice.lengths[: max(turns)] == list(range(max(turns)))
  # The start of the rollout, and the end of each episode.
  assert notice.restarts == [0, *sorted(turns)]


def test_a_line_reports_that_no_episode_ends(monkeypatch, capsys):
  times = iter([0, 59, 60, 100, 179, 180, 200, 400, 440])
  monkeypatch.setattr(console.time, 'monotonic', lambda: next(times))
  notice = console.EndlessNotice()  # At 0 s.
  for reason in ('early', 'the reason', 'soon after'):
    notice.check(lambda reason=reason: reason)
  line = 'no episode has ended for 60 s; the reason\n'
  assert capsys.readouterr().out == line
  notice.check(lambda: 'twice as long')
  assert 'for 120 s; twice as long' in capsys.readouterr().out
  notice.restart()  # An episode ends at 180 s.
  for _ in range(2):
    notice.check(lambda: 'early')
  assert not capsys.readouterr().out
  notice.check(lambda: 'late')
  assert 'for 240 s; late' in capsys.readouterr().out


class Reasons(console.EndlessNotice):
  """Records the reasons that the rollout gives."""

  def __init__(self):
    super().__init__()
    self.reasons = set()

  def check(self, reason):
    self.reasons.add(reason())


def test_the_reason_names_the_turns_or_a_slow_environment(text, monkeypatch):
  notice = Reasons()
  _run(text, endless_notice=notice)
  assert all('done=True' in r and 'env.max_steps' in r for r in notice.reasons)
  # No wait, so that a reset is still pending at the first check.
  monkeypatch.setattr(rollout, '_WAIT_SECS', 0.0)
  slow = Reasons()
  _run(text, endless_notice=slow, schedule='async', num_workers=1)
  assert any('has not answered for 0 s' in r for r in slow.reasons)
  assert any('pool.reset_timeout_secs' in r for r in slow.reasons)


def test_tokens_streams_rewards_and_order(text):
  trajectories, script = _run(text)
  assert [(t.group, t.member, t.task_type) for t in trajectories] == [
    (0, 0, 'type0'),
    (0, 1, 'type0'),
    (1, 0, 'type3'),
    (1, 1, 'type3'),
  ]
  # Corridor of 5: from room 0 four steps; the detour left of member 1 costs
  # one from room 0 (a wall) and two from room 3.
  assert [len(t.steps) for t in trajectories] == [4, 5, 1, 3]
  assert [t.reward for t in trajectories] == [10.0] * 4
  step = trajectories[3].steps[0]
  (expected,) = text.encode([LEFT])
  expected = np.concatenate([expected, text.end_of_turn])
  np.testing.assert_array_equal(step.completion_ids, expected)
  assert [s.truncated for s in trajectories[3].steps] == [True, False, False]
  (prompt,) = text.render(['Step 0. You are in room 3 of 5. Go left or right.'])
  np.testing.assert_array_equal(step.prompt_ids, prompt)
  assert step.anchor == 'You are in room 3 of 5.'
  # The walk 3 -> 2 -> 3: the same state twice.
  assert trajectories[3].steps[2].anchor == step.anchor
  # (domain, iteration, task, member, step) of episodes that have not ended.
  assert script.waves[0] == [
    (0, 6, 0, 0, 0),
    (0, 6, 0, 1, 0),
    (0, 6, 3, 0, 0),
    (0, 6, 3, 1, 0),
  ]
  assert [len(wave) for wave in script.waves] == [4, 3, 3, 2, 1]


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('prompt_overflow', 'drop'),
    ('schedule', 'sync'),
    ('earlier_thinking', 'remove'),
  ],
)
def test_unknown_names_are_refused(field, value):
  options = {'prompt_overflow': 'error', field: value}
  with pytest.raises(ValueError, match=f'^{field}={value}: unknown; must be '):
    rollout.EpisodeRunner(None, None, None, 1, **options)


def test_metrics_by_hand():
  pool = types.SimpleNamespace(restarts=1, recycled=2)
  engine = types.SimpleNamespace(compilations=3, text_size=5)
  runner = rollout.EpisodeRunner(pool, engine, None, 1, 'error')
  runner.clock = rollout.RolloutClock(
    env_wait_secs=1.0, env_spans=[(0.0, 1.0), (1.0, 4.0)], total_secs=10.0
  )
  runner.stats = sampler.Stats(
    prefill_tokens=30,
    padded_tokens=40,
    reused_tokens=10,
    decode_tokens=90,
    slot_steps=80,
    active_steps=60,
    idle_secs=0.5,
  )
  expected = {
    'prefill_tokens': 30,
    'reused_tokens': 10,
    'prefill_tokens_per_sec': 3,
    'decode_tokens_per_sec': 9,
    'slot_occupancy': 0.75,
    'tokens_per_step': 1.5,
    'shared_prompt_share': 0.25,
    'prefill_padding_share': 0.25,
    'host_wait_share': 0.05,
    'env_wait_share': 0.1,
    'env_secs_per_step': 2,
    'env_restarts': 1,
    'env_recycled': 2,
    'compilations': 3,
  }
  assert runner.metrics() == pytest.approx(
    {f'rollout/{name}': value for name, value in expected.items()}
  )


def test_steps_record_whether_their_prompt_was_shortened(text):
  (prompt,) = text.render(['Step 0. You are in room 3 of 5. Go left or right.'])
  for limit in (len(prompt), len(prompt) - 1):
    with pools.make(0, 1) as pool:
      runner = rollout.EpisodeRunner(
        pool, ScriptedSampler(text), text, limit, 'truncate_left'
      )
      (episode,) = runner.run(
        {},
        [base.Task('train', 3)],
        episodes_per_group=1,
        stream=(rollout.TRAIN, 0),
        sampling=sampler.Sampling(),
      )
    (step,) = episode.steps
    assert len(step.prompt_ids) == limit
    assert step.prompt_shortened == (limit < len(prompt))


@pytest.mark.parametrize('schedule', rollout.SCHEDULES)
@pytest.mark.parametrize(
  ('num_envs', 'num_workers', 'at_once'),
  [(1, 0, 9), (3, 0, 9), (3, 0, 1), (4, 1, 2), (4, 2, 1)],
)
def test_scheduling_changes_no_trajectory(
  text, num_envs, num_workers, at_once, schedule
):
  expected, _ = _run(text)
  actual, _ = _run(
    text,
    num_envs=num_envs,
    num_workers=num_workers,
    at_once=at_once,
    schedule=schedule,
  )
  for a, b in zip(expected, actual, strict=True):
    assert (a.task, a.group, a.member) == (b.task, b.group, b.member)
    assert [s.result for s in a.steps] == [s.result for s in b.steps]
    for a_step, b_step in zip(a.steps, b.steps, strict=True):
      np.testing.assert_array_equal(a_step.prompt_ids, b_step.prompt_ids)
      np.testing.assert_array_equal(
        a_step.completion_ids, b_step.completion_ids
      )


@pytest.mark.parametrize('schedule', rollout.SCHEDULES)
@pytest.mark.parametrize('fault', ['raise', 'exit', 'hang', 'raise_at_reset'])
def test_failed_episodes_are_marked_and_others_continue(text, fault, schedule):
  # With one worker, all environments share it.
  trajectories, _ = _run(
    text,
    num_workers=1,
    faults={3: fault},
    schedule=schedule,
    step_timeout_secs=1.0 if fault == 'hang' else 30.0,
  )
  assert [bool(t.failure) for t in trajectories] == [False, False, True, True]
  assert [t.success for t in trajectories] == [True, True, False, False]
  values = metrics.summarize(trajectories)
  assert values['train/failed_episodes'] == 2
  assert values['train/success_rate'] == 0.5


@pytest.mark.parametrize('schedule', rollout.SCHEDULES)
def test_reward_functions_score_episodes_while_others_run(text, schedule):
  options = reward_functions.Options(
    ('reward_examples:solved', 'reward_examples:Faulty'), num_workers=1
  )
  sections = {'faulty': {'faults': [(3, 'raise')]}}
  plain, _ = _run(text, tasks=(0, 3, 4), schedule=schedule)
  with reward_functions.Scorer(options, sections) as scorer:
    scored, _ = _run(text, tasks=(0, 3, 4), schedule=schedule, scorer=scorer)
  assert [t.cause for t in scored] == ['', '', 'raised', 'raised', '', '']
  for before, after in zip(plain, scored, strict=True):
    if not after.failure:
      assert before.success and after.reward == before.reward + 2.5
      assert before.steps[0].result.reward == after.steps[0].result.reward


def _recording_scorer():
  """Returns a scorer that changes nothing, and a list of what it received."""
  submitted = []
  scorer = types.SimpleNamespace(
    submit=submitted.append,
    poll=lambda: None,
    finish=lambda: None,
    apply=lambda ticket, episode: episode,
  )
  return scorer, submitted


@pytest.mark.parametrize(
  ('purpose', 'expected'),
  [(rollout.TRAIN, 1), (rollout.EVALUATION, 0), (rollout.CONTINUATION, 0)],
)
def test_reward_functions_score_training_episodes_only(text, purpose, expected):
  scorer, submitted = _recording_scorer()
  with pools.make(0, 1) as pool:
    rollout.EpisodeRunner(
      pool, ScriptedSampler(text), text, 200, 'error', scorer=scorer
    ).run(
      {},
      [base.Task('train', 3)],
      episodes_per_group=1,
      stream=(purpose, 0),
      sampling=sampler.Sampling(),
    )
  assert len(submitted) == expected


def test_reward_functions_score_paused_episodes_at_their_end(text):
  scorer, submitted = _recording_scorer()
  batch = rollout.EpisodeBatch(
    [base.Task('train', 0)],
    1,
    (rollout.TRAIN, 0),
    sampler.Sampling(),
    pause_after=1,
  )
  with pools.make(0, 1) as pool:
    runner = rollout.EpisodeRunner(
      pool, ScriptedSampler(text), text, 200, 'error', scorer=scorer
    )
    ((paused,),) = runner.run_batches({}, [batch])
    assert paused.is_paused and not submitted
    batch = dataclasses.replace(
      batch, tasks=(), paused=[paused], pause_after=None
    )
    ((episode,),) = runner.run_batches({}, [batch])
  assert [len(e.steps) for e in submitted] == [len(episode.steps)]
  assert episode.success


class _LosingPool:
  """Ends episodes with their first step; loses env 2 while a policy samples."""

  num_envs = 3

  def __init__(self):
    self.steps, self._replies = [], []
    self._observation = toy.Env().reset(base.Task('train', 0))

  def reset(self, env, task):
    del task
    self._replies.append((env, self._observation))

  def step(self, env, response, turn):
    del response, turn
    result = base.StepResult(None, 1.0, True, 'right', True, True)
    self._replies.append((env, result))
    if not self.steps:
      lost = env_pool.Failure(2, base.Task('train', 2), '', 'died', 'lost')
      self._replies.append((2, lost))
    self.steps.append(env)

  def receive(self, timeout_secs):
    del timeout_secs
    replies, self._replies = self._replies, []
    return replies


class _OrderedSampler(ScriptedSampler):
  """Completes one request in a step, the oldest first."""

  def step(self):
    oldest = self._queue[:1]
    del self._queue[:1]
    return [(ticket, self._complete(request)) for ticket, request in oldest]


def test_a_late_response_is_not_for_the_next_episode(text):
  # The fourth episode starts in env 2 before the third one's response is there.
  pool = _LosingPool()
  runner = rollout.EpisodeRunner(
    pool, _OrderedSampler(text), text, 200, 'error', 'async'
  )
  trajectories = runner.run(
    {},
    [base.Task('train', index) for index in range(4)],
    episodes_per_group=1,
    stream=(rollout.TRAIN, 6),
    sampling=sampler.Sampling(),
  )
  assert [t.failure for t in trajectories] == ['', '', 'died: lost', '']
  assert [len(t.steps) for t in trajectories] == [1, 1, 0, 1]
  assert pool.steps == [0, 1, 2]


@pytest.mark.parametrize('schedule', rollout.SCHEDULES)
def test_episodes_may_fail_after_their_observation(text, schedule):
  # Task 4 kills the worker; the replay of task 0 then differs.
  trajectories, _ = _run(
    text,
    tasks=(0, 4, 1),
    num_workers=1,
    num_envs=6,
    faults={0: 'moody', 4: 'exit'},
    fault_step=1,
    schedule=schedule,
  )
  failed = [bool(t.failure) for t in trajectories]
  assert failed[2:] == [True, True, False, False]
  if schedule == 'lockstep':  # With `async`, they may have ended before.
    assert all('differs when it is' in t.failure for t in trajectories[:2])


def _assert_same_episodes(expected, actual) -> None:
  for a, b in zip(expected, actual, strict=True):
    assert (a.group, a.member) == (b.group, b.member)
    assert len(a.steps) == len(b.steps)
    for a_step, b_step in zip(a.steps, b.steps, strict=True):
      np.testing.assert_array_equal(a_step.prompt_ids, b_step.prompt_ids)
      np.testing.assert_array_equal(
        a_step.completion_ids, b_step.completion_ids
      )
      assert a_step.response == b_step.response
      assert a_step.result == b_step.result


@pytest.mark.slow
def test_schedules_sample_the_same_tokens_with_a_real_model(text):
  config = qwen.QwenConfig(
    vocab_size=text.vocab_size,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype='float32',
    remat='none',
  )
  params = reference.init(config, jax.random.key(0))
  params['embed'] *= 12
  results = {}
  for schedule, slots, workers, draft_tokens in (
    ('lockstep', 16, 0, 0),
    ('async', 16, 2, 0),
    ('async', 8, 0, 0),
    ('async', 8, 2, 3),
  ):
    engine = sampler.Sampler(
      config,
      mesh.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
      seed=3,
      prompt_buckets=(64, 128),
      batch_buckets=(slots,),
      max_completion_tokens=20,
      stop_ids=text.stop_ids,
      vocab_size=text.vocab_size,
      decode_tokens=slots // 4,
      draft_tokens=draft_tokens,
    )
    with env_pool.EnvPool(
      'toy',
      {'step_secs': 0.01 * bool(workers), 'step_tail': 1.0},
      num_envs=12,
      num_workers=workers,
      step_timeout_secs=60,
      reset_timeout_secs=60,
    ) as pool:
      runner = rollout.EpisodeRunner(pool, engine, text, 128, 'error', schedule)
      results[schedule, slots, draft_tokens] = runner.run(
        params,
        [base.Task('train', index) for index in range(4)],
        episodes_per_group=4,
        stream=(rollout.TRAIN, 1),
        sampling=sampler.Sampling(),
      )
    values = runner.metrics()
    assert values['rollout/slot_occupancy'] > 0  # Low on a busy machine.
    assert 0 < values['rollout/shared_prompt_share'] < 1
    assert ('rollout/tokens_per_step' in values) == (draft_tokens > 0)
  # Random responses repeat some pairs of tokens.
  assert values['rollout/tokens_per_step'] > 1
  expected, *others = results.values()
  for actual in others:
    _assert_same_episodes(expected, actual)


@pytest.mark.parametrize('processes', [2, 3, 8])
def test_processes_share_the_episodes_of_a_group(text, monkeypatch, processes):
  expected, _ = _run(text)
  parts = []
  for process in range(processes):
    monkeypatch.setattr(jax, 'process_index', lambda n=process: n)
    monkeypatch.setattr(jax, 'process_count', lambda: processes)
    # There are no other processes to gather from.
    monkeypatch.setattr(distributed, 'all_gather_objects', lambda x: [x])
    part, _ = _run(text)
    assert len(part) in (4 // processes, -(-4 // processes))
    parts += part
  _assert_same_episodes(expected, parts)


@pytest.mark.parametrize(
  ('process', 'prepared'),
  # 3 groups of 4 episodes on 2 processes of 6 environments each.
  [(0, [(0, 'a'), (4, 'b')]), (1, [(0, 'b'), (2, 'c')])],
)
@pytest.mark.parametrize('num_before', [0, 3])
def test_prefetch_prepares_the_first_environment_of_each_group(
  monkeypatch, process, prepared, num_before
):
  monkeypatch.setattr(jax, 'process_index', lambda: process)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  calls = []
  pool = types.SimpleNamespace(
    num_envs=6, prepare=lambda env, task: calls.append((env, task))
  )
  rollout.EpisodeRunner(pool, None, None, 1, 'error').prefetch(
    list('abc'), 4, num_before
  )
  assert calls == [((env + num_before) % 6, task) for env, task in prepared]


def test_turn_limit_ends_episodes_in_the_pool(text):
  script = ScriptedSampler(text, 100)
  with env_pool.EnvPool(
    'toy',
    {},
    num_envs=4,
    num_workers=0,
    step_timeout_secs=30,
    reset_timeout_secs=30,
    envs_per_group=2,
  ) as pool:
    runner = rollout.EpisodeRunner(pool, script, text, 200, 'error', 'async')
    for iteration in range(2):
      trajectories = runner.run(
        {},
        [base.Task('train', index) for index in (0, 3)],
        episodes_per_group=2,
        stream=(rollout.TRAIN, iteration),
        sampling=sampler.Sampling(),
        max_turns=2,
      )
      assert max(len(t.steps) for t in trajectories) == 2
      assert not all(t.steps[-1].result.done for t in trajectories)
      # The episodes are over, so a lost worker causes no replay of them.
      for env in range(4):
        with pytest.raises(RuntimeError, match='no episode is running'):
          pool.step(env, 'left')


@pytest.mark.parametrize('schedule', rollout.SCHEDULES)
def test_batches_that_run_together_have_the_episodes_of_separate_runs(
  text, schedule
):
  greedy = sampler.Sampling(temperature=0.0)
  batches = [
    rollout.EpisodeBatch(
      [base.Task('train', index) for index in (0, 3)],
      2,
      (rollout.TRAIN, 6),
      sampler.Sampling(),
      max_turns=3,
    ),
    rollout.EpisodeBatch(
      [base.Task('valid', index) for index in (0, 1, 4)],
      1,
      (rollout.EVALUATION, 0),
      greedy,
    ),
  ]

  def run(*chosen):
    script = ScriptedSampler(text, at_once=2)
    with pools.make(0, 4) as pool:
      runner = rollout.EpisodeRunner(pool, script, text, 200, 'error', schedule)
      played = runner.run_batches({}, chosen)
    return played, script.requests

  separate = [run(batch) for batch in batches]
  together, requests = run(*batches)
  for (played,), actual in zip(
    [played for played, _ in separate], together, strict=True
  ):
    _assert_same_episodes(played, actual)
    assert [t.task for t in actual] == [t.task for t in played]
  # The turn limit is that of training only.
  assert [max(len(t.steps) for t in part) for part in together] == [3, 4]
  expected = separate[0][1] | separate[1][1]
  assert requests == expected
  assert {options for stream, options in requests.items() if stream[0]} == {
    greedy
  }
  # The evaluation starts before the training episodes end.
  first = next(n for n, stream in enumerate(requests) if stream[0])
  assert any(not stream[0] for stream in list(requests)[first:])


def _run_in_parts(text, schedule: str, **pool_options):
  """Plays two turns of each episode per rollout; returns them and requests."""
  new = rollout.EpisodeBatch(
    [base.Task('train', index) for index in (0, 3)],
    2,
    (rollout.TRAIN, 6),
    sampler.Sampling(),
    pause_after=2,
  )
  played, requests, rollouts = {}, {}, 0
  batch = new
  while batch.tasks or batch.paused:
    script = ScriptedSampler(text, at_once=2)
    with pools.make(**pool_options) as pool:  # A new pool, as after a kill.
      runner = rollout.EpisodeRunner(pool, script, text, 200, 'error', schedule)
      (episodes,) = runner.run_batches({}, [batch])
      for env in range(pool.num_envs):
        with pytest.raises(RuntimeError, match='no episode is running'):
          pool.step(env, RIGHT)
    assert not requests.keys() & script.requests.keys()
    requests |= script.requests
    played |= {(t.group, t.member): t for t in episodes}
    paused = [t for t in episodes if t.is_paused]
    batch = dataclasses.replace(new, tasks=(), paused=paused)
    rollouts += 1
  assert rollouts == 3
  return [played[key] for key in sorted(played)], requests


def test_a_lower_limit_of_turns_ends_a_paused_episode(text):
  new = rollout.EpisodeBatch(
    [base.Task('train', 0)],
    2,
    (rollout.TRAIN, 6),
    sampler.Sampling(),
    pause_after=2,
  )
  with pools.make() as pool:
    script = ScriptedSampler(text, 100)
    runner = rollout.EpisodeRunner(pool, script, text, 200, 'error')
    (paused,) = runner.run_batches({}, [new])
    assert [(len(t.steps), t.is_paused) for t in paused] == 2 * [(2, True)]
    # As after a resume with another config.
    rest = dataclasses.replace(
      new, tasks=(), paused=paused, pause_after=None, max_turns=1
    )
    (episodes,) = runner.run_batches({}, [rest])
  assert [(len(t.steps), t.is_paused) for t in episodes] == 2 * [(3, False)]


@pytest.mark.parametrize('schedule', rollout.SCHEDULES)
@pytest.mark.parametrize(('num_workers', 'num_envs'), [(0, 4), (0, 1), (1, 3)])
def test_paused_episodes_continue_as_if_they_had_not_paused(
  text, schedule, num_workers, num_envs
):
  expected, script = _run(text)
  actual, requests = _run_in_parts(
    text, schedule, num_workers=num_workers, num_envs=num_envs
  )
  _assert_same_episodes(expected, actual)
  for a, b in zip(expected, actual, strict=True):
    assert (a.task, a.success, b.is_paused) == (b.task, b.success, False)
    for one, other in zip(a.steps, b.steps, strict=True):
      np.testing.assert_array_equal(one.log_probs, other.log_probs)
  assert requests == script.requests


def test_an_episode_that_differs_when_it_continues_fails(text):
  batch = rollout.EpisodeBatch(
    [base.Task('train', 0)],
    2,
    (rollout.TRAIN, 6),
    sampler.Sampling(),
    pause_after=2,
  )
  for faults in ({}, {0: 'moody'}):
    script = ScriptedSampler(text)
    env = {'faults': faults, 'fault_step': 1}
    with pools.make(env=env) as pool:
      runner = rollout.EpisodeRunner(pool, script, text, 200, 'error')
      (episodes,) = runner.run_batches({}, [batch])
    batch = dataclasses.replace(batch, tasks=(), paused=episodes)
  assert [t.cause for t in episodes] == ['differed'] * 2
  assert not any(t.is_paused for t in episodes)


def test_a_replay_may_fail_after_its_episode_has_ended(text, monkeypatch):
  step = toy.Env.step

  def with_long_prompt(self, response):
    result = step(self, response)
    if result.done:
      return result
    longer = dataclasses.replace(result.observation, prompt='Go right. ' * 99)
    return dataclasses.replace(result, observation=longer)

  monkeypatch.setattr(toy.Env, 'step', with_long_prompt)
  batch = rollout.EpisodeBatch(
    [base.Task('train', 0)],
    1,
    (rollout.TRAIN, 6),
    sampler.Sampling(),
    pause_after=1,
  )
  others = dataclasses.replace(
    batch, tasks=[base.Task('train', 3)], pause_after=None
  )
  batches = [batch]
  for faults in ({}, {0: 'moody'}):
    script = ScriptedSampler(text)
    env = {'faults': faults, 'fault_step': 0}
    with pools.make(num_workers=0, env=env) as pool:
      runner = rollout.EpisodeRunner(pool, script, text, 200, 'end')
      (paused,), *further = runner.run_batches({}, batches)
    batches = [dataclasses.replace(batch, tasks=(), paused=[paused]), others]
  # The prompt after the first turn is too long, so the replay does not matter.
  assert (len(paused.steps), paused.failure, paused.is_paused) == (1, '', False)
  assert [t.success for t in further[0]] == [True]


@pytest.mark.parametrize('field', ['prompt', 'short_prompt'])
def test_very_long_prompts_fail_their_episode_quickly(text, monkeypatch, field):
  reset = toy.Env.reset

  def with_long_prompt(self, task):
    observation = reset(self, task)
    longer = {field: 'Go right. ' * 10**6} if task.index == 3 else {}
    return dataclasses.replace(observation, **longer)

  monkeypatch.setattr(toy.Env, 'reset', with_long_prompt)
  start = time.monotonic()
  trajectories, _ = _run(text, schedule='async')
  assert time.monotonic() - start < 2
  reason = 'garbage: a prompt of 10,000,000 characters; rollout.max_prompt_'
  assert [t.failure[: len(reason)] for t in trajectories[2:]] == [reason] * 2
  assert all(t.success for t in trajectories[:2])
