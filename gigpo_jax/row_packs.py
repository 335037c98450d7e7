"""Packs: rows that share tokens, and the packs that fill a sequence.

See `packing`. This module uses numpy only.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from gigpo_jax import batch

# Packs of which those that fill a sequence best are chosen. With more of them,
# the first sequences use up the short packs, which the last ones need.
_CANDIDATES = 32


@dataclasses.dataclass(frozen=True)
class Pack:
  """Rows that share tokens, in depth-first order.

  Attributes:
    rows: indices of the rows; a row follows those that it begins with.
    length: number of different tokens.
    targets: completion tokens of all rows.
  """

  rows: list[int]
  length: int
  targets: int

  @classmethod
  def of(cls, rows: batch.Rows, chain: list[int]) -> 'Pack':
    """Returns a pack of rows, each of which begins with the one before."""
    completions = rows.lengths[chain] - rows.prompt_lengths[chain]
    return cls(chain, int(rows.lengths[chain[-1]]), int(completions.sum()))

  def join(self, rows: batch.Rows, chain: list[int]) -> 'Pack':
    """Returns this pack with further rows; see `of`."""
    added = Pack.of(rows, chain)
    shared = common_prefix(rows, self.rows[-1], chain[0])
    return Pack(
      self.rows + chain,
      self.length + added.length - shared,
      self.targets + added.targets,
    )


def common_prefix(rows: batch.Rows, a: int, b: int) -> int:
  """Returns the number of tokens with which two rows begin alike."""
  length = min(rows.lengths[a], rows.lengths[b])
  differs = rows.tokens[a, :length] != rows.tokens[b, :length]
  return int(np.argmax(differs)) if differs.any() else int(length)


def chains(rows: batch.Rows, members: np.ndarray) -> list[list[int]]:
  """Returns rows in depth-first order, divided where one is not continued."""
  # The order of the bytes is arbitrary, but rows precede their continuations.
  # It is stable, for equal rows.
  members = sorted(
    map(int, members), key=lambda r: rows.tokens[r, : rows.lengths[r]].tobytes()
  )
  chains = [[members[0]]]
  for before, r in zip(members, members[1:], strict=False):
    if common_prefix(rows, before, r) == rows.lengths[before]:
      chains[-1].append(r)
    else:
      chains.append([r])
  return chains


def divide(
  members: np.ndarray, episodes: np.ndarray, most: int | None
) -> list[np.ndarray]:
  """Divides rows between episodes, into parts of at most `most` rows.

  An episode with more rows is a part of its own.
  """
  if most is None or len(members) <= most:
    return [members]
  starts = np.flatnonzero(np.diff(episodes[members])) + 1
  first, *others = np.split(members, starts)
  parts = [first]
  for episode in others:
    if len(parts[-1]) + len(episode) <= most:
      parts[-1] = np.concatenate([parts[-1], episode])
    else:
      parts.append(episode)
  return parts


class Packs:
  """Packs that wait for a sequence, sorted by length.

  Args:
    packs: the packs.
    fills_best: whether a sequence gets the packs that fill it best, instead of
      always the longest that fits. That wastes less if few packs fit into a
      sequence, and more if short packs fill what is left of long sequences.
  """

  def __init__(self, packs: list[Pack], *, fills_best: bool):
    self._fills_best = fills_best
    # The stable order makes the microbatches a function of the rows.
    self._packs = sorted(packs, key=lambda pack: pack.length)
    self._lengths = [pack.length for pack in self._packs]

  def __bool__(self) -> bool:
    return bool(self._packs)

  @property
  def longest(self) -> int:
    """Tokens of the longest pack."""
    return self._lengths[-1]

  def take(self, length: int, targets: int) -> list[Pack]:
    """Removes and returns packs for a sequence, the longest that fits first.

    Args:
      length: tokens of the sequence.
      targets: completion tokens of the sequence.

    Returns:
      The packs; none if none fits.
    """
    longest = next(self._fitting(length, targets), None)
    if longest is None:
      return []
    first = self._pop(longest)
    room, targets = length - first.length, targets - first.targets
    chosen = self._best_fill(room) if self._fills_best else None
    if chosen is None or self._num_targets(chosen) > targets:
      chosen = list(self._fitting(room, targets))
    return [first, *(self._pop(n) for n in chosen)]

  def _num_targets(self, chosen: Sequence[int]) -> int:
    return sum(self._packs[n].targets for n in chosen)

  def _pop(self, n: int) -> Pack:
    self._lengths.pop(n)
    return self._packs.pop(n)

  def _best_fill(self, room: int) -> list[int]:
    """Returns packs with the largest sum of lengths up to `room`.

    These are the best of some candidates of all lengths; of equal sums, the one
    with the longest packs.

    Args:
      room: tokens.

    Returns:
      Indices, descending.
    """
    fitting = bisect.bisect_right(self._lengths, room)
    count = min(fitting, _CANDIDATES)
    candidates = [k * (fitting - 1) // max(count - 1, 1) for k in range(count)]
    # Bit s of sums[k] is set if some of the first k candidates sum to s.
    sums = [1]
    for n in candidates:
      added = (sums[-1] << self._lengths[n]) & ((2 << room) - 1)
      sums.append(sums[-1] | added)
    left = sums.pop().bit_length() - 1
    chosen = []
    for n in reversed(candidates):
      before = sums.pop()
      rest = left - self._lengths[n]
      if rest >= 0 and before >> rest & 1:
        chosen.append(n)
        left = rest
    return chosen

  def _fitting(self, room: int, targets: int) -> Iterator[int]:
    """Yields packs for `room` tokens: always the longest that fits.

    Args:
      room: tokens.
      targets: completion tokens.

    Yields:
      Indices, descending.
    """
    n = len(self._packs)
    while (n := bisect.bisect_right(self._lengths, room, hi=n) - 1) >= 0:
      if self._packs[n].targets <= targets:
        yield n
        room -= self._lengths[n]
        targets -= self._packs[n].targets
