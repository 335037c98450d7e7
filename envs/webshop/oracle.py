"""An oracle shopper, which knows the goal product and plays by rule.

It searches with the words of the instruction, looks for the goal product on the
result pages, chooses the options and buys it. A small policy can imitate it by
copying text. The caller may take another action than the one it returned; the
oracle continues from the new page.
"""

import re

from envs.webshop import engine, goals, pages

_PRICE = re.compile(r',? and price lower than .*$')
_START = 'Find me '
# A search returns at most 50 products, so further result pages are empty.
_MAX_PAGES = 5


def phrase(goal: goals.Goal) -> str:
  """Returns an instruction's description without options and price limit."""
  text = _PRICE.sub('', goal.instruction_text).removeprefix(_START)
  if isinstance(goal.goal_options, dict):
    options = ', and '.join(f'{k}: {v}' for k, v in goal.goal_options.items())
    text = text.removesuffix(f' with {options}')
  return text


def queries(goal: goals.Goal) -> list[str]:
  """Returns search queries for a goal, in the order in which to try them."""
  options = goal.goal_options
  values = options.values() if isinstance(options, dict) else options
  short = phrase(goal)
  full = _PRICE.sub('', goal.instruction_text).removeprefix(_START)
  candidates = [short, ' '.join([short, *values]), full, goal.name]
  return list(dict.fromkeys(text.lower() for text in candidates))


class Shopper:
  """An oracle for one episode.

  Args:
    shop: the shop of the episode.
    goal: the goal of the episode.
  """

  def __init__(self, shop: engine.Shop, goal: goals.Goal):
    self._goal = goal
    self._asin = goal.asin.lower()
    self._query, self._page_number = self._plan(shop)
    self._last_query = ''
    # Id of the product whose item page was opened last.
    self._item = ''
    # Option name -> value chosen last.
    self._chosen: dict[str, str] = {}
    self._view = pages.View(pages.INDEX)

  def _plan(self, shop: engine.Shop) -> tuple[str, int]:
    """Returns a query that finds the product, and the result page it is on.

    It is the first query that finds the product on page 1. If no query does, it
    is the query that finds it on the lowest page.
    """
    session = engine.Session(shop)
    plans: list[tuple[str, int]] = []
    for query in queries(self._goal):
      session.reset(self._goal)
      page = session.step(f'search[{query}]')
      for page_number in range(1, _MAX_PAGES + 1):
        if self._asin in page.clickables:
          plans.append((query, page_number))
          break
        page = session.step('click[next >]')
      if plans and plans[-1][1] == 1:
        return plans[-1]
    if plans:
      return min(plans, key=lambda plan: plan[1])
    return queries(self._goal)[0], 1

  def act(self, page: engine.Page) -> tuple[str, str]:
    """Returns a thought and an action.

    Args:
      page: the current page, after the last action passed to `record`.
    """
    parts = pages.split(page.text, self._goal.instruction_text)
    self._view = pages.read(parts, page.clickables)
    if self._view.page_type == pages.INDEX:
      return 'I search for what is asked for.', f'search[{self._query}]'
    if self._view.page_type == pages.RESULTS:
      return self._act_on_results()
    if self._view.page_type == pages.ITEM:
      return self._act_on_item()
    return 'I go back to the product.', 'click[< prev]'

  def record(self, action: str) -> None:
    """Records the action that the caller took on the page of the last `act`."""
    name, _, rest = action.partition('[')
    argument = rest.removesuffix(']')
    if name == 'search':
      self._last_query = argument
    if self._view.page_type == pages.RESULTS:
      asins = [product[0].lower() for product in self._view.products]
      if argument in asins:
        self._item = argument
        self._chosen = {}
    if self._view.page_type == pages.ITEM:
      if argument == '< prev':
        self._chosen = {}
      for option, values in self._view.options.items():
        if argument in [value.lower() for value in values]:
          self._chosen[option] = argument

  def _act_on_results(self) -> tuple[str, str]:
    for asin, _, _ in self._view.products:
      if asin.lower() == self._asin:
        # The thought does not name the product id: on the page, the id follows
        # a bracket and may be tokenized differently.
        return 'One of these fits, so I look at it.', f'click[{self._asin}]'
    on_planned_query = self._last_query == self._query
    if on_planned_query and self._view.page_number < self._page_number:
      return 'None of these fits, so I look further.', 'click[next >]'
    return 'None of these fits, so I search again.', 'click[back to search]'

  def _wanted_values(self) -> dict[str, str]:
    """Returns option name -> value to choose."""
    options = self._goal.goal_options
    if isinstance(options, dict):
      return options
    # Human-written instructions have values without option names.
    return {
      name: value.lower()
      for name, values in self._view.options.items()
      for value in values
      if value.lower() in options
    }

  def _act_on_item(self) -> tuple[str, str]:
    if self._item != self._asin:
      return 'This is not what I need, so I go back.', 'click[< prev]'
    wanted = self._wanted_values()
    for name in self._view.options:
      value = wanted.get(name)
      if value and self._chosen.get(name) != value:
        return f'The {name} must be {value}.', f'click[{value}]'
    return 'All is as asked for, so I buy it.', 'click[buy now]'
