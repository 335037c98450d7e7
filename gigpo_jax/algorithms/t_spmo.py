"""T-SPMO (arXiv:2504.20834): advantages of tokens after a shared prefix.

Among the responses of a group to the same prompt, those that share a prefix p
and continue with different tokens are compared:

    A(p, v) = mean return after p and the token v
              - mean return after p and any other token,

for the first token v after p; other tokens have the advantage 0 and keep their
part in the normalizer of the loss. A prefix with one continuation has nothing
to compare.

# Differs from the paper: a response is one turn, and its return the discounted
sum of the rewards from there on. Turns with equal prompts are compared, as
anchor groups are; the paper has one turn.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import advantages, algorithms, batch, losses, options


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the loss has one ratio or one error per row."""
  reason = 'each token of a row has its own advantage'
  yield from losses.refuse_rows(config.loss, reason, accepted='must be token')


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A(p, v) = mean G after (p, v) - mean G after p and other tokens.

  Attributes:
    discount: gamma per step, of the return G.
    invalid_penalty: subtracted from the reward of an invalid response.
  """

  needs_values: ClassVar[bool] = False
  needs_group: ClassVar[bool] = True

  discount: float = options.number(0.95, low=0, high=1)
  invalid_penalty: float = options.number(0.1, low=0, high=1_000_000)

  def __post_init__(self):
    options.check(self)

  def compute_advantages(self, rows: batch.Rows) -> algorithms.AlgorithmOutput:
    """Returns one advantage per token, 0 for padding."""
    components = advantages.gigpo_components(
      *rows.steps_taken(),
      discount=self.discount,
      invalid_penalty=self.invalid_penalty,
    )
    result = token_advantages(rows, np.asarray(components.returns))
    mask = rows.completion_mask
    return algorithms.AlgorithmOutput(
      result, {'advantage/abs_mean': float(np.abs(result[mask]).mean())}
    )


def token_advantages(rows: batch.Rows, returns: np.ndarray) -> np.ndarray:
  """Returns A(p, v) of each completion token, [R, C] float32.

  Args:
    rows: rows with their tokens and groups.
    returns: return of each row, [R].
  """
  result = np.zeros(rows.completion_mask.shape, np.float32)
  lengths, by_prompt = rows.lengths - rows.prompt_lengths, {}
  for r in np.flatnonzero(rows.real):
    prompt = rows.tokens[r, : rows.prompt_lengths[r]].tobytes()
    by_prompt.setdefault((rows.groups[r], prompt), []).append(r)
  # Rows that share a prefix, and the number of its tokens after the prompt.
  shared = [(members, 0) for members in by_prompt.values()]
  while shared:
    members, c = shared.pop()
    by_token = collections.defaultdict(list)
    for r in members:
      if c < lengths[r]:
        by_token[rows.tokens[r, rows.prompt_lengths[r] + c]].append(r)
    sums = [sum(float(returns[r]) for r in at) for at in by_token.values()]
    total, count = sum(sums), sum(map(len, by_token.values()))
    for own, at in zip(sums, by_token.values(), strict=True):
      if len(at) < count:
        result[at, c] = own / len(at) - (total - own) / (count - len(at))
      if len(at) > 1:
        shared.append((at, c + 1))
  return result
