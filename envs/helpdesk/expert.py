"""The expert of the help desk, which knows the case, and its mistakes."""

import json
from collections.abc import Mapping

from envs import tool_calls
from envs.helpdesk import cases, tools

_ASK = {
  'identity': 'What are your name and zip code?',
  'reason': 'What is the reason?',
  'address': 'What is the new address?',
  'option': 'Which option do you want?',
}


def describe(call: tool_calls.Call) -> str:
  """Returns a call in one line."""
  return f'{call.name} {json.dumps(call.arguments, sort_keys=True)}'


def told(fact: str) -> str:
  """Returns the key of a fact that the user has told."""
  return f'told {fact}'


def respond(call: tool_calls.Call) -> str:
  """Returns a call as a response."""
  body = json.dumps({'name': call.name, 'arguments': call.arguments})
  return f'<tool_call>\n{body}\n</tool_call>'


def next_response(
  case: cases.Case, known: Mapping[str, str], *, is_changed: bool
) -> str:
  """Returns the next response of a shortest solution.

  Args:
    case: the case.
    known: what the user has told and tools have shown, by `told` and
      `describe`.
    is_changed: whether the call that fulfils the request has been made.
  """
  for key, response in _inquiries(case):
    if key not in known:
      return response
  return respond(case.solution[-1 if is_changed else 0])


def _inquiries(case: cases.Case) -> list[tuple[str, str]]:
  """Returns what must be known before the solution, with its responses."""

  def ask(fact: str) -> tuple[str, str]:
    return told(fact), _ASK[fact]

  def call(tool: str, /, **arguments: str) -> tuple[str, str]:
    read = tool_calls.Call(tool, arguments)
    return describe(read), respond(read)

  steps = [
    ask('identity'),
    call('find_user', name=case.name, zip_code=case.zip_code),
    call('list_orders', user_id=case.user_id),
  ]
  if case.kind == 'cancel' and not case.allowed:
    return steps  # The list shows that the order is not pending.
  steps += [ask(fact) for fact in case.facts if fact != 'identity']
  if case.kind == 'return':
    steps.append(call('get_order', order_id=case.call.arguments['order_id']))
  if case.kind == 'exchange':
    steps.append(call('find_product', name=case.product))
  return steps


def choices(case: cases.Case, known: Mapping[str, str]) -> list[str]:
  """Returns questions, and calls with what is known."""
  seen = '\n'.join(known.values())
  calls = [
    tool_calls.Call(tools.CLOSE, {'outcome': outcome})
    for outcome in tools.OUTCOMES
  ]
  calls += [
    tool_calls.Call('list_orders', {'user_id': user[0]})
    for user in case.tables['users']
    if user[0] in seen
  ]
  calls += [
    tool_calls.Call(name, {'order_id': order[0]})
    for order in case.tables['orders']
    if order[0] in seen
    for name in ('get_order', 'return_order')
  ]
  calls.append(tool_calls.Call('find_product', {'name': case.product}))
  return [*_ASK.values(), *map(respond, calls)]
