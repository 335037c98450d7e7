"""Reads the shop's pages: from their strings to what they offer.

The shop shows text, [SEP] between its strings; a policy reads it as it is.
This is for those who lay it out anew: prompts, people, the oracle.
"""

import dataclasses
from collections.abc import Sequence

SEPARATOR = ' [SEP] '
# Kinds of pages; of the item's sub pages (Description, ...) there is one kind.
INDEX, RESULTS, ITEM, SUB_PAGE = 'index', 'results', 'item', 'sub_page'

_TURNS = ('< Prev', 'Next >')
_PRICE = 'Price: '


@dataclasses.dataclass(frozen=True)
class View:
  """A page, taken apart.

  Attributes:
    kind: one of INDEX, RESULTS, ITEM, SUB_PAGE.
    buttons: that lead to other pages, as they are spelt.
    number: of a result page, from 1.
    products: of a result page: (number, title, price).
    options: of an item page: its options and their values.
    title: of an item page.
    price: of an item page.
    actions: of an item page: its sub pages and the purchase.
    lines: the text of a sub page.
  """

  kind: str
  buttons: tuple[str, ...] = ()
  number: int = 0
  products: tuple[tuple[str, str, str], ...] = ()
  options: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  title: str = ''
  price: str = ''
  actions: tuple[str, ...] = ()
  lines: tuple[str, ...] = ()


def split(text: str, task: str) -> list[str]:
  """Returns the strings of a page that follow the instruction.

  Args:
    text: the page as the text mode has it.
    task: the instruction.
  """
  parts = text.split(SEPARATOR)
  return parts[parts.index(task) + 1 :] if task in parts else parts


def read(parts: Sequence[str], clickables: Sequence[str]) -> View:
  """Takes a page apart.

  Args:
    parts: its strings without the instruction.
    clickables: what can be clicked, in lower case.
  """
  if list(parts) == ['Search']:
    return View(INDEX)
  if 'Buy Now' in parts:
    return _item(parts, clickables)
  if len(parts) > 1 and 'Total results' in parts[1]:
    return _results(parts, clickables)
  return View(
    SUB_PAGE,
    buttons=tuple(part for part in parts if part.lower() in clickables),
    lines=tuple(part for part in parts if part.lower() not in clickables),
  )


def _results(parts: Sequence[str], clickables: Sequence[str]) -> View:
  # Back to Search, page, buttons; number, title and price of each product. An
  # empty title makes no string.
  first = 2
  while first < len(parts) and parts[first] in _TURNS:
    first += 1
  listed, rest = [], list(parts[first:])
  while len(rest) > 1:
    untitled = len(rest) == 2 or rest[2].lower() in clickables
    number, title, price = (
      (rest[0], '', rest[1]) if untitled else tuple(rest[:3])
    )
    listed.append((number, title, price))
    del rest[: 2 if untitled else 3]
  return View(
    RESULTS,
    buttons=(parts[0], *parts[2:first]),
    number=int(parts[1].split()[1]),
    products=tuple(listed),
  )


def _item(parts: Sequence[str], clickables: Sequence[str]) -> View:
  # Back, previous; options; title, price, rating; sub pages, purchase.
  price = max(n for n, part in enumerate(parts) if part.startswith(_PRICE))
  # An empty title makes no string.
  title = price - (parts[price - 1].lower() not in clickables)
  options: dict[str, tuple[str, ...]] = {}
  name = ''
  for part in parts[2:title]:
    if part.lower() in clickables and name:
      options[name] += (part,)
    else:
      name = part
      options[name] = ()
  return View(
    ITEM,
    buttons=tuple(parts[:2]),
    options=options,
    title=''.join(parts[title:price]),
    price=parts[price].removeprefix(_PRICE),
    actions=tuple(parts[price + 2 :]),
  )
