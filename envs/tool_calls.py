"""Tool calls in a response, in the format of Qwen2.5 and Qwen3.

A call is `<tool_call>{"name": .., "arguments": {..}}</tool_call>`. A response
may hold several, before, between and after text. Malformed calls raise no
error: an environment treats such a response as an invalid action.
"""

import dataclasses
import json
import re
from typing import Any

_CALL = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)
_END = '</tool_call>'
_TAG = re.compile(r'</?tool_call>')
_THINKING = re.compile(r'^.*</think>', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of a tool.

  Attributes:
    name: name of the tool.
    arguments: arguments by name; plain JSON values.
  """

  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Response:
  """A response of the policy.

  Attributes:
    text: the response without thinking and tool calls.
    calls: its tool calls in order; empty if one of them is malformed.
    problem: why a call is malformed, in one line; '' if none is.
  """

  text: str
  calls: tuple[Call, ...] = ()
  problem: str = ''


def parse(response: str) -> Response:
  """Returns the text and the tool calls of a response.

  Thinking is ignored: everything up to the last `</think>`, and from a further
  `<think>` on.

  Args:
    response: the response of the policy, verbatim.
  """
  answer = _answer(response)
  # A thought that was cut off is no text.
  text, bodies = _split(answer.partition('<think>')[0])
  if _TAG.search(text) or any(map(_TAG.search, bodies)):
    return Response(text.strip(), problem='a <tool_call> tag has no partner')
  calls = []
  for body in bodies:
    try:
      call = _call(json.loads(body))
      to_json(call).encode()
      calls.append(call)
    # Invalid JSON, also too deep nesting, numbers with too many digits or
    # without a value (NaN), and halves of surrogate pairs.
    except (ValueError, RecursionError) as error:
      reason = ' '.join(str(error).split())[:200]
      return Response(text.strip(), problem=f'a malformed tool call: {reason}')
  return Response(text.strip(), tuple(calls))


def to_json(call: Call) -> str:
  """Returns a call as JSON."""
  return json.dumps(
    dataclasses.asdict(call), ensure_ascii=False, allow_nan=False
  )


def write(call: Call) -> str:
  """Returns a call as a response writes it."""
  return f'<tool_call>\n{to_json(call)}\n</tool_call>'


def without_calls(response: str) -> str:
  """Returns a response with its thinking and text, without its tool calls."""
  answer = _answer(response)
  thinking = response[: len(response) - len(answer)]
  return (thinking + _split(answer)[0]).strip()


def _split(answer: str) -> tuple[str, list[str]]:
  """Returns the text outside of tool calls, and their contents.

  The time is linear in the length. After the last closing tag, an expression
  would search for another one from every opening tag.
  """
  end = answer.rfind(_END) + len(_END) if _END in answer else 0
  calls, rest = answer[:end], answer[end:]
  return _CALL.sub('', calls) + rest, _CALL.findall(calls)


def _answer(response: str) -> str:
  """Returns a response without its thinking."""
  return _THINKING.sub('', response)


def _call(value: Any) -> Call:
  """Returns a decoded call.

  Raises:
    ValueError: if it is not one.
  """
  if not isinstance(value, dict):
    raise ValueError('must be a JSON object with name and arguments')
  name, arguments = value.get('name'), value.get('arguments', {})
  if not isinstance(name, str) or not name:
    raise ValueError('name must be a non-empty string')
  if not isinstance(arguments, dict):
    raise ValueError('arguments must be a JSON object')
  return Call(name, arguments)
