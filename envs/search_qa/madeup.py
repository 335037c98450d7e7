"""Generates a corpus of invented facts, and questions about them.

People are born in towns, towns are in countries, countries have capitals, and
people write books. No model can know the answers. A question needs one to three
searches: each passage names the title of the next one. Each question is about a
person or the author of a book, and the people of the two splits differ, so that
training does not tell the answers in the test. Names of people and titles of
books are pairs of words, most of which occur in both splits. The files have the
format of `corpus.py` and are a function of the arguments.
"""

import json
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from envs.search_qa import corpus

_FIRST = tuple('Bal Bren Cor Dal Dor El Fen Gar Hal Jor Kel Lor Mar'.split())
_MIDDLE = tuple('a e i o u an el ir om us'.split())
_PERSON = tuple('bek dan kin lis mir nas rik tan ven wyn'.split())
_TOWN = tuple('burg den ford gate holm mouth stead vale wick'.split())
_COUNTRY = tuple('avia estan ia land mark onia ora una'.split())
_SURNAME = (_FIRST, _MIDDLE, _PERSON)
_JOBS = ('painter', 'botanist', 'composer', 'sailor', 'historian', 'judge')
_BOOKS = (
  *('Dreams', 'Letters', 'Poems', 'Riddles'),
  *('Songs', 'Tales', 'Travels', 'Voyages'),
)
_SIDES = ('north', 'south', 'east', 'west')
_TEST_SHARE = 5  # the questions about one person in 5 are in the test split
_PEOPLE_PER_TOWN, _TOWNS_PER_COUNTRY = 3, 4
_FIRST_NAMES = 24
_PEOPLE_PER_SURNAME = 5


def write(
  folder: pathlib.Path, *, num_people: int = 300, seed: int = 0
) -> None:
  """Writes corpus.jsonl, train.jsonl and test.jsonl into a folder.

  Args:
    folder: an existing folder.
    num_people: number of people; the numbers of towns, countries, books and
      questions follow from it.
    seed: seed of the names and facts.
  """
  rng = np.random.default_rng(seed)
  world = _World(rng, num_people)
  passages = list(world.passages())
  questions = list(world.questions())
  _write(
    folder / corpus.CORPUS,
    [
      {'id': str(n), 'title': title, 'text': text}
      for n, (title, text) in enumerate(
        passages[index] for index in rng.permutation(len(passages))
      )
    ],
  )
  test_people = rng.permutation(num_people)[: num_people // _TEST_SHARE]
  by_split: dict[str, list[dict]] = {'test': [], 'train': []}
  for index in rng.permutation(len(questions)):
    person, question = questions[index]
    records = by_split['test' if person in test_people else 'train']
    records.append(question)
  for split, records in by_split.items():
    numbered = [{'id': f'{split}_{n}', **x} for n, x in enumerate(records)]
    _write(folder / f'{split}.jsonl', numbered)


def check_options(*, num_people: int = 300, seed: int = 0) -> None:
  """Raises ValueError, in one line, if an option of `write` is invalid."""
  if seed < 0:
    raise ValueError(f'env.generator.seed={seed}: must be at least 0')
  if not 20 <= num_people <= 1_000:
    raise ValueError(
      f'env.generator.num_people={num_people}: must be from 20 to 1,000'
    )


class _World:
  """The invented facts; people, towns, countries and books by index."""

  def __init__(self, rng: np.random.Generator, num_people: int):
    num_towns = num_people // _PEOPLE_PER_TOWN
    num_countries = num_towns // _TOWNS_PER_COUNTRY
    self.towns = _draw_names(rng, num_towns, _FIRST, _MIDDLE, _TOWN)
    self.countries = _draw_names(rng, num_countries, _FIRST, _COUNTRY)
    first_names = _draw_names(rng, _FIRST_NAMES, _FIRST, _PERSON)
    num_words = num_people // _PEOPLE_PER_SURNAME
    surnames = _draw_names(rng, num_words, *_SURNAME)
    self.people = _draw_names(rng, num_people, first_names, (' ',), surnames)
    words = _draw_names(rng, num_words, _FIRST, _MIDDLE, _MIDDLE, _PERSON)
    titles = (('The ',), words, (' ',), _BOOKS)
    self.books = _draw_names(rng, num_people, *titles)
    self.born = rng.integers(num_towns, size=num_people)
    # Town i is the capital of country i; the other towns are in any country.
    other_towns = rng.integers(num_countries, size=num_towns - num_countries)
    self.country = np.concatenate([np.arange(num_countries), other_towns])
    self.job = rng.integers(len(_JOBS), size=num_people)
    self.side = rng.integers(len(_SIDES), size=num_towns)
    self.author = rng.permutation(num_people)

  def passages(self) -> Iterator[tuple[str, str]]:
    """Yields (title, text) of all passages."""
    for n, name in enumerate(self.people):
      job, town = _JOBS[self.job[n]], self.towns[self.born[n]]
      yield name, f'{name} was a {job}, born in the town of {town}.'
    for n, name in enumerate(self.towns):
      country, side = self.countries[self.country[n]], _SIDES[self.side[n]]
      yield name, f'{name} is a town in the {side} of {country}.'
    for n, name in enumerate(self.countries):
      yield name, f'{name} is a country. Its capital is {self.towns[n]}.'
    for n, name in enumerate(self.books):
      yield name, f'{name} is a book written by {self.people[self.author[n]]}.'

  def questions(self) -> Iterator[tuple[int, dict]]:
    """Yields people and questions with answers and the titles to look up."""
    for n, name in enumerate(self.people):
      town = self.towns[self.born[n]]
      country = self.countries[self.country[self.born[n]]]
      yield n, _ask(f'In which town was {name} born?', town, name)
      yield n, _ask(f'In which country was {name} born?', country, name, town)
    for n, book in enumerate(self.books):
      author = int(self.author[n])
      name, town = self.people[author], self.towns[self.born[author]]
      country = self.countries[self.country[self.born[author]]]
      yield author, _ask(f'Who wrote {book}?', name, book)
      yield (
        author,
        _ask(f'In which town was the author of {book} born?', town, book, name),
      )
      yield (
        author,
        _ask(
          f'In which country was the author of {book} born?',
          country,
          *(book, name, town),
        ),
      )


def _ask(question: str, answer: str, *titles: str) -> dict:
  return {
    'question': question,
    'golden_answers': [answer],
    'data_source': f'{len(titles)}_hop',
    'metadata': {'titles': list(titles)},
  }


def _draw_names(
  rng: np.random.Generator, count: int, *parts: Sequence[str]
) -> list[str]:
  """Returns distinct names; each concatenates one choice from every part."""
  names: dict[str, None] = {}
  while len(names) < count:
    names.setdefault(''.join(part[rng.integers(len(part))] for part in parts))
  return list(names)


def _write(path: pathlib.Path, records: list[dict]) -> None:
  lines = (json.dumps(record, ensure_ascii=False) for record in records)
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
