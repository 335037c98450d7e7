"""Build the parts of an experiment from its config.

The config stops here: the constructors take plain values. Used by training and
evaluation.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np

import envs
from envs import base
from gigpo_jax import (
  answer_scores,
  batch,
  critic,
  env_pool,
  forced_prefixes,
  guard,
  learner,
  losses,
  metrics,
  modulators,
  optimizer,
  options,
  plugins,
  reward_functions,
  reward_shaping,
  rollout,
  selectors,
  tasks,
  token_batch,
  tokenizer,
)
from gigpo_jax import config as config_lib
from gigpo_jax.run import model_builders, trial
from gigpo_jax.runtime import distributed


def make_pool(config: ml_collections.ConfigDict) -> env_pool.EnvPool:
  """Returns the environment pool; starts its workers."""
  return env_pool.EnvPool(
    config.env.name,
    config_lib.env_kwargs(config),
    num_envs=num_envs(config),
    num_workers=config.pool.num_workers,
    step_timeout_secs=config.pool.step_timeout_secs,
    reset_timeout_secs=config.pool.reset_timeout_secs,
    envs_per_group=config.rollout.episodes_per_group,
    max_resets_per_worker=config.pool.max_resets_per_worker or None,
    max_worker_mib=config.pool.max_worker_mib or None,
  )


def num_envs(config: ml_collections.ConfigDict) -> int:
  """Returns the number of environments of this process."""
  episodes = config.rollout.groups * config.rollout.episodes_per_group
  if config.rollout.carry_over:
    # Environments are created when they are first used.
    episodes *= 1 + config.rollout.max_staleness
  episodes = max(1, len(distributed.process_slice(episodes)))
  if config.evaluation.inside_rollout and config.evaluation.every:
    evaluated = make_eval_batch(config)
    size = len(evaluated.tasks) * evaluated.episodes_per_group
    episodes += len(distributed.process_slice(size))
  return config.pool.num_envs or episodes


@contextlib.contextmanager
def open_pool(
  config: ml_collections.ConfigDict, text: tokenizer.Tokenizer
) -> Iterator[env_pool.EnvPool]:
  """Yields the environment pool of a training run, after a trial.

  Args:
    config: the experiment.
    text: tokenizer of the policy.

  Raises:
    ValueError: in one line, if the environment cannot be played, or a reward
      function fails.
  """
  with make_pool(config) as pool:
    trial.try_environment(config, pool, 'train', text)
    trial.try_rewards(config, pool)
    yield pool


def make_runner(
  config: ml_collections.ConfigDict,
  bundle: model_builders.ModelBundle,
  pool: env_pool.EnvPool,
  scorer: reward_functions.Scorer | None = None,
) -> rollout.EpisodeRunner:
  """Returns the runner, which plays episodes with the policy."""
  return rollout.EpisodeRunner(
    pool=pool,
    sampler=bundle.sampler,
    tokenizer=bundle.tokenizer,
    max_prompt_tokens=config.rollout.max_prompt_tokens,
    prompt_overflow=config.rollout.prompt_overflow,
    schedule=config.rollout.schedule,
    earlier_thinking=config.rollout.earlier_thinking,
    scorer=scorer,
    prefixes=forced_prefixes.make(
      config.rollout.prefixes, config.rollout.forced_members, bundle.tokenizer
    ),
    agents=tuple(config.lora.agents),
    task_type=make_task_type(config),
  )


def make_scorer(
  config: ml_collections.ConfigDict,
) -> contextlib.AbstractContextManager[reward_functions.Scorer | None]:
  """Returns the scorer, which calls reward functions; None without any."""
  if not config.reward.functions:
    return contextlib.nullcontext()
  return reward_functions.Scorer(
    options.of_section(reward_functions.Options, config.reward),
    reward_functions.sections(config.reward),
  )


def make_reward_shaping(
  config: ml_collections.ConfigDict,
) -> reward_shaping.RewardShaping:
  """Returns the reward shaping; reward functions have their own options."""
  return options.of_section(reward_shaping.RewardShaping, config.reward)


def make_learner(
  config: ml_collections.ConfigDict,
  bundle: model_builders.ModelBundle,
  loss: token_batch.Loss,
  teacher_loss: token_batch.Loss | None = None,
) -> learner.Learner:
  """Returns the learner, which updates the policy."""
  return learner.Learner(
    bundle.model,
    bundle.mesh,
    loss=loss,
    optimizer=optimizer.AdamW(**config.optimizer).make(),
    temperature=config.rollout.temperature,
    aggregation=config.loss.aggregation,
    scale_updates=guard.Guard(**config.guard).scales_updates,
    signals=signal_names(config),
    teacher_loss=teacher_loss,
    **_learner_sizes(config),
  )


def signal_names(config: ml_collections.ConfigDict) -> tuple[str, ...]:
  """Returns the outputs of the learner that the chains of plug-ins need."""
  chains = (
    *modulators.FAMILY.make(config.algorithm),
    *selectors.FAMILY.make(config.filter),
  )
  needed = plugins.needed_outputs(chains)
  others = [name for name in needed if name != 'log_probs']
  if config.loss.old_log_probs == 'learner':
    needed = others  # The old log-probs are the learner's.
  return ('log_probs', *others) if needed else ()


def _learner_sizes(config: ml_collections.ConfigDict) -> dict[str, Any]:
  rollouts = config.rollout
  length = rollouts.max_prompt_tokens + rollouts.max_completion_tokens
  return {
    'epochs': config.learner.epochs,
    'minibatch_rows': config.learner.minibatch_rows,
    'microbatch_tokens': config.learner.microbatch_tokens,
    'length_buckets': config_lib.buckets_up_to(
      config.learner.length_buckets, length
    ),
    'max_completion_tokens': rollouts.max_completion_tokens,
    'share_prompts': config.learner.share_prompts,
    'turns': config_lib.conversation_turns(config),
    'seed': config.seed,
  }


def make_critic(
  config: ml_collections.ConfigDict, bundle: model_builders.ModelBundle
) -> critic.Critic:
  """Returns the critic, which estimates values for rows."""
  rate = config.critic.rate_ratio * config.optimizer.learning_rate
  fields = config.optimizer.to_dict() | {'learning_rate': rate}
  return critic.Critic(
    bundle.model,
    bundle.mesh,
    value_clip=config.critic.value_clip,
    optimizer=optimizer.AdamW(**fields).make(),
    **_learner_sizes(config),
  )


def make_writer(
  config: ml_collections.ConfigDict,
  workdir: str,
  first_iteration: int = 0,
  most_repeated: int | None = None,
) -> metrics.Writer | metrics.NullWriter:
  """Returns the metrics writer; only the main process writes."""
  if not distributed.is_main_process():
    return metrics.NullWriter()
  return metrics.Writer(
    workdir,
    first_iteration=first_iteration,
    most_repeated=most_repeated,
    wandb=config.metrics.wandb,
    config=json.loads(config.to_json_best_effort()),
  )


def make_loss(config: ml_collections.ConfigDict) -> token_batch.Loss:
  """Returns the loss of the policy."""
  return losses.of_section(config.loss.to_dict())


def needs_reference(config: ml_collections.ConfigDict) -> bool:
  """Returns whether the loss or the reward needs a reference policy."""
  loss, reward = make_loss(config), make_reward_shaping(config)
  return losses.needs_reference(loss) or reward.needs_reference


def make_task_type(
  config: ml_collections.ConfigDict,
) -> Callable[[base.Task], str]:
  """Returns a function from a task to its type.

  Only the types of the first tasks are checked at the start. An unusable one of
  another task is reported, and its episodes have the type `unknown`.
  """
  splits = functools.lru_cache(functools.partial(config_lib.list_tasks, config))

  @functools.lru_cache
  def task_type(task: base.Task) -> str:
    try:
      return splits(task.split).task_type(task.index)
    except ValueError as error:
      # Not of the main process alone: another one may have the task.
      print(f'{error}; its episodes have the type unknown', flush=True)
      return 'unknown'

  return task_type


def make_answer_scorer(
  config: ml_collections.ConfigDict, encode: Callable
) -> answer_scores.AnswerScorer:
  """Returns the scorer of reference answers; see `envs.answer_start`."""
  available = config_lib.list_tasks(config, 'train')
  return answer_scores.AnswerScorer(
    encode,
    envs.answer_start(config.env.name, config.env),
    lambda task: available.answer(task.index),
  )


def make_task_sampler(config: ml_collections.ConfigDict) -> tasks.TaskSampler:
  """Returns the sampler of training tasks."""
  return tasks.make(
    tasks.Options(**config.tasks),
    'train',
    config_lib.list_tasks(config, 'train'),
    config.rollout.groups,
    config.seed,
  )


def make_eval_batch(config: ml_collections.ConfigDict) -> rollout.EpisodeBatch:
  """Returns the episodes of an evaluation."""
  section = config.evaluation
  listed = config_lib.list_tasks(config, section.split)
  return rollout.EpisodeBatch(
    listed.first(section.num_tasks or len(listed)),
    section.repeats,
    (rollout.EVALUATION, 0),
    model_builders.make_sampling(config, evaluation=True),
  )


def rows_kwargs(config: ml_collections.ConfigDict) -> dict:
  """Returns the arguments of `batch.from_trajectories`."""
  rollouts, algorithm = config.rollout, config.algorithm
  return {
    # Space for all episodes at full length: one shape, one compilation.
    'row_multiple': (
      rollouts.groups
      * rollouts.episodes_per_group
      * (config.env.get('max_steps') or 1)
    ),
    'max_prompt_tokens': config.rollout.max_prompt_tokens,
    'max_completion_tokens': config.rollout.max_completion_tokens,
    'anchor': algorithm.anchor,
    'similarity_threshold': algorithm.similarity_threshold,
    'anchor_history': algorithm.anchor_history,
    'components': tuple(algorithm.components),
    'agent_rewards': config.reward.agents,
    'prefixes': tuple(rollouts.prefixes),
    'agents': tuple(config.lora.agents),
  }


def make_dummy_rows(config: ml_collections.ConfigDict) -> batch.Rows:
  """Returns one dummy row, padded to an iteration's size, for compilation."""
  sizes = rows_kwargs(config)
  rows = batch.pack(
    [[0]],
    [[0]],
    max_prompt_tokens=sizes['max_prompt_tokens'],
    max_completion_tokens=sizes['max_completion_tokens'],
    row_multiple=sizes['row_multiple'],
    num_components=len(sizes['components']),
  )
  # Algorithms refuse rows without any value.
  return dataclasses.replace(rows, state_values=np.zeros(len(rows.groups)))


def make_reference(bundle: model_builders.ModelBundle, params: dict) -> dict:
  """Returns the frozen parameters of the reference policy.

  A copy in the compute dtype. With adapters an empty dict, because the network
  without adapters is the reference.
  """
  if bundle.model.adapters:
    return {}
  dtype = bundle.model.dtype
  return jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))(
    params
  )
