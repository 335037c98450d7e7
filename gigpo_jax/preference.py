"""Segment DPO (arXiv:2501.01821): preferences between recorded continuations.

Two episodes of a task reach the same anchor and continue differently. The
continuation with the larger sum of rewards is the better one. The first turns
of both, equally many, are the segments w and l of a pair, with the loss

    L = -log sigmoid(m),
    m = beta (sum over w of log pi / pi_ref - the same sum over l),

where the sums are over the sampled tokens of all turns of a segment, and pi_ref
is the policy at the start. The loss of an update is the mean over its pairs.

A learner's loss is a sum over tokens, and the rows of a pair may be in
different microbatches. A forward pass before each update therefore computes m,
and the update minimizes L to first order at the current parameters,

    L + sum over tokens of (dL / dlog pi) (log pi - sg(log pi)),
    dL / dlog pi = -beta sigmoid(-m) for w and beta sigmoid(-m) for l.

Value and gradient of this sum are those of L.

# Differs from the paper: an anchor takes the place of the turn that a large
model names as the error, recorded episodes that of new ones sampled there, and
a fixed number of turns that of the segment which the model selects.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from scipy import special

from gigpo_jax import batch, token_batch

_SEGMENTS = 2  # of a pair
# Largest relative difference of equal returns, whose sums are rounded.
_ROUNDING = 1e-6

Step = dict[str, Any]  # The record of a turn; see `episode_records`.


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two continuations of one state, as equally many turns.

  Attributes:
    better: records of the turns of w.
    worse: records of the turns of l.
  """

  better: tuple[Step, ...]
  worse: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class _Continuation:
  """The turns of an agent from a state on, and the sum of their rewards."""

  steps: tuple[Step, ...]
  value: float


def check(values: Mapping[str, Any]) -> None:
  """Raises ValueError, in one line, if sft.loss=dpo cannot use the options.

  Args:
    values: options of `config.sft`.
  """
  turns, rows = values['segment_turns'], values['minibatch_rows']
  if not (values['data'] or values['rounds']):
    raise ValueError(
      'data=: sft.loss=dpo needs a folder of episodes, or sft.rounds above 0'
    )
  if _SEGMENTS * turns > rows:
    raise ValueError(
      f'segment_turns={turns}: a pair has twice as many rows; must be at most '
      f'half of sft.minibatch_rows={rows}'
    )


def make_pairs(
  episodes: Sequence[dict[str, Any]], segment_turns: int, *, team: bool
) -> list[Pair]:
  """Returns the pairs of recorded episodes.

  From each state of a task, the i-th best continuation is paired with the i-th
  worst, if it is better and begins with another response. An episode counts
  from its first visit of a state. Failed environments do not count.

  Args:
    episodes: records of episodes; see `episode_records`.
    segment_turns: largest number of turns of a segment.
    team: whether the rewards of all agents count, instead of the agent's own.

  Raises:
    ValueError: in one line, if a sum of rewards is not finite.
  """
  by_state: dict[tuple, list[_Continuation]] = {}
  for episode in episodes:
    if not episode['failure']:
      task = episode['task_split'], episode['task_index']
      for state, continuation in _continuations(episode['steps'], team):
        if not math.isfinite(continuation.value):
          raise ValueError(
            f'an episode of {task[0]}/{task[1]} has rewards with the sum '
            f'{continuation.value}; must be finite'
          )
        by_state.setdefault((*task, *state), []).append(continuation)
  pairs = []
  for others in by_state.values():
    ranked = sorted(others, key=lambda continuation: -continuation.value)
    for n in range(len(ranked) // 2):
      better, worse = ranked[n], ranked[-1 - n]
      length = min(segment_turns, len(better.steps), len(worse.steps))
      one, other = (c.steps[0]['completion_ids'] for c in (better, worse))
      is_tie = math.isclose(
        better.value, worse.value, rel_tol=_ROUNDING, abs_tol=_ROUNDING
      )
      if not is_tie and not np.array_equal(one, other):
        pairs.append(Pair(better.steps[:length], worse.steps[:length]))
  return pairs


def _continuations(
  steps: Sequence[Step], team: bool
) -> Iterator[tuple[tuple[str, str], _Continuation]]:
  """Yields each (agent, anchor) of an episode and what follows it."""
  taken = [step for step in steps if not step['is_last']]
  visited = set()
  for t, step in enumerate(taken):
    state = step['agent'], step['anchor']
    if state not in visited:
      visited.add(state)
      own = [s for s in taken[t:] if s['agent'] == step['agent']]
      rewards = [s['team_reward' if team else 'reward'] for s in own]
      yield state, _Continuation(tuple(own), float(np.sum(rewards)))


@dataclasses.dataclass(frozen=True)
class FirstOrder:
  """A loss that is linear in the log-probs, at the current parameters.

  The columns are the value of the loss per token, and minus its derivative by
  the log-prob of the token.
  """

  columns = ('values', 'advantages')

  def __call__(
    self, outputs: token_batch.PolicyOutputs, tokens: token_batch.TokenBatch
  ) -> token_batch.TokenLoss:
    """Returns the loss and metrics of each token."""
    log_probs = jnp.where(tokens.mask, outputs.log_probs, 0)
    change = log_probs - jax.lax.stop_gradient(log_probs)
    loss = tokens.extras['values'] - tokens.advantages * change
    entropy = jnp.where(tokens.mask, outputs.entropies, 0)
    return loss, {'loss/entropy': entropy}


@dataclasses.dataclass(frozen=True, eq=False)
class PairRows:
  """Pairs as rows.

  Attributes:
    rows: the turns of all pairs.
    pairs: index of each row's pair; -1 for padding.
    signs: 1 for rows of better continuations, -1 for worse ones.
    ref_log_probs: log-probs of the policy at the start.
    beta: weight of log-ratios.
  """

  rows: batch.Rows
  pairs: Int[np.ndarray, ' R']
  signs: Int[np.ndarray, ' R']
  ref_log_probs: Float[np.ndarray, 'R C']
  beta: float

  @classmethod
  def of(
    cls, pairs: Sequence[Pair], rows: batch.Rows, beta: float
  ) -> 'PairRows':
    """Returns pairs whose reference log-probs are still 0.

    Args:
      pairs: the pairs.
      rows: their turns; those of w before those of l, pair after pair.
      beta: weight of log-ratios.
    """
    index = np.full(len(rows.groups), -1)
    signs = np.zeros(len(rows.groups), int)
    start = 0
    for n, pair in enumerate(pairs):
      for sign, steps in ((1, pair.better), (-1, pair.worse)):
        own = slice(start, start + len(steps))
        index[own], signs[own], start = n, sign, own.stop
    return cls(rows, index, signs, 0 * rows.sampler_log_probs, beta)

  @property
  def count(self) -> int:
    """Number of pairs."""
    return int(self.pairs.max()) + 1

  def updates(
    self, epochs: int, most_rows: int, seed: int = 0
  ) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (epoch, row ids) of each update: whole pairs, shuffled."""
    own = [np.flatnonzero(self.pairs == n) for n in range(self.count)]
    for epoch in range(epochs):
      update: list[np.ndarray] = []
      for n in np.random.default_rng((epoch, seed)).permutation(len(own)):
        if sum(map(len, update)) + len(own[n]) > most_rows:
          yield epoch, np.concatenate(update)
          update = []
        update.append(own[n])
      yield epoch, np.concatenate(update)

  def columns(
    self, row_ids: np.ndarray, log_probs: Float[np.ndarray, 'R C']
  ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns the columns of an update for `FirstOrder`, and metrics.

    With loss.aggregation=token_mean, the mean over tokens of the loss is the
    mean over pairs of L.

    Args:
      row_ids: rows of whole pairs.
      log_probs: log-probs of their tokens under the current parameters; 0 past
        a completion.
    """
    signs = self.signs[row_ids]
    mask = self.rows.completion_mask[row_ids]
    ratios = np.where(mask, log_probs - self.ref_log_probs[row_ids], 0)
    _, pairs = np.unique(self.pairs[row_ids], return_inverse=True)
    sums = signs * ratios.sum(axis=1, dtype=np.float64)
    margins = self.beta * np.bincount(pairs, weights=sums)
    losses = np.logaddexp(0, -margins)
    slopes = self.beta * special.expit(-margins)
    tokens = np.bincount(pairs, weights=mask.sum(axis=1))
    scale = tokens.mean()  # Tokens of the update by its number of pairs.
    columns = {
      'values': scale * (losses / tokens)[pairs],
      'advantages': scale * signs * slopes[pairs],
    }
    metrics = {
      'preference/margin': float(margins.mean()),
      'preference/accuracy': float((margins > 0).mean()),
    }
    return {k: x.astype(np.float32) for k, x in columns.items()}, metrics
