"""Validate a configuration before any device or simulator starts.

Reports one line per problem, as `field=value: what is wrong; what is accepted`.
Checks names, numbers and files on disk, and builds nothing. For a model on the
hub, it downloads only config.json until everything else is valid.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Set

import ml_collections

import configs
import envs
from configs import other_trainers
from envs import rewards
from gigpo_jax import (
  algorithms,
  anchors,
  deprecated,
  losses,
  modulators,
  options,
  reward_functions,
  scored_rewards,
  selectors,
  tasks,
  teacher,
)
from gigpo_jax.run import (
  adapter_check,
  agent_check,
  collection_check,
  config_fields,
  loss_check,
  model_check,
)

# Options that the config of an environment may set for all algorithms, or for
# all losses.
COMMON_OPTIONS = {
  'algorithm': ('norm', 'discount', 'invalid_penalty'),
  'loss': ('kl_weight', 'entropy_weight', 'clip_epsilon'),
}
# Options of the algorithm section that are not passed to algorithms, or that
# apply to all of them.
_SHARED_OPTIONS = (
  'name',
  'modulators',
  *COMMON_OPTIONS['algorithm'],
  *options.defaults(anchors.Options),
)


# Turns of a conversation whose environment has no limit: any number of trained
# tokens fits into a sequence.
_MANY_TURNS = 1_000

# Section of the config: the dataclasses of its options. They are imported on
# use, because some of their modules import this one.
SECTIONS = {
  '': ('gigpo_jax.config:Experiment',),
  'algorithm': ('gigpo_jax.anchors:Options',),
  'checkpoint': ('gigpo_jax.checkpoint:Options',),
  'critic': ('gigpo_jax.critic:Options',),
  'episodes': ('gigpo_jax.episodes:Options',),
  'evaluation': ('gigpo_jax.evaluation:Options',),
  'filter': ('gigpo_jax.group_filter:GroupFilter',),
  'guard': ('gigpo_jax.guard:Guard',),
  'learner': ('gigpo_jax.learner:Options',),
  'loss': (
    *losses.REGISTRY.values(),
    'gigpo_jax.learner:LossOptions',
    'gigpo_jax.kl:Control',
  ),
  'loss.entropy_band': ('gigpo_jax.losses:EntropyBand',),
  'lora': ('gigpo_jax.models.lora:Lora',),
  'mesh': ('gigpo_jax.mesh:Options',),
  'model': ('gigpo_jax.models:Options',),
  'optimizer': ('gigpo_jax.optimizer:AdamW',),
  'pool': ('gigpo_jax.env_pool:Options',),
  'reward': (
    'gigpo_jax.reward_shaping:RewardShaping',
    'gigpo_jax.reward_functions:Options',
    'gigpo_jax.scored_rewards:Options',
  ),
  'rollout': (
    'gigpo_jax.rollout_options:Options',
    'gigpo_jax.carry_over:CarryOver',
  ),
  'sft': ('gigpo_jax.sft:Options',),
  'sft.model': ('gigpo_jax.sft:ModelShape',),
  'tasks': ('gigpo_jax.tasks:Options',),
  'teacher': ('gigpo_jax.teacher:Options',),
}


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Options outside of sections; see configs/base.py."""

  seed: int = options.seed()
  num_iterations: int = options.number(150, low=1)

  def __post_init__(self):
    options.check(self)


def validate(
  config: ml_collections.ConfigDict,
  *,
  needs_model: bool = True,
  trains: bool = True,
  collects: bool = True,
  evaluates: bool | None = None,
  has_harness: bool = False,
) -> None:
  """Checks everything that needs neither a device nor a simulator.

  Renames old fields of the config (deprecated.FIELDS) in place.

  Args:
    config: the experiment.
    needs_model: whether weights and tokenizer must already exist.
    trains: whether the model is trained, which needs more memory.
    collects: whether groups of training tasks are played.
    evaluates: whether the evaluation tasks are played; None: unless
      `evaluation.every` is 0.
    has_harness: whether an agent harness can bring the episodes.

  Raises:
    ValueError: one line per problem.
  """
  problems = _field_problems(config)
  if not problems:
    if evaluates is None:
      evaluates = bool(config.evaluation.every)
    problems += _missing_environment(
      config, collects=collects, evaluates=evaluates
    )
    problems += _harness(config, has_harness=has_harness)
    if needs_model:
      problems += model_check.problems(
        config, trains=trains, fetch=not problems
      )
    if len(problems) > 1:
      problems.append(
        f'to start on any machine, without downloads: {configs.TINY}'
      )
  if problems:
    raise ValueError('\n'.join(problems))


def check_fields(config: ml_collections.ConfigDict) -> None:
  """Checks the fields alone, without data, weights and memory.

  Renames old fields of the config (deprecated.FIELDS) in place.

  Args:
    config: the experiment.

  Raises:
    ValueError: one line per problem.
  """
  if problems := _field_problems(config):
    raise ValueError('\n'.join(problems))


def _field_problems(config: ml_collections.ConfigDict) -> list[str]:
  deprecated.update(config)
  if problems := list(_without_value(config)):
    return problems
  problems = [*_values(config), *_environment(config)]
  refused = frozenset(problem.partition('=')[0] for problem in problems)
  problems += _combinations(config, refused)
  # An algorithm may ask a wrong environment.
  problems = list(dict.fromkeys(map(other_trainers.add_hint, problems)))
  return problems or list(config_fields.unknown(config, _own_fields(config)))


def env_kwargs(config: ml_collections.ConfigDict) -> dict:
  """Returns the environment's arguments as plain values."""
  kwargs = config.env.to_dict()
  kwargs.pop('name')
  if len(envs.contexts(config.env.name)) == 1:
    kwargs.pop('context', None)
  if envs.data(config.env.name):
    kwargs['data_dir'] = _data_dir(config)
  if len(envs.anchors(config.env.name)) > 1:
    kwargs['anchor'] = envs.anchor(config.env.name, config.algorithm.anchor)
  return kwargs


def list_tasks(
  config: ml_collections.ConfigDict, split: str
) -> tasks.CheckedTasks:
  """Returns the tasks of a split of the environment."""
  listed = envs.tasks(config.env.name, split, **env_kwargs(config))
  return tasks.CheckedTasks(listed, config.env.name, split)


def conversation_turns(config: ml_collections.ConfigDict) -> int:
  """Returns the number of turns in a prompt; 1 without conversations."""
  if not is_conversation(config):
    return 1
  return config.env.get('max_steps') or _MANY_TURNS


def is_conversation(config: ml_collections.ConfigDict) -> bool:
  """Returns whether episodes are growing conversations."""
  return config.env.get('context') == 'conversation'


def buckets_up_to(buckets: tuple[int, ...], limit: int) -> tuple[int, ...]:
  """Returns the buckets below a limit, followed by the limit.

  Without buckets, adds one of half the limit.
  """
  sizes = buckets or (-(-limit // 2),)
  return (*(b for b in sizes if b < limit), limit)


def has_own_buckets(config: ml_collections.ConfigDict) -> bool:
  """Returns whether the config sets prompt buckets of its own."""
  sizes = tuple(config.rollout.prompt_buckets)
  return (
    bool(sizes) and sizes != config_fields.defaults().rollout.prompt_buckets
  )


def _without_value(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each field that is None and must not be."""
  values = config_fields.flatten(config)
  for name, default in config_fields.flatten(config_fields.defaults()).items():
    if default is not None and values.get(name, default) is None:
      accepted = type(default).__name__
      yield f'{name}=None: wrong type; must be {accepted}'


def _values(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each problem within a section."""
  for name, paths in SECTIONS.items():
    section, prefix = (config[name], f'{name}.') if name else (config, '')
    values = {k: v for k, v in section.items() if not _is_section(v)}
    # Problems of a nested section may start with its name.
    own_name = f'{name.rpartition(".")[2]}.'
    for path in paths:
      for line in _problems(path, values):
        yield prefix + line.removeprefix(own_name)
  for section, owner in (
    ('algorithm', algorithms),
    ('algorithm', modulators.FAMILY),
    ('filter', selectors.FAMILY),
  ):
    for problem in owner.problems(config[section]):
      yield f'{section}.{problem}'


def _problems(path: str, values: Mapping[str, object]) -> list[str]:
  """Returns the problems of the values that a dataclass of options has."""
  module, _, name = path.partition(':')
  options_class = getattr(importlib.import_module(module), name)
  known = options.defaults(options_class)
  try:
    options_class(**{k: v for k, v in values.items() if k in known})
  except ValueError as error:
    return str(error).splitlines()
  return []


def _is_section(value: object) -> bool:
  return isinstance(value, ml_collections.ConfigDict)


def _environment(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each problem of the environment and its options."""
  if config.env.name is None:
    yield f'env.name=None: must be one of {", ".join(envs.REGISTRY)}'
    return
  try:
    envs.check(config.env.name)
  except ValueError as error:
    yield str(error)
    return
  yield from envs.check_options(config.env.name, config.env)


def _combinations(
  config: ml_collections.ConfigDict, refused: Set[str] = frozenset()
) -> Iterator[str]:
  """Yields a line for each conflict between fields that are not `refused`."""
  yield from _algorithm(config, refused)
  yield from _plugins(config, refused)
  if not any(field.startswith('reward.') for field in refused):
    yield from _reward(config)
    yield from reward_functions.conflicts(config)
    yield from scored_rewards.conflicts(config)
  if refused.isdisjoint(('num_iterations', 'rollout.horizon', 'env.max_steps')):
    yield from collection_check.conflicts(config)
  if not any(field.startswith('loss.') for field in refused):
    yield from loss_check.conflicts(config)
  yield from _optimizer(config)
  yield from _attention(config)
  yield from adapter_check.of_sampler(config)
  if config.metrics.wandb and not _installed('wandb'):
    yield (
      f'metrics.wandb={config.metrics.wandb}: wandb is not installed; run pip '
      "install 'wandb>=0.19' (in a clone: pip install -e '.[wandb]'), or leave "
      'it empty'
    )
  if 'env.name' not in refused:
    yield from adapter_check.of_agents(config, refused)
    yield from _environment_conflicts(config)


def _algorithm(
  config: ml_collections.ConfigDict, refused: Set[str]
) -> Iterator[str]:
  section = config.algorithm.to_dict()
  is_refused = any(field.startswith('algorithm.') for field in refused)
  if is_refused:  # Without the wrong options, only the name can be wrong.
    section = {'name': section['name']}
  try:
    algorithm = algorithms.of_section(section)
  except ValueError as error:
    yield f'algorithm.{str(error).removeprefix("algorithm.")}'
    return
  if is_refused:
    return
  yield from _ignored_options(config, algorithm, refused)
  if algorithm.needs_values and not refused:
    yield from _critic(config)
  name, members = config.algorithm.name, config.rollout.episodes_per_group
  if algorithm.needs_group and members < options.MIN_GROUP:
    yield (
      f'rollout.episodes_per_group={members}: {name} compares the episodes of '
      'a group; must be at least 2'
    )
  forced = config.rollout.forced_members
  if forced and algorithms.uses_free_policy(algorithm):
    yield (
      f'rollout.forced_members={forced}: {name} needs the free policy in all '
      'members of a group; must be 0'
    )
  yield from algorithms.conflicts(config)


def _ignored_options(
  config: ml_collections.ConfigDict,
  algorithm: algorithms.Algorithm,
  refused: Set[str],
) -> Iterator[str]:
  """Yields options that are set but have no effect."""
  name = config.algorithm.name
  own = {*options.defaults(algorithm), *modulators.FAMILY.options()}
  for field, value, default in config_fields.non_default(
    config,
    [
      f'algorithm.{option}'
      for option in config_fields.defaults().algorithm
      if option not in (*_SHARED_OPTIONS, *own)
    ],
  ):
    yield f'{field}={value}: {name} has no such option; must be {default}'
  if not algorithm.needs_values:
    fields = [f'critic.{option}' for option in config_fields.defaults().critic]
    for field, value, default in config_fields.non_default(config, fields):
      yield f'{field}={value}: {name} has no critic; must be {default}'
  yield from config_fields.unmet(config, refused)


def _critic(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a problem if only the critic would be trained."""
  warmup, length = config.critic.warmup_iterations, config.num_iterations
  if warmup >= length:
    yield (
      f'critic.warmup_iterations={warmup}: no iteration would train the '
      f'policy; must be below num_iterations={length}'
    )
  if warmup and config.guard.action == 'rollback':
    yield (
      f'critic.warmup_iterations={warmup}: guard.action=rollback may restore '
      'the critic from before its warm-up; must be 0'
    )


def _own_fields(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields fields of this config that configs/base.py may lack."""
  yield from ('env', 'variant')
  algorithm = algorithms.of_section(config.algorithm.to_dict())
  for option in options.defaults(algorithm):
    yield f'algorithm.{option}'
  for option in losses.options_of(config.loss.name):
    yield f'loss.{option}'
  for family in (modulators.FAMILY, selectors.FAMILY):
    section = family.section
    chosen = family.names(config[section])
    for option in family.options(chosen):
      yield f'{section}.{option}'
  for path in config.reward.functions:
    yield f'reward.{rewards.name_of(path)}'


def _plugins(
  config: ml_collections.ConfigDict, refused: Set[str]
) -> Iterator[str]:
  """Yields the conflicts of modulators and selectors."""
  for family in (modulators.FAMILY, selectors.FAMILY):
    section = family.section
    if any(field.startswith(f'{section}.') for field in refused):
      continue
    try:
      yield from family.conflicts(config)
    except ValueError as error:
      yield f'{section}.{str(error).removeprefix(f"{section}.")}'
      continue
    chosen = family.names(config[section])
    others = family.options() - family.options(chosen)
    fields = sorted(f'{section}.{option}' for option in others)
    for field, value, default in config_fields.non_default(config, fields):
      yield (
        f'{field}={value}: not an option of {family.field}={chosen}; must be '
        f'{default}'
      )
  if not any(field.startswith(('filter.', 'guard.')) for field in refused):
    yield from _fisher_level(config)


def _fisher_level(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if no selector reports the metric of an alarm level."""
  level = config.guard.max_fisher
  with contextlib.suppress(ValueError):  # `_plugins` reports an unknown name.
    if level and not selectors.measures(config):
      yield (
        f'guard.max_fisher={level}: has no effect; needs filter.select to have '
        'a selector that measures filter/fisher_mean, or must be 0'
      )


def _environment_conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields options that the environment or its anchors do not support."""
  name, anchor = config.env.name, config.algorithm.anchor
  yield from envs.conflicts(config)
  yield from _context(config)
  yield from _replays(config)
  yield from agent_check.conflicts(config)
  yield from teacher.conflicts(config)
  offered = envs.anchors(name)
  if anchor in anchors.REPORTED and anchor not in offered:
    accepted = [
      a for a in anchors.ANCHORS if a in offered or a not in anchors.REPORTED
    ]
    yield (
      f'algorithm.anchor={anchor}: env.name={name} does not list the actions '
      f'of a state; must be one of {", ".join(accepted)}'
    )


def _context(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields problems of `env.context`."""
  name, context = config.env.name, config.env.get('context', 'history')
  offered = envs.contexts(name)
  if context not in offered:
    yield (
      f'env.context={context}: env.name={name} does not offer it in CONTEXTS; '
      f'must be {" or ".join(offered)}'
    )
  overflow = config.rollout.prompt_overflow
  if is_conversation(config) and overflow == 'truncate_left':
    yield (
      'rollout.prompt_overflow=truncate_left: would cut a message of a '
      'conversation; must be end, drop_history or error'
    )


def _replays(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields options that replay episodes, if the environment cannot."""
  if envs.replays(config.env.name):
    return
  reason = f'env.name={config.env.name} cannot replay episodes'
  if config.rollout.carry_over:
    yield f'rollout.carry_over={config.rollout.carry_over}: {reason}; must be 0'
  with contextlib.suppress(ValueError):  # `_algorithm` reports it.
    if algorithms.replays(algorithms.of_section(config.algorithm.to_dict())):
      yield (
        f'algorithm.name={config.algorithm.name}: {reason}; must be an '
        'algorithm without continuations or branches'
      )


def _reward(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields conflicts of the length of responses."""
  buffer = config.reward.overlong_buffer
  limit = config.rollout.max_completion_tokens
  if buffer > limit:
    yield (
      f'reward.overlong_buffer={buffer}: a response has at most rollout.'
      f'max_completion_tokens={limit}; must be at most that'
    )


def _optimizer(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a warm-up that ends after the decay, which SFT may have."""
  warmup = config.optimizer.warmup_updates
  decay = config.optimizer.decay_updates
  if 0 < decay < warmup:
    yield (
      f'optimizer.warmup_updates={warmup}: ends after the decay; must be at '
      f'most optimizer.decay_updates={decay}'
    )


def _attention(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields what a kernel does not support."""
  implementation = config.model.attention
  if implementation not in ('auto', 'xla') and config.mesh.sequence != 1:
    yield (
      f'model.attention={implementation}: cannot shard tokens; mesh.sequence='
      f'{config.mesh.sequence} needs xla'
    )
  if (
    config.model.decode_attention == 'paged' and config.rollout.cache == 'int8'
  ):
    yield (
      'rollout.cache=int8: model.decode_attention=paged has no int8; must be '
      'model'
    )


def _installed(package: str) -> bool:
  spec = importlib.util.find_spec(package)
  # A folder of that name, such as wandb's own folder in a run, has no origin.
  return spec is not None and spec.origin is not None


def _data_dir(config: ml_collections.ConfigDict) -> str | None:
  return envs.data_dir(config.env.name, config.env.get('data_dir'))


def _missing_environment(
  config: ml_collections.ConfigDict,
  *,
  collects: bool = True,
  evaluates: bool = True,
) -> Iterator[str]:
  """Yields a line for each problem of the data, and of the numbers of tasks."""
  missing = list(envs.check_installation(config.env.name, config.env))
  if missing:  # The environment cannot list its tasks.
    yield from missing
    return
  data = envs.data(config.env.name)
  if data and _data_dir(config) == '':
    yield (
      f'env.data_dir=: {data.hint} and set ${data.variable} or env.data_dir to '
      'its folder, or use env.data_dir=generated'
    )
    return
  if config.evaluation.split is None and evaluates:
    yield (
      'evaluation.split=None: not set; must be a split of the tasks, or '
      'evaluation.every=0'
    )
  try:
    trained = _usable_tasks(config, 'train')
    if collects:
      yield from _undrawable(config, trained)
    if evaluates and config.evaluation.split is not None:
      yield from _too_few_evaluated(config)
  except ValueError as error:
    yield _with_field(config, str(error))


def _harness(
  config: ml_collections.ConfigDict, *, has_harness: bool
) -> Iterator[str]:
  """Yields problems of an environment whose episodes a harness plays."""
  command = envs.harness(config.env.name)
  if command and not has_harness:
    yield (
      f'env.name={config.env.name}: a harness brings its episodes; use '
      f'{command} instead of this command'
    )
  elif command and config.env.get('max_steps') is None:
    yield (
      'env.max_steps=None: a harness could play an episode without end; must '
      'be an integer of at least 1'
    )


def _usable_tasks(
  config: ml_collections.ConfigDict, split: str
) -> tasks.CheckedTasks:
  """Returns the tasks of a split; raises ValueError if they are unusable."""
  listed = list_tasks(config, split)
  if not len(listed):
    raise ValueError(f'split {split} has no tasks; must have at least one')
  listed.task_type(0)  # Raises an error if it is unusable.
  return listed


def _undrawable(
  config: ml_collections.ConfigDict, listed: tasks.CheckedTasks
) -> Iterator[str]:
  """Yields a problem if no iteration can draw its tasks."""
  options = tasks.Options(**config.tasks)
  groups, seed = config.rollout.groups, config.seed
  try:
    tasks.make(options, 'train', listed, groups, seed).at(0)
  except ValueError as error:
    yield _with_field(config, str(error))


def _too_few_evaluated(config: ml_collections.ConfigDict) -> Iterator[str]:
  split, wanted = config.evaluation.split, config.evaluation.num_tasks
  available = len(_usable_tasks(config, split))
  if available < wanted:
    yield (
      f'evaluation.num_tasks={wanted}: split {split} has {available} tasks; '
      'must be at most that, or 0 for all'
    )


def _with_field(config: ml_collections.ConfigDict, text: str) -> str:
  """Returns an error message of an environment, prefixed with the field."""
  if text.startswith(f'split={config.evaluation.split}:'):
    return f'evaluation.{text}'
  if text.startswith(('env.', 'rollout.', 'tasks.')):
    return text
  field = 'data_dir' if config.env.get('data_dir') else 'name'
  return f'env.{field}={config.env[field]}: {text}'


__getattr__ = deprecated.names(
  __name__,
  {
    'check_resume': 'gigpo_jax.run.run_config:check_resume',
    'check_workdir': 'gigpo_jax.run.run_config:check_workdir',
    'model_directory': 'gigpo_jax.run.model_check:model_directory',
    'save': 'gigpo_jax.run.run_config:save',
  },
)
