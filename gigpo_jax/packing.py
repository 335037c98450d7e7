"""Pack rows into microbatches: arrays of few shapes for compiled programs.

A sequence of a microbatch holds several packs, one after another. A pack is a
tree of rows. Without sharing, it is one row. With sharing, rows whose texts
begin with the same tokens form a tree, in which these tokens are computed once:
a prompt with several completions, or a conversation, in which the prompt of a
turn begins with the prompt and the completion of the turn before. The tokens of
a pack are in depth-first order. A token attends to those before it in its row;
see `attention.Segments`. The completion tokens, on which losses are computed,
are also listed separately, without gaps within each shard of the sequences.
Logits are computed for these tokens only. A token that several rows share may
be listed for each of them. This module uses numpy only.

Shapes: **R** rows, **B** sequences, **L** tokens of a sequence, **S** shards of
the sequences, **N** completion tokens of a shard.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from gigpo_jax import batch, row_packs

# Completions of maximum length that fit into a sequence, without and with
# sharing.
_COMPLETIONS, _SHARED_COMPLETIONS = 2, 4
# Ratio between the numbers of sequences of two shapes of a length, and the
# smallest number of sequences for which there is a smaller shape.
_SHAPE_RATIO, _MIN_DIVIDED = 4, 16
# A shape is followed by one of half the length if it has at least the tokens of
# 8 sequences of the first bucket, and half the length is at least 512.
_MIN_HALVED, _MIN_LENGTH = 8, 512
# With several shards, a microbatch exchanges parameters and gradients. In
# simulations of 7B on v5e, without overlap this takes half as long as the
# computation of the largest microbatch, with perfect overlap no time.
_EXCHANGE_SHARE = 4


@dataclasses.dataclass(frozen=True)
class Microbatch:
  """Some rows, as the input of one call of a compiled program.

  Attributes:
    rows: indices of the rows in the batch.
    tokens: tokens of the sequences, padded right.
    positions: position of each token in its row.
    ends: index in the sequence at which the last row that contains the token
      ends: the tokens before it, after this token, attend to this token.
      Padding attends to itself only.
    before: index of the token that precedes each completion token, into the
      B / S * L tokens of its shard.
    targets: the completion tokens.
    row: index of each completion token's row in the batch.
    column: index of each completion token in its completion.
    mask: true for completion tokens, false for padding at the end of a shard.
    local_rows: index of each completion token's row among its shard's rows
      that have completion tokens.
    agents: agent of each token; None if one adapter, or none, is for all.
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
  agents: Int[np.ndarray, 'B L'] | None = None

  def inputs(self) -> dict[str, np.ndarray]:
    """Returns the arrays that a compiled program takes."""
    arrays = {} if self.agents is None else {'agents': self.agents}
    return arrays | {
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
  last rows of a mini-batch save padding: with fewer sequences as far as each
  shard has one. If the smallest of the first bucket still has many, there are
  shapes with as many shorter sequences.

  Args:
    max_tokens: tokens of a microbatch, over all shards.
    shards: S.
    length_buckets: values of L, ascending; that of the short shapes is less.
  """
  result = []
  for length in length_buckets:
    per_shard = max(max_tokens // (length * shards), 1)
    result.append(Shape(per_shard * shards, length))
    while per_shard > 1 and per_shard * shards >= _MIN_DIVIDED:
      per_shard = max(per_shard // _SHAPE_RATIO, 1)
      result.append(Shape(per_shard * shards, length))
  shortest = [s for s in result if s.length == length_buckets[0]][-1]
  return (*result, *_short_shapes(shortest))


def _short_shapes(shape: Shape) -> Iterator[Shape]:
  """Yields shapes of half the length, a quarter, etc.; see `shapes`.

  Args:
    shape: the smallest shape of the first bucket.
  """
  length, room = shape.length, shape.sequences
  while room >= _MIN_HALVED and length >= 2 * _MIN_LENGTH:
    # Kernels pad to multiples of 128.
    length = -(-length // 256) * 128
    room //= 2
    yield Shape(shape.sequences, length)


class Packer:
  """Packs rows into microbatches of few shapes.

  Args:
    max_tokens: tokens of a microbatch; see `shapes`.
    shards: S.
    length_buckets: values of L, ascending; see `shapes`.
    max_completion_tokens: longest completion of a row.
    share: whether rows that begin with the same prompt form one pack.
    branches: whether a pack may have branches; otherwise only a row and those
      that continue it share tokens.
    turns: largest number of completions in a row of a conversation, which may
      contain those of earlier turns; 1 if every turn has its own prompt.
    by_agent: whether each agent has an adapter of its own; then rows of
      different agents share nothing, and microbatches have `agents`.

  Attributes:
    shapes: the shapes of microbatches; see `shapes`.
    largest_shapes: the largest of each bucket.
  """

  def __init__(
    self,
    max_tokens: int,
    shards: int,
    length_buckets: Sequence[int],
    max_completion_tokens: int,
    *,
    share: bool = False,
    branches: bool = True,
    turns: int = 1,
    by_agent: bool = False,
  ):
    self.shapes = shapes(max_tokens, shards, length_buckets)
    self._shards = shards
    self._buckets = tuple(length_buckets)
    # Numbers of sequences by length, descending.
    self._sizes = {
      length: [s.sequences for s in self.shapes if s.length == length]
      for length in self._buckets
    }
    self._short_shapes = [s for s in self.shapes if s.length < self._buckets[0]]
    completions = max(turns, _SHARED_COMPLETIONS) if share else _COMPLETIONS
    limit = max_completion_tokens * completions
    self._max_targets = {s.length: min(limit, s.length) for s in self.shapes}
    self.largest_shapes = tuple(
      Shape(sizes[0], length) for length, sizes in self._sizes.items()
    )
    self._share, self._branches, self._by_agent = share, branches, by_agent
    self._tokens = self._padded = self._saved = 0

  def microbatches(
    self, rows: batch.Rows, index: np.ndarray, *, largest: bool = False
  ) -> Iterator[Microbatch]:
    """Yields microbatches of the rows, with as little padding as possible.

    The longest rows come first, and microbatches of short shapes last.

    Args:
      rows: rows of an iteration.
      index: indices of the rows to pack.
      largest: whether to use the largest shape of each bucket only.

    Raises:
      ValueError: if a row is longer than the last bucket, or has more
        completion tokens than a sequence has room for.
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
    short = () if largest else self._short_shapes
    plans = [
      self._plan(row_packs.Packs(packs, fills_best=best), last, largest=largest)
      for count in range(len(short) + 1)
      for last in itertools.combinations(short, count)
      for best in (False, True)
    ]
    # The first of those that cost least.
    for shape, sequences in min(plans, key=self._cost):
      yield self._build(rows, sequences, shape)

  def _plan(
    self, packs: row_packs.Packs, last: Sequence[Shape], *, largest: bool
  ) -> list[tuple[Shape, list[list[row_packs.Pack]]]]:
    """Returns the shape and the sequences of each microbatch.

    Args:
      packs: the packs, which are removed.
      last: short shapes of the last microbatches, which are filled first. The
        others have lengths of the buckets.
      largest: see `microbatches`.
    """
    ends = [(shape, self._take(packs, shape)) for shape in last]
    plan = []
    while packs:
      length = next(b for b in self._buckets if b >= packs.longest)
      sizes = self._sizes[length][: 1 if largest else None]
      sequences = self._take(packs, Shape(sizes[0], length))
      while sequences:
        count = _next_size(sizes, len(sequences))
        chosen, sequences = sequences[:count], sequences[count:]
        plan.append((Shape(count, length), chosen))
    return plan + ends

  def _cost(self, plan: Sequence[tuple[Shape, list]]) -> int:
    """Returns the tokens of all microbatches, with padding and exchange."""
    exchange = 0
    if self._shards > 1:
      exchange = max(map(_num_tokens, self.shapes)) // _EXCHANGE_SHARE
    return sum(_num_tokens(shape) + exchange for shape, _ in plan)

  def _take(
    self, packs: row_packs.Packs, shape: Shape
  ) -> list[list[row_packs.Pack]]:
    """Removes and returns packs for the sequences of a microbatch."""
    sequences = []
    targets = self._max_targets[shape.length]
    while len(sequences) < shape.sequences and (
      taken := packs.take(shape.length, targets)
    ):
      sequences.append(taken)
    return sequences

  def prompt_groups(
    self, rows: batch.Rows, index: np.ndarray, most: int | None = None
  ) -> list[np.ndarray]:
    """Groups rows that may share a pack, in order of their first rows.

    These are the rows whose prompts begin with the shortest prompt of a group;
    with adapters of agents, only rows of one agent.

    Args:
      rows: rows of an iteration.
      index: indices of the rows to group.
      most: largest number of rows of a group; larger groups are divided between
        episodes. None: no limit.
    """
    if not self._share:
      return [index[n : n + 1] for n in range(len(index))]
    # The agent counts as the first token.
    keys = rows.agents * self._by_agent
    prompts = [
      keys[r].tobytes() + rows.tokens[r, : rows.prompt_lengths[r]].tobytes()
      for r in index
    ]
    root, roots = None, {}
    # Sorted, a prompt is directly followed by those that begin with it.
    for prompt in sorted(set(prompts)):
      root = prompt if root is None or not prompt.startswith(root) else root
      roots[prompt] = root
    groups: dict[bytes, list[int]] = {}
    for r, prompt in zip(index, prompts, strict=True):
      groups.setdefault(roots[prompt], []).append(r)
    return [
      part
      for members in groups.values()
      for part in row_packs.divide(np.array(members), rows.episodes, most)
    ]

  def take_metrics(self) -> dict[str, float]:
    """Returns metrics of the packs since the last call, and resets them.

    The metrics are the number of tokens, the fraction of padding, and the
    number of tokens saved by sharing.
    """
    metrics = {
      'packs/tokens': float(self._tokens),
      'packs/padding': 1 - self._tokens / max(self._padded, 1),
      'packs/shared_tokens': float(self._saved),
    }
    self._tokens = self._padded = self._saved = 0
    return metrics

  def empty(self, shape: Shape) -> Microbatch:
    """Returns a microbatch of padding."""
    return self._arrays(shape).microbatch()

  def _pack(
    self, rows: batch.Rows, members: np.ndarray
  ) -> list[row_packs.Pack]:
    """Divides rows that may share a pack into packs that fit the last bucket.

    Rows of a conversation are in the same pack if they fit.
    """
    packs: list[row_packs.Pack] = []
    for chain in row_packs.chains(rows, members):
      may_join = packs and self._branches
      whole = packs[-1].join(rows, chain) if may_join else None
      if whole and self._fits(whole):
        packs[-1] = whole
        continue
      packs.append(self._single(rows, chain[0]))
      for r in chain[1:]:
        pack = packs[-1].join(rows, [r])
        if self._fits(pack):
          packs[-1] = pack
        else:
          packs.append(self._single(rows, r))
    return packs

  def _single(self, rows: batch.Rows, r: int) -> row_packs.Pack:
    """Returns the pack of one row, which must fit."""
    pack = row_packs.Pack.of(rows, [r])
    if not self._fits(pack):
      raise ValueError(
        f'max_completion_tokens: a row has {pack.targets} completion tokens; '
        f'must be at least {pack.targets}'
      )
    return pack

  def _fits(self, pack: row_packs.Pack) -> bool:
    """Returns whether the shortest sequence of a pack has room for its targets.

    Rows with equal completions have more targets than tokens.
    """
    length = next((b for b in self._buckets if b >= pack.length), None)
    return length is not None and pack.targets <= self._max_targets[length]

  def _arrays(self, shape: Shape) -> '_Arrays':
    per_shard = shape.sequences // self._shards
    return _Arrays(
      shape,
      self._shards,
      per_shard * self._max_targets[shape.length],
      by_agent=self._by_agent,
    )

  def _build(
    self, rows: batch.Rows, sequences: list[list[row_packs.Pack]], shape: Shape
  ) -> Microbatch:
    """Returns a microbatch of sequences, which may be fewer than the shape's.

    The sequences are dealt to the shards in turn, because the first ones hold
    the longest rows.
    """
    arrays = self._arrays(shape)
    for n, packs in enumerate(sequences):
      sequence, shard = divmod(n, self._shards)
      start = 0
      for pack in packs:
        arrays.add(rows, pack, shard, sequence, start)
        start += pack.length
        self._saved += int(rows.lengths[pack.rows].sum()) - pack.length
      self._tokens += start
    self._padded += arrays.tokens.size
    return arrays.microbatch()


def _num_tokens(shape: Shape) -> int:
  return shape.sequences * shape.length


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

  def __init__(
    self, shape: Shape, shards: int, capacity: int, *, by_agent: bool
  ):
    self._per_shard = shape.sequences // shards
    self.tokens = np.zeros((shape.sequences, shape.length), np.int32)
    self._positions = self.tokens.copy()
    self._agents = self.tokens.copy() if by_agent else None
    self._ends = self.tokens + np.arange(1, shape.length + 1, dtype=np.int32)
    # The fields before, targets, row, column and local_rows.
    self._lists = np.zeros((5, shards, capacity), np.int32)
    self._mask = np.zeros((shards, capacity), bool)
    self._num_rows = np.zeros(shards, np.int32)
    self._num_targets = np.zeros(shards, np.int64)
    self._rows: list[int] = []

  def add(
    self,
    rows: batch.Rows,
    pack: row_packs.Pack,
    shard: int,
    sequence: int,
    start: int,
  ) -> None:
    """Writes a pack into a shard's sequence, from index `start` on."""
    b = shard * self._per_shard + sequence
    offset = sequence * self.tokens.shape[1]
    # Index in the sequence of each token of the row that was written last.
    path = np.zeros(0, np.int64)
    if self._agents is not None:
      self._agents[b, start : start + pack.length] = rows.agents[pack.rows[0]]
    for n, r in enumerate(pack.rows):
      shared = row_packs.common_prefix(rows, pack.rows[n - 1], r) if n else 0
      self._ends[b, path[shared:]] = start
      added = int(rows.lengths[r]) - shared
      path = np.append(path[:shared], np.arange(start, start + added))
      self.tokens[b, path[shared:]] = rows.tokens[r, shared : shared + added]
      self._positions[b, path[shared:]] = np.arange(shared, shared + added)
      start += added
      self._add_targets(rows, r, shard, offset + path)
    self._ends[b, path] = start

  def _add_targets(
    self, rows: batch.Rows, r: int, shard: int, path: np.ndarray
  ) -> None:
    """Lists the completion tokens of row r, whose tokens are at `path`."""
    prompt = int(rows.prompt_lengths[r])
    count = len(path) - prompt
    ids = rows.tokens[r, prompt : prompt + count]
    n = self._num_targets[shard]
    before = path[prompt - 1 : prompt - 1 + count]
    entries = (before, ids, r, np.arange(count), self._num_rows[shard])
    for array, values in zip(self._lists, entries, strict=True):
      array[shard, n : n + count] = values
    self._mask[shard, n : n + count] = True
    self._num_targets[shard] += count
    # Rows without a completion have no tokens to number.
    self._num_rows[shard] += count > 0
    self._rows.append(r)

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
      self._agents,
    )
