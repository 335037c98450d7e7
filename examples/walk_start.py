"""Walks of walk_harness.py with detours, for the warm start of a tiny policy.

    export PYTHONPATH=examples:$PYTHONPATH
    python launch/sft.py --config=configs/endpoint.py:tiny \
      --config.env.name=walk_start

A step follows the shortest way or, with probability `sft.noise`, a random
direction.
"""

import json
from collections.abc import Iterator

import numpy as np
import walk_harness

from envs import base, endpoint, tool_calls

CONTEXTS = ('conversation',)
tasks = endpoint.tasks


def shortest_way(room: str) -> str:
  """Returns the direction of the shortest way from a room to the garden."""
  doors = walk_harness.HOUSE[room]
  return min(doors, key=lambda direction: _distance(doors[direction], {room}))


def _distance(room: str, passed: set[str]) -> float:
  """Returns the number of steps to the garden that avoid rooms."""
  if room == walk_harness.GOAL:
    return 0
  following = set(walk_harness.HOUSE[room].values()) - passed
  ways = [_distance(other, passed | {room}) for other in following]
  return 1 + min(ways, default=float('inf'))


class Env:
  """Demonstrates walks; takes the options of the environment `endpoint`.

  Args:
    **options: ignored.
  """

  def __init__(self, **options):
    del options

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of a walk."""
    rng = np.random.default_rng([seed, task.index])
    room = walk_harness.first_room(task.index)
    observation = _observe(walk_harness.first_messages(room))
    for _ in range(walk_harness.MAX_STEPS):
      direction = shortest_way(room)
      if rng.random() < noise:
        direction = str(rng.choice(walk_harness.DIRECTIONS))
      call = tool_calls.Call('go', {'direction': direction})
      yield observation, tool_calls.write(call)
      room, answer = walk_harness.walk(room, direction)
      if room == walk_harness.GOAL:
        return
      observation = _observe([{'role': 'tool', 'content': answer}])

  def close(self) -> None:
    """Does nothing."""


def _observe(messages: list[dict]) -> base.Observation:
  return base.Observation(
    prompt='',
    short_prompt='',
    anchor='',
    text='',
    messages=tuple(base.Message(m['role'], m['content']) for m in messages),
    tools=(json.dumps(walk_harness.TOOL),),
  )
