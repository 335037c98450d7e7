"""Actions of Gymnasium spaces as text: names, numbers, or free text.

A form says how a prompt lists the actions of a space, and reads an action from
text. Discrete spaces have a name for each action. Box, MultiDiscrete and
MultiBinary spaces have a number for each entry, separated by commas.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from envs import turns

FREE = '<your own words>'
_MAX_ENTRIES = 16
_DIGITS = 4  # significant digits of drawn numbers
_NUMBER = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?', re.IGNORECASE)


class Form(Protocol):
  """How the actions of a space are written.

  Attributes:
    shown: what the prompt lists as admissible actions.
    keep_case: whether upper-case letters matter.
  """

  shown: tuple[str, ...]
  keep_case: bool

  def parse(self, text: str) -> Any:
    """Returns an action of the space; None if the text is none."""

  def draw(self, rng: np.random.Generator) -> str:
    """Returns a random action as text.

    Raises:
      ValueError: in one line, if actions cannot be drawn.
    """


def _is_readable(name: str) -> bool:
  """Returns whether a response that has a name as its action is valid."""
  response = f'<action>{name}</action>'
  read = turns.parse(response, require_think=False, unparsed_characters=0)
  return read == (name, True)


class Names:
  """Actions of a Discrete space, each with a name."""

  keep_case = False

  def __init__(self, space: Any, names: tuple[str, ...]):
    count = int(space.n)
    self.shown = names or tuple(map(str, range(count)))
    self._start = space.start
    if len(set(self.shown)) != count or not all(map(_is_readable, self.shown)):
      raise ValueError(
        f'env.actions={names}: must be {count} different names in lower case, '
        'without tags, spaces around them, or Chinese, Japanese and Korean '
        'characters, which make a response invalid'
      )

  def parse(self, text: str) -> Any:
    """Returns the action of a name."""
    if text not in self.shown:
      return None
    return self._start + self.shown.index(text)

  def draw(self, rng: np.random.Generator) -> str:
    """Returns a random name."""
    return self.shown[rng.integers(len(self.shown))]


class Words:
  """Actions of a Text space."""

  keep_case = True
  shown = (FREE,)

  def __init__(self, space: Any):
    self._space = space

  def parse(self, text: str) -> Any:
    """Returns the text, if the space contains it."""
    return text if self._space.contains(text) else None

  def draw(self, rng: np.random.Generator) -> str:
    """Raises ValueError: there is no list of texts."""
    raise ValueError(
      'env.actions=(): any text is an action; demonstrations need actions '
      'that can be listed'
    )


class Numbers:
  """Actions of a Box, MultiDiscrete or MultiBinary space.

  Args:
    space: the space.
    names: names of its entries; () for none.
  """

  keep_case = False

  def __init__(self, space: Any, names: tuple[str, ...]):
    self._shape, self._dtype = space.shape, space.dtype
    self._low, self._high = _bounds(space)
    size = self._low.size
    if not 1 <= size <= _MAX_ENTRIES:
      raise ValueError(
        f'env.id: an action has {size} numbers; must be 1 to {_MAX_ENTRIES}'
      )
    if names and len(names) != size:
      raise ValueError(f'env.actions={names}: must be {size} names of numbers')
    ranges = map(self._range, self._low, self._high)
    entries = [
      f'<{name}{": " if name else ""}{text}>'
      for name, text in zip(names or [''] * size, ranges, strict=True)
    ]
    self.shown = (', '.join(entries),)

  @property
  def _is_integer(self) -> bool:
    return np.issubdtype(self._dtype, np.integer)

  def _range(self, low: float, high: float) -> str:
    word = 'integer' if self._is_integer else 'number'
    if not np.isfinite([low, high]).all():
      return word
    return f'{word} from {self._shortest(low)} to {self._shortest(high)}'

  def _shortest(self, value: float) -> str:
    """Returns the shortest text that is read as the value."""
    if self._is_integer:
      return f'{value:.0f}'
    return str(self._dtype.type(value)).removesuffix('.0')

  def parse(self, text: str) -> Any:
    """Returns the numbers, if there are as many and within their bounds."""
    parts = [part.strip() for part in text.split(',')]
    if len(parts) != self._low.size or not all(map(_NUMBER.fullmatch, parts)):
      return None
    values = np.array(parts, np.float64)
    if self._is_integer and (values != np.round(values)).any():
      return None
    if not self._is_integer:
      # Bounds are numbers of this precision. Too large numbers become infinite.
      with np.errstate(over='ignore'):
        values = values.astype(self._dtype)
    inside = (self._low <= values) & (values <= self._high)
    if not (inside & np.isfinite(values)).all():
      return None
    return values.astype(self._dtype).reshape(self._shape)

  def draw(self, rng: np.random.Generator) -> str:
    """Returns random numbers, uniform within bounds, else normal."""
    bounded = np.isfinite(self._low) & np.isfinite(self._high)
    low, high = (np.where(bounded, x, 0) for x in (self._low, self._high))
    if self._is_integer:
      values = rng.integers(low, high, endpoint=True)
      return ', '.join(map(str, values))
    drawn = np.where(
      bounded, rng.uniform(low, high), rng.normal(size=low.shape)
    )
    rounded = [float(f'{value:.{_DIGITS}g}') for value in drawn]
    inside = np.clip(rounded, self._low, self._high)
    return ', '.join(map(self._shortest, inside))


def _bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
  """Returns the lowest and highest value of each entry, float64 [entries]."""
  from gymnasium import spaces

  if isinstance(space, spaces.Box):
    low, high = np.asarray([space.low, space.high], np.float64)
    return low.reshape(-1), high.reshape(-1)
  if isinstance(space, spaces.MultiBinary):
    size = int(np.prod(space.shape))
    return np.zeros(size), np.ones(size)
  low = np.asarray(space.start, np.float64).reshape(-1)
  return low, low + np.asarray(space.nvec, np.float64).reshape(-1) - 1


def make(space: Any, names: Sequence[str]) -> Form:
  """Returns the form of a space's actions.

  Args:
    space: the action space.
    names: names of the actions of a Discrete space, or of the entries of a
      Box, MultiDiscrete or MultiBinary space; () for none.

  Raises:
    ValueError: in one line, if the space has no form or the names are wrong.
  """
  from gymnasium import spaces

  names = tuple(names)
  if isinstance(space, spaces.Text) and not names:
    return Words(space)
  if isinstance(space, spaces.Discrete):
    return Names(space, names)
  if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
    return Numbers(space, names)
  raise ValueError(
    f'env.id: its action space is {type(space).__name__}; must be Box, '
    'Discrete, MultiBinary, MultiDiscrete or Text'
  )
