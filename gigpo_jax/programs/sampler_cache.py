"""The key/value cache of a sampler: its size, and the prompts that it holds.

A row of the cache is a slot. A slot keeps its prompt after its request has
finished, so that later requests with the same prompt need no prefill.
"""

import collections
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from gigpo_jax import mesh as mesh_lib
from gigpo_jax.programs import sampler_programs

# Consecutive steps with an oversized cache after which it shrinks.
_SHRINK_AFTER = 4


class SlotCache:
  """Keys and values of all slots, and the state of decoding, on the devices.

  Args:
    programs: the sampler's programs.
    mesh: the devices that sample.
    num_slots: largest number of slots.
    prompt_buckets: ascending lengths that prompts are padded to.
    batch_buckets: ascending numbers of prompts that are prefilled together; the
      last is the number of rows that move together.

  Attributes:
    slots: keys, values and state of the slots; None: not allocated.
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
    self.slots: sampler_programs.Slots | None = None

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
    self._copy(copies)
    return padded_tokens

  def _copy(
    self,
    pairs: list[tuple[int, int]],
    source: sampler_programs.Slots | None = None,
  ) -> None:
    """Copies rows.

    Args:
      pairs: (row of the source, slot).
      source: other slots to copy from; None: the slots themselves.
    """
    size = self._batch_buckets[-1]
    for start in range(0, len(pairs), size):
      batch = pairs[start : start + size]
      # Padding copies to slots that do not exist.
      batch = batch + [(0, self.rows)] * (size - len(batch))
      rows, slots = (
        self._place(np.array(column, np.int32))
        for column in zip(*batch, strict=True)
      )
      moved = self._programs.take(source or self.slots, rows)
      self.slots = self._programs.put(self.slots, moved, slots)

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
    tokens = np.zeros(
      (bucket(self._batch_buckets, len(batch)), length), np.int32
    )
    slots = np.full(self._batch_buckets[-1], self.rows, np.int32)
    for n, (slot, ids) in enumerate(batch):
      tokens[n, : len(ids)], slots[n] = ids, slot
    rows = self._programs.prefill(params, self._place(tokens))
    self.slots = self._programs.put(self.slots, rows, self._place(slots))
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
    self.rows, self.length = rows, length
    self.slots = self._programs.new_slots(rows, length)

  def fit(self, rows: int, length: int, is_used: Sequence[bool]) -> None:
    """Grows the cache to a size, or shrinks it after `_SHRINK_AFTER` steps.

    Args:
      rows: rows that are needed.
      length: slots of a row that are needed.
      is_used: whether each row belongs to a request in progress.
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
    for slot, prompt in enumerate(self._prompts):
      # A token of a prompt has 4 bytes.
      is_lost = slot >= rows or (prompt and len(prompt) // 4 > length)
      if is_lost and not is_used[slot]:
        self.set_prompt(slot, None)
    old, old_rows = self.slots, self.rows
    self.allocate(rows, length)
    held = [n for n, prompt in enumerate(self._prompts[:old_rows]) if prompt]
    self._copy([(n, n) for n in held], old)


def bucket(sizes: Sequence[int], needed: int) -> int:
  """Returns the first of ascending sizes that suffices."""
  return next(size for size in sizes if size >= needed)
