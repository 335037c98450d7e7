"""Tests of several agents: rewards, groups, advantages, planner and actor."""

import dataclasses
import json

import algorithm_rows
import jax
import numpy as np
import preloaded
import programs
import pytest
import small_runs

import envs
from envs import base
from envs.alfworld import env as alfworld_env
from envs.alfworld import planner
from gigpo_jax import (
  algorithms,
  batch,
  episode_records,
  group_filter,
  trajectory,
)
from gigpo_jax.tools import viewer

SIZES = {'max_prompt_tokens': 2, 'max_completion_tokens': 2, 'row_multiple': 8}
TINY = {'generator': {}, 'prompt_style': 'brief', 'max_steps': 6}


def _observation(agent: str, anchor: str = 'a') -> base.Observation:
  return base.Observation('p', 'p', anchor, 't', agent=agent)


def _episode(member: int, *turns: tuple[str, float], group=0):
  """Returns an episode of (agent, reward) turns."""
  following = [*(_observation(agent) for agent, _ in turns[1:]), None]
  steps = tuple(
    trajectory.Step(
      prompt_ids=np.array([1], np.int32),
      completion_ids=np.array([2], np.int32),
      log_probs=np.array([-1.0], np.float32),
      truncated=False,
      prompt_shortened=False,
      anchor='a',
      observation='t',
      response='',
      result=base.StepResult(
        observation, reward, True, 'x', success=False, done=observation is None
      ),
    )
    for (_, reward), observation in zip(turns, following, strict=True)
  )
  return trajectory.Trajectory(
    base.Task('train', group),
    '',
    group,
    member,
    steps,
    first_observation=_observation(turns[0][0]),
  )


def _advantages(episodes, *, name='grpo', agent_rewards='own', **options):
  rows = batch.from_trajectories(episodes, **SIZES, agent_rewards=agent_rewards)
  subject = algorithms.make(name, **options)
  return rows, subject.compute_advantages(rows).advantages


def test_agents_are_compared_with_themselves():
  # Rewards (1, 0) of one agent and (10, 0) of the other, in two episodes.
  episodes = [
    _episode(0, ('a', 1.0), ('b', 10.0)),
    _episode(1, ('a', 0.0), ('b', 0.0)),
  ]
  rows, actual = _advantages(episodes)
  np.testing.assert_array_equal(rows.agents[:4], [0, 1, 0, 1])
  np.testing.assert_array_equal(rows.groups[:5], [0, 1, 0, 1, -1])
  # (1 - 0.5) / sqrt(0.5) and (10 - 5) / sqrt(50).
  np.testing.assert_allclose(
    actual[:4], [0.5**0.5, 0.5**0.5, -(0.5**0.5), -(0.5**0.5)], atol=1e-5
  )


def test_agents_with_adapters_have_a_fixed_order():
  episodes = [_episode(0, ('b', 1.0)), _episode(1, ('b', 0.0), ('a', 2.0))]
  options = {'agent_rewards': 'own', 'agents': ('a', 'b', 'c')}
  rows = batch.from_trajectories(episodes[:1], **SIZES, **options)
  assert rows.agents[0] == 1
  rows = batch.from_trajectories(episodes, **SIZES, **options)
  assert rows.agents[:3].tolist() == [1, 1, 0]
  assert rows.groups[:4].tolist() == [0, 0, 1, -1]


@pytest.mark.parametrize('final', ['', 'abcx'])
def test_similar_states_of_two_agents_are_not_merged(final):
  # Both states of a are similar to p's, but not to each other.
  states = {'p': ['abcd'], 'a': ['abxx', 'yycd']}
  expected = [0, 1, 2, -1 if not final else 0]
  turns = [('p', 0.0), ('a', 0.0), ('a', 0.0)]
  episode = _episode(0, *turns)
  steps = [
    dataclasses.replace(step, anchor=states[agent].pop(0))
    for step, (agent, _) in zip(episode.steps, turns, strict=True)
  ]
  if final:  # A limit of turns ends the episode.
    end = _observation('p', final)
    result = dataclasses.replace(steps[-1].result, observation=end)
    steps[-1] = dataclasses.replace(steps[-1], result=result)
  episode = dataclasses.replace(episode, steps=tuple(steps))
  rows = batch.from_trajectories(
    [episode], **SIZES, anchor='similarity', similarity_threshold=0.5
  )
  np.testing.assert_array_equal(rows.anchors[:3], expected[:3])
  np.testing.assert_array_equal(rows.next_anchors[:3], expected[1:])


def test_pooled_advantages_differ():
  """Shows that the comparison above depends on the agents."""
  episodes = [
    _episode(0, ('', 1.0), ('', 10.0)),
    _episode(1, ('', 0.0), ('', 0.0)),
  ]
  rows, actual = _advantages(episodes, name='gigpo')
  assert rows.groups[:4].tolist() == [0, 0, 0, 0]
  assert abs(actual[0] - actual[1]) > 0.05


def test_team_rewards_by_hand():
  # The planner's turns: 0 and 3. Its rewards: 1 + 2 + 4 and 8 + 16.
  turns = [('p', 1.0), ('a', 2.0), ('a', 4.0), ('p', 8.0), ('b', 16.0)]
  episode = _episode(0, *turns)
  assert episode.agents == ('p', 'a', 'a', 'p', 'b')
  # a: 2 until its next turn, then 4 + 8 + 16.
  assert episode.team_rewards == (7.0, 2.0, 28.0, 24.0, 16.0)
  rows, _ = _advantages([episode, _episode(1, *turns)], agent_rewards='team')
  np.testing.assert_array_equal(rows.rewards[:5], [7, 2, 28, 24, 16])
  own, _ = _advantages([episode, _episode(1, *turns)])
  np.testing.assert_array_equal(own.rewards[:5], [1, 2, 4, 8, 16])


def test_a_team_shares_the_reward_of_an_agent_without_a_turn():
  episode = _episode(0, ('a', -1.0))
  result = dataclasses.replace(
    episode.steps[0].result, other_rewards={'b': 3.0}
  )
  step = dataclasses.replace(episode.steps[0], result=result)
  episode = dataclasses.replace(episode, steps=(step,))
  rows, _ = _advantages(
    [episode, _episode(1, ('a', 1.0))], agent_rewards='team'
  )
  assert rows.rewards[:2].tolist() == [*episode.team_rewards, 1] == [2, 1]
  own, _ = _advantages([episode, _episode(1, ('a', 1.0))])
  assert own.rewards[:2].tolist() == [-1, 1]


def test_each_reward_goes_to_the_last_turn_of_every_agent():
  rng = np.random.default_rng(0)
  for _ in range(20):
    agents = rng.choice(['p', 'a', 'b'], 7).tolist()
    rewards = rng.integers(9, size=7).tolist()
    expected, last = [0.0] * 7, {}
    for t, (agent, reward) in enumerate(zip(agents, rewards, strict=True)):
      last[agent] = t
      for turn in last.values():
        expected[turn] += reward
    episode = _episode(0, *zip(agents, rewards, strict=True))
    assert episode.team_rewards == tuple(expected)


def _play(member: int, score: float, *agents: str, group=0):
  """Returns a team's episode with a score, whose 1 is a success."""
  turns = [(agent, 0.0) for agent in agents[:-1]]
  episode = _episode(member, *turns, (agents[-1], 10 * score), group=group)
  result = dataclasses.replace(
    episode.steps[-1].result, success=score == 1, score=score
  )
  last = dataclasses.replace(episode.steps[-1], result=result)
  return dataclasses.replace(episode, steps=(*episode.steps[:-1], last))


def test_a_team_shares_success_and_score():
  episodes = [_play(n, n / 2, 'p', 'a', 'p', 'a') for n in (2, 1)]
  for agent_rewards, expected in (
    ('team', [0, 0, 1, 1, 0, 0, 0.5, 0.5]),
    ('own', [0, 0, 0, 1, 0, 0, 0, 0.5]),
  ):
    rows = batch.from_trajectories(
      episodes, **SIZES, agent_rewards=agent_rewards, components=('score',)
    )
    np.testing.assert_array_equal(rows.components[:, 0], expected)
    np.testing.assert_array_equal(rows.success, np.array(expected) == 1)
  episodes[0].steps[3].result.metrics['x'] = 2.0
  rows = batch.from_trajectories(episodes, **SIZES, components=('x',))
  np.testing.assert_array_equal(rows.components[2:5, 0], [2, 2, 0])
  # Sets of one episode: (1 - 0.5) / 0.5 for a success, for both agents.
  options = {'name': 'pass_at_k', 'agent_rewards': 'team', 'set_size': 1}
  rows, actual = _advantages(episodes, **options)
  np.testing.assert_allclose(actual, [1] * 4 + [-1] * 4)


def test_graphs_have_the_states_of_one_agent():
  rows = algorithm_rows.golden_rows().take(np.arange(7))
  # Agent p goes from state 0 over 1 to success, and in another episode stays
  # in 0 for a turn. The state after its turns is that of agent q, 8 or 9.
  rows.episodes[:] = [0, 0, 1, 1, 1, 2, 3]
  rows.groups[:], rows.agents[:] = [0] * 5 + [1] * 2, [0] * 5 + [1] * 2
  rows.steps[:] = [0, 2, 0, 2, 4, 1, 1]
  rows.anchors[:] = [0, 1, 0, 0, 1, 8, 8]
  rows.next_anchors[:] = [8, -1, 8, 9, -1, 1, 0]
  rows.success[:] = [0, 1, 0, 0, 1, 0, 0]
  rows.rewards[:] = 10 * rows.success
  subject = algorithms.make('graphgpo', norm='mean', episode_weight=0.0)
  # Distances 1, 0, 2, 1, 0. In state 0 the values 1, 0.1, 1 have mean 0.7.
  expected = [0.3, 0, -0.6, 0.3, 0, 0, 0]
  output = subject.compute_advantages(rows)
  np.testing.assert_allclose(output.advantages, expected, atol=1e-5)


def test_equal_returns_of_inexact_rewards_have_no_advantage():
  episodes = [
    _episode(0, ('a', 33.3), ('a', 66.7)),
    _episode(1, ('a', 100.0)),
  ]
  rows, actual = _advantages(episodes)
  np.testing.assert_array_equal(actual[:3], 0)
  assert not group_filter.has_variance(episodes)


def test_a_game_that_either_player_wins_has_variance():
  # Both winners move last, so the rewards of the steps are equal.
  one, other = (
    _zero_sum(0, 1.0),
    _episode(1, ('q', 0.0), ('p', 0.0), ('q', 1.0)),
  )
  result = dataclasses.replace(
    other.steps[-1].result, other_rewards={'p': -1.0}
  )
  last = dataclasses.replace(other.steps[-1], result=result)
  other = dataclasses.replace(other, steps=(*other.steps[:-1], last))
  assert one.reward == other.reward
  assert one.by_agent(one.own_rewards) == {'p': 1, 'q': -1}
  assert group_filter.has_variance([one, other])
  assert not group_filter.has_variance([one, one])


def test_rewards_that_a_team_shares_are_variance():
  # `b` is paid before its first turn: in the team's rewards, but not its own.
  def paid(reward):
    episode = _episode(0, ('a', 0.0), ('b', 0.0))
    first, last = episode.steps
    result = dataclasses.replace(first.result, other_rewards={'b': reward})
    first = dataclasses.replace(first, result=result)
    return dataclasses.replace(episode, steps=(first, last))

  assert group_filter.has_variance([paid(1.0), paid(0.0)])
  assert not group_filter.has_variance([paid(1.0), paid(1.0)])


def test_trees_of_several_agents_by_hand():
  # Two roots; a branch of the first one repeats the planner's turn.
  roots = [_play(n, score, 'p', 'a') for n, score in ((0, 1), (1, 0))]
  branch = _play(2, 0, 'p', 'a')
  branch = dataclasses.replace(branch, parent=0, num_repeated=1)
  rows, actual = _advantages(
    [*roots, branch], name='tree_grpo', agent_rewards='team'
  )
  # z of 10 and 0 in the tree: +-0.7071; of 10, 0, 0: 1.1547 and -0.5774.
  expected = np.repeat([1.8618, -0.5774, -1.2845], 2)
  np.testing.assert_allclose(actual[:6], expected, atol=1e-4)


def test_bundles_have_tasks_of_one_agent():
  # Returns 10 and 0 in the first task, 10 and 5 in the second.
  episodes = [
    _play(n, score, 'p', 'a', group=group)
    for group, scores in enumerate([(1, 0), (1, 0.5)])
    for n, score in enumerate(scores)
  ]
  rows = batch.from_trajectories(episodes, **SIZES)
  subject = algorithms.make('risk_po', bundle_tasks=2)
  actual = subject.compute_advantages(rows).advantages[:8].reshape(4, 2)
  # Sums of 20 and 5 for either agent, whose advantages are equal.
  np.testing.assert_allclose(actual[:, 0], actual[:, 1])
  np.testing.assert_allclose(actual[:2], actual[2:])
  assert actual[0, 0] > actual[1, 0]


def test_all_agents_have_the_greedy_baseline():
  episodes = [_play(n, score, 'p', 'a') for n, score in ((0, 1), (1, 0))]
  rows = batch.from_trajectories(episodes, **SIZES)
  rows.state_values[[0, 2]] = 4  # Of the first turns.
  output = algorithms.make('remax').compute_advantages(rows)
  expected = [6, 6, -4, -4, 0, 0, 0, 0]
  np.testing.assert_array_equal(output.advantages, expected)


def _zero_sum(member: int, reward: float) -> trajectory.Trajectory:
  """Returns a game of two players whose last mover gets the reward."""
  episode = _episode(member, ('p', 0.0), ('q', 0.0), ('p', reward))
  result = dataclasses.replace(
    episode.steps[-1].result, other_rewards={'q': -reward}
  )
  last = dataclasses.replace(episode.steps[-1], result=result)
  return dataclasses.replace(episode, steps=(*episode.steps[:-1], last))


def test_rewards_of_other_agents_by_hand():
  games = [_zero_sum(0, 1.0), _zero_sum(1, -1.0)]
  assert games[0].own_rewards == (0.0, -1.0, 1.0)
  # Opposite rewards cancel in the team.
  assert games[0].team_rewards == (0.0, 0.0, 0.0)
  rows, actual = _advantages(games)
  np.testing.assert_array_equal(rows.rewards[:6], [0, -1, 1, 0, 1, -1])
  # (1 - 0) / sqrt(2) for the winner of each game.
  score = 0.5**0.5
  np.testing.assert_allclose(
    actual[:6],
    [score, -score, score, -score, score, -score],
    atol=1e-5,
  )
  record = episode_records.make_record(
    games[0], iteration=0, seed=0, step_fields=None
  )
  assert [s['reward'] for s in record['steps'][:3]] == [0.0, -1.0, 1.0]


def test_rewards_of_other_agents_equal_a_slow_reference():
  rng = np.random.default_rng(1)
  for _ in range(20):
    agents = rng.choice(['p', 'a', 'b'], 7).tolist()
    episode = _episode(0, *((agent, 0.0) for agent in agents))
    expected, last, steps = [0.0] * 7, {}, []
    for t, step in enumerate(episode.steps):
      last[agents[t]] = t
      given = {a: float(rng.integers(9)) for a in 'pab' if rng.random() < 0.5}
      own = given.pop(agents[t], 0.0)
      for agent, reward in (given | {agents[t]: own}).items():
        if agent in last:
          expected[last[agent]] += reward
      result = dataclasses.replace(step.result, reward=own, other_rewards=given)
      steps.append(dataclasses.replace(step, result=result))
    episode = dataclasses.replace(episode, steps=tuple(steps))
    assert episode.own_rewards == tuple(expected)
    # Small integers: exact sums.
    total = sum(
      step.result.reward + sum(step.result.other_rewards.values())
      for step in steps
    )
    assert (
      episode.reward
      == total
      == episode.team_rewards[0]
      + sum(
        reward
        for t, reward in enumerate(episode.team_rewards)
        if t and agents[t] == agents[0]
      )
    )
    record = episode_records.make_record(
      episode, iteration=0, seed=0, step_fields=None
    )
    recorded = [step['team_reward'] for step in record['steps']]
    assert recorded == [*episode.team_rewards, 0]


def _slow_advantages(rows: batch.Rows) -> list[float]:
  """Returns the z-scores of each agent's returns over a group's episodes."""
  result = []
  for r in np.flatnonzero(rows.real):
    returns = {}
    for q in np.flatnonzero(rows.real):
      if rows.groups[q] == rows.groups[r]:
        key = int(rows.episodes[q])
        returns[key] = returns.get(key, 0.0) + float(rows.rewards[q])
    values = list(returns.values())
    mean = sum(values) / len(values)
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    result.append((returns[int(rows.episodes[r])] - mean) / (spread + 1e-6))
  return result


@pytest.mark.parametrize('agent_rewards', batch.AGENT_REWARDS)
def test_random_episodes_equal_a_slow_reference(agent_rewards):
  rng = np.random.default_rng(3)
  episodes = [
    _episode(
      member,
      *(
        (str(rng.choice(['p', 'a'])), float(rng.integers(4))) for _ in range(n)
      ),
      group=group,
    )
    for group in range(2)
    for member, n in enumerate(rng.integers(1, 6, 4))
  ]
  rows, actual = _advantages(episodes, agent_rewards=agent_rewards)
  np.testing.assert_allclose(
    actual[rows.real], _slow_advantages(rows), rtol=1e-4, atol=1e-4
  )
  # A group of rows has one agent and one group of episodes.
  keys = {
    (int(rows.groups[r]), int(rows.agents[r]), episodes[rows.episodes[r]].group)
    for r in np.flatnonzero(rows.real)
  }
  assert len(keys) == len({key[0] for key in keys}) == 4


def test_one_agent_changes_nothing():
  turns = [('', 1.0), ('', 0.5)]
  episodes = [_episode(0, *turns, group=3), _episode(1, *turns, group=3)]
  for agent_rewards in batch.AGENT_REWARDS:
    rows, _ = _advantages(episodes, agent_rewards=agent_rewards)
    assert rows.groups[:4].tolist() == [3, 3, 3, 3]
    np.testing.assert_array_equal(rows.rewards[:4], [1, 0.5, 1, 0.5])
  # Unknown first observation: the agent is unknown, too.
  unknown = dataclasses.replace(episodes[0], first_observation=None)
  assert unknown.agents == ('', '')


def test_records_name_the_agent(monkeypatch):
  record = episode_records.make_record(
    _episode(0, ('p', 0.0), ('a', 1.0)), iteration=0, seed=0, step_fields=None
  )
  stored = episode_records.decode(episode_records.encode(record))
  assert [step['agent'] for step in stored['steps']] == ['p', 'a', '']
  with monkeypatch.context() as patch:
    patch.delitem(episode_records._STEP, 'agent')
    old = episode_records.encode(record)  # As of an earlier release.
  steps = episode_records.decode(old)['steps']
  assert [step['agent'] for step in steps] == ['', '', '']


def test_planner_and_actor_need_a_turn_each():
  name = 'envs.alfworld.planner'
  (problem,) = envs.check_options(name, {'max_steps': 1})
  assert problem.startswith(
    'env.max_steps=1: out of range; must be an integer of at least 2'
  )
  (problem,) = envs.check_options(name, {'engine': 'unity'})
  assert problem.startswith('env.engine=unity: unknown')
  assert not [*envs.check_options(name, {'max_steps': 2})]


def test_the_actor_reads_the_plan():
  task = base.Task('train', 0)
  env, plain = planner.Env(**TINY), alfworld_env.Env(**TINY)
  first, start = env.reset(task), plain.reset(task)
  assert first.agent == 'planner' and '<plan>' in first.prompt
  assert start.task in first.prompt and first.anchor != start.anchor
  result = env.step('<plan>look\naround</plan>')
  assert result.valid and not result.done and result.action == 'look around'
  following = result.observation
  assert following.agent == 'actor'
  assert following.prompt == f'Plan: look around\n{start.prompt}'
  assert following.anchor == start.anchor
  # The next turns are those of the game; the planner's turn counts.
  response = '<think>x</think><action>look</action>'
  turns = 1
  while result.observation is not None:
    result, turns = env.step(response), turns + 1
    if result.observation:
      assert result.observation.prompt.startswith('Plan: look around\n')
  assert turns == TINY['max_steps']
  env.reset(task)
  unusable = env.step('no plan')
  assert not unusable.valid and unusable.action == 'no plan'
  env.close()


def test_a_plan_has_whole_actions():
  assert envs.agents('envs.alfworld.planner', {}) == ('planner', 'actor')
  assert envs.agents('alfworld', {}) == ()
  task, plans = base.Task('train', 1), []
  for limit in (400, 40):
    env = planner.Env(**TINY, max_plan_chars=limit)
    plan = next(env.demonstrate(task, noise=0.0, seed=0))[1]
    plans.append(
      plan.removeprefix('<plan>').removesuffix('</plan>').split(', ')
    )
    assert len(', '.join(plans[-1])) <= limit
    env.reset(task)
    assert len(env.step('x' * 500).action) == limit
    env.close()
  whole, short = plans
  assert 0 < len(short) < len(whole) and short == whole[: len(short)]


def test_the_expert_plans_and_plays():
  env = envs.make('envs.alfworld.planner', generator={}, prompt_style='brief')
  task = base.Task('train', 1)
  (first, plan), *steps = env.demonstrate(task, noise=0.0, seed=0)
  assert env.reset(task) == first
  result = env.step(plan)
  assert result.valid
  for given, response in steps:
    assert result.observation == given
    result = env.step(response)
  assert result.success
  env.close()


ADAPTERS = (
  "--config.lora.agents=('planner','actor')",
  '--config.lora.rank=2',
  '--config.learner.share_prompts=True',
  '--config.learner.length_buckets=(392,)',
  '--config.model.path=configs/warm_starts/alfworld_tiny',
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_an_adapter_per_agent_resumes(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  variant = 'smoke,planner,lora'

  def run(workdir, *more):
    return preloaded.run(
      small_runs.small(workdir, *ADAPTERS, *more, variant=variant)
    )

  run(whole)
  run(parts, '--config.num_iterations=2')
  assert 'resuming' in run(parts)
  assert small_runs.read_lines(parts) == small_runs.read_lines(whole)
  states = [small_runs.read_state(path) for path in (parts, whole)]
  jax.tree.map(np.testing.assert_array_equal, *states)
  for folder, more in (('policy', ['training.json']), ('adapters', [])):
    names = sorted(path.name for path in (whole / folder).iterdir())
    assert names == ['actor', 'planner', *more]
  config = json.loads(
    (whole / 'adapters/actor/adapter_config.json').read_text()
  )
  assert config['r'] == 2
  # The number of adapters must be that of the checkpoint.
  command = small_runs.small(parts, *ADAPTERS[1:], variant=variant)
  refused = preloaded.Process([*command, '--allow_config_change'])
  _, errors = refused.communicate(timeout=400)
  assert refused.returncode
  assert 'in this model; give another folder' in errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_planner_and_actor_train(tmp_path):
  name = '--config.env.name=envs.alfworld.planner'
  programs.run(small_runs.small(tmp_path, name))
  episodes = small_runs.read_episodes(tmp_path)
  for episode in episodes:
    planned, *played = [step['agent'] for step in episode['steps'][:-1]]
    assert planned == 'planner' and set(played) <= {'actor'}
  trained = [
    step for e in episodes for step in e['steps'] if not step['is_last']
  ]
  assert np.isfinite([step['advantage'] for step in trained]).all()
  shown = viewer.steps(tmp_path, 0, 0)
  assert all(steps[0]['agent'] == 'planner' for steps in shown)
