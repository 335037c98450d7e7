"""Goals of the shop: instructions with the requirements of a purchase.

There is one global list, built once from one seed and shuffled as the original
shuffles it. A split is a range of this list. The released GiGPO code builds a
list for each worker instead; `reference` reproduces that.

The full catalogue has millions of goals. A list therefore stores a few numbers
per instruction and creates a `Goal` when it is indexed.
"""

import collections
import dataclasses
import functools
import math
import operator
import random
from collections.abc import Iterator, Sequence

import numpy as np

from envs import cache
from envs.webshop import products

_CEILINGS = [10.0 * n for n in range(1, 100)]
NO_CEILING = 1_000_000
_SHUFFLE_SEED = 233
# First and last index of each split in the shuffled list, as in the original.
SPLITS = {'test': (0, 500), 'dev': (500, 1_500), 'train': (1_500, None)}


@dataclasses.dataclass(frozen=True)
class Goal:
  """An instruction with its requirements.

  Attributes:
    asin: id of the product that the goal was made from.
    category: department of that product.
    query: search phrase of that product in the official data.
    name: title of that product.
    product_category: path of categories of that product.
    instruction_text: the instruction.
    attributes: attributes that the purchase must have.
    price_upper: maximum price, dollars.
    goal_options: options to choose, {name: value}; for human-written
      instructions, the values only.
    weight: the original's relative probability of drawing the goal.
  """

  asin: str
  category: str
  query: str
  name: str
  product_category: str
  instruction_text: str
  attributes: tuple[str, ...]
  price_upper: float
  goal_options: dict[str, str] | tuple[str, ...]
  weight: float


class Goals(Sequence[Goal]):
  """A list of goals, which are created on access; slices share their data.

  Args:
    catalogue: catalogue of the products.
    arrays: two arrays with a row per instruction. `entries` [E, 4] has the
      product, the index of its human instruction (-1 for the synthetic one),
      the price limit and the weight. `ends` [E] is the cumulative number of
      goals; an instruction has one for each combination of options.
    order: shuffled indices into the goals in the order of `entries`.
  """

  def __init__(
    self,
    catalogue: products.Catalogue,
    arrays: cache.Arrays,
    order: np.ndarray,
  ):
    self._catalogue, self._arrays, self._order = catalogue, arrays, order

  def __len__(self) -> int:
    return len(self._order)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return Goals(self._catalogue, self._arrays, self._order[index])
    goal_index = int(self._order[range(len(self))[index]])
    ends = self._arrays['ends']
    entry = int(np.searchsorted(ends, goal_index, side='right'))
    combination = goal_index - (int(ends[entry - 1]) if entry else 0)
    product, *rest = self._arrays['entries'][entry].tolist()
    return _goal(self._catalogue[int(product)], *rest, combination)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Sequence) and list(self) == list(other)


def _goal(
  product: products.Product,
  human_index: float,
  ceiling: float,
  weight: float,
  combination: int,
) -> Goal:
  if human_index >= 0:
    text, attributes, options = product.human[int(human_index)]
    text = text.strip('.')
  else:
    options = _option_values(product, combination)
    words = ', and '.join(f'{k}: {v}' for k, v in options.items())
    text = product.instruction + (f' with {words}' if words else '')
    attributes = product.instruction_attributes
  if ceiling != NO_CEILING:
    text += f', and price lower than {ceiling:.2f} dollars'
  return Goal(
    asin=product.asin,
    category=product.category,
    query=product.query,
    name=product.title,
    product_category=product.product_category,
    instruction_text=text,
    attributes=attributes,
    price_upper=ceiling,
    goal_options=options,
    weight=weight,
  )


def _option_values(
  product: products.Product, combination: int
) -> dict[str, str]:
  """Returns the values of a combination; the last option name varies fastest.

  Args:
    product: a product with options.
    combination: index into all combinations of values.
  """
  values = {}
  for name in sorted(product.options, reverse=True):
    choices = product.options[name]
    combination, index = divmod(combination, len(choices))
    values[name] = choices[index]
  return dict(sorted(values.items()))


def prices(catalogue: products.Catalogue, *, seed: int = 0) -> np.ndarray:
  """Returns the price of each product in dollars, [products]."""

  def make() -> cache.Arrays:
    return {'prices': _draw_prices(catalogue, random.Random(seed))}

  return catalogue.derive(f'prices-{seed}', make)['prices']


def _draw_prices(
  catalogue: products.Catalogue, rng: random.Random
) -> np.ndarray:
  """Draws the prices of products with a price range.

  These must be the first draws of `rng`, as in the original.
  """
  drawn = catalogue.prices[:, 0].copy()
  for product in np.isfinite(catalogue.prices[:, 1]).nonzero()[0].tolist():
    drawn[product] = rng.uniform(*catalogue.prices[product].tolist())
  return drawn


def build(
  catalogue: products.Catalogue,
  *,
  human: bool = False,
  seed: int = 0,
  shuffle_seed: int = _SHUFFLE_SEED,
) -> Goals:
  """Returns all goals, in the original's order.

  Args:
    catalogue: catalogue of the products.
    human: whether to use the human-written instructions instead of the
      synthetic ones.
    seed: seed of prices and price limits; the original sets none.
    shuffle_seed: seed of the order.
  """
  name = f'goals-{"human" if human else "synthetic"}-{seed}-{shuffle_seed}'
  make = functools.partial(_arrays, catalogue, human, seed, shuffle_seed)
  arrays = catalogue.derive(name, make)
  return Goals(catalogue, arrays, arrays['order'])


def _arrays(
  catalogue: products.Catalogue, human: bool, seed: int, shuffle_seed: int
) -> cache.Arrays:
  """Returns the arrays of `Goals`, and `order`."""
  rng = random.Random(seed)
  drawn_prices = _draw_prices(catalogue, rng)
  entries: list[tuple[int, int, float]] = []
  sizes: list[int] = []
  attributes_of: list[tuple[str, ...]] = []
  frequencies: collections.Counter[str] = collections.Counter()
  for index in catalogue.has_goal[:, int(human)].nonzero()[0].tolist():
    price = float(drawn_prices[index])
    for human_index, attributes, size in _instructions(catalogue[index], human):
      ceiling = _draw_ceiling(price, rng)
      if size:  # 0 if an option of the product has no values
        entries.append((index, human_index, ceiling))
        sizes.append(size)
        attributes_of.append(attributes)
      for attribute in attributes:
        frequencies[attribute] += size
  weights = [_weight(a, None if human else frequencies) for a in attributes_of]
  order = list(range(sum(sizes)))
  random.Random(shuffle_seed).shuffle(order)
  table = np.array(entries, np.float64).reshape(-1, 3)
  return {
    'entries': np.column_stack((table, np.array(weights))),
    'ends': np.cumsum(sizes, dtype=np.int64),
    'order': np.array(order, np.int32),
  }


def _weight(
  attributes: Sequence[str], frequencies: dict[str, int] | None
) -> float:
  """Returns the original's relative probability of drawing a goal.

  Args:
    attributes: attributes of the goal.
    frequencies: number of goals with each attribute; None for human-written
      goals, which all have the weight 1.
  """
  if frequencies is None or not attributes:
    return float(frequencies is None)
  # From Python 3.12 on, sum() has other last bits than the original.
  inverses = (1 / frequencies[a] for a in attributes)
  return functools.reduce(operator.add, inverses) / len(attributes)


def _instructions(
  product: products.Product, human: bool
) -> Iterator[tuple[int, tuple[str, ...], int]]:
  """Yields (human index or -1, attributes, number of goals) of a product."""
  if not human:
    size = math.prod(len(values) for values in product.options.values())
    yield -1, product.instruction_attributes, size
    return
  for human_index, (_, attributes, _) in enumerate(product.human):
    if attributes:
      yield human_index, attributes, 1


def split(goals: Goals, name: str) -> Goals:
  """Returns the goals of a split: 'test', 'dev' or 'train'."""
  first, last = SPLITS[name]
  return goals[first:last]


def reference(
  catalogue: products.Catalogue, *, seed: int, human: bool = False
) -> Goals:
  """Returns the list of goals of one worker of the released GiGPO code.

  In that code, each group has a worker with its own seed, the run's seed plus
  the group's index. The seed determines prices, price limits and the order of
  the goals. A worker trains on all goals except its first 500. Validation
  workers have other seeds, so other orders, and play their first 500 goals:
  TRAINING GOALS LEAK INTO VALIDATION. Use it only to compare with published
  numbers.
  """
  return build(catalogue, human=human, seed=seed, shuffle_seed=seed)


def _draw_ceiling(price: float, rng: random.Random) -> float:
  """Draws the price limit of a goal; NO_CEILING if the price is too high."""
  above = [ceiling for ceiling in _CEILINGS if ceiling > price][:4]
  if len(above) < 2:
    return NO_CEILING
  return sorted(rng.sample(above, 2))[1]
