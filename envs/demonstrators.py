"""Play for the warm start of an environment that has no expert of its own.

A demonstrator is `module:function`, a function of (observation, noise, rng)
that returns the next response. It plays at random with probability `noise`.
"""

from collections.abc import Callable, Iterator

import numpy as np

from envs import base, checks

Demonstrator = Callable[[base.Observation, float, np.random.Generator], str]


def play(
  env: base.Env, task: base.Task, name: str, *, noise: float, seed: int
) -> Iterator[tuple[base.Observation, str]]:
  """Plays a task with a demonstrator; yields (observation, response) of a step.

  Args:
    env: the environment.
    task: the task to play.
    name: the demonstrator, `env.demonstrator`.
    noise: probability of random play in a step.
    seed: seed of the play.

  Raises:
    ValueError: in one line, if there is no such demonstrator.
  """
  respond: Demonstrator = checks.import_named(
    'env.demonstrator',
    name,
    accepted='module:function; needed for a warm start only',
    takes=('observation', 'noise', 'rng'),
  )
  rng = np.random.default_rng([seed, task.index])
  observation: base.Observation | None = env.reset(task)
  while observation is not None:
    response = respond(observation, noise, rng)
    yield observation, response
    observation = env.step(response).observation
