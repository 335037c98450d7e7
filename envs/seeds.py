"""Tasks that consist of a seed only, with disjoint splits; orders of tasks."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

# Split -> number of tasks.
SPLITS = {'train': 10_000, 'valid': 1_000, 'test': 1_000}
_SEEDS_PER_SPLIT = 100_000
MAX_SEED = 1_000
# Shares of all layouts, of 12; the others are of the split train.
_SHARES = {0: 'valid', 1: 'test'}
_LENGTHS = ('short', 'medium', 'long')

_T = TypeVar('_T')


def check_seed(seed: int, field: str = 'env.seed') -> None:
  """Raises ValueError, in one line, if a base seed is out of range."""
  if not 0 <= seed <= MAX_SEED:
    raise ValueError(f'{field}={seed}: must be from 0 to {MAX_SEED:,}')


def split_of(layout: object) -> str:
  """Returns the split that a layout belongs to, whatever the seed.

  Seeds alone do not keep splits apart where a generator has few layouts.

  Args:
    layout: all that distinguishes layouts, as a value with a stable `repr`.
  """
  return _SHARES.get(_digest(layout) % 12, 'train')


def mix(tasks: Iterable[_T]) -> list[_T]:
  """Returns tasks in an order that has nothing to do with what they are.

  Sources list similar tasks one after another, but evaluations take the first
  tasks of a split and demonstrations the last. The order of two tasks does not
  depend on the other tasks.

  Args:
    tasks: values with a stable `repr`, each once.
  """
  return sorted(tasks, key=_digest)


def _digest(value: object) -> int:
  digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'big')


def length_type(steps: int, bounds: Sequence[int]) -> str:
  """Returns the third of (min, max) that a solution's length is in."""
  low, high = bounds
  return _LENGTHS[(steps - low) * len(_LENGTHS) // (high - low + 1)]


class Seeds:
  """The seeds of a split, by task index.

  Args:
    split: one of SPLITS.
    seed: base seed; different base seeds give disjoint seeds.
    max_size: upper limit of the split's size; None for the size in SPLITS.

  Raises:
    ValueError: in one line, if the split is unknown or the seed out of range.
  """

  def __init__(self, split: str, seed: int = 0, max_size: int | None = None):
    if split not in SPLITS:
      raise ValueError(f'split={split}: must be one of {", ".join(SPLITS)}')
    check_seed(seed)
    self._size = min(SPLITS[split], max_size or SPLITS[split])
    block = seed * len(SPLITS) + list(SPLITS).index(split)
    self._first = block * _SEEDS_PER_SPLIT

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, index: int) -> int:
    return self._first + index

  def task_type(self, index: int) -> str:
    """Returns the task type: 'all' for every task."""
    del index
    return 'all'
