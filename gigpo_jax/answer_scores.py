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
    real = np.flatnonzero(rows.real)
    tasks = [episodes[index].task for index in rows.episodes[real]]
    texts = {task: self.answer(task) for task in dict.fromkeys(tasks)}
    (start,), answers = (
      self.encode([self.start]),
      self.encode([*texts.values()]),
    )
    completions = dict(zip(texts, answers, strict=True))
    limit = rows.completion_mask.shape[1]
    mask = np.zeros(rows.completion_mask.shape, bool)
    tokens, lengths = rows.tokens.copy(), rows.lengths.copy()
    for r, task in zip(real, tasks, strict=True):
      completion = np.concatenate([start, completions[task]])[:limit]
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
