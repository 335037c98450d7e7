"""Tasks that are nothing but a seed: splits of numbers that never meet."""

# Name of a split: how many tasks it has.
SPLITS = {'train': 10_000, 'valid': 1_000, 'test': 1_000}
_SPLIT_ROOM = 100_000
MAX_SEED = 1_000


def check_seed(seed: int) -> None:
  """Raises ValueError, in one line, if a seed of seeds cannot be used."""
  if not 0 <= seed <= MAX_SEED:
    raise ValueError(f'env.seed={seed}: must be from 0 to {MAX_SEED:,}')


class Seeds:
  """The seeds of a split, by number.

  Args:
    split: one of SPLITS.
    seed: another one, other seeds.
    most: of a split; None: as many as SPLITS has.

  Raises:
    ValueError: in one line, if there is no such split or seed.
  """

  def __init__(self, split: str, seed: int = 0, most: int | None = None):
    if split not in SPLITS:
      raise ValueError(f'split={split}: must be one of {", ".join(SPLITS)}')
    check_seed(seed)
    self._size = min(SPLITS[split], most or SPLITS[split])
    place = seed * len(SPLITS) + list(SPLITS).index(split)
    self._first = place * _SPLIT_ROOM

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, index: int) -> int:
    return self._first + index

  def kind(self, index: int) -> str:
    """Returns the same for all."""
    del index
    return 'all'
