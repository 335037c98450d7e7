"""The shop: pages, buttons and the way from page to page, as the original's.

A `Shop` is what all customers of a process share; a `Session` is one customer
on one page at a time. Text is made from the product records directly, where
the original renders HTML and parses it again.
"""

import dataclasses
import json
import random
import re
from collections.abc import Iterator, Sequence

from envs.webshop import goals, products, reward

OBSERVATIONS = ('text', 'text_rich')
RESULTS = 50
PER_PAGE = 10
_URL = 'http://127.0.0.1:3000'
_ACTION = re.compile(r'(.+)\[(.+)\]')
# In the order in which the original looks for them in the address.
_PAGES = ('search_results', 'item_page', 'item_sub_page', 'done')
_SUB_PAGES = ('Description', 'Features', 'Reviews', 'Attributes')


@dataclasses.dataclass(frozen=True)
class Page:
  """What a customer sees.

  Attributes:
    text: the page, in the form that the shop was opened with.
    has_search_bar: whether it is the search page.
    clickables: what `click[...]` accepts, in the page's order; 'search' is
      listed, but has to be used as `search[...]`.
    reward: in [0, 1]; not 0 only after a purchase.
    done: whether something was bought.
    parts: of the reward, after a purchase; see `reward.score`.
    url: where the page would be.
  """

  text: str
  has_search_bar: bool
  clickables: tuple[str, ...]
  reward: float = 0.0
  done: bool = False
  parts: dict | None = None
  url: str = ''


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A visible string and what it is: text, button, link or option."""

  text: str
  kind: str = 'text'


class Shop:
  """A catalogue with prices, open for business.

  Args:
    catalogue: what is sold.
    observation: 'text', or 'text_rich' with marked buttons and line breaks.
    show_attributes: whether item pages have the Attributes button.
    seed: of the prices of products that have a range of them; the same as
      that of the goals.
  """

  def __init__(
    self,
    catalogue: products.Catalogue,
    *,
    observation: str = 'text',
    show_attributes: bool = False,
    seed: int = 0,
  ):
    if observation not in OBSERVATIONS:
      raise ValueError(
        f'observation={observation}: must be one of {", ".join(OBSERVATIONS)}'
      )
    self.catalogue = catalogue
    self.observation = observation
    self.show_attributes = show_attributes
    self.seed = seed
    self._prices = goals.prices(catalogue, seed=seed)

  def price(self, number: int) -> float:
    """Returns what a product costs, dollars."""
    return float(self._prices[number])

  def search(self, words: tuple[str, ...], draw: int = 0) -> Sequence[int]:
    """Returns the products found by words, the best first.

    `<r>` finds any 50, which `draw` numbers; `<a>`, `<c>` and `<q>` find what
    has an attribute, a category or a query, in the catalogue's order.
    """
    kind, rest = words[0], ' '.join(words[1:]).strip()
    if kind == '<r>':
      rng = random.Random(f'{self.seed} {draw}')
      every = range(len(self.catalogue))
      return rng.sample(every, min(RESULTS, len(every)))
    if kind == '<c>':
      rest = words[1].strip() if len(words) > 1 else ''
    if kind in ('<a>', '<c>', '<q>'):
      return self.catalogue.labels.having(products.label(kind, rest))
    return self.catalogue.index.search(' '.join(words), RESULTS)


def _in_html(options: dict[str, str]) -> str:
  """Returns options as the original's template engine writes JSON."""
  text = json.dumps(options, sort_keys=True)
  for sign in "<>&'":
    text = text.replace(sign, f'\\u{ord(sign):04x}')
  return text


class Session:
  """One customer: on the search page first, done after a purchase."""

  def __init__(self, shop: Shop):
    self._shop = shop

  def reset(self, goal: goals.Goal, *, session: str = '0') -> Page:
    """Enters the shop with a wish; `session` only shows in URLs."""
    self._goal, self._name = goal, session
    self._searches = 0
    self._to_index()
    return self._show()

  def step(self, action: str) -> Page:
    """Returns the page after an action; one that is not understood stays.

    Args:
      action: `search[words]`, possible on any page, or `click[text]` with one
        of the page's clickables in any case.
    """
    if self._kind == 'done':
      return self._show()
    match = _ACTION.match(action)
    verb, argument = match.groups() if match else (action, '')
    argument = argument.lower()
    if verb == 'search' and argument:
      self._searches += 1
      self._to_results(tuple(argument.split(' ')), 1)
    elif verb == 'click' and argument != 'search':
      piece = self._clickable().get(argument)
      if piece is not None:
        self._click(piece, argument)
    return self._show()

  # Ways between pages.

  def _to_index(self) -> None:
    self._kind, self._options, self._number = 'index', {}, None
    self._words: tuple[str, ...] = ()
    self._page = 1
    self._visited: set[str] = set()

  def _to_results(self, words: tuple[str, ...], page: int) -> None:
    self._kind, self._options, self._number = 'results', {}, None
    self._words, self._page = words, page
    self._results = self._shop.search(words, self._searches)

  def _click(self, piece: _Piece, text: str) -> None:
    # Like the original by the text first, whatever else an option of that
    # name could do, and by what the address says the page is.
    where = self._where()
    if text == 'buy now':
      self._buy()
    elif text == 'back to search':
      self._to_index()
    elif text == 'next >' and where == 'search_results':
      self._to_results(self._words, self._page + 1)
    elif text == '< prev' and where == 'search_results':
      self._to_results(self._words, self._page - 1)
    elif text == '< prev' and where == 'item_page':
      self._to_results(self._words, self._page)
    elif text.capitalize() in _SUB_PAGES:
      self._kind, self._sub_page = 'sub', text.capitalize()
    else:
      self._to_item(piece)

  def _where(self) -> str:
    url = self._url()
    return next((name for name in _PAGES if name in url), '')

  def _to_item(self, piece: _Piece) -> None:
    self._kind = 'item'
    if piece.kind == 'link':
      self._number = self._shop.catalogue.number(piece.text)
      self._visited.add(piece.text)
    elif piece.kind == 'option':
      having = (
        n for n, v in self._product().options.items() if piece.text in v
      )
      # A value of two options sets the last of them.
      *_, name = having
      self._options = self._options | {name: piece.text}

  def _buy(self) -> None:
    self._kind = 'done'
    self._reward, self._parts = reward.score(
      self._product(),
      self._goal,
      price=self._shop.price(self._number),
      options=self._options,
    )

  def _product(self) -> products.Product:
    return self._shop.catalogue[self._number]

  # Pages.

  def _pieces(self) -> Iterator[_Piece]:
    """Yields the visible strings of the page in order."""
    if self._kind == 'done':
      yield from map(_Piece, self._receipt())
      return
    if self._kind == 'index':
      yield _Piece('WebShop')
      # The original's templates differ by a blank.
      yield _Piece('Instruction: ')
      yield _Piece(self._goal.instruction_text)
      yield _Piece('Search', 'button')
      return
    yield _Piece('Instruction:')
    yield _Piece(self._goal.instruction_text)
    yield _Piece('Back to Search', 'button')
    if self._kind == 'results':
      yield from self._result_pieces()
      return
    yield _Piece('< Prev', 'button')
    yield from (
      self._item_pieces()
      if self._kind == 'item'
      else map(_Piece, self._sub_page_texts())
    )

  def _result_pieces(self) -> Iterator[_Piece]:
    yield _Piece(f'Page {self._page} (Total results: {len(self._results)})')
    if self._page > 1:
      yield _Piece('< Prev', 'button')
    yield _Piece('Next >', 'button')
    start = (self._page - 1) * PER_PAGE
    for number in self._results[start : start + PER_PAGE]:
      product = self._shop.catalogue[number]
      yield _Piece(product.asin, 'link')
      yield _Piece(product.title)
      yield _Piece(product.price_tag)

  def _item_pieces(self) -> Iterator[_Piece]:
    product = self._product()
    for name, values in product.options.items():
      yield _Piece(name)
      for value in values:
        yield _Piece(value, 'option')
    yield _Piece(product.title)
    yield _Piece(f'Price: {product.price_tag}')
    yield _Piece('Rating: N.A.')
    for name in _SUB_PAGES:
      if name != 'Attributes' or self._shop.show_attributes:
        yield _Piece(name, 'button')
    yield _Piece('Buy Now', 'button')

  def _sub_page_texts(self) -> tuple[str, ...]:
    product = self._product()
    return {
      'Description': (product.description,),
      # The templates have a blank there, which shows in text_rich.
      'Features': tuple(f' {bullet}' for bullet in product.bullets),
      'Reviews': (),
      'Attributes': (
        *(f' {attribute}' for attribute in product.attributes),
        product.category,
        product.query,
        product.product_category,
      ),
    }[self._sub_page]

  def _receipt(self) -> Iterator[str]:
    yield from ('Thank you for shopping with us!', 'Your code: ', 'None')
    yield from (' (Paste it in your MTurk interface.)', 'Purchased', 'asin')
    yield self._product().asin
    yield from ('options', _in_html(self._options), 'attrs', 'None')
    yield from ('category', 'None', 'query', 'None', 'product category', 'None')
    yield from ('Target', 'asin', 'options', 'attrs', 'price upper')
    yield from ('instuction text', 'category', 'product category', 'query')
    yield from ('Goal ', 'None', 'Reward', 'Your score (min 0.0, max 1.0)')
    yield from (str(self._reward), 'Reward Details ', 'None')

  def _url(self) -> str:
    if self._kind == 'index':
      return f'{_URL}/{self._name}'
    words = '+'.join(self._words)
    if self._kind == 'results':
      return f'{_URL}/search_results/{self._name}/{words}/{self._page}'
    asin, options = self._product().asin, self._options
    if self._kind == 'done':
      return f'{_URL}/done/{self._name}/{asin}/{options}'
    place = f'{self._name}/{asin}/{words}/{self._page}'
    if self._kind == 'item':
      return f'{_URL}/item_page/{place}/{json.dumps(options)}'
    return f'{_URL}/item_sub_page/{place}/{self._sub_page}/{options}'

  def _clickable(self) -> dict[str, _Piece]:
    """Returns what can be clicked by its text; of equal texts the last."""
    found: dict[str, _Piece] = {}
    options: dict[str, _Piece] = {}
    for piece in self._pieces():
      if piece.kind == 'option':
        options[piece.text] = piece
      elif piece.kind != 'text':
        found[piece.text.lower()] = piece
    return found | options

  def _show(self) -> Page:
    # An empty string makes no text on the original's page.
    pieces = [p for p in self._pieces() if p.text and p.text != '\n']
    done = self._kind == 'done'
    url = self._url()
    if self._shop.observation == 'text':
      text = ' [SEP] '.join(piece.text.strip() for piece in pieces)
    else:
      text = self._rich(pieces, url)
    return Page(
      text=text,
      has_search_bar=self._kind == 'index',
      clickables=tuple(self._clickable()),
      reward=self._reward if done else 0.0,
      done=done,
      parts=self._parts if done else None,
      url=url,
    )

  def _rich(self, pieces: list[_Piece], url: str) -> str:
    text = ''
    for piece in pieces:
      line, mark = piece.text, 'button'
      if piece.kind == 'option':
        # Not whether it is chosen but whether the address quotes it.
        if f'"{line}"' in url:
          mark, text = 'clicked button', f'You have clicked {line}.\n{text}'
        line = f'  [{mark}] {line} [{mark}_]'
      elif piece.kind == 'link':
        mark = 'clicked button' if line in self._visited else mark
        line = f'\n[{mark}] {line} [{mark}_]'
      elif piece.kind == 'button':
        line = f'[{mark}] {line} [{mark}_]'
      text += line + '\n'
    return text
