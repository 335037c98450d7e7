"""An oracle shopper: knows the goal, reads pages, thinks and acts.

It searches with the instruction's own words, looks for the goal's product on
the result pages, chooses the options and buys. A small policy can imitate it
by copying. What it is told to have done may differ from what it wanted; it
goes on from there.
"""

import re

from envs.webshop import engine, goals, pages

_PRICE = re.compile(r',? and price lower than .*$')
_START = 'Find me '
# Further result pages are empty: a search finds 50 products at most.
_MAX_PAGES = 5


def phrase(goal: goals.Goal) -> str:
  """Returns what an instruction looks for, without options and price."""
  text = _PRICE.sub('', goal.instruction_text).removeprefix(_START)
  if isinstance(goal.goal_options, dict):
    options = ', and '.join(f'{k}: {v}' for k, v in goal.goal_options.items())
    text = text.removesuffix(f' with {options}')
  return text


def queries(goal: goals.Goal) -> list[str]:
  """Returns what to search for, what to try first first."""
  options = goal.goal_options
  values = options.values() if isinstance(options, dict) else options
  short = phrase(goal)
  whole = _PRICE.sub('', goal.instruction_text).removeprefix(_START)
  found = [short, ' '.join([short, *values]), whole, goal.name]
  return list(dict.fromkeys(text.lower() for text in found))


class Shopper:
  """One purchase.

  Args:
    shop: where the goal's product is sold.
    goal: what to buy.
  """

  def __init__(self, shop: engine.Shop, goal: goals.Goal):
    self._goal = goal
    self._asin = goal.asin.lower()
    self._query, self._number = self._plan(shop)
    self._searched = ''
    self._item = ''
    # Value chosen last, by name of the option.
    self._chosen: dict[str, str] = {}
    self._view = pages.View(pages.INDEX)

  def _plan(self, shop: engine.Shop) -> tuple[str, int]:
    """Returns the first query that finds the product, and on which page."""
    session = engine.Session(shop)
    found: list[tuple[str, int]] = []
    for query in queries(self._goal):
      session.reset(self._goal)
      page = session.step(f'search[{query}]')
      for number in range(1, _MAX_PAGES + 1):
        if self._asin in page.clickables:
          found.append((query, number))
          break
        page = session.step('click[next >]')
      if found and found[-1][1] == 1:
        return found[-1]
    if found:
      return min(found, key=lambda plan: plan[1])
    return queries(self._goal)[0], 1

  def act(self, page: engine.Page) -> tuple[str, str]:
    """Returns a thought and an action.

    Args:
      page: what the last action, told to `done`, led to.
    """
    parts = pages.split(page.text, self._goal.instruction_text)
    self._view = pages.read(parts, page.clickables)
    if self._view.kind == pages.INDEX:
      return 'I search for what is asked for.', f'search[{self._query}]'
    if self._view.kind == pages.RESULTS:
      return self._pick()
    if self._view.kind == pages.ITEM:
      return self._buy()
    return 'I go back to the product.', 'click[< prev]'

  def done(self, action: str) -> None:
    """Takes note of the action that was taken on the page seen last."""
    name, _, rest = action.partition('[')
    argument = rest.removesuffix(']')
    if name == 'search':
      self._searched = argument
    if self._view.kind == pages.RESULTS:
      numbers = [product[0].lower() for product in self._view.products]
      if argument in numbers:
        self._item = argument
        self._chosen = {}
    if self._view.kind == pages.ITEM:
      if argument == '< prev':
        self._chosen = {}
      for option, values in self._view.options.items():
        if argument in [value.lower() for value in values]:
          self._chosen[option] = argument

  def _pick(self) -> tuple[str, str]:
    for number, _, _ in self._view.products:
      if number.lower() == self._asin:
        # Without its number: on the page, tokens of it begin with a bracket.
        return 'One of these fits, so I look at it.', f'click[{self._asin}]'
    if self._searched == self._query and self._view.number < self._number:
      return 'None of these fits, so I look further.', 'click[next >]'
    return 'None of these fits, so I search again.', 'click[back to search]'

  def _wanted(self) -> dict[str, str]:
    """Returns the values to choose, by name of the option."""
    options = self._goal.goal_options
    if isinstance(options, dict):
      return options
    # Instructions of people name values alone.
    return {
      name: value.lower()
      for name, values in self._view.options.items()
      for value in values
      if value.lower() in options
    }

  def _buy(self) -> tuple[str, str]:
    if self._item != self._asin:
      return 'This is not what I need, so I go back.', 'click[< prev]'
    wanted = self._wanted()
    for name in self._view.options:
      value = wanted.get(name)
      if value and self._chosen.get(name) != value:
        return f'The {name} must be {value}.', f'click[{value}]'
    return 'All is as asked for, so I buy it.', 'click[buy now]'
