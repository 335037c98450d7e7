"""Benchmark how much WebShop's reward depends on the tagger of titles.

    python benchmarks/webshop_titles.py --data_dir DIR

WebShop tags titles with a spaCy model that is often not available. For random
purchases of a wrong product, prints how often the type part of the reward would
differ with another tagger. One tags complete titles instead of single words.
The other, worse than any real tagger, labels every token a noun.
"""

import argparse
import functools
import types
from collections import defaultdict

import numpy as np

from envs.webshop import products, reward, titles


def _tag_whole_titles(title: str) -> tuple[str, ...]:
  """Returns the nouns of a title that is tagged as one text."""
  from textblob import en

  tags = en.parser.find_tags(titles.words(title))
  return tuple(word.lower() for word, tag in tags if tag.startswith('NN'))


def _tag_every_token(title: str) -> tuple[str, ...]:
  return tuple(word.lower() for word in titles.words(title))


def _type_scores(pairs: list[tuple], tagger) -> np.ndarray:
  """Returns the type score of each pair (bought, wanted)."""
  ours, titles.nouns = titles.nouns, functools.lru_cache(None)(tagger)
  try:
    return np.array([reward.type_score(*pair) for pair in pairs])
  finally:
    titles.nouns = ours


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--data_dir', required=True, help='official files')
  parser.add_argument('--pairs', type=int, default=20_000)
  parser.add_argument('--seed', type=int, default=0)
  options = parser.parse_args()
  catalogue = products.load(options.data_dir)
  shop = [catalogue[n] for n in range(len(catalogue))]
  wishes = [
    types.SimpleNamespace(
      name=p.title, query=p.query, product_category=p.product_category
    )
    for p in shop
  ]
  by_query = defaultdict(list)
  for n, product in enumerate(shop):
    by_query[product.query].append(n)
  rng = np.random.default_rng(options.seed)

  def anywhere() -> tuple[int, int]:
    bought, wanted = rng.choice(len(shop), 2, replace=False)
    return bought, wanted

  queries = [members for members in by_query.values() if len(members) > 1]
  sizes = np.array([len(members) for members in queries])
  shares = sizes / sizes.sum()

  def same_query() -> tuple[int, int]:
    members = queries[rng.choice(len(queries), p=shares)]
    bought, wanted = rng.choice(members, 2, replace=False)
    return bought, wanted

  print('| wrong product from | other tagger | type differs | = 1 differs |')
  print('|---|---|---|---|')
  for source, draw in (('anywhere', anywhere), ('the same query', same_query)):
    draws = [draw() for _ in range(options.pairs)]
    pairs = [(shop[bought], wishes[wanted]) for bought, wanted in draws]
    ours = _type_scores(pairs, titles.tagger())
    for name, tagger in (
      ('whole titles', _tag_whole_titles),
      ('every word', _tag_every_token),
    ):
      other = _type_scores(pairs, tagger)
      differs, crosses_one = ours != other, (ours == 1) != (other == 1)
      print(
        f'| {source} | {name} | {differs.mean():.1%} '
        f'| {crosses_one.mean():.1%} |'
      )


if __name__ == '__main__':
  main()
