"""The key/value cache of a sampler: its size, and the prompts that it holds.

A row of the cache is a slot. A slot keeps its prompt after its request has
finished, so that later requests with the same prompt need no prefill.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import kv_cache
from gigpo_jax.programs import sampler_programs
from gigpo_jax.runtime import distributed

# Consecutive steps with an oversized cache after which it shrinks.
_SHRINK_AFTER = 4


class SlotCache:
  """Keys and values of all slots, and the state of decoding, on the devices.

  Args:
    programs: the sampler's programs.
    mesh: the devices that sample.
    num_slots: largest number of slots.
    prompt_buckets: ascending lengths that prompts are padded to.
    batch_buckets: ascending numbers of prompts that are prefilled together.

  Attributes:
    arrays: keys and values; None: not allocated.
    state: `sampler_programs.STATE` of each slot; None: not allocated.
    rows: allocated slots.
    length: allocated positions of a slot.
  """

  def __init__(
    self,
    programs: sampler_programs.Programs,
    mesh: jax.sharding.Mesh,
    *,
    num_slots: int,
    prompt_buckets: tuple[int, ...],
    batch_buckets: tuple[int, ...],
  ):
    self._programs, self._mesh = programs, mesh
    self._num_slots = num_slots
    self._prompt_buckets = prompt_buckets
    self._batch_buckets = batch_buckets
    self.clear()
    self.release()

  def clear(self) -> None:
    """Forgets the prompts."""
    # The prompt whose keys and values each slot holds, and the inverse map.
    self._prompts: list[bytes | None] = [None] * self._num_slots
    self._slot_of_prompt: dict[bytes, int] = {}
    self._oversized_steps = 0

  def release(self) -> None:
    """Frees the memory."""
    self.arrays: kv_cache.Cache | None = None
    self.state: jax.Array | None = None

  def slot_of(self, prompt: bytes) -> int | None:
    """Returns a slot that holds a prompt, or None."""
    return self._slot_of_prompt.get(prompt)

  def set_prompt(self, slot: int, prompt: bytes | None) -> None:
    """Records the prompt whose keys and values a slot holds."""
    old = self._prompts[slot]
    if old is not None and self._slot_of_prompt.get(old) == slot:
      del self._slot_of_prompt[old]
    self._prompts[slot] = prompt
    if prompt is not None:
      self._slot_of_prompt.setdefault(prompt, slot)

  def fill(
    self,
    params: dict,
    prompts: list[tuple[int, np.ndarray]],
    copies: list[tuple[int, int]],
  ) -> int:
    """Prefills prompts, then copies slots; returns the tokens with padding.

    Args:
      params: prepared parameters.
      prompts: (slot, prompt) to prefill.
      copies: (source slot, slot) of equal prompts.
    """
    padded_tokens = 0
    for batch, size in self._prefill_batches(prompts):
      padded_tokens += self._prefill_prompts(params, batch, size)
    for batch in self._batches(copies):
      # Padding copies to slots that do not exist.
      pairs = np.full((2, bucket(self._batch_buckets, len(batch))), self.rows)
      pairs[:, : len(batch)] = np.transpose(batch)
      sources, slots = (self._place(p.astype(np.int32)) for p in pairs)
      self.arrays = self._programs.copy(self.arrays, sources, slots)
    return padded_tokens

  def _prefill_batches(
    self, prompts: list[tuple[int, np.ndarray]]
  ) -> Iterator[tuple[list[tuple[int, np.ndarray]], int]]:
    """Yields prompts to prefill together, and their bucket."""
    by_length = collections.defaultdict(list)
    for slot, ids in prompts:
      by_length[bucket(self._prompt_buckets, len(ids))].append((slot, ids))
    for length, group in sorted(by_length.items()):
      for batch in self._batches(group):
        yield batch, length

  def _batches(self, items: list) -> Iterator[list]:
    """Yields items in batches for which programs are compiled."""
    while items:
      size = bucket(self._batch_buckets, len(items[: self._batch_buckets[-1]]))
      if size > 2 * len(items) and size > self._batch_buckets[0]:
        # This batch would be mostly padding; use a smaller size first.
        size = max(s for s in self._batch_buckets if s < size)
      yield items[:size]
      items = items[size:]

  def _prefill_prompts(
    self, params: dict, batch: list[tuple[int, np.ndarray]], length: int
  ) -> int:
    rows = bucket(self._batch_buckets, len(batch))
    tokens = np.zeros((rows, length), np.int32)
    slots = np.full(rows, self.rows, np.int32)
    for n, (slot, ids) in enumerate(batch):
      tokens[n, : len(ids)], slots[n] = ids, slot
    prompts = self._programs.prefill(params, self._place(tokens))
    distributed.block_on_cpu(prompts)
    self.arrays = self._programs.insert(
      self.arrays, prompts, self._place(slots)
    )
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
    self.arrays, self.state, outputs = self._programs.decode(
      params,
      self.arrays,
      self.state,
      self._place(integers),
      self._place(floats),
      truncated,
    )
    distributed.block_on_cpu(outputs)
    return outputs

  def _place(self, array: np.ndarray) -> jax.Array:
    return mesh_lib.place_rows(self._mesh, array)

  def allocate(self, rows: int, length: int) -> None:
    """Replaces the cache by an empty cache of another size."""
    self.rows, self.length = rows, length
    # Free the old cache first: two caches may not fit into memory.
    self.arrays = None
    self.arrays = self._programs.new_cache(rows, length)
    self.state = self._place(
      np.zeros((rows, len(sampler_programs.STATE)), np.int32)
    )

  def fit(self, rows: int, length: int, is_used: Sequence[bool]) -> None:
    """Grows the cache to a size, or shrinks it after `_SHRINK_AFTER` steps.

    Args:
      rows: rows that are needed.
      length: slots of a row that are needed.
      is_used: whether each row belongs to a request in progress.
    """
    if self.arrays is None:
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
    # Resizing one dimension at a time needs fewer programs than all pairs of
    # sizes.
    for size in ((rows, self.length), (rows, length)):
      if size != (self.rows, self.length):
        self.arrays, self.state = self._programs.resize(
          self.arrays, self.state, *size
        )
        self.rows, self.length = size
    for slot, prompt in enumerate(self._prompts):
      # A token of a prompt has 4 bytes.
      is_lost = slot >= rows or (prompt and len(prompt) // 4 > length)
      if is_lost and not is_used[slot]:
        self.set_prompt(slot, None)

  # Calls that compile a program each; see `warm_up_calls`.

  def warm_up_prefill(self, params: dict, prompts: dict, r: int, p: int):
    """Prefills R prompts of P tokens into `prompts`."""
    ids = self._place(np.zeros((r, p), np.int32))
    prompts[r, p] = self._programs.prefill(params, ids)

  def warm_up_allocate(self, params, prompts, rows: int, length: int):
    """Allocates a cache."""
    del params, prompts
    self.allocate(rows, length)

  def warm_up_resize(self, params, prompts, rows: int, length: int):
    """Resizes the cache; discards the result."""
    del params, prompts
    self._programs.resize(self.arrays, self.state, rows, length)

  def warm_up_copy(self, params, prompts, r: int):
    """Copies R slots."""
    del params, prompts
    # Slot `rows` does not exist, so nothing is copied.
    slots = self._place(np.full(r, self.rows, np.int32))
    self.arrays = self._programs.copy(self.arrays, slots, slots)

  def warm_up_insert(self, params, prompts: dict, r: int, p: int):
    """Inserts R prompts of P tokens."""
    del params
    slots = self._place(np.full(r, self.rows, np.int32))
    self.arrays = self._programs.insert(self.arrays, prompts[r, p], slots)

  def warm_up_decode(self, params: dict, prompts, truncated: bool | None):
    """Decodes a step in which no slot is in use."""
    del prompts
    num_integers = len(sampler_programs.INTEGERS) + sampler_programs.STREAM_SIZE
    integers = np.zeros((self.rows, num_integers), np.int32)
    floats = np.ones((self.rows, len(sampler_programs.FLOATS)), np.float32)
    jax.block_until_ready(self.decode(params, integers, floats, truncated))


def warm_up_calls(
  *,
  row_buckets: tuple[int, ...],
  length_buckets: tuple[int, ...],
  batch_buckets: tuple[int, ...],
  prompt_buckets: tuple[int, ...],
  truncations: tuple[bool | None, ...],
) -> list[tuple]:
  """Returns (method, *arguments) that compile one program each, in this order.

  Call them as method(cache, params, prompts, *arguments), where `prompts` is a
  dict that holds the prefilled prompts.

  Args:
    row_buckets: numbers of slots.
    length_buckets: lengths of a slot.
    batch_buckets: numbers of prompts that are prefilled together.
    prompt_buckets: lengths that prompts are padded to.
    truncations: `truncated` of each program of a step.
  """
  sizes = list(itertools.product(row_buckets, length_buckets))
  prefills = list(itertools.product(batch_buckets, prompt_buckets))
  calls: list[tuple] = [(SlotCache.warm_up_prefill, r, p) for r, p in prefills]
  for rows, length in sizes:
    calls.append((SlotCache.warm_up_allocate, rows, length))
    for other in sizes:
      if (rows == other[0]) != (length == other[1]):
        calls.append((SlotCache.warm_up_resize, *other))
    for r in batch_buckets:
      calls.append((SlotCache.warm_up_copy, r))
    for r, p in prefills:
      if p <= length:
        calls.append((SlotCache.warm_up_insert, r, p))
    for truncated in truncations:
      calls.append((SlotCache.warm_up_decode, truncated))
  return calls


def bucket(sizes: Sequence[int], needed: int) -> int:
  """Returns the first of ascending sizes that suffices."""
  return next(size for size in sizes if size >= needed)
