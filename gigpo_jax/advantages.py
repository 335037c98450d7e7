"""Advantages of GiGPO (arXiv:2505.10978), vectorised over rows.

Input: arrays with one entry per row: reward, group, episode, step, anchor,
validity. Rows are in any order; group -1 marks padding. Output: one advantage
per row. This module is independent of tokens, models and environments. It
sorts rows and sums over segments, in O(R log R).

An episode is identified by (group, episode) and an anchor group by (group,
anchor), so ids may repeat between groups.

E is the return of an episode, the undiscounted sum of its rewards, and G the
discounted return from a step. A_E and A_S are the episode and step advantages,
which compare E within groups and G within anchor groups.

# Differs from the paper: none by default. `episode_stats='rows'`,
`penalty_scope='row'` and `lone_episode='raw'` follow the authors' released
code.
"""

import functools
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from gigpo_jax import arrays, deprecated
from gigpo_jax import options as options_lib
from gigpo_jax.arrays import typechecked

# Added to a standard deviation before dividing by it.
EPSILON = 1e-6

# Two-float returns count as equal up to this relative difference. Their
# rounding error is smaller, and the difference is negligible against EPSILON.
_EQUAL_WITHIN = 2.0**-42

NORMS = ('mean_std', 'mean', 'leave_one_out', 'mean_abs')

# Added to the sum of absolute deviations by the norm mean_abs.
_ABS_EPSILON = 1e-4

OPTIONS = {
  'norm': NORMS,
  'episode_stats': ('trajectories', 'rows'),
  'penalty_scope': ('reward', 'row'),
  'lone_episode': ('zero', 'raw'),
}


class Components(NamedTuple):
  """The components of each row's advantage; 0 for padding.

  Attributes:
    episode_advantage: A_E, Eq. (3).
    step_advantage: A_S, Eq. (7); before `step_weight`.
    episode_returns: E, the undiscounted sum of an episode's rewards.
    returns: G, the discounted return from this step; Eq. (5).
    anchor_group_sizes: number of rows in the row's anchor group.
  """

  episode_advantage: Float[Array, ' R']
  step_advantage: Float[Array, ' R']
  episode_returns: Float[Array, ' R']
  returns: Float[Array, ' R']
  anchor_group_sizes: Int[Array, ' R']


def gigpo(  # noqa: PLR0913
  rewards: ArrayLike,
  groups: ArrayLike,
  episodes: ArrayLike,
  steps: ArrayLike,
  anchors: ArrayLike,
  valid: ArrayLike,
  *,
  discount: float = 0.95,
  step_weight: float = 1.0,
  episode_weight: float = 1.0,
  invalid_penalty: float = 0.1,
  norm: str = 'mean_std',
  episode_stats: str = 'trajectories',
  penalty_scope: str = 'reward',
  lone_episode: str = 'zero',
) -> Float[Array, ' R']:
  """Returns the advantage A_E + step_weight * A_S of each row, Eq. (8).

  Accepts numpy arrays, lists or jax arrays of shape [R], and traces under jit.
  Ids are integers of any width (128 bits: Python integers or uint64 [R, 2]).
  Under jit, ids are int32, and anchors may also be uint32 [R, 4]; see
  `anchors.digests`.

  Args:
    rewards: raw reward of each step, before any penalty.
    groups: group of each row; -1 marks padding.
    episodes: episode of each row, unique within a group.
    steps: index within the episode; a gap is discounted by its length.
    anchors: id of the state in which the step was taken, unique within a group.
    valid: whether the response had the required form.
    discount: gamma per step; for A_S only.
    step_weight: omega; 0 is GRPO.
    episode_weight: weight of A_E; the paper has 1, 0 leaves A_S alone.
    invalid_penalty: c, in reward units; subtracted for an invalid response.
    norm: 'mean_std' divides by the standard deviation (ddof 1) + 1e-6; 'mean'
      does not divide; 'leave_one_out' subtracts the mean of the other entries;
      'mean_abs' divides by the mean absolute deviation (DGPO,
      arXiv:2601.20614).
    episode_stats: mean and standard deviation of A_E over 'trajectories', with
      one entry per episode (Eq. 3), or over 'rows', so that long episodes
      weigh more (the authors' code).
    penalty_scope: 'reward' subtracts the penalty from the step's reward; 'row'
      (the authors' code, with episode_stats='rows') from E and G of that row.
    lone_episode: A_E of a group whose statistics have a single entry: 'zero',
      or 'raw' (the authors' code) for E itself.

  Returns:
    float32; 0 for padding. No gradient flows through it.

  Raises:
    ValueError: if an option is unknown or out of range, or two options are
      incompatible.
  """
  columns = rewards, groups, episodes, steps, anchors, valid
  components = gigpo_components(
    *columns,
    discount=discount,
    invalid_penalty=invalid_penalty,
    norm=norm,
    episode_stats=episode_stats,
    penalty_scope=penalty_scope,
    lone_episode=lone_episode,
  )
  return combine(components, step_weight, episode_weight)


def combine(
  components: Components, step_weight: float, episode_weight: float = 1.0
) -> Float[Array, ' R']:
  """Returns the joint advantage, Eq. (8)."""
  return (
    episode_weight * components.episode_advantage
    + step_weight * components.step_advantage
  )


def gigpo_components(  # noqa: PLR0913
  rewards: ArrayLike,
  groups: ArrayLike,
  episodes: ArrayLike,
  steps: ArrayLike,
  anchors: ArrayLike,
  valid: ArrayLike,
  *,
  discount: float = 0.95,
  invalid_penalty: float = 0.1,
  norm: str = 'mean_std',
  episode_stats: str = 'trajectories',
  penalty_scope: str = 'reward',
  lone_episode: str = 'zero',
) -> Components:
  """Returns the components of the advantages; see `gigpo` for arguments."""
  statistics = {
    'norm': norm,
    'episode_stats': episode_stats,
    'penalty_scope': penalty_scope,
    'lone_episode': lone_episode,
  }
  check_options(**statistics)
  # Not a value that jax traces.
  if isinstance(discount, numbers.Real) and not 0 <= discount <= 1:
    raise ValueError(
      f'discount={discount}: out of range; must be between 0 and 1'
    )
  if not np.shape(groups)[0]:
    return Components(*4 * [jnp.zeros(0)], jnp.zeros(0, jnp.int32))
  columns = rewards, groups, episodes, steps, anchors, valid
  for name, column in zip(Inputs._fields, columns, strict=False):
    if np.shape(column)[:1] != np.shape(groups)[:1]:
      raise ValueError(
        f'{name}: has shape {np.shape(column)}, and groups {np.shape(groups)}; '
        'must have one entry per row'
      )
  inputs = device_inputs(*columns, discount, invalid_penalty)
  return _components(inputs, **statistics)


class Inputs(NamedTuple):
  """Arguments of `gigpo` as arrays on the device.

  Attributes:
    rewards: two-float.
    groups: int32; -1 marks padding.
    episodes: int32.
    steps: int32.
    anchors: int32, or uint32 [R, K] for wide ids.
    valid: bool.
    discount: two-float scalar.
    invalid_penalty: two-float scalar.
  """

  rewards: arrays.TwoFloat
  groups: Int[Array, ' R']
  episodes: Int[Array, ' R']
  steps: Int[Array, ' R']
  anchors: Int[Array, ' R']
  valid: Bool[Array, ' R']
  discount: arrays.TwoFloat
  invalid_penalty: arrays.TwoFloat


def device_inputs(  # noqa: PLR0913
  rewards: ArrayLike,
  groups: ArrayLike,
  episodes: ArrayLike,
  steps: ArrayLike,
  anchors: ArrayLike,
  valid: ArrayLike,
  discount: float,
  invalid_penalty: float,
) -> Inputs:
  """Converts arguments of `gigpo` to arrays on the device."""
  return Inputs(
    arrays.two_float(rewards),
    arrays.ids32(groups, padding=True),
    arrays.ids32(episodes),
    jnp.asarray(steps, jnp.int32),
    arrays.keys32(anchors),
    jnp.asarray(valid, bool),
    arrays.two_float(discount),
    arrays.two_float(invalid_penalty),
  )


# Options of `segment_rows` and `make_components`, constants of a program.
STATISTICS = tuple(OPTIONS)
jit = functools.partial(jax.jit, static_argnames=STATISTICS)


@jit
def _components(inputs, *, norm, penalty_scope, **statistics):
  row_segments = segment_rows(inputs, penalty_scope=penalty_scope)
  step_advantage = step_advantages(
    row_segments.returns, row_segments.anchors, norm=norm
  )
  return make_components(row_segments, step_advantage, norm=norm, **statistics)


class RowSegments(NamedTuple):
  """Segment ids and returns of rows; padding forms a group of its own.

  A segment is a set of rows: a group, an episode or an anchor group.

  Attributes:
    real: False for padding rows.
    groups: segment id of each row's group, in [0, R).
    episodes: segment id of each row's episode, in [0, R).
    anchors: segment id of each row's anchor group, in [0, R).
    starts: whether a row is the first of its episode.
    previous: row index of the episode's previous step; R for a first step.
    cost: minus the penalty for an invalid response, else 0; two-float.
    returns: G, Eq. (5); two-float.
    episode_returns: E; two-float.
  """

  real: Bool[Array, ' R']
  groups: Int[Array, ' R']
  episodes: Int[Array, ' R']
  anchors: Int[Array, ' R']
  starts: Bool[Array, ' R']
  previous: Int[Array, ' R']
  cost: arrays.TwoFloat
  returns: arrays.TwoFloat
  episode_returns: arrays.TwoFloat


def segment_rows(inputs: Inputs, *, penalty_scope: str) -> RowSegments:
  """Returns the segment ids and returns of rows."""
  rewards, groups, episodes, steps, anchors, valid, discount, penalty = inputs
  rewards = jax.lax.stop_gradient(rewards)
  cost = tuple(jnp.where(valid, 0, -half) for half in penalty)
  if penalty_scope == 'reward':
    rewards = arrays.two_add(rewards, cost)
  # A single sort brings rows into the order of groups, episodes and steps.
  order = jnp.lexsort((steps, episodes, groups))
  position = jnp.arange(len(order))
  group_starts = _changes(groups[order])
  starts = group_starts | _changes(episodes[order])
  first_row = jax.lax.cummax(jnp.where(starts, position, 0))
  returns, sums = discounted_returns(
    tuple(half[order] for half in rewards), ~starts, steps[order], discount
  )
  sorted_values = (
    jnp.cumsum(group_starts, dtype=jnp.int32) - 1,
    jnp.cumsum(starts, dtype=jnp.int32) - 1,
    starts,
    jnp.where(starts, len(order), jnp.roll(order, 1)),
    returns,
    tuple(half[first_row] for half in sums),
  )
  inverse = jnp.zeros_like(order).at[order].set(position)
  group_ids, episode_ids, starts, previous, returns, episode_returns = (
    jax.tree.map(lambda x: x[inverse], sorted_values)
  )
  if penalty_scope == 'row':
    returns = arrays.two_add(returns, cost)
    episode_returns = arrays.two_add(episode_returns, cost)
  return RowSegments(
    real=groups != -1,
    groups=group_ids,
    episodes=episode_ids,
    anchors=arrays.segment_ids(group_ids, *jnp.atleast_2d(anchors.T)),
    starts=starts,
    previous=previous,
    cost=cost,
    returns=returns,
    episode_returns=episode_returns,
  )


def _changes(values: Int[Array, ' R']) -> Bool[Array, ' R']:
  """Returns whether each value is the first or differs from the previous."""
  return jnp.append(jnp.array([True]), values[1:] != values[:-1])


def step_advantages(
  values: arrays.TwoFloat, segments: Int[Array, ' R'], **options
) -> Float[Array, ' R']:
  """Returns A_S, Eq. (7); options as for `group_normalize`."""
  all_rows = jnp.ones(segments.shape, bool)
  return group_normalize(values, segments, all_rows, **options)


def make_components(
  row_segments: RowSegments,
  step_advantage: Float[Array, ' R'],
  *,
  norm: str,
  episode_stats: str,
  lone_episode: str,
) -> Components:
  """Returns advantage components for a given A_S; options as for `gigpo`."""
  all_rows = jnp.ones_like(row_segments.starts)
  components = Components(
    episode_advantage=group_normalize(
      row_segments.episode_returns,
      row_segments.groups,
      row_segments.starts if episode_stats == 'trajectories' else all_rows,
      norm=norm,
      keep_singletons=lone_episode == 'raw',
    ),
    step_advantage=step_advantage,
    episode_returns=row_segments.episode_returns[0],
    returns=row_segments.returns[0],
    anchor_group_sizes=arrays.segment_count(row_segments.anchors, all_rows),
  )
  return jax.tree.map(lambda x: jnp.where(row_segments.real, x, 0), components)


@typechecked
def whiten(
  values: Float[Array, ' R'], weights: Float[Array, ' R']
) -> Float[Array, ' R']:
  """Returns (x - mean) / (std + 1e-6) over all rows.

  Args:
    values: one value per row.
    weights: number of times that a row counts, 0 for padding. The standard
      deviation is the unbiased estimate for sum(weights) samples.
  """
  # Subtract one of the values first: the mean of equal values is then exact.
  values = jnp.where(weights > 0, values - values[jnp.argmax(weights > 0)], 0)
  total = jnp.maximum(jnp.sum(weights), 1)
  mean = jnp.sum(weights * values) / total
  squares = jnp.sum(weights * (values - mean) ** 2)
  spread = jnp.sqrt(squares / jnp.maximum(total - 1, 1))
  return jnp.where(weights > 0, (values - mean) / (spread + EPSILON), 0)


@typechecked
def discounted_returns(
  rewards: tuple[Float[Array, ' R'], Float[Array, ' R']],
  same_episode: Bool[Array, ' R'],
  steps: Int[Array, ' R'],
  discount: tuple[Float[Array, ''], Float[Array, '']],
) -> tuple[arrays.TwoFloat, arrays.TwoFloat]:
  """Returns discounted and undiscounted returns from each step, two-float.

  Eq. (5): G_t = sum over k >= t of discount^(k - t) r_k, within an episode.
  The linear recurrence G_t = r_t + discount^gap G_next is solved for all
  episodes at once by a reversed prefix scan with doubling. The number of
  rounds is the logarithm of the longest episode's length.

  Args:
    rewards: two-float, in reward units; rows are sorted by episode, then step.
    same_episode: whether a row belongs to the same episode as the previous row.
    steps: index within the episode; `gap` is the difference to the next step.
    discount: two-float, in [0, 1].
  """
  has_next = jnp.append(same_episode[1:], False)
  gap = jnp.where(has_next, jnp.append(jnp.diff(steps), 0), 0)
  power_hi, power_lo = arrays.two_power(discount, gap)
  # Index 0 of the stacked axis is discounted, index 1 is not.
  decay = (
    jnp.where(has_next, jnp.stack([power_hi, jnp.ones_like(power_hi)]), 0),
    jnp.where(has_next, jnp.stack([power_lo, jnp.zeros_like(power_lo)]), 0),
  )
  total = tuple(jnp.stack([half, half]) for half in rewards)
  position = jnp.arange(len(gap))

  def double(carry):
    distance, decay, total = carry
    source = position + distance
    in_episode = source < len(position)
    source = jnp.minimum(source, len(position) - 1)
    # Add nothing from outside the episode, not even a NaN.
    in_episode &= decay[0] != 0
    next_total, next_decay = (
      tuple(jnp.where(in_episode, half[:, source], 0) for half in pair)
      for pair in (total, decay)
    )
    total = arrays.two_add(total, arrays.two_multiply(decay, next_total))
    return 2 * distance, arrays.two_multiply(decay, next_decay), total

  _, _, total = jax.lax.while_loop(
    lambda carry: jnp.any(carry[1][0] != 0), double, (1, decay, total)
  )
  return tuple(half[0] for half in total), tuple(half[1] for half in total)


@typechecked
def group_normalize(
  values: tuple[Float[Array, ' R'], Float[Array, ' R']],
  segments: Int[Array, ' R'],
  entries: Bool[Array, ' R'],
  *,
  norm: str,
  keep_singletons: bool = False,
  ddof: int = 1,
  epsilon: float = EPSILON,
  tolerance: float | Float[Array, ' R'] = 0.0,
) -> Float[Array, ' R']:
  """Returns each value relative to its segment's mean, Eqs. (3) and (7).

  (x - mean) / (std + epsilon), or (x - mean) alone, or x minus the mean of the
  segment's other entries, which is (x - mean) n / (n - 1), or (x - mean) n /
  (sum of |x - mean| + 1e-4).
  Equal values give exactly 0: one member of the segment is first subtracted
  exactly from each value. The float32 mean of equal numbers can be off by one
  unit in the last place, which 1e-6 would magnify to a full-sized advantage.

  Args:
    values: two-float; entries of one segment are compared.
    segments: in [0, R).
    entries: True for rows that enter mean and std; at least one per segment.
    norm: one of NORMS.
    keep_singletons: whether the only entry of a segment keeps its value
      instead of becoming 0.
    ddof: of the std: 1 for a sample, 0 for a population.
    epsilon: added to the std.
    tolerance: absolute difference up to which values count as equal; for
      values that were computed in float32.
  """
  first = arrays.segment_first(segments, entries)
  member = tuple(half[first] for half in values)
  difference, _ = arrays.two_add(values, tuple(-half for half in member))
  resolution = _EQUAL_WITHIN * jnp.maximum(
    jnp.abs(values[0]), jnp.abs(member[0])
  )
  same = jnp.abs(difference) <= jnp.maximum(resolution, tolerance)
  centred = jnp.where(same, 0, difference)
  count = arrays.segment_count(segments, entries)
  mean = arrays.segment_sum(centred, segments, entries) / count
  deviation = centred - mean
  if norm == 'mean_std':
    squares = arrays.segment_sum(deviation**2, segments, entries)
    spread = jnp.sqrt(squares / jnp.maximum(count - ddof, 1)) + epsilon
    deviation = deviation / spread
  elif norm == 'mean_abs':
    total = arrays.segment_sum(jnp.abs(deviation), segments, entries)
    deviation = deviation * count / (total + _ABS_EPSILON)
  elif norm == 'leave_one_out':
    deviation = deviation * count / jnp.maximum(count - 1, 1)
  singleton = values[0] if keep_singletons else jnp.zeros_like(deviation)
  return jnp.where(count == 1, singleton, deviation)


def diagnose(*columns: ArrayLike, **options: object) -> dict[str, float]:
  """Returns `signal_metrics` of the rows of any algorithm.

  Args:
    *columns: arrays of the rows, as for `gigpo`.
    **options: options, as for `gigpo`.
  """
  components = Components(
    *map(np.asarray, gigpo_components(*columns, **options))
  )
  return signal_metrics(components, np.asarray(columns[1]))


def signal_metrics(
  components: Components, groups: np.ndarray
) -> dict[str, float]:
  """Returns metrics of the learning signal; most are means over rows.

  The others are zero_variance_groups, the share of zero-variance groups, which
  have no signal at episode level; anchor_group_size_mean, a mean over anchor
  groups; anchor_groups_of_..., shares of anchor groups by size; standard
  deviations; and the correlation of A_E and A_S.
  """
  real = groups != -1
  if not real.any():
    return {}
  sizes = components.anchor_group_sizes[real]
  episode, step = (
    components.episode_advantage[real],
    components.step_advantage[real],
  )
  ids = np.unique(groups[real], return_inverse=True)[1]
  largest = np.zeros(ids.max() + 1)
  np.maximum.at(largest, ids, np.abs(episode))
  # An anchor group of n rows is summed n times with weight 1/n.
  num_groups = np.sum(1 / sizes)
  values = {
    'advantage/singleton_anchor_rows': np.mean(sizes == 1),
    'advantage/anchor_group_size_mean': len(sizes) / num_groups,
    'advantage/zero_variance_groups': np.mean(largest == 0),
    'advantage/episode_abs_mean': np.abs(episode).mean(),
    'advantage/step_abs_mean': np.abs(step).mean(),
    'advantage/episode_std': episode.std(),
    'advantage/step_std': step.std(),
  }
  for name, low, high in (
    ('1', 1, 1),
    ('2_to_3', 2, 3),
    ('4_to_7', 4, 7),
    ('8_and_more', 8, np.inf),
  ):
    inside = (sizes >= low) & (sizes <= high)
    share = np.sum(inside / sizes) / num_groups
    values[f'advantage/anchor_groups_of_{name}'] = share
  # The std of equal float32 numbers may be above 0.
  if np.ptp(episode) > 0 and np.ptp(step) > 0:
    values['advantage/correlation'] = np.corrcoef(episode, step)[0, 1]
  return {name: float(value) for name, value in values.items()}


def check_options(**options: str) -> None:
  """Raises ValueError if an option is unknown or two are incompatible."""
  for name, value in options.items():
    options_lib.check_choice(name, value, OPTIONS[name])
  if options['penalty_scope'] == 'row' and options['episode_stats'] != 'rows':
    raise ValueError(
      f'penalty_scope=row: with episode_stats={options["episode_stats"]} equal '
      'returns would divide the penalty by 1e-6; needs episode_stats=rows'
    )


def describe(*inputs, penalty_scope: str) -> RowSegments:
  """Calls `segment_rows`; the name and arguments of the previous release."""
  deprecated.warn(f'{__name__}.describe', f'{__name__}.segment_rows')
  return segment_rows(Inputs(*inputs), penalty_scope=penalty_scope)


__getattr__ = deprecated.names(
  __name__,
  {
    'Described': 'RowSegments',
    'inputs': 'device_inputs',
    'Parts': 'Components',
    'gigpo_parts': 'gigpo_components',
    'parts_of': 'make_components',
  },
)
