"""Tests of index terms, and of the ranking against a slow reference."""

import collections
import math

import numpy as np
import pytest

from envs.webshop import analysis, search


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ("Women's T-Shirts", ['women', 't', 'shirt']),
    # . : ' join letters, and . , join digits, except at the end of a word.
    ('U.S.A. 3.5mm 1,000.50, a:b', ['u.s.a', '3.5mm', '1,000.50', 'a:b']),
    ('wi-fi snake_case _x_ ___', ['wi', 'fi', 'snake_cas', '_x_']),
    ('the cats are ON a mat', ['cat', 'mat']),
    # Porter's later changes of his stemmer; short words are unchanged.
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


def test_a_long_run_of_joiners_is_no_term():
  # Time that is quadratic in their number would be minutes.
  assert analysis.terms(f'a {"_" * 100_000} b_{"_" * 9}') == ['b_' + '_' * 9]


def test_lengths_are_rounded_like_lucenes():
  builder = search.Builder()
  for length in (1, 23, 24, 39, 40, 41, 42, 107, 1_000):
    builder.add(f'{length:04}', ['word'] * length)
  rounded = search._LENGTHS[builder.arrays()['length_bytes']]
  # Exact up to 39; above, the excess over 24 has four significant bits.
  np.testing.assert_array_equal(rounded, [1, 23, 24, 39, 40, 40, 42, 104, 984])


def random_texts(seed, num_texts, words):
  rng = np.random.default_rng(seed)
  # Zipf's law: the frequencies of words differ greatly, as in natural text.
  odds = 1 / np.arange(1, words + 1)
  for _ in range(num_texts):
    chosen = rng.choice(words, size=rng.integers(1, 30), p=odds / odds.sum())
    yield ' '.join(f'w{n}' for n in chosen)


def build(texts):
  builder = search.Builder()
  names = [f'N{n % 97:02d}{n:05d}' for n in range(len(texts))]
  for name, text in zip(names, texts, strict=True):
    # Clusters that depend partly on the text, partly on the name.
    builder.add(name, analysis.terms(text), text[:3] + name[:2])
  return search.Index(builder.arrays()), names


def reference_search(texts, names, query, k):
  documents = [collections.Counter(text.split()) for text in texts]
  lengths = [sum(document.values()) for document in documents]
  average = sum(lengths) / len(texts)
  boosts = collections.Counter(query.split())
  frequencies = {
    word: sum(word in document for document in documents) for word in boosts
  }
  f = np.float32
  scores = {}
  for n, document in enumerate(documents):
    norm = f(1 / (0.9 * (0.6 + 0.4 * lengths[n] / average)))
    score = 0.0
    for word, boost in boosts.items():
      if word in document:
        df = frequencies[word]
        idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
        weight = f(f(boost) * f(idf))
        score += float(weight - weight / (f(1) + f(document[word]) * norm))
    if score:
      scores[n] = f(score)
  return sorted(scores, key=lambda n: (-scores[n], names[n]))[:k]


@pytest.mark.parametrize('common', [0, 30, 10**9])
@pytest.mark.parametrize('seed', range(3))
def test_ranks_equal_the_reference(seed, common, monkeypatch):
  # By blocks with stored bounds for all words, by blocks with bounds for some
  # words, and without blocks.
  direct = common if common > 10**6 else 0
  monkeypatch.setattr(search, '_MAX_DIRECT_POSTINGS', direct)
  monkeypatch.setattr(search, '_MIN_BOUND_POSTINGS', common)
  monkeypatch.setattr(search, '_BLOCK_SIZE', 4)
  monkeypatch.setattr(search, '_FIRST_BLOCKS', 2)
  texts = list(random_texts(seed, 300, 60))
  index, names = build(texts)
  for query in random_texts(seed + 100, 40, 80):
    assert index.search(query, 10) == reference_search(
      texts, names, query, 10
    ), query


def test_ties_are_in_order_of_names():
  index, names = build(['same words'] * 200)
  results = index.search('same', 50)
  assert results == sorted(range(200), key=lambda n: names[n])[:50]


def test_blocks_that_may_hold_better_names_are_scored(monkeypatch):
  monkeypatch.setattr(search, '_MAX_DIRECT_POSTINGS', 0)
  monkeypatch.setattr(search, '_MIN_BOUND_POSTINGS', 1)
  monkeypatch.setattr(search, '_FIRST_BLOCKS', 2)
  builder = search.Builder()
  for n in reversed(range(200)):
    builder.add(f'{n:03}', ['same'] * 2)
  index = search.Index(builder.arrays())
  assert index.search('same', 50) == list(range(199, 149, -1))


def test_a_word_may_occur_more_often_than_a_count_holds():
  index, _ = build(['book ' * 2**16, 'book'])
  assert sorted(index.search('book', 2)) == [0, 1]


def test_unknown_and_stop_words_find_nothing():
  index, _ = build(['one two', 'two three'])
  assert index.search('the', 50) == []
  assert index.search('zebra', 50) == []
  assert index.search('zebra two', 50) == [0, 1]
  assert index.search('zzzzzz aaaaaa one', 50) == [0]
