"""The score of a purchase in [0, 1] and its parts, as in the original."""

import functools
import re
from collections.abc import Iterable, Sequence

from rapidfuzz import fuzz, utils

from envs.webshop import goals, products, titles

_MATCH = 85  # two phrases match if their similarity, percent, is above this
# A text is replaced by the first of these colours that it contains.
_COLORS = (
  'alabaster apricot aqua ash asphalt azure banana beige black blue blush '
  'bordeaux bronze brown burgundy camel camo caramel champagne charcoal '
  'cheetah chestnut chocolate christmas coffee cognac copper coral cranberry '
  'cream crystal dark denim eggplant elephant espresso fuchsia gold granite '
  'grape graphite grass gray green grey heather indigo ivory ivy khaki '
  'lavender lemon leopard light lilac lime magenta maroon mauve merlot '
  'midnight mint mocha multicolor mushroom mustard natural navy nude olive '
  'orange peach pewter pink plum purple rainbow red rose royal rust sand '
  'sapphire seashell silver skull slate steel stone stonewash sunflower tan '
  'taupe teal tiger turquoise violet walnut wheat white wine yellow'
).split()
_REMOVED = re.compile('[\x80-\xff]')  # thefuzz 0.19 removes these characters


def similarity(a: object, b: object) -> float:
  """Returns the token set ratio of two phrases, percent.

  The original uses thefuzz 0.19 with difflib. Single values differ, but they
  are on the same side of the threshold of 85.
  """
  if a == b:
    return 100.0
  a, b = (_REMOVED.sub('', str(phrase)) for phrase in (a, b))
  return fuzz.token_set_ratio(a, b, processor=utils.default_process)


def plain_color(option: str | tuple[str, str]) -> str | tuple[str, str]:
  """Returns the first basic colour in an option; the option if it has none.

  In a string, substrings count, too ('tan' in 'stand'). In a pair (name, value)
  only a complete element counts.
  """
  return next((color for color in _COLORS if color in option), option)


def attribute_hits(product: products.Product, attributes: Sequence[str]) -> int:
  """Returns how many wanted attributes the product has."""
  texts = _lower_texts(product)
  return sum(
    any(similarity(own, wanted) > _MATCH for own in product.attributes)
    or any(wanted in text for text in texts)
    for wanted in attributes
  )


@functools.lru_cache(256)
def _lower(title: str, bullets: tuple[str, ...], description: str):
  return title.lower(), ' '.join(bullets).lower(), description.lower()


def _lower_texts(product: products.Product) -> tuple[str, ...]:
  return _lower(product.title, product.bullets, product.description)


def option_hits(
  chosen: Iterable[str], wanted: Sequence[str | tuple[str, str]]
) -> int:
  """Returns how many wanted options match a chosen value.

  Args:
    chosen: chosen values.
    wanted: pairs (name, value) of synthetic goals, or values of human goals. As
      in the original, a pair is compared as text, including its name.
  """
  chosen = [plain_color(value) for value in chosen]
  return sum(
    any(similarity(value, plain_color(option)) > _MATCH for value in chosen)
    for option in wanted
  )


def type_score(product: products.Product, goal: goals.Goal) -> float:
  """Returns how well the product's type fits the goal: 0, 0.1, 0.5 or 1."""
  title_score = titles.overlap(product.title, goal.name)
  if title_score == 0:
    return 0.0
  if title_score < 0.1:
    return 0.1
  category, goal_category = (
    {part.strip() for part in path.split('›')}
    for path in (product.product_category, goal.product_category)
  )
  same_type = (
    product.query == goal.query
    or len(category & goal_category) >= 2
    or title_score > 0.2
  )
  return 1.0 if same_type else 0.5


def score(
  product: products.Product,
  goal: goals.Goal,
  *,
  price: float,
  options: dict[str, str],
) -> tuple[float, dict[str, float | bool | None]]:
  """Returns the score of a purchase and its parts.

  Args:
    product: the product that was bought.
    goal: the goal of the task.
    price: price of the product, dollars.
    options: option name -> chosen value.

  Returns:
    The score, type * (attributes + options + price) / (wanted attributes +
    wanted options + 1), and a dictionary of its parts. `r_type` is the type
    score. `r_att` and `r_option` are the shares of wanted attributes and
    options that the purchase has; `r_option` is None if no option is wanted.
    `r_price` tells whether the price is within the limit.
  """
  wanted = goal.goal_options
  wanted = list(wanted.items()) if isinstance(wanted, dict) else list(wanted)
  num_attributes = attribute_hits(product, goal.attributes)
  num_options = option_hits(options.values(), wanted)
  cheap = price <= goal.price_upper
  r_type = type_score(product, goal)
  num_wanted = len(goal.attributes) + len(wanted) + 1
  return (num_attributes + num_options + cheap) / num_wanted * r_type, {
    'r_type': r_type,
    'r_att': num_attributes / max(len(goal.attributes), 1),
    'r_option': num_options / len(wanted) if wanted else None,
    'r_price': cheap,
  }
