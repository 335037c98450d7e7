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
  )
  rows.groups[:8] = 0
  rows.episodes[:8] = [0, 0, 0, 1, 1, 1, 2, 2]
  rows.steps[:8] = [0, 1, 2, 0, 1, 2, 0, 1]
  rows.anchors[:8] = [0, 1, 2, 0, 1, 1, 0, 3]
  rows.rewards[[2, 7]] = 10
  return rows


@pytest.mark.parametrize('name', algorithms.REGISTRY)
def test_every_name_makes_an_algorithm(name):
  actual, metrics = algorithms.make(name).advantages(golden_rows())
  assert isinstance(actual, np.ndarray)
  assert actual.shape == (10,)
  assert actual.dtype == np.float32
  assert all(type(value) is float for value in metrics.values())


def test_gigpo_on_the_golden_batch():
  actual, metrics = algorithms.make('gigpo', discount=0.5).advantages(
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
  actual, _ = algorithms.make('grpo', step_weight=1.0).advantages(rows)
  parts = advantages.gigpo_parts(
    rows.rewards,
    rows.groups,
    rows.episodes,
    rows.steps,
    rows.anchors,
    rows.valid,
  )
  np.testing.assert_array_equal(actual, parts.episode_advantage)


def test_groups_without_spread_are_counted():
  # The same episodes in a second group, but nobody succeeds.
  rows = golden_rows()
  rows.groups[:8] = [0, 0, 0, 0, 0, 0, 1, 1]
  _, metrics = algorithms.make('gigpo').advantages(rows)
  # Group 1 has one episode: nothing to compare.
  assert metrics['advantage/groups_without_spread'] == 0.5


def test_refusals():
  with pytest.raises(
    ValueError, match='name=ppo: unknown; must be one of gigpo, grpo'
  ):
    algorithms.make('ppo')
  with pytest.raises(
    ValueError, match='norm=x: unknown; must be one of mean_std'
  ):
    algorithms.make('grpo', norm='x')
  with pytest.raises(
    ValueError, match='penalty_scope=row: .*episode_stats=rows'
  ):
    algorithms.make('gigpo', penalty_scope='row')
