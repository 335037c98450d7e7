"""What customers want: instructions with what a purchase must satisfy.

One global list, made once from one seed and shuffled as the original shuffles
it; a split is a range of it. The released GiGPO code makes a list for each
worker instead; `reference` does as it does. The list holds a few numbers for
each product and makes its goals when asked for them: the full catalogue has
millions.
"""

import collections
import dataclasses
import functools
import math
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
    arrays: of each instruction, `entries`: product, which of the product's
      human instructions (-1 for the synthetic one), ceiling, weight [E, 4];
      `ends`: number of goals made from it and those before it [E].
    order: goals in the order of their instructions, shuffled.
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
    number = int(self._order[range(len(self))[index]])
    ends = self._arrays['ends']
    entry = int(np.searchsorted(ends, number, side='right'))
    combination = number - (int(ends[entry - 1]) if entry else 0)
    product, *rest = self._arrays['entries'][entry].tolist()
    return _goal(self._catalogue[int(product)], *rest, combination)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Sequence) and list(self) == list(other)


def _goal(
  product: products.Product,
  which: float,
  ceiling: float,
  weight: float,
  number: int,
) -> Goal:
  if which >= 0:
    text, attributes, options = product.human[int(which)]
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
    weight=weight,
  )


def _combination(product: products.Product, number: int) -> dict[str, str]:
  """Returns the options of a goal; the last name in order varies first."""
  chosen = {}
  for name in sorted(product.options, reverse=True):
    values = product.options[name]
    number, place = divmod(number, len(values))
    chosen[name] = values[place]
  return dict(sorted(chosen.items()))


def prices(catalogue: products.Catalogue, *, seed: int = 0) -> np.ndarray:
  """Returns what each product costs in dollars, [products]."""

  def make() -> cache.Arrays:
    return {'prices': _draw_prices(catalogue, random.Random(seed))}

  return catalogue.derive(f'prices-{seed}', make)['prices']


def _draw_prices(
  catalogue: products.Catalogue, rng: random.Random
) -> np.ndarray:
  """Draws a price where there is a range, before anything else is drawn."""
  found = catalogue.prices[:, 0].copy()
  for number in np.isfinite(catalogue.prices[:, 1]).nonzero()[0].tolist():
    found[number] = rng.uniform(*catalogue.prices[number].tolist())
  return found


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
  name = f'goals-{"human" if human else "synthetic"}-{seed}-{shuffle_seed}'
  make = functools.partial(_arrays, catalogue, human, seed, shuffle_seed)
  arrays = catalogue.derive(name, make)
  return Goals(catalogue, arrays, arrays['order'])


def _arrays(
  catalogue: products.Catalogue, human: bool, seed: int, shuffle_seed: int
) -> cache.Arrays:
  """Returns what `Goals` takes, `order` among it."""
  rng = random.Random(seed)
  costs = _draw_prices(catalogue, rng)
  entries: list[tuple[int, int, float]] = []
  sizes: list[int] = []
  attributes_of: list[tuple[str, ...]] = []
  wanted: collections.Counter[str] = collections.Counter()
  for number in catalogue.has_goal[:, int(human)].nonzero()[0].tolist():
    cost = float(costs[number])
    for which, attributes, size in _instructions(catalogue[number], human):
      ceiling = _ceiling(cost, rng)
      if size:  # else one of its options has no values
        entries.append((number, which, ceiling))
        sizes.append(size)
        attributes_of.append(attributes)
      for attribute in attributes:
        wanted[attribute] += size
  weights = [_weight(a, None if human else wanted) for a in attributes_of]
  order = list(range(sum(sizes)))
  random.Random(shuffle_seed).shuffle(order)
  table = np.array(entries, np.float64).reshape(-1, 3)
  return {
    'entries': np.column_stack((table, np.array(weights))),
    'ends': np.cumsum(sizes, dtype=np.int64),
    'order': np.array(order, np.int32),
  }


def _weight(attributes: Sequence[str], wanted: dict[str, int] | None) -> float:
  """Returns how often the original draws a goal: people's all alike."""
  if wanted is None or not attributes:
    return float(wanted is None)
  return sum(1 / wanted[a] for a in attributes) / len(attributes)


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
  group's number), which draws prices and ceilings and orders the goals too. It
  trains on all but its first 500, and the validation, whose workers have other
  seeds, plays the first 500 of theirs: TRAINING GOALS LEAK INTO VALIDATION. For
  comparison with published numbers only.
  """
  return build(catalogue, human=human, seed=seed, shuffle_seed=seed)


def _ceiling(cost: float, rng: random.Random) -> float:
  """Draws the most that a purchase may cost."""
  above = [ceiling for ceiling in _CEILINGS if ceiling > cost][:4]
  if len(above) < 2:
    return NO_CEILING
  return sorted(rng.sample(above, 2))[1]
