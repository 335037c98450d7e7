"""Fixed opponents in TextArena games for two players.

An opponent is a function of what it reads and a random generator; it returns
its move. It must depend on nothing else, so that episodes can be replayed.
"""

import functools
import re
from collections.abc import Callable, Sequence

import numpy as np

from envs import checks

# (text since its last turn, generator) -> move.
Opponent = Callable[[str, np.random.Generator], str]

RANDOM = 'random'
# The policy itself; 'self:NAME' if it is evaluated against NAME.
SELF = 'self'
# Games list moves as '[4]', '[check]'.
_LISTED = re.compile(r"'(\[[^\]'\n]+\])'")


def split_self(name: str) -> tuple[bool, str]:
  """Returns whether a name asks for self-play, and the fixed opponent."""
  own, _, fixed = name.partition(':')
  return (True, fixed or RANDOM) if own == SELF else (False, name)


def make(name: str, actions: Sequence[str]) -> Opponent:
  """Returns an opponent.

  Args:
    name: 'random' for a random move, or `module:function` of another project.
    actions: moves that 'random' draws from, if the game lists none.

  Raises:
    ValueError: in one line, if there is no such opponent.
  """
  if name == RANDOM:
    return functools.partial(play_randomly, actions=tuple(actions))
  return checks.import_named(
    'env.opponent',
    name,
    accepted=f'{RANDOM}, {SELF} or module:function',
    takes=('text', 'rng'),
  )


def play_randomly(
  text: str, rng: np.random.Generator, *, actions: Sequence[str]
) -> str:
  """Returns one of the moves that the last line with moves lists.

  Raises:
    ValueError: in one line, if there are neither such a line nor actions.
  """
  lines = [_LISTED.findall(line) for line in text.splitlines()]
  moves = next(filter(None, reversed(lines)), actions)
  if not moves:
    raise ValueError(
      f'env.opponent={RANDOM}: the game lists no moves; set env.actions or '
      'name a function'
    )
  return moves[rng.integers(len(moves))]
