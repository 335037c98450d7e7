"""A few turns of an environment before anything is compiled.

A mistake in an environment shows after seconds, and the lengths of its prompts
are known. An environment is a function of its task and of the responses, so
that nothing which is sampled later depends on a trial.
"""

from collections.abc import Sequence

from envs import base
from gigpo_jax import env_pool

# How many tasks to try until one can be played.
TASKS = 3
# Turns: enough for a prompt with a history.
_STEPS = 3

# A limit is fitted if it is below so many times the longest prompt of a trial.
_ROOM = 4
_ROUND = 64


def play(
  pool: env_pool.EnvPool, name: str, tasks: Sequence[base.Task]
) -> tuple[list[base.Observation], list[env_pool.Failure]]:
  """Plays the first turns of one task that can be played.

  Args:
    pool: the environments, none of which is playing.
    name: of the environment.
    tasks: to try, one after another.

  Returns:
    What was observed, and the failures of tasks that were tried before.

  Raises:
    ValueError: in one line, if no task could be played.
  """
  failures = []
  for task in tasks:
    seen = []
    pool.reset(0, task)
    reply = _answer(pool)
    for step in range(_STEPS):
      if isinstance(reply, env_pool.Failure):
        break
      observation = reply if step == 0 else reply.observation
      if observation is None:
        break
      seen.append(observation)
      pool.step(0, _response(observation, step))
      reply = _answer(pool)
    pool.end(0)
    if not isinstance(reply, env_pool.Failure):
      return seen, failures
    failures.append(reply)
  raise ValueError(
    f'env.name={name}: cannot be played: {failures[0].task} {failures[0]}; '
    'fix the environment or its data and rerun the same command'
  )


def _answer(pool: env_pool.EnvPool) -> env_pool.Reply:
  ((_, reply),) = pool.receive()
  return reply


def _response(observation: base.Observation, step: int) -> str:
  """Returns an empty response, which any policy may give, then an action."""
  if step == 0:
    return ''
  action = observation.actions[0] if observation.actions else 'look'
  return f'<think>A trial.</think><action>{action}</action>'


def advice(name: str, prompt_tokens: int, max_prompt_tokens: int) -> str:
  """Returns a line on a limit far above an environment's prompts; or ''.

  Args:
    name: of the environment.
    prompt_tokens: of the longest prompt of a trial.
    max_prompt_tokens: the limit.
  """
  if _ROOM * prompt_tokens > max_prompt_tokens:
    return ''
  fitting = -(-2 * prompt_tokens // _ROUND) * _ROUND
  return (
    f'rollout.max_prompt_tokens={max_prompt_tokens}: the first prompts of '
    f'env.name={name} have at most {prompt_tokens} tokens; '
    f'rollout.max_prompt_tokens={fitting} compiles and runs faster'
  )
