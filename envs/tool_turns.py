"""Turns of a conversation with tools, whoever provides the tools.

A response calls tools, or answers in words. The results of the calls become
tool messages. A mistake in a call, such as an unknown tool or a wrong argument,
becomes a message that says so; only the provider's own failures raise errors.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from envs import base, tool_calls

# Maximum number of calls in a response.
MAX_CALLS = 8


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a call.

  Attributes:
    text: the result as text.
    is_error: whether the tool reports an error.
  """

  text: str
  is_error: bool = False


@dataclasses.dataclass(frozen=True)
class Turn:
  """What a response did.

  Attributes:
    action: the calls or the answer, for logs.
    valid: whether the response has calls of known tools with accepted
      arguments, or an answer.
    answer: the text of a response without calls; None if it has calls or a
      malformed call.
    messages: the replies to the policy; empty for an answer.
    errors: number of calls that failed.
  """

  action: str
  valid: bool
  answer: str | None = None
  messages: tuple[base.Message, ...] = ()
  errors: int = 0


class Tools:
  """Tools that a policy may call.

  Args:
    schemas: description of each tool: name, description, parameters (a JSON
      schema of its arguments).
    call: runs a tool, given its name and arguments.
    max_chars: length limit of a result. A longer one is not shown; the policy
      reads its length and the limit.

  Attributes:
    texts: the descriptions as JSON texts, for `Observation.tools`.

  Raises:
    ValueError: in one line, if a description is not valid.
  """

  def __init__(
    self,
    schemas: Iterable[dict[str, Any]],
    call: Callable[[str, dict[str, Any]], Result],
    *,
    max_chars: int,
  ):
    schemas = list(schemas)
    self._validators = {s['name']: _validator(s) for s in schemas}
    self._call, self._max_chars = call, max_chars
    self.texts = tuple(json.dumps(s, ensure_ascii=False) for s in schemas)

  def take(self, response: str) -> Turn:
    """Runs the calls of a response, in order."""
    parsed = tool_calls.parse(response)
    problem = parsed.problem
    if len(parsed.calls) > MAX_CALLS:
      problem = f'{len(parsed.calls)} tool calls; at most {MAX_CALLS}'
    if problem:
      reply = base.Message('user', f'Error: {problem}')
      return Turn(parsed.text, False, messages=(reply,), errors=1)
    if not parsed.calls:
      return Turn(parsed.text, bool(parsed.text), answer=parsed.text)
    valid, errors, messages = True, 0, []
    for n, call in enumerate(parsed.calls):
      result = self.misuse(call)
      valid = valid and result is None
      result = result or self.limit(self._call(call.name, call.arguments))
      errors += result.is_error
      messages.append(base.Message('tool', result.text, call_id=str(n + 1)))
    action = '; '.join(map(tool_calls.to_json, parsed.calls))
    return Turn(action, valid, messages=tuple(messages), errors=errors)

  def misuse(self, call: tool_calls.Call) -> Result | None:
    """Returns what is wrong with a call; None if nothing is."""
    if call.name not in self._validators:
      known = ', '.join(self._validators)
      return Result(f'Error: unknown tool; must be one of {known}', True)
    import referencing

    errors = self._validators[call.name].iter_errors(call.arguments)
    try:
      error = next(errors, None)
    except (ArithmeticError, RecursionError):  # Huge numbers, deep values.
      return Result('Error: arguments are too large', True)
    except referencing.exceptions.Unresolvable as error:
      line = ' '.join(str(error).split())[:200]
      raise ValueError(f'tool {call.name}: no JSON schema: {line}') from error
    if error is None:
      return None
    line = ' '.join(error.message.split())[:200]
    path = '.'.join(map(str, error.absolute_path))
    return Result(f'Error: arguments {path}: {line}', True)

  def limit(self, result: Result) -> Result:
    """Returns a result, or an error with its length if it is too long."""
    if len(result.text) <= self._max_chars:
      return result
    return Result(
      f'Error: the result has {len(result.text):,} characters; at most '
      f'{self._max_chars:,}',
      True,
    )


def _validator(schema: dict[str, Any]) -> Any:
  """Returns a validator of a tool's arguments.

  Raises:
    ValueError: in one line, if the tool's parameters are no JSON schema.
  """
  import jsonschema
  import referencing

  name, parameters = schema['name'], schema.get('parameters', {})
  kind = jsonschema.Draft202012Validator
  try:
    kind.check_schema(parameters)
  except jsonschema.SchemaError as error:
    line = ' '.join(error.message.split())[:200]
    raise ValueError(f'tool {name}: no JSON schema: {line}') from error
  # The registry is empty, so that no reference is downloaded.
  return kind(parameters, registry=referencing.Registry())
