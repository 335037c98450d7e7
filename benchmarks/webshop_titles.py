"""How much of WebShop's reward hangs on the tagger of titles.

    python benchmarks/webshop_titles.py --data_dir DIR

The original tags with a spaCy model that is often not at hand. Prints, for
random purchases of a wrong product, in how many the type part of the reward
would be another if the stand-in tagged otherwise: whole titles rather than
word by word, and, worse than any tagger, every word and sign a noun.
"""

import argparse
import functools
import types
from collections import defaultdict

import numpy as np

from envs.webshop import products, reward, titles


def _whole(title: str) -> tuple[str, ...]:
  """Returns the nouns of a title that is read as one text."""
  from textblob import en

  found = en.parser.find_tags(titles.words(title))
  return tuple(word.lower() for word, tag in found if tag.startswith('NN'))


def _every(title: str) -> tuple[str, ...]:
  return tuple(word.lower() for word in titles.words(title))


def _types(pairs: list[tuple], tagger) -> np.ndarray:
  """Returns the type part of each (bought, wanted)."""
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

  queries = [found for found in by_query.values() if len(found) > 1]
  sizes = np.array([len(found) for found in queries])
  shares = sizes / sizes.sum()

  def same_query() -> tuple[int, int]:
    found = queries[rng.choice(len(queries), p=shares)]
    bought, wanted = rng.choice(found, 2, replace=False)
    return bought, wanted

  print('| wrong product from | tagged otherwise | type differs | 1 or not |')
  print('|---|---|---|---|')
  for where, draw in (('anywhere', anywhere), ('the same query', same_query)):
    numbers = [draw() for _ in range(options.pairs)]
    pairs = [(shop[bought], wishes[wanted]) for bought, wanted in numbers]
    ours = _types(pairs, titles.tagger())
    for name, tagger in (('whole titles', _whole), ('every word', _every)):
      other = _types(pairs, tagger)
      differs, one = ours != other, (ours == 1) != (other == 1)
      print(f'| {where} | {name} | {differs.mean():.1%} | {one.mean():.1%} |')


if __name__ == '__main__':
  main()
