"""Options: dataclass fields that declare the values that they accept.

A section of the config becomes a dataclass, `Surrogate(**config.surrogate)`,
which declares default and range of each option next to the code that uses it:

    @dataclasses.dataclass(frozen=True)
    class Surrogate:
      clip_epsilon: float = options.number(0.2, low=0, high=1)
      ratio_level: str = options.choice('token', ('token', 'row'))

      def __post_init__(self):
        options.check(self)

A value of None is accepted by every field: the option is not set.
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

_T = TypeVar('_T')

_ACCEPTS = 'accepts'
_IS_VALID = 'is_valid'

MAX_SEED = MAX_INT = 2**31 - 1
# Minimum number of episodes for a comparison.
MIN_GROUP = 2


def number(
  default: float | int | None,
  *,
  low: float | None = None,
  above: float | None = None,
  high: float | None = None,
  below: float | None = None,
  note: str = '',
) -> Any:
  """Returns a field for a finite number within bounds.

  Args:
    default: its default.
    low: smallest accepted value.
    above: bound that a value must be greater than.
    high: largest accepted value.
    below: bound that a value must be smaller than.
    note: added to the error, such as '0 is off'.
  """

  def is_valid(value: float) -> bool:
    return (
      isinstance(value, numbers.Real)
      and math.isfinite(value)
      and not (isinstance(value, int) and abs(value) > MAX_INT)
      and (low is None or value >= low)
      and (above is None or value > above)
      and (high is None or value <= high)
      and (below is None or value < below)
    )

  if low is not None and high is not None:
    accepts = f'between {low:,g} and {high:,g}'
  else:
    bounds = {'at least': low, 'above': above, 'at most': high, 'below': below}
    accepts = ', '.join(
      f'{k} {v:g}' for k, v in bounds.items() if v is not None
    )
  accepts = 'out of range; must be ' + (accepts or 'finite')
  return field(default, is_valid, accepts + (note and f'; {note}'))


def seed(default: int = 0) -> Any:
  """Returns a field for the seed of a random stream."""
  return field(
    default,
    lambda value: 0 <= value <= MAX_SEED,
    'out of range; must be a non-negative 32-bit integer',
  )


def choice(default: str, values: Sequence[str]) -> Any:
  """Returns a field for one of a few names."""
  accepts = (
    f'unknown; must be one of {", ".join(v or "(empty)" for v in values)}'
  )
  return field(default, lambda value: value in values, accepts)


def texts(default: tuple[str, ...] = ()) -> Any:
  """Returns a field for different texts that are not empty."""

  def is_valid(values: Sequence[str]) -> bool:
    stripped = {value.strip() for value in values}
    return '' not in stripped and len(stripped) == len(values)

  return field(
    default,
    is_valid,
    'must be different texts that are not empty; white space around them does '
    'not count',
  )


def sizes(default: tuple[int, ...], *, or_none: bool = False) -> Any:
  """Returns a field for rising positive sizes, or none if `or_none`."""

  def is_valid(value: Sequence[int]) -> bool:
    return (
      all(isinstance(size, int) for size in value)
      and (or_none or len(value) > 0)
      and min(value, default=1) >= 1
      and tuple(value) == tuple(sorted(set(value)))
    )

  alternative = ', or () for half the limit and the limit' if or_none else ''
  return field(
    default,
    is_valid,
    f'must be one or more rising positive sizes{alternative}',
  )


def field(default: Any, is_valid: Callable[[Any], bool], accepts: str) -> Any:
  """Returns a field for any values.

  Args:
    default: its default.
    is_valid: whether a value other than None is accepted.
    accepts: what is wrong with other values; what is accepted.
  """
  metadata = {_IS_VALID: is_valid, _ACCEPTS: accepts}
  return dataclasses.field(default=default, metadata=metadata)


def defaults(factory: Any) -> dict[str, Any]:
  """Returns a dataclass's options and defaults; {} if it is no dataclass."""
  if not dataclasses.is_dataclass(factory):
    return {}
  return {f.name: f.default for f in dataclasses.fields(factory) if f.init}


def make(
  factory: Callable[..., _T],
  values: Mapping[str, Any],
  *,
  field: str,
  needs: Sequence[str],
) -> _T:
  """Creates an algorithm, a loss or a plug-in, which a user may have written.

  Args:
    factory: its class.
    values: options by name; those that it does not have are ignored.
    field: the config field that names it, and its value.
    needs: attributes that it must have.

  Raises:
    ValueError: in one line, if an option without a default, or an attribute, is
      missing.
  """
  given = {k: values[k] for k in defaults(factory) if k in values}
  try:
    inspect.signature(factory).bind(**given)
  except TypeError as error:
    raise ValueError(f'{field}: {error}; must have a default') from error
  except ValueError as error:  # Of a builtin type.
    raise ValueError(
      f'{field}: {error}; must be a class with a signature'
    ) from error
  instance = factory(**given)
  missing = [name for name in needs if not hasattr(instance, name)]
  if missing:
    raise ValueError(
      f'{field}: has no {", ".join(missing)}; must have {", ".join(needs)}'
    )
  return instance


def check_choice(name: str, value: str, values: Sequence[str]) -> None:
  """Raises ValueError, in one line, if a value is none of the accepted ones."""
  if value not in values:
    raise ValueError(
      f'{name}={value}: unknown; must be one of {", ".join(values)}'
    )


def refuse_unknown(
  factory: Any, values: Mapping[str, Any], *, field: str, prefix: str = ''
) -> None:
  """Raises ValueError, in one line, for an option that a class does not have.

  Args:
    factory: the class.
    values: options by name.
    field: what names the class, and its value.
    prefix: put before the names of options in messages.
  """
  known = list(defaults(factory))
  for name, value in values.items():
    if name not in known:
      close = difflib.get_close_matches(name, known, 1)
      hint = f'did you mean {close[0]}? ' if close else ''
      raise ValueError(
        f'{prefix}{name}={value!r}: no option of {field}; {hint}must be one of '
        f'{", ".join(known) or "none"}'
      )


def of_section(options: type[_T], section: Mapping[str, Any]) -> _T:
  """Returns the options that a dataclass has in a section of several.

  Args:
    options: a dataclass of options.
    section: the section of the config.
  """
  fields = dataclasses.fields(options)
  return options(**{field.name: section[field.name] for field in fields})


def problems(options: type, values: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each value that is not accepted.

  Args:
    options: a dataclass of options.
    values: values by name; others than the dataclass has are skipped.
  """
  known = dataclasses.is_dataclass(options)
  for option in dataclasses.fields(options) if known else ():
    value = values.get(option.name)
    if value is None:
      continue
    # The config checks other types.
    is_tuple = typing.get_origin(option.type) is tuple
    has_type = not is_tuple or _has_type(value, option.type)
    is_valid = option.metadata.get(_IS_VALID, lambda _: True)
    if not has_type or not is_valid(value):
      wrong_type = f'wrong type; must be {option.type}'
      accepts = option.metadata.get(_ACCEPTS, wrong_type)
      if not _is_finite(value):
        accepts = accepts.replace('out of range; must be', 'must be finite and')
      elif isinstance(value, int) and value > MAX_INT and is_valid(MAX_INT):
        accepts = f'out of range; must be at most {MAX_INT:,}'
      yield f'{option.name}={value}: {accepts}'
    elif is_tuple and not all(map(_is_finite, value)):
      yield f'{option.name}={value}: not finite; must be finite numbers'


def _is_finite(value: Any) -> bool:
  return not isinstance(value, float) or math.isfinite(value)


def _has_type(value: Any, annotation: Any) -> bool:
  """Returns whether a value, or each element of a tuple, has a type."""
  if typing.get_origin(annotation) is tuple:
    first, *others = typing.get_args(annotation)
    if not isinstance(value, Sequence) or isinstance(value, str):
      return False
    types = [first] * len(value) if others == [...] else [first, *others]
    return len(types) == len(value) and all(map(_has_type, value, types))
  return isinstance(value, int | float if annotation is float else annotation)


def check(instance: Any, prefix: str = '') -> None:
  """Checks the options of a dataclass instance.

  Args:
    instance: the dataclass.
    prefix: put before the names of options in messages.

  Raises:
    ValueError: one line per option that is not accepted.
  """
  checked = problems(type(instance), vars(instance))
  lines = [f'{prefix}{problem}' for problem in checked]
  if lines:
    raise ValueError('\n'.join(lines))
