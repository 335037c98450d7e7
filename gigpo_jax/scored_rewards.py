"""Users' rewards from probabilities of the policy, computed after a rollout.

A function, named 'module:function', is a generator. It is called with an
`envs.rewards.Episode` and yields one text per turn, or None: a response to the
prompt of the turn. It is sent the probability of each text under the policy
before the update, exp(mean log-prob) over the text's tokens, NaN for None. It
returns a reward per turn, or one number, the reward of the last turn:

    def gain(episode):
      texts = ['<answer>42'] * len(episode.turns)
      p = yield texts
      return [later - now for now, later in zip(p, p[1:])] + [0.0]

A pair of texts (start, rest) is a response of which only the rest counts. The
texts of an iteration take one forward pass per function, with the shapes of the
rows' own pass. A text that does not fit into a completion is cut; if nothing of
it counts then, its probability is NaN, too.
"""

import contextlib
import dataclasses
from collections.abc import (
  Callable,
  Generator,
  Iterable,
  Iterator,
  Sequence,
)
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Float

from envs import messages, rewards
from gigpo_jax import answer_scores, batch, options, tokenizer, trajectory
from gigpo_jax.reward_functions import to_episode
from gigpo_jax.runtime import errors

FIELD = 'reward.scored'
_RESUME = 'fix the function and rerun the command; it resumes'


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of scored rewards, `config.reward`.

  Attributes:
    scored: the functions; () for none.
    scored_weights: weight of each function in the reward; () is 1 each.
  """

  scored: tuple[str, ...] = ()
  scored_weights: tuple[float, ...] = ()

  def __post_init__(self):
    options.check(self)
    paths, weights = tuple(self.scored), tuple(self.scored_weights)
    if weights and len(weights) != len(paths):
      raise ValueError(
        f'scored_weights={weights}: scored={paths}; must be one weight per '
        'function, or ()'
      )
    if len(set(map(rewards.name_of, paths))) < len(paths):
      raise ValueError(f'scored={paths}: must have different names')


@dataclasses.dataclass(frozen=True)
class ScoredRewards:
  """Adds the rewards of functions to rows.

  Attributes:
    options: the functions and their weights.
    encode: returns the token ids of texts.
    agent_rewards: one of `batch.AGENT_REWARDS`.
  """

  options: Options
  encode: Callable[[Sequence[str]], list[np.ndarray]]
  agent_rewards: str = 'team'

  def add(
    self,
    rows: batch.Rows,
    episodes: Sequence[trajectory.Trajectory],
    log_probs: Callable[[batch.Rows], Float[np.ndarray, 'R C']],
  ) -> tuple[batch.Rows, dict[str, float]]:
    """Returns rows with the weighted rewards added, and their means.

    Args:
      rows: the rows of an iteration.
      episodes: the episodes to which `Rows.episodes` refers.
      log_probs: log-probs of the completions of rows under the policy.

    Raises:
      errors.RunError: in one line, if a function raises an exception or returns
        something unusable.
    """
    total, metrics = rows.rewards.copy(), {}
    weights = self.options.scored_weights or (1.0,) * len(self.options.scored)
    for path, weight in zip(self.options.scored, weights, strict=True):
      values = self._evaluate(path, rows, episodes, log_probs)
      total += (weight * values).astype(total.dtype)
      name = f'reward/scored/{rewards.name_of(path)}'
      metrics[name] = float(values[rows.real].mean())
    return dataclasses.replace(rows, rewards=total), metrics

  def _evaluate(
    self,
    path: str,
    rows: batch.Rows,
    episodes: Sequence[trajectory.Trajectory],
    log_probs: Callable[[batch.Rows], Float[np.ndarray, 'R C']],
  ) -> Float[np.ndarray, ' R']:
    """Returns the rewards of a function, [R]; 0 for padding."""
    function = rewards.make(path, {}, field=FIELD)
    by_episode = _rows_by_episode(rows)
    running, texts = {}, [None] * len(rows.tokens)
    for index, own in by_episode.items():
      with _explain(path):
        running[index] = function(to_episode(episodes[index]))
        given = _first_value(running[index], len(own))
      for r, text in zip(own, given, strict=True):
        texts[r] = text
    scored, mask = answer_scores.respond(rows, texts, self.encode)
    probabilities = answer_scores.probabilities(log_probs(scored), mask)
    values = np.zeros(len(rows.tokens))
    for index, own in by_episode.items():
      with _explain(path):
        returned = _last_value(running[index], probabilities[own].tolist())
        name = rewards.name_of(path)
        by_turn = rewards.per_turn(name, returned, len(own))
        if self.agent_rewards == 'team':
          by_turn = episodes[index].until_next_turn(by_turn)
        values[own] = by_turn
    return values


def make(
  section: ml_collections.ConfigDict, text: tokenizer.Tokenizer
) -> ScoredRewards | None:
  """Returns the scored rewards of `config.reward`; None if there are none."""
  if not section.scored:
    return None
  return ScoredRewards(
    options.of_section(Options, section), text.encode, section.agents
  )


def _rows_by_episode(rows: batch.Rows) -> dict[int, np.ndarray]:
  """Returns the rows of each episode in the order of its turns."""
  real = np.flatnonzero(rows.real)
  order = real[np.lexsort((rows.steps[real], rows.episodes[real]))]
  episodes, starts = np.unique(rows.episodes[order], return_index=True)
  parts = np.split(order, starts[1:])
  return dict(zip(episodes.tolist(), parts, strict=True))


def try_out(
  section: ml_collections.ConfigDict, episode: trajectory.Trajectory
) -> None:
  """Calls the functions with one episode and made-up probabilities.

  Args:
    section: `config.reward`.
    episode: an episode with at least one turn.

  Raises:
    errors.RunError: in one line, if a function raises an exception or returns
      something unusable.
  """
  for path in section.scored:
    function, count = rewards.make(path, {}, field=FIELD), len(episode.steps)
    with _explain(path, advice='fix the function and rerun the same command'):
      running = function(to_episode(episode))
      texts = _first_value(running, count)
      made_up = [float('nan') if text is None else 0.5 for text in texts]
      value = _last_value(running, made_up)
      rewards.per_turn(rewards.name_of(path), value, count)


def _first_value(generator: Any, num_turns: int) -> list[Any]:
  """Returns the texts that a generator yields, one per turn."""
  if not isinstance(generator, Generator):
    raise messages.UnusableReplyError(
      f'returned a {type(generator).__name__}; must be a generator, which '
      'yields one text per turn'
    )
  try:
    value = next(generator)
  except StopIteration as end:
    raise messages.UnusableReplyError(
      'yields nothing; must yield one text per turn'
    ) from end
  if isinstance(value, str) or not isinstance(value, Iterable):
    raise messages.UnusableReplyError(
      f'yields a {type(value).__name__}; must be one text per turn'
    )
  texts = list(value)
  if len(texts) != num_turns:
    raise messages.UnusableReplyError(
      f'yields {len(texts)} texts; must be one per turn ({num_turns})'
    )
  if wrong := [text for text in texts if not _is_text(text)]:
    raise messages.UnusableReplyError(
      f'yields {wrong[0]!r:.80}; must be texts, pairs of texts, or None'
    )
  return texts


def _is_text(value: Any) -> bool:
  """Returns whether a value is a text, a pair of texts or None."""
  match value:
    case None | str() | (str(), str()):
      return True
  return False


def _last_value(generator: Any, probabilities: list[float]) -> Any:
  """Returns what a generator returns when it is sent the probabilities."""
  try:
    generator.send(probabilities)
  except StopIteration as end:
    return end.value
  raise messages.UnusableReplyError('yields twice; must yield once')


@contextlib.contextmanager
def _explain(path: str, *, advice: str = _RESUME) -> Iterator[None]:
  """Turns exceptions of a function into one line that ends with advice."""
  try:
    yield
  except Exception as error:  # User code raises anything.
    is_own = isinstance(error, messages.UnusableReplyError)
    name = '' if is_own else f'{type(error).__name__}: '
    reason = ' '.join(f'{name}{error}'.split())[:300]
    raise errors.RunError(f'{FIELD}={path}: {reason}; {advice}') from error


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each function that cannot be used."""
  for path in config.reward.scored:
    try:
      rewards.make(path, {}, field=FIELD)
    except ValueError as error:
      yield str(error)
  if config.reward.scored and config.rollout.forced_members:
    yield (
      f'rollout.forced_members={config.rollout.forced_members}: reward.scored '
      'would score texts after the forced prefix; must be 0'
    )
