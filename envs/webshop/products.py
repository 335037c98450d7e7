"""The product catalogue: official files, cleaned as the original cleans them.

A catalogue consists of arrays: the products' records, as JSON in one blob, and
the search index. They are built once in a cache folder and memory-mapped from
there. All processes of a host share one copy, and loading takes no time.
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
# The original's attributes of a product without an entry in the file.
_NO_ATTRIBUTES = ('DUMMY_ATTR',)
_ASIN_LENGTH = 10
# Version of the cache; increase it if the arrays or the cleaning change.
_FORMAT = 5
# num_products -> (file of products, file of attributes and instructions).
_FILES = {
  1_000: ('items_shuffle_1000.json', 'items_ins_v2_1000.json'),
  None: ('items_shuffle.json', 'items_ins_v2.json'),
}
_HUMAN_FILE = 'items_human_ins.json'
_CHUNK = 1 << 20  # characters to read at a time
_MAX_RECORD = 1 << 26  # characters
_WHITESPACE = re.compile(r'[ \t\n\r]*')
_LABEL_PREFIX = 'label_'  # prefix of the names of the arrays of `labels`


@dataclasses.dataclass(frozen=True)
class Product:
  """A cleaned product.

  The names of the attributes are the keys of the records in the cache.

  Attributes:
    asin: Amazon's product id.
    title: title of the product.
    description: text of its Description page.
    bullets: paragraphs of its Features page.
    price_tag: price or price range, as pages show it.
    prices: the price, or the lowest and the highest price, dollars.
    options: option name -> values.
    category: one of the shop's few departments.
    query: search phrase of the product in the official data.
    product_category: path of categories, joined by ' › '.
    attributes: attributes for goals and rewards; hidden from the agent.
    instruction: synthetic instruction; '' for a product without goals.
    instruction_attributes: attributes that the synthetic instruction names.
    human: human-written instructions, each (instruction, attributes, options).
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
    """Returns the text that the search index contains of the product."""
    options = ', and '.join(
      f'{name}: {", ".join(values)}' for name, values in self.options.items()
    )
    first = self.bullets[0] if self.bullets else ''
    return ' '.join((self.title, self.description, first, options)).lower()


def clean(
  item: Any, instruction: Any = None, human: Any = None
) -> Product | None:
  """Cleans a raw record; returns None if it is not a valid product.

  Args:
    item: entry of the file of products.
    instruction: its entry of the file of attributes and instructions.
    human: its entry of the file of human-written instructions.
  """
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
    human=_human_instructions(human),
  )


def read_prices(pricing: Any) -> tuple[float, ...]:
  """Parses a text like '$1' or '$1 - $2' into one or two prices."""
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
  for name, entries in raw.items():
    if not isinstance(entries, list):
      continue
    values = (e.get('value') for e in entries if isinstance(e, dict))
    options[name.lower()] = tuple(
      value.strip().replace('/', ' | ').lower()
      for value in values
      if isinstance(value, str)
    )
  return options


def _human_instructions(raw: Any) -> tuple:
  raw = raw if isinstance(raw, list) else ()
  entries = (r for r in raw if isinstance(r, dict))
  return tuple(
    (
      _text(r.get('instruction')),
      _texts(r.get('instruction_attributes')),
      _texts(r.get('instruction_options')),
    )
    for r in entries
  )


class Catalogue(Sequence[Product]):
  """The products in the order of their file, with search indices.

  Attributes:
    skipped: number of damaged or duplicate records.
    index: text search over the products.
    labels: exact lookup of products by attribute, category or query.
  """

  def __init__(self, arrays: cache.Arrays, folder: pathlib.Path | None = None):
    """Creates a catalogue from its arrays.

    Args:
      arrays: arrays of the catalogue.
      folder: cache folder that they are mapped from; None if in memory.
    """
    self._folder = folder
    self._blob, self._ends = arrays['records'], arrays['record_ends']
    self._asins = arrays['asins']
    self._by_asin = arrays['document_numbers_by_name']
    self.prices = arrays['prices']
    self.has_goal = arrays['has_goal']
    self.skipped = int(arrays['skipped'][0])
    self.index = search.Index(arrays)
    self.labels = search.Index(
      {
        name.removeprefix(_LABEL_PREFIX): values
        for name, values in arrays.items()
        if name.startswith(_LABEL_PREFIX)
      }
    )
    self._product = functools.lru_cache(4096)(self._read_product)

  def __len__(self) -> int:
    return len(self._ends) - 1

  def __getitem__(self, index: int) -> Product:
    return self._product(range(len(self))[index])

  def _read_product(self, index: int) -> Product:
    start, end = self._ends[index : index + 2]
    record = json.loads(self._blob[start:end].tobytes())
    for name, value in record.items():
      if isinstance(value, list):
        record[name] = _to_tuples(value)
    record['options'] = {n: tuple(v) for n, v in record['options'].items()}
    return Product(**record)

  def derive(self, name: str, make: Callable[[], cache.Arrays]) -> cache.Arrays:
    """Returns arrays derived from this catalogue, cached next to it.

    Args:
      name: suffix of the cache folder; must identify the arrays.
      make: computes the arrays.
    """
    if self._folder is None:
      return make()
    folder = self._folder.with_name(f'{self._folder.name}-{name}')
    return cache.load(folder, lambda _: make())

  def asin(self, index: int) -> str:
    """Returns the id of a product without reading its record."""
    return self._asins[index].decode()

  def find(self, asin: str) -> int | None:
    """Returns the index of the product with an id; None if there is none."""
    position = bisect.bisect_left(
      self._by_asin, asin.encode(), key=self._asins.__getitem__
    )
    if position == len(self) or self.asin(self._by_asin[position]) != asin:
      return None
    return int(self._by_asin[position])


def _to_tuples(value: Any) -> Any:
  return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _arrays(
  products: Iterable[Product | None], blob_path: pathlib.Path
) -> cache.Arrays:
  """Writes the blob of records; returns the other arrays of a catalogue.

  Args:
    products: the products; None for a damaged record.
    blob_path: file to write the records to.
  """
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
      # UTF-8 cannot encode a lone surrogate, half of a damaged emoji.
      ends.append(ends[-1] + blob.write(record.encode('utf-8', 'replace')))
      asins.append(product.asin.encode('utf-8', 'replace'))
      # NaN marks a single price; the two prices of a range may be equal.
      prices.append((*product.prices, math.nan)[:2])
      has_goal.append((bool(product.instruction), bool(product.human)))
      cluster = f'{product.query} {product.title[:80]}'
      builder.add(product.asin, analysis.terms(product.text()), cluster)
      labels.add(product.asin, list(_labels(product)))
  if not asins:
    raise ValueError(f'no valid product in it ({skipped} damaged records)')
  label_arrays = {
    _LABEL_PREFIX + n: values for n, values in labels.arrays().items()
  }
  return (
    label_arrays
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
  """Yields the labels of a product, for `Catalogue.labels`."""
  yield label('<c>', product.category)
  yield label('<q>', product.query)
  for attribute in product.attributes:
    yield label('<a>', attribute)


def label(prefix: str, value: str) -> str:
  """Returns a label.

  Args:
    prefix: as in a search: <a> for an attribute, <c> category, <q> query.
    value: the attribute, category or query.
  """
  # UTF-8 cannot encode a lone surrogate, half of a damaged emoji.
  return (prefix + value).encode('utf-8', 'replace').decode()


def from_records(
  items: Iterable[Any],
  instructions: dict[str, Any],
  human: dict[str, Any] | None = None,
) -> Catalogue:
  """Builds a catalogue in memory from raw records in the official schema.

  Args:
    items: entries of the file of products.
    instructions: asin -> entry of the file of attributes and instructions.
    human: asin -> entry of the file of human-written instructions.

  Raises:
    ValueError: if no record is a valid product.
  """
  with tempfile.TemporaryDirectory() as folder:
    blob = pathlib.Path(folder) / 'records'
    arrays = _arrays(_clean_all(items, instructions, human or {}), blob)
    arrays['records'] = np.frombuffer(blob.read_bytes(), np.uint8)
  return Catalogue(arrays)


def _clean_all(
  items: Iterable[Any], instructions: dict, human: dict
) -> Iterator[Product | None]:
  for item in items:
    asin = item.get('asin') if isinstance(item, dict) else None
    asin = asin if isinstance(asin, str) else ''
    yield clean(item, instructions.get(asin), human.get(asin))


def cached(
  key: Sequence[object], make: Callable[[], tuple[Iterable, dict]]
) -> Catalogue:
  """Returns a catalogue from the cache; builds it the first time.

  Args:
    key: everything that the records depend on.
    make: returns (items, instructions) in the official schema.
  """

  def arrays(folder: pathlib.Path) -> cache.Arrays:
    items, instructions = make()
    return _arrays(_clean_all(items, instructions, {}), folder / 'records')

  folder = cache.place('webshop', _FORMAT, *key)
  return Catalogue(cache.load(folder, arrays), folder)


def load(
  data_dir: str | os.PathLike | None, *, num_products: int | None = None
) -> Catalogue:
  """Loads the catalogue of the official files.

  The first call reads the files and fills the cache, which takes minutes for
  the full set. Later calls map the cache.

  Args:
    data_dir: folder of the files; None for $WEBSHOP_DATA.
    num_products: 1000 for the small set; None for the full set or, if it is
      missing, the small set; another number n for the first n products of the
      full set.

  Raises:
    ValueError: in one line, if files are missing or cannot be read.
  """
  folder = pathlib.Path(data_dir or os.environ.get('WEBSHOP_DATA', ''))
  if not (data_dir or os.environ.get('WEBSHOP_DATA')):
    raise ValueError(
      'env.data_dir=: no folder of WebShop files; download them with '
      '`python -m envs.webshop.download --out DIR` and set env.data_dir or '
      '$WEBSHOP_DATA to DIR'
    )
  names = _FILES[1_000 if num_products == 1_000 else None]
  if num_products is None and not (folder / names[0]).is_file():
    names = _FILES[1_000]
  for name in names:
    if not (folder / name).is_file():
      raise ValueError(
        f'env.data_dir={folder}: has no {name}; download the official files '
        'with `python -m envs.webshop.download --out DIR`'
      )
  files = [folder / name for name in (*names, _HUMAN_FILE)]
  stamps = [
    (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
    for path in files
    if path.is_file()
  ]
  cache_folder = cache.place('webshop', _FORMAT, num_products, stamps)
  make = functools.partial(_read_files, files, num_products)
  return Catalogue(cache.load(cache_folder, make), cache_folder)


def _read_files(
  files: Sequence[pathlib.Path], limit: int | None, folder: pathlib.Path
) -> cache.Arrays:
  """Reads official files; writes the blob of records into the folder.

  Args:
    files: paths of the products, the instructions, the human instructions.
    limit: number of products to read; None for all.
    folder: folder for the blob.
  """
  items, instructions_path, human_path = files
  human = _read_json(human_path) if human_path.is_file() else {}
  instructions = _read_json(instructions_path)
  try:
    arrays = _arrays(
      _clean_all(_stream(items, limit), instructions, human),
      folder / 'records',
    )
  except ValueError as error:
    raise ValueError(f'env.data_dir={items}: {error}') from error
  skipped = int(arrays['skipped'][0])
  if skipped:
    print(
      f'{items}: skipped {skipped} damaged or duplicate records',
      file=sys.stderr,
    )
  return arrays


def _read_json(path: pathlib.Path) -> dict:
  try:
    contents = json.loads(path.read_text(encoding='utf-8', errors='replace'))
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  except OSError as error:
    raise ValueError(f'{path}: cannot be read: {error}') from error
  if not isinstance(contents, dict):
    raise ValueError(f'{path}: not a JSON object; must be the official file')
  return contents


def _stream(path: pathlib.Path, limit: int | None) -> Iterator[Any]:
  """Yields the records of a long JSON list without loading the entire list.

  Uses the standard library's decoder: streaming decoders reject NaN, which
  Python's encoder writes.
  """
  bar = tqdm.tqdm(
    desc=f'reading {path.name} (first time only)',
    total=path.stat().st_size,
    unit='B',
    unit_scale=True,
    disable=None,
  )
  with path.open('rb') as raw, bar:
    file = io.TextIOWrapper(raw, encoding='utf-8', errors='replace')
    for n, item in enumerate(_decode_items(file)):
      if n == limit:
        return
      if n % 100 == 0:
        bar.update(raw.tell() - bar.n)
      yield item
    bar.update(raw.tell() - bar.n)


def _decode_items(file: TextIO) -> Iterator[Any]:
  """Yields the items of a JSON list; reads more text when decoding fails."""
  decoder, expected, count = json.JSONDecoder(), '[', 0
  text, position = '', 0  # text[position:] is read but not yet decoded
  while True:
    try:
      separator = _WHITESPACE.match(text, position).end()
      if text[separator : separator + 1] == ']' and expected == ',]':
        return
      if text[separator : separator + 1] not in tuple(expected):
        raise ValueError
      start = _WHITESPACE.match(text, separator + 1).end()
      if text[start : start + 1] == ']' and expected == '[':
        return
      item, end = decoder.raw_decode(text, start)
      if end == len(text):
        raise ValueError  # a number may continue in the next chunk
    except (ValueError, RecursionError):
      more = file.read(max(_CHUNK, len(text) - position))
      if not more or len(text) - position > _MAX_RECORD:
        raise ValueError(
          f'not a complete JSON list: truncated or damaged after {count} '
          'records; download it again'
        ) from None
      text, position = text[position:] + more, 0
      continue
    expected, position, count = ',]', end, count + 1
    yield item
