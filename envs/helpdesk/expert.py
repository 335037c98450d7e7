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


def fact_key(fact: str) -> str:
  """Returns the key of a fact that the user has told."""
  return f'told {fact}'


def respond(step: str | tool_calls.Call, *, is_brief: bool = False) -> str:
  """Returns a question or a call as a response.

  Args:
    step: the question or the call.
    is_brief: whether to leave out arguments that the environment knows.
  """
  if isinstance(step, str):
    return step
  leave_out = is_brief and step.name != tools.CLOSE
  arguments = {} if leave_out else step.arguments
  body = json.dumps({'name': step.name, 'arguments': arguments})
  return f'<tool_call>\n{body}\n</tool_call>'


def next_step(
  case: cases.Case, known: Mapping[str, str], *, is_changed: bool
) -> str | tool_calls.Call:
  """Returns the next question or call of a shortest solution.

  Args:
    case: the case.
    known: what the user has told and tools have shown, by `fact_key` and
      `describe`.
    is_changed: whether the call that fulfils the request has been made.
  """
  for key, step in _inquiries(case):
    if key not in known:
      return step
  return case.solution[-1 if is_changed else 0]


def _inquiries(case: cases.Case) -> list[tuple[str, str | tool_calls.Call]]:
  """Returns what must be known before the solution, and how to learn it."""

  def ask(fact: str) -> tuple[str, str]:
    return fact_key(fact), _ASK[fact]

  def call(tool: str, /, **arguments: str) -> tuple[str, tool_calls.Call]:
    read = tool_calls.Call(tool, arguments)
    return describe(read), read

  steps = [
    ask('identity'),
    call('find_user', name=case.name, zip_code=case.zip_code),
    call('find_order', user_id=case.user_id, product=case.product),
  ]
  if case.kind == 'cancel' and not case.allowed:
    return steps  # The order is not pending.
  steps += [ask(fact) for fact in case.facts if fact != 'identity']
  if case.kind == 'return':
    steps.append(call('get_order', order_id=case.call.arguments['order_id']))
  if case.kind == 'exchange':
    option = case.facts['option']
    steps.append(call('find_product', product=case.product, option=option))
  return steps


def choices(
  case: cases.Case, known: Mapping[str, str]
) -> list[str | tool_calls.Call]:
  """Returns questions, and calls with what is known."""
  seen = '\n'.join(known.values())
  calls = [
    tool_calls.Call(tools.CLOSE, {'outcome': outcome})
    for outcome in tools.OUTCOMES
  ]
  calls += [
    tool_calls.Call('find_order', {'user_id': user[0], 'product': case.product})
    for user in case.tables['users']
    if user[0] in seen
  ]
  calls += [
    tool_calls.Call(name, {'order_id': order[0]})
    for order in case.tables['orders']
    if order[0] in seen
    for name in ('get_order', 'return_order')
  ]
  calls += [
    tool_calls.Call('find_product', {'product': case.product, 'option': option})
    for option in dict.fromkeys(row[2] for row in case.tables['products'])
    if option in seen
  ]
  return [*_ASK.values(), *calls]
