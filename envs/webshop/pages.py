"""Parses the text of the shop's pages.

A page is text with [SEP] between its strings, which the paper's prompts show
unchanged. Brief prompts, `envs.play` and the oracle need its parts.
"""

import dataclasses
from collections.abc import Sequence

SEPARATOR = ' [SEP] '
# Types of pages. All sub pages of an item (Description, ...) have one type.
INDEX, RESULTS, ITEM, SUB_PAGE = 'index', 'results', 'item', 'sub_page'

_TURNS = ('< Prev', 'Next >')
_PRICE = 'Price: '


@dataclasses.dataclass(frozen=True)
class View:
  """The parts of a page.

  Attributes:
    page_type: one of INDEX, RESULTS, ITEM, SUB_PAGE.
    buttons: buttons that lead to other pages, in their original case.
    page_number: number of a result page, from 1.
    products: products of a result page: (product id, title, price).
    options: options of an item page: name -> values.
    title: title of an item page.
    price: price of an item page.
    actions: further buttons of an item page: its sub pages and the purchase.
    lines: text of a sub page.
  """

  page_type: str
  buttons: tuple[str, ...] = ()
  page_number: int = 0
  products: tuple[tuple[str, str, str], ...] = ()
  options: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  title: str = ''
  price: str = ''
  actions: tuple[str, ...] = ()
  lines: tuple[str, ...] = ()


def split(text: str, task: str) -> list[str]:
  """Returns the strings of a page that follow the instruction.

  Args:
    text: the page, in the 'text' observation mode.
    task: the instruction.
  """
  parts = text.split(SEPARATOR)
  task = task.strip()  # Like the strings of a page.
  return parts[parts.index(task) + 1 :] if task in parts else parts


def read(parts: Sequence[str], clickables: Sequence[str]) -> View:
  """Parses a page.

  Args:
    parts: strings of the page, without the instruction.
    clickables: texts that can be clicked, in lower case.
  """
  if list(parts) == ['Search']:
    return View(INDEX)
  if 'buy now' in clickables:
    return _item(parts, clickables)
  if len(parts) > 1 and 'Total results' in parts[1]:
    return _results(parts, clickables)
  return View(
    SUB_PAGE,
    buttons=tuple(part for part in parts if part.lower() in clickables),
    lines=tuple(part for part in parts if part.lower() not in clickables),
  )


def _results(parts: Sequence[str], clickables: Sequence[str]) -> View:
  # Order of the strings: Back to Search, page number, buttons; then id, title
  # and price of each product. An empty title has no string.
  first = 2
  while first < len(parts) and parts[first] in _TURNS:
    first += 1
  products, rest = [], list(parts[first:])
  while len(rest) > 1:
    untitled = len(rest) == 2 or rest[2].lower() in clickables
    asin, title, price = (rest[0], '', rest[1]) if untitled else tuple(rest[:3])
    products.append((asin, title, price))
    del rest[: 2 if untitled else 3]
  return View(
    RESULTS,
    buttons=(parts[0], *parts[2:first]),
    page_number=int(parts[1].split()[1]),
    products=tuple(products),
  )


def _item(parts: Sequence[str], clickables: Sequence[str]) -> View:
  # Order of the strings: Back to Search, < Prev; options; title, price, rating;
  # sub pages, Buy Now.
  price = max(n for n, part in enumerate(parts) if part.startswith(_PRICE))
  # An empty title has no string.
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
