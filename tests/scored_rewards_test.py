"""Tests of rewards from probabilities of the policy."""

import dataclasses
import itertools
import math
import sys
import types

import numpy as np
import programs
import pytest
import small_runs

from configs import alfworld
from configs import base as base_config
from envs import base
from gigpo_jax import algorithms, batch, scored_rewards, trajectory
from gigpo_jax import config as config_lib
from gigpo_jax.runtime import errors

SEEN = []


def gain(episode):
  """IGPO's gains: the answer 'ab' after '<', and 0 in the last turn."""
  p = yield [('<', 'ab')] * len(episode.turns)
  SEEN.append(p)
  return [b - a for a, b in itertools.pairwise(p)] + [0.0]


def last(episode):
  """Scores the last turn only."""
  p = yield [None] * (len(episode.turns) - 1) + ['a']
  SEEN.append(p)
  return p[-1]


def powers(episode):
  """Powers of 2, whatever the policy."""
  yield ['a'] * len(episode.turns)
  return [2.0**t for t in range(len(episode.turns))]


def short(episode):
  yield ['a']


def twice(episode):
  yield ['a'] * len(episode.turns)
  yield ['a'] * len(episode.turns)


def broken(episode):
  yield ['a'] * len(episode.turns)
  raise KeyError('no\nanswer')


def plain(episode):
  return 1.0


def silent(episode):
  if not episode:
    yield


def letters(episode):
  yield 'ab'


def numbers(episode):
  yield [1] * len(episode.turns)


def huge(episode):
  yield ['a'] * len(episode.turns)
  return 1e30


@pytest.fixture(autouse=True)
def fixture_module(monkeypatch):
  module = types.ModuleType('my_scores')
  vars(module).update(globals())
  monkeypatch.setitem(sys.modules, 'my_scores', module)
  SEEN.clear()


def _encode(texts):
  return [np.array([ord(c) for c in text], np.int32) for text in texts]


def _episode(member, turns):
  steps = tuple(
    trajectory.Step(
      prompt_ids=np.arange(1 + member + t, dtype=np.int32),
      completion_ids=np.array([5], np.int32),
      log_probs=np.zeros(1, np.float32),
      truncated=False,
      prompt_shortened=False,
      anchor=f'state {t}',
      observation='',
      response='r',
      result=base.StepResult(None, 1.0, True, 'a', False, t == turns - 1),
    )
    for t in range(turns)
  )
  return trajectory.Trajectory(base.Task('train', 0), 'x', 0, member, steps)


def _rows(episodes):
  return batch.from_trajectories(
    episodes, max_prompt_tokens=8, max_completion_tokens=3, row_multiple=4
  )


def _log_probs(rows):
  """The policy is surer after a longer prompt: log(P / 16) per token."""
  each = np.log(np.maximum(rows.prompt_lengths, 1)[:, None] / 16)
  return np.where(rows.completion_mask, each, 0)


def _add(*names, episodes, weights=()):
  options = scored_rewards.Options(
    tuple(f'my_scores:{name}' for name in names), weights
  )
  return scored_rewards.ScoredRewards(options, _encode).add(
    _rows(episodes), episodes, _log_probs
  )


def test_gains_by_hand():
  episodes = [_episode(0, 3), _episode(1, 2)]
  rows, metrics = _add('gain', episodes=episodes, weights=(16.0,))
  # Prompts of 1, 2, 3 and of 2, 3 tokens: each gain is 1 / 16, the last 0.
  assert rows.rewards[:5].tolist() == pytest.approx([2, 2, 1, 2, 1])
  assert not rows.rewards[5:].any()
  assert SEEN == [
    pytest.approx([1 / 16, 2 / 16, 3 / 16]),
    pytest.approx([2 / 16, 3 / 16]),
  ]
  assert metrics == {'reward/scored/gain': pytest.approx(3 / 16 / 5)}


def test_one_number_is_the_reward_of_the_last_turn():
  rows, metrics = _add('last', 'gain', episodes=[_episode(0, 2)])
  assert all(map(math.isnan, SEEN[0][:1]))
  assert rows.rewards[:2].tolist() == pytest.approx([1 + 1 / 16, 1 + 2 / 16])
  assert set(metrics) == {'reward/scored/last', 'reward/scored/gain'}


@pytest.mark.parametrize(
  ('agent_rewards', 'expected'), [('team', [7, 2, 4]), ('own', [1, 2, 4])]
)
def test_a_team_shares_scored_rewards(agent_rewards, expected):
  # The planner takes the first turn only: 1 + 2 + 4.
  episode = _episode(0, 3)
  agents = [base.Observation('', '', '', '', agent=name) for name in 'paa']
  steps = tuple(
    dataclasses.replace(
      step, result=dataclasses.replace(step.result, observation=following)
    )
    for step, following in zip(episode.steps, [*agents[1:], None], strict=True)
  )
  episode = dataclasses.replace(
    episode, first_observation=agents[0], steps=steps
  )
  options = scored_rewards.Options(('my_scores:powers',))
  rows = batch.from_trajectories(
    [episode],
    max_prompt_tokens=8,
    max_completion_tokens=3,
    row_multiple=4,
    agent_rewards='own',
  )
  rows.rewards[:] = 0
  rows, _ = scored_rewards.ScoredRewards(options, _encode, agent_rewards).add(
    rows, [episode], _log_probs
  )
  np.testing.assert_array_equal(rows.rewards[:3], expected)


def test_order_of_rows_does_not_matter():
  episodes = [_episode(0, 3), _episode(1, 2)]
  plain, _ = _add('gain', episodes=episodes)
  rows = _rows(episodes)
  order = np.random.default_rng(0).permutation(len(rows.tokens))
  options = scored_rewards.Options(('my_scores:gain',))
  scorer = scored_rewards.ScoredRewards(options, _encode)
  shuffled, _ = scorer.add(rows.take(order), episodes, _log_probs)
  np.testing.assert_array_equal(shuffled.rewards, plain.rewards[order])


def test_equals_the_gains_of_igpo():
  episodes = [_episode(0, 3), _episode(1, 2)]
  rows, _ = _add('gain', episodes=episodes)
  own = rows.rewards - _rows(episodes).rewards
  values = np.where(rows.real, rows.prompt_lengths / 16, np.nan)
  known = dataclasses.replace(_rows(episodes), state_values=values)
  output = algorithms.make('igpo', components=()).compute_advantages(known)
  expected = own[:5][own[:5] > 0].mean()
  assert output.metrics['advantage/gain_mean'] == pytest.approx(expected)


@pytest.mark.parametrize(
  ('name', 'reason'),
  [
    ('short', 'yields 1 texts; must be one per turn .2.'),
    ('twice', 'yields twice'),
    ('plain', 'returned a float; must be a generator, which yields one text'),
    ('silent', 'yields nothing; must yield one text per turn'),
    ('letters', 'yields a str; must be one text per turn'),
    ('numbers', 'yields 1; must be texts, pairs of texts, or None'),
    ('broken', "KeyError: 'no.*answer'"),
    ('huge', 'must be numbers within'),
  ],
)
def test_a_faulty_function_ends_the_run_with_one_line(name, reason):
  config = base_config.get_config()
  config.reward.scored = (f'my_scores:{name}',)
  calls = {
    'and rerun the command; it resumes': lambda: _add(
      name, episodes=[_episode(0, 2)]
    ),
    'fix the function and rerun the same command': lambda: (
      scored_rewards.try_out(config.reward, _episode(0, 2))
    ),
  }
  for advice, call in calls.items():
    with pytest.raises(errors.RunError, match=f'{reason}.*{advice}$') as error:
      call()
    assert str(error.value).startswith(f'reward.scored=my_scores:{name}: ')
    assert '\n' not in str(error.value)
    assert 'UnusableReplyError' not in str(error.value)


def test_a_trial_accepts_good_functions():
  config = base_config.get_config()
  config.reward.scored = tuple(f'my_scores:{n}' for n in ('gain', 'last'))
  scored_rewards.try_out(config.reward, _episode(0, 2))
  gains, last_only = SEEN
  assert gains == [0.5, 0.5]
  assert math.isnan(last_only[0]) and last_only[1] == 0.5


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'scored': ('my_scores:other',)},
      'reward.scored=my_scores:other: unknown',
    ),
    (
      {'scored': ('my_scores:gain',), 'scored_weights': (1.0, 2.0)},
      'reward.scored_weights=.*one weight per function',
    ),
    ({'scored': ('a:gain', 'b:gain')}, 'reward.scored=.*different names'),
    (
      {'scored': ('my_scores:gain',), 'forced_members': 2},
      'rollout.forced_members=2: reward.scored would score texts after',
    ),
  ],
)
def test_refused_options(fields, message):
  config = alfworld.get_config('smoke')
  if forced := fields.pop('forced_members', 0):
    config.rollout.forced_members = forced
    config.rollout.prefixes = ('<think>', '<action>')
  config.update_from_flattened_dict(
    {f'reward.{name}': value for name, value in fields.items()}
  )
  with pytest.raises(ValueError, match=message):
    config_lib.validate(config, needs_model=False)


def test_scored_rewards_follow_the_rewards_of_agents():
  config = base_config.get_config()
  text = types.SimpleNamespace(encode=_encode)
  assert scored_rewards.make(config.reward, text) is None
  config.reward.scored, config.reward.agents = ('my_scores:gain',), 'own'
  assert scored_rewards.make(config.reward, text).agent_rewards == 'own'


@pytest.mark.slow
def test_a_run_adds_rewards_and_resumes_exactly(tmp_path, monkeypatch):
  (tmp_path / 'found_rewards.py').write_text(
    'def sure(episode):\n'
    "  p = yield ['<think>'] * len(episode.turns)\n"
    '  return p\n'
  )
  monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=':')
  flags = ("--config.reward.scored=('found_rewards:sure',)",)
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  programs.run(small_runs.small(whole, *flags))
  programs.run(small_runs.small(parts, *flags, '--config.num_iterations=1'))
  programs.run(small_runs.small(parts, *flags))
  small_runs.assert_same_end(parts, whole)
  lines = small_runs.read_lines(whole)[:3]
  assert all(0 < line['reward/scored/sure'] <= 1 for line in lines)
