"""ALFWorld with two agents: a planner writes a plan, an actor plays by it.

The planner takes the first turn of an episode. It reads the task and the first
observation. Its plan comes before the text of every prompt of the actor. Both
turns are sampled from the same policy, or from an adapter of each agent
(`lora.agents`).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from envs import base, checks
from envs.alfworld import env as alfworld_env
from envs.alfworld.env import ANCHORS, DATA, check_installation, tasks

__all__ = [
  'ANCHORS',
  'CONTEXTS',
  'DATA',
  'Env',
  'agents',
  'check_installation',
  'check_options',
  'tasks',
]

CONTEXTS = ('history',)
PLANNER, ACTOR = 'planner', 'actor'


def check_options(kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong option."""
  note = ', for the planner and the actor'
  yield from checks.at_least(kwargs, note, max_steps=2, max_plan_chars=1)
  yield from alfworld_env.check_options(kwargs)


def agents(kwargs: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the names of the agents."""
  del kwargs
  return PLANNER, ACTOR


class Env:
  """Plays one game at a time, after a turn of the planner.

  Args:
    max_steps: maximum number of turns, with that of the planner.
    max_plan_chars: characters of a plan; the rest is cut off.
    **kwargs: other arguments of `alfworld.env.Env`.
  """

  def __init__(
    self, *, max_steps: int = 50, max_plan_chars: int = 400, **kwargs
  ):
    self._actor = alfworld_env.Env(max_steps=max_steps - 1, **kwargs)
    self._max_plan_chars = max_plan_chars
    self._first: base.Observation | None = None
    self._plan = ''

  def prepare(self, task: base.Task) -> None:
    """Loads the game into the engine's cache."""
    self._actor.prepare(task)

  def reset(self, task: base.Task) -> base.Observation:
    """Starts an episode; returns the observation of the planner."""
    self._first = self._actor.reset(task)
    return _planner_observation(self._first)

  def step(self, response: str) -> base.StepResult:
    """Takes the plan from the first response, and plays the others."""
    if self._first is None:
      result = self._actor.step(response)
      following = result.observation
      return dataclasses.replace(
        result, observation=following and _with_plan(following, self._plan)
      )
    start = response.find('<plan>')
    end = response.find('</plan>', start) if start >= 0 else -1
    plan = response[start + len('<plan>') : end] if end >= 0 else response
    self._plan = ' '.join(plan.split())[: self._max_plan_chars]
    following, self._first = self._first, None
    return base.StepResult(
      observation=_with_plan(following, self._plan),
      reward=0.0,
      valid=end >= 0,
      action=self._plan,
      success=False,
      done=False,
    )

  def close(self) -> None:
    """Releases the engine."""
    self._actor.close()

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[base.Observation, str]]:
    """Yields (observation, response): the expert's plan, then its play.

    The plan lists the expert's actions.

    Args:
      task: the game to play.
      noise: probability that an action is random; the plan has none.
      seed: seed of the search order and of the noise.
    """
    first = _planner_observation(self._actor.reset(task))
    steps = self._actor.demonstrate(task, noise=0.0, seed=seed)
    actions = [response.split('<action>')[-1] for _, response in steps]
    plan = _join(
      [action.removesuffix('</action>') for action in actions],
      self._max_plan_chars,
    )
    yield first, f'<plan>{plan}</plan>'
    for observation, response in self._actor.demonstrate(
      task, noise=noise, seed=seed
    ):
      yield _with_plan(observation, plan), response


def _planner_observation(first: base.Observation) -> base.Observation:
  """Returns the input of the planner."""
  prompt = (
    f'{first.text}\nYour task is to: {first.task}\n'
    'Write a short plan for another agent within <plan> </plan> tags.'
  )
  return dataclasses.replace(
    first,
    prompt=prompt,
    short_prompt=prompt,
    anchor=f'plan\n{first.anchor}',
    actions=(),
    agent=PLANNER,
  )


def _with_plan(observation: base.Observation, plan: str) -> base.Observation:
  """Returns the input of the actor."""
  return dataclasses.replace(
    observation,
    prompt=_add_plan(observation.prompt, plan),
    short_prompt=_add_plan(observation.short_prompt, plan),
    agent=ACTOR,
  )


def _join(actions: list[str], limit: int) -> str:
  """Returns the first actions whose list is not longer than a limit."""
  plan = actions[0][:limit]
  for action in actions[1:]:
    if len(plan) + len(', ' + action) > limit:
      break
    plan += ', ' + action
  return plan


def _add_plan(prompt: str, plan: str) -> str:
  return f'Plan: {plan}\n{prompt}'
