"""Tests of turns with tools: what a policy's arguments cannot do."""

import json

import pytest

from envs import tool_calls, tool_turns


def _parameters(schema):
  return {'type': 'object', 'properties': {'x': schema}}


_DEEP = {'type': 'array', 'items': {'$ref': '#/properties/x'}}


@pytest.mark.parametrize(
  ('schema', 'value'),
  [
    ({'type': 'number', 'multipleOf': 0.5}, '9' * 400),
    (_DEEP, '[' * 250 + ']' * 250),
  ],
)
def test_arguments_that_cannot_be_checked_are_an_error(schema, value):
  tools = tool_turns.Tools(
    [{'name': 'act', 'description': '', 'parameters': _parameters(schema)}],
    lambda *_: tool_turns.Result('done'),
    max_chars=99,
  )

  def take(argument):
    call = f'{{"name": "act", "arguments": {{"x": {argument}}}}}'
    return tools.take(f'<tool_call>\n{call}\n</tool_call>')

  assert take(json.dumps(schema.get('multipleOf', []))).valid
  turn = take(value)
  assert not turn.valid and turn.errors == 1
  assert turn.messages[0].text == 'Error: arguments are too large'


def test_an_unknown_reference_of_a_schema_is_one_line():
  tools = tool_turns.Tools(
    [{'name': 'act', 'parameters': _parameters({'$ref': '#/none'})}],
    lambda *_: tool_turns.Result('done'),
    max_chars=99,
  )
  call = tool_calls.Call('act', {'x': 1})
  with pytest.raises(ValueError, match='tool act: no JSON schema: ') as error:
    tools.take(tool_calls.write(call))
  assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
  ('response', 'text'),
  [
    ('<think>I wonder', ''),
    ('<think>a</think>yes', 'yes'),
    ('<think>a</think>yes<think>no', 'yes'),
  ],
)
def test_a_thought_is_no_answer(response, text):
  tools = tool_turns.Tools([], lambda *_: None, max_chars=9)
  turn = tools.take(response)
  assert (turn.answer, turn.valid) == (text, bool(text))
