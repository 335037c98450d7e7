"""From rows to microbatches: arrays of few shapes for the learner's programs.

A pack is a prompt and completions of it: [prompt, completion, completion, ..].
Without sharing it is a row, one completion; with it, rows with the same prompt
are one pack, so that the prompt is computed once. Completion tokens, which are
what losses are of, are listed apart, those of each shard of the packs without
gaps, so that no logits are computed for anything else. Knows no device.

Shapes. **B** packs, **L** tokens of a pack, **S** shards of the packs, **N**
completion tokens of a shard.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from gigpo_jax import batch

# Longest completions that a pack has room for.
_SHARED_COMPLETIONS = 4


@dataclasses.dataclass(frozen=True)
class Microbatch:
  """Some rows as one program takes them.

  Attributes:
    rows: numbers of the rows.
    tokens: of the packs, padded right.
    positions: of each token in its row; None: they are 0, 1, ..
    branches: 0 for a prompt, 1, 2, .. for its completions; None: all are 0.
    before: place of the token ahead of each completion token, in its shard's
      tokens, B / S packs one after another.
    targets: the completion tokens.
    row: number of the row of each.
    column: its number in the completion.
    mask: which of them there are; the first ones of each shard.
    local: number of the row of each among those of its shard.
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
  local: Int[np.ndarray, 'S N']

  def inputs(self) -> dict[str, np.ndarray]:
    """Returns what a model needs of it."""
    found = {
      'tokens': self.tokens,
      'before': self.before,
      'targets': self.targets,
      'mask': self.mask,
      'local': self.local,
    }
    if self.branches is not None:
      found |= {'positions': self.positions, 'branches': self.branches}
    return found

  def take(self, values: np.ndarray) -> np.ndarray:
    """Returns values of rows, [R] or [R, C], as those of tokens, [S, N].

    They are 0 where there is no token.
    """
    two = values.ndim > 1
    found = values[self.row, self.column] if two else values[self.row]
    return np.where(self.mask, found, 0).astype(values.dtype)

  def put(self, values: np.ndarray, into: np.ndarray) -> None:
    """Writes values of tokens, [S, N], into an array of rows, [R, C]."""
    into[self.row[self.mask], self.column[self.mask]] = values[self.mask]


class Packer:
  """Packs rows for programs of few shapes.

  Args:
    size: B.
    shards: S, a divisor of it.
    length_buckets: rising; what L may be.
    max_completion_tokens: of a row.
    share: whether rows with the same prompt make one pack.

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
    most = max_completion_tokens * (_SHARED_COMPLETIONS if share else 1)
    self._most = {length: min(most, length) for length in self._buckets}
    self._share = share
    self.forget()

  def microbatches(
    self, rows: batch.Rows, index: np.ndarray
  ) -> Iterator[Microbatch]:
    """Yields microbatches of rows, packs of similar length, the longest first.

    Args:
      rows: of an iteration.
      index: which of them.

    Raises:
      ValueError: if a row is longer than the last bucket.
    """
    longest = rows.lengths[index].max(initial=0)
    if longest > self._buckets[-1]:
      raise ValueError(
        f'learner.length_buckets={self._buckets}: a row has {longest} tokens; '
        'the last bucket must hold it'
      )
    packs = [self._pack(rows, members) for members in self.units(rows, index)]
    packs = [pack for parts in packs for pack in parts]
    lengths = np.array([_length(rows, pack) for pack in packs])
    order = np.argsort(-lengths, kind='stable')
    for start in range(0, len(packs), self._size):
      part = [packs[n] for n in order[start : start + self._size]]
      length = lengths[order[start]]
      yield self._build(
        rows, part, next(b for b in self._buckets if b >= length)
      )

  def units(self, rows: batch.Rows, index: np.ndarray) -> list[np.ndarray]:
    """Returns rows that belong together, in the order of their first ones."""
    if not self._share:
      return [index[n : n + 1] for n in range(len(index))]
    found: dict[bytes, list[int]] = {}
    for r in index:
      prompt = rows.tokens[r, : rows.prompt_lengths[r]].tobytes()
      found.setdefault(prompt, []).append(r)
    return [np.array(members) for members in found.values()]

  def forget(self) -> None:
    """Begins to count anew."""
    self._tokens = self._padded = self._saved = 0

  def take_metrics(self) -> dict[str, float]:
    """Returns what was packed since the last call.

    Tokens, the share of padding beside them, and tokens of prompts that were
    there already.
    """
    metrics = {
      'packs/tokens': float(self._tokens),
      'packs/padding': 1 - self._tokens / max(self._padded, 1),
      'packs/shared_tokens': float(self._saved),
    }
    self.forget()
    return metrics

  def empty(self, length: int) -> Microbatch:
    """Returns a microbatch of a bucket with nothing in it."""
    return self._build(None, [], length)

  def _pack(self, rows: batch.Rows, members: np.ndarray) -> list[list[int]]:
    """Cuts rows with the same prompt into packs that there is room for."""
    prompt = int(rows.prompt_lengths[members[0]])
    longest = self._buckets[-1]
    room = min(longest - prompt, self._most[longest])
    packs, used = [[]], 0
    for r in members:
      completion = int(rows.lengths[r]) - prompt
      total = used + completion
      if packs[-1] and total > room:
        packs.append([])
        total = completion
      packs[-1].append(int(r))
      used = total
    return packs

  def _build(self, rows, packs: list[list[int]], length: int) -> Microbatch:
    each = self._size // self._shards
    tokens = np.zeros((self._size, length), np.int32)
    positions, branches = tokens.copy(), tokens.copy()
    room = each * self._most[length]
    lists = np.zeros((4, self._shards, room), np.int32)
    local = np.zeros((self._shards, room), np.int32)
    held = np.zeros(self._shards, np.int32)
    mask = np.zeros((self._shards, room), bool)
    filled = np.zeros(self._shards, np.int64)
    for b, pack in enumerate(packs):
      shard, first = b // each, (b % each) * length
      prompt = int(rows.prompt_lengths[pack[0]])
      tokens[b, :prompt] = rows.tokens[pack[0], :prompt]
      positions[b, :prompt] = np.arange(prompt)
      at = prompt
      for branch, r in enumerate(pack, 1):
        count = int(rows.lengths[r]) - prompt
        ids = rows.tokens[r, prompt : prompt + count]
        columns = np.arange(count)
        tokens[b, at : at + count] = ids
        positions[b, at : at + count] = prompt + columns
        branches[b, at : at + count] = branch
        ahead = at + columns - 1
        ahead[:1] = prompt - 1
        n = filled[shard]
        entries = np.stack([first + ahead, ids, np.full(count, r), columns])
        lists[:, shard, n : n + count] = entries
        mask[shard, n : n + count] = True
        local[shard, n : n + count] = held[shard]
        held[shard] += 1
        filled[shard] += count
        at += count
      self._tokens += at
      self._saved += prompt * (len(pack) - 1)
    self._padded += tokens.size
    return Microbatch(
      np.array([r for pack in packs for r in pack], np.int64),
      tokens,
      positions if self._share else None,
      branches if self._share else None,
      *lists,
      mask,
      local,
    )


def _length(rows: batch.Rows, pack: list[int]) -> int:
  prompt = rows.prompt_lengths[pack[0]]
  return int(prompt + (rows.lengths[pack] - prompt).sum())
