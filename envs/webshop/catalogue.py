"""Generates shops: products and instructions in WebShop's own file format.

What `generate` returns is what items_shuffle.json and items_ins_v2.json hold,
so that goals, search, pages and rewards are the same code as for the official
products. A shop is a pure function of the arguments. Products come in
families of near-duplicates that differ in one thing each: an attribute, a
value of an option, or the price. Run as a program, it writes the two files:

  python -m envs.webshop.catalogue --out DIR --num_products 1000 --seed 0
"""

import argparse
import dataclasses
import json
import math
import pathlib
import random
import string
from collections.abc import Mapping, Sequence
from typing import TypeVar

from envs.webshop import listings, words

CATEGORIES = tuple(words.DEPARTMENTS)
ITEMS_FILE = 'items_shuffle.json'
INSTRUCTIONS_FILE = 'items_ins_v2.json'

# Shares among the official 1,000 products: of the categories, of the numbers
# of values of an option, of the numbers of attributes of an instruction.
_CATEGORY_WEIGHTS = {
  'beauty': 238,
  'electronics': 229,
  'fashion': 200,
  'garden': 216,
  'grocery': 117,
}
_VALUE_WEIGHTS = {
  2: 21,
  3: 18,
  4: 11,
  5: 16,
  6: 10,
  8: 9,
  10: 7,
  14: 4,
  20: 3,
  30: 1,
}
# How much more seldom than on average somebody wants a product: an exponent of
# `instruction_share`, so that a share of 1 stays 1.
_DISINTEREST = {
  'beauty': 1.1,
  'electronics': 1.5,
  'fashion': 0.5,
  'garden': 0.8,
  'grocery': 1.6,
}
_ATTRIBUTE_WEIGHTS = {2: 43, 3: 27, 4: 17, 5: 4, 6: 5, 7: 3, 8: 1}
# Standard deviation of the logarithm of prices within a category.
_PRICE_SPREAD = 0.9
_OFFICIAL_ASIN = 10
# Shorter product numbers are syllables: a small policy's tokenizer has whole
# ones for them, so that it need not learn to spell.
_CONSONANTS, _VOWELS = 'BCDFGHJKLMNPQRSTVWXZ', 'AEIOU'

_T = TypeVar('_T')
_Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Difficulty:
  """How a shop is to be; the defaults are like the official products.

  Attributes:
    categories: some of CATEGORIES.
    vocabulary: share of every word list that is used, in (0, 1].
    options: fewest and most options of a product; None: as official.
    values: fewest and most values of an option; None: as official.
    attributes: fewest and most attributes of a product, all of them named in
      its instruction; None: as official.
    family: fewest and most near-duplicates that a product has.
    title_words: fewest and most words of a title; the attributes that it
      names may make it longer.
    title_share: how often a title names an attribute, in [0, 1].
    instruction_share: products that somebody wants, in [0, 1].
    max_goals: largest number of goals of a product; bounds its values.
    asin_characters: length of a product's number.
  """

  categories: Sequence[str] = CATEGORIES
  vocabulary: float = 1.0
  options: _Range | None = None
  values: _Range | None = None
  attributes: _Range | None = None
  family: _Range = (0, 1)
  title_words: _Range = (7, 30)
  title_share: float = 0.22
  instruction_share: float = 0.415
  max_goals: int = 60
  asin_characters: int = _OFFICIAL_ASIN

  def __post_init__(self):
    unknown = [name for name in self.categories if name not in CATEGORIES]
    if unknown or not self.categories:
      raise ValueError(
        f'env.generator.categories={tuple(self.categories)}: must be some of '
        f'{", ".join(CATEGORIES)}'
      )
    for name, low, high in (
      ('vocabulary', 0.01, 1.0),
      ('title_share', 0.0, 1.0),
      ('instruction_share', 0.0, 1.0),
      ('max_goals', 1, 10_000),
      ('asin_characters', 3, _OFFICIAL_ASIN),
    ):
      value = getattr(self, name)
      if not low <= value <= high:
        raise ValueError(
          f'env.generator.{name}={value}: must be from {low} to {high}'
        )
    for name, least, most in (
      ('options', 0, 3),
      ('values', 1, 45),
      ('attributes', 1, 8),
      ('family', 0, 100),
      ('title_words', 1, 40),
    ):
      span = getattr(self, name)
      if span is not None and not (
        len(span) == 2 and least <= span[0] <= span[1] <= most
      ):
        raise ValueError(
          f'env.generator.{name}={tuple(span)}: must be (low, high) with '
          f'{least} <= low <= high <= {most}'
        )


def generate(
  *, num_products: int = 2000, seed: int = 0, **difficulty
) -> tuple[list[dict], dict[str, dict]]:
  """Returns the products and the instructions of a shop.

  Args:
    num_products: size of the catalogue.
    seed: of all that is drawn.
    **difficulty: fields of `Difficulty`.

  Returns:
    Records as in items_shuffle.json, and by product number the record as in
    items_ins_v2.json.

  Raises:
    ValueError: in one line, if an argument cannot be used.
  """
  known = [field.name for field in dataclasses.fields(Difficulty)]
  for name in difficulty:
    if name not in known:
      raise ValueError(
        f'env.generator.{name}: unknown option; known: num_products, seed, '
        f'{", ".join(known)}'
      )
  rules = Difficulty(**difficulty)
  # Half of the numbers that there are: the rest is found without long search.
  length = rules.asin_characters
  most = 20 ** ((length + 1) // 2) * 5 ** (length // 2) // 2
  if not 1 <= num_products <= most:
    raise ValueError(
      f'env.generator.num_products={num_products}: must be from 1 to {most} '
      f'with env.generator.asin_characters={length}'
    )
  rng = random.Random(f'webshop {seed}')
  maker = _Maker(rules, rng)
  items, instructions = [], {}
  for draft in maker.drafts(num_products):
    asin = maker.asin()
    items.append(listings.record(draft, asin, rng))
    instructions[asin] = listings.instruction(draft, maker.wanted(draft))
  return items, instructions


class _Maker:
  """Draws products one after another."""

  def __init__(self, rules: Difficulty, rng: random.Random):
    self._rules = rules
    self._rng = rng
    self._asins: set[str] = set()

  def drafts(self, count: int) -> list[listings.Draft]:
    """Returns products in random order, families mixed."""
    drafts: list[listings.Draft] = []
    while len(drafts) < count:
      first = self._draft()
      twins = self._rng.randint(*self._rules.family)
      drafts += [first, *(self._vary(first) for _ in range(twins))]
    del drafts[count:]
    self._rng.shuffle(drafts)
    return drafts

  def asin(self) -> str:
    """Returns a product number that is not taken."""
    length = self._rules.asin_characters
    while True:
      if length == _OFFICIAL_ASIN:
        alphabet = string.digits + string.ascii_uppercase
        asin = 'B0' + ''.join(self._rng.choices(alphabet, k=length - 2))
      else:
        letters = _CONSONANTS, _VOWELS
        asin = ''.join(
          self._rng.choice(letters[place % 2]) for place in range(length)
        )
      if asin not in self._asins:
        self._asins.add(asin)
        return asin

  def wanted(self, draft: listings.Draft) -> Sequence[str]:
    """Returns the attributes of an instruction; none: nobody wants it."""
    share = self._rules.instruction_share ** _DISINTEREST[draft.category]
    if self._rng.random() >= share:
      return ()
    if self._rules.attributes:
      return draft.attributes
    count = min(self._weigh(_ATTRIBUTE_WEIGHTS), len(draft.attributes))
    return self._rng.sample(draft.attributes, count)

  def _cut(self, items: Sequence[_T], least: int = 2) -> Sequence[_T]:
    """Returns the part of a word list that the vocabulary allows."""
    size = math.ceil(len(items) * self._rules.vocabulary)
    return items[: max(least, size)]

  def _weigh(self, weights: Mapping[_T, float]) -> _T:
    return self._rng.choices(list(weights), list(weights.values()))[0]

  def _draft(self) -> listings.Draft:
    rng, rules = self._rng, self._rules
    category = self._weigh(
      {c: w for c, w in _CATEGORY_WEIGHTS.items() if c in rules.categories}
    )
    department = words.DEPARTMENTS[category]
    shelves = [
      (aisle, *shelf)
      for aisle, found in department.aisles.items()
      for shelf in found
    ]
    aisle, shelf, noun = rng.choice(self._cut(shelves))
    attributes = self._attributes(department)
    titled = [a for a in attributes if rng.random() < rules.title_share]
    return listings.Draft(
      category=category,
      aisle=aisle,
      shelf=shelf,
      noun=noun,
      brand=rng.choice(self._cut(words.BRANDS)),
      attributes=attributes,
      titled=frozenset(titled),
      fillers=tuple(rng.sample(words.FILLERS, len(words.FILLERS))),
      title_words=rng.randint(*rules.title_words),
      options=self._options(department),
      price=department.price * math.exp(_PRICE_SPREAD * rng.gauss(0, 1)),
    )

  def _pool(self, department: words.Department) -> list[str]:
    """Returns the attributes in the order in which instructions name them."""
    kinds = (department.qualities, department.parts, department.uses)
    return [a for kind in kinds for a in self._cut(kind)]

  def _attributes(self, department: words.Department) -> tuple[str, ...]:
    if self._rules.attributes:
      count = self._rng.randint(*self._rules.attributes)
    else:
      count = self._weigh(_ATTRIBUTE_WEIGHTS) + self._rng.randint(1, 3)
    pool = self._pool(department)
    chosen = set(self._rng.sample(pool, min(count, len(pool))))
    return tuple(a for a in pool if a in chosen)

  def _options(
    self, department: words.Department
  ) -> dict[str, tuple[str, ...]]:
    rng, rules = self._rng, self._rules
    if rules.options:
      count = rng.randint(*rules.options)
    else:
      count = self._weigh(dict(enumerate(department.option_counts)))
    names = list(department.options)
    # The usual two first: a third is rare.
    chosen = names if count == 3 else rng.sample(names[:2], count)
    options = {}
    combinations = 1
    for name in chosen:
      pool = self._cut(department.options[name], least=3)
      if rules.values:
        size = rng.randint(*rules.values)
      else:
        size = self._weigh(_VALUE_WEIGHTS)
      size = max(1, min(size, len(pool), rules.max_goals // combinations))
      combinations *= size
      places = sorted(rng.sample(range(len(pool)), size))
      options[name] = tuple(pool[place] for place in places)
    return options

  def _vary(self, draft: listings.Draft) -> listings.Draft:
    """Returns a near-duplicate: one thing is different."""
    rng = self._rng
    pool = self._pool(words.DEPARTMENTS[draft.category])
    others = [a for a in pool if a not in draft.attributes]
    long = [name for name, values in draft.options.items() if len(values) > 1]
    changes = ['price', *['attribute'][: len(others)], *['option'][: len(long)]]
    change = rng.choice(changes)
    if change == 'price':
      price = draft.price * rng.uniform(2.0, 3.0)
      return dataclasses.replace(draft, price=price)
    if change == 'option':
      name = rng.choice(long)
      left = list(draft.options[name])
      left.remove(rng.choice(left))
      options = {**draft.options, name: tuple(left)}
      return dataclasses.replace(draft, options=options)
    old, new = rng.choice(draft.attributes), rng.choice(others)
    attributes = tuple(
      a for a in pool if a == new or a in draft.attributes and a != old
    )
    titled = frozenset(new if a == old else a for a in draft.titled)
    return dataclasses.replace(draft, attributes=attributes, titled=titled)


def write(
  folder: str, items: list[dict], instructions: dict[str, dict]
) -> pathlib.Path:
  """Writes a shop as the two files of the official format; returns where.

  Raises:
    ValueError: if there is a shop already.
  """
  path = pathlib.Path(folder).expanduser()
  if (path / ITEMS_FILE).exists():
    raise ValueError(f'--out={folder}: {ITEMS_FILE} is there already')
  path.mkdir(parents=True, exist_ok=True)
  (path / ITEMS_FILE).write_text(json.dumps(items), encoding='utf-8')
  (path / INSTRUCTIONS_FILE).write_text(
    json.dumps(instructions), encoding='utf-8'
  )
  return path


def main(argv: Sequence[str] | None = None) -> None:
  """Writes a generated shop; see --help."""
  parser = argparse.ArgumentParser(
    prog='python -m envs.webshop.catalogue',
    description='Generates a shop in the format of the WebShop files.',
  )
  parser.add_argument('--out', required=True, help='folder to write to')
  parser.add_argument('--num_products', type=int, default=2000)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--categories', nargs='+', default=list(CATEGORIES))
  options = vars(parser.parse_args(argv))
  out = options.pop('out')
  try:
    items, instructions = generate(**options)
    path = write(out, items, instructions)
  except ValueError as error:
    parser.error(str(error))
  print(f'{len(items)} products in {path}')


if __name__ == '__main__':
  main()
