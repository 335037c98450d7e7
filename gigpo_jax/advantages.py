"""Advantages of GiGPO (arXiv:2505.10978), vectorised over rows.

Input: one array entry a row: reward, group, episode, step, anchor, validity;
rows in any order, group -1 marks padding. Output: one advantage a row. Knows
no tokens, no model and no environment. O(R log R): sorts and segment sums.

An episode is identified by (group, episode), an anchor group by (group,
anchor): ids may repeat between groups.

# Differs from the paper: none by default. `episode_stats='rows'`,
`penalty_scope='row'` and `lone_episode='raw'` are readings of the authors'
released code.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from gigpo_jax import arrays
from gigpo_jax.arrays import typechecked

# Added to a standard deviation before dividing by it.
EPSILON = 1e-6

# Two-float returns are the same number when they differ by less than this
# share: their rounding error is below it, their weight against EPSILON nil.
_SAME = 2.0**-42

NORMS = ('mean_std', 'mean', 'leave_one_out')

OPTIONS = {
  'norm': NORMS,
  'episode_stats': ('trajectories', 'rows'),
  'penalty_scope': ('reward', 'row'),
  'lone_episode': ('zero', 'raw'),
}


class Parts(NamedTuple):
  """What an advantage is made of, for each row; 0 for padding.

  Attributes:
    episode_advantage: A_E, Eq. (3).
    step_advantage: A_S, Eq. (7); before `step_weight`.
    episode_returns: undiscounted sum of an episode's rewards, E.
    returns: discounted return from the step on, G; Eq. (5).
    anchor_group_sizes: rows of the row's anchor group, itself included.
    group_sizes: episodes of the row's group.
  """

  episode_advantage: Float[Array, ' R']
  step_advantage: Float[Array, ' R']
  episode_returns: Float[Array, ' R']
  returns: Float[Array, ' R']
  anchor_group_sizes: Int[Array, ' R']
  group_sizes: Int[Array, ' R']


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
  invalid_penalty: float = 0.1,
  norm: str = 'mean_std',
  episode_stats: str = 'trajectories',
  penalty_scope: str = 'reward',
  lone_episode: str = 'zero',
) -> Float[Array, ' R']:
  """Returns the advantage of each row: A_E + step_weight * A_S, Eq. (8).

  Takes numpy arrays, lists or jax arrays of shape [R], and traces under jit.
  Outside jit, ids may be integers of any width, such as hashes; 128-bit ones
  as Python integers or as uint64 [R, 2]. Under jit they are int32, anchors
  also uint32 [R, 4]; see `anchors.digests`.

  Args:
    rewards: raw reward of each step, before any penalty.
    groups: group of each row; -1 marks padding.
    episodes: episode of each row, unique within a group.
    steps: number of the step in its episode; a gap discounts by its length.
    anchors: id of the state the step was taken in, unique within a group.
    valid: whether the response had the required form.
    discount: gamma, a step; for A_S only.
    step_weight: omega; 0 is GRPO.
    invalid_penalty: c, in reward units; taken off for an invalid response.
    norm: 'mean_std' divides by the spread (ddof 1) + 1e-6; 'mean' does not;
      'leave_one_out' compares with the mean of the others.
    episode_stats: mean and spread of A_E over 'trajectories', one entry each
      (Eq. 3), or over 'rows', so that long episodes count more (code).
    penalty_scope: 'reward' takes the penalty off the step's reward; 'row'
      (code) off the E and G of that row alone. 'row' needs 'rows' above.
    lone_episode: A_E where the statistics have one entry: 'zero', or 'raw'
      (code), E itself.

  Returns:
    float32; 0 for padding. No gradient flows through it.

  Raises:
    ValueError: if an option is unknown or two do not go together.
  """
  parts = gigpo_parts(
    rewards,
    groups,
    episodes,
    steps,
    anchors,
    valid,
    discount=discount,
    step_weight=step_weight,
    invalid_penalty=invalid_penalty,
    norm=norm,
    episode_stats=episode_stats,
    penalty_scope=penalty_scope,
    lone_episode=lone_episode,
  )
  return combine(parts, step_weight)


def combine(parts: Parts, step_weight: float) -> Float[Array, ' R']:
  """Returns the joint advantage, Eq. (8)."""
  return parts.episode_advantage + step_weight * parts.step_advantage


def gigpo_parts(  # noqa: PLR0913
  rewards: ArrayLike,
  groups: ArrayLike,
  episodes: ArrayLike,
  steps: ArrayLike,
  anchors: ArrayLike,
  valid: ArrayLike,
  *,
  discount: float = 0.95,
  step_weight: float = 1.0,
  invalid_penalty: float = 0.1,
  norm: str = 'mean_std',
  episode_stats: str = 'trajectories',
  penalty_scope: str = 'reward',
  lone_episode: str = 'zero',
) -> Parts:
  """Returns what the advantages are made of; arguments as of `gigpo`."""
  del step_weight  # The parts come before their weighting.
  check_options(
    norm=norm,
    episode_stats=episode_stats,
    penalty_scope=penalty_scope,
    lone_episode=lone_episode,
  )
  if not np.shape(groups)[0]:
    numbers, sizes = jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.int32)
    return Parts(*4 * [numbers], *2 * [sizes])
  return _parts(
    *inputs(
      rewards,
      groups,
      episodes,
      steps,
      anchors,
      valid,
      discount,
      invalid_penalty,
    ),
    norm=norm,
    episode_stats=episode_stats,
    penalty_scope=penalty_scope,
    lone_episode=lone_episode,
  )


def inputs(  # noqa: PLR0913
  rewards: ArrayLike,
  groups: ArrayLike,
  episodes: ArrayLike,
  steps: ArrayLike,
  anchors: ArrayLike,
  valid: ArrayLike,
  discount: float,
  invalid_penalty: float,
) -> tuple:
  """Returns arguments of `gigpo` as those of `describe`."""
  return (
    arrays.two_float(rewards),
    arrays.ids32(groups, padding=True),
    arrays.ids32(episodes),
    jnp.asarray(steps, jnp.int32),
    arrays.keys32(anchors),
    jnp.asarray(valid, bool),
    arrays.two_float(discount),
    arrays.two_float(invalid_penalty),
  )


@functools.partial(
  jax.jit,
  static_argnames=('norm', 'episode_stats', 'penalty_scope', 'lone_episode'),
)
def _parts(
  rewards,
  groups,
  episodes,
  steps,
  anchors,
  valid,
  discount,
  invalid_penalty,
  *,
  norm,
  episode_stats,
  penalty_scope,
  lone_episode,
):
  found = describe(
    rewards,
    groups,
    episodes,
    steps,
    anchors,
    valid,
    discount,
    invalid_penalty,
    penalty_scope=penalty_scope,
  )
  return parts_of(
    found,
    step_advantages(found.returns, found.anchors, norm=norm),
    norm=norm,
    episode_stats=episode_stats,
    lone_episode=lone_episode,
  )


class Described(NamedTuple):
  """Rows as advantages are computed from; padding is a group of its own.

  Attributes:
    real: which rows are not padding.
    groups: segment of each row's group, like the next two in [0, R).
    episodes: of its episode.
    anchors: of its anchor group.
    starts: whether a row is the first of its episode.
    previous: row of the step before; that of a first step is R.
    cost: what an invalid response costs, not above 0; two-float, as all below.
    returns: G, Eq. (5).
    episode_returns: E.
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


def describe(  # noqa: PLR0913
  rewards: arrays.TwoFloat,
  groups: Int[Array, ' R'],
  episodes: Int[Array, ' R'],
  steps: Int[Array, ' R'],
  anchors: Int[Array, ' R'],
  valid: Bool[Array, ' R'],
  discount: arrays.TwoFloat,
  invalid_penalty: arrays.TwoFloat,
  *,
  penalty_scope: str,
) -> Described:
  """Returns segments and returns; arguments as of `gigpo`, traced."""
  rewards = jax.lax.stop_gradient(rewards)
  cost = tuple(jnp.where(valid, 0, -part) for part in invalid_penalty)
  if penalty_scope == 'reward':
    rewards = arrays.two_add(rewards, cost)
  # Everything in the order of the steps, for which one sorting has to do.
  order = jnp.lexsort((steps, episodes, groups))
  place = jnp.arange(len(order))
  opens = _changes(groups[order])
  starts = opens | _changes(episodes[order])
  start = jax.lax.cummax(jnp.where(starts, place, 0))
  returns, sums = discounted_returns(
    tuple(part[order] for part in rewards), ~starts, steps[order], discount
  )
  found = (
    jnp.cumsum(opens, dtype=jnp.int32) - 1,
    jnp.cumsum(starts, dtype=jnp.int32) - 1,
    starts,
    jnp.where(starts, len(order), jnp.roll(order, 1)),
    returns,
    tuple(part[start] for part in sums),
  )
  back = jnp.zeros_like(order).at[order].set(place)
  group_ids, episode_ids, starts, previous, returns, episode_returns = (
    jax.tree.map(lambda part: part[back], found)
  )
  if penalty_scope == 'row':
    returns = arrays.two_add(returns, cost)
    episode_returns = arrays.two_add(episode_returns, cost)
  return Described(
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
  """Returns where a value is another than the one before, and the first."""
  return jnp.append(jnp.array([True]), values[1:] != values[:-1])


def step_advantages(
  values: arrays.TwoFloat, segments: Int[Array, ' R'], **options
) -> Float[Array, ' R']:
  """Returns A_S, Eq. (7); options as of `group_normalize`."""
  every = jnp.ones(segments.shape, bool)
  return group_normalize(values, segments, every, **options)


def parts_of(
  found: Described,
  step_advantage: Float[Array, ' R'],
  *,
  norm: str,
  episode_stats: str,
  lone_episode: str,
) -> Parts:
  """Returns the parts of an advantage with this A_S; options as of `gigpo`."""
  every = jnp.ones_like(found.starts)
  parts = Parts(
    episode_advantage=group_normalize(
      found.episode_returns,
      found.groups,
      found.starts if episode_stats == 'trajectories' else every,
      norm=norm,
      keep_lone=lone_episode == 'raw',
    ),
    step_advantage=step_advantage,
    episode_returns=found.episode_returns[0],
    returns=found.returns[0],
    anchor_group_sizes=arrays.segment_count(found.anchors, every),
    group_sizes=arrays.segment_count(found.groups, found.starts),
  )
  return jax.tree.map(lambda part: jnp.where(found.real, part, 0), parts)


@typechecked
def whiten(
  values: Float[Array, ' R'], weights: Float[Array, ' R']
) -> Float[Array, ' R']:
  """Returns (x - mean) / (std + 1e-6) over all rows.

  Args:
    values: of rows.
    weights: how often a row counts, 0 for padding; the std is the unbiased one
      of as many numbers.
  """
  # Of equal values the mean, too, has to be exactly the same.
  values = jnp.where(weights > 0, values - values[jnp.argmax(weights > 0)], 0)
  total = jnp.maximum(jnp.sum(weights), 1)
  mean = jnp.sum(weights * values) / total
  squares = jnp.sum(weights * (values - mean) ** 2)
  spread = jnp.sqrt(squares / jnp.maximum(total - 1, 1))
  return jnp.where(weights > 0, (values - mean) / (spread + EPSILON), 0)


@typechecked
def discounted_returns(
  rewards: tuple[Float[Array, ' R'], Float[Array, ' R']],
  goes_on: Bool[Array, ' R'],
  steps: Int[Array, ' R'],
  discount: tuple[Float[Array, ''], Float[Array, '']],
) -> tuple[arrays.TwoFloat, arrays.TwoFloat]:
  """Returns the return from each step on, discounted and not, two-float.

  Eq. (5): G_t = sum over k >= t of discount^(k - t) r_k, within an episode.
  A linear recurrence G_t = r_t + discount^gap G_next, solved for all episodes
  at once by a reversed prefix scan by doubling: as many rounds as the
  logarithm of the longest episode.

  Args:
    rewards: two-float, in reward units; rows in the order of their steps,
      episode by episode.
    goes_on: whether a row is of the same episode as the one before.
    steps: number within the episode; `gap` is the difference to the next.
    discount: two-float, in [0, 1].
  """
  continues = jnp.append(goes_on[1:], False)
  gap = jnp.where(continues, jnp.append(jnp.diff(steps), 0), 0)
  powers = arrays.two_power(discount, gap)
  # Discounted, and not.
  decay = (
    jnp.where(continues, jnp.stack([powers[0], jnp.ones_like(powers[0])]), 0),
    jnp.where(continues, jnp.stack([powers[1], jnp.zeros_like(powers[1])]), 0),
  )
  total = tuple(jnp.stack([part, part]) for part in rewards)
  position = jnp.arange(len(gap))

  def double(carry):
    distance, decay, total = carry
    source = position + distance
    inside = source < len(position)
    source = jnp.minimum(source, len(position) - 1)
    # Beyond the episode: nothing to add, not even what is no number.
    inside &= decay[0] != 0
    ahead, beyond = (
      tuple(jnp.where(inside, part[:, source], 0) for part in pair)
      for pair in (total, decay)
    )
    total = arrays.two_add(total, arrays.two_multiply(decay, ahead))
    return 2 * distance, arrays.two_multiply(decay, beyond), total

  _, _, total = jax.lax.while_loop(
    lambda carry: jnp.any(carry[1][0] != 0), double, (1, decay, total)
  )
  return tuple(part[0] for part in total), tuple(part[1] for part in total)


@typechecked
def group_normalize(
  values: tuple[Float[Array, ' R'], Float[Array, ' R']],
  segments: Int[Array, ' R'],
  entries: Bool[Array, ' R'],
  *,
  norm: str,
  keep_lone: bool = False,
  ddof: int = 1,
  epsilon: float = EPSILON,
  tolerance: float | Float[Array, ''] = 0.0,
) -> Float[Array, ' R']:
  """Returns by how much a value exceeds its segment's mean, Eqs. (3) and (7).

  (x - mean) / (std + epsilon), or (x - mean) alone, or x less the mean of the
  segment's others, which is (x - mean) n / (n - 1).
  Equal values give exactly 0: each is first taken off a member of the segment,
  exactly, since the float32 mean of equal numbers can be off by one unit in
  the last place, which 1e-6 would magnify to a full-sized advantage.

  Args:
    values: two-float; entries of one segment are compared.
    segments: in [0, R).
    entries: which rows enter mean and std; at least one in every segment.
    norm: one of NORMS.
    keep_lone: a segment with one entry gives the value itself, not 0.
    ddof: of the std: 1, or 0 for that of a population.
    epsilon: added to the std.
    tolerance: values that differ by no more are the same; for those that were
      computed in float32.
  """
  first = arrays.segment_first(segments, entries)
  member = tuple(part[first] for part in values)
  difference, _ = arrays.two_add(values, tuple(-part for part in member))
  resolution = _SAME * jnp.maximum(jnp.abs(values[0]), jnp.abs(member[0]))
  same = jnp.abs(difference) <= jnp.maximum(resolution, tolerance)
  centred = jnp.where(same, 0, difference)
  count = arrays.segment_count(segments, entries)
  mean = arrays.segment_sum(centred, segments, entries) / count
  deviation = centred - mean
  if norm == 'mean_std':
    squares = arrays.segment_sum(deviation**2, segments, entries)
    spread = jnp.sqrt(squares / jnp.maximum(count - ddof, 1)) + epsilon
    deviation = deviation / spread
  elif norm == 'leave_one_out':
    deviation = deviation * count / jnp.maximum(count - 1, 1)
  lone = values[0] if keep_lone else jnp.zeros_like(deviation)
  return jnp.where(count == 1, lone, deviation)


def check_options(**options: str) -> None:
  """Raises ValueError if an option is unknown or two do not go together."""
  for name, value in options.items():
    if value not in OPTIONS[name]:
      known = ', '.join(OPTIONS[name])
      raise ValueError(f'{name}={value}: unknown; must be one of {known}')
  if options['penalty_scope'] == 'row' and options['episode_stats'] != 'rows':
    raise ValueError(
      f'penalty_scope=row: with episode_stats={options["episode_stats"]} equal '
      'returns would divide the penalty by 1e-6; needs episode_stats=rows'
    )
