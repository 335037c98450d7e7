"""Pools of environments for tests, and functions that play episodes."""

from collections.abc import Callable

import faulty_env

from envs import base
from gigpo_jax import env_pool

RIGHT = '<think>on</think><action>right</action>'


def make(num_workers: int = 1, num_envs: int = 4, **kwargs):
  options = {'step_timeout_secs': 30.0, 'reset_timeout_secs': 30.0}
  return env_pool.EnvPool(
    kwargs.pop('name', 'toy'),
    kwargs.pop('env', {}),
    num_envs=num_envs,
    num_workers=num_workers,
    **(options | kwargs),
  )


def gather(pool: env_pool.EnvPool, envs: set[int]) -> dict:
  answers = {}
  while envs - answers.keys():
    answers.update(pool.receive())
  return answers


def play(pool: env_pool.EnvPool, tasks: dict[int, int]) -> dict[int, list]:
  """Sends `right` in every environment; returns all replies by environment."""
  for env, index in tasks.items():
    pool.reset(env, base.Task('train', index))
  history = {env: [answer] for env, answer in gather(pool, set(tasks)).items()}
  running = {e for e, h in history.items() if is_running(h[-1])}
  while running:
    for env in running:
      pool.step(env, RIGHT)
    for env, answer in gather(pool, running).items():
      history[env].append(answer)
    running = {e for e in running if is_running(history[e][-1])}
  return history


def is_running(answer) -> bool:
  if isinstance(answer, env_pool.Failure):
    return False
  return isinstance(answer, base.Observation) or not answer.done


def play_async(
  pool: env_pool.EnvPool,
  num_episodes: int,
  tasks: range,
  on_end: Callable[[int], None] = lambda num_started: None,
) -> list[list]:
  """Sends `right` in each episode, without waiting for other environments.

  Calls `on_end` after each episode with the number of started episodes.
  """
  histories = [[] for _ in range(num_episodes)]
  waiting, running = list(reversed(range(num_episodes))), {}
  while waiting or running:
    for env in range(pool.num_envs):
      if env not in running and waiting:
        running[env] = waiting.pop()
        pool.reset(env, base.Task('train', tasks[running[env] % len(tasks)]))
    for env, answer in pool.receive():
      histories[running[env]].append(answer)
      if is_running(answer):
        pool.step(env, RIGHT)
      else:
        del running[env]
        on_end(num_episodes - len(waiting))
  return histories


def make_faulty(faults: dict[int, str], **kwargs):
  # A worker that unpickles the plan registers the module.
  options = {'env': {'plan': faulty_env.Plan(faults)}} | kwargs
  return make(name='faulty', **options)
