"""Passages and questions of a folder: corpus.jsonl and SPLIT.jsonl.

The format of FlashRAG and Search-R1. A line of the corpus is `{"id": ..,
"title": .., "text": ..}`, or `{"id": .., "contents": ..}` with the title in the
first line; one of a split `{"question": .., "golden_answers": [..]}`. Passages
are searched by BM25 (tantivy). The index is made once, in the cache, and mapped
like the corpus itself, so that processes share both however large they are.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from envs import cache

CORPUS = 'corpus.jsonl'
_FORMAT = 1  # of the index; raised when it changes
_MAX_TIES = 50_000  # passages, equally good, that are looked through
_HEAP_BYTES = 256_000_000  # of the index while it is made


@dataclasses.dataclass(frozen=True)
class Passage:
  """What a search finds."""

  title: str
  text: str


@dataclasses.dataclass(frozen=True)
class Question:
  """What is to be answered.

  Attributes:
    text: the question.
    answers: all that are right.
    kind: of which source or sort it is, by which success is reported.
    titles: of the passages that answer it, in the order they are needed;
      () where that is not known.
  """

  text: str
  answers: tuple[str, ...]
  kind: str
  titles: tuple[str, ...]


class Corpus:
  """The passages of a file, searched by BM25.

  Args:
    path: of the file.

  Raises:
    ValueError: in one line, if it cannot be used.
  """

  def __init__(self, path: pathlib.Path):
    tantivy = _tantivy()
    folder = cache.ensure(
      cache.place('search', _FORMAT, tantivy.__version__, _stamp(path)),
      functools.partial(_write_index, path),
    )
    self._path = path
    self._offsets = np.load(folder / 'offsets.npy', mmap_mode='r')
    self._lines = np.memmap(path, np.uint8, mode='r')
    self._index = tantivy.Index.open(str(folder / 'index'))
    self._searcher = self._index.searcher()
    self._analyzer = _analyzer()

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, number: int) -> Passage:
    begin, end = self._offsets[number : number + 2]
    return _passage(self._path, number + 1, bytes(self._lines[begin:end]))

  def search(self, query: str, k: int) -> list[Passage]:
    """Returns the best passages, at most k; of equal ones the first."""
    tantivy = _tantivy()
    terms = [
      tantivy.Query.term_query(
        self._index.schema, 'text', term, index_option='freq'
      )
      for term in self._analyzer.analyze(query)
    ]
    wanted = tantivy.Query.boolean_query(
      [(tantivy.Occur.Should, term) for term in terms]
    )
    hits, limit = self._searcher.search(wanted, k).hits, k
    # Until the last that is as good as the k-th is there: in which order equal
    # ones come depends on how the index was written.
    while len(hits) == limit < _MAX_TIES and hits[-1][0] == hits[k - 1][0]:
      limit *= 4
      hits = self._searcher.search(wanted, limit).hits
    ranked = sorted(
      (-score, self._searcher.doc(address)['number'][0])
      for score, address in hits
    )
    return [self[number] for _, number in ranked[:k]]


@functools.lru_cache(maxsize=4)
def _shared(path: pathlib.Path, stamp: tuple) -> Corpus:
  del stamp
  return Corpus(path)


def passages(folder: pathlib.Path) -> Corpus:
  """Returns the corpus of a folder, one for all in this process."""
  path = _existing(folder, CORPUS)
  return _shared(path, _stamp(path))


@functools.lru_cache(maxsize=8)
def _questions(path: pathlib.Path, stamp: tuple) -> tuple[Question, ...]:
  del stamp
  with path.open('rb') as lines:
    found = tuple(
      _question(path, number, line)
      for number, line in enumerate(lines, 1)
      if line.strip()
    )
  if not found:
    raise ValueError(f'env.data_dir={path.parent}: {path.name} is empty')
  return found


def questions(folder: pathlib.Path, split: str) -> tuple[Question, ...]:
  """Returns the questions of a split.

  Raises:
    ValueError: in one line, if there is no such file or it cannot be used.
  """
  names = sorted(p.stem for p in folder.glob('*.jsonl') if p.name != CORPUS)
  if names and split not in names:
    raise ValueError(
      f'split={split}: no {split}.jsonl in {folder}; must be one of '
      f'{", ".join(names)}'
    )
  path = _existing(folder, f'{split}.jsonl')
  return _questions(path, _stamp(path))


def _existing(folder: pathlib.Path, name: str) -> pathlib.Path:
  path = folder / name
  if not path.is_file():
    raise ValueError(
      f'env.data_dir={folder}: no {name} there; needs {CORPUS}, train.jsonl '
      'and test.jsonl (envs/search_qa/corpus.py), or env.data_dir=generated'
    )
  return path.resolve()


def _stamp(path: pathlib.Path) -> tuple:
  status = path.stat()
  return str(path), status.st_size, status.st_mtime_ns


def _tantivy() -> Any:
  try:
    import tantivy
  except ImportError as error:
    raise ValueError(
      'env.name=search_qa: tantivy is not installed; run pip install -e '
      "'.[search]'"
    ) from error
  return tantivy


def _analyzer() -> Any:
  tantivy = _tantivy()
  return (
    tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    .filter(tantivy.Filter.remove_long(40))
    .filter(tantivy.Filter.lowercase())
    .filter(tantivy.Filter.stemmer('english'))
    .build()
  )


def _write_index(path: pathlib.Path, folder: pathlib.Path) -> None:
  tantivy = _tantivy()
  schema = (
    tantivy.SchemaBuilder()
    .add_text_field('text', tokenizer_name='english', index_option='freq')
    .add_unsigned_field('number', stored=True, indexed=False)
    .build()
  )
  (folder / 'index').mkdir()
  index = tantivy.Index(schema, path=str(folder / 'index'))
  index.register_tokenizer('english', _analyzer())
  # One thread: passages keep their order.
  writer = index.writer(_HEAP_BYTES, 1)
  offsets = [0]
  for number, line in enumerate(_lines(path)):
    passage = _passage(path, number + 1, line)
    text = f'{passage.title}\n{passage.text}'
    writer.add_document(tantivy.Document(text=text, number=number))
    offsets.append(offsets[-1] + len(line))
  if len(offsets) == 1:
    raise ValueError(f'env.data_dir={path.parent}: {path.name} is empty')
  writer.commit()
  writer.wait_merging_threads()
  np.save(folder / 'offsets.npy', np.array(offsets))


def _lines(path: pathlib.Path) -> Iterator[bytes]:
  with path.open('rb') as lines:
    yield from lines


def _record(path: pathlib.Path, number: int, line: bytes) -> dict:
  try:
    record = json.loads(line)
  except ValueError:
    record = None
  if not isinstance(record, dict):
    raise ValueError(
      f'env.data_dir={path.parent}: {path.name}, line {number}: not a JSON '
      'object'
    )
  return record


def _passage(path: pathlib.Path, number: int, line: bytes) -> Passage:
  record = _record(path, number, line)
  if isinstance(record.get('contents'), str):
    title, _, text = record['contents'].partition('\n')
    return Passage(title.strip().strip('"'), text.strip())
  title, text = record.get('title'), record.get('text')
  if not isinstance(title, str) or not isinstance(text, str):
    raise ValueError(
      f'env.data_dir={path.parent}: {path.name}, line {number}: must have '
      'title and text, or contents'
    )
  return Passage(title, text)


def _question(path: pathlib.Path, number: int, line: bytes) -> Question:
  record = _record(path, number, line)
  text, answers = record.get('question'), record.get('golden_answers')
  told = isinstance(answers, list) and answers
  if not isinstance(text, str) or not told:
    raise ValueError(
      f'env.data_dir={path.parent}: {path.name}, line {number}: must have '
      'question and golden_answers, a list'
    )
  metadata = record.get('metadata')
  titles = metadata.get('titles') if isinstance(metadata, dict) else None
  return Question(
    text=text,
    answers=tuple(map(str, answers)),
    kind=str(record.get('data_source', 'all')),
    titles=tuple(titles or ()),
  )
