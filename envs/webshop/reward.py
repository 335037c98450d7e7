"""What a purchase is worth: the original's score in [0, 1], part by part."""

import functools
import re
from collections.abc import Iterable, Sequence

from rapidfuzz import fuzz, utils

from envs.webshop import goals, products, titles

_MATCH = 85  # similarity, percent, above which two phrases are one
# The first that occurs in a text stands for the text.
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
_DROPPED = re.compile('[\x80-\xff]')  # by thefuzz 0.19


def similarity(a: object, b: object) -> float:
  """Returns the token set ratio of two phrases, percent.

  On the same side of 85 as thefuzz 0.19 with difflib, which the original
  uses; single values differ.
  """
  if a == b:
    return 100.0
  a, b = (_DROPPED.sub('', str(phrase)) for phrase in (a, b))
  return fuzz.token_set_ratio(a, b, processor=utils.default_process)


def plain_color(option: str | tuple[str, str]) -> str | tuple[str, str]:
  """Returns the first basic colour in an option, or the option.

  In a text any substring counts ('tan' in 'stand'); of a pair (name, value),
  only an element that is the colour.
  """
  return next((color for color in _COLORS if color in option), option)


def attribute_hits(product: products.Product, attributes: Sequence[str]) -> int:
  """Returns how many wanted attributes the product has."""
  texts = _texts(product)
  return sum(
    any(similarity(has, wanted) > _MATCH for has in product.attributes)
    or any(wanted in text for text in texts)
    for wanted in attributes
  )


@functools.lru_cache(256)
def _lowered(title: str, bullets: tuple[str, ...], description: str):
  return title.lower(), ' '.join(bullets).lower(), description.lower()


def _texts(product: products.Product) -> tuple[str, ...]:
  return _lowered(product.title, product.bullets, product.description)


def option_hits(
  chosen: Iterable[str], wanted: Sequence[str | tuple[str, str]]
) -> int:
  """Returns how many wanted options are met by some chosen value.

  Args:
    chosen: values.
    wanted: pairs (name, value) of synthetic goals, or values of human ones. A
      pair is compared as its text, name and all, as in the original.
  """
  chosen = [plain_color(value) for value in chosen]
  return sum(
    any(similarity(value, plain_color(option)) > _MATCH for value in chosen)
    for option in wanted
  )


def type_score(product: products.Product, goal: goals.Goal) -> float:
  """Returns whether it is the right kind of thing: 0, 0.1, 0.5 or 1."""
  title_score = titles.overlap(product.title, goal.name)
  if title_score == 0:
    return 0.0
  if title_score < 0.1:
    return 0.1
  category, wanted = (
    {part.strip() for part in path.split('›')}
    for path in (product.product_category, goal.product_category)
  )
  alike = (
    product.query == goal.query
    or len(category & wanted) >= 2
    or title_score > 0.2
  )
  return 1.0 if alike else 0.5


def score(
  product: products.Product,
  goal: goals.Goal,
  *,
  price: float,
  options: dict[str, str],
) -> tuple[float, dict[str, float | bool | None]]:
  """Returns (reward, its parts) of a purchase.

  Args:
    product: what was bought.
    goal: what was wanted.
    price: of the product, dollars.
    options: chosen values by option name.

  Returns:
    The reward, type * (attributes + options + price) / (wanted attributes +
    wanted options + 1), and `r_type`; `r_att` and `r_option`, the shares that
    are met (`r_option` None if none is wanted); `r_price`.
  """
  wanted = goal.goal_options
  wanted = list(wanted.items()) if isinstance(wanted, dict) else list(wanted)
  attributes = attribute_hits(product, goal.attributes)
  met = option_hits(options.values(), wanted)
  cheap = price <= goal.price_upper
  r_type = type_score(product, goal)
  number = len(goal.attributes) + len(wanted) + 1
  return (attributes + met + cheap) / number * r_type, {
    'r_type': r_type,
    'r_att': attributes / max(len(goal.attributes), 1),
    'r_option': met / len(wanted) if wanted else None,
    'r_price': cheap,
  }
