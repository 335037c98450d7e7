"""Generates shops: products and instructions in WebShop's file format.

`generate` returns the contents of items_shuffle.json and items_ins_v2.json, so
that goals, search, pages and rewards use the same code as for the official
products. A shop is a pure function of the arguments.

Products come in families of near-duplicates. Each duplicate differs from the
first product in one attribute, one value of an option, or the price. Run as a
program, this module writes the two files:

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

# Frequencies in the 1,000 official products: categories; number of values of
# an option; below, number of attributes of an instruction.
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
# Exponents of `instruction_share`: the share of products with an instruction
# differs by category. As exponents, they keep a share of 1 at 1.
_SHARE_EXPONENTS = {
  'beauty': 1.1,
  'electronics': 1.5,
  'fashion': 0.5,
  'garden': 0.8,
  'grocery': 1.6,
}
_ATTRIBUTE_WEIGHTS = {2: 43, 3: 27, 4: 17, 5: 4, 6: 5, 7: 3, 8: 1}
# Standard deviation of the logarithm of prices within a category.
_PRICE_SPREAD = 0.9
_OFFICIAL_ASIN = 10  # characters
# Shorter ids consist of syllables, which are single tokens of a small policy's
# tokenizer. The policy then need not learn to spell.
_CONSONANTS, _VOWELS = 'BCDFGHJKLMNPQRSTVWXZ', 'AEIOU'

_T = TypeVar('_T')
_Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Difficulty:
  """Options of the generator; the defaults resemble the official products.

  Attributes:
    categories: categories to use; some of CATEGORIES.
    vocabulary: share of every word list to use, in (0, 1].
    options: (min, max) number of options of a product; None for the official
      frequencies.
    values: (min, max) number of values of an option; None for the official
      frequencies.
    attributes: (min, max) number of attributes of a product, all of which its
      instruction names; None for the official frequencies.
    family: (min, max) number of near-duplicates of a product.
    title_words: (min, max) number of words of a title; the attributes in it may
      make it longer.
    title_share: probability that a title names an attribute.
    instruction_share: share of products with an instruction, before the
      differences between categories.
    max_goals: maximum number of goals of a product; limits its option values.
    asin_characters: length of a product id.

  Raises:
    ValueError: in one line, if an option is out of range.
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
    for name, minimum, maximum in (
      ('options', 0, 3),
      ('values', 1, 45),
      ('attributes', 1, 8),
      ('family', 0, 100),
      ('title_words', 1, 40),
    ):
      bounds = getattr(self, name)
      if bounds is not None and not (
        len(bounds) == 2 and minimum <= bounds[0] <= bounds[1] <= maximum
      ):
        raise ValueError(
          f'env.generator.{name}={tuple(bounds)}: must be (low, high) with '
          f'{minimum} <= low <= high <= {maximum}'
        )


def generate(
  *, num_products: int = 2000, seed: int = 0, **difficulty
) -> tuple[list[dict], dict[str, dict]]:
  """Generates the products and instructions of a shop.

  Args:
    num_products: number of products.
    seed: seed of all draws.
    **difficulty: fields of `Difficulty`.

  Returns:
    The entries of items_shuffle.json, and asin -> entry of items_ins_v2.json.

  Raises:
    ValueError: in one line, if an argument is unknown or out of range.
  """
  known = [field.name for field in dataclasses.fields(Difficulty)]
  for name in difficulty:
    if name not in known:
      raise ValueError(
        f'env.generator.{name}: unknown option; known: num_products, seed, '
        f'{", ".join(known)}'
      )
  rules = Difficulty(**difficulty)
  # At most half of all possible ids: unused ones are drawn by rejection.
  length = rules.asin_characters
  max_products = 20 ** ((length + 1) // 2) * 5 ** (length // 2) // 2
  if not 1 <= num_products <= max_products:
    raise ValueError(
      f'env.generator.num_products={num_products}: must be from 1 to '
      f'{max_products} '
      f'with env.generator.asin_characters={length}'
    )
  rng = random.Random(f'webshop {seed}')
  sampler = _Sampler(rules, rng)
  items, instructions = [], {}
  for draft in sampler.drafts(num_products):
    asin = sampler.new_asin()
    items.append(listings.record(draft, asin, rng))
    wanted = sampler.wanted_attributes(draft)
    instructions[asin] = listings.instruction(draft, wanted)
  return items, instructions


class _Sampler:
  """Draws products one after another.

  The order of the draws is part of a shop: a change of it changes all shops.
  """

  def __init__(self, rules: Difficulty, rng: random.Random):
    self._rules = rules
    self._rng = rng
    self._asins: set[str] = set()

  def drafts(self, count: int) -> list[listings.Draft]:
    """Returns products in random order; members of a family are apart."""
    drafts: list[listings.Draft] = []
    while len(drafts) < count:
      first = self._draft()
      num_variants = self._rng.randint(*self._rules.family)
      drafts += [first, *(self._vary(first) for _ in range(num_variants))]
    del drafts[count:]
    self._rng.shuffle(drafts)
    return drafts

  def new_asin(self) -> str:
    """Returns an unused product id."""
    length = self._rules.asin_characters
    while True:
      if length == _OFFICIAL_ASIN:
        alphabet = string.digits + string.ascii_uppercase
        asin = 'B0' + ''.join(self._rng.choices(alphabet, k=length - 2))
      else:
        letters = _CONSONANTS, _VOWELS
        asin = ''.join(
          self._rng.choice(letters[position % 2]) for position in range(length)
        )
      if asin not in self._asins:
        self._asins.add(asin)
        return asin

  def wanted_attributes(self, draft: listings.Draft) -> Sequence[str]:
    """Draws the attributes of a product's instruction; () for none."""
    exponent = _SHARE_EXPONENTS[draft.category]
    share = self._rules.instruction_share**exponent
    if self._rng.random() >= share:
      return ()
    if self._rules.attributes:
      return draft.attributes
    count = self._weighted_choice(_ATTRIBUTE_WEIGHTS)
    count = min(count, len(draft.attributes))
    return self._rng.sample(draft.attributes, count)

  def _limit(self, items: Sequence[_T], minimum: int = 2) -> Sequence[_T]:
    """Returns the beginning of a word list, according to the vocabulary."""
    size = math.ceil(len(items) * self._rules.vocabulary)
    return items[: max(minimum, size)]

  def _weighted_choice(self, weights: Mapping[_T, float]) -> _T:
    return self._rng.choices(list(weights), list(weights.values()))[0]

  def _draft(self) -> listings.Draft:
    rng, rules = self._rng, self._rules
    category = self._weighted_choice(
      {c: w for c, w in _CATEGORY_WEIGHTS.items() if c in rules.categories}
    )
    department = words.DEPARTMENTS[category]
    shelves = [
      (aisle, *shelf)
      for aisle, aisle_shelves in department.aisles.items()
      for shelf in aisle_shelves
    ]
    aisle, shelf, noun = rng.choice(self._limit(shelves))
    attributes = self._attributes(department)
    titled = [a for a in attributes if rng.random() < rules.title_share]
    return listings.Draft(
      category=category,
      aisle=aisle,
      shelf=shelf,
      noun=noun,
      brand=rng.choice(self._limit(words.BRANDS)),
      attributes=attributes,
      titled=frozenset(titled),
      fillers=tuple(rng.sample(words.FILLERS, len(words.FILLERS))),
      title_words=rng.randint(*rules.title_words),
      options=self._options(department),
      price=department.price * math.exp(_PRICE_SPREAD * rng.gauss(0, 1)),
    )

  def _pool(self, department: words.Department) -> list[str]:
    """Returns a department's attributes, in the order of instructions."""
    groups = (department.qualities, department.parts, department.uses)
    return [a for group in groups for a in self._limit(group)]

  def _attributes(self, department: words.Department) -> tuple[str, ...]:
    if self._rules.attributes:
      count = self._rng.randint(*self._rules.attributes)
    else:
      count = self._weighted_choice(_ATTRIBUTE_WEIGHTS)
      count += self._rng.randint(1, 3)
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
      count = self._weighted_choice(dict(enumerate(department.option_counts)))
    names = list(department.options)
    # The third option of a department is rare: only products with all three
    # options have it.
    chosen = names if count == 3 else rng.sample(names[:2], count)
    options = {}
    combinations = 1
    for name in chosen:
      pool = self._limit(department.options[name], minimum=3)
      if rules.values:
        size = rng.randint(*rules.values)
      else:
        size = self._weighted_choice(_VALUE_WEIGHTS)
      size = max(1, min(size, len(pool), rules.max_goals // combinations))
      combinations *= size
      indices = sorted(rng.sample(range(len(pool)), size))
      options[name] = tuple(pool[index] for index in indices)
    return options

  def _vary(self, draft: listings.Draft) -> listings.Draft:
    """Returns a near-duplicate, which differs in one property."""
    rng = self._rng
    pool = self._pool(words.DEPARTMENTS[draft.category])
    unused = [a for a in pool if a not in draft.attributes]
    long = [name for name, values in draft.options.items() if len(values) > 1]
    changes = ['price', *['attribute'][: len(unused)], *['option'][: len(long)]]
    change = rng.choice(changes)
    if change == 'price':
      price = draft.price * rng.uniform(2.0, 3.0)
      return dataclasses.replace(draft, price=price)
    if change == 'option':
      name = rng.choice(long)
      values = list(draft.options[name])
      values.remove(rng.choice(values))
      options = {**draft.options, name: tuple(values)}
      return dataclasses.replace(draft, options=options)
    old, new = rng.choice(draft.attributes), rng.choice(unused)
    attributes = tuple(
      a for a in pool if a == new or a in draft.attributes and a != old
    )
    titled = frozenset(new if a == old else a for a in draft.titled)
    return dataclasses.replace(draft, attributes=attributes, titled=titled)


def write(
  folder: str, items: list[dict], instructions: dict[str, dict]
) -> pathlib.Path:
  """Writes a shop as two files of the official format; returns their folder.

  Raises:
    ValueError: if the folder already contains a shop.
  """
  path = pathlib.Path(folder).expanduser()
  if (path / ITEMS_FILE).exists():
    raise ValueError(
      f'--out={folder}: {ITEMS_FILE} exists already; choose another folder'
    )
  path.mkdir(parents=True, exist_ok=True)
  (path / ITEMS_FILE).write_text(json.dumps(items), encoding='utf-8')
  (path / INSTRUCTIONS_FILE).write_text(
    json.dumps(instructions), encoding='utf-8'
  )
  return path


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line and writes a generated shop."""
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
  print(f'wrote {len(items)} products to {path}')


if __name__ == '__main__':
  main()
