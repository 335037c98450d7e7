"""Tests of forced prefixes of responses, and of A2FM, which rewards modes."""

import dataclasses
import math
import statistics

import algorithm_rows
import numpy as np
import pools
import pytest
import tool_script
import walks

from configs import alfworld
from envs import base
from gigpo_jax import (
  algorithms,
  batch,
  carry_over,
  config,
  conversation,
  env_pool,
  forced_prefixes,
  rollout,
  row_stats,
  sampler,
  tokenizer,
)
from gigpo_jax.run import model_check

TEXTS = ('<action>', '<think>')
ENDINGS = {'<action>': 'right</action>', '<think>': 'on</think><action>left'}


@pytest.fixture(name='text', scope='module')
def fixture_text(tmp_path_factory):
  folder = str(tmp_path_factory.mktemp('tokenizer'))
  texts = [*TEXTS, *ENDINGS.values(), 'Step 1. You are in room 2 of 5.']
  tokenizer.train(texts * 9, folder, vocab_size=330)
  return tokenizer.Tokenizer(folder)


class Script(walks.RandomWalk):
  """Completes responses; free ones begin with <think>."""

  def __init__(self, text):
    super().__init__()
    self._text = text

  def submit(self, request):
    ticket = super().submit(request)
    self._queue[-1] = ticket, request
    return ticket

  def _answer(self, request):
    (prompt,) = self._text.decode([request.prompt_ids])
    begun = [t for t in TEXTS if prompt.endswith(t)]
    answer = ENDINGS[begun[0]] if begun else '<think>' + ENDINGS['<think>']
    ids = np.concatenate([*self._text.encode([answer]), self._text.end_of_turn])
    log_probs = -np.arange(len(ids), dtype=np.float32)
    return sampler.Completion(ids, log_probs, log_probs, 'stop')


def play(text, *, forced=1, limit=200, **changes):
  """Plays a group of three episodes of the corridor; room 3 is near."""
  episodes = rollout.EpisodeBatch(
    [base.Task('train', 3)], 3, (rollout.TRAIN, 6), sampler.Sampling()
  )
  episodes = dataclasses.replace(episodes, **changes)
  with pools.make(num_workers=0) as pool:
    runner = rollout.EpisodeRunner(
      pool,
      Script(text),
      text,
      limit,
      'error',
      prefixes=forced_prefixes.make(TEXTS, forced, text),
    )
    (played,) = runner.run_batches({}, [episodes])
  return played


def make_rows(episodes):
  return batch.from_trajectories(
    episodes,
    max_prompt_tokens=120,
    max_completion_tokens=30,
    row_multiple=32,
    prefixes=TEXTS,
  )


def test_a_forced_prefix_is_played_but_not_trained(text):
  cheap, dear, free = play(text)
  assert [s.response for s in cheap.steps] == ['<action>right</action>']
  assert cheap.success and cheap.steps[0].result.valid
  assert dear.steps[0].response == free.steps[0].response
  rows = make_rows([cheap, dear, free])
  for r, step in enumerate(
    step for episode in (cheap, dear, free) for step in episode.steps
  ):
    trained = rows.tokens[r, rows.prompt_lengths[r] : rows.lengths[r]]
    np.testing.assert_array_equal(trained, step.completion_ids)
    np.testing.assert_array_equal(
      rows.sampler_log_probs[r, : len(trained)], step.log_probs
    )
    prompt = text.decode([step.prompt_ids])[0]
    assert prompt.endswith(TEXTS) == (step.forced_tokens > 0)
  # The free policy also thinks, and samples these tokens itself.
  sizes = [len(cheap.steps), len(dear.steps), len(free.steps)]
  ends = np.cumsum(sizes)
  modes = [set(x) for x in np.split(rows.prefixes[: ends[-1]], ends[:-1])]
  assert modes == [{0}, {1}, {1}]
  forced = [set(x) for x in np.split(rows.forced[: ends[-1]], ends[:-1])]
  assert forced == [{True}, {True}, {False}]
  assert set(rows.prefixes[ends[-1] :]) == {-1}
  longer = len(free.steps[0].completion_ids) - len(dear.steps[0].completion_ids)
  assert longer == dear.steps[0].forced_tokens


def test_without_forced_members_nothing_changes(text):
  plain = play(text, forced=0)
  assert {s.forced_tokens for t in plain for s in t.steps} == {0}
  assert [s.response for s in plain[0].steps] == [
    s.response for s in plain[2].steps
  ]


def test_evaluation_is_free(text):
  played = play(text, stream=(rollout.EVALUATION, 0))
  assert {s.forced_tokens for t in played for s in t.steps} == {0}


def test_a_prefix_counts_for_the_limit_of_a_prompt(text):
  (step, *_), *_ = [t.steps for t in play(text)]
  assert len(step.prompt_ids) - step.forced_tokens < len(step.prompt_ids)
  with pytest.raises(ValueError, match='max_prompt_tokens'):
    play(text, limit=len(step.prompt_ids) - 1)


def test_a_paused_episode_keeps_its_prefix(text):
  whole = play(text)
  paused = play(text, pause_after=2)
  waiting = [t for t in paused if t.is_paused]
  assert [t.member for t in waiting] == [1, 2]
  # As a checkpoint saves them.
  kept = [carry_over._episode(carry_over._plain(t)) for t in waiting]
  continued = play(text, tasks=(), paused=kept)
  for one, other in zip(continued, whole[1:], strict=True):
    assert len(one.steps) == len(other.steps) > 2
    for a, b in zip(one.steps, other.steps, strict=True):
      assert a.forced_tokens == b.forced_tokens
      np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)


def test_members_of_a_group_begin_with_their_prefix(text):
  forced = forced_prefixes.make(TEXTS, 2, text)
  assert [forced.of(n).text for n in range(5)] == [
    '<action>',
    '<action>',
    '<think>',
    '<think>',
    '',
  ]
  assert forced.longest == max(map(len, text.encode(TEXTS)))
  for prefix in forced.prefixes:
    assert text.decode([prefix.ids]) == [prefix.text]
  none = forced_prefixes.make(TEXTS, 0, text)
  assert none.of(0) == forced_prefixes.NONE and none.longest == 0


def test_special_tokens_of_a_prefix_stay_special(text):
  forced = forced_prefixes.make(('<|im_end|>go',), 1, text)
  assert forced.of(0).ids[0] == text.end_of_turn[0]


def test_a_response_has_the_mode_of_its_longest_prefix():
  texts = ('<a>', '<a>b', '<c>')
  responses = ('<a>x', '\n<a>bx', 'x<c>', '<c>')
  found = [forced_prefixes.find(response, texts) for response in responses]
  assert found == [0, 1, -1, 2]
  assert forced_prefixes.find('<a>bx', texts[1::-1]) == 0
  # White space around prefixes and responses does not count.
  texts = ('\n<a>', '<a>\n\n</a>\n\n')
  responses = ('<a>x', '\n<a>x', '<a>\n\n</a>', ' <a>\n\n</a>\n\nx')
  modes = [forced_prefixes.find(response, texts) for response in responses]
  assert modes == [0, 0, 1, 1]


def test_earlier_prefixes_are_part_of_a_conversation(tmp_path):
  text = tool_script.make_tokenizer(tmp_path)
  prefix = '<think>'

  class Completing(tool_script.Script):
    def _answer(self, stream):
      completion = super()._answer(stream)
      if stream[3]:  # Of the free member 1.
        return completion
      (whole,) = text.decode([completion.ids])
      rest = whole.removeprefix(prefix)
      rest = rest if rest != whole else f'so</think>{rest}'
      ids = np.concatenate([*text.encode([rest]), text.end_of_turn])
      return dataclasses.replace(
        completion, ids=ids, log_probs=np.zeros(len(ids), np.float32)
      )

  groups = rollout.EpisodeBatch(
    [base.Task('train', 0)], 2, (rollout.TRAIN, 3), sampler.Sampling()
  )
  with env_pool.EnvPool(
    'tool_env',
    {},
    num_envs=2,
    num_workers=0,
    step_timeout_secs=9,
    reset_timeout_secs=9,
  ) as pool:
    runner = rollout.EpisodeRunner(
      pool,
      Completing(text),
      text,
      999,
      'end',
      prefixes=forced_prefixes.make((prefix,), 1, text),
    )
    ((forced, _),) = runner.run_batches({}, [groups])
  first, second = forced.steps
  assert first.response.startswith('<think>add</think><tool_call>')
  begin = np.concatenate([first.prompt_ids, first.completion_ids])
  np.testing.assert_array_equal(second.prompt_ids[: len(begin)], begin)
  # Re-rendered, as after dropped turns, it keeps the forced tokens too.
  start, turns = conversation.split_turns(
    forced.first_observation, forced.steps[:1]
  )
  chat = conversation.Conversations(text, 999, 'end')
  (composed,) = text.decode([chat._compose(start, turns)])
  assert '<think>add</think><tool_call>' in composed


def make_group(episodes):
  """Returns one row per response; episodes are lists of responses.

  A response is (mode, whether it is valid, forced, a success).
  """
  responses = [(e, *r) for e, own in enumerate(episodes) for r in own]
  rows = batch.pack(
    [np.array([1])] * len(responses),
    [np.array([2])] * len(responses),
    max_prompt_tokens=1,
    max_completion_tokens=1,
    row_multiple=len(responses) + 2,
  )
  rows.groups[: len(responses)] = 0
  for r, (e, mode, valid, forced, success) in enumerate(responses):
    rows.episodes[r], rows.steps[r] = e, r
    rows.prefixes[r], rows.valid[r] = mode, valid
    rows.forced[r], rows.success[r] = forced, success
  return rows


def test_a2fm_by_hand():
  wins, loses = (0, True, True, True), (0, True, True, False)
  rows = make_group(
    [
      # Three of four members succeed in the cheapest mode: p = .75.
      [wins],
      [wins],
      [wins],
      [loses],
      # A forced dear mode costs nothing, a chosen one 1 - .75^2 = .4375.
      [(2, True, True, True)],
      [(1, True, False, True)],
      # Cheap at first, then dear.
      [(0, True, False, False), (1, True, False, True)],
      [(0, True, False, True)],
      # Without a mode, or an invalid response: 0.
      [(-1, True, False, True)],
      [(0, False, False, False), (0, True, False, True)],
    ]
  )
  algorithm = algorithms.make('a2fm')
  rewards, metrics = algorithm.rewards(rows, row_stats.episodes(rows))
  expected = [1, 1, 1, 0, 1, 0.4375, 0.4375, 1, 0, 0]
  np.testing.assert_allclose(rewards, expected)
  assert metrics['advantage/cheap_success'] == 0.75
  assert metrics['advantage/costlier_mode_share'] == pytest.approx(2 / 5)
  advantages = algorithm.compute_advantages(rows).advantages
  z = (0.4375 - statistics.mean(expected)) / statistics.stdev(expected)
  np.testing.assert_allclose(advantages[5:8], z, rtol=1e-4)
  assert not advantages[~rows.real].any()
  # The rate of an easy task may be p itself.
  easy = algorithms.make('a2fm', easy_rate=0.75)
  rewards, _ = easy.rewards(rows, row_stats.episodes(rows))
  np.testing.assert_allclose(rewards, expected)
  # A task that is not easy costs nothing.
  hard = algorithms.make('a2fm', easy_rate=0.8)
  rewards, _ = hard.rewards(rows, row_stats.episodes(rows))
  np.testing.assert_allclose(rewards, [1, 1, 1, 0, 1, 1, 1, 1, 0, 0])


@pytest.mark.parametrize('seed', range(4))
def test_a2fm_matches_a_slow_reference(seed):
  rng = np.random.default_rng(seed)
  rows = algorithm_rows.random_rows(seed)
  rows.valid[:] = rng.random(len(rows.groups)) < 0.95
  for episode in range(rows.episodes.max() + 1):
    rows.forced[rows.episodes == episode] = rng.random() < 0.5
  rows.prefixes[:] = rng.integers(-1, 30, len(rows.groups)).clip(None, 2)
  rows.prefixes[rng.random(len(rows.groups)) < 0.7] = 0
  algorithm = algorithms.make('a2fm', cost_power=3.0, easy_rate=0.4)
  actual = algorithm.compute_advantages(rows).advantages
  real = np.flatnonzero(rows.real)
  for group in set(rows.groups[real]):
    own = [r for r in real if rows.groups[r] == group]
    members = {}
    for r in own:
      members.setdefault(rows.episodes[r], []).append(r)
    cheap = [
      any(rows.success[ids])
      for ids in members.values()
      if rows.forced[ids[0]] and max(rows.prefixes[ids]) <= 0
    ]
    p = sum(cheap) / len(cheap) if cheap else 0
    rewards = {}
    for member, ids in members.items():
      reward = float(any(rows.success[ids]))
      if p >= 0.4 and not rows.forced[ids[0]] and max(rows.prefixes[ids]) > 0:
        reward *= 1 - p**3
      if not all(rows.valid[ids]) or min(rows.prefixes[ids]) < 0:
        reward = 0
      rewards[member] = reward
    mean = math.fsum(rewards.values()) / len(rewards)
    for member, ids in members.items():
      expected = 0.0
      if len(rewards) > 1:
        spread = statistics.stdev(rewards.values()) + 1e-6
        expected = (rewards[member] - mean) / spread
      np.testing.assert_allclose(actual[ids], expected, atol=1e-5)


@pytest.mark.parametrize(
  ('variant', 'changes', 'message'),
  [
    ('a2fm', {'rollout.prefixes': ('<a>',)}, 'rollout.prefixes=.*two texts'),
    (
      'a2fm',
      {'rollout.forced_members': 0},
      'rollout.prefixes=.*: has no effect; needs rollout.forced_members',
    ),
    ('a2fm', {'env.require_think': True}, 'env.require_think=True: .*<action>'),
    (
      'a2fm',
      {'rollout.forced_members': 5},
      'rollout.forced_members=5: 2 prefixes need 10 members',
    ),
    ('grpo', {'rollout.prefixes': ('a', 'a')}, 'rollout.prefixes=.*different'),
    ('grpo', {'rollout.prefixes': ('a', ' a')}, 'rollout.prefixes=.*different'),
    ('grpo', {'rollout.prefixes': ('\n',)}, 'rollout.prefixes=.*not empty'),
    (
      'grpo',
      {'rollout.forced_members': 1},
      'rollout.forced_members=1: has no effect; needs rollout.prefixes',
    ),
    (
      'vineppo',
      {'rollout.prefixes': ('a',), 'rollout.forced_members': 1},
      'rollout.forced_members=1: vineppo needs the free policy',
    ),
    (
      'arpo',
      {'rollout.prefixes': ('a',), 'rollout.forced_members': 1},
      'rollout.forced_members=1: arpo needs the free policy',
    ),
  ],
)
def test_senseless_options_are_refused(variant, changes, message):
  own = alfworld.get_config(f'tiny,{variant}')
  own.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=message) as error:
    config.validate(own, needs_model=False)
  assert '\n' not in str(error.value)


def prefix_problems(own):
  lines = model_check.problems(own, trains=True, fetch=False)
  return [line for line in lines if line.startswith('rollout.prefixes=')]


def test_prefixes_with_special_tokens_are_no_modes():
  own = alfworld.get_config('tiny,a2fm')
  own.rollout.prefixes = ('\n<action>', '<think>\n')
  assert not prefix_problems(own)
  own.rollout.prefixes = ('<action>', '<|im_end|>', '<think><|im_end|>')
  (line,) = prefix_problems(own)
  assert "a2fm does not recognize '<|im_end|>' in them; must be plain" in line
  # Other algorithms do not read modes.
  own.algorithm.name = 'grpo'
  assert not prefix_problems(own)


def test_a_prefix_without_room_for_a_prompt_is_refused_before_the_start():
  own = alfworld.get_config('tiny,a2fm')
  text = tokenizer.Tokenizer(own.model.path)
  own.rollout.prefixes = ('<action>', '<think>' * 60)
  longest = forced_prefixes.make(own.rollout.prefixes, 1, text).longest

  # One token of a message is the least.
  own.rollout.max_prompt_tokens = longest + text.template_tokens() + 1
  assert not prefix_problems(own)
  own.rollout.max_prompt_tokens -= 1
  (line,) = prefix_problems(own)
  assert 'must leave room for a prompt' in line and len(line) < 240
  own.rollout.forced_members = 0
  assert not prefix_problems(own)
