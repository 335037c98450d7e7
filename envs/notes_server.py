"""A small MCP server: a safe whose password is found by following notes.

    python -m envs.notes_server

Two of six drawers hold a note: the first names the second, which holds the
password of the safe. `tasks` returns tasks for `envs.mcp_env`: they name the
first drawer. Drawers and passwords are words of a short list, each of which is
one token for a tokenizer that was trained on them; a small policy learns to
repeat them. A password that is guessed without its note scores 0. Only the
SDK's server is needed to serve; to read the tasks, nothing.
"""

from typing import Any

import numpy as np

from envs import seeds

DRAWERS = ('red', 'blue', 'green', 'white', 'black', 'brown')
PASSWORDS = ('apple', 'tiger', 'river', 'candle', 'piano', 'cloud')


def _lay_out(seed: int) -> tuple[list[str], str]:
  """Returns the drawers on the way to the password, and the password."""
  rng = np.random.default_rng(seed)
  way = rng.choice(DRAWERS, 2, replace=False)
  return way.tolist(), str(rng.choice(PASSWORDS))


def tasks(split: str) -> list[dict[str, Any]]:
  """Returns the tasks of a split."""
  listed = []
  for seed in map(seeds.Seeds(split).__getitem__, range(1000)):
    way, password = _lay_out(seed)
    solution = [
      {'name': 'open', 'arguments': {'drawer': drawer}} for drawer in way
    ]
    listed.append(
      {
        'task': f'Find the password. Start at the {way[0]} drawer.',
        'answer': password,
        'arguments': {'seed': seed},
        'solution': solution,
      }
    )
  return listed


class Room:
  """The drawers, and those that have been opened."""

  def __init__(self):
    self.reset(0)

  def reset(self, seed: int) -> str:
    """Starts an episode."""
    self._way, self._password = _lay_out(seed)
    self._read: set[str] = set()
    return ''

  def open(self, drawer: str) -> str:
    """Opens a drawer and reads its note."""
    if drawer not in DRAWERS:
      return f'The drawers are {", ".join(DRAWERS)}.'
    self._read.add(drawer)
    if drawer not in self._way:
      return 'Empty.'
    if drawer == self._way[-1]:
      return f'The password is {self._password}.'
    return f'Look in the {self._way[-1]} drawer.'

  def state(self) -> str:
    """Returns the drawers that have been opened."""
    return f'opened: {", ".join(sorted(self._read)) or "none"}'

  def score(self, answer: str) -> float:
    """Returns 1 for the password if its note has been read, else 0."""
    is_read = self._way[-1] in self._read
    return float(is_read and answer.strip() == self._password)


def serve() -> None:
  """Serves over standard input and output."""
  from mcp.server import MCPServer

  room, server = Room(), MCPServer('notes', log_level='WARNING')
  for method in (room.reset, room.open, room.state, room.score):
    server.tool()(method)
  server.run()


if __name__ == '__main__':
  serve()
