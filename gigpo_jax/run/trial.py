"""A trial run of a few turns of an environment, before compilation.

It detects errors of an environment within seconds and measures the lengths of
its prompts. Reward functions are tried on an episode that is played to its end.
As an environment is a function of its task and of the responses, a trial does
not change later samples.
"""

import itertools
import math
import time
from collections.abc import Sequence

import ml_collections

import envs
from envs import base
from gigpo_jax import config as config_lib
from gigpo_jax import (
  conversation,
  env_pool,
  reward_functions,
  scored_rewards,
  tokenizer,
  trajectory,
)
from gigpo_jax.runtime import console, distributed

# Number of tasks to try until one runs without a failure.
TASKS = 3
# Number of turns; enough for a prompt with a history.
_STEPS = 3
# Limits of turns, and of seconds in all, of an episode that is played to its
# end.
_MAX_STEPS = 200
_MAX_SECS = 5.0

# What happens to prompts that are too long without their history, by
# `rollout.prompt_overflow`.
_OVERFLOWS = {
  'error': 'ends the run',
  'drop_history': 'cuts off the first tokens',
  'truncate_left': 'cuts off the first tokens',
  'end': 'ends the episode',
}

# A limit is too high from this multiple of the longest prompt of a trial.
_MAX_RATIO = 4
# Suggested limits are rounded up to a multiple of this, in tokens.
_MULTIPLE = 64


def try_environment(
  config: ml_collections.ConfigDict,
  pool: env_pool.EnvPool,
  split: str,
  text: tokenizer.Tokenizer | None = None,
) -> None:
  """Plays a few turns before compilation and prints warnings.

  All processes must have the same tasks, because each plays its own part.

  Args:
    config: the experiment.
    pool: its environments.
    split: split of the tasks to try.
    text: tokenizer of the policy, to compare prompts with the token limit.
      Ignored if the config sets its own prompt buckets.

  Raises:
    ValueError: in one line, if the environment cannot be played.
  """
  name = config.env.name
  listed = config_lib.list_tasks(config, split)
  distributed.check_same(listed.describe())
  observations = _play_trial(name, pool, listed.first(TASKS))
  limit = config.rollout.max_prompt_tokens
  for observation in observations:
    if reason := conversation.prompt_error(observation, limit):
      raise ValueError(f'env.name={name}: {reason}')
  if text is None:
    return
  if observations[0].messages:
    try:
      conversation.Conversations(text, limit, 'end').prompt(observations[0], ())
    except tokenizer.TemplateError as error:
      raise ValueError(f'model.path={config.model.path}: {error}') from error
    return
  prompts = [o.prompt for o in observations]
  shortened = [o.short_prompt or o.prompt for o in observations]
  longest, shortest = (
    max(map(len, text.render(texts))) for texts in (prompts, shortened)
  )
  overflow = config.rollout.prompt_overflow
  if line := too_long(name, shortest, limit, overflow):
    console.log(line)
  if config_lib.has_own_buckets(config):
    return
  if line := advice(name, longest, limit):
    console.log(line)


def _play_trial(
  name: str, pool: env_pool.EnvPool, tried: Sequence[base.Task]
) -> list[base.Observation]:
  """Returns the observations of a trial; prints what is wrong with it."""
  observations, failures = run(pool, name, tried)
  for failure in failures:
    console.log(f'env.name={name}: {describe(name, failure)}')
  if envs.replays(name):
    played = tried[len(failures)]
    if line := differs(pool, name, played, observations):
      console.log(line)
  return observations


def try_rewards(
  config: ml_collections.ConfigDict, pool: env_pool.EnvPool
) -> None:
  """Calls the user's reward functions with an episode, before compilation.

  Does nothing if no short episode ends.

  Raises:
    ValueError, errors.RunError: in one line, if a function fails.
  """
  if not (config.reward.functions or config.reward.scored):
    return
  tried = config_lib.list_tasks(config, 'train').first(TASKS)
  episode = play_to_end(pool, tried)
  if episode is None:
    return
  if config.reward.functions:
    if line := reward_functions.try_out(config.reward, episode):
      console.log(line)
  scored_rewards.try_out(config.reward, episode)


def run(
  pool: env_pool.EnvPool, name: str, tasks: Sequence[base.Task]
) -> tuple[list[base.Observation], list[env_pool.Failure]]:
  """Runs the first turns of the first task that does not fail.

  Args:
    pool: the environments; none of them may run an episode.
    name: name of the environment.
    tasks: tasks to try in order.

  Returns:
    The observations, and the failures of the tasks tried before.

  Raises:
    ValueError: in one line, if every task failed.
  """
  failures = []
  for task in tasks:
    observations, _, reply = _play(pool, task, _STEPS)
    if not isinstance(reply, env_pool.Failure):
      return observations, failures
    failures.append(reply)
  raise ValueError(
    f'env.name={name}: cannot be played: {describe(name, failures[0])}; fix '
    'the environment or its data and rerun the same command'
  )


def differs(
  pool: env_pool.EnvPool,
  name: str,
  task: base.Task,
  observations: Sequence[base.Observation],
) -> str:
  """Returns a warning if a task differs when it is played again.

  Args:
    pool: the environments; none of them may run an episode.
    name: name of the environment.
    task: the task that `run` has played.
    observations: its observations.

  Returns:
    The warning in one line; '' if the observations are the same.
  """
  again, *_ = _play(pool, task, _STEPS)
  if again == list(observations):
    return ''
  pairs = zip(again, observations, strict=False)
  equal = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
  return (
    f'env.name={name}: turn {len(list(equal))} of {task} differs when the same '
    'responses are played again, but the episodes of a group must play the '
    'same task; draw all randomness from the index of the task'
  )


def describe(name: str, failure: env_pool.Failure) -> str:
  """Returns a failure of an environment as text, without its name."""
  return f'{failure.task} {failure}'.replace(f'env.name={name}: ', '', 1)


def play_to_end(
  pool: env_pool.EnvPool, tasks: Sequence[base.Task]
) -> trajectory.Trajectory | None:
  """Returns an episode that ended; None if each is too long, or failed.

  Args:
    pool: the environments; none of them may run an episode.
    tasks: tasks to try in order.
  """
  deadline = time.monotonic() + _MAX_SECS
  for task in tasks:
    observations, steps, reply = _play(pool, task, _MAX_STEPS, deadline)
    if isinstance(reply, base.StepResult) and reply.done:
      return trajectory.Trajectory(
        task, task.split, 0, 0, tuple(steps), first_observation=observations[0]
      )
  return None


def _play(
  pool: env_pool.EnvPool,
  task: base.Task,
  max_steps: int,
  deadline: float = math.inf,
) -> tuple[list[base.Observation], list[trajectory.Step], env_pool.Reply]:
  """Plays a task for some turns, or until a deadline.

  Returns:
    The observations, the turns without their tokens, and the last reply.
  """
  observations, steps = [], []
  pool.reset(0, task)
  observation = reply = _receive(pool)
  while isinstance(observation, base.Observation) and len(steps) < max_steps:
    if time.monotonic() > deadline:
      break
    observations.append(observation)
    response = _response(observation, len(steps))
    pool.step(0, response)
    reply = _receive(pool)
    if isinstance(reply, env_pool.Failure):
      break
    steps.append(trajectory.Step.without_tokens(observation, response, reply))
    observation = reply.observation
  pool.end(0)
  return observations, steps, reply


def _receive(pool: env_pool.EnvPool) -> env_pool.Reply:
  ((_, reply),) = pool.receive()
  return reply


def _response(observation: base.Observation, step: int) -> str:
  """Returns an empty response in the first turn, then an action."""
  if step == 0:
    return ''
  action = observation.actions[0] if observation.actions else 'look'
  return f'<think>A trial.</think><action>{action}</action>'


def too_long(
  name: str, prompt_tokens: int, max_prompt_tokens: int, overflow: str
) -> str:
  """Returns a warning if prompts without their history exceed the limit.

  Args:
    name: name of the environment.
    prompt_tokens: tokens of the longest prompt of a trial, without history.
    max_prompt_tokens: the limit.
    overflow: `rollout.prompt_overflow`.

  Returns:
    The warning in one line; '' if they fit.
  """
  if prompt_tokens <= max_prompt_tokens:
    return ''
  return (
    f'rollout.max_prompt_tokens={max_prompt_tokens}: prompts of env.name='
    f'{name} have {prompt_tokens} tokens even without their history, for which '
    f'rollout.prompt_overflow={overflow} {_OVERFLOWS[overflow]}; raise the '
    'limit'
  )


def advice(name: str, prompt_tokens: int, max_prompt_tokens: int) -> str:
  """Returns a warning if the limit is far above an environment's prompts.

  Args:
    name: name of the environment.
    prompt_tokens: number of tokens of the longest prompt of a trial.
    max_prompt_tokens: the limit.

  Returns:
    The warning in one line; '' if the limit is adequate.
  """
  if _MAX_RATIO * prompt_tokens > max_prompt_tokens:
    return ''
  suggested = -(-2 * prompt_tokens // _MULTIPLE) * _MULTIPLE
  return (
    f'rollout.max_prompt_tokens={max_prompt_tokens}: the first prompts of '
    f'env.name={name} have at most {prompt_tokens} tokens; '
    f'rollout.max_prompt_tokens={suggested} compiles and runs faster'
  )
