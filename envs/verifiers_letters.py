"""A small environment of the package `verifiers`: take letters in order.

A tool takes the first letter of a row of four; any other letter costs a turn.
The rubric rewards a row that is taken within the limit of turns, and a little
each letter. `load_environment` needs verifiers; the demonstrator, for the warm
start of a tiny policy, needs nothing.
"""

import itertools
import json
import random
from typing import Any

import numpy as np

from envs import base, tool_calls

LETTERS = 'abcdefg'
ROW = 4  # letters in a row
NUM_HELD_OUT = 256  # rows, of 840


def show(row: list[str]) -> str:
  """Returns letters as JSON.

  A letter between quotation marks is the same token as in a tool call, so that
  a small policy learns to repeat it.
  """
  return json.dumps(row)


def rows() -> list[dict[str, Any]]:
  """Returns a row for each order of four letters, in random order."""
  orders = list(map(list, itertools.permutations(LETTERS, ROW)))
  random.Random(0).shuffle(orders)
  return [
    {'question': f'Take: {show(row)}', 'answer': '', 'info': {'row': row}}
    for row in orders
  ]


def demonstrate(
  observation: base.Observation, noise: float, rng: np.random.Generator
) -> str:
  """Returns a call that takes the first letter, or a random one."""
  row = json.loads(observation.anchor)['left']
  letter = str(rng.choice(row)) if rng.random() < noise else min(row)
  return tool_calls.write(tool_calls.Call('take', {'letter': letter}))


def load_environment(max_turns: int = 6) -> Any:
  """Returns the environment.

  Args:
    max_turns: limit of turns of an episode.
  """
  import datasets
  import verifiers

  def take(letter: str, state: dict) -> str:
    """Takes the first letter of the row."""
    if letter != min(state['left']):
      return f'Not the first. Left: {show(state["left"])}'
    state['left'] = [other for other in state['left'] if other != letter]
    return f'Left: {show(state["left"])}'

  async def all_taken(state) -> float:
    return float(not state['left'])

  async def share(state) -> float:
    return 1 - len(state['left']) / ROW

  class Letters(verifiers.StatefulToolEnv):
    """Keeps the letters in the rollout's state."""

    async def setup_state(self, state, **kwargs):
      state['left'] = state['info']['row']
      return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
      return {**tool_args, 'state': state}

    async def env_response(self, messages, state, **kwargs):
      replies = await super().env_response(messages, state, **kwargs)
      if not state['left']:
        state['final_env_response'] = replies  # Ends the episode.
      return replies

  table = rows()
  environment = Letters(
    dataset=datasets.Dataset.from_list(table[NUM_HELD_OUT:]),
    eval_dataset=datasets.Dataset.from_list(table[:NUM_HELD_OUT]),
    rubric=verifiers.Rubric(funcs=[all_taken, share], weights=[1.0, 0.2]),
    max_turns=max_turns,
  )
  environment.add_tool(take, args_to_skip=['state'])
  return environment
