import dataclasses
import types

import algorithm_rows
import jax
import numpy as np
import pytest
import slow_advantages

from configs import alfworld
from envs import messages
from gigpo_jax import advantages, algorithms, batch, builders, row_stats
from gigpo_jax.algorithms import pass_at_k, polychromic, t_spmo
from gigpo_jax.run import run_state


@pytest.fixture(name='compiled')
def fixture_compiled():
  """Yields a list of the programs that are compiled during the test."""
  names = []

  def listen(event: str, _: float, **details) -> None:
    if event == '/jax/core/compile/backend_compile_duration':
      names.append(details.get('fun_name'))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize('name', algorithms.REGISTRY)
def test_every_algorithm_returns_advantages_and_compiles_with_dummy_rows(
  compiled, name
):
  config = alfworld.get_config(f'tiny,{name}' if name != 'gigpo' else 'tiny')
  # Shapes that no other test has compiled.
  steps = 13 + list(algorithms.REGISTRY).index(name)
  config.env.max_steps, config.rollout.groups = steps, 1
  algorithm = algorithms.of_section(config.algorithm.to_dict())
  rows = builders.make_dummy_rows(config)
  assert len(rows.groups) == steps * config.rollout.episodes_per_group
  assert rows.real.sum() == 1
  values = np.zeros_like(rows.completion_mask, np.float32)

  def compute():
    advantages.diagnose(*rows.steps_taken(), discount=0.5)
    return algorithms.compute(algorithm, rows, values, {})

  compute()
  assert compiled
  del compiled[:]
  rows.groups[:-2] = rows.groups[0]
  rows.episodes[:] %= 3
  rows.rewards[:2] = 10
  actual, metrics, targets, *_ = compute()
  assert not compiled

  assert isinstance(actual, np.ndarray)
  by_token = algorithm.needs_values or name == 't_spmo'
  shape = rows.completion_mask.shape
  assert actual.shape == (shape if by_token else shape[:1])
  assert not actual[-2:].any()
  assert (targets is None) == (not algorithm.needs_values)
  assert actual.dtype == np.float32
  assert all(type(value) is float for value in metrics.values())


def test_gigpo_on_the_golden_batch():
  actual, metrics, *_ = algorithms.make(
    'gigpo', discount=0.5
  ).compute_advantages(algorithm_rows.golden_rows())
  expected = [0.5774, 1.7321, 0.5774, -2.1547, -1.7321, -1.7321, 1.5773, 0.5774]
  np.testing.assert_allclose(actual, [*expected, 0, 0], atol=1e-4)
  # Anchor groups a and b of 3 rows, c and d of one: 2 rows of 8; 8 rows / 4.
  assert metrics['advantage/singleton_anchor_rows'] == 0.25
  assert metrics['advantage/anchor_group_size_mean'] == pytest.approx(2)
  assert metrics['advantage/zero_variance_groups'] == 0
  # (5 * .57735 + 3 * 1.15470) / 8; (1.1547 + 1 + 2 * .57735 + 1) / 8.
  assert metrics['advantage/episode_abs_mean'] == pytest.approx(
    0.79386, abs=1e-5
  )
  assert metrics['advantage/step_abs_mean'] == pytest.approx(0.53868, abs=1e-5)


def test_grpo_is_the_episode_advantage():
  rows = algorithm_rows.golden_rows()
  actual, *_ = algorithms.make('grpo').compute_advantages(rows)
  components = advantages.gigpo_components(
    rows.rewards,
    rows.groups,
    rows.episodes,
    rows.steps,
    rows.anchors,
    rows.valid,
  )
  np.testing.assert_array_equal(actual, components.episode_advantage)


# Golden values for the batch, computed separately in float64; discount 0.5.
E_STD = np.repeat([0.57735, -1.15470, 0.57735], [3, 3, 2])


@pytest.mark.parametrize(
  ('name', 'options', 'expected'),
  [
    ('dr_grpo', {}, np.repeat([3.3333, -6.6667, 3.3333], [3, 3, 2])),
    ('rloo', {}, np.repeat([5, -10, 5], [3, 3, 2])),
    (
      'hgpo',
      {'history': 1},
      [0, 1.1657, 0, -1.2247, -0.8828, -0.7071, 1.2247, 0],
    ),
    (
      'graphgpo',
      {},
      E_STD + [-0.5773, 1.1547, 0, -0.5773, -0.5773, -0.5773, 1.1547, 0],
    ),
    (
      'g2po',
      {},
      E_STD
      + [-0.5774, 1.1406, 0, -0.5774, -0.4148, -0.7259, 1.1547, 0]
      + [-0.9209, 0.8034, 1.1169, -0.9209, -0.7642, -1.0777, 0.6466, 1.1169],
    ),
    # A_S without A_E.
    (
      'gigpo',
      {'episode_weight': 0.0},
      [0, 1.1547, 0, -1, -0.5774, -0.5774, 1, 0],
    ),
    # Potentials: a 2.5, b 5/3, c and d 10. Differences: b - a = -.8333, c - b =
    # 8.3333, 0; -.8333, 0, -1.6667; d - a = 7.5, 0; normalized -.5774 1.1406 0
    # -.5774 -.4148 -.7259 1.1547 0. One of three episodes fails: weight 1/9.
    (
      'pgpo',
      {},
      [-0.0642, 1.2814, 0, -1.0641, -0.6234, -0.6580, 1.1283, 0],
    ),
    (
      'pgpo',
      {'failure_exponent': 0.0, 'episode_weight': 1.0},
      E_STD + [-0.5774, 2.2953, 0, -1.5774, -0.9922, -1.3033, 2.1547, 0],
    ),
    # In a, means 1.25 (twice) and 5 of mean 2.5 shrink to 1.875 and 3.3333,
    # normalized -.5774 -.5774 1.1547; B = 3.125, W = 1.0417; tanh(3 / 4) .75 =
    # .4764. In b: 2.7778 and .8333 (twice), W = 0, tanh(3 / 4) = .6351.
    (
      'ecpo',
      {},
      E_STD + [-0.2750, 0.7334, 0, -0.2750, -0.3667, -0.3667, 0.5501, 0],
    ),
    # Sets of 2 of 2 successes and a failure: all succeed, so no signal. Sets of
    # 1: m = 2/3, s = .4714; (1 - m) / s = .7071, (1 - m - 1) / s = -1.4142.
    ('pass_at_k', {}, np.zeros(8)),
    (
      'pass_at_k',
      {'set_size': 1},
      np.repeat([0.7071, -1.4142, 0.7071], [3, 3, 2]),
    ),
    # Rows of one token each: returns 10 five times and 0 three times, mean
    # 6.25, variance (5 * 3.75^2 + 3 * 6.25^2) / 7 = 26.7857.
    ('reinforce_pp', {}, np.repeat([0.7246, -1.2076, 0.7246], [3, 3, 2])),
  ],
)
def test_golden_values(name, options, expected):
  algorithm = algorithms.of_section({'name': name, 'discount': 0.5, **options})
  output = algorithm.compute_advantages(algorithm_rows.golden_rows())
  np.testing.assert_allclose(output.advantages, [*expected, 0, 0], atol=2e-4)


def test_baseline_is_the_mean_of_the_group():
  # Group 0 has returns 10 and 0, with three rows each; group 1 has return 10
  # with two rows. Minus the group means 5 and 10: 5, -5 and 0, with mean 0 and
  # variance (6 * 25) / 7 = 21.4286. Without a baseline, groups do not matter.
  rows = algorithm_rows.golden_rows()
  rows.groups[6:8] = 1
  actual = (
    algorithms.make('reinforce_pp_baseline').compute_advantages(rows).advantages
  )
  expected = np.repeat([1.0801, -1.0801, 0, 0], [3, 3, 2, 2])
  np.testing.assert_allclose(actual, expected, atol=2e-4)
  plain = algorithms.make('reinforce_pp').compute_advantages(rows).advantages
  np.testing.assert_allclose(
    plain, np.repeat([0.7246, -1.2076, 0.7246, 0], [3, 3, 2, 2]), atol=2e-4
  )


def test_hgpo_without_history_is_the_step_advantage():
  rows = algorithm_rows.golden_rows()
  output = algorithms.make('hgpo', discount=0.5, history=0).compute_advantages(
    rows
  )
  # G at anchor a: 2.5, 0, 5; at b: 5, 0, 0.
  expected = [0, 1.4142, 0, -1.2247, -0.7071, -0.7071, 1.2247, 0, 0, 0]
  np.testing.assert_allclose(output.advantages, expected, atol=1e-4)


def test_hgpo_levels_need_enough_anchors():
  # Discount 0.5, episodes a, b, a (success), a, b (failure), a, a (failure):
  # G is 2.5, 5, 10, then 0, 0, then 0, 0. Level k has weight k + 1.
  rows = algorithm_rows.golden_rows()
  rows.episodes[:7], rows.groups[7] = [0, 0, 0, 1, 1, 2, 2], -1
  rows.steps[:7] = [0, 1, 2, 0, 1, 0, 1]
  rows.anchors[:7] = [0, 1, 0, 0, 1, 0, 0]
  rows.rewards[:] = 0
  rows.rewards[2] = 10
  output = algorithms.make(
    'hgpo', discount=0.5, norm='mean', history=2
  ).compute_advantages(rows)
  # Level 1: a, 5 rows with G 2.5, 10, 0, 0, 0 and mean 2.5; b, 5 and 0.
  # Level 2: (a, b), 5 and 0. (b, a), (a, a) and level 3's (a, b, a) have one
  # row each. Step 0 has level 1 only; the second b gives -2.5 in both levels.
  np.testing.assert_allclose(
    output.advantages, [0, 2.5, 7.5, -2.5, -2.5, -2.5, -2.5, 0, 0, 0], atol=1e-6
  )


def test_graph_without_success_gives_zero_advantages():
  rows = algorithm_rows.golden_rows()
  rows.rewards[:], rows.success[:] = 0, False
  output = algorithms.make('graphgpo').compute_advantages(rows)
  np.testing.assert_array_equal(output.advantages, 0)


def _single_tokens(count: int) -> batch.Rows:
  """Returns rows with a prompt and a completion of one token each."""
  return batch.pack(
    [np.array([1])] * count,
    [np.array([2])] * count,
    max_prompt_tokens=1,
    max_completion_tokens=1,
    row_multiple=count,
  )


def test_g2po_treats_equal_values_as_equal():
  # All seven episodes succeed in three steps: one through state 1, six through
  # state 2. Both states have the same value.
  rows = _single_tokens(21)
  rows.groups[:] = 0
  rows.episodes[:], rows.steps[:] = np.divmod(np.arange(21), 3)
  middle = np.where(rows.episodes == 0, 1, 2)
  rows.anchors[:] = np.choose(rows.steps, [0, middle, 3])
  rows.next_anchors[:] = np.choose(rows.steps, [middle, 3, 4])
  rows.success[:] = rows.steps == 2
  rows.rewards[:] = 10.0 * rows.success
  actual = algorithms.make('g2po').compute_advantages(rows).advantages
  expected = slow_advantages.g2po(
    slow_advantages.Steps(rows, slow_advantages.Options())
  )
  np.testing.assert_allclose(
    actual, [expected[r] for r in range(21)], atol=1e-4
  )


def test_g2po_with_one_state_credits_the_last_step():
  # Two episodes of two steps, discount 0.5: the state has the value (2.5 + 5 +
  # 0 + 0) / 4 = 1.875, which only last steps change, to 10 and to 0. Both terms
  # of A_S normalize -1.5625, 6.5625, -1.5625 and -3.4375.
  rows = _single_tokens(4)
  rows.groups[:], rows.anchors[:], rows.next_anchors[:] = 0, 0, 0
  rows.episodes[:], rows.steps[:] = np.divmod(np.arange(4), 2)
  rows.rewards[1], rows.success[1] = 10, True
  actual = algorithms.make('g2po', discount=0.5).compute_advantages(rows)
  np.testing.assert_allclose(
    actual.advantages, [0.0070, 3.6477, -1.4072, -2.2474], atol=1e-3
  )


def test_gdpo_by_hand():
  # Four episodes of one step; rewards (1, 1, 0, 0) and (10, 0, 10, 0).
  rows = algorithm_rows.golden_rows()
  for name in ('groups', 'episodes', 'steps'):
    getattr(rows, name)[:] = -1 if name == 'groups' else 0
  rows.groups[:4], rows.episodes[:4] = 0, range(4)
  rows.components[:4] = [[1, 10], [1, 0], [0, 10], [0, 0]]
  actual = algorithms.make('gdpo').compute_advantages(rows).advantages
  np.testing.assert_allclose(
    actual, [1.2247, 0, 0, -1.2247, *[0] * 6], atol=2e-4
  )
  # The scale of a reward does not matter; its weight does.
  rows.components[:, 1] *= 7
  np.testing.assert_allclose(
    algorithms.make('gdpo').compute_advantages(rows).advantages,
    actual,
    atol=2e-4,
  )
  first_only = algorithms.make(
    'gdpo', component_weights=(1.0, 0.0)
  ).compute_advantages(rows)
  np.testing.assert_allclose(
    first_only.advantages[:4], [0.8660, 0.8660, -0.8660, -0.8660], atol=2e-4
  )


def test_gdpo_takes_no_rounding_error_for_a_difference():
  # The second component is 1 minus the first: their z-scores cancel.
  rows = algorithm_rows.golden_rows()
  rows.groups[:], rows.steps[:] = -1, 0
  rows.groups[:6], rows.episodes[:6] = [0, 0, 0, 1, 1, 1], range(6)
  rows.components[:6, 0] = [0.7, 0.2, 0.1, 0.3, 0.3, 0.4]
  rows.components[:6, 1] = 1 - rows.components[:6, 0]
  output = algorithms.make('gdpo').compute_advantages(rows)
  np.testing.assert_array_equal(output.advantages, 0)


def two_turns():
  """Returns one episode of two turns of two tokens, and a padding row."""
  rows = batch.pack(
    [np.array([1, 2])] * 2,
    [np.array([3, 4])] * 2,
    max_prompt_tokens=2,
    max_completion_tokens=2,
    row_multiple=3,
  )
  rows.groups[:2], rows.episodes[:2], rows.steps[:2] = 0, 0, [1, 0]
  rows.rewards[:2] = [10, 0]
  rows.valid[1] = False
  return rows


def test_remax_by_hand():
  # Returns 10, 0 and 10; the greedy episode had 5.
  rows = algorithm_rows.golden_rows()
  expected = np.repeat([5, -5, 5, 0], [3, 3, 2, 2])
  output = algorithms.make('remax').compute_advantages(rows)
  np.testing.assert_array_equal(output.advantages, expected)
  rows.state_values[3] = np.nan  # The greedy episode failed.
  expected[3:6] = 0
  output = algorithms.make('remax').compute_advantages(rows)
  np.testing.assert_array_equal(output.advantages, expected)
  rows.state_values[0] = np.nan  # Of an episode with a return, too.
  expected[:3] = 0
  output = algorithms.make('remax').compute_advantages(rows)
  np.testing.assert_array_equal(output.advantages, expected)


def test_sets_of_distinct_episodes_by_hand():
  # Returns 4, 4, 0, 0; the first two are alike. Pairs: (4 + 4) / 2 / 2 = 2 for
  # the first two, 2 for each of the four mixed pairs, and 0 for the last two;
  # mean 10 / 6. Each episode is in three pairs.
  advantages = polychromic.set_advantages(
    np.array([4.0, 4, 0, 0]), [(7, 7), (7, 7), (7,), (8,)], 2
  )
  np.testing.assert_allclose(advantages, np.array([6, 6, 4, 4]) / 3 - 10 / 6)
  # A single set has nothing to be compared with.
  advantages = polychromic.set_advantages(np.array([4.0, 0]), [(1,), (1,)], 2)
  np.testing.assert_array_equal(advantages, 0)
  assert not polychromic.set_advantages(np.ones(1), [(1,)], 2).any()


def test_information_gain_by_hand():
  # Probabilities .1, .4, .3 and .8 before the four turns: gains .3, -.1, .5,
  # with mean .2333 and deviation .3055. One return has no z-score.
  rows = _single_tokens(4)
  rows.groups[:], rows.episodes[:], rows.steps[:] = 0, 0, range(4)
  rows.state_values[:] = [0.1, 0.4, 0.3, 0.8]
  algorithm = algorithms.make('igpo', discount=0.5, components=())
  z = (np.array([0.3, -0.1, 0.5]) - 0.23333) / 0.30551
  output = algorithm.compute_advantages(rows)
  expected = [z[0] + z[1] / 2 + z[2] / 4, z[1] + z[2] / 2, z[2], 0]
  np.testing.assert_allclose(output.advantages, expected, atol=1e-4)
  assert output.metrics['advantage/gain_mean'] == pytest.approx(0.7 / 3)
  half = algorithms.make('igpo', discount=0.5, gain_weight=0.5, components=())
  np.testing.assert_allclose(
    half.compute_advantages(rows).advantages, np.array(expected) / 2, atol=1e-4
  )
  # Two episodes of two turns: gains .3 and .5 have z = -+.7071. The sums of the
  # components are 4 and 0, and 1 and 3: z = +-.7071 and -+.7071.
  pair = dataclasses.replace(rows, components=np.zeros((4, 2), np.float32))
  pair.episodes[:], pair.steps[:] = [0, 0, 1, 1], [0, 1, 0, 1]
  pair.components[:] = [[1, 1], [3, 0], [0, 1], [0, 2]]
  decoupled = algorithms.make(
    'igpo', discount=0.5, components=('reward', 'x'), component_weights=(1, 3)
  )
  output = decoupled.compute_advantages(pair)
  expected = 0.70711 * np.array([-1 - 1, -2, 1 + 1, 2])
  np.testing.assert_allclose(output.advantages, expected, atol=1e-4)
  rows.episodes[:], rows.steps[:] = 0, range(4)
  rows.state_values[1] = np.nan  # Gains .5 only, which has no z-score.
  assert not algorithm.compute_advantages(rows).advantages.any()


def test_the_best_value_by_hand():
  # Returns 1, 0, 0, 0: V* = 0.5 log((e^2 + 3) / 4) = 0.4772.
  rows = _single_tokens(4)
  rows.groups[:], rows.episodes[:], rows.rewards[0] = 0, range(4), 1
  output = algorithms.make('a_star_po').compute_advantages(rows)
  expected = [1 - 0.4772, -0.4772, -0.4772, -0.4772]
  np.testing.assert_allclose(output.advantages, expected, atol=5e-5)
  # At temperature 1: log((e + 3) / 4) = 0.3574.
  output = algorithms.make(
    'a_star_po', value_temperature=1.0
  ).compute_advantages(rows)
  np.testing.assert_allclose(
    output.advantages, [1 - 0.3574, *[-0.3574] * 3], atol=5e-5
  )
  rows.rewards[:] = 10_000  # exp would overflow.
  output = algorithms.make('a_star_po').compute_advantages(rows)
  np.testing.assert_allclose(output.advantages, 0, atol=1e-3)


def test_risk_by_hand():
  # Quantiles 1 and 4. S = 3: RVaR = (2 - 0 - 3) / 0.6 and CVaR = 0. S = 0: RVaR
  # = -3 / 0.6, CVaR = -1 / 0.2. S = 5: RVaR = (4 - 1 - 3) / 0.6, CVaR = 0.
  subject = algorithms.make('risk_po')
  found = subject.risk(np.array([3.0, 0.0, 5.0]), np.array([1.0, 4.0]))
  np.testing.assert_allclose(found, [-0.6667, -5, 0], atol=5e-5)
  # RVaR: (2 + 1 - 4) / 0.25, -3 / 0.25, 0; CVaR: 0, -1 / 0.5, 0.
  subject = algorithms.make(
    'risk_po', tail_weight=3.0, quantile_levels=(0.5, 0.75)
  )
  risks = subject.risk(np.array([3.0, 0.0, 5.0]), np.array([1.0, 4.0]))
  np.testing.assert_allclose(risks, [-4 / 4, (-6 - 12) / 4, 0])


def test_quantiles_are_tracked_by_hand():
  # One bundle of one task: sums 10, 0, 10, with quantiles 1 and 4 before.
  state = {'state/quantile_low': 1.0, 'state/quantile_high': 4.0}
  subject = algorithms.make('risk_po', bundle_tasks=1, quantile_rate=0.3)
  rows = algorithm_rows.golden_rows()
  output = algorithms.compute(subject, rows, None, state)
  # A third of the sums is below 1 and below 4.
  after = algorithms.next_state(state, output.metrics)
  assert after == pytest.approx(
    {
      'state/quantile_low': 1 + 0.3 * (0.2 - 1 / 3),
      'state/quantile_high': 4 + 0.3 * (0.8 - 1 / 3),
    }
  )
  history = run_state.History(iteration=0, algorithm_state=after)
  assert run_state.History.from_json(history.to_json(), 0) == history
  deviation = np.std([10, 0, 10], ddof=1)
  expected = np.repeat([0, -5 / deviation, 0, 0], [3, 3, 2, 2])
  np.testing.assert_allclose(output.advantages, expected, atol=1e-5)
  # A sum that equals a quantile is not below it.
  tied = {'state/quantile_low': 0.0, 'state/quantile_high': 10.0}
  output = algorithms.compute(subject, rows, None, tied)
  assert algorithms.next_state(tied, output.metrics) == pytest.approx(
    {
      'state/quantile_low': 0.3 * 0.2,
      'state/quantile_high': 10 + 0.3 * (0.8 - 1 / 3),
    }
  )
  # Two tasks of a bundle: the only group fills none, and nothing changes.
  output = algorithms.compute(algorithms.make('risk_po'), rows, None, state)
  assert not output.advantages.any()
  assert algorithms.next_state(state, output.metrics) == state
  # A resumed run reads numbers of Python.
  after = algorithms.next_state({}, {'state/a': np.float32(0.1), 'loss': 2.0})
  assert after == {'state/a': float(np.float32(0.1))}
  assert type(after['state/a']) is float


def test_equal_values_have_no_z_scores():
  # The sums of 0.1, 0.2, ... in two orders differ by a rounding error.
  values = np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 2.0, 4.0])
  groups = np.array([0, 0, 1, 1])
  expected = np.array([0, 0, -1, 1]) / (np.sqrt(2) + 1e-6)
  scores = row_stats.group_z_scores(values, groups)
  np.testing.assert_allclose(scores, expected, atol=1e-12)
  assert not scores[:2].any() and values[0] != values[1]


def test_sums_are_divided_by_the_deviation_of_their_bundle():
  # Sums (10, 0, 0, 0) and (20, 20, 20, 10) of two bundles have the deviation 5.
  # Quantiles 0 and 20: S = 0: RVaR = -20 / 0.6; S = 10: -10 / 0.6; S = 20: 0.
  rows = algorithm_rows.golden_rows().take(np.zeros(8, int))
  rows.groups[:], rows.episodes[:] = np.repeat([0, 1], 4), range(8)
  rows.rewards[:], rows.valid[:] = [10, 0, 0, 0, 20, 20, 20, 10], True
  state = {'state/quantile_low': 0.0, 'state/quantile_high': 20.0}
  subject = algorithms.make('risk_po', bundle_tasks=1)
  output = algorithms.compute(subject, rows, None, state)
  half, all_of_it = -10 / 0.6 / 2.5 / 5, -20 / 0.6 / 2.5 / 5
  np.testing.assert_allclose(
    output.advantages,
    [half, all_of_it, all_of_it, all_of_it, 0, 0, 0, half],
    atol=1e-5,
  )
  # A single sum of each bundle is not divided.
  alone = rows.take(np.array([1, 4]))
  output = algorithms.compute(subject, alone, None, state)
  np.testing.assert_allclose(output.advantages, [5 * all_of_it, 0], atol=1e-5)


@pytest.mark.parametrize('count', [3, 7, 22])
def test_equal_sums_have_no_risk(count):
  # The computed deviation of these sums is above 0.
  rows = algorithm_rows.golden_rows().take(np.zeros(count, int))
  rows.groups[:], rows.episodes[:] = 0, range(count)
  rows.rewards[:], rows.success[:] = -1.4, False
  state = {'state/quantile_low': -3.0, 'state/quantile_high': 8.0}
  subject = algorithms.make('risk_po', bundle_tasks=1)
  output = algorithms.compute(subject, rows, None, state)
  np.testing.assert_array_equal(output.advantages, 0)


UNWHITENED = {'whiten_advantages': False, 'invalid_penalty': 1.0}


def test_gae_by_hand():
  # Row 0 is the second turn. Values 1, 2 of the first turn, 4, 6 of the second;
  # rewards 0, -1, 0, 10; discount and lambda 0.5.
  values = np.array([[4, 6], [1, 2], [9, 9]], np.float32)
  output = algorithms.make(
    'ppo', gae_discount=0.5, gae_lambda=0.5, **UNWHITENED
  ).compute_advantages(two_turns(), values)
  # delta: 10 - 6 = 4; 0.5 * 6 - 4 = -1; -1 + 0.5 * 4 - 2 = -1; 0.5 * 2 - 1 = 0.
  # A: 4; -1 + 0.25 * 4 = 0; -1 + 0 = -1; 0 - 0.25 = -0.25.
  np.testing.assert_allclose(output.advantages, [[0, 4], [-0.25, -1], [0, 0]])
  np.testing.assert_allclose(output.value_targets, [[4, 10], [0.75, 1], [0, 0]])
  # Errors 0, 4, -0.25, -1 have the variance 17.0625 / 4 - 2.75^2 / 16; targets
  # that of 4, 10, 0.75, 1.
  explained = 1 - 3.79296875 / np.var([4, 10, 0.75, 1])
  assert output.metrics == pytest.approx(
    {
      'critic/value_mean': (4 + 6 + 1 + 2) / 4,
      'critic/explained': explained,
      'advantage/abs_mean': (0 + 4 + 0.25 + 1) / 4,
    }
  )


def test_gae_over_turns_by_hand():
  values = np.array([[4, 6], [1, 2], [9, 9]], np.float32)
  output = algorithms.make(
    'ppo', gae_level='turn', gae_discount=0.5, gae_lambda=0.5, **UNWHITENED
  ).compute_advantages(two_turns(), values)
  # delta: 10 - 4 = 6; -1 + 0.5 * 4 - 1 = 0. A: 6; 0.25 * 6 = 1.5.
  np.testing.assert_allclose(output.advantages, [[6, 6], [1.5, 1.5], [0, 0]])
  np.testing.assert_allclose(output.value_targets, [[10, 0], [2.5, 0], [0, 0]])


def test_undiscounted_advantages_are_returns_minus_values():
  values = np.random.default_rng(0).normal(size=(10, 1)).astype(np.float32)
  rows = algorithm_rows.golden_rows()
  output = algorithms.make('ppo', whiten_advantages=False).compute_advantages(
    rows, values
  )
  returns = np.repeat([10, 0, 10], [3, 3, 2])[:, None]
  np.testing.assert_allclose(
    output.advantages[:8], returns - values[:8], atol=1e-5
  )
  np.testing.assert_allclose(output.value_targets[:8], returns, atol=1e-5)
  whitened = (
    algorithms.make('ppo').compute_advantages(rows, values).advantages[:8]
  )
  assert whitened.mean() == pytest.approx(0, abs=1e-6)
  assert whitened.std(ddof=1) == pytest.approx(1, abs=1e-5)


def test_ppo_rejects_missing_values():
  with pytest.raises(ValueError, match='values=None: ppo needs the values'):
    algorithms.make('ppo').compute_advantages(algorithm_rows.golden_rows())


ROWS = {'episode_stats': 'rows', 'penalty_scope': 'row', 'lone_episode': 'raw'}


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('gigpo', {}),
    ('gigpo', {'norm': 'mean', 'step_weight': 0.4, 'discount': 1.0}),
    ('gigpo', {'norm': 'leave_one_out', 'lone_episode': 'raw'}),
    ('gigpo', ROWS),
    ('gigpo', {'episode_weight': 0.0}),
    ('pgpo', {}),
    ('pgpo', ROWS | {'episode_weight': 0.5, 'failure_exponent': 1.0}),
    (
      'pgpo',
      {'norm': 'mean', 'potential_discount': 0.9, 'potential_weight': 2},
    ),
    ('gagpo', {}),
    ('gagpo', ROWS | {'episode_weight': 0.5, 'step_lambda': 0.5}),
    ('gagpo', {'norm': 'mean', 'step_lambda': 0.0, 'discount': 1.0}),
    ('ecpo', {}),
    ('ecpo', ROWS | {'prior_steps': 0.0, 'evidence_steps': 1.0}),
    ('ecpo', {'norm': 'mean', 'step_weight': 0.5}),
    ('grpo', {}),
    ('rloo', {}),
    ('dr_grpo', {}),
    ('graphgpo', {}),
    ('graphgpo', {'norm': 'mean', 'graph_discount': 0.5}),
    ('graphgpo', ROWS),
    ('g2po', {}),
    ('g2po', {'norm': 'mean'}),
    ('hgpo', {}),
    ('hgpo', {'history': 0, 'norm': 'mean', 'episode_weight': 1.0}),
    ('hgpo', {'history': 3, 'level_exponent': 2.0, 'norm': 'leave_one_out'}),
    ('reinforce_pp', {}),
    ('reinforce_pp_baseline', {}),
    ('remax', {}),
    ('polychromic', {}),
    ('polychromic_vine', {}),
    ('arpo', {}),
    ('tree_grpo', {}),
    ('igpo', {'components': ()}),
    ('igpo', {'components': (), 'discount': 1.0}),
    ('igpo', {'component_weights': (0.5, 2.0), 'components': ('reward', 'x')}),
    ('a_star_po', {}),
    ('rebel', {}),
    ('risk_po', {'bundle_tasks': 2}),
    ('vineppo', {}),
    ('vineppo', {'discount': 1.0, 'whiten_advantages': False}),
    ('pass_at_k', {}),
    ('pass_at_k', {'set_size': 3}),
    ('gdpo', {}),
    ('gdpo', {'component_weights': (1.0, 0.5), 'components': ('reward', 'x')}),
  ],
  ids=str,
)
def test_advantages_match_a_slow_reference(name, options):
  for seed in range(6):
    rows = algorithm_rows.random_rows(seed)
    actual = (
      algorithms.make(name, **options).compute_advantages(rows).advantages
    )
    other = 'components', 'bundle_tasks'
    known = {k: v for k, v in options.items() if k not in other}
    steps = slow_advantages.Steps(rows, slow_advantages.Options(**known))
    by_row = getattr(slow_advantages, name)(steps)
    expected = [by_row.get(r, 0.0) for r in range(len(actual))]
    np.testing.assert_allclose(actual, expected, atol=5e-5, err_msg=str(seed))


@pytest.mark.parametrize('discount', [0.95, 0.5])
def test_prefixes_match_a_slow_reference(discount):
  options = {'discount': discount}
  for seed in range(2):
    rows = algorithm_rows.random_rows(seed)
    actual = algorithms.make('t_spmo', **options).compute_advantages(rows)
    steps = slow_advantages.Steps(rows, slow_advantages.Options(**options))
    expected = slow_advantages.t_spmo(steps)
    np.testing.assert_allclose(actual.advantages, expected, atol=2e-5)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize('level', ['token', 'turn'])
@pytest.mark.parametrize(('discount', 'decay'), [(1, 1), (0.9, 0.8), (0.5, 0)])
@pytest.mark.parametrize('whiten', [False, True])
def test_gae_matches_a_slow_reference(level, discount, decay, whiten):
  options = {
    'gae_level': level,
    'gae_discount': discount,
    'gae_lambda': decay,
    'whiten_advantages': whiten,
  }
  for seed in range(3):
    rows = algorithm_rows.random_rows(seed)
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(rows.groups), 6)).astype(np.float32)
    output = algorithms.make('ppo', **options).compute_advantages(rows, values)
    steps = slow_advantages.Steps(rows, slow_advantages.Options(**options))
    np.testing.assert_allclose(
      output.advantages, slow_advantages.ppo(steps, values), atol=2e-5
    )


@pytest.mark.parametrize('name', algorithms.REGISTRY)
def test_largest_rewards_give_finite_advantages(name):
  rows = algorithm_rows.random_rows(1)
  scale = np.where(rows.episodes % 2, 1, -1) * rows.real
  rows.rewards[:] = scale * messages.BOUNDS['reward']
  rows.components[:] = (scale * messages.LARGEST_METRIC)[:, None]
  values = np.zeros(rows.completion_mask.shape, np.float32)
  algorithm = algorithms.make(name)
  actual = algorithms.compute(algorithm, rows, values, {}).advantages
  assert np.isfinite(actual).all()
  # These use success and penalties, not rewards, or lack full bundles.
  if name not in ('a2fm', 'graphgpo', 'pass_at_k', 'risk_po'):
    assert np.abs(actual[rows.real]).max() > 0.1


def test_equal_returns_whiten_to_zero():
  rows = algorithm_rows.random_rows(0)
  rows.rewards[:], rows.valid[:] = 0, True
  for chain in slow_advantages.Steps(rows, slow_advantages.Options()).chains:
    rows.rewards[chain[-1]] = 9.9
  actual = algorithms.make('reinforce_pp').compute_advantages(rows).advantages
  np.testing.assert_array_equal(actual, 0)


def test_episode_weight_does_not_change_the_metrics():
  _, metrics, *_ = algorithms.make('hgpo').compute_advantages(
    algorithm_rows.golden_rows()
  )
  assert metrics['advantage/zero_variance_groups'] == 0
  assert metrics['advantage/episode_std'] > 0


def test_zero_variance_groups_are_counted():
  # Two episodes in group 0, one in group 1.
  rows = algorithm_rows.golden_rows()
  rows.groups[:8] = [0, 0, 0, 0, 0, 0, 1, 1]
  _, metrics, *_ = algorithms.make('gigpo').compute_advantages(rows)
  # Group 1 has a single episode and so no variance.
  assert metrics['advantage/zero_variance_groups'] == 0.5


def test_rejected_options():
  with pytest.raises(
    ValueError, match='name=pong: unknown; must be one of a2fm, a_star_po'
  ):
    algorithms.make('pong')
  with pytest.raises(
    ValueError, match='norm=x: unknown; must be one of mean_std'
  ):
    algorithms.make('grpo', norm='x')
  with pytest.raises(
    ValueError, match='penalty_scope=row: .*episode_stats=rows'
  ):
    algorithms.make('gigpo', penalty_scope='row')
  with pytest.raises(ValueError, match='episode_weight=0: with step_weight=0'):
    algorithms.make('gigpo', episode_weight=0.0, step_weight=0.0)
  line = r'^step_weigth=0.5: no option of gigpo; did you mean step_weight\?'
  with pytest.raises(ValueError, match=line):
    algorithms.make('gigpo', step_weigth=0.5)
  # A section has the options of all algorithms.
  section = {'name': 'grpo', 'step_weight': 2.0, 'norm': 'mean'}
  assert algorithms.of_section(section) == algorithms.make('grpo', norm='mean')


@pytest.mark.parametrize('name', ['remax', 'vineppo', 'igpo'])
def test_rows_without_state_values_are_refused(name):
  algorithm = algorithms.of_section({'name': name, 'components': ()})
  rows = algorithm_rows.golden_rows()
  rows.state_values[:] = np.nan
  line = '^rows.state_values: unknown in all rows, .*; must be estimated'
  with pytest.raises(ValueError, match=line):
    algorithm.compute_advantages(rows)
  # Unknown values of some rows are no mistake.
  rows.state_values[0] = 1.0
  assert np.isfinite(algorithm.compute_advantages(rows).advantages).all()


@pytest.mark.parametrize('name', ['gdpo', 'igpo'])
def test_rows_with_other_components_are_refused(name):
  rows = algorithm_rows.golden_rows()
  rows.state_values[:] = 0.5
  algorithm = algorithms.make(name, components=('speed', 'form', 'reward'))
  line = 'rows.components: [0-2] columns; must be one for each of speed, form, '
  with pytest.raises(ValueError, match=line):
    algorithm.compute_advantages(rows)


def test_advantages_may_be_a_list():
  def compute_advantages(rows):
    return algorithms.AlgorithmOutput([0.5] * len(rows.groups), {})

  algorithm = types.SimpleNamespace(
    needs_values=False, compute_advantages=compute_advantages
  )
  rows = algorithm_rows.golden_rows()
  actual = algorithms.compute(algorithm, rows, None, {}).advantages
  np.testing.assert_array_equal(actual, np.full(len(rows.groups), 0.5))


def test_sets_of_two_by_hand():
  # One success of four: C(3, 2) / C(4, 2) = 1/2, m = s = 1/2. The success is 1;
  # a failure (1/2 - C(2, 1) / C(3, 1)) / .5 = -1/3, which sum to 0.
  assert pass_at_k.set_advantages(4, 3, 2) == pytest.approx((1, -1 / 3))
  assert pass_at_k.set_advantages(4, 4, 2) == (0, 0)
  assert pass_at_k.set_advantages(1, 0, 2) == (0, 0)


def test_prefixes_by_hand():
  # Three first turns with the same prompt. Responses x y, x z and w: after the
  # prompt, x has returns 10 and 10, w 0: 10 and -10. After x, y and z are
  # equal: 0. The row of another prompt, and of another group, is alone.
  rows = batch.pack(
    [[1], [1], [1], [2], [1]],
    [[5, 6], [5, 7], [8], [8], [9]],
    max_prompt_tokens=1,
    max_completion_tokens=2,
    row_multiple=6,
  )
  rows.groups[:5] = [0, 0, 0, 0, 1]
  actual = t_spmo.token_advantages(rows, np.array([10.0, 10, 0, 5, 5, 0]))
  expected = [[10, 0], [10, 0], [-10, 0], [0, 0], [0, 0], [0, 0]]
  np.testing.assert_array_equal(actual, expected)
  # The paper's example: x has returns 1 and 1, y has 0.
  rows.tokens[:3, 1] = [5, 5, 6]
  actual = t_spmo.token_advantages(rows, np.array([1.0, 1, 0, 0, 0, 0]))
  np.testing.assert_array_equal(actual[:3, 0], [1, 1, -1])
