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
  yield from losses.refuse_rows(config, reason, accepted='must be token')


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

  def compute_advantages(
    self, rows: batch.Rows, values=None
  ) -> algorithms.AlgorithmOutput:
    """Returns one advantage per token, 0 for padding."""
    del values
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
  # Number of each prefix: of a prompt by its group and tokens, of a longer
  # prefix by its number without the last token, and that token.
  nodes: dict[tuple[int, bytes | int], int] = {}
  rows_by_token = collections.defaultdict(lambda: collections.defaultdict(list))
  for r in np.flatnonzero(rows.real):
    ids, start = rows.tokens[r, : rows.lengths[r]], rows.prompt_lengths[r]
    prompt = int(rows.groups[r]), ids[:start].tobytes()
    node = nodes.setdefault(prompt, len(nodes))
    for c, end in enumerate(range(start, rows.lengths[r])):
      token = int(ids[end])
      rows_by_token[node][token].append((r, c))
      node = nodes.setdefault((node, token), len(nodes))
  for by_token in rows_by_token.values():
    if len(by_token) == 1:
      continue
    sums = {
      v: sum(float(returns[r]) for r, _ in at) for v, at in by_token.items()
    }
    total, count = sum(sums.values()), sum(map(len, by_token.values()))
    for token, at in by_token.items():
      others = (total - sums[token]) / (count - len(at))
      for r, c in at:
        result[r, c] = sums[token] / len(at) - others
  return result
