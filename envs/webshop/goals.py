"""What customers want: instructions with what a purchase must satisfy.

One global list, made once from one seed and shuffled as the original shuffles
it; a split is a range of it. The released GiGPO code makes a list for each
worker instead; `reference` does as it does.
"""

import collections
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

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


def draw_prices(
  catalogue: products.Catalogue, rng: random.Random
) -> dict[int, float]:
  """Returns the price of each product that has a range of them, by number.

  The original draws them once at its start, before anything else.
  """
  ranges = catalogue.prices[:, 0] != catalogue.prices[:, 1]
  drawn = {}
  for number in ranges.nonzero()[0].tolist():
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
) -> list[Goal]:
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
  make = _human if human else _synthetic
  goals = []
  for number in catalogue.has_goal[:, int(human)].nonzero()[0].tolist():
    cost = price(catalogue, drawn, number)
    goals += make(catalogue[number], cost, rng)
  if not human:
    goals = _weighted(goals)
  random.Random(shuffle_seed).shuffle(goals)
  return goals


def split(goals: Sequence[Goal], name: str) -> Sequence[Goal]:
  """Returns the goals of a split: 'test', 'dev' or 'train'."""
  first, last = SPLITS[name]
  return goals[first:last]


def reference(
  catalogue: products.Catalogue, *, seed: int, human: bool = False
) -> list[Goal]:
  """Returns the goals of one worker of the released GiGPO code.

  Each group's worker there has a seed of its own (the run's seed and the
  group's number), which draws prices and ceilings and orders the goals too.
  Its first 500 are validated on, the rest trained on. Goals that one worker
  trains on are among those that another validates on: TRAINING GOALS LEAK
  INTO VALIDATION. For comparison with published numbers only.
  """
  return build(catalogue, human=human, seed=seed, shuffle_seed=seed)


def _ceiling(cost: float, rng: random.Random) -> tuple[float, str]:
  """Draws (the most that a purchase may cost, how the customer says so)."""
  above = [ceiling for ceiling in _CEILINGS if ceiling > cost][:4]
  if len(above) < 2:
    return NO_CEILING, ''
  ceiling = sorted(rng.sample(above, 2))[1]
  return ceiling, f', and price lower than {ceiling:.2f} dollars'


def _goal(product: products.Product, **rest) -> Goal:
  return Goal(
    asin=product.asin,
    category=product.category,
    query=product.query,
    name=product.title,
    product_category=product.product_category,
    **rest,
  )


def _synthetic(
  product: products.Product, cost: float, rng: random.Random
) -> Iterator[Goal]:
  ceiling, price_text = _ceiling(cost, rng)
  names = sorted(product.options)
  for values in itertools.product(*(product.options[name] for name in names)):
    chosen = dict(zip(names, values, strict=True))
    words = ', and '.join(f'{name}: {value}' for name, value in chosen.items())
    with_options = f' with {words}' if words else ''
    yield _goal(
      product,
      instruction_text=f'{product.instruction}{with_options}{price_text}',
      attributes=product.instruction_attributes,
      price_upper=ceiling,
      goal_options=chosen,
      weight=1.0,
    )


def _human(
  product: products.Product, cost: float, rng: random.Random
) -> Iterator[Goal]:
  for instruction, attributes, options in product.human:
    if not attributes:
      continue
    ceiling, price_text = _ceiling(cost, rng)
    yield _goal(
      product,
      instruction_text=instruction.strip('.') + price_text,
      attributes=attributes,
      price_upper=ceiling,
      goal_options=options,
      weight=1.0,
    )


def _weighted(goals: list[Goal]) -> list[Goal]:
  """Weighs a goal by how rare its attributes are, on average."""
  counts = collections.Counter(a for goal in goals for a in goal.attributes)
  return [
    dataclasses.replace(
      goal,
      weight=sum(1 / counts[a] for a in goal.attributes)
      / max(len(goal.attributes), 1),
    )
    for goal in goals
  ]
