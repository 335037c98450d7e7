"""What the shop sells: the official files, cleaned as the original cleans them.

A catalogue is arrays: each product's record as JSON in one long blob, and the
search index. They are made once, into a cache folder, and mapped from there:
all processes of a host share one copy, and starting reads almost nothing.
"""

import bisect
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np
import tqdm

from envs import cache
from envs.webshop import analysis, search

NO_PRICE = 100.0
_NO_ATTRIBUTES = ('DUMMY_ATTR',)  # the original's, of a product without entry
_ASIN_LENGTH = 10
_FORMAT = 5  # of the cache; raised when it or the cleaning changes
# The catalogue, what was extracted from it, what people wrote about it.
_FILES = {
  1_000: ('items_shuffle_1000.json', 'items_ins_v2_1000.json'),
  None: ('items_shuffle.json', 'items_ins_v2.json'),
}
_HUMAN_FILE = 'items_human_ins.json'
_CHUNK = 1 << 20  # characters read at a time
_LONGEST = 1 << 26  # characters of a record
_BLANKS = re.compile(r'[ \t\n\r]*')
_LABELS = 'label_'  # what the names of the arrays of `labels` begin with


@dataclasses.dataclass(frozen=True)
class Product:
  """A product after loading.

  Attributes:
    asin: its name in the shop.
    title: its name for people.
    description: text of its Description page.
    bullets: paragraphs of its Features page.
    price_tag: price or range of prices, as shown.
    prices: its price, or the lowest and the highest.
    options: what can be chosen: values by name.
    category: one of the shop's few departments.
    query: the words by which it was once found.
    product_category: path of categories, joined by ' › '.
    attributes: what is known of it and hidden from the shopper.
    instruction: what a goal asks for; '' makes no goal.
    instruction_attributes: those of `attributes` that a goal asks for.
    human: what people wrote: (instruction, attributes, options) each.
  """

  asin: str
  title: str
  description: str
  bullets: tuple[str, ...]
  price_tag: str
  prices: tuple[float, ...]
  options: dict[str, tuple[str, ...]]
  category: str
  query: str
  product_category: str
  attributes: tuple[str, ...]
  instruction: str = ''
  instruction_attributes: tuple[str, ...] = ()
  human: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()

  def text(self) -> str:
    """Returns what the search index knows of it."""
    options = ', and '.join(
      f'{name}: {", ".join(values)}' for name, values in self.options.items()
    )
    first = self.bullets[0] if self.bullets else ''
    return ' '.join((self.title, self.description, first, options)).lower()


def clean(
  item: Any, instruction: Any = None, human: Any = None
) -> Product | None:
  """Returns a raw record as a product; None if it cannot be one."""
  if not isinstance(item, dict):
    return None
  asin, title = item.get('asin'), item.get('name')
  if not isinstance(asin, str) or not 0 < len(asin) <= _ASIN_LENGTH:
    return None
  if asin == 'nan' or not isinstance(title, str):
    return None
  prices = read_prices(item.get('pricing'))
  instruction = instruction if isinstance(instruction, dict) else {}
  bullets = item.get('small_description') or ()
  bullets = [bullets] if isinstance(bullets, str) else bullets
  tag = ' to '.join(f'${price}' for price in prices)
  return Product(
    asin=asin,
    title=title,
    description=_text(item.get('full_description')),
    bullets=_texts(bullets),
    price_tag=tag,
    prices=prices,
    options=_options(item.get('customization_options')),
    category=_text(item.get('category')),
    query=_text(item.get('query')).lower().strip(),
    product_category=_text(item.get('product_category')),
    attributes=_texts(instruction.get('attributes', _NO_ATTRIBUTES)),
    instruction=_text(instruction.get('instruction')),
    instruction_attributes=_texts(instruction.get('instruction_attributes')),
    human=_human(human),
  )


def read_prices(pricing: Any) -> tuple[float, ...]:
  """Returns the one price, or lowest and highest, of a text like '$1 - $2'."""
  prices = []
  for part in _text(pricing).split('$')[1:]:
    with contextlib.suppress(ValueError):
      prices.append(float(re.sub(r'[^\d.]', '', part)))
  return tuple(prices[:2]) or (NO_PRICE,)


def _text(value: Any) -> str:
  return value if isinstance(value, str) else ''


def _texts(values: Any) -> tuple[str, ...]:
  if not isinstance(values, (list, tuple)):
    return ()
  return tuple(value for value in values if isinstance(value, str))


def _options(raw: Any) -> dict[str, tuple[str, ...]]:
  if not isinstance(raw, dict):
    return {}
  options = {}
  for name, contents in raw.items():
    if not isinstance(contents, list):
      continue
    values = (c.get('value') for c in contents if isinstance(c, dict))
    options[name.lower()] = tuple(
      value.strip().replace('/', ' | ').lower()
      for value in values
      if isinstance(value, str)
    )
  return options


def _human(raw: Any) -> tuple:
  raw = raw if isinstance(raw, list) else ()
  written = (r for r in raw if isinstance(r, dict))
  return tuple(
    (
      _text(r.get('instruction')),
      _texts(r.get('instruction_attributes')),
      _texts(r.get('instruction_options')),
    )
    for r in written
  )


class Catalogue(Sequence[Product]):
  """Products in the order of their file, and the index over them.

  Attributes:
    skipped: records that could not be read or came twice.
    index: for searching.
    labels: for what has an attribute, a category or a query.
  """

  def __init__(self, arrays: cache.Arrays, folder: pathlib.Path | None = None):
    """Takes the arrays, and their folder if they are mapped from one."""
    self._folder = folder
    self._blob, self._ends = arrays['records'], arrays['record_ends']
    self._asins, self._sorted = (
      arrays['asins'],
      arrays['document_numbers_by_name'],
    )
    self.prices = arrays['prices']
    self.has_goal = arrays['has_goal']
    self.skipped = int(arrays['skipped'][0])
    self.index = search.Index(arrays)
    self.labels = search.Index(
      {
        name.removeprefix(_LABELS): values
        for name, values in arrays.items()
        if name.startswith(_LABELS)
      }
    )
    self._product = functools.lru_cache(4096)(self._read)

  def __len__(self) -> int:
    return len(self._ends) - 1

  def __getitem__(self, number: int) -> Product:
    return self._product(range(len(self))[number])

  def _read(self, number: int) -> Product:
    start, end = self._ends[number : number + 2]
    record = json.loads(self._blob[start:end].tobytes())
    for name, value in record.items():
      if isinstance(value, list):
        record[name] = _tuples(value)
    record['options'] = {n: tuple(v) for n, v in record['options'].items()}
    return Product(**record)

  def derive(self, name: str, make: Callable[[], cache.Arrays]) -> cache.Arrays:
    """Returns arrays made from this catalogue; cached where it is."""
    if self._folder is None:
      return make()
    folder = self._folder.with_name(f'{self._folder.name}-{name}')
    return cache.load(folder, lambda _: make())

  def asin(self, number: int) -> str:
    """Returns the name of a product without reading its record."""
    return self._asins[number].decode()

  def number(self, asin: str) -> int | None:
    """Returns the place of a product; None if it is not sold."""
    place = bisect.bisect_left(
      self._sorted, asin.encode(), key=self._asins.__getitem__
    )
    if place == len(self) or self.asin(self._sorted[place]) != asin:
      return None
    return int(self._sorted[place])


def _tuples(value: Any) -> Any:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _arrays(
  products: Iterable[Product | None], blob_path: pathlib.Path
) -> cache.Arrays:
  """Returns all of a catalogue but the blob, which it writes."""
  ends, asins, prices, has_goal, skipped = [0], [], [], [], 0
  seen: set[str] = set()
  builder, labels = search.Builder(), search.Builder()
  with blob_path.open('wb') as blob:
    for product in products:
      if product is None or product.asin in seen:
        skipped += 1
        continue
      seen.add(product.asin)
      record = json.dumps(
        dataclasses.asdict(product), ensure_ascii=False, separators=(',', ':')
      )
      # A lone surrogate, half of a damaged emoji, is no text in UTF-8.
      ends.append(ends[-1] + blob.write(record.encode('utf-8', 'replace')))
      asins.append(product.asin.encode('utf-8', 'replace'))
      # NaN where there is no range, which may be of equal prices.
      prices.append((*product.prices, math.nan)[:2])
      has_goal.append((bool(product.instruction), bool(product.human)))
      kind = f'{product.query} {product.title[:80]}'
      builder.add(product.asin, analysis.terms(product.text()), kind)
      labels.add(product.asin, list(_labels(product)))
  if not asins:
    raise ValueError(f'no product in it ({skipped} damaged records)')
  labelled = {_LABELS + n: values for n, values in labels.arrays().items()}
  return (
    labelled
    | builder.arrays()
    | {
      'record_ends': np.array(ends, np.int64),
      'asins': np.array(asins),
      'prices': np.array(prices),
      'has_goal': np.array(has_goal),
      'skipped': np.array([skipped]),
    }
  )


def _labels(product: Product) -> Iterator[str]:
  """Yields what `Catalogue.labels` knows a product by."""
  yield label('<c>', product.category)
  yield label('<q>', product.query)
  for attribute in product.attributes:
    yield label('<a>', attribute)


def label(kind: str, value: str) -> str:
  """Returns the name of a label; kind is <a>, <c> or <q> as in a search."""
  # A lone surrogate, half of a damaged emoji, is no text in UTF-8.
  return (kind + value).encode('utf-8', 'replace').decode()


def from_records(
  items: Iterable[Any],
  instructions: dict[str, Any],
  human: dict[str, Any] | None = None,
) -> Catalogue:
  """Returns a catalogue of raw records in the official schema, in memory."""
  with tempfile.TemporaryDirectory() as folder:
    blob = pathlib.Path(folder) / 'records'
    arrays = _arrays(_cleaned(items, instructions, human or {}), blob)
    arrays['records'] = np.frombuffer(blob.read_bytes(), np.uint8)
  return Catalogue(arrays)


def _cleaned(
  items: Iterable[Any], instructions: dict, human: dict
) -> Iterator[Product | None]:
  for item in items:
    asin = item.get('asin') if isinstance(item, dict) else None
    asin = asin if isinstance(asin, str) else ''
    yield clean(item, instructions.get(asin), human.get(asin))


def stored(
  key: Sequence[object], make: Callable[[], tuple[Iterable, dict]]
) -> Catalogue:
  """Returns the catalogue of records, made once and mapped afterwards.

  Args:
    key: what the records are a function of.
    make: returns them: items and instructions in the official schema.
  """

  def arrays(folder: pathlib.Path) -> cache.Arrays:
    items, instructions = make()
    return _arrays(_cleaned(items, instructions, {}), folder / 'records')

  folder = cache.place('webshop', _FORMAT, *key)
  return Catalogue(cache.load(folder, arrays), folder)


def load(
  data_dir: str | os.PathLike | None, *, num_products: int | None = None
) -> Catalogue:
  """Returns the catalogue of the official files.

  The first time it reads them and fills the cache (minutes for the full set),
  later it maps what is there.

  Args:
    data_dir: folder of the files; None takes $WEBSHOP_DATA.
    num_products: 1000 takes the small set, None the full one where it is
      there and the small one otherwise; any other number as many of the full
      set's first products.

  Raises:
    ValueError: in one line, if files are missing or cannot be read.
  """
  folder = pathlib.Path(data_dir or os.environ.get('WEBSHOP_DATA', ''))
  if not (data_dir or os.environ.get('WEBSHOP_DATA')):
    raise ValueError(
      'env.data_dir=: no folder of WebShop files; give one or set '
      '$WEBSHOP_DATA; `python -m envs.webshop.download --out DIR` gets them'
    )
  names = _FILES[1_000 if num_products == 1_000 else None]
  if num_products is None and not (folder / names[0]).is_file():
    names = _FILES[1_000]
  for name in names:
    if not (folder / name).is_file():
      raise ValueError(
        f'env.data_dir={folder}: no {name} there; '
        '`python -m envs.webshop.download --out DIR` gets the official files'
      )
  files = [folder / name for name in (*names, _HUMAN_FILE)]
  stamps = [
    (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
    for path in files
    if path.is_file()
  ]
  place = cache.place('webshop', _FORMAT, num_products, stamps)
  make = functools.partial(_read, files, num_products)
  return Catalogue(cache.load(place, make), place)


def _read(
  files: Sequence[pathlib.Path], limit: int | None, folder: pathlib.Path
) -> cache.Arrays:
  """Returns the arrays of official files; the blob goes into the folder."""
  items, instructions, human = files
  written = _read_json(human) if human.is_file() else {}
  extracted = _read_json(instructions)
  try:
    arrays = _arrays(
      _cleaned(_stream(items, limit), extracted, written), folder / 'records'
    )
  except ValueError as error:
    raise ValueError(f'env.data_dir={items}: {error}') from error
  skipped = int(arrays['skipped'][0])
  if skipped:
    print(
      f'{items}: {skipped} records skipped, damaged or there twice',
      file=sys.stderr,
    )
  return arrays


def _read_json(path: pathlib.Path) -> dict:
  try:
    found = json.loads(path.read_text(encoding='utf-8', errors='replace'))
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  except OSError as error:
    raise ValueError(f'{path}: cannot be read: {error}') from error
  if not isinstance(found, dict):
    raise ValueError(f'{path}: holds no JSON object; must be the official file')
  return found


def _stream(path: pathlib.Path, limit: int | None) -> Iterator[Any]:
  """Yields the records of a long JSON list without holding it.

  By the standard library's decoder: streaming ones refuse NaN, which Python's
  own encoder writes.
  """
  bar = tqdm.tqdm(
    desc=f'{path.name}, once',
    total=path.stat().st_size,
    unit='B',
    unit_scale=True,
    disable=None,
  )
  with path.open('rb') as raw, bar:
    file = io.TextIOWrapper(raw, encoding='utf-8', errors='replace')
    for n, item in enumerate(_items(file)):
      if n == limit:
        return
      if n % 100 == 0:
        bar.update(raw.tell() - bar.n)
      yield item
    bar.update(raw.tell() - bar.n)


def _items(file: TextIO) -> Iterator[Any]:
  decoder, expected, number = json.JSONDecoder(), '[', 0
  text, at = '', 0  # what was read and not yet given out; where that begins
  while True:
    try:
      sign = _BLANKS.match(text, at).end()
      if text[sign : sign + 1] == ']' and expected == ',]':
        return
      if text[sign : sign + 1] not in tuple(expected):
        raise ValueError
      start = _BLANKS.match(text, sign + 1).end()
      if text[start : start + 1] == ']' and expected == '[':
        return
      item, end = decoder.raw_decode(text, start)
      if end == len(text):
        raise ValueError  # a number might go on
    except (ValueError, RecursionError):
      more = file.read(max(_CHUNK, len(text) - at))
      if not more or len(text) - at > _LONGEST:
        raise ValueError(
          f'not a whole JSON list: cut off or damaged after {number} records'
        ) from None
      text, at = text[at:] + more, 0
      continue
    expected, at, number = ',]', end, number + 1
    yield item
