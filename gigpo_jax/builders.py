"""Build the parts of an experiment from its config.

The config stops here: the constructors take plain values. Used by training and
evaluation.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import ml_collections

import envs
from envs import base, turns
from gigpo_jax import (
  batch,
  conversation,
  critic,
  env_pool,
  group_filter,
  guard,
  learner,
  losses,
  mesh,
  metrics,
  models,
  modulators,
  optimizer,
  plugins,
  rollout,
  sampler,
  selectors,
  tasks,
  token_batch,
  tokenizer,
)
from gigpo_jax import config as config_lib
from gigpo_jax.models import (
  decode_attention,
  huggingface,
  lora,
  parameters,
  qwen,
  qwen_config,
)
from gigpo_jax.run import model_check, trial
from gigpo_jax.runtime import console, distributed

if TYPE_CHECKING:
  from gigpo_jax import episodes


@dataclasses.dataclass(frozen=True)
class ModelBundle:
  """A model on its mesh, with its tokenizer and sampler.

  Attributes:
    model: config of the network.
    mesh: the devices.
    tokenizer: tokenizer of the checkpoint.
    load: loads the checkpoint's parameters onto the mesh.
    sampler: samples completions for prompts.
  """

  model: qwen.QwenConfig
  mesh: jax.sharding.Mesh
  tokenizer: tokenizer.Tokenizer
  load: Callable[[], dict]
  sampler: sampler.Sampler


def make_model_bundle(config: ml_collections.ConfigDict) -> ModelBundle:
  """Returns the policy of an experiment; initializes the devices."""
  directory = model_check.model_directory(config.model.path)
  shape = huggingface.read_config(directory)
  devices = make_mesh(config, shape, jax.devices(), mesh.device_bytes())
  model = huggingface.read_config(directory, **model_kwargs(config, devices))
  mesh.check(devices, parameters.shapes(model), parameters.logical_axes(model))
  text = tokenizer.Tokenizer(
    directory, enable_thinking=config.model.enable_thinking
  )
  return ModelBundle(
    model=model,
    mesh=devices,
    tokenizer=text,
    load=functools.partial(_load, directory, model, devices, config.seed),
    sampler=sampler.Sampler(
      model,
      devices,
      batch_buckets=tuple(config.rollout.batch_buckets),
      stop_ids=text.stop_ids,
      vocab_size=text.vocab_size,
      tensor=_sampling_tensor(config, model, devices),
      find_stop=(
        text.stop_finder(turns.ENDS) if config.rollout.stop_at_action else None
      ),
      **sampler_kwargs(config),
    ),
  )


def make_mesh(
  config: ml_collections.ConfigDict,
  shape: qwen.QwenConfig,
  devices: Sequence[jax.Device],
  device_bytes: float | None,
) -> jax.sharding.Mesh:
  """Returns the mesh of an experiment.

  Args:
    config: the experiment.
    shape: shape of the network.
    devices: all devices.
    device_bytes: memory of a device; None: unknown.
  """
  sizes = dict(config.mesh)
  sizes['data'] = sizes['data'] or 1
  if config.mesh.data == 0 and config.mesh.fsdp == -1:
    # Devices that share an element of a row's activations, and of a host.
    others = sizes['expert'] * sizes['sequence'] * sizes['tensor']
    first = devices[0].process_index
    per_host = sum(device.process_index == first for device in devices)
    # Bytes per parameter of parameters, gradients and moments, or of frozen
    # parameters.
    itemsize = 2 if config.lora.rank else 16
    sizes['data'] = mesh.replicas(
      len(devices) // others,
      per_host // math.gcd(per_host, others),
      width=shape.hidden_size,
      state_bytes=itemsize * models.num_parameters(shape),
      device_bytes=device_bytes,
    )
  return mesh.make_mesh(**sizes, devices=devices)


def sampler_kwargs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the `Sampler` arguments that depend only on the config."""
  rollouts = config.rollout
  options = [make_sampling(config, evaluation=x) for x in (False, True)]
  return {
    'seed': config.seed,
    'truncates': any(sampling.truncates for sampling in options),
    'prompt_buckets': config_lib.buckets_up_to(
      rollouts.prompt_buckets, rollouts.max_prompt_tokens
    ),
    'max_completion_tokens': rollouts.max_completion_tokens,
    'decode_tokens': rollouts.decode_tokens,
    'weights': rollouts.weights,
    'reuse': rollouts.reuse_cache,
    'prefill_chunk': rollouts.prefill_chunk,
    'parked': rollouts.parked_slots,
  }


def model_kwargs(
  config: ml_collections.ConfigDict, devices: jax.sharding.Mesh
) -> dict[str, Any]:
  """Returns the `QwenConfig` fields that a checkpoint does not set.

  For model.remat=auto, see `remat.resolve`.
  """
  platform = devices.devices.flat[0].platform
  kernel = config.model.decode_attention
  if decode_attention.PLATFORMS.get(kernel, platform) != platform:
    raise ValueError(
      f'model.decode_attention={kernel}: is for '
      f'{decode_attention.PLATFORMS[kernel]}s, not for {platform}s; must be xla'
    )
  choices = qwen_config.platform_fields(platform)
  if config.model.attention != 'auto':
    choices['attention'] = config.model.attention
  elif config.mesh.sequence != 1:
    choices['attention'] = 'xla'
  elif config.model.dtype == 'float32' and platform != 'cpu':
    choices['attention'] = 'xla'  # The kernels are for bfloat16.
  return choices | {
    'dtype': config.model.dtype,
    'remat': 'layer' if config.model.remat == 'auto' else config.model.remat,
    'decode_attention': config.model.decode_attention,
    'cache': config.rollout.cache,
    'adapters': _adapters(config),
  }


def _adapters(config: ml_collections.ConfigDict) -> lora.Lora | None:
  if not config.lora.rank:
    return None
  return lora.Lora(
    config.lora.rank, config.lora.alpha, tuple(config.lora.targets)
  )


def _load(
  directory: str, model: qwen.QwenConfig, devices: jax.sharding.Mesh, seed: int
) -> dict:
  """Returns a checkpoint's parameters, with new adapters if configured.

  Parameters that are not trained are in the compute dtype.
  """
  if not model.adapters:
    return huggingface.load(directory, model, devices)
  base = huggingface.load(directory, model, devices, dtype=model.dtype)
  shardings, _ = lora.split(
    mesh.shardings(devices, parameters.logical_axes(model))
  )
  adapters = jax.jit(
    lambda key: lora.split(parameters.init(model, key))[0],
    out_shardings=shardings,
  )(jax.random.key(seed))
  return lora.combine(base, adapters)


def _sampling_tensor(config, model: qwen.QwenConfig, devices) -> int:
  configured = config.rollout.tensor
  tensor = configured or mesh.sampling_tensor(
    devices,
    sampler.parameter_bytes(model, config.rollout.weights),
    mesh.device_bytes(),
    parameters.max_tensor_shards(model),
  )
  mesh.check(
    mesh.sampling_mesh(devices, tensor),
    parameters.shapes(model),
    parameters.logical_axes(model),
    field='rollout',
  )
  return tensor


def make_pool(config: ml_collections.ConfigDict) -> env_pool.EnvPool:
  """Returns the environment pool; starts its workers."""
  episodes = config.rollout.groups * config.rollout.episodes_per_group
  if config.rollout.carry_over:
    # Environments are created when they are first used.
    episodes *= 1 + config.rollout.max_staleness
  episodes = max(1, len(distributed.process_slice(episodes)))
  if config.evaluation.inside_rollout and config.evaluation.every:
    evaluated = len(make_eval_tasks(config)) * config.evaluation.repeats
    episodes += len(distributed.process_slice(evaluated))
  return env_pool.EnvPool(
    config.env.name,
    config_lib.env_kwargs(config),
    num_envs=config.pool.num_envs or episodes,
    num_workers=config.pool.num_workers,
    step_timeout_secs=config.pool.step_timeout_secs,
    reset_timeout_secs=config.pool.reset_timeout_secs,
    envs_per_group=config.rollout.episodes_per_group,
    max_resets_per_worker=config.pool.max_resets_per_worker or None,
    max_worker_mib=config.pool.max_worker_mib or None,
  )


def try_environment(
  config: ml_collections.ConfigDict,
  pool: env_pool.EnvPool,
  split: str,
  text: tokenizer.Tokenizer | None = None,
) -> None:
  """Plays a few turns before compilation and prints warnings.

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
  available = len(envs.tasks(name, split, **config_lib.env_kwargs(config)))
  tried = tasks.first_tasks(split, min(available, trial.TASKS))
  observations, failures = trial.run(pool, name, tried)
  for failure in failures:
    console.log(f'env.name={name}: {failure.task} {failure}')
  limit = config.rollout.max_prompt_tokens
  for observation in observations:
    if reason := conversation.prompt_error(observation, limit):
      raise ValueError(f'env.name={name}: {reason}')
  if text is not None and observations[0].messages:
    try:
      conversation.Conversations(text, limit, 'end').prompt(observations[0], ())
    except tokenizer.TemplateError as error:
      raise ValueError(f'model.path={config.model.path}: {error}') from error
    return
  if text is None or config_lib.has_own_buckets(config):
    return
  longest = max(map(len, text.render([o.prompt for o in observations])))
  if line := trial.advice(name, longest, limit):
    console.log(line)


def make_runner(
  config: ml_collections.ConfigDict, policy: ModelBundle, pool: env_pool.EnvPool
) -> rollout.EpisodeRunner:
  """Returns the runner, which plays episodes with the policy."""
  return rollout.EpisodeRunner(
    pool=pool,
    sampler=policy.sampler,
    tokenizer=policy.tokenizer,
    max_prompt_tokens=config.rollout.max_prompt_tokens,
    prompt_overflow=config.rollout.prompt_overflow,
    schedule=config.rollout.schedule,
    earlier_thinking=config.rollout.earlier_thinking,
  )


def make_sampling(
  config: ml_collections.ConfigDict, *, evaluation: bool = False
) -> sampler.Sampling:
  """Returns the sampling options for training or evaluation."""
  options = config.evaluation if evaluation else config.rollout
  return sampler.Sampling(
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    min_p=options.min_p,
  )


def make_learner(
  config: ml_collections.ConfigDict,
  policy: ModelBundle,
  loss: token_batch.Loss,
) -> learner.Learner:
  """Returns the learner, which updates the policy."""
  return learner.Learner(
    policy.model,
    policy.mesh,
    loss=loss,
    optimizer=optimizer.AdamW(**config.optimizer).make(),
    temperature=config.rollout.temperature,
    aggregation=config.loss.aggregation,
    scale_updates=guard.Guard(**config.guard).scales_updates,
    signals=signal_names(config),
    **_learner_sizes(config),
  )


def signal_names(config: ml_collections.ConfigDict) -> tuple[str, ...]:
  """Returns the outputs of the learner that the chains of plug-ins need."""
  chains = (
    *modulators.FAMILY.make(config.algorithm),
    *selectors.FAMILY.make(config.filter),
  )
  needed = plugins.needed_outputs(chains)
  return ('log_probs', *needed) if needed else ()


def make_group_filter(
  config: ml_collections.ConfigDict,
) -> group_filter.GroupFilter:
  """Returns the filter of groups; selectors have options of their own."""
  fields = dataclasses.fields(group_filter.GroupFilter)
  return group_filter.GroupFilter(
    **{field.name: config.filter[field.name] for field in fields}
  )


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
  config: ml_collections.ConfigDict, policy: ModelBundle
) -> critic.Critic:
  """Returns the critic, which estimates values for rows."""
  rate = config.critic.rate_ratio * config.optimizer.learning_rate
  options = config.optimizer.to_dict() | {'learning_rate': rate}
  return critic.Critic(
    policy.model,
    policy.mesh,
    value_clip=config.critic.value_clip,
    optimizer=optimizer.AdamW(**options).make(),
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


def make_episode_writer(
  config: ml_collections.ConfigDict,
  workdir: str,
  text: tokenizer.Tokenizer,
  first_iteration: int,
  most_repeated: int,
) -> 'episodes.EpisodeWriter | None':
  """Returns the episode writer; None if off or not the main process."""
  if not config.episodes.every or not distributed.is_main_process():
    return None
  # tensorflow_datasets is slow to import, and only some runs need it.
  from gigpo_jax import episodes

  return episodes.EpisodeWriter(
    pathlib.Path(workdir) / episodes.FOLDER,
    text,
    seed=config.seed,
    every=config.episodes.every,
    first_iteration=first_iteration,
    most_repeated=most_repeated,
  )


def make_loss(config: ml_collections.ConfigDict) -> token_batch.Loss:
  """Returns the loss of the policy."""
  return losses.make(**config.loss.to_dict())


def make_task_type(
  config: ml_collections.ConfigDict,
) -> Callable[[base.Task], str]:
  """Returns a function from a task to its type."""
  splits = functools.lru_cache(
    lambda split: envs.tasks(
      config.env.name, split, **config_lib.env_kwargs(config)
    )
  )
  return lambda task: splits(task.split).task_type(task.index)


def make_task_sampler(config: ml_collections.ConfigDict) -> tasks.TaskSampler:
  """Returns the sampler of training tasks."""
  available = envs.tasks(
    config.env.name, 'train', **config_lib.env_kwargs(config)
  )
  sizes = 'train', len(available), config.rollout.groups, config.seed
  if config.tasks.draw == 'uncertain':
    return tasks.UncertaintySampler(*sizes, uniform=config.tasks.uniform)
  if config.tasks.draw == 'stages':
    return tasks.StageSampler(
      'train',
      [available.task_type(index) for index in range(len(available))],
      *sizes[2:],
      config.tasks.stages,
    )
  return tasks.TaskSampler(*sizes, draw=getattr(available, 'draw', None))


def make_eval_tasks(config: ml_collections.ConfigDict) -> list[base.Task]:
  """Returns the evaluation tasks."""
  split = config.evaluation.split
  available = len(
    envs.tasks(config.env.name, split, **config_lib.env_kwargs(config))
  )
  return tasks.first_tasks(split, config.evaluation.num_tasks or available)


def rows_kwargs(config: ml_collections.ConfigDict) -> dict:
  """Returns the arguments of `batch.from_trajectories`."""
  rollouts, algorithm = config.rollout, config.algorithm
  return {
    # Space for all episodes at full length: one shape, one compilation.
    'row_multiple': (
      rollouts.groups
      * rollouts.episodes_per_group
      * config.env.get('max_steps', 1)
    ),
    'max_prompt_tokens': config.rollout.max_prompt_tokens,
    'max_completion_tokens': config.rollout.max_completion_tokens,
    'anchor': algorithm.anchor,
    'similarity_threshold': algorithm.similarity_threshold,
    'anchor_history': algorithm.anchor_history,
    'components': tuple(algorithm.components),
  }


def make_dummy_rows(config: ml_collections.ConfigDict) -> batch.Rows:
  """Returns one dummy row, padded to an iteration's size, for compilation."""
  sizes = rows_kwargs(config)
  return batch.pack(
    [[0]],
    [[0]],
    max_prompt_tokens=sizes['max_prompt_tokens'],
    max_completion_tokens=sizes['max_completion_tokens'],
    row_multiple=sizes['row_multiple'],
    num_components=len(sizes['components']),
  )


def make_reference(bundle: ModelBundle, params: dict) -> dict:
  """Returns the reference parameters of the KL penalty.

  A copy in the compute dtype. With adapters an empty dict, because the network
  without adapters is the reference.
  """
  if bundle.model.adapters:
    return {}
  dtype = bundle.model.dtype
  return jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))(
    params
  )
