"""Terms by hand; ranks against the formula written out slowly."""

import collections
import math

import numpy as np
import pytest

from envs.webshop import analysis, search


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ("Women's T-Shirts", ['women', 't', 'shirt']),
    # Letters are joined by . : ' and digits by . , but not at an end.
    ('U.S.A. 3.5mm 1,000.50, a:b', ['u.s.a', '3.5mm', '1,000.50', 'a:b']),
    ('wi-fi snake_case _x_ ___', ['wi', 'fi', 'snake_cas', '_x_']),
    ('the cats are ON a mat', ['cat', 'mat']),
    # The author's departures from the published stemmer; short words stay.
    ('possibly technology geology as is us', 'possibl technolog geologi us'),
    ('❤ ★ Brand® ☆ 12"', ['❤', '★', 'brand', '®', '12']),
    ('锅巴 ひら カタカナ', ['锅', '巴', 'ひ', 'ら', 'カタカナ']),
    ("dogs’ dog’s dog'S", ['dog', 'dog', 'dog']),
    ('', []),
  ],
)
def test_terms(text, expected):
  if isinstance(expected, str):
    expected = expected.split()
  assert analysis.terms(text) == expected


def test_lengths_are_rounded_as_lucene_rounds_them():
  builder = search.Builder()
  for length in (1, 23, 24, 39, 40, 41, 42, 107, 1_000):
    builder.add(f'{length:04}', ['word'] * length)
  rounded = search._LENGTHS[builder.arrays()['length_bytes']]
  # Exact to 39; from there four significant bits of what is above 24.
  np.testing.assert_array_equal(rounded, [1, 23, 24, 39, 40, 40, 42, 104, 984])


def random_texts(seed, number, words):
  rng = np.random.default_rng(seed)
  # Words of very different frequency, as in any language.
  odds = 1 / np.arange(1, words + 1)
  for _ in range(number):
    chosen = rng.choice(words, size=rng.integers(1, 30), p=odds / odds.sum())
    yield ' '.join(f'w{n}' for n in chosen)


def build(texts):
  builder = search.Builder()
  names = [f'N{n % 97:02d}{n:05d}' for n in range(len(texts))]
  for name, text in zip(names, texts, strict=True):
    # Of a kind that has to do with the text, or with nothing.
    builder.add(name, analysis.terms(text), text[:3] + name[:2])
  return search.Index(builder.arrays()), names


def slowly(texts, names, query, k):
  documents = [collections.Counter(text.split()) for text in texts]
  total = sum(sum(document.values()) for document in documents)
  average = total / len(texts)
  f = np.float32
  scores = {}
  for n, document in enumerate(documents):
    length = sum(document.values())
    norm = f(1 / (0.9 * (0.6 + 0.4 * length / average)))
    score = 0.0
    for word, boost in collections.Counter(query.split()).items():
      df = sum(word in other for other in documents)
      if word in document:
        idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
        weight = f(f(boost) * f(idf))
        score += float(weight - weight / (f(1) + f(document[word]) * norm))
    if score:
      scores[n] = f(score)
  return sorted(scores, key=lambda n: (-scores[n], names[n]))[:k]


@pytest.mark.parametrize('common', [0, 30, 10**9])
@pytest.mark.parametrize('seed', range(3))
def test_ranks_by_the_formula(seed, common, monkeypatch):
  # By blocks, with stored bounds of all, some, and no words.
  monkeypatch.setattr(search, '_FEW', common if common > 10**6 else 0)
  monkeypatch.setattr(search, '_COMMON', common)
  monkeypatch.setattr(search, '_BLOCK', 4)
  monkeypatch.setattr(search, '_FIRST', 2)
  texts = list(random_texts(seed, 300, 60))
  index, names = build(texts)
  for query in random_texts(seed + 100, 40, 80):
    assert index.search(query, 10) == slowly(texts, names, query, 10), query


def test_ties_go_to_the_smaller_name():
  index, names = build(['same words'] * 200)
  found = index.search('same', 50)
  assert found == sorted(range(200), key=lambda n: names[n])[:50]


def test_unknown_and_stop_words_find_nothing():
  index, _ = build(['one two', 'two three'])
  assert index.search('the', 50) == []
  assert index.search('zebra', 50) == []
  assert index.search('zebra two', 50) == [0, 1]
  assert index.search('zzzzzz aaaaaa one', 50) == [0]
