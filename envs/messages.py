"""Answers of environments as bytes that hold data and never code.

A worker process sends a header (size of the body, its process, number of the
call) and a body in JSON. The trainer treats both as untrusted: it knows the
size before it reads the body, decodes plain values, and checks them again. What
it sends to its workers is its own, and pickled.
"""

import json
import numbers
import os
import struct
from typing import Any

import numpy as np

from envs import base

# Largest body. The trainer reads no more of an answer than this.
MAX_BYTES = 16 * 2**20
# Longest text about a failure.
MAX_REASON_BYTES = 2048
# Most metrics of a step, longest name of one.
MAX_METRICS = 256
MAX_NAME_CHARS = 128

# Bounds of numbers in an answer. Advantages and algorithm.components square
# sums of them in float32, which ends at 3.4e38.
BOUNDS = {'reward': 1e6, 'score': 1e6}
LARGEST_METRIC = 1e12

HEADER = struct.Struct('>IQQ')

# What an answer is: a value; a line about what was raised; a line about a value
# that cannot be used.
REPLY, ERROR, GARBAGE = KINDS = ('reply', 'error', 'garbage')

_ANSWERS = {'reset': base.Observation, 'step': base.StepResult}
_TEXTS = ('prompt', 'short_prompt', 'anchor', 'text', 'task')
_RESULT = (
  'observation reward valid action success done metrics score final_anchor'
).split()


class Unusable(ValueError):
  """An answer that cannot be used; says why in one line."""


def encode(number: int, call: str, value: Any) -> bytes:
  """Returns the answer to a call as bytes.

  Args:
    number: of the call.
    call: prepare, reset or step; what prepare returns is dropped.
    value: what the environment returned.

  Raises:
    Unusable: if it is not what the call has to return, or is too large.
  """
  if wrong := _wrong(call, value):
    raise Unusable(wrong)
  try:
    plain = None
    if call == 'reset':
      plain = _plain_observation(value)
    elif call == 'step':
      plain = _plain_result(value)
    return _message(number, REPLY, plain)
  except Unusable:
    raise
  except Exception as error:  # Whatever the methods of odd classes raise.
    raise Unusable(f'{type(error).__name__}: {error}') from error


def refuse(number: int, kind: str, reason: str) -> bytes:
  """Returns an ERROR or GARBAGE as bytes."""
  return _message(number, kind, clean(reason))


def decode(body: bytes, call: str) -> tuple[str, Any]:
  """Returns (kind, value): the value is the answer, or a line.

  Never raises: what cannot be decoded is GARBAGE.
  """
  try:
    # As floats, integers of any length cost nothing.
    kind, value = json.loads(body.decode(), parse_int=float)
    if kind not in KINDS:
      raise Unusable(f'an answer of kind {kind!r:.80}')
    if kind != REPLY:
      return kind, clean(value)
    return REPLY, _value(call, value)
  except Unusable as error:
    return GARBAGE, clean(str(error))
  # Not JSON, another form of it, or nested too deeply.
  except (TypeError, ValueError, KeyError, RecursionError) as error:
    return GARBAGE, clean(f'not an answer: {type(error).__name__}: {error}')


def clean(text: str) -> str:
  """Returns a text in one bounded line, without control characters."""
  # A blank may be three bytes: what is cut here is never shown.
  line = ' '.join(str(text)[: 4 * MAX_REASON_BYTES].split())
  # Half a character could not be printed.
  line = line.encode(errors='backslashreplace').decode()
  line = ''.join(c for c in line if c.isprintable())
  return line.encode()[:MAX_REASON_BYTES].decode(errors='ignore')


def _message(number: int, kind: str, value: Any) -> bytes:
  text = json.dumps([kind, value], ensure_ascii=False, allow_nan=False)
  body = text.encode()
  if len(body) > MAX_BYTES:
    raise Unusable(f'an answer of {len(body):,} bytes; at most {MAX_BYTES:,}')
  return HEADER.pack(len(body), os.getpid(), number) + body


def _plain_observation(value: base.Observation) -> dict[str, Any]:
  return {
    **{name: getattr(value, name) for name in _TEXTS},
    'actions': list(value.actions),
  }


def _plain_result(value: base.StepResult) -> dict[str, Any]:
  following = value.observation
  return {
    'observation': following and _plain_observation(following),
    'reward': float(value.reward),
    'valid': bool(value.valid),
    'action': value.action,
    'success': bool(value.success),
    'done': bool(value.done),
    'metrics': {name: float(x) for name, x in value.metrics.items()},
    'score': None if value.score is None else float(value.score),
    'final_anchor': value.final_anchor,
  }


def _value(call: str, plain: Any) -> base.Observation | base.StepResult | None:
  if call == 'reset':
    value = _observation(plain)
  elif call == 'step':
    fields = {name: plain[name] for name in _RESULT}
    following = fields['observation']
    if following is not None:
      fields['observation'] = _observation(following)
    value = base.StepResult(**fields)
  else:
    return None
  if wrong := _wrong(call, value):
    raise Unusable(wrong)
  return value


def _observation(plain: dict[str, Any]) -> base.Observation:
  texts = {name: plain[name] for name in _TEXTS}
  return base.Observation(**texts, actions=tuple(plain['actions']))


def _wrong(call: str, value: Any) -> str:
  """Returns what is wrong with an answer; '' if it can be used."""
  if call not in _ANSWERS:
    return ''
  wanted = _ANSWERS[call]
  if not isinstance(value, wanted):
    return f'{call} gave {type(value).__name__}, not {wanted.__name__}'
  if isinstance(value, base.Observation):
    return _wrong_observation(value)
  return _wrong_result(value)


def _wrong_result(value: base.StepResult) -> str:
  following = value.observation
  if following is not None:
    if not isinstance(following, base.Observation):
      return f'observation is {type(following).__name__}, not Observation'
    if wrong := _wrong_observation(following):
      return wrong
  for name in ('valid', 'success', 'done'):
    if not isinstance(getattr(value, name), (bool, np.bool_)):
      return f'{name}={getattr(value, name)!r:.80}: must be True or False'
  if bool(value.done) != (following is None):
    return f'done={value.done} does not go with what is to be seen next'
  return _wrong_figures(value) or _wrong_text(
    action=value.action,
    final_anchor='' if value.final_anchor is None else value.final_anchor,
  )


def _wrong_figures(value: base.StepResult) -> str:
  if not isinstance(value.metrics, dict):
    return f'metrics is {type(value.metrics).__name__}, not dict'
  if len(value.metrics) > MAX_METRICS:
    return f'{len(value.metrics)} metrics of a step; at most {MAX_METRICS}'
  figures = [('reward', value.reward, BOUNDS['reward'])]
  if value.score is not None:
    figures.append(('score', value.score, BOUNDS['score']))
  for name, x in value.metrics.items():
    if not isinstance(name, str):
      return f'a metric is called {name!r:.80}, not a str'
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
      return (
        f'a metric is called {name!r:.80}; must be 1 to {MAX_NAME_CHARS} '
        'printable characters'
      )
    figures.append((name, x, LARGEST_METRIC))
  for name, x, bound in figures:
    if not isinstance(x, numbers.Real) or not abs(x) <= bound:
      return f'{name}={x!r:.80}: must be a number within +-{bound:,.0f}'
  return ''


def _wrong_observation(value: base.Observation) -> str:
  if not isinstance(value.actions, (tuple, list)):
    return f'actions is {type(value.actions).__name__}, not tuple'
  return _wrong_text(
    prompt=value.prompt,
    short_prompt=value.short_prompt,
    anchor=value.anchor,
    text=value.text,
    task=value.task,
    **{f'actions[{n}]': action for n, action in enumerate(value.actions)},
  )


def _wrong_text(**texts: Any) -> str:
  for name, text in texts.items():
    if not isinstance(text, str):
      return f'{name} is {type(text).__name__}, not str'
    try:
      str.encode(text)
    except UnicodeEncodeError as error:
      return f'{name} is no text: {error}'
  return ''
