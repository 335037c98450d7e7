"""BM25 over the catalogue, ranked as the original's Lucene index ranks.

An index of our own: Lucene rounds a document's length to one byte, adds up
single-precision scores and breaks ties by name, and the packages that rank by
BM25 do none of these, so that they return other products. Postings are plain
arrays, which a memory map can share between processes.
"""

import array
import collections
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from envs.webshop import analysis

K1, B = 0.9, 0.4
_LONG_LIST = 20_000  # postings from which a list is not simply added up


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

  def add(self, text: str) -> None:
    """Adds a document."""
    words = analysis.terms(text)
    document = len(self._lengths)
    for term, count in collections.Counter(words).items():
      number = self._numbers.setdefault(term, len(self._numbers))
      self._terms.append(number)
      self._documents.append(document)
      self._counts.append(min(count, 65_535))
    self._lengths.append(len(words))

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the index: what `Index` takes."""
    encoded = {term.encode(): n for term, n in self._numbers.items()}
    ordered = sorted(encoded)
    # Number by first appearance -> place in the sorted vocabulary.
    place = np.empty(len(ordered), np.int32)
    place[[encoded[term] for term in ordered]] = np.arange(len(ordered))
    terms = place[np.frombuffer(self._terms, np.int32)] if ordered else place
    order = np.argsort(terms, kind='stable')
    frequencies = np.bincount(terms, minlength=len(ordered))
    lengths = np.frombuffer(self._lengths, np.int32)
    return {
      'term_text': np.frombuffer(b''.join(ordered), np.uint8),
      'term_ends': np.cumsum([0, *map(len, ordered)], dtype=np.int64),
      'posting_ends': np.cumsum([0, *frequencies], dtype=np.int64),
      'posting_documents': np.frombuffer(self._documents, np.int32)[order],
      'posting_counts': np.frombuffer(self._counts, np.uint16)[order],
      # The largest length not above the true one, as one byte.
      'length_bytes': (
        np.searchsorted(_LENGTHS, lengths, side='right') - 1
      ).astype(np.uint8),
      'total_length': np.array([lengths.sum(dtype=np.int64)]),
    }


class Index:
  """Ranks documents for a query.

  Args:
    arrays: of `Builder.arrays`, in memory or mapped.
    names: of the documents; ties go to the smaller name.
  """

  def __init__(self, arrays: dict[str, np.ndarray], names: Sequence[str]):
    self._names = names
    self._text = memoryview(arrays['term_text'])
    self._text_ends = memoryview(arrays['term_ends'])
    self._ends = arrays['posting_ends']
    self._documents = arrays['posting_documents']
    self._counts = arrays['posting_counts']
    self._bytes = arrays['length_bytes']
    self._number = len(self._bytes)
    average = int(arrays['total_length'][0]) / max(self._number, 1)
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
    if not lists:
      return ()
    documents, scores = _rank(lists, k, self._number)
    found = zip(documents.tolist(), scores.tolist(), strict=True)
    best = sorted(found, key=lambda pair: (-pair[1], self._names[pair[0]]))
    return tuple(document for document, _ in best[:k])

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
    self._index, self._slice = index, slice(start, end)
    self.size = end - start
    idf = math.log(1 + (index._number - self.size + 0.5) / (self.size + 0.5))
    self._weight = np.float32(np.float32(boost) * np.float32(idf))

  @property
  def bound(self) -> float:
    """Returns more than the word adds to any document."""
    return float(self._weight) * (1 + 1e-6)

  @property
  def documents(self) -> np.ndarray:
    """Returns the numbers of the documents, rising."""
    return self._index._documents[self._slice]

  def scores(self, which: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Returns what the word adds to its documents; float32 as in Lucene."""
    documents = self.documents[which]
    counts = self._index._counts[self._slice][which].astype(np.float32)
    inverse = self._index._inverse[self._index._bytes[documents]]
    one = np.float32(1)
    return self._weight - self._weight / (one + counts * inverse)


def _rank(
  lists: Iterable[_Postings], k: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (documents, scores) that hold the k best, and ties with the last.

  Rare words first. Once k documents have a score that the words still to come
  cannot reach by themselves, these words, which are in many documents, are
  looked up only for the documents that can still be among the best (MaxScore).
  """
  lists = sorted(lists, key=lambda postings: postings.size)
  totals = np.zeros(number)
  touched = [np.zeros(0, np.int32)]
  rest = sum(postings.bound for postings in lists)
  for n, postings in enumerate(lists):
    if postings.size > _LONG_LIST:
      documents = np.unique(np.concatenate(touched))
      if len(documents) >= k:
        last = np.partition(totals[documents], -k)[-k]
        if last > rest:
          documents = documents[totals[documents] + rest >= last]
          return _finish(lists[n:], documents, totals, k)
    totals[postings.documents] += postings.scores()
    touched.append(postings.documents)
    rest -= postings.bound
  documents = np.unique(np.concatenate(touched))
  return _finish([], documents, totals, k)


def _finish(
  lists: list[_Postings], documents: np.ndarray, totals: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
  for postings in lists:
    places = np.searchsorted(postings.documents, documents)
    places = np.minimum(places, postings.size - 1)
    found = postings.documents[places] == documents
    totals[documents[found]] += postings.scores(places[found])
  scores = totals[documents].astype(np.float32)
  if len(scores) > k:
    last = np.partition(scores, -k)[-k]
    documents, scores = documents[scores >= last], scores[scores >= last]
  return documents, scores
