"""The shop's engine: pages, buttons and navigation, as in the original.

All sessions of a process share one `Shop`. A `Session` is one customer, who
sees one page at a time. The text of a page is written directly from the product
records; the original renders HTML and parses it again.
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
# In the order in which the original searches for them in the URL.
_PAGES = ('search_results', 'item_page', 'item_sub_page', 'done')
_SUB_PAGES = ('Description', 'Features', 'Reviews', 'Attributes')


def parse_action(action: str) -> tuple[str, str]:
  """Returns verb and argument as the original reads `verb[argument]`.

  The argument is in lower case; '' if the action has another form. Of several
  brackets, the last `[` begins the argument.
  """
  match = _ACTION.match(action)
  verb, argument = match.groups() if match else (action, '')
  return verb, argument.lower()


@dataclasses.dataclass(frozen=True)
class Page:
  """A page of the shop.

  Attributes:
    text: text of the page, in the shop's observation mode.
    has_search_bar: whether this is the search page.
    clickables: arguments that `click[...]` accepts, in the order of the page.
      Includes 'search', which must be used as `search[...]`.
    reward: score of the purchase in [0, 1]; 0 before a purchase.
    done: whether a product was bought.
    reward_parts: parts of the reward; None before a purchase. See
      `reward.score`.
    url: URL of the page in the original.
    product: id of the product that is looked at; '' if none is.
    options: its chosen options, by name.
  """

  text: str
  has_search_bar: bool
  clickables: tuple[str, ...]
  reward: float = 0.0
  done: bool = False
  reward_parts: dict | None = None
  url: str = ''
  product: str = ''
  options: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A visible string of a page; its role is text, button, link or option."""

  text: str
  role: str = 'text'


class Shop:
  """A catalogue with prices and a search; shared by sessions.

  Args:
    catalogue: catalogue of the products.
    observation: 'text'; or 'text_rich', with marked buttons and line breaks.
    show_attributes: whether item pages have an Attributes button.
    seed: seed of the prices of products with a price range; must be the seed
      of the goals.
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

  def price(self, index: int) -> float:
    """Returns the price of a product in dollars."""
    return float(self._prices[index])

  def search(self, words: tuple[str, ...], draw: int = 0) -> Sequence[int]:
    """Returns the indices of the products that match a query, best first.

    As in the original, the first word may be a special query: `<r>` returns 50
    random products; `<a>`, `<c>` and `<q>` return the products with an
    attribute, a category or a query, in the catalogue's order.

    Args:
      words: words of the query.
      draw: index of the random draw, for `<r>`.
    """
    prefix, rest = words[0], ' '.join(words[1:]).strip()
    if prefix == '<r>':
      rng = random.Random(f'{self.seed} {draw}')
      indices = range(len(self.catalogue))
      return rng.sample(indices, min(RESULTS, len(indices)))
    if prefix == '<c>':
      rest = words[1].strip() if len(words) > 1 else ''
    if prefix in ('<a>', '<c>', '<q>'):
      label = products.label(prefix, rest)
      return self.catalogue.labels.documents_with(label)
    return self.catalogue.index.search(' '.join(words), RESULTS)


def _json_in_html(options: dict[str, str]) -> str:
  """Returns options as JSON in the form of the original's template engine."""
  text = json.dumps(options, sort_keys=True)
  for character in "<>&'":
    text = text.replace(character, f'\\u{ord(character):04x}')
  return text


class Session:
  """One customer: starts on the search page and ends with a purchase."""

  def __init__(self, shop: Shop):
    self._shop = shop

  def reset(self, goal: goals.Goal, *, session: str = '0') -> Page:
    """Starts an episode and returns the search page.

    Args:
      goal: goal of the episode.
      session: name of the session; appears in URLs only.
    """
    self._goal, self._name = goal, session
    self._searches = 0
    self._to_index()
    return self._show()

  def step(self, action: str) -> Page:
    """Executes an action and returns the page after it.

    An unknown action does not change the page.

    Args:
      action: `search[words]`, on any page, or `click[text]` with a clickable
        text of the page, in upper or lower case.
    """
    if self._page_type == 'done':
      return self._show()
    verb, argument = parse_action(action)
    if verb == 'search' and argument:
      self._searches += 1
      self._to_results(tuple(argument.split(' ')), 1)
    elif verb == 'click' and argument != 'search':
      piece = self._clickable_pieces().get(argument)
      if piece is not None:
        self._click(piece, argument)
    return self._show()

  # Navigation between pages.

  def _to_index(self) -> None:
    self._page_type, self._options, self._index = 'index', {}, None
    self._words: tuple[str, ...] = ()
    self._page_number = 1
    self._visited: set[str] = set()

  def _to_results(self, words: tuple[str, ...], page: int) -> None:
    self._page_type, self._options, self._index = 'results', {}, None
    self._words, self._page_number = words, page
    self._results = self._shop.search(words, self._searches)

  def _click(self, piece: _Piece, text: str) -> None:
    # As in the original, the text decides first, so an option that is called
    # like a button acts as the button. The page is recognised by its URL.
    url_page = self._page_in_url()
    if text == 'buy now':
      self._buy()
    elif text == 'back to search':
      self._to_index()
    elif text == 'next >' and url_page == 'search_results':
      self._to_results(self._words, self._page_number + 1)
    elif text == '< prev' and url_page == 'search_results':
      self._to_results(self._words, self._page_number - 1)
    elif text == '< prev' and url_page == 'item_page':
      self._to_results(self._words, self._page_number)
    elif text.capitalize() in _SUB_PAGES:
      self._page_type, self._sub_page = 'sub', text.capitalize()
    else:
      self._to_item(piece)

  def _page_in_url(self) -> str:
    url = self._url()
    return next((name for name in _PAGES if name in url), '')

  def _to_item(self, piece: _Piece) -> None:
    self._page_type = 'item'
    if piece.role == 'link':
      self._index = self._shop.catalogue.find(piece.text)
      self._visited.add(piece.text)
    elif piece.role == 'option':
      names = (n for n, v in self._product().options.items() if piece.text in v)
      # If several options have the value, the last one is set.
      *_, name = names
      self._options = self._options | {name: piece.text}

  def _buy(self) -> None:
    self._page_type = 'done'
    self._reward, self._reward_parts = reward.score(
      self._product(),
      self._goal,
      price=self._shop.price(self._index),
      options=self._options,
    )

  def _product(self) -> products.Product:
    return self._shop.catalogue[self._index]

  # Contents of pages.

  def _pieces(self) -> Iterator[_Piece]:
    """Yields the visible strings of the page in order."""
    if self._page_type == 'done':
      yield from map(_Piece, self._receipt())
      return
    if self._page_type == 'index':
      yield _Piece('WebShop')
      # The original's template of this page has a space after the colon.
      yield _Piece('Instruction: ')
      yield _Piece(self._goal.instruction_text)
      yield _Piece('Search', 'button')
      return
    yield _Piece('Instruction:')
    yield _Piece(self._goal.instruction_text)
    yield _Piece('Back to Search', 'button')
    if self._page_type == 'results':
      yield from self._result_pieces()
      return
    yield _Piece('< Prev', 'button')
    yield from (
      self._item_pieces()
      if self._page_type == 'item'
      else map(_Piece, self._sub_page_texts())
    )

  def _result_pieces(self) -> Iterator[_Piece]:
    yield _Piece(
      f'Page {self._page_number} (Total results: {len(self._results)})'
    )
    if self._page_number > 1:
      yield _Piece('< Prev', 'button')
    yield _Piece('Next >', 'button')
    start = (self._page_number - 1) * PER_PAGE
    for index in self._results[start : start + PER_PAGE]:
      product = self._shop.catalogue[index]
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
      # The space is in the original's templates; text_rich shows it.
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
    yield from ('options', _json_in_html(self._options), 'attrs', 'None')
    yield from ('category', 'None', 'query', 'None', 'product category', 'None')
    yield from ('Target', 'asin', 'options', 'attrs', 'price upper')
    yield from ('instuction text', 'category', 'product category', 'query')
    yield from ('Goal ', 'None', 'Reward', 'Your score (min 0.0, max 1.0)')
    yield from (str(self._reward), 'Reward Details ', 'None')

  def _url(self) -> str:
    if self._page_type == 'index':
      return f'{_URL}/{self._name}'
    words = '+'.join(self._words)
    if self._page_type == 'results':
      return f'{_URL}/search_results/{self._name}/{words}/{self._page_number}'
    asin, options = self._product().asin, self._options
    if self._page_type == 'done':
      return f'{_URL}/done/{self._name}/{asin}/{options}'
    path = f'{self._name}/{asin}/{words}/{self._page_number}'
    if self._page_type == 'item':
      return f'{_URL}/item_page/{path}/{json.dumps(options)}'
    return f'{_URL}/item_sub_page/{path}/{self._sub_page}/{options}'

  def _clickable_pieces(self) -> dict[str, _Piece]:
    """Returns text -> clickable piece; the last one if texts are equal."""
    others: dict[str, _Piece] = {}
    options: dict[str, _Piece] = {}
    for piece in self._pieces():
      if piece.role == 'option':
        options[piece.text] = piece
      elif piece.role != 'text':
        others[piece.text.lower()] = piece
    return others | options

  def _show(self) -> Page:
    # The original's parser drops empty strings.
    pieces = [p for p in self._pieces() if p.text and p.text != '\n']
    done = self._page_type == 'done'
    url = self._url()
    if self._shop.observation == 'text':
      text = ' [SEP] '.join(piece.text.strip() for piece in pieces)
    else:
      text = self._rich_text(pieces, url)
    return Page(
      text=text,
      has_search_bar=self._page_type == 'index',
      clickables=tuple(self._clickable_pieces()),
      reward=self._reward if done else 0.0,
      done=done,
      reward_parts=self._reward_parts if done else None,
      url=url,
      product='' if self._index is None else self._product().asin,
      options=self._options,
    )

  def _rich_text(self, pieces: list[_Piece], url: str) -> str:
    text = ''
    for piece in pieces:
      line, mark = piece.text, 'button'
      if piece.role == 'option':
        # As in the original, an option is marked if its value is in the URL,
        # even if it is not chosen.
        if f'"{line}"' in url:
          mark, text = 'clicked button', f'You have clicked {line}.\n{text}'
        line = f'  [{mark}] {line} [{mark}_]'
      elif piece.role == 'link':
        mark = 'clicked button' if line in self._visited else mark
        line = f'\n[{mark}] {line} [{mark}_]'
      elif piece.role == 'button':
        line = f'[{mark}] {line} [{mark}_]'
      text += line + '\n'
    return text
