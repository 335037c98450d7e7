"""What the shop sells: the official files, cleaned as the original cleans them.

A catalogue is arrays: each product's record as JSON in one long blob, and the
search index. Small ones live in memory. Those of the official files are built
once, into a cache folder, and mapped from there: all processes of a host share
one copy, and starting reads almost nothing.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from envs.webshop import search

NO_PRICE = 100.0
_NO_ATTRIBUTES = ('DUMMY_ATTR',)  # the original's, of a product without entry
_ASIN_LENGTH = 10
_FORMAT = 2  # of the cache; raised when it or the cleaning changes
# The catalogue, what was extracted from it, what people wrote about it.
_FILES = {
  1_000: ('items_shuffle_1000.json', 'items_ins_v2_1000.json'),
  None: ('items_shuffle.json', 'items_ins_v2.json'),
}
_HUMAN_FILE = 'items_human_ins.json'


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
  written = (r for r in raw or () if isinstance(r, dict))
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
  """

  def __init__(self, arrays: dict[str, np.ndarray]):
    self._blob, self._ends = arrays['records'], arrays['record_ends']
    self._asins, self._sorted = arrays['asins'], arrays['by_asin']
    self.prices = arrays['prices']
    self.has_goal = arrays['has_goal']
    self.skipped = int(arrays['skipped'][0])
    self.index = search.Index(arrays, self._asins)
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
) -> dict[str, np.ndarray]:
  """Returns all of a catalogue but the blob, which it writes."""
  ends, asins, prices, has_goal, skipped = [0], [], [], [], 0
  seen: set[str] = set()
  builder = search.Builder()
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
      builder.add(product.text())
  if not asins:
    raise ValueError(f'no product in it ({skipped} damaged records)')
  names = np.array(asins)
  return builder.arrays() | {
    'record_ends': np.array(ends, np.int64),
    'asins': names,
    'by_asin': np.argsort(names, kind='stable').astype(np.int32),
    'prices': np.array(prices),
    'has_goal': np.array(has_goal),
    'skipped': np.array([skipped]),
  }


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


def load(
  data_dir: str | os.PathLike | None, *, num_products: int | None = None
) -> Catalogue:
  """Returns the catalogue of the official files.

  The first time it reads them and builds the cache (minutes for the full
  set), later it maps the cache. The folder of the cache is
  $GIGPO_JAX_CACHE, or ~/.cache/gigpo_jax.

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
  cache = _cache_folder(files, num_products)
  if not cache.is_dir():
    _build(files, num_products, cache)
  arrays = {
    path.stem: np.load(path, mmap_mode='r') for path in cache.glob('*.npy')
  }
  arrays['records'] = np.memmap(cache / 'records', np.uint8, mode='r')
  # The same memory without numpy's slow class for it.
  arrays = {name: mapped.view(np.ndarray) for name, mapped in arrays.items()}
  return Catalogue(arrays)


def _cache_folder(
  files: Sequence[pathlib.Path], num_products: int | None
) -> pathlib.Path:
  stamps = [
    (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
    for path in files
    if path.is_file()
  ]
  key = repr((_FORMAT, num_products, stamps)).encode()
  home = os.environ.get('GIGPO_JAX_CACHE') or '~/.cache/gigpo_jax'
  name = f'webshop-{hashlib.sha256(key).hexdigest()[:16]}'
  return pathlib.Path(home).expanduser() / name


def _build(
  files: Sequence[pathlib.Path], num_products: int | None, cache: pathlib.Path
) -> None:
  """Writes a cache beside where it belongs and moves it there at the end.

  Several processes may do so at once; the first to finish wins.
  """
  items, instructions, human = files
  cache.parent.mkdir(parents=True, exist_ok=True)
  beside = pathlib.Path(tempfile.mkdtemp(dir=cache.parent, prefix='building-'))
  try:
    written = _read_json(human) if human.is_file() else {}
    records = _stream(items, num_products)
    try:
      arrays = _arrays(
        _cleaned(records, _read_json(instructions), written), beside / 'records'
      )
    except ValueError as error:
      raise ValueError(f'env.data_dir={items}: {error}') from error
    for name, values in arrays.items():
      np.save(beside / f'{name}.npy', values)
    try:
      os.rename(beside, cache)
    except OSError:
      if not cache.is_dir():
        raise
  finally:
    shutil.rmtree(beside, ignore_errors=True)


def _read_json(path: pathlib.Path) -> dict:
  try:
    found = json.loads(path.read_text(encoding='utf-8', errors='replace'))
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(found, dict):
    raise ValueError(f'{path}: holds no JSON object; must be the official file')
  return found


def _stream(path: pathlib.Path, limit: int | None) -> Iterator[Any]:
  """Yields the records of a long JSON list without holding it."""
  import ijson

  try:
    with path.open('rb') as file:
      for n, item in enumerate(ijson.items(file, 'item', use_float=True)):
        if limit is not None and n == limit:
          return
        yield item
  except ijson.JSONError as error:
    text = ' '.join(str(error).split())[:120]
    raise ValueError(f'not a whole JSON list: {text}') from error
