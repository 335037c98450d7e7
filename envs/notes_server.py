"""A small MCP server: a safe whose code is found by following notes.

    python -m envs.notes_server

Each drawer holds a note that names the next drawer; the last note holds the
code of the safe. `tasks` returns tasks for `envs.mcp_env`: they name the first
drawer. Only the SDK's server is needed to serve; to read the tasks, nothing.
"""

from typing import Any

import numpy as np

from envs import seeds

NUM_DRAWERS = 6
NUM_NOTES = 1  # before the code


def _lay_out(seed: int) -> tuple[list[int], str]:
  """Returns the drawers on the way to the code, and the code."""
  rng = np.random.default_rng(seed)
  way = rng.choice(NUM_DRAWERS, NUM_NOTES + 1, replace=False) + 1
  return way.tolist(), ''.join(map(str, rng.integers(1, 10, 2)))


def tasks(split: str) -> list[dict[str, Any]]:
  """Returns the tasks of a split."""
  listed = []
  for seed in map(seeds.Seeds(split).__getitem__, range(1000)):
    way, code = _lay_out(seed)
    solution = [
      {'name': 'open', 'arguments': {'drawer': drawer}} for drawer in way
    ]
    listed.append(
      {
        'task': f'Find the code. Start at drawer {way[0]}.',
        'answer': code,
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
    self._way, self._code = _lay_out(seed)
    self._read: set[int] = set()
    return ''

  def open(self, drawer: int) -> str:
    """Opens a drawer and reads its note."""
    if not 1 <= drawer <= NUM_DRAWERS:
      return f'There are drawers 1 to {NUM_DRAWERS}.'
    self._read.add(drawer)
    if drawer not in self._way:
      return 'Empty.'
    place = self._way.index(drawer)
    if place == NUM_NOTES:
      return f'Code {self._code}.'
    return f'Look in drawer {self._way[place + 1]}.'

  def state(self) -> str:
    """Returns the drawers that have been opened."""
    return f'opened: {sorted(self._read)}'

  def score(self, answer: str) -> float:
    """Returns 1 for the code, else 0."""
    return float(answer.strip() == self._code)


def serve() -> None:
  """Serves over standard input and output."""
  from mcp.server import MCPServer

  room, server = Room(), MCPServer('notes', log_level='WARNING')
  for method in (room.reset, room.open, room.state, room.score):
    server.tool()(method)
  server.run()


if __name__ == '__main__':
  serve()
