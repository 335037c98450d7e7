"""Random walks of walk_harness.py, for the warm start of a tiny policy.

    export PYTHONPATH=examples:$PYTHONPATH
    python launch/sft.py --config=configs/endpoint.py:tiny \
      --config.env.name=walk_start

They teach the form of a tool call only.
"""

import json
from collections.abc import Iterator

import numpy as np
import walk_harness

from envs import base, endpoint, tool_calls

CONTEXTS = ('conversation',)
tasks = endpoint.tasks


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
    """Yields (observation, response) of a random walk."""
    del noise
    rng = np.random.default_rng([seed, task.index])
    room = walk_harness.first_room(task.index)
    observation = _observe(walk_harness.first_messages(room))
    for _ in range(walk_harness.MAX_STEPS):
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
