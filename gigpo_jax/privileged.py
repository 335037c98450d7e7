"""Self-distillation with privileged context: a solution in the prompt.

The policy reads the prompt of a turn with a solution of the task, and scores
the response that it sampled without the solution. The advantage of a token is
log p(token | prompt with the solution) - log p(token | prompt): one sample of
the negative gradient of the reverse KL from the plain to the privileged policy,
at the policy before the update (OPSD, arXiv:2601.18734, with sampled tokens).

The solution is an episode of the environment's expert. It comes before the text
of the prompt, and adds nothing to the shapes of the rows.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from envs import base
from gigpo_jax import batch, trajectory

_INTRODUCTION = 'A solution of the task, step by step:\n'


@dataclasses.dataclass(frozen=True)
class PrivilegedContext:
  """Adds the solutions of tasks to prompts.

  Attributes:
    encode: returns the token ids of texts.
    head: number of tokens of the chat template before the text of a prompt.
    solve: returns the solution of a task, or '' if it has none.
  """

  encode: Callable[[Sequence[str]], list[np.ndarray]]
  head: int
  solve: Callable[[base.Task], str]

  def solutions(
    self, tasks: Iterable[base.Task]
  ) -> dict[base.Task, np.ndarray]:
    """Returns the added token ids by task, without tasks without a solution."""
    texts = {
      task: f'{_INTRODUCTION}{solution}\n\n'
      for task in dict.fromkeys(tasks)
      if (solution := self.solve(task))
    }
    return dict(zip(texts, self.encode([*texts.values()]), strict=True))

  def make_rows(
    self, rows: batch.Rows, episodes: Sequence[trajectory.Trajectory]
  ) -> batch.Rows:
    """Returns rows of the same shape with solutions in their prompts.

    A row without a solution, or without room for it, is padding.

    Args:
      rows: some rows of an iteration.
      episodes: the episodes to which `Rows.episodes` refers.
    """
    real = np.flatnonzero(rows.real)
    tasks = [episodes[index].task for index in rows.episodes[real]]
    ids = self.solutions(tasks)
    limit = rows.tokens.shape[1] - rows.completion_mask.shape[1]
    tokens, groups = np.zeros_like(rows.tokens), np.full_like(rows.groups, -1)
    prompt_lengths = np.zeros_like(rows.prompt_lengths)
    lengths = np.zeros_like(rows.lengths)
    for r, task in zip(real, tasks, strict=True):
      if task not in ids:
        continue
      before, after = np.split(rows.tokens[r, : rows.lengths[r]], [self.head])
      length = rows.prompt_lengths[r] + len(ids[task])
      if length > limit:
        continue
      prompt_lengths[r], groups[r] = length, rows.groups[r]
      lengths[r] = rows.lengths[r] + len(ids[task])
      tokens[r, : lengths[r]] = np.concatenate([before, ids[task], after])
    return dataclasses.replace(
      rows,
      tokens=tokens,
      prompt_lengths=prompt_lengths,
      lengths=lengths,
      groups=groups,
    )


def advantages(
  privileged_log_probs: Float[np.ndarray, 'R C'],
  log_probs: Float[np.ndarray, 'R C'],
  mask: Bool[np.ndarray, 'R C'],
) -> Float[np.ndarray, 'R C']:
  """Returns the difference of the log-probs of each token, in nats."""
  return np.where(mask, privileged_log_probs - log_probs, 0).astype(np.float32)
