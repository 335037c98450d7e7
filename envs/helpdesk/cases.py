"""Generated cases: a database, a user with a request, and the solution.

A case is a function of its seed. The user answers questions from a script: a
question is recognized by its words. Each request either follows the policy or
is against it; then the solution is to refuse it.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from envs import tool_calls
from envs.helpdesk import database, tools

RETURN_DAYS = 30
POLICY = f"""\
You serve the users of a shop with tools. Policy:
- Find out who the user is, by name and zip code, before you change anything.
- Only pending orders are cancelled, exchanged or get another address.
- Orders are returned up to {RETURN_DAYS} days after their delivery.
- An order is exchanged only for an option that is in stock.
- Refuse requests against the policy: close the case as refused and change
  nothing. Close all other cases as done, when the request is fulfilled.
Each turn either calls a tool or asks the user."""

KINDS = ('cancel', 'address', 'return', 'exchange')
_FIRST = ('Ann', 'Ben', 'Eva', 'Ian', 'Mia', 'Tom')
_LAST = ('Bell', 'Cole', 'Hart', 'Lane', 'Moss', 'Reed')
_PRODUCTS = ('lamp', 'chair', 'kettle', 'jacket', 'clock', 'bag')
_OPTIONS = ('red', 'blue', 'green')
_REASONS = ('no longer needed', 'ordered by mistake')
_STREETS = ('Oak Street', 'Hill Road', 'Lake Avenue')
_STATUSES = ('pending', 'shipped', 'delivered')
_ORDERS = (2, 3)  # Orders of a user.

# Facts that the user gives when asked: words of the question that ask for it.
QUESTIONS = {
  'identity': ('name', 'zip', 'who'),
  'reason': ('reason', 'why'),
  'address': ('address', 'where'),
  'option': ('option', 'colour', 'which'),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """A case.

  Attributes:
    kind: one of KINDS.
    allowed: whether the request follows the policy.
    tables: the database at the start.
    request: the user's first message.
    facts: the user's answers, by the keys of QUESTIONS.
    user_id: the user's id.
    name: the user's name.
    zip_code: the user's zip code.
    product: the product in the request.
    call: the call that fulfils the request, if it is allowed.
  """

  kind: str
  allowed: bool
  tables: database.Tables
  request: str
  facts: Mapping[str, str]
  user_id: str
  name: str
  zip_code: str
  product: str
  call: tool_calls.Call

  @property
  def task_type(self) -> str:
    """The kind, or 'refuse' for a request against the policy."""
    return self.kind if self.allowed else 'refuse'

  @property
  def solution(self) -> tuple[tool_calls.Call, ...]:
    """The calls that change the database."""
    outcome = tools.OUTCOMES[0 if self.allowed else 1]
    close = tool_calls.Call(tools.CLOSE, {'outcome': outcome})
    return (self.call, close) if self.allowed else (close,)

  def answer(self, question: str) -> tuple[str, str]:
    """Returns (fact, text) of the user's answer; the fact '' is none."""
    words = question.lower()
    for fact, keys in QUESTIONS.items():
      if fact in self.facts and any(key in words for key in keys):
        return fact, self.facts[fact]
    return '', f'I have told you: {self.request}'

  def arguments(self, fact: str) -> dict[str, str]:
    """Returns the arguments of calls that a fact of the user is or contains."""
    if fact == 'identity':
      return {'name': self.name, 'zip_code': self.zip_code}
    return {fact: self.facts[fact]}

  def goal(self) -> frozenset[tuple[str, database.Row]]:
    """Returns the rows of the database after the solution."""
    db = database.Database(self.tables)
    for call in self.solution:
      tools.run(db, call)
    rows = db.rows()
    db.close()
    return rows


def generate(seed: int, num_users: int = 3) -> Case:
  """Returns the case of a seed.

  Args:
    seed: the seed.
    num_users: number of users; two share their name.
  """
  rng = np.random.default_rng(seed)
  kind = str(rng.choice(KINDS))
  allowed = kind == 'address' or bool(rng.random() < 0.6)
  users = _users(rng, num_users)
  products = _products(rng)
  orders = _orders(rng, users, products)
  mine = [order for order in orders if order[1] == users[0][0]]
  order = mine[rng.integers(len(mine))]
  wanted = _fit(rng, kind, order, products, allowed=allowed)
  product = next(row for row in products if row[0] == order[2])
  fact, request, call = _request(rng, kind, order, product, wanted)
  user_id, name, zip_code, _ = users[0]
  return Case(
    kind=kind,
    allowed=allowed,
    tables={
      'users': users,
      'products': [tuple(row) for row in products],
      'orders': [tuple(row) for row in orders],
    },
    request=request,
    facts={'identity': f'I am {name}, zip code {zip_code}.'} | fact,
    user_id=user_id,
    name=name,
    zip_code=zip_code,
    product=product[1],
    call=call,
  )


def _users(rng: np.random.Generator, count: int) -> list[database.Row]:
  """Returns users; the first is the user of the case."""
  names = [f'{rng.choice(_FIRST)} {rng.choice(_LAST)}' for _ in range(count)]
  names[1:2] = names[:1]
  zips = rng.choice(np.arange(100, 1000), count, replace=False)
  ids = rng.choice(np.arange(10, 100), count, replace=False)
  return [
    (f'U{ids[n]}', names[n], f'{zips[n]}', int(rng.integers(0, 50)))
    for n in range(count)
  ]


def _products(rng: np.random.Generator) -> list[list]:
  """Returns all options of all products."""
  names = [(name, option) for name in _PRODUCTS for option in _OPTIONS]
  ids = rng.choice(np.arange(10, 100), len(names), replace=False)
  return [
    [f'P{ids[n]}', *names[n], int(rng.integers(10, 99)), 3]
    for n in range(len(names))
  ]


def _orders(
  rng: np.random.Generator, users: list[database.Row], products: list[list]
) -> list[list]:
  """Returns the orders of all users; those of a user differ in product."""
  total = _ORDERS[1] * len(users)
  ids = iter(rng.choice(np.arange(10, 100), total, replace=False))
  orders = []
  for user in users:
    count = rng.integers(_ORDERS[0], _ORDERS[1] + 1)
    for name in rng.choice(_PRODUCTS, count, replace=False):
      options = [row for row in products if row[1] == name]
      chosen = options[rng.integers(len(options))]
      status = str(rng.choice(_STATUSES))
      orders.append(
        [f'W{next(ids)}', user[0], chosen[0], status]
        + [int(rng.integers(1, 60)) if status == 'delivered' else 0]
        + [_address(rng), '']
      )
  return orders


def _address(rng: np.random.Generator) -> str:
  return f'{rng.integers(1, 100)} {rng.choice(_STREETS)}'


def _fit(
  rng: np.random.Generator,
  kind: str,
  order: list,
  products: list[list],
  *,
  allowed: bool,
) -> list:
  """Makes an order suit the request; returns another option of its product."""
  name = next(row[1] for row in products if row[0] == order[2])
  others = [r for r in products if r[1] == name and r[0] != order[2]]
  wanted = others[rng.integers(len(others))]
  order[3:5] = ['pending', 0]
  if kind == 'return':
    low, high = (1, RETURN_DAYS) if allowed else (RETURN_DAYS + 1, 60)
    order[3:5] = ['delivered', int(rng.integers(low, high + 1))]
  elif kind == 'cancel' and not allowed:
    order[3] = 'shipped'
  elif kind == 'exchange' and not allowed:
    wanted[4] = 0
  return wanted


def _request(
  rng: np.random.Generator,
  kind: str,
  order: list,
  product: list,
  wanted: list,
) -> tuple[dict[str, str], str, tool_calls.Call]:
  """Returns the fact besides the identity, the request and its call."""
  target, name = {'order_id': order[0]}, product[1]
  if kind == 'cancel':
    reason = str(rng.choice(_REASONS))
    call = tool_calls.Call('cancel_order', target | {'reason': reason})
    return {'reason': reason}, f'Please cancel my order of the {name}.', call
  if kind == 'address':
    while (address := _address(rng)) == order[5]:
      pass
    call = tool_calls.Call('change_address', target | {'address': address})
    return {'address': address}, f'Please send my {name} elsewhere.', call
  if kind == 'return':
    call = tool_calls.Call('return_order', target)
    return {}, f'I want to return my {name}.', call
  call = tool_calls.Call('exchange_order', target | {'product_id': wanted[0]})
  text = f'I want my {name} in another option.'
  return {'option': wanted[2]}, text, call
