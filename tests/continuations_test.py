"""Tests of values of states, with random walks in the toy corridor."""

import dataclasses
import math
import types

import algorithm_rows
import numpy as np
import pytest
import walks

from configs import base as configs_base
from envs import toy
from gigpo_jax import (
  algorithms,
  batch,
  carry_over,
  continuations,
  group_filter,
  rollout,
  sampler,
)
from gigpo_jax.run import collection, run_state


@pytest.mark.parametrize('discount', [1.0, 0.8])
def test_values_approach_the_exact_ones(discount):
  groups = walks.make_groups(size=1)
  ((episodes,), _) = walks.play([groups])
  states = continuations.find_states(episodes)
  exact, errors = walks.exact_values(states, discount), []
  assert len(exact) == sum(len(t.steps) for t in episodes) > 6
  for count in (4, 256):
    continued = continuations.make_batch(states, count, groups)
    ((played,), _) = walks.play([continued])
    totals = continuations.returns(states, played, discount, 0.1)
    assert totals.shape == (len(exact), count)
    errors.append(continuations.mean_returns(totals) - exact)
  # A success has a return of at most 10, so a return's deviation is at most 5.
  assert np.abs(errors[1]).max() < 4 * 5 / math.sqrt(256)
  assert np.square(errors[1]).mean() < np.square(errors[0]).mean()


def test_equal_first_responses_share_a_state():
  groups = walks.make_groups(size=8)
  ((episodes,), _) = walks.play([groups])
  states = continuations.find_states(episodes)
  prefixes = {
    (t.group, *(s.response for s in t.steps[:n]))
    for t in episodes
    for n in range(len(t.steps))
  }
  assert (
    len(states.starts) == len(prefixes) < sum(len(t.steps) for t in episodes)
  )
  # All episodes of a task start in the same state.
  assert len({indices[0] for indices in states.indices[:8]}) == 1
  assert states.indices[0][0] != states.indices[8][0]
  for episode, indices in zip(episodes, states.indices, strict=True):
    for n, state in enumerate(indices):
      start = states.starts[state]
      assert (start.group, len(start.steps)) == (episode.group, n)
      assert start.is_paused


def test_continuations_have_streams_of_their_own():
  groups = walks.make_groups(size=4)
  ((episodes,), streams) = walks.play([groups])
  states = continuations.find_states(episodes)
  continued = continuations.make_batch(states, 3, groups)
  ((played,), further) = walks.play([continued])
  assert len(further) == len(set(further))
  assert not set(streams) & set(further)
  assert {stream[:2] for stream in further} == {(rollout.CONTINUATION, 3)}
  # Neither the schedule nor the number of environments changes them.
  ((others,), _) = walks.play([continued], num_envs=1, at_once=1)
  for one, other in zip(played, others, strict=True):
    assert [s.response for s in one.steps] == [s.response for s in other.steps]
    assert one.member == other.member


def test_groups_of_the_same_task_have_continuations_of_their_own():
  groups = walks.make_groups(size=4)
  ((episodes,), _) = walks.play([groups])
  again = [dataclasses.replace(t, group=t.group + 10) for t in episodes]
  states = continuations.find_states([*episodes, *again])
  (paused, alone) = (
    continuations.make_batch(s, 3, groups).paused
    for s in (states, continuations.find_states(episodes))
  )
  streams = [(t.task.index, t.member) for t in paused]
  assert len(streams) == 2 * len(alone) == len(set(streams))
  assert streams[: len(alone)] == [(t.task.index, t.member) for t in alone]


def test_costs_are_the_steps_of_environments_and_sampled_tokens(monkeypatch):
  calls, step = [], toy.Env.step
  monkeypatch.setattr(
    toy.Env, 'step', lambda self, text: calls.append(text) or step(self, text)
  )
  groups = walks.make_groups()
  ((episodes,), _) = walks.play([groups])
  states = continuations.find_states(episodes)
  del calls[:]
  ((played,), streams) = walks.play(
    [continuations.make_batch(states, 2, groups)]
  )
  cost = group_filter.SampleCounts(0, len(calls), len(streams))
  assert len(calls) > len(streams)
  kept = group_filter.CollectedGroups(episodes, episodes, [0, 1, 2, 3], {})
  groups, metrics = continuations.add_values(kept, states, played, 1.0, 0.1)
  assert groups.further == cost and groups.episodes is episodes
  assert metrics['continuations/env_steps'] == len(calls)
  assert metrics['continuations/states'] == len(states.starts)


def make_episode(rewards, valid=None, **fields):
  """Returns an episode with given rewards."""
  ((episodes,), _) = walks.play([walks.make_groups(1, 1)])
  (step, *_) = episodes[0].steps
  valid = valid or [True] * len(rewards)
  steps = tuple(
    dataclasses.replace(
      step,
      response=str(n),
      result=dataclasses.replace(step.result, reward=reward, valid=v),
    )
    for n, (reward, v) in enumerate(zip(rewards, valid, strict=True))
  )
  return dataclasses.replace(episodes[0], steps=steps, **fields)


def test_returns_start_at_the_state_and_have_penalties():
  episode = make_episode([1, 2])
  states = continuations.find_states([episode])
  assert [len(start.steps) for start in states.starts] == [0, 1]
  played = [
    make_episode([1, 2, 4]),
    make_episode([8], valid=[False]),
    make_episode([100, 2, 4], num_repeated=1),
    make_episode([100], failure='raised: no', num_repeated=1),
  ]
  totals = continuations.returns(states, played, 0.5, 0.25)
  np.testing.assert_array_equal(totals, [[1 + 1 + 1, 7.75], [2 + 2, np.nan]])
  np.testing.assert_array_equal(continuations.mean_returns(totals), [5.375, 4])
  groups = group_filter.CollectedGroups([episode], [episode], [0], {})
  _, metrics = continuations.add_values(groups, states, played, 0.5, 0.25)
  assert metrics['continuations/value_mean'] == (5.375 + 4) / 2
  # Of the first state alone: 3 and 7.75 have the variance 4.75^2 / 2.
  assert metrics['continuations/standard_error'] == pytest.approx(4.75 / 2)


def test_failed_episodes_have_no_states_and_no_values():
  lone, failed = make_episode([0, 10]), make_episode([0], failure='died: x')
  states = continuations.find_states([failed, lone])
  assert [len(indices) for indices in states.indices] == [0, 2]
  found = continuations.with_values([failed, lone], states, np.array([4, 7.0]))
  assert [s.state_value for s in found[1].steps] == [4, 7]
  assert found[0] is failed and failed.steps[0].state_value is None


def test_advantages_of_a_lone_episode():
  # V = 4 before the first turn, 7 before the last one, 0 after it.
  episode = make_episode([0.5, 10], valid=[False, True])
  states = continuations.find_states([episode])
  values = np.array([4, 7.0])
  for first, (expected, known) in {
    4.0: ([0.5 - 0.1 + 7 - 4, 10 - 7], 2),
    # The continuations of the first state failed.
    math.nan: ([0, 3], 1),
  }.items():
    values[0] = first
    rows = batch.from_trajectories(
      continuations.with_values([episode], states, values),
      max_prompt_tokens=1,
      max_completion_tokens=2,
      row_multiple=3,
    )
    plain = algorithms.make('vineppo', discount=1.0, whiten_advantages=False)
    output = plain.compute_advantages(rows)
    np.testing.assert_allclose(output.advantages, [*expected, 0], atol=1e-6)
    mean = output.metrics['advantage/abs_mean']
    assert mean == pytest.approx(sum(expected) / known)


def test_unknown_values_do_not_count_when_advantages_are_whitened():
  # One token per turn. V = 5 before two turns; that of the third is unknown.
  rows = algorithm_rows.golden_rows().take(np.array([0, 1, 2, 8]))
  rows.episodes[:3], rows.steps[:3], rows.rewards[:3] = [0, 1, 2], 0, [4, 8, 9]
  rows.state_values[:] = [5, 5, np.nan, np.nan]
  # -1 and 3: mean 1, standard deviation sqrt(8).
  output = algorithms.make('vineppo').compute_advantages(rows)
  expected = [-np.sqrt(0.5), np.sqrt(0.5), 0, 0]
  np.testing.assert_allclose(output.advantages, expected, atol=1e-6)


@pytest.mark.parametrize(
  ('discount', 'expected'),
  [
    (1.0, [6 - 5, 10 - 6, 10 - 10, 6 - 5, 2 - 6, 0 - 2, 8 - 5, 10 - 8]),
    (0.5, [3 - 5, 5 - 6, 0, 3 - 5, 1 - 6, -2, 4 - 5, 2]),
  ],
)
def test_golden_advantages(discount, expected):
  rows = algorithm_rows.golden_rows()
  kwargs = {'discount': discount, 'whiten_advantages': False}
  output = algorithms.make('vineppo', **kwargs).compute_advantages(rows)
  np.testing.assert_allclose(output.advantages, [*expected, 0, 0], atol=1e-6)
  # Rows in another order have the same advantages.
  order = np.random.default_rng(0).permutation(10)
  found = algorithms.make('vineppo', **kwargs).compute_advantages(
    rows.take(order)
  )
  np.testing.assert_array_equal(found.advantages, output.advantages[order])
  whitened = algorithms.make('vineppo', discount=discount)
  found = whitened.compute_advantages(rows).advantages[:8]
  z = (expected - np.mean(expected)) / np.std(expected, ddof=1)
  np.testing.assert_allclose(found, z, atol=1e-5)


def _estimate_values(algorithm, groups):
  """Returns the groups with values, metrics, and the calls of the runner."""
  calls = []

  def run_batches(params, batches, **kwargs):
    calls.append((params, kwargs['base_params'], batches))
    return walks.play(batches)[0]

  parts = types.SimpleNamespace(
    algorithm=algorithm,
    config=configs_base.get_config(),
    carry_over=carry_over.CarryOver(),
    group_size=2,
    sampling=sampler.Sampling(),
    learner=types.SimpleNamespace(base='base'),
    stop_if_failed=lambda episodes: None,
  )
  kept, metrics = collection.estimate_state_values(
    parts,
    types.SimpleNamespace(run_batches=run_batches),
    types.SimpleNamespace(policy=types.SimpleNamespace(params='params')),
    groups,
    3,
  )
  return kept, metrics, calls


def test_remax_plays_one_greedy_episode_of_each_task():
  batch_of_groups = walks.make_groups()
  ((episodes,), _) = walks.play([batch_of_groups])
  groups = group_filter.CollectedGroups(episodes, episodes, [0, 1, 2, 3], {})
  found, metrics, calls = _estimate_values(algorithms.make('remax'), groups)
  ((_, _, (made,)),) = calls
  assert made.sampling == sampler.Sampling(temperature=0.0)
  tasks = {e.group for e in episodes if not e.failure}
  assert [e.group for e in made.paused] == sorted(tasks)
  assert not any(e.steps for e in made.paused)
  ((played,), _) = walks.play([made])
  values = {
    e.group: sum(s.result.reward - 0.1 * (not s.result.valid) for s in e.steps)
    for e in played
    if not e.failure
  }
  for episode in found.kept:
    first, *others = [s.state_value for s in episode.steps]
    assert others == [None] * len(others)
    if episode.group in values and not episode.failure:
      assert first == pytest.approx(values[episode.group])
  assert metrics['continuations/states'] == len(tasks)


def test_the_greedy_return_of_remax_is_not_discounted(monkeypatch):
  episode = make_episode([1, 2])
  monkeypatch.setattr(walks, 'play', lambda _: ([[episode]], None))
  groups = group_filter.CollectedGroups([episode], [episode], [0], {})
  valued, *_ = _estimate_values(algorithms.make('remax'), groups)
  assert [s.state_value for s in valued.kept[0].steps] == [3, None]


def test_a_run_plays_continuations_only_for_algorithms_that_need_them():
  batch_of_groups = walks.make_groups()
  ((episodes,), _) = walks.play([batch_of_groups])
  groups = group_filter.CollectedGroups(episodes, episodes, [0, 1, 2, 3], {})
  found, metrics, calls = _estimate_values(algorithms.make('gigpo'), groups)
  assert found is groups and not metrics and not calls
  algorithm = algorithms.make('vineppo', continuations=3)
  found, metrics, calls = _estimate_values(algorithm, groups)
  assert [call[:2] for call in calls] == [('params', 'base')]
  states = continuations.find_states(episodes)
  made = continuations.make_batch(states, 3, batch_of_groups)
  ((played,), _) = walks.play([made])
  totals = continuations.returns(states, played, 0.95, 0.1)
  values = continuations.mean_returns(totals)
  assert [[s.state_value for s in t.steps] for t in found.kept] == [
    [values[state] for state in indices] for indices in states.indices
  ]
  assert metrics['time/continuations_secs'] > 0
  history = run_state.History().after(3, found, {}, metrics)
  base_cost = group_filter.SampleCounts.of(episodes)
  assert history.counts == base_cost + found.further
