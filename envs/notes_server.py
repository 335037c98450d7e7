"""A small MCP server: a safe whose password is found by reading notes.

    python -m envs.notes_server

Two of six drawers hold a note. The task and each result list the drawers with
unread notes, and the last note holds the password of the safe. `tasks` returns
tasks for `envs.mcp_env`. Drawers and passwords are digits, each of which is one
token wherever it occurs, so that a small policy learns to repeat it. Without
the password, an episode scores a quarter for each note that has been read; a
guess does not help. Only the SDK's server is needed to serve; to read the
tasks, nothing.
"""

import argparse
from typing import Any

import numpy as np

from envs import seeds

DRAWERS = range(1, 7)
PASSWORDS = range(1, 10)
NUM_NOTES = 2


def _lay_out(seed: int) -> tuple[list[int], str]:
  """Returns the drawers with notes, in order, and the password."""
  rng = np.random.default_rng(seed)
  notes = rng.choice(DRAWERS, NUM_NOTES, replace=False)
  return sorted(notes.tolist()), str(rng.choice(PASSWORDS))


def _list(drawers: list[int]) -> str:
  return ' '.join(map(str, drawers))


def tasks(split: str) -> list[dict[str, Any]]:
  """Returns the tasks of a split."""
  listed = []
  for seed in map(seeds.Seeds(split).__getitem__, range(1000)):
    notes, password = _lay_out(seed)
    solution = [
      {'name': 'open', 'arguments': {'drawer': drawer}} for drawer in notes
    ]
    listed.append(
      {
        'task': f'Find the password. Notes: {_list(notes)}',
        'answer': password,
        'arguments': {'seed': seed},
        'solution': solution,
      }
    )
  return listed


class Room:
  """The drawers, and those with unread notes."""

  def __init__(self):
    self.reset(0)

  def reset(self, seed: int) -> str:
    """Starts an episode."""
    self._unread, self._password = _lay_out(seed)
    return ''

  def open(self, drawer: int) -> str:
    """Opens a drawer and reads its note."""
    if drawer not in DRAWERS:
      return f'The drawers are {DRAWERS[0]} to {DRAWERS[-1]}.'
    if drawer in self._unread:
      self._unread.remove(drawer)
    if self._unread:
      return f'Notes: {_list(self._unread)}'
    return f'Password: {self._password}'

  def state(self) -> str:
    """Returns the drawers with unread notes."""
    return f'unread: {_list(self._unread) or "none"}'

  def score(self, answer: str) -> float:
    """Returns 1 for the password if all notes were read, at most half else."""
    if not self._unread and answer.strip() == self._password:
      return 1.0
    return (NUM_NOTES - len(self._unread)) / (2 * NUM_NOTES)


def serve() -> None:
  """Serves over standard input and output."""
  from mcp.server import MCPServer

  room, server = Room(), MCPServer('notes', log_level='WARNING')
  for method in (room.reset, room.open, room.state, room.score):
    server.tool()(method)
  server.run()


if __name__ == '__main__':
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  serve()
