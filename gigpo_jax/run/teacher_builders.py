"""Teachers from a config: rows of experts and records, solutions of tasks."""

import functools

import ml_collections

import envs
from envs import base
from gigpo_jax import config as config_lib
from gigpo_jax import privileged, replay, sft, teacher, tokenizer
from gigpo_jax.run import trial


def make_teacher(
  config: ml_collections.ConfigDict, text: tokenizer.Tokenizer
) -> teacher.Teacher:
  """Returns the teacher, which has no rows of its own if it is off.

  Raises:
    ValueError: in one line, if there is no expert or no episode to learn from.
  """
  options = teacher.Options(**config.teacher)
  loss = teacher.make_loss(options, config.loss.to_dict())
  rows, columns = None, {}
  if loss and options.loss != 'distillation':
    own = config.copy_and_resolve_references()
    own.sft.update(
      data=options.data,
      init='',
      num_episodes=options.num_episodes,
      noise=0.0,
      completion_only=True,
    )
    try:
      if options.loss == 'replay':
        rows, columns = replay.make_rows(own, text)
      else:
        load = sft.open_episodes if options.data else sft.demonstrations
        rows = sft.imitated_rows(own, text, load(own))
    except ValueError as error:
      raise ValueError(
        str(error).replace('sft.data', 'teacher.data')
      ) from error
  return teacher.Teacher(options, rows, config.seed, loss, columns)


def make_privileged_context(
  config: ml_collections.ConfigDict, text: tokenizer.Tokenizer
) -> privileged.PrivilegedContext | None:
  """Returns what adds solutions to prompts; None without distillation.

  Raises:
    ValueError: in one line, if the prompts of the first tasks have no room.
  """
  options = config.teacher
  if not options.mu_peak or options.loss != 'distillation':
    return None
  name, kwargs = config.env.name, config_lib.env_kwargs(config)

  @functools.cache
  def solve(task: base.Task) -> str:
    with envs.closing(envs.make_expert(name, **kwargs)) as env:
      steps = envs.demonstrate(name, env, task, noise=0.0, seed=config.seed)
      return '\n'.join(response for _, response in steps)

  context = privileged.PrivilegedContext(text.encode, text.head_length(), solve)
  listed = config_lib.list_tasks(config, 'train')
  solutions = context.solutions(listed.first(trial.TASKS))
  with envs.closing(envs.make(name, **kwargs)) as env:
    prompts = text.render([env.reset(task).prompt for task in solutions])
  needed = [
    len(prompt) + len(solution)
    for prompt, solution in zip(prompts, solutions.values(), strict=True)
  ]
  limit = config.rollout.max_prompt_tokens
  if needed and min(needed) > limit:
    raise ValueError(
      f'rollout.max_prompt_tokens={limit}: teacher.loss=distillation adds '
      f'solutions to prompts, which then have at least {min(needed)} tokens; '
      'must be larger, or teacher.mu_peak=0'
    )
  return context
