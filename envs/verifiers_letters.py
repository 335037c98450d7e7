"""A small environment of the package `verifiers`: sort letters by swapping.

A tool swaps two neighbouring letters. The rubric rewards sorted letters, and a
little those that are sorted with few swaps. `load_environment` needs
verifiers; the demonstrator, for the warm start of a tiny policy, needs nothing.
"""

import itertools
import json
import random
from typing import Any

import numpy as np

from envs import base, tool_calls

LETTERS = 'abcd'
SORTED = ' '.join(LETTERS)


def swap_letters(letters: str, position: int) -> str:
  """Returns letters, such as `b a c`, with two neighbours swapped.

  Args:
    letters: the letters.
    position: place of the first of the two, from 1.
  """
  if not 1 <= position < len(LETTERS):
    raise ValueError(f'the position must be from 1 to {len(LETTERS) - 1}')
  row = letters.split()
  row[position - 1 : position + 1] = row[position], row[position - 1]
  return ' '.join(row)


def rows() -> list[dict[str, Any]]:
  """Returns a row for each order of the letters that is not sorted."""
  orders = list(map(' '.join, itertools.permutations(LETTERS)))
  orders.remove(SORTED)
  random.Random(0).shuffle(orders)
  return [
    {'question': f'Sort: {letters}', 'answer': SORTED, 'info': {'row': letters}}
    for letters in orders
  ]


def demonstrate(
  observation: base.Observation, noise: float, rng: np.random.Generator
) -> str:
  """Returns a swap that helps, or a random one."""
  row = json.loads(observation.anchor)['letters'].split()
  positions = [n for n in range(1, len(row)) if row[n - 1] > row[n]]
  if rng.random() < noise:
    positions = range(1, len(row))
  position = int(rng.choice(positions))
  return tool_calls.write(tool_calls.Call('swap', {'position': position}))


def load_environment(max_turns: int = 6) -> Any:
  """Returns the environment.

  Args:
    max_turns: limit of turns of an episode.
  """
  import datasets
  import verifiers

  def swap(position: int, state: dict) -> str:
    """Swaps the letter at a position, from 1, with the next one."""
    state['letters'] = swap_letters(state['letters'], position)
    return state['letters']

  async def is_sorted(state, answer) -> float:
    return float(state['letters'] == answer)

  async def brevity(state, answer) -> float:
    spared = 1 - len(state['trajectory']) / max_turns
    return spared * (state['letters'] == answer)

  class Letters(verifiers.StatefulToolEnv):
    """Keeps the letters in the rollout's state."""

    async def setup_state(self, state, **kwargs):
      state['letters'] = state['info']['row']
      return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
      return {**tool_args, 'state': state}

    async def env_response(self, messages, state, **kwargs):
      replies = await super().env_response(messages, state, **kwargs)
      if state['letters'] == SORTED:
        state['final_env_response'] = replies  # Ends the episode.
      return replies

  # Several episodes of each order belong to an evaluation.
  table = datasets.Dataset.from_list(12 * rows())
  environment = Letters(
    dataset=table,
    eval_dataset=table,
    rubric=verifiers.Rubric(funcs=[is_sorted, brevity], weights=[1.0, 0.2]),
    max_turns=max_turns,
  )
  environment.add_tool(swap, args_to_skip=['state'])
  return environment
