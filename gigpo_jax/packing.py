"""Pack rows into microbatches: arrays of few shapes for compiled programs.

A pack is a prompt and some of its completions: [prompt, completion, ..].
Without sharing, a pack is one row. With sharing, rows with the same prompt form
one pack, so the prompt is computed once. The completion tokens, on which losses
are computed, are also listed separately, without gaps within each shard of the
packs. Logits are computed for these tokens only. This module uses numpy only.

Shapes: **R** rows, **B** packs, **L** tokens of a pack, **S** shards of the
packs, **N** completion tokens of a shard.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from gigpo_jax import batch

# Completions of maximum length that fit into a shared pack.
_SHARED_COMPLETIONS = 4


@dataclasses.dataclass(frozen=True)
class Microbatch:
  """Some rows, as the input of one call of a compiled program.

  Attributes:
    rows: indices of the rows in the batch.
    tokens: tokens of the packs, padded right.
    positions: position of each token in its row; None: 0, 1, ..
    branches: 0 for a prompt, 1, 2, .. for its completions; None: all are 0.
    before: index of the token that precedes each completion token, into the
      B / S * L tokens of its shard.
    targets: the completion tokens.
    row: index of each completion token's row in the batch.
    column: index of each completion token in its completion.
    mask: true for completion tokens, false for padding at the end of a shard.
    local_rows: index of each completion token's row among its shard's rows.
  """

  rows: Int[np.ndarray, ' R']
  tokens: Int[np.ndarray, 'B L']
  positions: Int[np.ndarray, 'B L'] | None
  branches: Int[np.ndarray, 'B L'] | None
  before: Int[np.ndarray, 'S N']
  targets: Int[np.ndarray, 'S N']
  row: Int[np.ndarray, 'S N']
  column: Int[np.ndarray, 'S N']
  mask: Bool[np.ndarray, 'S N']
  local_rows: Int[np.ndarray, 'S N']

  def inputs(self) -> dict[str, np.ndarray]:
    """Returns the arrays that a compiled program takes."""
    arrays = {
      'tokens': self.tokens,
      'before': self.before,
      'targets': self.targets,
      'mask': self.mask,
      'row_ids': self.local_rows,
    }
    if self.branches is not None:
      arrays |= {'positions': self.positions, 'branches': self.branches}
    return arrays

  def gather(self, values: np.ndarray) -> np.ndarray:
    """Gathers values of rows, [R] or [R, C], for each token, [S, N].

    Padding gets 0.
    """
    per_token = values.ndim > 1
    taken = values[self.row, self.column] if per_token else values[self.row]
    return np.where(self.mask, taken, 0).astype(values.dtype)

  def scatter(self, values: np.ndarray, into: np.ndarray) -> None:
    """Writes values of tokens, [S, N], into an array of rows, [R, C].

    Args:
      values: values of the tokens; those of padding are ignored.
      into: array to modify.
    """
    into[self.row[self.mask], self.column[self.mask]] = values[self.mask]


class Packer:
  """Packs rows into microbatches of few shapes.

  Args:
    size: B, packs of a microbatch.
    shards: S, a divisor of `size`.
    length_buckets: accepted values of L, ascending.
    max_completion_tokens: longest completion of a row.
    share: whether rows with the same prompt form one pack.
  """

  def __init__(
    self,
    size: int,
    shards: int,
    length_buckets: Sequence[int],
    max_completion_tokens: int,
    *,
    share: bool = False,
  ):
    self._size, self._shards = size, shards
    self._buckets = tuple(length_buckets)
    limit = max_completion_tokens * (_SHARED_COMPLETIONS if share else 1)
    self._max_targets = {length: min(limit, length) for length in self._buckets}
    self._share = share
    self.reset_metrics()

  def microbatches(
    self, rows: batch.Rows, index: np.ndarray
  ) -> Iterator[Microbatch]:
    """Yields microbatches of packs of similar length, the longest first.

    Args:
      rows: rows of an iteration.
      index: indices of the rows to pack.

    Raises:
      ValueError: if a row is longer than the last bucket.
    """
    longest = rows.lengths[index].max(initial=0)
    if longest > self._buckets[-1]:
      raise ValueError(
        f'learner.length_buckets={self._buckets}: a row has {longest} tokens; '
        f'the last bucket must be at least {longest}'
      )
    packs = [
      pack
      for members in self.prompt_groups(rows, index)
      for pack in self._pack(rows, members)
    ]
    lengths = np.array([_length(rows, pack) for pack in packs])
    order = np.argsort(-lengths, kind='stable')
    for start in range(0, len(packs), self._size):
      chosen = [packs[n] for n in order[start : start + self._size]]
      length = lengths[order[start]]
      yield self._build(
        rows, chosen, next(b for b in self._buckets if b >= length)
      )

  def prompt_groups(
    self, rows: batch.Rows, index: np.ndarray
  ) -> list[np.ndarray]:
    """Groups rows that may share a pack, in order of their first rows."""
    if not self._share:
      return [index[n : n + 1] for n in range(len(index))]
    by_prompt: dict[bytes, list[int]] = {}
    for r in index:
      prompt = rows.tokens[r, : rows.prompt_lengths[r]].tobytes()
      by_prompt.setdefault(prompt, []).append(r)
    return [np.array(members) for members in by_prompt.values()]

  def reset_metrics(self) -> None:
    """Resets the metrics."""
    self._tokens = self._padded = self._saved = 0

  def take_metrics(self) -> dict[str, float]:
    """Returns metrics of the packs since the last call, and resets them.

    The metrics are the number of tokens, the fraction of padding, and the
    number of prompt tokens saved by sharing.
    """
    metrics = {
      'packs/tokens': float(self._tokens),
      'packs/padding': 1 - self._tokens / max(self._padded, 1),
      'packs/shared_tokens': float(self._saved),
    }
    self.reset_metrics()
    return metrics

  def empty(self, length: int) -> Microbatch:
    """Returns a microbatch of padding with packs of `length` tokens."""
    return self._build(None, [], length)

  def _pack(self, rows: batch.Rows, members: np.ndarray) -> list[list[int]]:
    """Splits rows with the same prompt into packs that fit the last bucket."""
    prompt = int(rows.prompt_lengths[members[0]])
    longest = self._buckets[-1]
    capacity = min(longest - prompt, self._max_targets[longest])
    packs, used = [[]], 0
    for r in members:
      completion = int(rows.lengths[r]) - prompt
      total = used + completion
      if packs[-1] and total > capacity:
        packs.append([])
        total = completion
      packs[-1].append(int(r))
      used = total
    return packs

  def _build(self, rows, packs: list[list[int]], length: int) -> Microbatch:
    """Returns a microbatch of the packs, padded to `length` tokens each."""
    packs_per_shard = self._size // self._shards
    tokens = np.zeros((self._size, length), np.int32)
    positions, branches = tokens.copy(), tokens.copy()
    capacity = packs_per_shard * self._max_targets[length]
    # The fields before, targets, row and column.
    lists = np.zeros((4, self._shards, capacity), np.int32)
    local_rows = np.zeros((self._shards, capacity), np.int32)
    row_counts = np.zeros(self._shards, np.int32)
    mask = np.zeros((self._shards, capacity), bool)
    token_counts = np.zeros(self._shards, np.int64)
    for b, pack in enumerate(packs):
      shard, offset = b // packs_per_shard, (b % packs_per_shard) * length
      prompt = int(rows.prompt_lengths[pack[0]])
      tokens[b, :prompt] = rows.tokens[pack[0], :prompt]
      positions[b, :prompt] = np.arange(prompt)
      end = prompt
      for branch, r in enumerate(pack, 1):
        count = int(rows.lengths[r]) - prompt
        ids = rows.tokens[r, prompt : prompt + count]
        columns = np.arange(count)
        tokens[b, end : end + count] = ids
        positions[b, end : end + count] = prompt + columns
        branches[b, end : end + count] = branch
        before = end + columns - 1
        # The first token follows the prompt, not the previous completion.
        before[:1] = prompt - 1
        n = token_counts[shard]
        entries = np.stack([offset + before, ids, np.full(count, r), columns])
        lists[:, shard, n : n + count] = entries
        mask[shard, n : n + count] = True
        local_rows[shard, n : n + count] = row_counts[shard]
        row_counts[shard] += 1
        token_counts[shard] += count
        end += count
      self._tokens += end
      self._saved += prompt * (len(pack) - 1)
    self._padded += tokens.size
    return Microbatch(
      np.array([r for pack in packs for r in pack], np.int64),
      tokens,
      positions if self._share else None,
      branches if self._share else None,
      *lists,
      mask,
      local_rows,
    )


def _length(rows: batch.Rows, pack: list[int]) -> int:
  prompt = rows.prompt_lengths[pack[0]]
  return int(prompt + (rows.lengths[pack] - prompt).sum())
