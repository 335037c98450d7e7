"""Values of config.json: their checks, and errors about them."""

import json
import math

# Maximum depth of a network whose layers differ, each of which is compiled.
_MAX_MIXED = 1024
# Prefix of the private fields of transformers.
_PRIVATE = '_'
# Largest count (int32), and the maximum characters of a value in an error.
_MAX_COUNT, _MAX_SHOWN = 2**31 - 1, 80


def error(
  directory: str, name: str, value: object, accepted: str
) -> ValueError:
  """Returns the one-line error for a field of config.json."""
  field = f'{json.dumps(name)[1:-1]}={abbreviated(value)}'
  return ValueError(
    f'model.path={directory}: config.json has {field}; {accepted}'
  )


def abbreviated(value: object) -> str:
  """Returns a value as JSON on one line, truncated."""
  text = json.dumps(value)
  return text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}..'


def is_number(value: object) -> bool:
  """Returns whether a value is a finite number; booleans are not."""
  return type(value) in (int, float) and -math.inf < value < math.inf


def is_count(value: object) -> bool:
  """Returns whether a value is an integer above 0 that fits into int32."""
  return type(value) is int and 0 < value <= _MAX_COUNT


def check_neutral(directory: str, values: dict, neutral: dict) -> None:
  """Refuses fields whose value is not one that leaves the network unchanged.

  Args:
    directory: the checkpoint.
    values: the fields.
    neutral: the accepted values of each field; null is always accepted.
  """
  for name, value in values.items():
    if value is None or name.startswith(_PRIVATE):
      continue
    if name not in neutral:
      raise error(
        directory,
        name,
        value,
        'unknown field that may change the network; remove it if it does not',
      )
    if value not in neutral[name]:
      accepted = abbreviated(neutral[name][0] if neutral[name] else None)
      raise error(directory, name, value, f'only {accepted} is supported')


def check_depth(directory: str, raw: dict) -> None:
  """Refuses deep networks whose layers differ."""
  count = raw['num_hidden_layers']
  if count > _MAX_MIXED:
    accepted = f'must be at most {_MAX_MIXED} for layers that differ'
    raise error(directory, 'num_hidden_layers', count, accepted)
