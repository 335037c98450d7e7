"""Validate a configuration before any device or simulator starts.

Reports one line per problem, as `field=value: what is wrong; what is accepted`.
Checks names, numbers and files on disk, and builds nothing. For a model on the
hub, it downloads only config.json until everything else is valid.
"""

import importlib.util
import json
import math
import pathlib
import tempfile
from collections.abc import Iterable, Iterator

import ml_collections
import psutil

import configs
import envs
from configs import base
from gigpo_jax import (
  algorithms,
  anchors,
  deprecated,
  losses,
  mesh,
  models,
  rollout,
  sampler,
  tasks,
  tokenizer,
)
from gigpo_jax.models import (
  attention,
  huggingface,
  lora,
  published,
  qwen,
  qwen_config,
)
from gigpo_jax.runtime import files, hardware

# File name of the config in a work directory.
_STORED = 'config.json'

# float32 parameters, two AdamW moments and a gradient accumulator, and one bf16
# copy each for sampling and for computing. With adapters only the bf16 copies.
BYTES_PER_PARAMETER = 16 + 2 + 2
FROZEN_BYTES_PER_PARAMETER = 2 + 2
# float32 as loaded, and a bf16 copy for sampling.
_SAMPLING_BYTES_PER_PARAMETER = 4 + 2

# Options of the algorithm section that are not passed to algorithms, or that
# apply to all of them.
_SHARED_OPTIONS = (
  'name',
  'norm',
  'discount',
  'invalid_penalty',
  'anchor',
  'similarity_threshold',
  'anchor_history',
)

# Fields that have an effect only if another field has a certain value: (other
# field, accepted value in words, predicate).
_DEPENDENT_FIELDS = {
  'algorithm.similarity_threshold': (
    'algorithm.anchor',
    'similarity',
    lambda anchor: anchor == 'similarity',
  ),
  'tasks.uniform': (
    'tasks.draw',
    'uncertain',
    lambda draw: draw == 'uncertain',
  ),
  **dict.fromkeys(
    ('filter.warmup_iterations', 'filter.max_refills'),
    ('filter.drop_zero_variance', 'True', bool),
  ),
  **dict.fromkeys(
    [f'loss.entropy_band.{name}' for name in ('low', 'high', 'decay')],
    ('loss.entropy_band.weight', 'above 0', bool),
  ),
}

_CHOICES = {
  'rollout.schedule': rollout.SCHEDULES,
  'rollout.weights': sampler.WEIGHTS,
  'algorithm.anchor': anchors.ANCHORS,
  'sft.init': ('', 'scratch'),
  'loss.aggregation': losses.AGGREGATIONS,
  'loss.ratio_level': losses.RATIOS,
  'tasks.draw': tasks.DRAWS,
  'loss.old_log_probs': ('learner', 'sampler'),
  'model.dtype': ('bfloat16', 'float32'),
  'optimizer.mu_dtype': ('bfloat16', 'float32'),
  'model.remat': qwen_config.REMATS,
  'model.attention': ('auto', *attention.IMPLEMENTATIONS),
  'rollout.prompt_overflow': tokenizer.OVERFLOW_POLICIES,
}

_PAIR = 2  # Minimum number of episodes for a comparison.

# Field: (lowest accepted value, highest, description of the range).
_RANGES = {
  'seed': (0, 2**31 - 1, 'a non-negative 32-bit integer'),
  'num_iterations': (1, None, 'at least 1'),
  'rollout.groups': (1, None, 'at least 1'),
  'rollout.episodes_per_group': (1, None, 'at least 1'),
  'rollout.max_prompt_tokens': (1, None, 'at least 1'),
  'rollout.max_completion_tokens': (1, None, 'at least 1'),
  'rollout.temperature': (
    1e-3,
    None,
    'above 0; greedy episodes of a group are identical',
  ),
  **{
    f'{when}.{name}': accepted
    for when in ('rollout', 'evaluation')
    for name, accepted in {
      'top_p': (1e-6, 1.0, 'above 0, at most 1'),
      'top_k': (0, None, 'at least 0; 0 is off'),
      'min_p': (0.0, 1.0, 'between 0 and 1; 0 is off'),
    }.items()
  },
  'rollout.decode_tokens': (1, None, 'at least 1'),
  'rollout.tensor': (
    0,
    None,
    'at least 0; 0 is the smallest that fits the memory',
  ),
  'algorithm.similarity_threshold': (0.0, 1.0, 'between 0 and 1'),
  'algorithm.anchor_history': (0, None, 'at least 0'),
  'critic.rate_ratio': (0.0, None, 'at least 0'),
  'critic.value_clip': (1e-6, None, 'above 0'),
  'critic.warmup_iterations': (0, None, 'at least 0'),
  'filter.warmup_iterations': (0, None, 'at least 0'),
  'filter.max_refills': (0, None, 'at least 0'),
  'tasks.uniform': (0.0, 1.0, 'between 0 and 1'),
  'loss.entropy_band.weight': (0.0, None, 'at least 0; 0 is off'),
  'loss.entropy_band.low': (0.0, None, 'at least 0'),
  'loss.entropy_band.high': (0.0, None, 'at least 0'),
  'loss.entropy_band.decay': (0.0, None, 'at least 0'),
  'loss.clip_epsilon': (0.0, 1.0, 'between 0 and 1'),
  'loss.clip_epsilon_high': (0.0, None, 'at least 0'),
  'loss.dual_clip': (1 + 1e-9, None, 'above 1; None is off'),
  'loss.tis_clip': (1e-6, None, 'above 0; None is off'),
  'loss.kl_weight': (0.0, None, 'at least 0; 0 drops the reference policy'),
  'loss.kl_clamp': (1e-6, 80.0, 'above 0, at most 80; None is off'),
  'loss.entropy_weight': (0.0, None, 'at least 0'),
  'optimizer.learning_rate': (0.0, None, 'at least 0'),
  'optimizer.warmup_updates': (0, None, 'at least 0'),
  'optimizer.decay_updates': (0, None, 'at least 0; 0 keeps it constant'),
  'optimizer.b1': (0.0, 1 - 1e-9, 'at least 0, below 1'),
  'optimizer.b2': (0.0, 1 - 1e-9, 'at least 0, below 1'),
  'optimizer.weight_decay': (0.0, None, 'at least 0'),
  'optimizer.max_grad_norm': (1e-9, None, 'above 0'),
  'lora.rank': (0, None, 'at least 0; 0 trains the model'),
  'lora.alpha': (1e-6, None, 'above 0'),
  'learner.minibatch_rows': (1, None, 'at least 1'),
  'learner.microbatch_rows': (1, None, 'at least 1'),
  'learner.max_skipped_in_row': (1, None, 'at least 1'),
  'pool.num_envs': (0, None, 'at least 0; 0 is one per episode'),
  'pool.num_workers': (0, None, 'at least 0; 0 is in this process'),
  'pool.step_timeout_secs': (1e-3, None, 'above 0'),
  'pool.reset_timeout_secs': (1e-3, None, 'above 0'),
  'pool.max_resets_per_worker': (0, None, 'at least 0; 0 is never'),
  'pool.max_worker_mib': (0, None, 'at least 0; 0 is unlimited'),
  'pool.max_failed_share': (0.0, 1.0, 'between 0 and 1'),
  'evaluation.every': (0, None, 'at least 0; 0 is never'),
  'evaluation.num_tasks': (0, None, 'at least 0; 0 is all'),
  'evaluation.temperature': (0.0, None, 'at least 0; 0 is greedy'),
  'checkpoint.every': (1, None, 'at least 1'),
  'checkpoint.keep': (1, None, 'at least 1'),
  'episodes.every': (0, None, 'at least 0; 0 is never'),
  'sft.num_episodes': (1, None, 'at least 1'),
  'sft.epochs': (1, None, 'at least 1'),
  'sft.learning_rate': (0.0, None, 'at least 0'),
  'sft.warmup_updates': (0, None, 'at least 0'),
  'sft.minibatch_rows': (1, None, 'at least 1'),
  'sft.vocab_size': (300, None, 'at least 300, for bytes and special tokens'),
  **{
    f'sft.model.{name}': (1, None, 'at least 1')
    for name in ('layers', 'width', 'heads', 'kv_heads', 'mlp')
  },
  'sft.noise': (0.0, 1.0, 'between 0 and 1'),
  'sft.report_rows': (1, None, 'at least 1'),
}


def validate(
  config: ml_collections.ConfigDict,
  *,
  needs_model: bool = True,
  trains: bool = True,
) -> None:
  """Checks everything that needs neither a device nor a simulator.

  Renames old fields of the config (deprecated.FIELDS) in place.

  Args:
    config: the experiment.
    needs_model: whether weights and tokenizer must already exist.
    trains: whether the model is trained, which needs more memory.

  Raises:
    ValueError: one line per problem.
  """
  deprecated.update(config)
  problems = [*_values(config), *_combinations(config)]
  if not problems:
    problems += _missing_environment(config)
    if needs_model:
      problems += _missing_model(config, trains, fetch=not problems)
    if len(problems) > 1:
      problems.append(
        f'to start on any machine, without downloads: {configs.TINY}'
      )
  if problems:
    raise ValueError('\n'.join(problems))


def model_directory(path: str) -> str:
  """Returns the local folder of a model, downloading it if necessary.

  Paths within the project work from any working directory. A path that is no
  folder but looks like a name on the Hugging Face hub is looked up in the hub's
  cache, then downloaded.

  Raises:
    ValueError: in one line, if the model is not on the hub, or the hub is not
      reachable.
  """
  if _on_hub(path):
    return huggingface.download(path)
  return configs.find(path) or path


def _on_hub(path: str | None) -> bool:
  """Returns whether a model path can only be a name on the hub."""
  return bool(path) and huggingface.is_hub_name(path) and not configs.find(path)


def env_kwargs(config: ml_collections.ConfigDict) -> dict:
  """Returns the environment's arguments as plain values."""
  kwargs = config.env.to_dict()
  kwargs.pop('name')
  if envs.data(config.env.name):
    kwargs['data_dir'] = _data_dir(config)
  offered, anchor = envs.anchors(config.env.name), config.algorithm.anchor
  if len(offered) > 1:
    kwargs['anchor'] = anchor if anchor in offered else offered[0]
  return kwargs


def algorithm_kwargs(config: ml_collections.ConfigDict) -> dict:
  """Returns the arguments of `algorithms.make` as plain values."""
  return config.algorithm.to_dict()


def buckets_up_to(buckets: tuple[int, ...], limit: int) -> tuple[int, ...]:
  """Returns the buckets below a limit, followed by the limit.

  Without buckets, adds one of half the limit.
  """
  sizes = buckets or (-(-limit // 2),)
  return (*(b for b in sizes if b < limit), limit)


def has_own_buckets(config: ml_collections.ConfigDict) -> bool:
  """Returns whether the config sets prompt buckets of its own."""
  sizes = tuple(config.rollout.prompt_buckets)
  return bool(sizes) and sizes != tuple(
    base.get_config().rollout.prompt_buckets
  )


def _get(config: ml_collections.ConfigDict, field: str):
  for name in field.split('.'):
    if name not in config:
      return None
    config = config[name]
  return config


def _values(config: ml_collections.ConfigDict) -> Iterator[str]:
  for field, known in _CHOICES.items():
    value = _get(config, field)
    if value is not None and value not in known:
      yield f'{field}={value}: unknown; must be one of {", ".join(known)}'
  for problem in algorithms.problems(config.algorithm):
    yield f'algorithm.{problem}'
  for field, (low, high, accepted) in _RANGES.items():
    value = _get(config, field)
    if value is None:
      continue
    if not math.isfinite(value):
      yield f'{field}={value}: must be finite; {accepted}'
    elif value < low or (high is not None and value > high):
      yield f'{field}={value}: out of range; {accepted}'
  for field, min_count in (
    ('rollout.prompt_buckets', 0),
    ('rollout.batch_buckets', 1),
    ('learner.length_buckets', 0),
  ):
    sizes = tuple(_get(config, field))
    if not all(isinstance(size, int) for size in sizes) or (
      len(sizes) < min_count
      or min(sizes, default=1) < 1
      or sizes != tuple(sorted(set(sizes)))
    ):
      alternative = (
        '' if min_count else ', or () for half the limit and the limit'
      )
      yield (
        f'{field}={sizes}: must be one or more rising positive sizes'
        f'{alternative}'
      )


def _combinations(config: ml_collections.ConfigDict) -> Iterator[str]:
  yield from _algorithm(config)
  yield from _collection(config)
  yield from _loss(config)
  if config.loss.tis_clip and config.loss.old_log_probs != 'learner':
    yield (
      f"loss.tis_clip={config.loss.tis_clip}: compares the learner's log-probs "
      "with the sampler's; needs loss.old_log_probs=learner"
    )
  learner = config.learner
  if learner.microbatch_rows > learner.minibatch_rows:
    yield (
      f'learner.microbatch_rows={learner.microbatch_rows}: larger than '
      f'learner.minibatch_rows={learner.minibatch_rows}; must divide it'
    )
  sizes = [config.mesh[name] for name in mesh.AXES]
  for name, size in zip(mesh.AXES, sizes, strict=True):
    if size == 0 or size < -1:
      yield (
        f'mesh.{name}={size}: must be at least 1, or -1 for the remaining '
        'devices'
      )
  if sizes.count(-1) > 1:
    yield f'mesh.{",".join(mesh.AXES)}={sizes}: at most one axis may be -1'
  yield from _attention(config)
  yield from _adapters(config)
  yield from _new_model(config.sft.model)
  if config.metrics.wandb and not _installed('wandb'):
    yield (
      f'metrics.wandb={config.metrics.wandb}: wandb is not installed; run pip '
      "install 'wandb>=0.19' (in a clone: pip install -e '.[wandb]'), or leave "
      'it empty'
    )
  if config.env.name is None:
    yield f'env.name=None: must be one of {", ".join(envs.REGISTRY)}'
    return
  try:
    envs.check(config.env.name)
  except ValueError as error:
    yield str(error)
    return
  yield from envs.check_options(config.env.name, config.env)
  yield from _environment_conflicts(config)


def _algorithm(config: ml_collections.ConfigDict) -> Iterator[str]:
  if any(problem.startswith('algorithm.') for problem in _values(config)):
    return
  try:
    algorithm = algorithms.make(**algorithm_kwargs(config))
  except ValueError as error:
    yield f'algorithm.{str(error).removeprefix("algorithm.")}'
    return
  yield from _ignored_options(config, algorithm)
  name, members = config.algorithm.name, config.rollout.episodes_per_group
  if algorithm.needs_group and members < _PAIR:
    yield (
      f'rollout.episodes_per_group={members}: {name} compares the episodes of '
      'a group; must be at least 2'
    )
  if algorithm.needs_values and config.lora.rank:
    yield (
      f'lora.rank={config.lora.rank}: the critic of {name} has no adapters; '
      'must be 0'
    )
  yield from algorithms.conflicts(config)


def _ignored_options(
  config: ml_collections.ConfigDict, algorithm: algorithms.Algorithm
) -> Iterator[str]:
  """Yields options that are set but have no effect."""
  name = config.algorithm.name
  own = algorithms.defaults(algorithm)
  for field, value, default in _non_default(
    config,
    [
      f'algorithm.{option}'
      for option in base.get_config().algorithm
      if option not in (*_SHARED_OPTIONS, *own)
    ],
  ):
    yield f'{field}={value}: {name} has no such option; must be {default}'
  if not algorithm.needs_values:
    options = [f'critic.{option}' for option in config.critic]
    for field, value, default in _non_default(config, options):
      yield f'{field}={value}: {name} has no critic; must be {default}'
  yield from _unmet_dependencies(config)


def _non_default(
  config: ml_collections.ConfigDict, fields: Iterable[str]
) -> Iterator[tuple[str, object, object]]:
  """Yields (field, value, default) of fields that differ from the default."""
  defaults = base.get_config()
  for field in fields:
    value, default = _get(config, field), _get(defaults, field)
    if value != default:
      yield field, value, default


def _unmet_dependencies(config: ml_collections.ConfigDict) -> Iterator[str]:
  refused = {problem.partition('=')[0] for problem in _values(config)}
  for field, value, default in _non_default(config, _DEPENDENT_FIELDS):
    switch, accepted, is_on = _DEPENDENT_FIELDS[field]
    if field not in refused and not is_on(_get(config, switch)):
      yield (
        f'{field}={value}: has no effect; needs {switch} to be {accepted}, or '
        f'must be {default}'
      )


def _environment_conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields options that the environment or its anchors do not support."""
  name, anchor = config.env.name, config.algorithm.anchor
  yield from envs.conflicts(config)
  offered = envs.anchors(name)
  if anchor in anchors.REPORTED and anchor not in offered:
    accepted = [
      a for a in anchors.ANCHORS if a in offered or a not in anchors.REPORTED
    ]
    yield (
      f'algorithm.anchor={anchor}: env.name={name} does not list the actions '
      f'of a state; must be one of {", ".join(accepted)}'
    )


def _collection(config: ml_collections.ConfigDict) -> Iterator[str]:
  members = config.rollout.episodes_per_group
  if config.filter.drop_zero_variance and members < _PAIR:
    yield (
      'filter.drop_zero_variance=True: one episode has no variance; needs '
      'rollout.episodes_per_group of at least 2'
    )
  horizon = tuple(config.rollout.horizon)
  if not _is_horizon(horizon):
    yield (
      f'rollout.horizon={horizon}: must be pairs (iteration, turns) with '
      'rising iterations and turns of at least 1'
    )


def _loss(config: ml_collections.ConfigDict) -> Iterator[str]:
  if any(problem.startswith('loss.') for problem in _values(config)):
    return
  try:
    loss = losses.make(**config.loss.to_dict())
  except ValueError as error:
    yield from (f'loss.{problem}' for problem in str(error).splitlines())
    return
  unknown = set(loss.columns) - set(losses.TRAINING_COLUMNS)
  if unknown:
    yield (
      f'loss.name={config.loss.name}: reads {", ".join(sorted(unknown))}; '
      f'must read only {", ".join(losses.TRAINING_COLUMNS)}'
    )


def _is_horizon(horizon: tuple) -> bool:
  for pair in horizon:
    if not isinstance(pair, tuple) or [*map(type, pair)] != [int, int]:
      return False
  starts = [start for start, _ in horizon]
  rising = starts == sorted(set(starts))
  return rising and all(turns >= 1 for _, turns in horizon)


def _attention(config: ml_collections.ConfigDict) -> Iterator[str]:
  implementation = config.model.attention
  if implementation not in ('auto', 'xla') and config.mesh.sequence != 1:
    yield (
      f'model.attention={implementation}: cannot shard rows; mesh.sequence='
      f'{config.mesh.sequence} needs xla'
    )
  if implementation == 'cudnn' and config.model.dtype == 'float32':
    yield (
      'model.attention=cudnn: does not support float32; needs '
      'model.dtype=bfloat16'
    )


def _adapters(config: ml_collections.ConfigDict) -> Iterator[str]:
  targets = tuple(config.lora.targets)
  unknown = [name for name in targets if name not in lora.TARGETS]
  if unknown or not targets:
    yield (
      f'lora.targets={targets}: must be one or more of '
      f'{", ".join(lora.TARGETS)}'
    )
  if config.rollout.weights == 'adapters' and not config.lora.rank:
    yield (
      'rollout.weights=adapters: there are no adapters; needs lora.rank above 0'
    )


def _new_model(shape: ml_collections.ConfigDict) -> Iterator[str]:
  heads, kv_heads = shape.heads, shape.kv_heads
  if shape.width % (2 * heads):
    yield (
      f'sft.model.heads={heads}: the head size {shape.width} / {heads} must be '
      'an even integer, for rotary positions'
    )
  elif heads % kv_heads:
    yield (
      f'sft.model.kv_heads={kv_heads}: must divide sft.model.heads={heads}'
    )


def _installed(package: str) -> bool:
  spec = importlib.util.find_spec(package)
  # A folder of that name, such as wandb's own folder in a run, has no origin.
  return spec is not None and spec.origin is not None


def _data_dir(config: ml_collections.ConfigDict) -> str | None:
  return envs.data_dir(config.env.name, config.env.data_dir)


def _missing_environment(config: ml_collections.ConfigDict) -> Iterator[str]:
  yield from envs.check_installation(config.env.name, config.env)
  data = envs.data(config.env.name)
  if data and _data_dir(config) == '':
    yield (
      f'env.data_dir=: {data.hint} and set ${data.variable} or env.data_dir to '
      'its folder, or use env.data_dir=generated'
    )
    return
  try:
    for split in ('train', config.evaluation.split):
      if split is not None:
        yield from _too_few_tasks(config, split)
  except ValueError as error:
    yield _with_field(config, str(error))


def _too_few_tasks(
  config: ml_collections.ConfigDict, split: str
) -> Iterator[str]:
  tasks_of_split = envs.tasks(config.env.name, split, **env_kwargs(config))
  available = len(tasks_of_split)
  if split == 'train':
    groups = config.rollout.groups
    if draw := getattr(tasks_of_split, 'draw', None):
      draw(0, groups)
    if available < groups:
      yield (
        f'rollout.groups={groups}: more groups than tasks; split train has '
        f'{available}'
      )
  elif available < config.evaluation.num_tasks:
    yield (
      f'evaluation.num_tasks={config.evaluation.num_tasks}: split {split} has '
      f'{available} tasks; at most that, or 0 for all'
    )


def _with_field(config: ml_collections.ConfigDict, text: str) -> str:
  """Returns an error message of an environment, prefixed with the field."""
  if text.startswith('split='):
    return f'evaluation.{text}'
  if text.startswith(('env.', 'rollout.')):
    return text
  field = 'data_dir' if config.env.get('data_dir') else 'name'
  return f'env.{field}={config.env[field]}: {text}'


def _missing_model(
  config: ml_collections.ConfigDict, trains: bool, *, fetch: bool
) -> Iterator[str]:
  """Yields problems of the model.

  Args:
    config: the experiment.
    trains: whether the model is trained.
    fetch: whether to download the weights of a hub model, which takes long; its
      config.json is always downloaded.
  """
  if missing := _missing_warm_start(config):
    yield missing
    return
  path = config.model.path
  try:
    if not path:
      raise ValueError(
        'model.path=None: no weights; set --config.model.path to a Hugging '
        'Face folder, or to a name on the hub such as '
        'Qwen/Qwen2.5-1.5B-Instruct'
      )
    on_hub = _on_hub(path)
    directory = (
      huggingface.download(path, only_config=True)
      if on_hub
      else model_directory(path)
    )
    model = huggingface.read_config(directory, dtype=config.model.dtype)
  except ValueError as error:
    yield str(error)
    if model := _published(config):
      yield from _too_small(config, models.num_parameters(model), trains)
    return
  problems = [] if on_hub else list(_invalid_files(config, model))
  if not problems:
    problems += _too_long(config, model)
    problems += _too_small(config, models.num_parameters(model), trains)
  if on_hub and fetch and not problems:
    problems += _invalid_files(config, model)
  yield from problems


def _invalid_files(
  config: ml_collections.ConfigDict, model: qwen.QwenConfig
) -> Iterator[str]:
  """Yields problems of the weights and the tokenizer of a model."""
  try:
    directory = model_directory(config.model.path)
    huggingface.check(directory, model)
    text = tokenizer.Tokenizer(directory)
  except ValueError as error:
    yield str(error)
    return
  if config.lora.rank and model.num_experts:
    # Experts have no adapters.
    dense = set(config.lora.targets) - {'gate', 'up', 'down'}
    if not dense:
      yield (
        f'lora.targets={tuple(config.lora.targets)}: experts get no adapters; '
        'must include one of q, k, v, o'
      )
  if text.vocab_size > model.vocab_size:
    yield (
      f'model.path={config.model.path}: its tokenizer has {text.vocab_size} '
      f'tokens, but its embedding only {model.vocab_size} rows'
    )
  limit, template = config.rollout.max_prompt_tokens, text.template_tokens()
  if limit <= template:
    yield (
      f'rollout.max_prompt_tokens={limit}: the chat template alone takes '
      f'{template} tokens; must be larger'
    )


def _published(config: ml_collections.ConfigDict) -> qwen.QwenConfig | None:
  """Returns the published shape of a model by its name, else by its size.

  The size is that of the config's variant, such as 1.5b.
  """
  name = (config.model.path or '').rstrip('/').rpartition('/')[2]
  size = config.get('variant', '').partition(',')[0]
  return published.find(name) or published.find(f'Qwen2.5-{size}')


def _too_long(
  config: ml_collections.ConfigDict, model: qwen.QwenConfig
) -> Iterator[str]:
  """Yields a problem if prompt and completion exceed the model's positions."""
  limit = model.max_positions
  if model.yarn:
    # Some config.json files list the positions before YaRN scaling.
    scaled = model.yarn.factor * model.yarn.original_length
    limit = max(limit, int(scaled))
  prompt = config.rollout.max_prompt_tokens
  completion = config.rollout.max_completion_tokens
  if prompt + completion > limit:
    yield (
      f'rollout.max_prompt_tokens={prompt}: with rollout.max_completion_tokens='
      f'{completion} above max_position_embeddings={limit} of model.path='
      f'{config.model.path}; together must be at most that'
    )


def _missing_warm_start(config: ml_collections.ConfigDict) -> str | None:
  """Returns the problem of a small config without its warm start, or None."""
  path = config.model.path or ''
  if match := base.WARM_START.fullmatch(path):
    if configs.find(path):
      return None
    name, size = match.groups()
    variant = config.get('variant', size)
    return (
      f'model.path={path}: no warm start there yet; run `python launch/sft.py '
      f'--config=configs/{name}.py:{size}`, then `python launch/train.py '
      f'--config=configs/{name}.py:{variant}`'
    )
  if not path and config.sft.init == 'scratch':
    return (
      'model.path=None: no weights; run `python launch/sft.py` with this '
      '--config, and set --config.model.path to the folder policy in its '
      '--workdir, or to another Hugging Face folder'
    )
  return None


def _too_small(
  config: ml_collections.ConfigDict, num_parameters: int, trains: bool
) -> Iterator[str]:
  # An accelerator's memory is known only after it starts; out-of-memory errors
  # are reported then.
  if hardware.has_accelerator():
    return
  bytes_per_parameter, mode = BYTES_PER_PARAMETER, 'full training'
  if not trains:
    bytes_per_parameter, mode = _SAMPLING_BYTES_PER_PARAMETER, 'sampling'
  elif config.lora.rank:
    bytes_per_parameter, mode = FROZEN_BYTES_PER_PARAMETER, 'training adapters'
  elif config.optimizer.mu_dtype == 'bfloat16':
    bytes_per_parameter -= 2
  if trains and algorithms.make(**algorithm_kwargs(config)).needs_values:
    # float32 parameters, moments and gradients of the critic.
    bytes_per_parameter, mode = (
      bytes_per_parameter + 16,
      f'{mode}, with a critic,',
    )
  needed = num_parameters * bytes_per_parameter
  available = psutil.virtual_memory().total
  if needed > available:
    yield (
      f'memory={available / 2**30:.0f} GiB: {mode} of '
      f'{num_parameters / 1e9:.1f}B parameters needs about '
      f'{needed / 2**30:.0f} GiB; use a larger machine or a smaller model'
    )


def save(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Stores the config in a work directory."""
  now = json.loads(config.to_json_best_effort())
  stored = now | {'version': files.VERSION}
  text = json.dumps(stored, indent=2, sort_keys=True)
  files.write_atomic(pathlib.Path(workdir) / _STORED, text + '\n')


def check_workdir(workdir: str) -> None:
  """Creates a work directory and checks that it is writable.

  Raises:
    ValueError: in one line, if it is not.
  """
  path = pathlib.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(bytes(4096))
      file.flush()
  except OSError as error:
    raise ValueError(
      f'--workdir={workdir}: cannot be written ({error.strerror}); must be a '
      'writable folder with free space'
    ) from error


def check_resume(
  config: ml_collections.ConfigDict, workdir: str, *, allow_change: bool = False
) -> None:
  """Compares the config with the one in a work directory, if it has one.

  Args:
    config: the experiment.
    workdir: work directory of the run.
    allow_change: whether the run may resume with another config.

  Raises:
    ValueError: in one line with the differing fields, if the work directory
      holds a run of another config.
  """
  path = pathlib.Path(workdir) / _STORED
  now = json.loads(config.to_json_best_effort())
  saved = (path.parent / 'checkpoints').glob('[0-9]*')
  started = path.exists() or any(saved)
  if allow_change or not started:
    return
  try:
    then = files.read_stored(path)
    if not isinstance(then.get('num_iterations'), int):
      raise ValueError('lacks num_iterations')
    deprecated.update_stored(then, now)
  except ValueError as error:
    raise ValueError(
      f'--workdir={workdir}: its {_STORED} cannot be read ({error}); use '
      'another --workdir, or --allow_config_change to resume with this config'
    ) from error
  # These fields do not change the experiment, nor does running longer.
  may_change = {'checkpoint.keep', 'episodes.every', 'metrics.wandb'}
  if now['num_iterations'] >= then['num_iterations']:
    may_change.add('num_iterations')
  changed = [
    f'{name}={new} (was {old})'
    for name, (old, new) in _differences(then, now)
    if name not in may_change and not (old is None and _is_default(name, new))
  ]
  if changed:
    raise ValueError(
      f'--workdir={workdir}: holds a run of another config: '
      f'{", ".join(changed)}; use another --workdir, or '
      '--allow_config_change to resume with this config'
    )


def _is_default(field: str, value: object) -> bool:
  """Returns whether a field that an older release lacks has its default.

  Defaults of environment fields are not known here; falsy values count.
  """
  default = json.loads(base.get_config().to_json_best_effort())
  for name in field.split('.'):
    default = default.get(name) if isinstance(default, dict) else None
  return not value if default is None else value == default


def _differences(old: dict, new: dict, prefix: str = ''):
  for name in sorted(old.keys() | new.keys()):
    a, b = old.get(name), new.get(name)
    if isinstance(a, dict) and isinstance(b, dict):
      yield from _differences(a, b, f'{prefix}{name}.')
    elif a != b:
      yield prefix + name, (a, b)
