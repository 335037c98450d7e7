"""OpenAI's chat completions as data: requests to messages, turns to replies.

Parsed requests hold `envs.base.Message`s. An assistant message becomes the text
that the policy would have sampled, with its tool calls in the policy's format,
so that messages can be compared with earlier responses.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from envs import base, tool_calls
from gigpo_jax import trajectory

# Roles of messages in requests, and the roles that the policy sees.
_ROLES = {role: role for role in base.ROLES} | {'developer': 'system'}

# Fields whose other values would change the sampled tokens or the form of the
# reply; sampling options such as temperature are those of the run.
_SUPPORTED = {
  'n': (None, 1),
  'stream': (None, False),
  'stop': (None, []),
  'top_logprobs': (None, 0),
  'tool_choice': (None, 'auto', 'none'),
  'response_format': (None, {'type': 'text'}),
  'audio': (None,),
  'functions': (None, []),
  'function_call': (None, 'auto', 'none'),
  'parallel_tool_calls': (None, True),
  'logit_bias': (None, {}),
}

_REPLACEMENT = '\N{REPLACEMENT CHARACTER}'


class RequestError(ValueError):
  """Raised for a request that cannot be served; in one line.

  Args:
    message: what is wrong.
    status: HTTP status.
    code: code of the error in OpenAI's API.
  """

  def __init__(
    self, message: str, status: int = 400, code: str = 'invalid_request'
  ):
    super().__init__(message)
    self.status, self.code = status, code


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A request for a response of the policy.

  Attributes:
    messages: the whole conversation.
    tools: tools that the policy may call, see `base.Observation`.
    model: name of the model, which the reply repeats.
    anchor: the state by which turns are compared; '' if the harness sent none.
    log_probs: whether the reply lists the sampled tokens.
  """

  messages: tuple[base.Message, ...]
  tools: tuple[str, ...] = ()
  model: str = 'policy'
  anchor: str = ''
  log_probs: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
  """A response of the policy in the form of a chat message.

  Attributes:
    content: the response without its tool calls.
    calls: its tool calls.
    problem: why a tool call is malformed; '' if none is.
  """

  content: str
  calls: tuple[tool_calls.Call, ...] = ()
  problem: str = ''

  @property
  def message(self) -> base.Message:
    """The message as it appears in later requests."""
    return _assistant(self.content, self.calls)


def parse_request(body: Any) -> ChatRequest:
  """Returns a request.

  Args:
    body: decoded JSON.

  Raises:
    RequestError: if it is invalid or not supported.
  """
  if not isinstance(body, dict):
    raise RequestError('the body must be a JSON object')
  for name, values in _SUPPORTED.items():
    if body.get(name) not in values:
      accepted = ' or '.join(json.dumps(value) for value in values)
      raise RequestError(
        f'{name}={json.dumps(body[name])[:80]}: not supported; must be '
        f'{accepted}'
      )
  messages = body.get('messages')
  if not isinstance(messages, list) or not messages:
    raise RequestError('messages: missing; must be a list of messages')
  parsed = tuple(_message(n, message) for n, message in enumerate(messages))
  if parsed[-1].role == 'assistant':
    raise RequestError('messages: the last message must not be an assistant')
  tools = _tools(body.get('tools') or [])
  metadata = body.get('metadata') or {}
  anchor = metadata.get('anchor', '') if isinstance(metadata, dict) else None
  return ChatRequest(
    parsed,
    () if body.get('tool_choice') == 'none' else tools,
    _text(body.get('model', 'policy'), 'model'),
    _text(anchor, 'metadata.anchor'),
    bool(body.get('logprobs')),
  )


def answer(response: str, *, has_tools: bool) -> Answer:
  """Returns a response as a message.

  Args:
    response: the response, verbatim.
    has_tools: whether the request offered tools. Without tools, the message is
      the response.
  """
  parsed = tool_calls.parse(response) if has_tools else None
  if not parsed or not parsed.calls:
    return Answer(response, problem=parsed.problem if parsed else '')
  return Answer(tool_calls.without_calls(response), parsed.calls)


def reply(
  request: ChatRequest,
  answered: Answer,
  turn: trajectory.SampledTurn,
  tokens: Sequence[str],
  turn_id: tuple[str, int],
) -> dict[str, Any]:
  """Returns the reply to a request as JSON values.

  Args:
    request: the request.
    answered: the response as a message.
    turn: the sampled tokens.
    tokens: their texts.
    turn_id: id of the episode and number of the turn. Ids of tool calls, which
      a chat template may render, depend on the turn only.
  """
  message: dict[str, Any] = {
    'role': 'assistant',
    'content': answered.content or None,
  }
  if answered.calls:
    message['tool_calls'] = [
      {
        'id': f'call-{turn_id[1]}-{n}',
        'type': 'function',
        'function': {
          'name': call.name,
          'arguments': json.dumps(call.arguments, ensure_ascii=False),
        },
      }
      for n, call in enumerate(answered.calls)
    ]
  finish_reason = 'tool_calls' if answered.calls else 'stop'
  choice = {
    'index': 0,
    'message': message,
    'finish_reason': 'length' if turn.truncated else finish_reason,
    'logprobs': None,
  }
  if request.log_probs:
    choice['logprobs'] = {
      'content': [
        {
          'token': text,
          # A token that is a part of a character has no text.
          'bytes': None if _REPLACEMENT in text else list(text.encode()),
          'logprob': float(log_prob),
          'top_logprobs': [],
        }
        for text, log_prob in zip(tokens, turn.log_probs, strict=True)
      ],
      'refusal': None,
    }
  sizes = len(turn.prompt_ids), len(turn.completion_ids)
  return {
    'id': f'chatcmpl-{turn_id[0]}-{turn_id[1]}',
    'object': 'chat.completion',
    'created': int(time.time()),
    'model': request.model,
    'choices': [choice],
    'usage': {
      'prompt_tokens': sizes[0],
      'completion_tokens': sizes[1],
      'total_tokens': sum(sizes),
    },
  }


def _text(value: Any, field: str) -> str:
  if not isinstance(value, str):
    raise RequestError(f'{field}: must be a string')
  return value


def _assistant(content: str, calls: Sequence[tool_calls.Call]) -> base.Message:
  # A harness may store arguments in another order.
  texts = []
  for call in calls:
    arguments = json.loads(json.dumps(call.arguments, sort_keys=True))
    texts.append(tool_calls.write(tool_calls.Call(call.name, arguments)))
  parts = [content.strip(), *texts]
  return base.Message('assistant', '\n'.join(part for part in parts if part))


def _message(n: int, message: Any) -> base.Message:
  field = f'messages[{n}]'
  given = message.get('role') if isinstance(message, dict) else None
  if not isinstance(given, str) or given not in _ROLES:
    raise RequestError(f'{field}.role: must be one of {", ".join(_ROLES)}')
  role = _ROLES[given]
  content = _content(message.get('content'), f'{field}.content')
  if role == 'assistant':
    calls = message.get('tool_calls') or []
    if not isinstance(calls, list):
      raise RequestError(f'{field}.tool_calls: must be a list')
    try:
      return _assistant(content, list(map(_call, calls)))
    # Invalid JSON, also too deep nesting and numbers without a value (NaN).
    except (TypeError, KeyError, ValueError, RecursionError) as error:
      raise RequestError(
        f'{field}.tool_calls: each must have function.name, and '
        'function.arguments as the JSON text of an object'
      ) from error
  call_id = message.get('tool_call_id') or '' if role == 'tool' else ''
  return base.Message(role, content, _text(call_id, f'{field}.tool_call_id'))


def _content(content: Any, field: str) -> str:
  """Returns the text of a content: a string, or parts that are all text."""
  if content is None or isinstance(content, str):
    return content or ''
  if not isinstance(content, list):
    raise RequestError(f'{field}: must be a string or a list of parts')
  texts = []
  for part in content:
    if not isinstance(part, dict) or part.get('type') != 'text':
      raise RequestError(f'{field}: only parts of type text are supported')
    texts.append(_text(part.get('text'), f'{field}.text'))
  return ''.join(texts)


def _call(call: Any) -> tool_calls.Call:
  function = call['function']
  name, arguments = function['name'], json.loads(function['arguments'] or '{}')
  if not isinstance(name, str) or not isinstance(arguments, dict):
    raise TypeError('must be a text and a JSON object')
  return tool_calls.Call(name, arguments)


def _tools(tools: Any) -> tuple[str, ...]:
  if not isinstance(tools, list):
    raise RequestError('tools: must be a list')
  names = {''}
  for n, tool in enumerate(tools):
    if not isinstance(tool, dict) or not isinstance(tool.get('function'), dict):
      raise RequestError(f'tools[{n}]: must have type=function and a function')
    name = tool['function'].get('name')
    if not isinstance(name, str) or name in names:
      raise RequestError(
        f'tools[{n}].function.name: must be a name that no other tool has'
      )
    names.add(name)
  return tuple(
    json.dumps(tool['function'], ensure_ascii=False) for tool in tools
  )
