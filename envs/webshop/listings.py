"""Writes generated products as records in WebShop's file format.

A `Draft` holds the facts about a product. `record` returns its entry of
items_shuffle.json; `instruction` returns its entry of items_ins_v2.json.
"""

import dataclasses
import math
import random
from collections.abc import Collection, Mapping

from envs.webshop import words

# Probability that a bullet, or the description, names an attribute. Shares of
# the official products that have no price, that have a price range, and that
# have an option without values.
_BULLET_RATE = 0.6
_DESCRIPTION_RATE = 0.14
_NO_PRICE_RATE = 0.09
_PRICE_RANGE_RATE = 0.09
_EMPTY_OPTION_RATE = 0.18
_IMAGES = 'https://images.invalid'


@dataclasses.dataclass(frozen=True)
class Draft:
  """The facts about a generated product.

  Attributes:
    category: one of `words.DEPARTMENTS`.
    aisle: part of the department; second level of the product category.
    shelf: the search phrase; third level of the product category.
    noun: the noun of the title.
    brand: the brand name.
    attributes: all attributes, in the order in which an instruction names them.
    titled: attributes that the title names.
    fillers: phrases without content for the title, in order.
    title_words: fillers are added until the title has this many words.
    options: option name -> values.
    price: price in dollars.
  """

  category: str
  aisle: str
  shelf: str
  noun: str
  brand: str
  attributes: tuple[str, ...]
  titled: frozenset[str]
  fillers: tuple[str, ...]
  title_words: int
  options: Mapping[str, tuple[str, ...]]
  price: float


def record(draft: Draft, asin: str, rng: random.Random) -> dict:
  """Returns the product's entry of items_shuffle.json."""
  department = words.DEPARTMENTS[draft.category]
  shelf = draft.shelf.title().replace("'S", "'s")
  return {
    'name': _title(draft),
    'full_description': _description(draft, rng),
    'pricing': _pricing(draft.price, rng),
    'images': [f'{_IMAGES}/{asin}/{n}.jpg' for n in range(1, 4)],
    'product_category': f'{department.path} › {draft.aisle} › {shelf}',
    'average_rating': rng.choice(['', '', round(rng.uniform(2.5, 5), 1)]),
    'small_description': _bullets(draft, rng),
    'customization_options': _customization(draft, asin, rng),
    'asin': asin,
    'category': draft.category,
    'query': draft.shelf,
    'page': rng.randint(1, 100),
  }


def instruction(draft: Draft, wanted: Collection[str]) -> dict:
  """Returns the product's entry of items_ins_v2.json.

  Args:
    draft: the product.
    wanted: attributes that the instruction names. If empty, the product gets no
      instruction and is the goal of no task.
  """
  entry = {'attributes': list(draft.attributes)}
  if not wanted:
    return entry
  return entry | {
    'instruction': f'Find me {_phrase(draft, draft.shelf, wanted)}',
    'instruction_attributes': [a for a in draft.attributes if a in wanted],
  }


def _phrase(draft: Draft, noun: str, named: Collection[str]) -> str:
  """Returns a noun with its attributes: 'light, red x with y for z'."""
  department = words.DEPARTMENTS[draft.category]
  qualities, parts, uses = (
    ', '.join(a for a in draft.attributes if a in named and a in group)
    for group in (department.qualities, department.parts, department.uses)
  )
  text = f'{qualities} {noun}' if qualities else noun
  text += f' with {parts}' if parts else ''
  return text + (f' for {uses}' if uses else '')


def _title(draft: Draft) -> str:
  title = f'{draft.brand} {_phrase(draft, draft.noun, draft.titled)}'
  for filler in draft.fillers:
    if len(title.split()) >= draft.title_words:
      break
    title += f', {filler}'
  return title


def _description(draft: Draft, rng: random.Random) -> str:
  named = [a for a in draft.attributes if rng.random() < _DESCRIPTION_RATE]
  text = f'{draft.brand} makes this {draft.noun.lower()} with care.'
  if named:
    text += f' What buyers like about it: {", ".join(named)}.'
  return f'{text} Look at all our {draft.shelf} and choose the one you need.'


def _bullets(draft: Draft, rng: random.Random) -> list[str]:
  named = [a for a in draft.attributes if rng.random() < _BULLET_RATE]
  rng.shuffle(named)
  lines = [f'{a.upper()}: {a}, as it should be. ' for a in named]
  lines += [
    f'{name.upper()}: choose among {len(values)}. '
    for name, values in draft.options.items()
  ]
  lines.append(f'SERVICE: {draft.brand} answers every question in a day. ')
  lines.append('WHAT YOU GET: packed with care and sent on the same day. ')
  return lines


def _pricing(price: float, rng: random.Random) -> str:
  draw = rng.random()
  if draw < _NO_PRICE_RATE:
    return ''
  low = max(2, math.floor(price))
  if draw < _NO_PRICE_RATE + _PRICE_RANGE_RATE:
    high = math.floor(low * rng.uniform(1.1, 1.8)) + 1
    return f'${low}.99 - ${high}.99'
  return f'${low}.99'


def _customization(
  draft: Draft, asin: str, rng: random.Random
) -> dict[str, list[dict] | None] | str:
  if not draft.options:
    return {'Color': None} if rng.random() < _EMPTY_OPTION_RATE else ''
  return {
    name: [
      _value(name, value, f'{_IMAGES}/{asin}/{name}{n}.jpg')
      for n, value in enumerate(values)
    ]
    for name, values in draft.options.items()
  }


def _value(name: str, value: str, image: str) -> dict:
  if name == 'Color':
    return {
      'is_selected': False,
      'url': None,
      'value': value,
      'price_string': '',
      'price': 0,
      'image': image,
    }
  return {
    'is_selected': False,
    'is_available': True,
    'value': value,
    'asin': '',
  }
