"""Replies of environments as bytes that hold data and never code.

A worker process sends a header (size of the body, process id, call id) and a
JSON body. The trainer trusts neither: it reads the size before the body,
decodes plain values only, and checks them again. Calls to workers are created
by the trainer and are pickled.
"""

import json
import math
import numbers
import os
import struct
from typing import Any

import numpy as np

from envs import base

# Maximum size of a body; the trainer rejects a larger size before reading it.
MAX_BYTES = 16 * 2**20
# Maximum length of the description of a failure.
MAX_REASON_BYTES = 2048
# Maximum length of a text other than a prompt, and of all actions together. The
# trainer limits prompts by its own limit of tokens.
MAX_TEXT_CHARS = 262_144
# Maximum numbers of actions, of messages and of tools of an observation.
MAX_ACTIONS = 16_384
MAX_MESSAGES = 1024
MAX_TOOLS = 256
# Maximum numbers of metrics and of other rewards of a step, and length of their
# names or the id of a tool call.
MAX_METRICS = 256
MAX_NAME_CHARS = 128

# Bounds of numbers in a reply. Advantages and algorithm.components square sums
# of them in float32, whose largest value is 3.4e38.
BOUNDS = {'reward': 1e6, 'score': 1e6}
LARGEST_METRIC = 1e12

HEADER = struct.Struct('>IQQ')
# Size of a call, before its pickle.
SIZE = struct.Struct('>Q')

# Statuses of replies: a value; a line about an exception; a line about an
# unusable value.
REPLY, ERROR, GARBAGE = STATUSES = ('reply', 'error', 'garbage')

_REPLY_TYPES = {'reset': base.Observation, 'step': base.StepResult}
_TEXTS = ('prompt', 'short_prompt', 'anchor', 'text', 'task')
_MESSAGE = ('role', 'text', 'call_id')
_RESULT = (
  'observation reward valid action success done metrics score final_anchor'
).split()


class UnusableReplyError(ValueError):
  """Raised for an unusable reply; the message gives the reason in one line."""


class ReportedError(Exception):
  """An exception of code that an environment calls, described in one line."""


def encode(call_id: int, call: str, value: Any) -> bytes:
  """Returns the reply to a call as bytes.

  Args:
    call_id: identifies the call.
    call: start, prepare, reset or step; only the values of reset and step are
      encoded.
    value: the environment's return value.

  Raises:
    UnusableReplyError: if the value has a wrong type or content, or is too
      large.
  """
  check(call, value)
  try:
    plain = None
    if call == 'reset':
      plain = _plain_observation(value)
    elif call == 'step':
      plain = _plain_result(value)
    return _message(call_id, REPLY, plain)
  except UnusableReplyError:
    raise
  except Exception as error:  # Methods of unusual classes may raise anything.
    raise UnusableReplyError(f'{type(error).__name__}: {error}') from error


def check(call: str, value: Any) -> None:
  """Checks the reply to a call, except for its size.

  Args:
    call: see `encode`.
    value: see there.

  Raises:
    UnusableReplyError: if the value has a wrong type or content.
  """
  if problem := _find_problem(call, value):
    raise UnusableReplyError(problem)


def is_name(text: str) -> bool:
  """Returns whether a text may be the name of a metric or of a task type."""
  return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


def check_text(name: str, text: Any) -> None:
  """Checks a text of an environment.

  Args:
    name: what it is, for messages.
    text: the text.

  Raises:
    UnusableReplyError: if it is no text, or not valid Unicode.
  """
  if problem := _find_text_problem(**{name: text}):
    raise UnusableReplyError(problem)


def encode_error(call_id: int, status: str, reason: str) -> bytes:
  """Returns an ERROR or GARBAGE reply as bytes."""
  return _message(call_id, status, to_line(reason))


def decode(body: bytes, call: str) -> tuple[str, Any]:
  """Returns (status, value) of a reply; an error's value is a line of text.

  Never raises: a body that cannot be decoded is GARBAGE.
  """
  try:
    # Parsing very long integers as floats takes little time.
    status, value = json.loads(body.decode(), parse_int=float)
    if status not in STATUSES:
      raise UnusableReplyError(
        f'status={status!r:.80}: must be one of {", ".join(STATUSES)}'
      )
    if status != REPLY:
      return status, to_line(value)
    return REPLY, _value(call, value)
  except UnusableReplyError as error:
    return GARBAGE, to_line(str(error))
  # Invalid JSON, unexpected structure, or too deep nesting.
  except (TypeError, ValueError, KeyError, RecursionError) as error:
    return GARBAGE, to_line(f'invalid reply: {type(error).__name__}: {error}')


def to_line(text: str) -> str:
  """Returns a text as one line of bounded length and printable characters."""
  # Bounds the work; the final limit below is in bytes.
  line = ' '.join(str(text)[: 4 * MAX_REASON_BYTES].split())
  # Lone surrogates cannot be printed.
  line = line.encode(errors='backslashreplace').decode()
  line = ''.join(c for c in line if c.isprintable())
  return line.encode()[:MAX_REASON_BYTES].decode(errors='ignore')


def encode_pid() -> bytes:
  """Returns an empty message, whose header names this process."""
  return HEADER.pack(0, os.getpid(), 0)


def _message(call_id: int, status: str, value: Any) -> bytes:
  text = json.dumps([status, value], ensure_ascii=False, allow_nan=False)
  body = text.encode()
  if len(body) > MAX_BYTES:
    raise UnusableReplyError(
      f'a reply of {len(body):,} bytes; at most {MAX_BYTES:,}'
    )
  return HEADER.pack(len(body), os.getpid(), call_id) + body


def _plain_observation(value: base.Observation) -> dict[str, Any]:
  return {
    **{name: getattr(value, name) for name in _TEXTS},
    'actions': list(value.actions),
    'messages': [
      {name: getattr(message, name) for name in _MESSAGE}
      for message in value.messages
    ],
    'tools': list(value.tools),
    'conversation': value.conversation,
    'agent': value.agent,
  }


def _plain_result(value: base.StepResult) -> dict[str, Any]:
  observation = value.observation
  return {
    'observation': observation and _plain_observation(observation),
    'reward': float(value.reward),
    'valid': bool(value.valid),
    'action': value.action,
    'success': bool(value.success),
    'done': bool(value.done),
    'metrics': {name: float(x) for name, x in value.metrics.items()},
    'score': None if value.score is None else float(value.score),
    'final_anchor': value.final_anchor,
    'other_rewards': {
      agent: float(x) for agent, x in value.other_rewards.items()
    },
  }


def _value(call: str, plain: Any) -> base.Observation | base.StepResult | None:
  if call == 'reset':
    value = make_observation(plain)
  elif call == 'step':
    fields = {name: plain[name] for name in _RESULT}
    observation = fields['observation']
    if observation is not None:
      fields['observation'] = make_observation(observation)
    # Waiting groups of earlier releases lack it.
    fields['other_rewards'] = plain.get('other_rewards', {})
    value = base.StepResult(**fields)
  else:
    return None
  check(call, value)
  return value


def make_observation(plain: dict[str, Any]) -> base.Observation:
  """Returns an observation from plain values."""
  return base.Observation(
    **{name: plain[name] for name in _TEXTS},
    actions=tuple(plain['actions']),
    messages=tuple(
      base.Message(**{name: message[name] for name in _MESSAGE})
      # Waiting groups of earlier releases have no conversations or agents.
      for message in plain.get('messages', ())
    ),
    tools=tuple(plain.get('tools', ())),
    conversation=plain.get('conversation', ''),
    agent=plain.get('agent', ''),
  )


def _find_problem(call: str, value: Any) -> str:
  """Returns why a value is unusable as the reply to a call; '' if it is not."""
  if call not in _REPLY_TYPES:
    return ''
  expected = _REPLY_TYPES[call]
  if not isinstance(value, expected):
    return f'{call} returned {type(value).__name__}, not {expected.__name__}'
  if isinstance(value, base.Observation):
    return _find_observation_problem(value)
  return _find_result_problem(value)


def _find_result_problem(value: base.StepResult) -> str:
  observation = value.observation
  if observation is not None:
    if not isinstance(observation, base.Observation):
      return f'observation is {type(observation).__name__}, not Observation'
    if problem := _find_observation_problem(observation):
      return problem
  for name in ('valid', 'success', 'done'):
    if not isinstance(getattr(value, name), (bool, np.bool_)):
      return f'{name}={getattr(value, name)!r:.80}: must be True or False'
  if bool(value.done) != (observation is None):
    return f'done={value.done}: must be True exactly where observation is None'
  if value.success and not value.done:
    return 'success=True: must be False before the last step'
  return _find_number_problem(value) or _find_text_problem(
    MAX_TEXT_CHARS,
    action=value.action,
    final_anchor='' if value.final_anchor is None else value.final_anchor,
  )


def _find_number_problem(value: base.StepResult) -> str:
  bounded = [('reward', value.reward, BOUNDS['reward'])]
  if value.score is not None:
    bounded.append(('score', value.score, BOUNDS['score']))
  for field, bound in (
    ('metrics', LARGEST_METRIC),
    ('other_rewards', BOUNDS['reward']),
  ):
    values = getattr(value, field)
    if problem := _find_name_problem(field, values):
      return problem
    bounded += [(name, x, bound) for name, x in values.items()]
  for name, x, bound in bounded:
    if not isinstance(x, numbers.Real) or not abs(x) <= bound:
      return f'{name}={x!r:.80}: must be a number within +-{bound:,.0f}'
  return ''


def _find_name_problem(field: str, values: Any) -> str:
  if not isinstance(values, dict):
    return f'{field} is {type(values).__name__}, not dict'
  if len(values) > MAX_METRICS:
    return f'{len(values)} {field} of a step; at most {MAX_METRICS}'
  for name in values:
    if not isinstance(name, str):
      return f'{field} has the name {name!r:.80}; must be a str'
    if not is_name(name):
      return (
        f'{field} has the name {name!r:.80}; must be 1 to {MAX_NAME_CHARS} '
        'printable characters'
      )
  return ''


def _find_observation_problem(value: base.Observation) -> str:
  if not isinstance(value.actions, (tuple, list)):
    return f'actions is {type(value.actions).__name__}, not tuple'
  if len(value.actions) > MAX_ACTIONS:
    return f'{len(value.actions):,} actions of a turn; at most {MAX_ACTIONS:,}'
  if problem := _find_message_problem(value) or _find_tool_problem(value):
    return problem
  problem = (
    _find_text_problem(prompt=value.prompt, short_prompt=value.short_prompt)
    or _find_text_problem(
      MAX_NAME_CHARS, conversation=value.conversation, agent=value.agent
    )
    or _find_text_problem(
      MAX_TEXT_CHARS,
      anchor=value.anchor,
      text=value.text,
      task=value.task,
      **{f'actions[{n}]': action for n, action in enumerate(value.actions)},
    )
  )
  if not problem and sum(map(len, value.actions)) > MAX_TEXT_CHARS:
    return f'the actions have more than {MAX_TEXT_CHARS:,} characters'
  return problem


def _find_message_problem(value: base.Observation) -> str:
  if not isinstance(value.messages, (tuple, list)):
    return f'messages is {type(value.messages).__name__}, not tuple'
  if len(value.messages) > MAX_MESSAGES:
    return f'{len(value.messages)} messages of a turn; at most {MAX_MESSAGES}'
  for n, message in enumerate(value.messages):
    if not isinstance(message, base.Message):
      return f'messages[{n}] is {type(message).__name__}, not Message'
    if message.role not in base.ROLES:
      return (
        f'messages[{n}] has role={message.role!r:.80}; must be one of '
        f'{", ".join(base.ROLES)}'
      )
    problem = _find_text_problem(
      **{f'messages[{n}].text': message.text}
    ) or _find_text_problem(
      MAX_NAME_CHARS, **{f'messages[{n}].call_id': message.call_id}
    )
    if problem:
      return problem
  return ''


def _find_tool_problem(value: base.Observation) -> str:
  if not isinstance(value.tools, (tuple, list)):
    return f'tools is {type(value.tools).__name__}, not tuple'
  if len(value.tools) > MAX_TOOLS:
    return f'{len(value.tools)} tools; at most {MAX_TOOLS}'
  for n, tool in enumerate(value.tools):
    if problem := _find_text_problem(**{f'tools[{n}]': tool}):
      return problem
    try:
      function = json.loads(tool)
      # An escape may be half of a surrogate pair.
      json.dumps(function, ensure_ascii=False).encode()
      name = function['name']
    except UnicodeEncodeError as error:
      return f'tools[{n}] is not valid Unicode: {error}'
    except (TypeError, ValueError, KeyError, RecursionError):
      name = None
    if not isinstance(name, str) or not name:
      return f'tools[{n}]={tool!r:.80}: must be a JSON object with a name'
  return ''


def _find_text_problem(max_chars: float = math.inf, /, **texts: Any) -> str:
  for name, text in texts.items():
    if not isinstance(text, str):
      return f'{name} is {type(text).__name__}, not str'
    if len(text) > max_chars:
      return f'{name} has {len(text):,} characters; at most {max_chars:,}'
    try:
      str.encode(text)
    except UnicodeEncodeError as error:
      return f'{name} is not valid Unicode: {error}'
  return ''
