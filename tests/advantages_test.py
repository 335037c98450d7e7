import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import advantages
from gigpo_jax import anchors as keys

COMBINATIONS = [
  dict(zip(('norm', 'episode_stats', 'penalty_scope', 'lone_episode'), c))  # noqa: B905
  for c in itertools.product(
    ('mean_std', 'mean'),
    ('trajectories', 'rows'),
    ('reward', 'row'),
    ('zero', 'raw'),
  )
  if (c[1], c[2]) != ('trajectories', 'row')
]


def normalize(x, entries, lone, norm):
  if len(entries) == 1:
    return lone
  mean = math.fsum(entries) / len(entries)
  squares = math.fsum((e - mean) ** 2 for e in entries)
  std = math.sqrt(squares / (len(entries) - 1))
  return (x - mean) / (std + 1e-6 if norm == 'mean_std' else 1)


def add_returns(real, discount, c, on_row):
  """Adds E and G to each row."""
  episodes = {}
  for row in real:
    episodes.setdefault((row['group'], row['episode']), []).append(row)
    row['r'] = row['reward'] - (0 if on_row or row['valid'] else c)
  for rows in episodes.values():
    for row in rows:
      later = [k for k in rows if k['step'] >= row['step']]
      row['E'] = math.fsum(k['r'] for k in rows)
      row['G'] = math.fsum(
        discount ** (k['step'] - row['step']) * k['r'] for k in later
      )
  for row in real:
    if on_row and not row['valid']:
      row['E'] -= c
      row['G'] -= c


def reference(batch, discount, step_weight, invalid_penalty, **options):
  """Returns advantages from a plain Python implementation in float64."""
  real = [row for row in batch if row['group'] != -1]
  on_row = options['penalty_scope'] == 'row'
  add_returns(real, discount, invalid_penalty, on_row)
  norm = options['norm']
  out = []
  for row in batch:
    if row['group'] == -1:
      out.append(0.0)
      continue
    group = [k for k in real if k['group'] == row['group']]
    if options['episode_stats'] == 'rows':
      entries = [k['E'] for k in group]
    else:
      entries = list({k['episode']: k['E'] for k in group}.values())
    lone = row['E'] if options['lone_episode'] == 'raw' else 0.0
    same = [k['G'] for k in group if k['anchor'] == row['anchor']]
    out.append(
      normalize(row['E'], entries, lone, norm)
      + step_weight * normalize(row['G'], same, 0.0, norm)
    )
  return np.array(out)


def columns(batch):
  names = ('reward', 'group', 'episode', 'step', 'anchor', 'valid')
  return [np.array([row[name] for row in batch]) for name in names]


def random_batch(rng):
  """Returns shuffled rows with revisits, gaps, penalties and padding."""
  batch = []
  reward_type = rng.integers(3)
  for group in rng.choice(50, rng.integers(1, 5), replace=False):
    for episode in range(rng.integers(1, 7)):
      length = rng.integers(1, 13)
      gap = rng.integers(1, 4) if rng.random() < 0.2 else 1
      for t in range(length):
        last = t == length - 1
        # Success at the end; dense rewards; or failure throughout.
        reward = (
          10.0 * (last and rng.random() < 0.5),
          float(np.float32(rng.normal())),
          0.0,
        )[reward_type]
        batch.append(
          {
            'group': int(group),
            'episode': episode,
            'step': t * int(gap),
            'anchor': int(rng.integers(5)),
            'reward': reward,
            'valid': bool(rng.random() < 0.8),
          }
        )
  for _ in range(rng.integers(0, 8)):
    padding = dict(batch[rng.integers(len(batch))], group=-1)
    padding['reward'] = float(rng.normal())
    batch.append(padding)
  rng.shuffle(batch)
  return batch


@pytest.mark.parametrize(
  'options', COMBINATIONS, ids=lambda o: '-'.join(o.values())
)
def test_agrees_with_plain_python(options):
  seed = COMBINATIONS.index(options)
  rng = np.random.default_rng(seed)
  # One padded size, so it compiles once per combination of options.
  for _ in range(17):
    batch = random_batch(rng)
    batch += [dict(batch[0], group=-1)] * (300 - len(batch))
    coefficients = {
      'discount': float(rng.uniform(0.2, 1.0)),
      'step_weight': float(rng.uniform(0.0, 2.0)),
      'invalid_penalty': float(rng.uniform(0.0, 0.5)),
    }
    expected = reference([dict(r) for r in batch], **coefficients, **options)
    actual = advantages.gigpo(*columns(batch), **coefficients, **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


# The golden batch: one group, discount 0.5, success pays 10, all valid.
# e0: a->b, b->c, c->success; e1: a->b, b->b, b->b; e2: a->d, d->success.
A, B, C, D = range(4)
GOLDEN = {
  'rewards': [0, 0, 10, 0, 0, 0, 0, 10],
  'groups': [0] * 8,
  'episodes': [0, 0, 0, 1, 1, 1, 2, 2],
  'steps': [0, 1, 2, 0, 1, 2, 0, 1],
  'anchors': [A, B, C, A, B, B, A, D],
  'valid': [True] * 8,
  'discount': 0.5,
}
STD, ROWS, MEAN = {}, {'episode_stats': 'rows'}, {'norm': 'mean'}


def test_golden_returns():
  # From the end of an episode: 10, 10 / 2, 10 / 4.
  components = advantages.gigpo_components(**GOLDEN)
  np.testing.assert_array_equal(
    components.returns, [2.5, 5, 10, 0, 0, 0, 5, 10]
  )
  np.testing.assert_array_equal(
    components.episode_returns, [10] * 3 + [0] * 3 + [10] * 2
  )
  # a: rows 0, 3, 6; b: rows 1, 4, 5; c and d: one row each.
  np.testing.assert_array_equal(
    components.anchor_group_sizes, [3, 3, 1, 3, 3, 3, 3, 1]
  )


@pytest.mark.parametrize(
  ('options', 'success', 'failure'),
  [
    # E of episodes 10, 0, 10: mean 20/3, std sqrt((2 (10/3)^2 + (20/3)^2) / 2)
    # = 5.7735; (10 - 20/3) / 5.7735 = .57735.
    pytest.param(STD, 0.5774, -1.1547, id='trajectories'),
    # E of rows 10 x5, 0 x3: mean 6.25, std sqrt((5 3.75^2 + 3 6.25^2) / 7)
    # = 5.1755; 3.75 / 5.1755 = .7246.
    pytest.param(ROWS, 0.7246, -1.2076, id='rows'),
    pytest.param(MEAN, 3.3333, -6.6667, id='mean'),
    pytest.param(MEAN | ROWS, 3.75, -6.25, id='mean-rows'),
  ],
)
def test_golden_episode_advantage(options, success, failure):
  components = advantages.gigpo_components(**GOLDEN, **options)
  expected = [success] * 3 + [failure] * 3 + [success] * 2
  np.testing.assert_allclose(components.episode_advantage, expected, atol=5e-5)


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    # a: G 2.5, 0, 5: mean 2.5, std 2.5. b: G 5, 0, 0: mean 5/3, std 2.8868.
    pytest.param(STD, [0, 1.1547, 0, -1, -0.5774, -0.5774, 1, 0], id='std'),
    pytest.param(
      MEAN, [0, 3.3333, 0, -2.5, -1.6667, -1.6667, 2.5, 0], id='mean'
    ),
  ],
)
def test_golden_step_advantage(options, expected):
  components = advantages.gigpo_components(**GOLDEN, **options)
  np.testing.assert_allclose(components.step_advantage, expected, atol=5e-5)
  assert components.step_advantage[2] == 0  # lone anchor: exactly


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    pytest.param(
      STD,
      [0.5774, 1.7321, 0.5774, -2.1547, -1.7321, -1.7321, 1.5773, 0.5774],
      id='trajectories-std',
    ),
    pytest.param(
      ROWS,
      [0.7246, 1.8793, 0.7246, -2.2076, -1.7850, -1.7850, 1.7246, 0.7246],
      id='rows-std',
    ),
    pytest.param(
      MEAN,
      [3.3333, 6.6667, 3.3333, -9.1667, -8.3333, -8.3333, 5.8333, 3.3333],
      id='trajectories-mean',
    ),
  ],
)
def test_golden_advantages(options, expected):
  actual = advantages.gigpo(**GOLDEN, **options)
  np.testing.assert_allclose(actual, expected, atol=1e-4)


def single_step_advantages(returns, **kwargs):
  """Returns advantages of one-step episodes of a group, in distinct states."""
  n = len(returns)
  return advantages.gigpo(
    returns, [0] * n, range(n), [0] * n, range(n), [True] * n, **kwargs
  )


def test_standard_deviation_is_unbiased():
  # 0 and 2: mean 1, std with ddof 1 = sqrt((1 + 1) / 1) = 1.41421; ddof 0
  # would give 1 and the advantage 1.
  np.testing.assert_allclose(
    single_step_advantages([0.0, 2.0]), [-0.70711, 0.70711], atol=1e-5
  )


def test_epsilon_is_added_to_the_standard_deviation():
  # 0 and 2e-6: std 1.41421e-6; 1e-6 / (1.41421e-6 + 1e-6) = 0.41421. Under
  # the root, sqrt(2e-12 + 1e-6), it would be 0.001.
  np.testing.assert_allclose(
    single_step_advantages([0.0, 2e-6]), [-0.41421, 0.41421], atol=1e-4
  )


@pytest.mark.parametrize('value', [0.1, 1 / 3, 9.9, 1e4 / 7])
def test_equal_returns_give_exactly_zero(value):
  for count in (3, 7, 49):
    np.testing.assert_array_equal(
      single_step_advantages([value] * count), np.zeros(count)
    )


def test_equal_sums_in_different_order_give_exactly_zero():
  # Three invalid steps at different times: each E is 10 - 0.3, though in
  # float32 the sums differ by 1e-6, which is as large as eps.
  valid = [[0, 0, 0, 1, 1], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 1, 0, 0, 0]]
  components = advantages.gigpo_components(
    [10.0, 0, 0, 0, 0] * 4,
    [0] * 20,
    np.repeat(range(4), 5),
    [0, 1, 2, 3, 4] * 4,
    range(20),
    np.ravel(valid) == 1,
  )
  np.testing.assert_array_equal(components.episode_advantage, np.zeros(20))


def test_equal_distance_to_success_gives_exactly_zero():
  # Seven episodes of lengths 3, 4, ... meet in one state 3 steps before the
  # success: G = 0.95^2 * 10 in each, at different positions of the scan.
  rows = [(e, t, 3 + e) for e in range(7) for t in range(3 + e)]
  components = advantages.gigpo_components(
    [10.0 * (t == n - 1) for _, t, n in rows],
    [0] * len(rows),
    [e for e, _, _ in rows],
    [t for _, t, _ in rows],
    [0 if t == n - 3 else 10 + 50 * e + t for e, t, n in rows],
    [True] * len(rows),
  )
  np.testing.assert_array_equal(components.step_advantage, np.zeros(len(rows)))
  np.testing.assert_allclose(np.max(components.anchor_group_sizes), 7)


# All fail: 4 episodes of 1 step, the last one invalid. E = 0, 0, 0, -0.1;
# mean -0.025, std 0.05.
@pytest.mark.parametrize(
  ('norm', 'expected'),
  [
    # 0.025 / 0.05 = 0.5; -0.075 / 0.05 = -1.5: as large as for a success.
    pytest.param('mean_std', [0.5, 0.5, 0.5, -1.5], id='mean_std'),
    pytest.param('mean', [0.025, 0.025, 0.025, -0.075], id='mean'),
  ],
)
def test_all_fail_and_one_is_invalid(norm, expected):
  actual = advantages.gigpo(
    [0.0] * 4, [0] * 4, range(4), [0] * 4, range(4), [1, 1, 1, 0], norm=norm
  )
  # eps reduces 0.5 by 0.5 * 1e-6 / 0.05 = 1e-5, and -1.5 by three times that.
  np.testing.assert_allclose(actual, expected, atol=4e-5)


@pytest.mark.parametrize('stats', ['trajectories', 'rows'])
def test_lone_episode(stats):
  lone = {'episode_stats': stats}
  assert single_step_advantages([10.0], **lone)[0] == 0
  assert single_step_advantages([10.0], lone_episode='raw', **lone)[0] == 10
  assert (
    single_step_advantages([10.0], lone_episode='raw', norm='mean', **lone)[0]
    == 10
  )


def test_lone_episode_of_two_rows():
  # Trajectories: one entry, so raw is E = 10 for both rows. Rows: two equal
  # entries, so 0. G = 5, 10 from two states.
  arguments = ([0.0, 10.0], [0, 0], [0, 0], [0, 1], [0, 1], [True] * 2)
  raw = advantages.gigpo(*arguments, lone_episode='raw')
  np.testing.assert_array_equal(raw, [10, 10])
  rows = advantages.gigpo(*arguments, lone_episode='raw', episode_stats='rows')
  np.testing.assert_array_equal(rows, [0, 0])


def test_revisit_within_an_episode_is_compared():
  # One episode passes state 0 at steps 0 and 2: G = 10 / 4 + 0 and 10.
  # Mean 6.25, differences -3.75 and 3.75; A_E of the lone episode is 0.
  actual = advantages.gigpo(
    [0.0, 0.0, 10.0],
    [0] * 3,
    [0] * 3,
    [0, 1, 2],
    [0, 1, 0],
    [True] * 3,
    discount=0.5,
    norm='mean',
  )
  np.testing.assert_array_equal(actual, [-3.75, 0, 3.75])


# Two episodes of two steps, one anchor per step: e0 succeeds (10) after an
# invalid first step, e1 fails, valid. Discount 0.5, c = 0.2, norm mean.
@pytest.mark.parametrize(
  ('options', 'episode', 'step'),
  [
    # r' = -.2, 10, 0, 0: E = 9.8, 0, mean 4.9. G = 4.8, 10, 0, 0.
    pytest.param(ROWS, [4.9, 4.9, -4.9, -4.9], [2.4, 5, -2.4, -5], id='reward'),
    # r = 0, 10, 0, 0: E = 9.8, 10, 0, 0 after the penalty of row 0 alone:
    # mean 4.95. G = 5 - .2 = 4.8, 10, 0, 0.
    pytest.param(
      ROWS | {'penalty_scope': 'row'},
      [4.85, 5.05, -4.95, -4.95],
      [2.4, 5, -2.4, -5],
      id='row',
    ),
  ],
)
def test_penalty_scopes(options, episode, step):
  components = advantages.gigpo_components(
    [0.0, 10.0, 0.0, 0.0],
    [0] * 4,
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [0, 1, 0, 1],
    [False, True, True, True],
    discount=0.5,
    invalid_penalty=0.2,
    norm='mean',
    **options,
  )
  np.testing.assert_allclose(components.episode_advantage, episode, atol=2e-6)
  np.testing.assert_allclose(components.step_advantage, step, atol=2e-6)


def test_penalty_is_discounted_only_in_scope_reward():
  # The invalid step comes second: r' = 0, -0.2. G_0 = -0.1 or, by row, 0.
  arguments = ([0.0, 0.0], [0, 0], [0, 0], [0, 1], [0, 1], [True, False])
  options = {'discount': 0.5, 'invalid_penalty': 0.2, 'episode_stats': 'rows'}
  reward = advantages.gigpo_components(*arguments, **options)
  np.testing.assert_allclose(reward.returns, [-0.1, -0.2])
  np.testing.assert_allclose(reward.episode_returns, [-0.2, -0.2])
  row = advantages.gigpo_components(*arguments, **options, penalty_scope='row')
  np.testing.assert_allclose(row.returns, [0, -0.2])
  np.testing.assert_allclose(row.episode_returns, [0, -0.2])


def test_gaps_discount_by_their_length():
  # Steps 0, 3, 4: G = 1 + 2 * 0.5^3 + 4 * 0.5^4 = 1.5; 2 + 4 * 0.5 = 4; 4.
  components = advantages.gigpo_components(
    [1, 2, 4], [0] * 3, [0] * 3, [0, 3, 4], [0] * 3, [1] * 3, discount=0.5
  )
  np.testing.assert_array_equal(components.returns, [1.5, 4, 4])


def test_no_discount_and_full_discount():
  rows = ([1.0, 2.0, 4.0], [0] * 3, [0] * 3, [0, 1, 2], [0] * 3, [1] * 3)
  none = advantages.gigpo_components(*rows, discount=1.0)
  np.testing.assert_array_equal(none.returns, [7, 6, 4])
  full = advantages.gigpo_components(*rows, discount=0.0)
  np.testing.assert_array_equal(full.returns, [1, 2, 4])


def test_step_weight_zero_is_grpo_and_scales_linearly():
  components = advantages.gigpo_components(**GOLDEN)
  grpo = advantages.gigpo(**GOLDEN, step_weight=0.0)
  np.testing.assert_array_equal(grpo, components.episode_advantage)
  double = advantages.gigpo(**GOLDEN, step_weight=2.0)
  expected = components.episode_advantage + 2 * components.step_advantage
  np.testing.assert_allclose(double, expected, rtol=1e-6)


def test_distinct_states_give_grpo():
  # e1 stays in b in the golden batch; here every row has its own state.
  unique = advantages.gigpo(**GOLDEN | {'anchors': list(range(8))})
  grpo = advantages.gigpo(**GOLDEN, step_weight=0.0)
  np.testing.assert_array_equal(unique, grpo)


def test_ids_may_repeat_between_groups():
  # The golden batch twice, as groups 0 and 7, with the same ids.
  twice = {
    name: list(value) * 2 if isinstance(value, list) else value
    for name, value in GOLDEN.items()
  }
  twice['groups'] = [0] * 8 + [7] * 8
  once = advantages.gigpo(**GOLDEN)
  actual = advantages.gigpo(**twice)
  np.testing.assert_allclose(actual, np.tile(once, 2), rtol=1e-6)


def test_row_order_and_padding_change_nothing():
  batch = random_batch(np.random.default_rng(3))
  plain = [row for row in batch if row['group'] != -1]
  expected = np.asarray(advantages.gigpo(*columns(plain)))
  padded = [(k, row) for k, row in enumerate(plain)]
  padded += [(-1, dict(row, group=-1, reward=math.nan)) for row in plain[:9]]
  np.random.default_rng(4).shuffle(padded)
  actual = np.asarray(advantages.gigpo(*columns([row for _, row in padded])))
  for (k, _), value in zip(padded, actual, strict=True):
    # The order of float32 sums may differ.
    assert value == pytest.approx(0 if k < 0 else expected[k], abs=2e-6)
    assert k >= 0 or value == 0


def test_all_padding_gives_zeros():
  zeros = advantages.gigpo(
    [1.0] * 4, [-1] * 4, range(4), [0] * 4, [0] * 4, [1] * 4
  )
  np.testing.assert_array_equal(zeros, np.zeros(4))


def test_no_rows():
  empty = np.zeros(0, np.int32)
  actual = advantages.gigpo([], empty, empty, empty, empty, [])
  assert actual.shape == (0,) and actual.dtype == np.float32


def test_nan_stays_in_its_group():
  rewards, groups = np.arange(8.0), np.repeat([0, 1], 4)
  arguments = {
    'groups': groups,
    'episodes': np.arange(8) // 2,
    'steps': np.arange(8) % 2,
    'anchors': np.zeros(8, int),
    'valid': np.ones(8, bool),
  }
  expected = advantages.gigpo(rewards, **arguments)
  for spoilt in (4, 7):
    actual = advantages.gigpo(
      np.where(np.arange(8) == spoilt, np.nan, rewards), **arguments
    )
    np.testing.assert_array_equal(actual[:4], expected[:4])
    assert np.isnan(actual[4:]).any()
  unpadded = advantages.whiten(jnp.array([1.0, 3.0]), jnp.array([1.0, 2.0]))
  padded = advantages.whiten(
    jnp.array([1.0, jnp.nan, 3.0]), jnp.array([1.0, 0.0, 2.0])
  )
  np.testing.assert_array_equal(padded[::2], unpadded)


def test_jit_and_no_jit_agree():
  arguments = columns(random_batch(np.random.default_rng(5)))
  plain = advantages.gigpo(*arguments)
  jitted = jax.jit(advantages.gigpo)(*(jnp.asarray(a) for a in arguments))
  np.testing.assert_allclose(jitted, plain, rtol=0, atol=1e-6)
  with jax.disable_jit():
    eager = advantages.gigpo(*arguments)
  np.testing.assert_allclose(eager, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
  'wide',
  [
    # Equal in their low 32 bits, the only bits that jax would keep.
    pytest.param(lambda k: np.int64(-3) + (np.int64(k) << 40), id='int64'),
    pytest.param(lambda k: np.uint64((k << 40) + 7), id='uint64'),
    pytest.param(lambda k: (k << 100) + 7, id='python-128-bit'),
    pytest.param(lambda k: np.array([7, k], np.uint64), id='uint64-pairs'),
  ],
)
@pytest.mark.parametrize('name', ['anchors', 'groups', 'episodes'])
def test_wide_ids_are_not_truncated(wide, name):
  expected = advantages.gigpo(**GOLDEN)
  ids = [wide(k) for k in GOLDEN[name]]
  dtype = None if isinstance(ids[0], np.generic | np.ndarray) else object
  hashed = GOLDEN | {name: np.array(ids, dtype)}
  np.testing.assert_array_equal(advantages.gigpo(**hashed), expected)


def test_hashes_under_jit():
  expected = advantages.gigpo(**GOLDEN)
  hashed = GOLDEN | {'anchors': keys.digests(map(str, GOLDEN['anchors']))}
  assert hashed['anchors'].shape == (8, 4)
  np.testing.assert_array_equal(advantages.gigpo(**hashed), expected)
  traced = jax.jit(lambda arguments: advantages.gigpo(**arguments))(
    {name: jnp.asarray(x) for name, x in hashed.items()}
  )
  np.testing.assert_allclose(traced, expected, atol=1e-6)
  # A difference in a single word separates two anchors.
  other = hashed['anchors'].copy()
  other[3, 2] ^= 1
  assert np.any(advantages.gigpo(**hashed | {'anchors': other}) != expected)


def test_sharded_rows_give_the_same_advantages():
  rng = np.random.default_rng(0)
  rows = 64
  arguments = {
    'rewards': rng.normal(size=rows).astype(np.float32),
    'groups': np.repeat([0, 1, 2, -1], 16),
    'episodes': np.repeat(np.arange(16), 4),
    'steps': np.tile(np.arange(4), 16),
    'anchors': rng.integers(4, size=rows),
    'valid': rng.random(rows) < 0.8,
  }
  mesh = jax.make_mesh((8,), ('x',), (jax.sharding.AxisType.Auto,))
  sharding = jax.NamedSharding(mesh, jax.P('x'))
  placed = {n: jax.device_put(x, sharding) for n, x in arguments.items()}
  actual = jax.jit(lambda arguments: advantages.gigpo(**arguments))(placed)
  expected = jax.jit(lambda arguments: advantages.gigpo(**arguments))(arguments)
  np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_wide_groups_and_episodes_keep_padding():
  wide = GOLDEN | {
    'rewards': GOLDEN['rewards'] + [5],
    'groups': np.array([-(2**50)] * 8 + [-1]),
    'episodes': np.array(GOLDEN['episodes'] + [0]) << 40,
    'steps': GOLDEN['steps'] + [0],
    'anchors': GOLDEN['anchors'] + [A],
    'valid': GOLDEN['valid'] + [True],
  }
  expected = np.append(advantages.gigpo(**GOLDEN), 0)
  np.testing.assert_allclose(advantages.gigpo(**wide), expected, rtol=1e-6)


def test_no_gradient_flows_through():
  def total(rewards):
    return jnp.sum(advantages.gigpo(**GOLDEN | {'rewards': rewards}) ** 2)

  gradient = jax.grad(total)(jnp.asarray(GOLDEN['rewards'], jnp.float32))
  np.testing.assert_array_equal(gradient, np.zeros(8))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'discount': 1.5}, '^discount=1.5: out of range; must be between 0 and 1'),
    ({'norm': 'max'}, 'norm=max: unknown; must be one of mean_std, mean'),
    ({'episode_stats': 'x'}, 'must be one of trajectories, rows'),
    ({'lone_episode': 'x'}, 'must be one of zero, raw'),
    ({'penalty_scope': 'x'}, 'must be one of reward, row'),
    (
      {'penalty_scope': 'row'},
      'penalty_scope=row: .* needs episode_stats=rows',
    ),
  ],
)
def test_rejected_options(options, message):
  with pytest.raises(ValueError, match=message):
    advantages.gigpo(**GOLDEN | options)


@pytest.mark.parametrize('name', ['rewards', 'anchors', 'valid'])
def test_a_column_of_another_length_is_refused_by_name(name):
  # Two episodes of two steps.
  columns = {
    'rewards': [0, 10, 0, 0],
    'groups': [0] * 4,
    'episodes': [0, 0, 1, 1],
    'steps': [0, 1, 0, 1],
    'anchors': [1, 2, 1, 1],
    'valid': [True] * 4,
  }
  columns[name] = columns[name][:3]
  with pytest.raises(ValueError, match=rf'^{name}: has shape \(3,\), and gro'):
    advantages.gigpo(**columns)


def test_metrics_of_the_signal_by_hand():
  # Anchor groups of 1, 2, 3, 4, 7 and 8 rows, and a padding row.
  sizes = np.repeat([1, 2, 3, 4, 7, 8, 1], [1, 2, 3, 4, 7, 8, 1])
  episode, step = np.zeros(26), np.zeros(26)
  episode[:2], step[:2], step[25] = [3, -3], [-1, 1], 9
  components = advantages.Components(episode, step, None, None, sizes)
  groups = np.repeat([0, 1, -1], [10, 15, 1])
  metrics = advantages.signal_metrics(components, groups)
  expected = {
    'singleton_anchor_rows': 1 / 25,
    'anchor_group_size_mean': 25 / 6,
    'anchor_groups_of_1': 1 / 6,
    'anchor_groups_of_2_to_3': 2 / 6,
    'anchor_groups_of_4_to_7': 2 / 6,
    'anchor_groups_of_8_and_more': 1 / 6,
    'zero_variance_groups': 1 / 2,
    'episode_abs_mean': 6 / 25,
    'step_abs_mean': 2 / 25,
    'episode_std': np.sqrt(18 / 25),
    'step_std': np.sqrt(2 / 25),
    'correlation': -1,
  }
  assert metrics == pytest.approx(
    {f'advantage/{name}': value for name, value in expected.items()}
  )


def test_a_constant_advantage_has_no_correlation():
  # The float32 std of seven times 0.7 is 6e-8, and their correlation NaN.
  metrics = advantages.diagnose(
    [0, 0, 0, 0, 0, 0, 0.7],
    np.zeros(7, int),
    np.zeros(7, int),
    np.arange(7),
    [0, 1, 0, 1, 0, 1, 2],
    np.ones(7, bool),
    norm='mean',
    lone_episode='raw',
  )
  assert metrics['advantage/step_abs_mean'] > 0
  assert 'advantage/correlation' not in metrics
