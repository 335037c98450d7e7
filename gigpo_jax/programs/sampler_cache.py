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
      for first in range(0, len(batch[0].tokens), size):
        tokens = np.zeros((self._row_batch, size), np.int32)
        # Positions past the end of a row are not written.
        starts = np.full(len(tokens), self._parked_size[1], np.int32)
        counts, agents = np.zeros_like(starts), _agents(batch, len(tokens))
        for n, move in enumerate(batch):
          chunk = move.tokens[first : first + size]
          if len(chunk):
            tokens[n, : len(chunk)], starts[n] = chunk, move.start + first
            counts[n] = np.clip(move.count - first, 0, size)
        inputs = map(self._place, (tokens, starts, counts, agents))
        rows = self._programs.extend(params, *inputs, rows)
        padded_tokens += tokens.size
      self._put(rows, batch)
    return padded_tokens

  def _row_batches(
    self, moves: list[prefix_cache.Move]
  ) -> Iterator[list[prefix_cache.Move]]:
    """Yields moves in batches whose rows move together, in their order."""
    groups = collections.defaultdict(list)
    for move in moves:
      is_parked = (move.source or 0) >= self._num_slots
      groups[is_parked, move.row >= self._num_slots].append(move)
    size = self._row_batch
    for group in groups.values():
      for start in range(0, len(group), size):
        yield group[start : start + size]

  def _take(self, moves: list[prefix_cache.Move]) -> sampler_programs.Slots:
    """Returns copies of the sources; moves without a source get any row."""
    first = self._num_slots
    sources = [move.source or 0 for move in moves]
    is_parked = sources[0] >= first
    return self._programs.take(
      self._parked if is_parked else self.slots,
      self._indices([n - first * is_parked for n in sources], 0),
    )

  def _put(
    self, rows: sampler_programs.Slots, moves: list[prefix_cache.Move]
  ) -> None:
    """Writes rows to the rows of moves."""
    first, targets = self._num_slots, [move.row for move in moves]
    if targets[0] < first:
      indices = self._indices(targets, self.rows)
      self.slots = self._programs.put(self.slots, rows, indices)
      return
    indices = self._indices([n - first for n in targets], self._parked_size[0])
    self._parked = self._programs.put(self._parked, rows, indices)

  def _indices(self, rows: list[int], padding: int) -> jax.Array:
    indices = np.full(self._row_batch, padding, np.int32)
    indices[: len(rows)] = rows
    return self._place(indices)

  def _prefill_batches(
    self, moves: list[prefix_cache.Move]
  ) -> Iterator[tuple[list[prefix_cache.Move], tuple[int, int]]]:
    """Yields prompts to prefill together, and the size of the prefill."""
    ordered = sorted(moves, key=lambda move: len(move.tokens))
    lengths = [len(move.tokens) for move in ordered]
    start = 0
    for stop, size in plan_batches(lengths, self._prefill_sizes):
      yield ordered[start:stop], size
      start = stop

  def _prefill_prompts(
    self, params: dict, batch: list[prefix_cache.Move], size: tuple[int, int]
  ) -> int:
    """Prefills whole prompts; returns their number of tokens with padding."""
    tokens = np.zeros(size, np.int32)
    counts = np.zeros(len(tokens), np.int32)
    for n, move in enumerate(batch):
      tokens[n, : len(move.tokens)] = move.tokens
      counts[n] = move.count
    inputs = map(self._place, (tokens, counts, _agents(batch, len(tokens))))
    self._put(self._programs.prefill(params, *inputs), batch)
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
    size = self._row_batch
    for start in range(0, len(held), size):
      batch = held[start : start + size]
      moved = self._programs.take(old, self._indices(batch, 0))
      indices = self._indices(batch, self.rows)
      self.slots = self._programs.put(self.slots, moved, indices)


def _agents(moves: list[prefix_cache.Move], count: int) -> np.ndarray:
  """Returns the agent of each move, padded to `count`."""
  agents = np.zeros(count, np.int32)
  agents[: len(moves)] = [move.agent for move in moves]
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
