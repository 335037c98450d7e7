"""Loads passages (corpus.jsonl) and questions (SPLIT.jsonl) of a data folder.

The format is that of FlashRAG and Search-R1. A line of the corpus is
`{"id": .., "title": .., "text": ..}`, or `{"id": .., "contents": ..}` with the
title in the first line of the contents. A line of a split is
`{"question": .., "golden_answers": [..]}`.

Passages are ranked by BM25 (tantivy). The index is built once, in the cache.
Index and corpus are memory-mapped, so processes share them whatever their size.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from envs import cache, messages

CORPUS = 'corpus.jsonl'
_FORMAT = 1  # version of the index in the cache; increase on every change
_MAX_TIES = 50_000  # passages of equal score to fetch for a stable order
_HEAP_BYTES = 256_000_000  # memory of the index writer


@dataclasses.dataclass(frozen=True)
class Passage:
  """A passage of the corpus."""

  title: str
  text: str


@dataclasses.dataclass(frozen=True)
class Question:
  """A question with its answers.

  Attributes:
    text: the question.
    answers: all correct answers.
    task_type: its data source ('nq', '2_hop', ...), by which success is
      reported.
    titles: titles of the passages that contain the answer, in the order in
      which they are needed; () if unknown.
  """

  text: str
  answers: tuple[str, ...]
  task_type: str
  titles: tuple[str, ...]


class Corpus:
  """The passages of a corpus file, with BM25 search.

  Args:
    path: path of the file.

  Raises:
    ValueError: in one line, if the file is empty or damaged.
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

  def __getitem__(self, index: int) -> Passage:
    start, end = self._offsets[index : index + 2]
    return _parse_passage(self._path, index + 1, bytes(self._lines[start:end]))

  def search(self, query: str, k: int) -> list[Passage]:
    """Returns the at most k best passages; ties are in the corpus' order."""
    tantivy = _tantivy()
    terms = [
      tantivy.Query.term_query(
        self._index.schema, 'text', term, index_option='freq'
      )
      for term in self._analyzer.analyze(query)
    ]
    any_term = tantivy.Query.boolean_query(
      [(tantivy.Occur.Should, term) for term in terms]
    )
    hits, limit = self._searcher.search(any_term, k).hits, k
    # tantivy's order of ties depends on how the index was written. Fetch all
    # passages that tie with the k-th, then sort ties by line number.
    while len(hits) == limit < _MAX_TIES and hits[-1][0] == hits[k - 1][0]:
      limit *= 4
      hits = self._searcher.search(any_term, limit).hits
    ranked = sorted(
      (-score, self._searcher.doc(address)['number'][0])
      for score, address in hits
    )
    return [self[index] for _, index in ranked[:k]]


@functools.lru_cache(maxsize=4)
def _load_corpus(path: pathlib.Path, stamp: tuple) -> Corpus:
  del stamp  # only a key of the cache: a changed file is loaded again
  return Corpus(path)


def passages(folder: pathlib.Path) -> Corpus:
  """Returns the corpus of a folder, shared by all callers of this process."""
  path = _find_file(folder, CORPUS)
  return _load_corpus(path, _stamp(path))


@functools.lru_cache(maxsize=8)
def _load_questions(path: pathlib.Path, stamp: tuple) -> tuple[Question, ...]:
  del stamp  # only a key of the cache: a changed file is loaded again
  with path.open('rb') as lines:
    loaded = tuple(
      _parse_question(path, line_number, line)
      for line_number, line in enumerate(lines, 1)
      if line.strip()
    )
  if not loaded:
    raise _empty(path)
  return loaded


def questions(folder: pathlib.Path, split: str) -> tuple[Question, ...]:
  """Returns the questions of a split.

  Raises:
    ValueError: in one line, if the file is missing, empty or damaged.
  """
  names = sorted(p.stem for p in folder.glob('*.jsonl') if p.name != CORPUS)
  if names and split not in names:
    raise ValueError(
      f'split={split}: no {split}.jsonl in {folder}; must be one of '
      f'{", ".join(names)}'
    )
  path = _find_file(folder, f'{split}.jsonl')
  return _load_questions(path, _stamp(path))


def _empty(path: pathlib.Path) -> ValueError:
  return ValueError(
    f'env.data_dir={path.parent}: {path.name} is empty; must have one JSON '
    'object per line'
  )


def _find_file(folder: pathlib.Path, name: str) -> pathlib.Path:
  path = folder / name
  if not path.is_file():
    raise ValueError(
      f'env.data_dir={folder}: has no {name}; needs {CORPUS}, train.jsonl '
      'and test.jsonl (envs/search_qa/corpus.py), or env.data_dir=generated'
    )
  return path.resolve()


def _stamp(path: pathlib.Path) -> tuple:
  """Returns a key that differs when the file was changed."""
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
  # With one thread, documents are written in the order of the corpus.
  writer = index.writer(_HEAP_BYTES, 1)
  offsets = [0]
  for index_in_file, line in enumerate(_read_lines(path)):
    passage = _parse_passage(path, index_in_file + 1, line)
    text = f'{passage.title}\n{passage.text}'
    writer.add_document(tantivy.Document(text=text, number=index_in_file))
    offsets.append(offsets[-1] + len(line))
  if len(offsets) == 1:
    raise _empty(path)
  writer.commit()
  writer.wait_merging_threads()
  np.save(folder / 'offsets.npy', np.array(offsets))


def _read_lines(path: pathlib.Path) -> Iterator[bytes]:
  with path.open('rb') as lines:
    yield from lines


def _parse_record(path: pathlib.Path, line_number: int, line: bytes) -> dict:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # The latter if it is nested too deep.
    record = None
  if not isinstance(record, dict):
    raise ValueError(
      f'env.data_dir={path.parent}: {path.name}, line {line_number}: not a '
      'JSON object'
    )
  return record


def _parse_passage(
  path: pathlib.Path, line_number: int, line: bytes
) -> Passage:
  record = _parse_record(path, line_number, line)
  if isinstance(record.get('contents'), str):
    title, _, text = _encodable(record['contents']).partition('\n')
    return Passage(title.strip().strip('"'), text.strip())
  title, text = record.get('title'), record.get('text')
  if not isinstance(title, str) or not isinstance(text, str):
    raise ValueError(
      f'env.data_dir={path.parent}: {path.name}, line {line_number}: must have '
      'title and text, or contents'
    )
  return Passage(_encodable(title), _encodable(text))


def _encodable(text: str) -> str:
  """Replaces lone surrogates, halves of damaged emojis, by question marks."""
  return text.encode('utf-8', 'replace').decode()


def _parse_question(
  path: pathlib.Path, line_number: int, line: bytes
) -> Question:
  record = _parse_record(path, line_number, line)
  text, answers = record.get('question'), record.get('golden_answers')
  has_answers = isinstance(answers, list) and answers
  if not isinstance(text, str) or not has_answers:
    raise ValueError(
      f'env.data_dir={path.parent}: {path.name}, line {line_number}: must have '
      'question and golden_answers, a list'
    )
  task_type = _encodable(str(record.get('data_source') or 'all'))
  if not messages.is_name(task_type):
    raise ValueError(
      f'env.data_dir={path.parent}: {path.name}, line {line_number}: '
      f'data_source={task_type!r:.80}; must be 1 to '
      f'{messages.MAX_NAME_CHARS} printable characters'
    )
  metadata = record.get('metadata')
  titles = metadata.get('titles') if isinstance(metadata, dict) else None
  return Question(
    text=_encodable(text),
    answers=tuple(_encodable(str(answer)) for answer in answers),
    task_type=task_type,
    titles=tuple(map(str, titles)) if isinstance(titles, list) else (),
  )
