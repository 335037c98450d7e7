"""The key/value cache of a sampler on the devices: its size and its moves.

A row of the cache is a slot. `prefix_cache` knows which tokens the rows hold
and decides which row a request gets; this module moves and prefills them.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import prefix_cache
from gigpo_jax.models import kv_cache
from gigpo_jax.programs import sampler_programs

# Cost of a prefill in addition to its tokens, in tokens; an estimate.
_PREFILL_COST = 256
# Consecutive steps with an oversized cache after which it shrinks.
_SHRINK_AFTER = 4

# Moves by the index of their row among the rows that move together.
Batch = dict[int, prefix_cache.Move]


class SlotCache:
  """Keys and values of all slots, and the state of decoding, on the devices.

  Args:
    programs: the sampler's programs.
    mesh: the devices that sample.
    num_slots: largest number of slots.
    num_parked: rows that hold conversations but are not decoded.
    max_length: positions of the longest slot.
    prefill_sizes: ascending (rows, length) of prefills; the last has the number
      of rows that move together.
    reuse: one of `prefix_cache.REUSE`.
    chunk: tokens of a prompt that are prefilled together; 0: all.

  Attributes:
    prefixes: the tokens that the rows hold.
    slots: keys, values and state of the slots; None: not allocated.
    rows: allocated slots.
    length: allocated positions of a slot.

  Raises:
    ValueError: if the model's rows cannot be reused like this.
  """

  def __init__(
    self,
    programs: sampler_programs.Programs,
    mesh: jax.sharding.Mesh,
    *,
    num_slots: int,
    num_parked: int,
    max_length: int,
    prefill_sizes: tuple[tuple[int, int], ...],
    reuse: str,
    chunk: int,
  ):
    if problem := kv_cache.reuse_problem(programs.model, reuse):
      raise ValueError(problem)
    self._programs, self._mesh = programs, mesh
    self._num_slots = num_slots
    self._parked_size = num_parked, max_length
    self._prefill_sizes = prefill_sizes
    self._row_batch = prefill_sizes[-1][0]
    self._shards = mesh_lib.batch_shards(mesh)
    self._chunk = chunk
    self.prefixes = prefix_cache.PrefixCache(
      num_slots,
      num_parked,
      max_length,
      reuse,
      whole=kv_cache.has_state(programs.model),
    )
    self.clear()
    self.release()

  def clear(self) -> None:
    """Forgets all tokens."""
    self.prefixes.clear()
    self._oversized_steps = 0

  def release(self) -> None:
    """Frees the memory."""
    self.slots: sampler_programs.Slots | None = None
    self._parked: sampler_programs.Slots | None = None

  def moves(self) -> list[tuple[str, bool]]:
    """Returns the programs that move rows: (name, whether rows stay in shards).

    Chunks are prefilled in the shard of the slot, mostly from a row of it.
    Whole prompts are prefilled in any shard; a program for those of the slot's
    would have to be compiled for each size of the cache.
    """
    if self._shards == 1:
      return [('put', True), ('take', True)]
    if self._chunk:
      return [('put', True), ('take', True), ('take', False)]
    return [('put', False), ('take', False)]

  def fill(self, params: dict, moves: list[prefix_cache.Move]) -> int:
    """Executes moves; returns the number of prefilled tokens with padding.

    Args:
      params: prepared parameters.
      moves: see `PrefixCache.take_moves`.
    """
    levels = collections.defaultdict(list)
    for move in moves:
      levels[move.level].append(move)
    padded_tokens = 0
    for _, level in sorted(levels.items()):
      copies = [move for move in level if not len(move.tokens)]
      prefills = [move for move in level if len(move.tokens)]
      if self._chunk:
        padded_tokens += self._prefill_chunks(params, prefills)
      else:
        for batch, size in self._prefill_batches(prefills):
          padded_tokens += self._prefill_prompts(params, batch, size)
      self._copy_rows(copies)
    return padded_tokens

  def _copy_rows(self, moves: list[prefix_cache.Move]) -> None:
    for batch in self._row_batches(moves):
      self._put(self._take(batch), batch)

  def _prefill_chunks(
    self, params: dict, moves: list[prefix_cache.Move]
  ) -> int:
    """Prefills tokens at an offset; returns their number with padding."""
    padded_tokens, size = 0, self._chunk
    # Moves of a batch have similar numbers of chunks.
    ordered = sorted(moves, key=lambda move: -len(move.tokens))
    for batch in self._row_batches(ordered):
      rows = self._take(batch)
      longest = max(len(move.tokens) for move in batch.values())
      for first in range(0, longest, size):
        tokens = np.zeros((self._row_batch, size), np.int32)
        # Positions past the end of a row are not written.
        starts = np.full(len(tokens), self._parked_size[1], np.int32)
        counts, agents = np.zeros_like(starts), _agents(batch, len(tokens))
        for n, move in batch.items():
          chunk = move.tokens[first : first + size]
          if len(chunk):
            tokens[n, : len(chunk)], starts[n] = chunk, move.start + first
            counts[n] = np.clip(move.count - first, 0, size)
        inputs = map(self._place, (tokens, starts, counts, agents))
        rows = self._programs.extend(params, *inputs, rows)
        padded_tokens += tokens.size
      self._put(rows, batch)
    return padded_tokens

  def _row_batches(self, moves: list[prefix_cache.Move]) -> Iterator[Batch]:
    """Yields moves in batches whose rows move together, in their order."""
    groups = collections.defaultdict(list)
    for move in moves:
      is_parked = (move.source or 0) >= self._num_slots
      groups[is_parked, move.row >= self._num_slots].append(move)
    for group in groups.values():
      yield from self._arrange(group)

  def _arrange(self, moves: Sequence[prefix_cache.Move]) -> Iterator[Batch]:
    """Yields moves in batches, in which each row is in its target's shard."""
    by_shard = collections.defaultdict(list)
    for move in moves:
      by_shard[self._shard(move.row)].append(move)
    each = self._row_batch // self._shards
    for start in range(0, max(map(len, by_shard.values()), default=0), each):
      yield {
        shard * each + n: move
        for shard, own in by_shard.items()
        for n, move in enumerate(own[start : start + each])
      }

  def _shard(self, row: int) -> int:
    """Returns the shard of a slot or of a parked row."""
    if row < self._num_slots:
      return row * self._shards // self.rows
    return (row - self._num_slots) * self._shards // self._parked_size[0]

  def _take(self, batch: Batch) -> sampler_programs.Slots:
    """Returns copies of the sources; moves without a source get any row."""
    sources = {n: m.source for n, m in batch.items() if m.source is not None}
    first = self._num_slots
    is_parked = any(source >= first for source in sources.values())
    slots = self._parked if is_parked else self.slots
    return self._take_rows(
      slots, {n: source - first * is_parked for n, source in sources.items()}
    )

  def _take_rows(
    self, slots: sampler_programs.Slots, sources: dict[int, int]
  ) -> sampler_programs.Slots:
    """Returns copies of rows of slots, at their indices; any row elsewhere."""
    size = self._programs.size_of(slots)[0]
    # Rows of each shard, so that nothing is exchanged for their sake.
    shards = np.arange(self._row_batch) * self._shards // self._row_batch
    indices = (shards * (size // self._shards)).astype(np.int32)
    for n, source in sources.items():
      indices[n] = source
    is_own = (indices * self._shards // size == shards).all()
    is_own = bool(is_own) and ('take', True) in self.moves()
    return self._programs.take(slots, self._place(indices), is_own=is_own)

  def _put(self, rows: sampler_programs.Slots, batch: Batch) -> None:
    """Writes rows to the rows of moves."""
    first = self._num_slots
    is_parked = any(move.row >= first for move in batch.values())
    size = self._parked_size[0] if is_parked else self.rows
    indices = np.full(self._row_batch, size, np.int32)
    for n, move in batch.items():
      indices[n] = move.row - first * is_parked
    is_own = ('put', True) in self.moves()
    slots = self._parked if is_parked else self.slots
    slots = self._programs.put(slots, rows, self._place(indices), is_own=is_own)
    if is_parked:
      self._parked = slots
    else:
      self.slots = slots

  def _prefill_batches(
    self, moves: list[prefix_cache.Move]
  ) -> Iterator[tuple[Batch, tuple[int, int]]]:
    """Yields prompts to prefill together, and the size of the prefill."""
    ordered = sorted(moves, key=lambda move: len(move.tokens))
    lengths = [len(move.tokens) for move in ordered]
    start = 0
    for stop, size in plan_batches(lengths, self._prefill_sizes):
      yield dict(enumerate(ordered[start:stop])), size
      start = stop

  def _prefill_prompts(
    self, params: dict, batch: Batch, size: tuple[int, int]
  ) -> int:
    """Prefills whole prompts; returns their number of tokens with padding."""
    tokens = np.zeros(size, np.int32)
    counts = np.zeros(len(tokens), np.int32)
    for n, move in batch.items():
      tokens[n, : len(move.tokens)] = move.tokens
      counts[n] = move.count
    inputs = map(self._place, (tokens, counts, _agents(batch, len(tokens))))
    rows = self._programs.prefill(params, *inputs)
    # The rows of each shard come first among its rows that move together.
    each, own = self._row_batch // self._shards, size[0] // self._shards
    self._put(rows, {n // own * each + n % own: m for n, m in batch.items()})
    return tokens.size

  def decode(
    self,
    params: dict,
    integers: np.ndarray,
    floats: np.ndarray,
    truncated: bool | None,
  ) -> tuple[jax.Array, ...]:
    """Dispatches a step of decoding; returns its outputs.

    Args:
      params: prepared parameters.
      integers: `sampler_programs.INTEGERS` and the stream of each slot.
      floats: `sampler_programs.FLOATS` of each slot.
      truncated: see `sampling.sample_tokens`.
    """
    self.slots, outputs = self._programs.decode(
      params,
      self.slots,
      self._place(integers),
      self._place(floats),
      truncated,
    )
    return outputs

  def _place(self, array: np.ndarray) -> jax.Array:
    return mesh_lib.place_rows(self._mesh, array)

  def allocate(self, rows: int, length: int) -> None:
    """Replaces the slots by empty slots of another size."""
    if self._parked is None and self._parked_size[0]:
      self._parked = self._programs.new_slots(*self._parked_size)
    self.rows, self.length = rows, length
    self.slots = self._programs.new_slots(rows, length)

  def fit(self, rows: int, length: int) -> None:
    """Grows the cache to a size, or shrinks it after `_SHRINK_AFTER` steps.

    Args:
      rows: slots that are needed.
      length: positions of a slot that are needed.
    """
    if self.slots is None:
      self.allocate(rows, length)
      return
    if (rows, length) == (self.rows, self.length):
      self._oversized_steps = 0
      return
    if rows <= self.rows and length <= self.length:
      self._oversized_steps += 1
      if self._oversized_steps < _SHRINK_AFTER:
        return
    else:
      rows, length = max(rows, self.rows), max(length, self.length)
    self._oversized_steps = 0
    held = [n for n in self.prefixes.drop(rows, length) if n < self.rows]
    old = self.slots
    self.allocate(rows, length)
    nothing = np.zeros(0, np.int32)
    moves = [prefix_cache.Move(n, n, 0, nothing, 0) for n in held]
    for batch in self._arrange(moves):
      sources = {n: move.row for n, move in batch.items()}
      self._put(self._take_rows(old, sources), batch)


def _agents(batch: Batch, count: int) -> np.ndarray:
  """Returns the agent of each move, padded to `count`."""
  agents = np.zeros(count, np.int32)
  for n, move in batch.items():
    agents[n] = move.agent
  return agents


def prefill_sizes(
  prompt_buckets: Sequence[int], shards: int, num_slots: int, platform: str
) -> tuple[tuple[int, int], ...]:
  """Returns the ascending (rows, length) of prefills.

  A copy of the model prefills one prompt or a few at once. Accelerators also
  have three quarters of the first bucket, which most prompts need: padding
  costs more than the compilation of two programs.

  Args:
    prompt_buckets: ascending lengths of the longest prompts in a cache.
    shards: copies of the model.
    num_slots: largest number of slots.
    platform: 'cpu', 'gpu' or 'tpu'.
  """
  # 4 prompts fill a GPU. On a CPU, activations of more exceed its caches.
  most = min(shards * (8 if platform == 'tpu' else 4), num_slots)
  lengths = {*prompt_buckets}
  if platform != 'cpu':
    lengths.add(max(1, 3 * prompt_buckets[0] // 4))
  return tuple(sorted(set(itertools.product((shards, most), lengths))))


def plan_batches(
  lengths: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> list[tuple[int, tuple[int, int]]]:
  """Divides prompts into batches with the least padding.

  A batch has one of a few sizes. The cheapest division of the first n prompts
  follows from those of fewer prompts.

  Args:
    lengths: ascending numbers of tokens.
    sizes: (prompts, length) of a batch; both may be padded.

  Returns:
    (index after its last prompt, its size) of each batch, in order.
  """
  # Of the first n prompts: (cost, prompts before the last batch, its size).
  best = [(0, 0, (0, 0))]
  for stop, longest in enumerate(lengths, start=1):
    options = []
    for rows, length in sizes:
      if length >= longest:
        n = max(stop - rows, 0)
        cost = best[n][0] + rows * length + _PREFILL_COST
        options.append((cost, n, (rows, length)))
    best.append(min(options))
  batches, stop = [], len(lengths)
  while stop:
    _, start, size = best[stop]
    batches.append((stop, size))
    stop = start
  return batches[::-1]


def bucket(sizes: Sequence[int], needed: int) -> int:
  """Returns the first of ascending sizes that suffices."""
  return next(size for size in sizes if size >= needed)
