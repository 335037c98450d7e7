"""Random games of guess_harness.py, for the warm start of a tiny policy.

    export PYTHONPATH=examples:$PYTHONPATH
    python launch/sft.py --config=configs/endpoint.py:tiny \
      --config.env.name=guess_start

They teach the form of a tool call only.
"""

import json
from collections.abc import Iterator

import guess_harness
import numpy as np

from envs import base, endpoint, tool_calls

CONTEXTS = ('conversation',)
tasks = endpoint.tasks


class Env:
  """Demonstrates games; takes the options of the environment `endpoint`.

  Args:
    **options: ignored.
  """

  def __init__(self, **options):
    del options

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response) of a game with random guesses."""
    del noise
    rng = np.random.default_rng([seed, task.index])
    secret = task.index % guess_harness.MAX_NUMBER + 1
    observation = _observe(guess_harness.first_messages())
    for _ in range(guess_harness.MAX_GUESSES):
      number = int(rng.integers(guess_harness.MAX_NUMBER)) + 1
      yield (
        observation,
        tool_calls.write(tool_calls.Call('guess', {'number': number})),
      )
      answer = guess_harness.judge(secret, number)
      if answer == 'right':
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
    tools=(json.dumps(guess_harness.TOOL),),
  )
