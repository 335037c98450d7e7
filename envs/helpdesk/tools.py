"""The tools of the help desk: functions of a database and text arguments.

Tools check that a call makes sense, not that it follows the policy: a return
after the time limit succeeds, and the episode then fails.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from envs import tool_calls
from envs.helpdesk import database

CLOSE = 'close_case'
OUTCOMES = ('done', 'refused')


class ToolError(ValueError):
  """Raised for a call that fails; the message is for the policy."""


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool.

  Attributes:
    description: what it does.
    parameters: description of each parameter; all are texts and required.
    function: called with the database and the arguments; returns plain values.
    writes: whether it changes the database.
  """

  description: str
  parameters: Mapping[str, str]
  function: Callable[..., Any]
  writes: bool = False


def _get(db: database.Database, table: str, **wanted: str) -> dict[str, Any]:
  rows = db.find(table, **wanted)
  if not rows:
    values = ', '.join(wanted.values())
    raise ToolError(f'no such row in {table}: {values}')
  return rows[0]


def _require(order: Mapping[str, Any], status: str) -> None:
  if order['status'] != status:
    raise ToolError(f'the order is {order["status"]}, not {status}')


def _pay(db: database.Database, user_id: str, amount: int) -> None:
  user = _get(db, 'users', user_id=user_id)
  db.update('users', user_id, credit=user['credit'] + amount)


def _restock(db: database.Database, product_id: str, count: int) -> int:
  """Changes the stock of a product; returns its price."""
  product = _get(db, 'products', product_id=product_id)
  db.update('products', product_id, stock=product['stock'] + count)
  return product['price']


def _find_user(db: database.Database, name: str, zip_code: str) -> Any:
  user = _get(db, 'users', name=name, zip_code=zip_code)
  return {'user_id': user['user_id']}


def _find_order(db: database.Database, user_id: str, product: str) -> Any:
  _get(db, 'users', user_id=user_id)
  for order in db.find('orders', user_id=user_id):
    bought = _get(db, 'products', product_id=order['product_id'])
    if bought['name'] == product:
      return {'order_id': order['order_id'], 'status': order['status']}
  raise ToolError(f'no such row in orders: {user_id}, {product}')


def _get_order(db: database.Database, order_id: str) -> Any:
  order = _get(db, 'orders', order_id=order_id)
  product = _get(db, 'products', product_id=order['product_id'])
  return {
    'product': product['name'],
    'option': product['option'],
    'status': order['status'],
    'days': order['days'],
  }


def _find_product(db: database.Database, product: str, option: str) -> Any:
  row = _get(db, 'products', name=product, option=option)
  return {'product_id': row['product_id'], 'stock': row['stock']}


def _cancel_order(db: database.Database, order_id: str, reason: str) -> Any:
  order = _get(db, 'orders', order_id=order_id)
  _require(order, 'pending')
  db.update('orders', order_id, status='cancelled', note=reason)
  _pay(db, order['user_id'], _restock(db, order['product_id'], 1))
  return 'cancelled'


def _return_order(db: database.Database, order_id: str) -> Any:
  order = _get(db, 'orders', order_id=order_id)
  _require(order, 'delivered')
  db.update('orders', order_id, status='returned')
  _pay(db, order['user_id'], _restock(db, order['product_id'], 1))
  return 'returned'


def _change_address(db: database.Database, order_id: str, address: str) -> Any:
  _require(_get(db, 'orders', order_id=order_id), 'pending')
  db.update('orders', order_id, address=address)
  return 'changed'


def _exchange(db: database.Database, order_id: str, product_id: str) -> Any:
  order = _get(db, 'orders', order_id=order_id)
  _require(order, 'pending')
  new = _get(db, 'products', product_id=product_id)
  old = _get(db, 'products', product_id=order['product_id'])
  if new['name'] != old['name']:
    raise ToolError(f'{new["name"]} is not an option of {old["name"]}')
  paid = _restock(db, order['product_id'], 1)
  _pay(db, order['user_id'], paid - _restock(db, product_id, -1))
  db.update('orders', order_id, product_id=product_id)
  return 'exchanged'


def _close(db: database.Database, outcome: str) -> Any:
  if outcome not in OUTCOMES:
    raise ToolError(f'outcome must be {" or ".join(OUTCOMES)}')
  db.add('outcomes', (outcome,))
  return outcome


_ORDER = {'order_id': 'id of the order'}
_PRODUCT = {'product': 'name of the product'}
TOOLS = {
  'find_user': Tool(
    'Returns the id of a user.',
    {'name': 'full name', 'zip_code': 'zip code'},
    _find_user,
  ),
  'find_order': Tool(
    "Returns id and status of a user's order.",
    {'user_id': 'id of the user'} | _PRODUCT,
    _find_order,
  ),
  'get_order': Tool(
    'Returns product, option, status and days since delivery of an order.',
    _ORDER,
    _get_order,
  ),
  'find_product': Tool(
    'Returns id and stock of an option of a product.',
    _PRODUCT | {'option': 'the option'},
    _find_product,
  ),
  'cancel_order': Tool(
    'Cancels a pending order.',
    _ORDER | {'reason': 'reason in the words of the user'},
    _cancel_order,
    writes=True,
  ),
  'return_order': Tool(
    'Returns a delivered order.', _ORDER, _return_order, writes=True
  ),
  'change_address': Tool(
    'Changes the address of a pending order.',
    _ORDER | {'address': 'the new address'},
    _change_address,
    writes=True,
  ),
  'exchange_order': Tool(
    'Exchanges the product of a pending order for another option.',
    _ORDER | {'product_id': 'id of the new option'},
    _exchange,
    writes=True,
  ),
  CLOSE: Tool(
    'Ends the case.',
    {'outcome': f'{" or ".join(OUTCOMES)}'},
    _close,
    writes=True,
  ),
}


def definitions() -> tuple[str, ...]:
  """Returns the tools as JSON texts."""
  return tuple(json.dumps(_definition(*item)) for item in TOOLS.items())


def _definition(name: str, tool: Tool) -> dict[str, Any]:
  return {
    'name': name,
    'description': tool.description,
    'parameters': {
      'type': 'object',
      'properties': {
        parameter: {'type': 'string', 'description': description}
        for parameter, description in tool.parameters.items()
      },
      'required': list(tool.parameters),
    },
  }


def call_problem(call: tool_calls.Call) -> str:
  """Returns why a call does not match its tool; '' if it does."""
  tool = TOOLS.get(call.name)
  if tool is None:
    return f'there is no tool {call.name:.40}'
  if set(call.arguments) != set(tool.parameters):
    return f'{call.name} needs {", ".join(tool.parameters)}'
  if not all(isinstance(value, str) for value in call.arguments.values()):
    return f'the arguments of {call.name} must be texts'
  return ''


def run(db: database.Database, call: tool_calls.Call) -> str:
  """Returns the result of a valid call: JSON, a word or an error."""
  try:
    value = TOOLS[call.name].function(db, **call.arguments)
  except ToolError as error:
    return f'Error: {str(error)[:200]}'
  return value if isinstance(value, str) else json.dumps(value)


def ids(text: str) -> dict[str, str]:
  """Returns the ids in the result of a call; none in an error."""
  result = json.loads(text) if text.startswith('{') else {}
  return {key: value for key, value in result.items() if key.endswith('_id')}
