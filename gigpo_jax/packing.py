"""Pack rows into microbatches: arrays of few shapes for compiled programs.

A sequence of a microbatch holds several packs, one after another. A pack is a
prompt and some of its completions: [prompt, completion, ..]. Without sharing, a
pack is one row. With sharing, rows with the same prompt form one pack, so the
prompt is computed once. Tokens of different packs, and of different completions
of a pack, do not attend to each other; see `attention.Segments`. The completion
tokens, on which losses are computed, are also listed separately, without gaps
within each shard of the sequences. Logits are computed for these tokens only.
This module uses numpy only.

Shapes: **R** rows, **B** sequences, **L** tokens of a sequence, **S** shards of
the sequences, **N** completion tokens of a shard.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from gigpo_jax import batch

# Completions of maximum length that fit into a sequence, without and with
# sharing.
_COMPLETIONS, _SHARED_COMPLETIONS = 2, 4
# Ratio between the numbers of sequences of two shapes of a length, and the
# smallest number of sequences of a shard for which there is a smaller shape.
_SHAPE_RATIO, _MIN_DIVIDED = 4, 16


@dataclasses.dataclass(frozen=True)
class Microbatch:
  """Some rows, as the input of one call of a compiled program.

  Attributes:
    rows: indices of the rows in the batch.
    tokens: tokens of the sequences, padded right.
    positions: position of each token in its row.
    ends: index in the sequence at which the pack ends, for tokens of a prompt,
      or at which the completion ends: the tokens before it, after this token,
      attend to this token. Padding attends to itself only.
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
  positions: Int[np.ndarray, 'B L']
  ends: Int[np.ndarray, 'B L']
  before: Int[np.ndarray, 'S N']
  targets: Int[np.ndarray, 'S N']
  row: Int[np.ndarray, 'S N']
  column: Int[np.ndarray, 'S N']
  mask: Bool[np.ndarray, 'S N']
  local_rows: Int[np.ndarray, 'S N']

  def inputs(self) -> dict[str, np.ndarray]:
    """Returns the arrays that a compiled program takes."""
    return {
      'tokens': self.tokens,
      'positions': self.positions,
      'ends': self.ends,
      'before': self.before,
      'targets': self.targets,
      'mask': self.mask,
      'row_ids': self.local_rows,
    }

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


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of a microbatch: B sequences of L tokens."""

  sequences: int
  length: int


def shapes(
  max_tokens: int, shards: int, length_buckets: Sequence[int]
) -> tuple[Shape, ...]:
  """Returns the shapes of microbatches.

  For each length, the largest shape has as many sequences as fit into
  `max_tokens`, at least one per shard. If it has many, smaller shapes for the
  last rows of a mini-batch save padding.

  Args:
    max_tokens: tokens of a microbatch, over all shards.
    shards: S.
    length_buckets: accepted values of L, ascending.
  """
  result = []
  for length in length_buckets:
    per_shard = max(max_tokens // (length * shards), 1)
    result.append(Shape(per_shard * shards, length))
    while per_shard >= _MIN_DIVIDED:
      per_shard //= _SHAPE_RATIO
      result.append(Shape(per_shard * shards, length))
  return tuple(result)


class Packer:
  """Packs rows into microbatches of few shapes.

  Args:
    max_tokens: tokens of a microbatch; see `shapes`.
    shards: S.
    length_buckets: accepted values of L, ascending.
    max_completion_tokens: longest completion of a row.
    share: whether rows with the same prompt form one pack.

  Attributes:
    shapes: the shapes of microbatches; see `shapes`.
    largest_shapes: the largest of each length.
  """

  def __init__(
    self,
    max_tokens: int,
    shards: int,
    length_buckets: Sequence[int],
    max_completion_tokens: int,
    *,
    share: bool = False,
  ):
    self.shapes = shapes(max_tokens, shards, length_buckets)
    self._shards = shards
    self._buckets = tuple(length_buckets)
    # Numbers of sequences by length, descending.
    self._sizes = {
      length: [s.sequences for s in self.shapes if s.length == length]
      for length in self._buckets
    }
    limit = max_completion_tokens * (
      _SHARED_COMPLETIONS if share else _COMPLETIONS
    )
    self._max_targets = {length: min(limit, length) for length in self._buckets}
    self.largest_shapes = tuple(
      Shape(sizes[0], length) for length, sizes in self._sizes.items()
    )
    self._share = share
    self.reset_metrics()

  def microbatches(
    self, rows: batch.Rows, index: np.ndarray, *, largest: bool = False
  ) -> Iterator[Microbatch]:
    """Yields microbatches of the rows, the longest rows first.

    Args:
      rows: rows of an iteration.
      index: indices of the rows to pack.
      largest: whether to use the largest shape of each length only.

    Raises:
      ValueError: if a row is longer than the last bucket.
    """
    longest = rows.lengths[index].max(initial=0)
    if longest > self._buckets[-1]:
      raise ValueError(
        f'learner.length_buckets={self._buckets}: a row has {longest} tokens; '
        f'the last bucket must be at least {longest}'
      )
    packs = _Packs(
      [
        _measure(rows, pack)
        for members in self.prompt_groups(rows, index)
        for pack in self._pack(rows, members)
      ]
    )
    while packs:
      length = next(b for b in self._buckets if b >= packs.longest)
      sizes = self._sizes[length][: 1 if largest else None]
      sequences = []
      while packs and len(sequences) < sizes[0]:
        sequences.append(packs.take(length, self._max_targets[length]))
      while sequences:
        count = _next_size(sizes, len(sequences))
        chosen, sequences = sequences[:count], sequences[count:]
        yield self._build(rows, chosen, Shape(count, length))

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

  def empty(self, shape: Shape) -> Microbatch:
    """Returns a microbatch of padding."""
    return self._arrays(shape).microbatch()

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

  def _arrays(self, shape: Shape) -> '_Arrays':
    per_shard = shape.sequences // self._shards
    return _Arrays(
      shape, self._shards, per_shard * self._max_targets[shape.length]
    )

  def _build(
    self, rows: batch.Rows, sequences: list[list['_Pack']], shape: Shape
  ) -> Microbatch:
    """Returns a microbatch of sequences, which may be fewer than the shape's.

    The sequences are dealt to the shards in turn, because the first ones hold
    the longest rows.
    """
    arrays = self._arrays(shape)
    for n, packs in enumerate(sequences):
      row, shard = divmod(n, self._shards)
      start = 0
      for pack in packs:
        arrays.add(rows, pack, shard, row, start)
        start += pack.length
        prompt = rows.prompt_lengths[pack.rows[0]]
        self._saved += int(prompt) * (len(pack.rows) - 1)
      self._tokens += start
    self._padded += arrays.tokens.size
    return arrays.microbatch()


@dataclasses.dataclass(frozen=True)
class _Pack:
  """Rows that share a prompt, with the pack's tokens and completion tokens."""

  rows: list[int]
  length: int
  targets: int


def _measure(rows: batch.Rows, pack: list[int]) -> _Pack:
  prompt = int(rows.prompt_lengths[pack[0]])
  targets = int((rows.lengths[pack] - prompt).sum())
  return _Pack(pack, prompt + targets, targets)


class _Packs:
  """Packs that wait for a sequence, sorted by length."""

  def __init__(self, packs: list[_Pack]):
    # The stable order makes the microbatches a function of the rows.
    self._packs = sorted(packs, key=lambda pack: pack.length)
    self._lengths = [pack.length for pack in self._packs]

  def __bool__(self) -> bool:
    return bool(self._packs)

  @property
  def longest(self) -> int:
    return self._lengths[-1]

  def take(self, length: int, targets: int) -> list[_Pack]:
    """Removes and returns packs for a sequence: always the longest that fits.

    Args:
      length: tokens of the sequence.
      targets: completion tokens of the sequence.
    """
    taken = []
    n = len(self._packs)
    while (n := bisect.bisect_right(self._lengths, length, hi=n) - 1) >= 0:
      if self._packs[n].targets <= targets:
        taken.append(self._packs.pop(n))
        length -= self._lengths.pop(n)
        targets -= taken[-1].targets
    return taken


def _next_size(sizes: Sequence[int], count: int) -> int:
  """Returns the number of sequences of the next microbatch.

  Args:
    sizes: the accepted numbers, descending.
    count: sequences that wait.

  Returns:
    The largest number whose shape would not be cheaper as smaller ones.
  """
  smallest = sizes[-1]
  needed = -(-count // smallest) * smallest
  return next((size for size in sizes if size <= needed), smallest)


class _Arrays:
  """The arrays of a microbatch, filled one pack at a time."""

  def __init__(self, shape: Shape, shards: int, capacity: int):
    self._per_shard = shape.sequences // shards
    self.tokens = np.zeros((shape.sequences, shape.length), np.int32)
    self._positions = self.tokens.copy()
    self._ends = self.tokens + np.arange(1, shape.length + 1, dtype=np.int32)
    # The fields before, targets, row, column and local_rows.
    self._lists = np.zeros((5, shards, capacity), np.int32)
    self._mask = np.zeros((shards, capacity), bool)
    self._num_rows = np.zeros(shards, np.int32)
    self._num_targets = np.zeros(shards, np.int64)
    self._rows: list[int] = []

  def add(
    self, rows: batch.Rows, pack: _Pack, shard: int, row: int, start: int
  ) -> None:
    """Writes a pack into sequence `row` of a shard, from index `start` on."""
    b, offset = shard * self._per_shard + row, row * self.tokens.shape[1]
    first = pack.rows[0]
    prompt = int(rows.prompt_lengths[first])
    end = start + prompt
    self.tokens[b, start:end] = rows.tokens[first, :prompt]
    self._positions[b, start:end] = np.arange(prompt)
    self._ends[b, start:end] = start + pack.length
    for r in pack.rows:
      count = int(rows.lengths[r]) - prompt
      ids = rows.tokens[r, prompt : prompt + count]
      columns = np.arange(count)
      here = slice(end, end + count)
      self.tokens[b, here] = ids
      self._positions[b, here] = prompt + columns
      self._ends[b, here] = end + count
      before = offset + end + columns - 1
      # The first token follows the prompt, not the previous completion.
      before[:1] = offset + start + prompt - 1
      n = self._num_targets[shard]
      entries = (before, ids, r, columns, self._num_rows[shard])
      for array, values in zip(self._lists, entries, strict=True):
        array[shard, n : n + count] = values
      self._mask[shard, n : n + count] = True
      self._num_targets[shard] += count
      self._num_rows[shard] += 1
      self._rows.append(r)
      end += count

  def microbatch(self) -> Microbatch:
    """Returns the microbatch."""
    *lists, local_rows = self._lists
    return Microbatch(
      np.array(self._rows, np.int64),
      self.tokens,
      self._positions,
      self._ends,
      *lists,
      self._mask,
      local_rows,
    )
