"""Options: dataclass fields that say which values they accept.

A section of the config becomes a dataclass, `Thing(**config.thing)`, which
declares default and range of each option next to the code that uses it:

    @dataclasses.dataclass(frozen=True)
    class Surrogate:
      clip_epsilon: float = options.number(0.2, low=0, high=1)
      ratio_level: str = options.choice('token', ('token', 'row'))

      def __post_init__(self):
        options.check(self)
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

_ACCEPTS = 'accepts'
_IS_VALID = 'is_valid'


def number(
  default: float | int | None,
  *,
  low: float | None = None,
  above: float | None = None,
  high: float | None = None,
  below: float | None = None,
  note: str = '',
) -> Any:
  """Returns a field for a finite number within bounds; None is accepted.

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
      math.isfinite(value)
      and (low is None or value >= low)
      and (above is None or value > above)
      and (high is None or value <= high)
      and (below is None or value < below)
    )

  if low is not None and high is not None:
    accepts = f'between {low:g} and {high:g}'
  else:
    bounds = {'at least': low, 'above': above, 'at most': high, 'below': below}
    accepts = ', '.join(
      f'{k} {v:g}' for k, v in bounds.items() if v is not None
    )
  accepts = 'out of range; must be ' + (accepts or 'finite')
  return _field(default, is_valid, accepts + (note and f'; {note}'))


def choice(default: str, values: Sequence[str]) -> Any:
  """Returns a field for one of a few names."""
  accepts = (
    f'unknown; must be one of {", ".join(v or "(empty)" for v in values)}'
  )
  return _field(default, lambda value: value in values, accepts)


def _field(default: Any, is_valid: Any, accepts: str) -> Any:
  metadata = {_IS_VALID: is_valid, _ACCEPTS: accepts}
  return dataclasses.field(default=default, metadata=metadata)


def check(instance: Any) -> None:
  """Checks the options of a dataclass instance.

  Raises:
    ValueError: one line per option that is not accepted.
  """
  problems = []
  for field in dataclasses.fields(instance):
    value = getattr(instance, field.name)
    is_valid = field.metadata.get(_IS_VALID)
    if is_valid and value is not None and not is_valid(value):
      problems.append(f'{field.name}={value}: {field.metadata[_ACCEPTS]}')
  if problems:
    raise ValueError('\n'.join(problems))
