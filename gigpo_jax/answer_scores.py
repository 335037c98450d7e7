"""Probability of a task's reference answer before each turn.

The policy reads the prompt of a turn and a response that gives the reference
answer at once. The probability is exp(mean log-prob) over the answer's tokens,
as in IGPO (arXiv:2510.14967, Section 3.1). It comes from one further forward
pass over the prompts, with the shapes of the rows' own pass.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from envs import base
from gigpo_jax import batch, row_stats, trajectory

# A response that is scored; see `respond`.
Response = str | tuple[str, str] | None


@dataclasses.dataclass(frozen=True)
class AnswerScorer:
  """Scores the reference answers of tasks.

  Attributes:
    encode: returns the token ids of texts.
    start: text of a response up to the answer; see `envs.answer_start`.
    answer: returns the reference answer of a task.
  """

  encode: Callable[[Sequence[str]], list[np.ndarray]]
  start: str
  answer: Callable[[base.Task], str]

  def make_rows(
    self, rows: batch.Rows, episodes: Sequence[trajectory.Trajectory]
  ) -> tuple[batch.Rows, Bool[np.ndarray, 'R C']]:
    """Returns rows with the answer as completion, and a mask of its tokens.

    The rows have the order and shapes of `rows`. An answer that does not fit
    into a completion is cut.

    Args:
      rows: the rows of an iteration.
      episodes: the episodes to which `Rows.episodes` refers.
    """
    texts: list[Response] = [None] * len(rows.tokens)
    for r in np.flatnonzero(rows.real):
      task = episodes[rows.episodes[r]].task
      texts[r] = (self.start, self.answer(task))
    return respond(rows, texts, self.encode)


def respond(
  rows: batch.Rows,
  texts: Sequence[Response],
  encode: Callable[[Sequence[str]], list[np.ndarray]],
) -> tuple[batch.Rows, Bool[np.ndarray, 'R C']]:
  """Returns rows with other completions, and a mask of the tokens that count.

  The rows have the order and shapes of `rows`. A text that does not fit into a
  completion is cut.

  Args:
    rows: the rows of an iteration.
    texts: for each row a text; or (start, rest), of which only the rest counts;
      or None, which leaves the row alone, and none of its tokens counts.
    encode: returns the token ids of texts.
  """
  pairs = [('', t) if isinstance(t, str) else t for t in texts]
  unique = [*dict.fromkeys(text for pair in pairs if pair for text in pair)]
  ids = dict(zip(unique, encode(unique), strict=True)) if unique else {}
  mask = np.zeros(rows.completion_mask.shape, bool)
  tokens, lengths = rows.tokens.copy(), rows.lengths.copy()
  for r, pair in enumerate(pairs):
    if pair is None:
      continue
    start, rest = (ids[text] for text in pair)
    completion = np.concatenate([start, rest])[: mask.shape[1]]
    first = rows.prompt_lengths[r]
    lengths[r] = first + len(completion)
    tokens[r, first : lengths[r]] = completion
    mask[r, len(start) : len(completion)] = True
  return dataclasses.replace(rows, tokens=tokens, lengths=lengths), mask


def probabilities(
  log_probs: Float[np.ndarray, 'R C'], mask: Bool[np.ndarray, 'R C']
) -> Float[np.ndarray, ' R']:
  """Returns exp(mean log-prob) over each row's masked tokens; NaN for none."""
  means = row_stats.token_means(log_probs, mask)
  return np.where(mask.any(axis=1), np.exp(means), np.nan)
