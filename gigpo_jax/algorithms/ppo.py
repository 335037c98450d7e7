"""PPO (arXiv:1707.06347) with a critic and generalized advantage estimation.

An episode is one chain of tokens, or of turns, through all of its rows:
advantages are A_k = delta_k + discount lambda A_{k+1}, delta_k = r_k +
discount V_{k+1} - V_k (arXiv:1506.02438, Eq. 16), and V is 0 past the end.

token: a link is a token, whose value the critic tells ahead of it; a turn's
reward comes with its last token. turn: a link is a turn (arXiv:2512.17008);
its value is the one ahead of its first token, and its tokens share an
advantage.
"""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float

from gigpo_jax import algorithms, batch

LEVELS = ('token', 'turn')


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Advantages against a critic; groups are not compared.

  Attributes:
    gae_level: of LEVELS.
    gae_discount: of a link.
    gae_lambda: lambda; 1 is the return less the value.
    whiten_advantages: whether they get mean 0 and deviation 1 over the tokens
      of the batch, as most implementations do.
    invalid_penalty: taken off the reward of an invalid turn.
  """

  needs_values: ClassVar[bool] = True
  needs_group: ClassVar[bool] = False

  gae_level: str = 'token'
  gae_discount: float = 1.0
  gae_lambda: float = 1.0
  whiten_advantages: bool = True
  invalid_penalty: float = 0.1

  def __post_init__(self):
    if self.gae_level not in LEVELS:
      raise ValueError(
        f'gae_level={self.gae_level}: unknown; must be one of '
        f'{", ".join(LEVELS)}'
      )

  def _links(self, rows: batch.Rows) -> Bool[np.ndarray, 'R C']:
    """Returns the places whose values count."""
    links = rows.completion_mask
    if self.gae_level == 'turn':
      links[:, 1:] = False
    return links

  def credit(
    self, rows: batch.Rows, values: Float[np.ndarray, 'R C'] | None = None
  ) -> algorithms.Credit:
    """Returns advantages of tokens and what the critic is to learn.

    Raises:
      ValueError: if there are no values.
    """
    if values is None:
      raise ValueError('values=None: ppo compares with those of a critic')
    mask, links = rows.completion_mask, self._links(rows)
    rewards = np.where(
      rows.valid, rows.rewards, rows.rewards - self.invalid_penalty
    )
    advantages = chain_advantages(
      rows,
      rewards,
      values.astype(np.float64),
      links,
      discount=self.gae_discount,
      decay=self.gae_lambda,
    )
    targets = np.where(links, advantages + values, 0)
    errors = np.where(links, advantages, 0)[links]
    spread = targets[links].var()
    found = {
      'critic/value_mean': values[links].mean(),
      'critic/explained': 1 - errors.var() / spread if spread else 0.0,
    }
    if self.gae_level == 'turn':
      advantages = np.where(mask, advantages[:, :1], 0)
    if self.whiten_advantages:
      inside = advantages[mask]
      spread = inside.std(ddof=1) if len(inside) > 1 else 0.0
      advantages = np.where(
        mask, (advantages - inside.mean()) / (spread + 1e-8), 0
      )
    found['advantage/abs_mean'] = np.abs(advantages[mask]).mean()
    return algorithms.Credit(
      advantages.astype(np.float32),
      {name: float(value) for name, value in found.items()},
      targets.astype(np.float32),
      links,
    )


def chain_advantages(
  rows: batch.Rows,
  rewards: Float[np.ndarray, ' R'],
  values: Float[np.ndarray, 'R C'],
  links: Bool[np.ndarray, 'R C'],
  *,
  discount: float,
  decay: float,
) -> Float[np.ndarray, 'R C']:
  """Returns the advantage of each link, 0 elsewhere, float64.

  Args:
    rows: episodes and their order.
    rewards: of rows, which come with the last link of each.
    values: ahead of each link.
    links: which places are links, the first ones of each row.
    discount: of a link.
    decay: lambda.
  """
  found = np.zeros(values.shape)
  number = links.sum(axis=1)
  order = np.lexsort((rows.steps, rows.episodes, rows.groups))
  following, last = 0.0, (-1, -1)
  advantage = 0.0
  for r in order[::-1]:
    if rows.groups[r] < 0 or not number[r]:
      continue
    episode = (rows.groups[r], rows.episodes[r])
    if episode != last:
      following, advantage, last = 0.0, 0.0, episode
    reward = rewards[r]
    for c in range(number[r] - 1, -1, -1):
      delta = reward + discount * following - values[r, c]
      advantage = delta + discount * decay * advantage
      found[r, c] = advantage
      following, reward = values[r, c], 0.0
  return found
