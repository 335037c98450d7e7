"""BM25 over the catalogue, ranked as the original's Lucene index ranks.

An index of our own: Lucene rounds a document's length to one byte, adds up
single-precision scores and breaks ties by name, and the packages that rank by
BM25 do none of these, so that they return other products. Postings are plain
arrays, which a memory map can share between processes.

Where words are common, most postings are never read. Documents are kept in
blocks of like ones; the most that a word adds to any document of a block is
known, so that the sum over the query's words bounds what is in it. Blocks are
scored in order of these bounds until none can hold one of the best (Mallia,
Suel, Tonellotto, Faster Learned Sparse Retrieval with Block-Max Pruning, SIGIR
2024). Nothing is approximate.
"""

import array
import collections
import functools
import math
from collections.abc import Sequence

import numpy as np

from envs.webshop import analysis

K1, B = 0.9, 0.4
_BLOCK = 8  # documents
_COMMON = 16_384  # postings from which a word's bounds are stored
_FEW = 150_000  # postings that are simply added up
_FIRST = 1_024  # blocks that are scored first; then more each time


def _length_from_byte(byte: int) -> int:
  """Returns the document length that Lucene's norm byte stands for."""
  if byte < 24:
    return byte
  bits, shift = (byte - 24) & 7, ((byte - 24) >> 3) - 1
  return 24 + (bits if shift < 0 else (bits | 8) << shift)


_LENGTHS = np.array([_length_from_byte(byte) for byte in range(256)])


class Builder:
  """Collects documents, in order; `arrays` makes the index of them."""

  def __init__(self) -> None:
    self._numbers: dict[str, int] = {}
    self._terms = array.array('i')
    self._documents = array.array('i')
    self._counts = array.array('H')
    self._lengths = array.array('i')
    self._kinds: list[str] = []
    self._names: list[bytes] = []

  def add(self, name: str, words: Sequence[str], kind: str = '') -> None:
    """Adds a document.

    Args:
      name: of equally good documents the smallest comes first.
      words: what it holds, any number of times.
      kind: documents of like kinds are kept together, for speed.
    """
    self._names.append(name.encode('utf-8', 'replace'))
    document = len(self._lengths)
    for term, count in collections.Counter(words).items():
      number = self._numbers.setdefault(term, len(self._numbers))
      self._terms.append(number)
      self._documents.append(document)
      self._counts.append(min(count, 65_535))
    self._lengths.append(len(words))
    self._kinds.append(kind)

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the index: what `Index` takes."""
    encoded = {term.encode(): n for term, n in self._numbers.items()}
    ordered = sorted(encoded)
    # Number by first appearance -> place in the sorted vocabulary.
    place = np.empty(len(ordered), np.int32)
    place[[encoded[term] for term in ordered]] = np.arange(len(ordered))
    numbers = range(len(self._lengths))
    by_kind = np.array(sorted(numbers, key=self._kinds.__getitem__), np.int32)
    rank = np.empty_like(by_kind)
    rank[by_kind] = np.arange(len(by_kind))
    terms = place[np.frombuffer(self._terms, np.int32)] if ordered else place
    documents = rank[np.frombuffer(self._documents, np.int32)]
    order = np.argsort(terms.astype(np.int64) * len(rank) + documents)
    frequencies = np.bincount(terms, minlength=len(ordered))
    lengths = np.frombuffer(self._lengths, np.int32)[by_kind]
    by_name = np.array(sorted(numbers, key=self._names.__getitem__), np.int32)
    found = {
      'term_text': np.frombuffer(b''.join(ordered), np.uint8),
      'term_ends': np.cumsum([0, *map(len, ordered)], dtype=np.int64),
      'posting_ends': np.cumsum([0, *frequencies], dtype=np.int64),
      'posting_documents': documents[order],
      'posting_counts': np.frombuffer(self._counts, np.uint16)[order],
      # The largest length not above the true one, as one byte.
      'length_bytes': (
        np.searchsorted(_LENGTHS, lengths, side='right') - 1
      ).astype(np.uint8),
      'total_length': np.array([lengths.sum(dtype=np.int64)]),
      'document_numbers': by_kind,
      'document_numbers_by_name': by_name,
      'document_ranks': np.argsort(by_name).astype(np.int32)[by_kind],
    }
    return found | _bounds(found)


def _bounds(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns bounds of common words: their places, and rows of blocks.

  A bound is in 1/255 of the word's weight.
  """
  index = Index(found | _NO_BOUNDS)
  common = np.flatnonzero(np.diff(found['posting_ends']) >= _COMMON)
  rows = np.zeros((len(common), index.blocks), np.uint8)
  for row, place in zip(rows, common, strict=True):
    shares = _Postings(index, int(place), 1).best_shares()
    row[:] = np.ceil(shares.astype(np.float64) * 255)
  return {'common_terms': common.astype(np.int32), 'common_bounds': rows}


_NO_BOUNDS = {
  'common_terms': np.zeros(0, np.int32),
  'common_bounds': np.zeros((0, 0), np.uint8),
}


class Index:
  """Ranks documents for a query.

  Args:
    arrays: of `Builder.arrays`, in memory or mapped.
  """

  def __init__(self, arrays: dict[str, np.ndarray]):
    self._text = memoryview(arrays['term_text'])
    self._text_ends = memoryview(arrays['term_ends'])
    self._ends = arrays['posting_ends']
    self._documents = arrays['posting_documents']
    self._counts = arrays['posting_counts']
    self._bytes = arrays['length_bytes']
    self._numbers = arrays['document_numbers']
    self._ranks = arrays['document_ranks']
    self._bounds = arrays['common_bounds']
    self._rows = {
      place: row for row, place in enumerate(arrays['common_terms'].tolist())
    }
    self._size = len(self._bytes)
    self.blocks = -(-self._size // _BLOCK)
    average = int(arrays['total_length'][0]) / max(self._size, 1)
    norms = K1 * ((1 - B) + B * _LENGTHS / max(average, 1e-9))
    self._inverse = (1 / norms).astype(np.float32)

  def search(self, query: str, k: int) -> list[int]:
    """Returns the numbers of the k best documents that hold a query word."""
    return list(self._search(query, k))

  @functools.lru_cache(4096)  # noqa: B019  (an index lives as long as a process)
  def _search(self, query: str, k: int) -> tuple[int, ...]:
    counts = collections.Counter(analysis.terms(query))
    lists = []
    for term, boost in counts.items():
      place = self._place(term.encode())
      if place is not None:
        lists.append(_Postings(self, place, boost))
    # Rare words first, in every way of adding up: the same sums.
    lists.sort(key=lambda postings: postings.size)
    if sum(postings.size for postings in lists) <= _FEW:
      documents, scores = _add_up(lists, self._size)
    else:
      documents, scores = self._best_blocks(lists, k)
    order, _ = self._best(documents, scores, k)
    return tuple(self._numbers[order].tolist())

  def _best(
    self, documents: np.ndarray, scores: np.ndarray, k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k best (documents, scores), the best first."""
    if len(scores) > k:
      last = np.partition(scores, -k)[-k]
      better, equal = np.flatnonzero(scores > last), scores == last
      equal = np.flatnonzero(equal)
      room = k - len(better)
      if len(equal) > room:
        ranks = self._ranks[documents[equal]]
        equal = equal[np.argpartition(ranks, room - 1)[:room]]
      kept = np.concatenate((better, equal))
      documents, scores = documents[kept], scores[kept]
    order = np.lexsort((self._ranks[documents], -scores))
    return documents[order], scores[order]

  def _best_blocks(
    self, lists: Sequence['_Postings'], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (documents, scores) of the k best, by the words' postings."""
    bounds = np.zeros(self.blocks, np.float32)
    for postings in lists:
      bounds += postings.bounds()
    bounds *= np.float32(1 + 1e-5)  # more than what rounding takes away
    left = np.flatnonzero(bounds).astype(np.int32)
    documents, scores = np.zeros(0, np.int32), np.zeros(0, np.float32)
    size = _FIRST
    while len(left):
      if len(left) > size:
        best = np.argpartition(-bounds[left], size)
        blocks, left = np.sort(left[best[:size]]), left[best[size:]]
      else:
        blocks, left = np.sort(left), left[:0]
      found = _score_blocks(lists, blocks)
      documents = np.concatenate((documents, found[0]))
      scores = np.concatenate((scores, found[1]))
      documents, scores = self._best(documents, scores, k)
      if len(scores) == k:
        left = left[bounds[left] >= scores[-1]]
      size *= 4
    return documents, scores

  def having(self, word: str) -> np.ndarray:
    """Returns the numbers of the documents with a word, in the kinds' order."""
    place = self._place(word.encode())
    if place is None:
      return np.zeros(0, np.int32)
    start, end = self._ends[place : place + 2]
    return self._numbers[self._documents[start:end]]

  def _term(self, place: int) -> bytes:
    start, end = self._text_ends[place], self._text_ends[place + 1]
    return bytes(self._text[start:end])

  @functools.lru_cache(1 << 16)  # noqa: B019
  def _place(self, term: bytes) -> int | None:
    low, high = 0, len(self._text_ends) - 1
    while low < high:
      middle = (low + high) // 2
      if self._term(middle) < term:
        low = middle + 1
      else:
        high = middle
    found = low < len(self._text_ends) - 1 and self._term(low) == term
    return low if found else None


class _Postings:
  """Documents of one query word, and what it adds to their scores."""

  def __init__(self, index: Index, place: int, boost: int):
    start, end = (int(n) for n in index._ends[place : place + 2])
    self._index, self._place = index, place
    self._documents = index._documents[start:end]
    self._counts = index._counts[start:end]
    self.size = end - start
    idf = math.log(1 + (index._size - self.size + 0.5) / (self.size + 0.5))
    self._weight = np.float32(np.float32(boost) * np.float32(idf))

  def scores(
    self, which: np.ndarray | slice = slice(None)
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (documents, what the word adds to them); float32 as in Lucene."""
    documents = self._documents[which]
    counts = self._counts[which].astype(np.float32)
    inverse = self._index._inverse[self._index._bytes[documents]]
    one = np.float32(1)
    return documents, self._weight - self._weight / (one + counts * inverse)

  def scores_in(
    self, blocks: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (place of the block in `blocks`, document, score) of postings.

    Args:
      blocks: numbers of blocks, rising. [b] int32
    """
    ends = np.concatenate((blocks, blocks + 1)) * np.int32(_BLOCK)
    starts, ends = np.searchsorted(self._documents, ends).reshape(2, -1)
    sizes = ends - starts
    places = np.repeat(np.arange(len(blocks)), sizes)
    before = np.cumsum(sizes) - sizes
    which = np.arange(len(places)) + (starts - before)[places]
    return places, *self.scores(which)

  def best_shares(self) -> np.ndarray:
    """Returns the best score of each block as a share of the weight."""
    documents, scores = self.scores()
    blocks = documents // _BLOCK
    first = np.flatnonzero(np.diff(blocks, prepend=-1))
    shares = np.zeros(self._index.blocks, np.float32)
    shares[blocks[first]] = np.maximum.reduceat(scores, first) / self._weight
    return shares

  def bounds(self) -> np.ndarray:
    """Returns at least the best score of each block, [blocks]."""
    row = self._index._rows.get(self._place)
    if row is None:
      return self.best_shares() * self._weight
    return self._index._bounds[row] * (self._weight / np.float32(255))


def _add_up(
  lists: Sequence[_Postings], number: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (documents, scores) that hold a query word."""
  totals = np.zeros(number)
  for postings in lists:
    documents, scores = postings.scores()
    totals[documents] += scores
  documents = np.flatnonzero(totals)
  return documents, totals[documents].astype(np.float32)


def _score_blocks(
  lists: Sequence[_Postings], blocks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (documents, scores) of what is in some blocks."""
  totals = np.zeros(len(blocks) * _BLOCK)
  for postings in lists:
    places, documents, scores = postings.scores_in(blocks)
    totals[places * _BLOCK + documents % _BLOCK] += scores
  found = np.flatnonzero(totals)
  documents = blocks[found // _BLOCK] * _BLOCK + found % _BLOCK
  return documents, totals[found].astype(np.float32)
