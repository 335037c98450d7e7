import numpy as np
import pytest

from gigpo_jax import advantages, algorithms, batch


def golden_rows():
  """The golden batch of gigpo.md and two rows of padding."""
  rows = batch.pack(
    [np.array([1, 2])] * 8,
    [np.array([3])] * 8,
    max_prompt_tokens=2,
    max_completion_tokens=1,
    row_multiple=10,
    num_components=2,
  )
  rows.groups[:8] = 0
  rows.episodes[:8] = [0, 0, 0, 1, 1, 1, 2, 2]
  rows.steps[:8] = [0, 1, 2, 0, 1, 2, 0, 1]
  rows.anchors[:8] = [0, 1, 2, 0, 1, 1, 0, 3]
  rows.rewards[[2, 7]] = rows.components[[2, 7], 0] = 10
  rows.next_anchors[:8] = [1, 2, -1, 1, 1, 1, 3, -1]
  rows.success[[2, 7]] = True
  return rows


@pytest.mark.parametrize('name', algorithms.NAMES)
def test_every_name_makes_an_algorithm(name):
  actual, metrics, _ = algorithms.make(name).credit(golden_rows())
  assert isinstance(actual, np.ndarray)
  assert actual.shape == (10,)
  assert actual.dtype == np.float32
  assert all(type(value) is float for value in metrics.values())


def test_gigpo_on_the_golden_batch():
  actual, metrics, _ = algorithms.make('gigpo', discount=0.5).credit(
    golden_rows()
  )
  expected = [0.5774, 1.7321, 0.5774, -2.1547, -1.7321, -1.7321, 1.5773, 0.5774]
  np.testing.assert_allclose(actual, [*expected, 0, 0], atol=1e-4)
  # Anchor groups a and b of 3 rows, c and d of one: 2 rows of 8; 8 rows / 4.
  assert metrics['advantage/singleton_anchor_rows'] == 0.25
  assert metrics['advantage/anchor_group_size_mean'] == pytest.approx(2)
  assert metrics['advantage/groups_without_spread'] == 0
  # (5 * .57735 + 3 * 1.15470) / 8; (1.1547 + 1 + 2 * .57735 + 1) / 8.
  assert metrics['advantage/episode_abs_mean'] == pytest.approx(
    0.79386, abs=1e-5
  )
  assert metrics['advantage/step_abs_mean'] == pytest.approx(0.53868, abs=1e-5)


def test_grpo_is_the_episode_level_alone():
  rows = golden_rows()
  actual, _, _ = algorithms.make('grpo', step_weight=1.0).credit(rows)
  parts = advantages.gigpo_parts(
    rows.rewards,
    rows.groups,
    rows.episodes,
    rows.steps,
    rows.anchors,
    rows.valid,
  )
  np.testing.assert_array_equal(actual, parts.episode_advantage)


# Golden values for the batch, computed apart in float64: discount 0.5.
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
    # Rows of one token each: returns 10 five times and 0 three times, mean
    # 6.25, variance (5 * 3.75^2 + 3 * 6.25^2) / 7 = 26.7857.
    ('reinforce_pp', {}, np.repeat([0.7246, -1.2076, 0.7246], [3, 3, 2])),
    # Less the mean of the episodes: 10/3 five times and -20/3 three times.
    (
      'reinforce_pp_baseline',
      {},
      np.repeat([0.7246, -1.2076, 0.7246], [3, 3, 2]),
    ),
  ],
)
def test_golden_values(name, options, expected):
  found = algorithms.make(name, discount=0.5, **options).credit(golden_rows())
  np.testing.assert_allclose(found.advantages, [*expected, 0, 0], atol=2e-4)


def test_hgpo_without_history_is_the_step_level_of_a_population():
  rows = golden_rows()
  found = algorithms.make('hgpo', discount=0.5, history=0).credit(rows)
  # Anchor a: 2.5, 0, 5; b: 5, 0, 0.
  expected = [0, 1.4142, 0, -1.2247, -0.7071, -0.7071, 1.2247, 0, 0, 0]
  np.testing.assert_allclose(found.advantages, expected, atol=1e-4)


def test_a_graph_without_success_teaches_nothing_by_steps():
  rows = golden_rows()
  rows.rewards[:], rows.success[:] = 0, False
  found = algorithms.make('graphgpo').credit(rows)
  np.testing.assert_array_equal(found.advantages, 0)


def test_gdpo_by_hand():
  # Four episodes of one step; rewards (1, 1, 0, 0) and (10, 0, 10, 0).
  rows = golden_rows()
  for name in ('groups', 'episodes', 'steps'):
    getattr(rows, name)[:] = -1 if name == 'groups' else 0
  rows.groups[:4], rows.episodes[:4] = 0, range(4)
  rows.components[:4] = [[1, 10], [1, 0], [0, 10], [0, 0]]
  found = algorithms.make('gdpo').credit(rows).advantages
  np.testing.assert_allclose(
    found, [1.2247, 0, 0, -1.2247, *[0] * 6], atol=2e-4
  )
  # The scale of a reward does not matter; its weight does.
  rows.components[:, 1] *= 7
  np.testing.assert_allclose(
    algorithms.make('gdpo').credit(rows).advantages, found, atol=2e-4
  )
  alone = algorithms.make('gdpo', component_weights=(1.0, 0.0)).credit(rows)
  np.testing.assert_allclose(
    alone.advantages[:4], [0.8660, 0.8660, -0.8660, -0.8660], atol=2e-4
  )


def test_groups_without_spread_are_counted():
  # The same episodes in a second group, but nobody succeeds.
  rows = golden_rows()
  rows.groups[:8] = [0, 0, 0, 0, 0, 0, 1, 1]
  _, metrics, _ = algorithms.make('gigpo').credit(rows)
  # Group 1 has one episode: nothing to compare.
  assert metrics['advantage/groups_without_spread'] == 0.5


def test_refusals():
  with pytest.raises(
    ValueError, match='name=pong: unknown; must be one of dr_grpo'
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
