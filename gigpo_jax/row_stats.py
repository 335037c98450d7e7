"""Statistics of episodes, groups and tokens of rows, in numpy and float64.

Plug-ins of `modulators` and `selectors` share these functions. All of them
ignore padding rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gigpo_jax import batch, trajectory

_EPSILON = 1e-6  # Added to standard deviations.


class Episodes(NamedTuple):
  """The episodes of rows; E episodes in G groups.

  Attributes:
    index: index of each row's episode, in [0, E); -1 for padding.
    groups: index of each episode's group, in [0, G).
    returns: undiscounted sum of each episode's rewards.
    success: whether the episode accomplished its task.
    turns: number of rows.
    tokens: number of completion tokens.
    truncated: whether any response reached the token limit.
  """

  index: Int[np.ndarray, ' R']
  groups: Int[np.ndarray, ' E']
  returns: Float[np.ndarray, ' E']
  success: Bool[np.ndarray, ' E']
  turns: Int[np.ndarray, ' E']
  tokens: Int[np.ndarray, ' E']
  truncated: Bool[np.ndarray, ' E']

  @property
  def num_groups(self) -> int:
    """G."""
    return int(self.groups.max(initial=-1)) + 1

  def group_means(self, values: Float[np.ndarray, ' E']) -> np.ndarray:
    """Returns the mean over each group's episodes, [G]."""
    counts = np.bincount(self.groups)
    return np.bincount(self.groups, weights=values) / counts

  def any(self, values: Bool[np.ndarray, ' R']) -> Bool[np.ndarray, ' E']:
    """Returns whether a value of any of an episode's rows is True."""
    return self.sum(values) > 0

  def sum(self, values: Float[np.ndarray, ' R']) -> Float[np.ndarray, ' E']:
    """Returns the sum of the values of each episode's rows."""
    own = self.index >= 0
    return np.bincount(
      self.index[own], weights=values[own], minlength=len(self.groups)
    )

  def has_spread(self) -> Bool[np.ndarray, ' G']:
    """Returns whether episodes of a group have different returns."""
    low = np.full(self.num_groups, np.inf)
    high = -low
    np.minimum.at(low, self.groups, self.returns)
    np.maximum.at(high, self.groups, self.returns)
    rounding = trajectory.ROUNDING
    return ~np.isclose(low, high, rtol=rounding, atol=rounding)

  def to_rows(self, values: np.ndarray) -> np.ndarray:
    """Returns each row's value, given one per episode; 0 for padding."""
    result = np.zeros(len(self.index), np.result_type(values, 0))
    real = self.index >= 0
    result[real] = values[self.index[real]]
    return result

  def groups_to_rows(self, values: np.ndarray) -> np.ndarray:
    """Returns each row's value, given one per group; 0 for padding."""
    return self.to_rows(values[self.groups])


def response_weights(rows: batch.Rows) -> Float[np.ndarray, ' R']:
  """Returns 1 / number of rows with the same response; 0 for padding.

  With these weights, a response that branches share counts once.
  """
  weights = np.zeros(len(rows.responses))
  _, index, counts = np.unique(
    rows.responses[rows.real], return_inverse=True, return_counts=True
  )
  weights[rows.real] = 1 / counts[index]
  return weights


def episodes(rows: batch.Rows, invalid_penalty: float = 0.0) -> Episodes:
  """Returns the episodes of rows.

  Args:
    rows: the rows of an iteration.
    invalid_penalty: subtracted from the reward of an invalid response.
  """
  real = rows.real
  keys = np.stack([rows.groups[real], rows.episodes[real]], axis=1)
  unique, own = np.unique(keys, axis=0, return_inverse=True)
  index = np.full(len(real), -1)
  index[real] = own
  lengths = (rows.lengths - rows.prompt_lengths)[real]

  def total(values: np.ndarray) -> np.ndarray:
    return np.bincount(own, weights=values[real], minlength=len(unique))

  return Episodes(
    index=index,
    groups=np.unique(unique[:, 0], return_inverse=True)[1],
    returns=total(penalized_rewards(rows, invalid_penalty)),
    success=total(rows.success) > 0,
    turns=np.bincount(own, minlength=len(unique)),
    tokens=np.bincount(own, weights=lengths).astype(int),
    truncated=total(rows.truncated) > 0,
  )


def first_rows(rows: batch.Rows, by_episode: Episodes) -> Int[np.ndarray, ' E']:
  """Returns the row of each episode's first turn.

  With several agents, the episodes of all agents begin with the turn of the
  first one.

  Args:
    rows: rows of whole episodes.
    by_episode: `episodes(rows)`.
  """
  first = np.flatnonzero(rows.real & (rows.steps == 0))
  by_id = np.full(rows.episodes.max(initial=-1) + 1, -1)
  by_id[rows.episodes[first]] = first
  by_index = np.full(len(by_episode.groups), -1)
  by_index[by_episode.index[rows.real]] = by_id[rows.episodes[rows.real]]
  # Ids of episodes may repeat between groups.
  by_index[by_episode.index[first]] = first
  return by_index


def whole_returns(
  remaining: Episodes, rows: batch.Rows | None, invalid_penalty: float
) -> Float[np.ndarray, ' E']:
  """Returns the returns of episodes of which some rows may be dropped.

  Args:
    remaining: the episodes of the remaining rows.
    rows: rows of whole episodes, in the same order; None: nothing is dropped.
    invalid_penalty: see `episodes`.
  """
  if rows is None:
    return remaining.returns
  whole, own = episodes(rows, invalid_penalty), remaining.index >= 0
  returns = np.zeros(len(remaining.returns))
  returns[remaining.index[own]] = whole.to_rows(whole.returns)[own]
  return returns


def penalized_rewards(
  rows: batch.Rows, invalid_penalty: float
) -> Float[np.ndarray, ' R']:
  """Returns rewards minus a penalty for each invalid response, float64."""
  penalties = np.where(rows.valid, 0, invalid_penalty)
  return rows.rewards.astype(np.float64) - penalties


def chains(rows: batch.Rows) -> list[Int[np.ndarray, ' T']]:
  """Returns the T rows of each episode in the order of its turns.

  Episodes are in the order of `episodes`.
  """
  order = np.lexsort((rows.steps, rows.episodes, rows.groups))
  order = order[rows.real[order]]
  keys = np.stack([rows.groups[order], rows.episodes[order]])
  starts = np.flatnonzero((np.diff(keys) != 0).any(axis=0)) + 1
  return np.split(order, starts) if len(order) else []


def group_z_scores(
  values: Float[np.ndarray, ' N'], groups: Int[np.ndarray, ' N']
) -> Float[np.ndarray, ' N']:
  """Returns (x - mean) / (std + 1e-6) in each group; 0 if all are equal.

  Values that are not finite do not count, and get 0.
  """
  scores, known = np.zeros(len(values)), np.isfinite(values)
  for group in np.unique(groups[known]):
    own = known & (groups == group)
    if not trajectory.are_equal(values[own]):
      centred = values[own] - values[own].mean()
      scores[own] = centred / (values[own].std(ddof=1) + _EPSILON)
  return scores


def next_rows(rows: batch.Rows) -> Int[np.ndarray, ' R']:
  """Returns the row of each row's next step; -1 for a last step or padding."""
  order = np.lexsort((rows.steps, rows.episodes, rows.groups))
  following = np.full(len(order), -1)
  one, other = order[:-1], order[1:]
  same = (
    (rows.groups[one] == rows.groups[other])
    & (rows.episodes[one] == rows.episodes[other])
    & rows.real[one]
  )
  following[one[same]] = other[same]
  return following


def token_means(
  values: Float[np.ndarray, 'R C'], mask: Bool[np.ndarray, 'R C']
) -> Float[np.ndarray, ' R']:
  """Returns the mean over each row's tokens; 0 for a row without any."""
  sums = np.where(mask, values, 0).astype(np.float64).sum(axis=1)
  return sums / np.maximum(mask.sum(axis=1), 1)


def lowest_means(
  values: Float[np.ndarray, 'R C'], mask: Bool[np.ndarray, 'R C'], share: float
) -> Float[np.ndarray, ' R']:
  """Returns the mean over the lowest of each row's values.

  Args:
    values: values of tokens.
    mask: True for the tokens that count.
    share: share of the tokens, in (0, 1]; rounded up, so at least one.

  Returns:
    The mean; 0 for a row without tokens.
  """
  ordered = np.sort(np.where(mask, values, np.inf), axis=1)
  counts = share_count(share, mask.sum(axis=1))
  chosen = np.arange(values.shape[1]) < counts[:, None]
  return token_means(ordered, chosen)


def share_count(share: float, size: np.ndarray | int) -> np.ndarray | int:
  """Returns share * size, rounded up."""
  # The subtraction absorbs the rounding of the product.
  return np.ceil(share * size - 1e-9).astype(int)


def scale(
  advantages: np.ndarray, factors: Float[np.ndarray, ' R']
) -> np.ndarray:
  """Returns advantages, [R] or [R, C], times a factor per row."""
  return advantages * like(factors, advantages)


def add(
  advantages: np.ndarray,
  values: Float[np.ndarray, ' R'],
  mask: Bool[np.ndarray, 'R C'],
) -> np.ndarray:
  """Returns advantages, [R] or [R, C], plus a value per row; 0 for padding."""
  real = mask if advantages.ndim > 1 else mask.any(axis=1)
  return np.where(real, advantages + like(values, advantages), 0)


def per_token(
  advantages: np.ndarray, mask: Bool[np.ndarray, 'R C']
) -> Float[np.ndarray, 'R C']:
  """Returns advantages, [R] or [R, C], as one per token."""
  column = advantages if advantages.ndim > 1 else advantages[:, None]
  return np.broadcast_to(column, mask.shape)


def like(values: np.ndarray, advantages: np.ndarray) -> np.ndarray:
  """Returns values of rows that broadcast to advantages."""
  return values[:, None] if advantages.ndim > 1 else values


def known_state_values(rows: batch.Rows) -> Float[np.ndarray, ' R']:
  """Returns `rows.state_values`; NaN where unknown.

  Raises:
    ValueError: in one line, if all are unknown, because nothing has estimated
      them, or all that were estimated failed.
  """
  if rows.real.any() and np.isnan(rows.state_values[rows.real]).all():
    raise ValueError(
      'rows.state_values: unknown in all rows, because all continuations '
      'failed, or nothing estimated them; must be estimated before, as '
      'gigpo_jax.continuations or gigpo_jax.answer_scores does'
    )
  return rows.state_values


def named_components(
  rows: batch.Rows, names: Sequence[str]
) -> Float[np.ndarray, 'R K']:
  """Returns the components of the rewards.

  Args:
    rows: the rows.
    names: their names.

  Raises:
    ValueError: in one line, if the rows have another number of them.
  """
  if rows.components.shape[1] != len(names):
    raise ValueError(
      f'rows.components: {rows.components.shape[1]} columns; must be one for '
      f'each of {", ".join(names)} (batch.from_trajectories(components=...))'
    )
  return rows.components


def whiten_tokens(
  advantages: Float[np.ndarray, 'R C'], mask: Bool[np.ndarray, 'R C']
) -> Float[np.ndarray, 'R C']:
  """Returns advantages with mean 0 and standard deviation 1 over the mask."""
  sampled = advantages[mask]
  deviation = sampled.std(ddof=1) if len(sampled) > 1 else 0.0
  mean = sampled.mean() if len(sampled) else 0.0
  return np.where(mask, (advantages - mean) / (deviation + 1e-8), 0)


def generalized_advantages(
  rows: batch.Rows,
  rewards: Float[np.ndarray, ' R'],
  values: Float[np.ndarray, 'R C'],
  units: Bool[np.ndarray, 'R C'],
  *,
  discount: float,
  decay: float,
) -> Float[np.ndarray, 'R C']:
  """Returns the advantage of each unit, 0 elsewhere, float64.

  Args:
    rows: rows with their groups, episodes and steps.
    rewards: reward of each row, given at its last unit.
    values: value before each unit.
    units: True at units, which are the first positions of each row.
    discount: discount per unit.
    decay: lambda.
  """
  advantages = np.zeros(values.shape)
  num_units = units.sum(axis=1)
  order = np.lexsort((rows.steps, rows.episodes, rows.groups))
  next_value, previous = 0.0, (-1, -1)
  advantage = 0.0
  for r in order[::-1]:
    if rows.groups[r] < 0 or not num_units[r]:
      continue
    episode = (rows.groups[r], rows.episodes[r])
    if episode != previous:
      next_value, advantage, previous = 0.0, 0.0, episode
    reward = rewards[r]
    for c in range(num_units[r] - 1, -1, -1):
      delta = reward + discount * next_value - values[r, c]
      advantage = delta + discount * decay * advantage
      advantages[r, c] = advantage
      next_value, reward = values[r, c], 0.0
  return advantages
