"""BM25 search with exactly the ranking of the original's Lucene index.

Lucene rounds a document's length to one byte, adds up single-precision scores
and breaks ties by name. Available BM25 packages do none of this and return
other products, so this module has its own index. Postings are plain arrays,
which processes share through a memory map.

For queries with common words, most postings are never read. Similar documents
are stored in blocks. For each word and block, the index has an upper bound of
the word's score; their sum over the query bounds the scores in the block.
Blocks are scored in descending order of this bound, until no remaining block
can contain one of the k best. The result is exact. The method is from Mallia,
Suel, Tonellotto, Faster Learned Sparse Retrieval with Block-Max Pruning, SIGIR
2024.
"""

import array
import collections
import functools
import math
from collections.abc import Sequence

import numpy as np

from envs.webshop import analysis

K1, B = 0.9, 0.4
_BLOCK_SIZE = 8  # documents
# Bounds are stored for words with at least this many postings.
_MIN_BOUND_POSTINGS = 16_384
# A query with at most this many postings is scored without blocks.
_MAX_DIRECT_POSTINGS = 150_000
_FIRST_BLOCKS = 1_024  # blocks to score first; four times as many each time


def _length_from_byte(byte: int) -> int:
  """Returns the document length that Lucene's norm byte stands for."""
  if byte < 24:
    return byte
  bits, shift = (byte - 24) & 7, ((byte - 24) >> 3) - 1
  return 24 + (bits if shift < 0 else (bits | 8) << shift)


_LENGTHS = np.array([_length_from_byte(byte) for byte in range(256)])


class Builder:
  """Collects documents; `arrays` returns their index."""

  def __init__(self) -> None:
    self._term_ids: dict[str, int] = {}  # in order of first appearance
    self._terms = array.array('i')
    self._documents = array.array('i')
    self._counts = array.array('H')
    self._lengths = array.array('i')
    self._clusters: list[str] = []
    self._names: list[bytes] = []

  def add(self, name: str, words: Sequence[str], cluster: str = '') -> None:
    """Adds a document.

    Args:
      name: name of the document; ties of the score are in order of names.
      words: its index terms, with repetitions.
      cluster: documents are stored in the order of this key. Similar documents
        should have similar keys, for speed.
    """
    self._names.append(name.encode('utf-8', 'replace'))
    document = len(self._lengths)
    for term, count in collections.Counter(words).items():
      term_id = self._term_ids.setdefault(term, len(self._term_ids))
      self._terms.append(term_id)
      self._documents.append(document)
      self._counts.append(min(count, 65_535))
    self._lengths.append(len(words))
    self._clusters.append(cluster)

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the arrays of the index, as `Index` takes them."""
    encoded = {term.encode(): n for term, n in self._term_ids.items()}
    vocabulary = sorted(encoded)
    # Term id by first appearance -> id in the sorted vocabulary.
    sorted_id = np.empty(len(vocabulary), np.int32)
    sorted_id[[encoded[term] for term in vocabulary]] = np.arange(
      len(vocabulary)
    )
    added = range(len(self._lengths))
    by_cluster = np.array(
      sorted(added, key=self._clusters.__getitem__), np.int32
    )
    # Document in order of addition -> document in the order of storage.
    stored_id = np.empty_like(by_cluster)
    stored_id[by_cluster] = np.arange(len(by_cluster))
    terms = (
      sorted_id[np.frombuffer(self._terms, np.int32)]
      if vocabulary
      else sorted_id
    )
    documents = stored_id[np.frombuffer(self._documents, np.int32)]
    order = np.argsort(terms.astype(np.int64) * len(stored_id) + documents)
    frequencies = np.bincount(terms, minlength=len(vocabulary))
    lengths = np.frombuffer(self._lengths, np.int32)[by_cluster]
    by_name = np.array(sorted(added, key=self._names.__getitem__), np.int32)
    arrays = {
      'term_text': np.frombuffer(b''.join(vocabulary), np.uint8),
      'term_ends': np.cumsum([0, *map(len, vocabulary)], dtype=np.int64),
      'posting_ends': np.cumsum([0, *frequencies], dtype=np.int64),
      'posting_documents': documents[order],
      'posting_counts': np.frombuffer(self._counts, np.uint16)[order],
      # Lengths as one byte, rounded down as Lucene rounds them.
      'length_bytes': (
        np.searchsorted(_LENGTHS, lengths, side='right') - 1
      ).astype(np.uint8),
      'total_length': np.array([lengths.sum(dtype=np.int64)]),
      'document_numbers': by_cluster,
      'document_numbers_by_name': by_name,
      'document_ranks': np.argsort(by_name).astype(np.int32)[by_cluster],
    }
    return arrays | _bounds(arrays)


def _bounds(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the term ids of common words and their bounds, [words, blocks].

  A bound is stored in units of 1/255 of the word's weight, rounded up.
  """
  index = Index(arrays | _NO_BOUNDS)
  sizes = np.diff(arrays['posting_ends'])
  common = np.flatnonzero(sizes >= _MIN_BOUND_POSTINGS)
  rows = np.zeros((len(common), index.blocks), np.uint8)
  for row, term_id in zip(rows, common, strict=True):
    shares = _Postings(index, int(term_id), 1).best_shares()
    row[:] = np.ceil(shares.astype(np.float64) * 255)
  return {'common_terms': common.astype(np.int32), 'common_bounds': rows}


_NO_BOUNDS = {
  'common_terms': np.zeros(0, np.int32),
  'common_bounds': np.zeros((0, 0), np.uint8),
}


class Index:
  """A search index: ranks documents for a query.

  Args:
    arrays: arrays from `Builder.arrays`, in memory or memory-mapped.
  """

  def __init__(self, arrays: dict[str, np.ndarray]):
    self._text = memoryview(arrays['term_text'])
    self._text_ends = memoryview(arrays['term_ends'])
    self._posting_ends = arrays['posting_ends']
    self._documents = arrays['posting_documents']
    self._counts = arrays['posting_counts']
    self._length_bytes = arrays['length_bytes']
    # Document in the order of storage -> in the order of addition.
    self._added_ids = arrays['document_numbers']
    self._ranks = arrays['document_ranks']
    self._bounds = arrays['common_bounds']
    self._bound_row_of_term = {
      term_id: row
      for row, term_id in enumerate(arrays['common_terms'].tolist())
    }
    self._size = len(self._length_bytes)
    self.blocks = -(-self._size // _BLOCK_SIZE)
    average = int(arrays['total_length'][0]) / max(self._size, 1)
    norms = K1 * ((1 - B) + B * _LENGTHS / max(average, 1e-9))
    self._inverse_norms = (1 / norms).astype(np.float32)

  def search(self, query: str, k: int) -> list[int]:
    """Returns the k best documents that contain a word of the query.

    Documents are identified by the order in which they were added.
    """
    return list(self._search(query, k))

  @functools.lru_cache(4096)  # noqa: B019  (an index lives until the process ends)
  def _search(self, query: str, k: int) -> tuple[int, ...]:
    counts = collections.Counter(analysis.terms(query))
    lists = []
    for term, boost in counts.items():
      term_id = self._find_term(term.encode())
      if term_id is not None:
        lists.append(_Postings(self, term_id, boost))
    # Both methods below add up rare words first, so that their sums are equal.
    lists.sort(key=lambda postings: postings.size)
    if sum(postings.size for postings in lists) <= _MAX_DIRECT_POSTINGS:
      documents, scores = _score_all(lists, self._size)
    else:
      documents, scores = self._best_blocks(lists, k)
    order, _ = self._best(documents, scores, k)
    return tuple(self._added_ids[order].tolist())

  def _best(
    self, documents: np.ndarray, scores: np.ndarray, k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (documents, scores) of the k best, in descending order."""
    if len(scores) > k:
      threshold = np.partition(scores, -k)[-k]
      better, ties = np.flatnonzero(scores > threshold), scores == threshold
      ties = np.flatnonzero(ties)
      num_ties = k - len(better)
      if len(ties) > num_ties:
        ranks = self._ranks[documents[ties]]
        ties = ties[np.argpartition(ranks, num_ties - 1)[:num_ties]]
      kept = np.concatenate((better, ties))
      documents, scores = documents[kept], scores[kept]
    order = np.lexsort((self._ranks[documents], -scores))
    return documents[order], scores[order]

  def _best_blocks(
    self, lists: Sequence['_Postings'], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (documents, scores) of the k best; scores promising blocks only.

    Args:
      lists: postings of the query's words.
      k: number of documents.
    """
    bounds = np.zeros(self.blocks, np.float32)
    for postings in lists:
      bounds += postings.bounds()
    bounds *= np.float32(1 + 1e-5)  # exceeds the rounding error of the sum
    remaining = np.flatnonzero(bounds).astype(np.int32)
    documents, scores = np.zeros(0, np.int32), np.zeros(0, np.float32)
    size = _FIRST_BLOCKS
    while len(remaining):
      if len(remaining) > size:
        order = np.argpartition(-bounds[remaining], size)
        blocks = np.sort(remaining[order[:size]])
        remaining = remaining[order[size:]]
      else:
        blocks, remaining = np.sort(remaining), remaining[:0]
      new_documents, new_scores = _score_blocks(lists, blocks)
      documents = np.concatenate((documents, new_documents))
      scores = np.concatenate((scores, new_scores))
      documents, scores = self._best(documents, scores, k)
      if len(scores) == k:
        remaining = remaining[bounds[remaining] >= scores[-1]]
      size *= 4
    return documents, scores

  def documents_with(self, word: str) -> np.ndarray:
    """Returns the documents that contain a word, in the order of storage."""
    term_id = self._find_term(word.encode())
    if term_id is None:
      return np.zeros(0, np.int32)
    start, end = self._posting_ends[term_id : term_id + 2]
    return self._added_ids[self._documents[start:end]]

  def _term(self, term_id: int) -> bytes:
    start, end = self._text_ends[term_id], self._text_ends[term_id + 1]
    return bytes(self._text[start:end])

  @functools.lru_cache(1 << 16)  # noqa: B019
  def _find_term(self, term: bytes) -> int | None:
    """Returns the id of a term, by binary search; None if it is unknown."""
    low, high = 0, len(self._text_ends) - 1
    while low < high:
      middle = (low + high) // 2
      if self._term(middle) < term:
        low = middle + 1
      else:
        high = middle
    exists = low < len(self._text_ends) - 1 and self._term(low) == term
    return low if exists else None


class _Postings:
  """The documents that contain one word of a query, with the word's scores.

  Args:
    index: the index.
    term_id: id of the word.
    boost: how often the word occurs in the query.
  """

  def __init__(self, index: Index, term_id: int, boost: int):
    start, end = (int(n) for n in index._posting_ends[term_id : term_id + 2])
    self._index, self._term_id = index, term_id
    self._documents = index._documents[start:end]
    self._counts = index._counts[start:end]
    self.size = end - start
    idf = math.log(1 + (index._size - self.size + 0.5) / (self.size + 0.5))
    self._weight = np.float32(np.float32(boost) * np.float32(idf))

  def scores(
    self, postings: np.ndarray | slice = slice(None)
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (documents, the word's scores in them); float32 as in Lucene.

    Args:
      postings: which postings; all by default.
    """
    documents = self._documents[postings]
    counts = self._counts[postings].astype(np.float32)
    inverse = self._index._inverse_norms[self._index._length_bytes[documents]]
    one = np.float32(1)
    return documents, self._weight - self._weight / (one + counts * inverse)

  def scores_in(
    self, blocks: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (positions in `blocks`, documents, scores) of the postings there.

    Args:
      blocks: indices of blocks, ascending. [b] int32
    """
    ends = np.concatenate((blocks, blocks + 1)) * np.int32(_BLOCK_SIZE)
    starts, ends = np.searchsorted(self._documents, ends).reshape(2, -1)
    sizes = ends - starts
    positions = np.repeat(np.arange(len(blocks)), sizes)
    offsets = np.cumsum(sizes) - sizes
    postings = np.arange(len(positions)) + (starts - offsets)[positions]
    return positions, *self.scores(postings)

  def best_shares(self) -> np.ndarray:
    """Returns each block's best score divided by the weight, [blocks]."""
    documents, scores = self.scores()
    blocks = documents // _BLOCK_SIZE
    first = np.flatnonzero(np.diff(blocks, prepend=-1))
    shares = np.zeros(self._index.blocks, np.float32)
    shares[blocks[first]] = np.maximum.reduceat(scores, first) / self._weight
    return shares

  def bounds(self) -> np.ndarray:
    """Returns an upper bound of the word's score in each block, [blocks]."""
    row = self._index._bound_row_of_term.get(self._term_id)
    if row is None:
      return self.best_shares() * self._weight
    return self._index._bounds[row] * (self._weight / np.float32(255))


def _score_all(
  lists: Sequence[_Postings], num_documents: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (documents, scores) of all documents with a word of the query."""
  totals = np.zeros(num_documents)
  for postings in lists:
    documents, scores = postings.scores()
    totals[documents] += scores
  documents = np.flatnonzero(totals)
  return documents, totals[documents].astype(np.float32)


def _score_blocks(
  lists: Sequence[_Postings], blocks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (documents, scores) of the documents in some blocks."""
  totals = np.zeros(len(blocks) * _BLOCK_SIZE)
  for postings in lists:
    positions, documents, scores = postings.scores_in(blocks)
    totals[positions * _BLOCK_SIZE + documents % _BLOCK_SIZE] += scores
  hits = np.flatnonzero(totals)
  first_documents = blocks[hits // _BLOCK_SIZE] * _BLOCK_SIZE
  documents = first_documents + hits % _BLOCK_SIZE
  return documents, totals[hits].astype(np.float32)
