"""Tests of algorithms that use values of states without a critic."""

import dataclasses

import algorithm_rows
import jax
import numpy as np
import pytest

from gigpo_jax import advantages, algorithms, arrays, state_values


@jax.jit
def _generalized(inputs, decay):
  row_segments = advantages.segment_rows(inputs, penalty_scope='reward')
  estimates = state_values.lambda_advantages(
    inputs, row_segments, decay, penalty_scope='reward'
  )
  step_advantages = advantages.step_advantages(
    row_segments.returns, row_segments.anchors, norm='mean'
  )
  return estimates, step_advantages


def generalized(rows, step_lambda):
  """Returns GAGPO's advantages before normalization, and A_S without std."""
  inputs = algorithms.make('gagpo', discount=0.5).inputs(rows)
  return _generalized(inputs, arrays.two_float(0.5 * step_lambda))


def test_generalized_advantages_by_hand():
  # V: a 2.5, b 5/3, c and d 10. delta = r + V' / 2 - V.
  rows = algorithm_rows.golden_rows()
  delta = [-1.6667, 3.3333, 0, -1.6667, -0.8333, -1.6667, 2.5, 0, 0, 0]
  np.testing.assert_allclose(generalized(rows, 0.0)[0], delta, atol=1e-4)
  # -1.6667 + .45 * 3.3333; -.8333 - .45 * 1.6667; -1.6667 - .45 * 1.5833.
  np.testing.assert_allclose(
    generalized(rows, 0.9)[0],
    [-0.1667, 3.3333, 0, -2.3792, -1.5833, -1.6667, 2.5, 0, 0, 0],
    atol=1e-4,
  )
  # Their mean is 0.0047 and their sample deviation 2.0119.
  output = algorithms.make('gagpo', discount=0.5).compute_advantages(rows)
  np.testing.assert_allclose(
    output.advantages,
    [
      -0.0852,
      1.6545,
      -0.0023,
      -1.1849,
      -0.7893,
      -0.8308,
      1.2403,
      -0.0023,
      0,
      0,
    ],
    atol=2e-4,
  )


def test_lambda_1_gives_the_step_advantage_without_deviation():
  expected = [0, 3.3333, 0, -2.5, -1.6667, -1.6667, 2.5, 0]
  actual, _ = generalized(algorithm_rows.golden_rows(), 1.0)
  np.testing.assert_allclose(actual[:8], expected, atol=1e-4)
  for seed in range(3):
    rows = algorithm_rows.random_rows(seed)
    actual, exact = generalized(rows, 1.0)
    np.testing.assert_array_equal(actual, exact)


@pytest.mark.parametrize('step_lambda', [0.0, 0.5, 1.0])
def test_generalized_advantages_discount_gaps_by_their_length(step_lambda):
  # Episode 0 takes step 0 in state a and step 3 in b, with reward 8; episodes 1
  # and 2 fail in a and in b. V is 0.5 in a, 4 in b. delta: 4 / 8 - 0.5, 4, -0.5
  # and -4; the decay from step 0 to step 3 is (lambda / 2)^3.
  rows = algorithm_rows.golden_rows().take(np.arange(4))
  rows.episodes[:], rows.steps[:] = [0, 0, 1, 2], [0, 3, 0, 0]
  rows.anchors[:], rows.rewards[:] = [0, 1, 0, 1], [0, 8, 0, 0]
  actual, _ = generalized(rows, step_lambda)
  expected = [step_lambda**3 / 2, 4, -0.5, -4]
  np.testing.assert_allclose(actual, expected, atol=1e-6)


def failed_action():
  """Returns a group with a failed action, by state.

  Episode 0 fails to act in s, goes to b and succeeds; episode 1 goes to c,
  where it fails to act.
  """
  rows = algorithm_rows.golden_rows().take(np.arange(5))
  rows.episodes[:], rows.steps[:] = [0, 0, 0, 1, 1], [0, 1, 2, 0, 1]
  rows.anchors[:], rows.next_anchors[:] = [0, 0, 1, 0, 2], [0, 1, -1, 2, 2]
  rows.rewards[:] = [0, 0, 10, 0, 0]
  rows.success[:] = rows.rewards > 0
  return rows


# E is 10 and 0, with mean 5 and deviation 7.0711.
EPISODE = np.repeat([0.7071, -0.7071], [3, 2])


def test_g2po_with_a_failed_action():
  # Discount .5: 1.25, 2.5, 5 and 0, 0. V is 1.25 in s, 5 in b, 0 in c. Values
  # after the steps: 1.25, 5, 10; 0, 0. In s they have mean 2.0833 and deviation
  # 2.6021; the gains 0, 3.75, 5, -1.25, 0 have mean 1.5 and deviation 2.7099.
  output = algorithms.make('g2po', discount=0.5).compute_advantages(
    failed_action()
  )
  step = np.array([-0.3203, 1.1209, 0, -0.8006, 0])
  step += [-0.5535, 0.8303, 1.2915, -1.0148, -0.5535]
  np.testing.assert_allclose(output.advantages, EPISODE + step, atol=2e-4)


def test_graphgpo_with_a_failed_action():
  # Steps to success after the steps: 2, 1, 0; c is unreachable: 3, 3. Values
  # .1, 1, 10 and .01, .01; in s, mean .37 and deviation .5474.
  output = algorithms.make('graphgpo').compute_advantages(failed_action())
  step = np.array([-0.4932, 1.1508, 0, -0.6576, 0])
  np.testing.assert_allclose(output.advantages, EPISODE + step, atol=2e-4)


@pytest.mark.parametrize('name', ['gigpo', 'pgpo', 'ecpo'])
def test_lone_anchors_have_no_step_advantage(name):
  rows = algorithm_rows.golden_rows()
  rows.anchors[:] = range(10)
  output = algorithms.make(name, episode_weight=1.0).compute_advantages(rows)
  episode_only = algorithms.make('grpo').compute_advantages(rows)
  np.testing.assert_array_equal(output.advantages, episode_only.advantages)


@pytest.mark.parametrize('name', ['gigpo', 'gagpo', 'pgpo', 'g2po', 'gdpo'])
def test_large_rewards_elsewhere_do_not_hide_small_ones(name):
  # One step per episode; the second group has the rewards of the first, times
  # a million.
  rows = algorithm_rows.golden_rows().take(np.array([0, 3, 4, 5]))
  rows.groups[:], rows.episodes[:], rows.steps[:] = (0, 0, 1, 1), range(4), 0
  rows.rewards[:], rows.anchors[:] = (0, 1, 0, 1e6), (0, 0, 1, 1)
  rows.valid[:], rows.success[:] = True, rows.rewards > 0
  kwargs = {}
  if name == 'gdpo':
    rows = dataclasses.replace(rows, components=rows.rewards[:, None])
    kwargs = {'components': ('reward',)}
  output = algorithms.make(name, **kwargs).compute_advantages(rows)
  low, high, *others = output.advantages
  assert high > 0.5 > -0.5 > low
  np.testing.assert_allclose(others, (low, high), rtol=1e-3)


def test_early_states_of_long_episodes_have_potentials():
  # Two successes and two failures of 300 steps, which share the first state.
  # With discount 0.95, the returns there are 2e-6 of the last.
  steps = 300
  rows = algorithm_rows.golden_rows().take(np.zeros(4 * steps, int))
  rows.groups[:], rows.success[:] = 0, False
  rows.episodes[:] = np.repeat(range(4), steps)
  rows.steps[:] = np.tile(range(steps), 4)
  rows.anchors[:] = np.arange(4 * steps)
  rows.anchors[rows.steps == 0] = 0
  last = rows.steps == steps - 1
  rows.rewards[:] = 10.0 * (last & (rows.episodes < 2))
  rows.success[:] = rows.rewards > 0
  rows.valid[:] = True
  kwargs = {'discount': 0.95, 'episode_weight': 0.0}
  subject = algorithms.make('pgpo', **kwargs, potential_weight=1.0)
  plain = algorithms.make('pgpo', **kwargs, potential_weight=0.0)
  given, without = (
    x.compute_advantages(rows).advantages[rows.steps == 0]
    for x in (subject, plain)
  )
  # Potentials of the next states: the returns of their only episodes, half of
  # which are 0; normalized like the returns themselves, times (1 - 1/2)^2.
  np.testing.assert_allclose(given - without, without / 4, rtol=0.05)


@pytest.mark.parametrize('name', ['pgpo', 'gagpo', 'ecpo'])
def test_equal_episodes_have_no_advantage(name):
  # Three episodes of one step each, with equal rewards that are not exact in
  # float32, in one state.
  rows = algorithm_rows.golden_rows().take(np.array([0, 3, 6]))
  rows.rewards[:], rows.success[:] = 0.1, True
  output = algorithms.make(name).compute_advantages(rows)
  np.testing.assert_array_equal(output.advantages, 0)


@pytest.mark.parametrize('name', ['g2po', 'pgpo', 'gagpo'])
def test_equal_returns_in_a_state_of_many_steps_have_no_advantage(name):
  # Most of 800 steps are in one state. The sum of their returns is not exact in
  # float32.
  members, steps = 16, 50
  rows = algorithm_rows.golden_rows().take(np.zeros(members * steps, int))
  rows.groups[:], rows.valid[:], rows.rewards[:] = 0, True, 0
  rows.episodes[:] = np.repeat(range(members), steps)
  rows.steps[:] = np.tile(range(steps), members)
  rng = np.random.default_rng(0)
  often = rng.random(members * steps) < 0.9
  rows.anchors[:] = np.where(often, 0, rng.integers(1, 9, members * steps))
  last = rows.steps == steps - 1
  rows.next_anchors[:] = np.where(last, -1, np.roll(rows.anchors, -1))
  rows.success[:] = last
  for reward in (0.3, 0.7, 9.9):
    rows.rewards[last] = reward
    output = algorithms.make(name, discount=1.0).compute_advantages(rows)
    np.testing.assert_array_equal(output.advantages, 0)


@pytest.mark.parametrize('name', ['g2po', 'pgpo'])
def test_equal_means_of_different_returns_are_equal(name):
  # From state 0, three episodes go to state 1 and three to state 2. Both have
  # the returns .1, .3 and .7, whose means differ in their last bits.
  rows = algorithm_rows.golden_rows().take(np.zeros(12, int))
  rows.episodes[:] = np.repeat(range(6), 2)
  rows.steps[:] = np.tile(range(2), 6)
  rows.rewards[rows.steps == 1] = [0.1, 0.3, 0.7, 0.7, 0.1, 0.3]
  via = np.repeat([1, 2], 6)
  rows.anchors[:] = np.where(rows.steps == 0, 0, via)
  rows.next_anchors[:] = np.where(rows.steps == 0, via, -1)
  rows.success[:] = False
  output = algorithms.make(name).compute_advantages(rows)
  one, other = output.advantages[::2].reshape(2, 3)
  np.testing.assert_allclose(one, other[[1, 2, 0]], atol=1e-3)
