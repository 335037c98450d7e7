"""What customers want: instructions with what a purchase must satisfy.

One global list, made once from one seed and shuffled as the original shuffles
it; a split is a range of it. The released GiGPO code makes a list for each
worker instead; `reference` does as it does. The list holds a few numbers for
each product and makes its goals when asked for them: the full catalogue has
millions.
"""

import collections
import dataclasses
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np

from envs.webshop import products

_CEILINGS = [10.0 * n for n in range(1, 100)]
NO_CEILING = 1_000_000
_SHUFFLE_SEED = 233
# First and last index of each split in the shuffled list, as in the original.
SPLITS = {'test': (0, 500), 'dev': (500, 1_500), 'train': (1_500, None)}


@dataclasses.dataclass(frozen=True)
class Goal:
  """A wanted product.

  Attributes:
    asin: the product it was made from.
    category: its department.
    query: the words by which it was once found.
    name: its title.
    product_category: its path of categories.
    instruction_text: what the customer says.
    attributes: that the purchase must have.
    price_upper: most that it may cost, dollars.
    goal_options: what must be chosen: {name: value}, or values in a list for
      instructions that people wrote.
    weight: how often the original draws it, relative to others.
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
  """Goals by number; a slice shares what its whole holds.

  Args:
    catalogue: what they are about.
    entries: of each instruction: product, which of the product's human
      instructions (-1 for the synthetic one), ceiling, number of goals made
      from it. [E, 4] float64, which holds integers as well.
    order: goals in the order of their entries, shuffled.
    frequencies: how many goals want an attribute; None gives all weight 1.
  """

  def __init__(
    self,
    catalogue: products.Catalogue,
    entries: np.ndarray,
    order: np.ndarray,
    frequencies: dict[str, int] | None,
  ):
    self._catalogue, self._entries = catalogue, entries
    self._ends = np.cumsum(entries[:, 3]).astype(np.int64)
    self._order, self._frequencies = order, frequencies

  def __len__(self) -> int:
    return len(self._order)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return Goals(
        self._catalogue, self._entries, self._order[index], self._frequencies
      )
    number = self._order[range(len(self))[index]]
    entry = int(np.searchsorted(self._ends, number, side='right'))
    product, which, ceiling, size = self._entries[entry].tolist()
    combination = int(number - self._ends[entry] + size)
    return self._goal(
      self._catalogue[int(product)], int(which), ceiling, combination
    )

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Sequence) and list(self) == list(other)

  def _goal(
    self, product: products.Product, which: int, ceiling: float, number: int
  ) -> Goal:
    if which >= 0:
      text, attributes, options = product.human[which]
      text = text.strip('.')
    else:
      options = _combination(product, number)
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
      weight=self._weight(attributes),
    )

  def _weight(self, attributes: Sequence[str]) -> float:
    if self._frequencies is None or not attributes:
      return float(self._frequencies is None)
    rareness = (1 / self._frequencies[a] for a in attributes)
    return sum(rareness) / len(attributes)


def _combination(product: products.Product, number: int) -> dict[str, str]:
  """Returns the options of a goal; the last name in order varies first."""
  chosen = {}
  for name in sorted(product.options, reverse=True):
    values = product.options[name]
    number, place = divmod(number, len(values))
    chosen[name] = values[place]
  return dict(sorted(chosen.items()))


def draw_prices(
  catalogue: products.Catalogue, rng: random.Random
) -> dict[int, float]:
  """Returns the price of each product that has a range of them, by number.

  The original draws them once at its start, before anything else.
  """
  drawn = {}
  for number in np.isfinite(catalogue.prices[:, 1]).nonzero()[0].tolist():
    low, high = catalogue.prices[number].tolist()
    drawn[number] = rng.uniform(low, high)
  return drawn


def price(
  catalogue: products.Catalogue, drawn: dict[int, float], number: int
) -> float:
  """Returns what a product costs in dollars."""
  return drawn.get(number, float(catalogue.prices[number, 0]))


def build(
  catalogue: products.Catalogue,
  *,
  human: bool = False,
  seed: int = 0,
  shuffle_seed: int = _SHUFFLE_SEED,
) -> Goals:
  """Returns all goals, in the original's order.

  Args:
    catalogue: what is sold.
    human: whether to take instructions that people wrote, rather than those
      made from attributes and options.
    seed: of prices and ceilings, which the original leaves to chance.
    shuffle_seed: of the order.
  """
  rng = random.Random(seed)
  drawn = draw_prices(catalogue, rng)
  entries: list[tuple[int, int, float, int]] = []
  wanted: collections.Counter[str] = collections.Counter()
  for number in catalogue.has_goal[:, int(human)].nonzero()[0].tolist():
    cost = price(catalogue, drawn, number)
    product = catalogue[number]
    for which, attributes, size in _instructions(product, human):
      entries.append((number, which, _ceiling(cost, rng), size))
      for attribute in attributes:
        wanted[attribute] += size
  table = np.array(entries, np.float64).reshape(-1, 4)
  order = list(range(int(table[:, 3].sum())))
  random.Random(shuffle_seed).shuffle(order)
  return Goals(
    catalogue, table, np.array(order, np.int64), None if human else dict(wanted)
  )


def _instructions(
  product: products.Product, human: bool
) -> Iterator[tuple[int, tuple[str, ...], int]]:
  """Yields (which, attributes, number of goals) of a product's instructions."""
  if not human:
    size = math.prod(len(values) for values in product.options.values())
    yield -1, product.instruction_attributes, size
    return
  for which, (_, attributes, _) in enumerate(product.human):
    if attributes:
      yield which, attributes, 1


def split(goals: Goals, name: str) -> Goals:
  """Returns the goals of a split: 'test', 'dev' or 'train'."""
  first, last = SPLITS[name]
  return goals[first:last]


def reference(
  catalogue: products.Catalogue, *, seed: int, human: bool = False
) -> Goals:
  """Returns the goals of one worker of the released GiGPO code.

  Each group's worker there has a seed of its own (the run's seed and the
  group's number), which draws prices and ceilings and orders the goals too.
  Its first 500 are validated on, the rest trained on. Goals that one worker
  trains on are among those that another validates on: TRAINING GOALS LEAK
  INTO VALIDATION. For comparison with published numbers only.
  """
  return build(catalogue, human=human, seed=seed, shuffle_seed=seed)


def _ceiling(cost: float, rng: random.Random) -> float:
  """Draws the most that a purchase may cost."""
  above = [ceiling for ceiling in _CEILINGS if ceiling > cost][:4]
  if len(above) < 2:
    return NO_CEILING
  return sorted(rng.sample(above, 2))[1]
