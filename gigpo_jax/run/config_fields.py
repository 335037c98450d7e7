"""Fields of a config: values, changed fields, fields that need other fields."""

import difflib
import functools
import inspect
import itertools
import pathlib
import re
import runpy
from collections.abc import Iterable, Iterator, Set
from typing import Any

import ml_collections

from configs import base, other_trainers

# Folder of the included configs, and how errors name a config's variants.
_CONFIGS = pathlib.Path(base.__file__).resolve().parent
_VARIANTS = re.compile(r'^--config=configs/\w+\.py:')

# Fields that have an effect only if another field has a certain value: (other
# field, accepted value in words, predicate).
_DEPENDENT = {
  'algorithm.similarity_threshold': (
    'algorithm.anchor',
    'similarity',
    lambda anchor: anchor == 'similarity',
  ),
  **dict.fromkeys(
    ('lora.alpha', 'lora.targets', 'lora.agents'),
    ('lora.rank', 'above 0', bool),
  ),
  **dict.fromkeys(
    ('tasks.uniform', 'tasks.diversity_weight'),
    ('tasks.draw', 'uncertain', lambda draw: draw == 'uncertain'),
  ),
  **dict.fromkeys(
    [
      f'reward.{name}'
      for name in ('environment_weight', 'num_workers', 'timeout_secs')
    ],
    ('reward.functions', 'set', bool),
  ),
  'rollout.prefixes': ('rollout.forced_members', 'above 0', bool),
  'reward.kl_estimator': ('reward.kl_weight', 'above 0', bool),
  'reward.overlong_penalty': ('reward.overlong_buffer', 'above 0', bool),
  **dict.fromkeys(
    [
      f'teacher.{name}'
      for name in (
        'warmup_iterations',
        'decay_iterations',
        'loss',
        'token_weight',
        'data',
        'num_episodes',
        'rows',
      )
    ],
    ('teacher.mu_peak', 'above 0', bool),
  ),
  'teacher.mu_valley': ('teacher.decay_iterations', 'above 0', bool),
  'loss.max_log_prob_gap': (
    'loss.old_log_probs',
    'auto',
    lambda old: old == 'auto',
  ),
  **dict.fromkeys(
    ('sft.beta', 'sft.segment_turns'),
    ('sft.loss', 'dpo', lambda loss: loss == 'dpo'),
  ),
  'sft.only_successful': (
    'sft.loss',
    'imitation',
    lambda loss: loss == 'imitation',
  ),
  'sft.rollouts': ('sft.rounds', 'above 0', bool),
  'loss.tis_level': ('loss.tis_clip', 'set', bool),
  'loss.kl_horizon': ('loss.kl_target', 'set', bool),
  'loss.kl_estimator': ('loss.kl_weight', 'above 0', bool),
  **dict.fromkeys(
    ('optimizer.warmup_ratio', 'optimizer.decay', 'optimizer.final_rate'),
    ('optimizer.decay_updates', 'above 0', bool),
  ),
  'tasks.stages': (
    'tasks.draw',
    'stages',
    lambda draw: draw == 'stages',
  ),
  'rollout.forced_members': ('rollout.prefixes', 'set', bool),
  'rollout.max_staleness': ('rollout.carry_over', 'above 0', bool),
  'rollout.earlier_thinking': (
    'env.context',
    'conversation',
    lambda context: context == 'conversation',
  ),
  'rollout.parked_slots': (
    'rollout.reuse_cache',
    'prompts or all',
    lambda reuse: reuse != 'none',
  ),
  **dict.fromkeys(
    ('filter.warmup_iterations', 'filter.max_refills'),
    ('filter.drop_zero_variance', 'True', bool),
  ),
  'guard.shrink_factor': (
    'guard.action',
    'shrink or rollback',
    lambda action: action != 'warn',
  ),
  'guard.max_rollbacks': (
    'guard.action',
    'rollback',
    lambda action: action == 'rollback',
  ),
  **dict.fromkeys(
    [f'loss.entropy_band.{name}' for name in ('low', 'high', 'decay')],
    ('loss.entropy_band.weight', 'above 0', bool),
  ),
}

# Values of a field by its type, for errors.
_TYPES = {
  bool: 'True or False',
  int: 'an integer',
  float: 'a number',
  str: 'a text',
  tuple: 'a tuple, such as "(1, 2)" or "(\'a\', \'b\')"',
}


@functools.cache
def defaults() -> ml_collections.FrozenConfigDict:
  """Returns the fields of configs/base.py."""
  return ml_collections.FrozenConfigDict(base.get_config())


def get(config: ml_collections.ConfigDict, field: str) -> Any:
  """Returns the value of a field such as 'loss.name'; None if it is missing."""
  for name in field.split('.'):
    if name not in config:
      return None
    config = config[name]
  return config


def flatten(config: ml_collections.ConfigDict | dict) -> dict[str, Any]:
  """Returns the values of all fields by name, such as `rollout.groups`."""
  fields = {}
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict | dict):
      fields |= {f'{name}.{k}': v for k, v in flatten(value).items()}
    else:
      fields[name] = value
  return fields


def optional(config: ml_collections.ConfigDict) -> set[str]:
  """Returns the fields that may be None: those that are, here or by default."""
  return {
    field
    for fields in map(flatten, (defaults(), config))
    for field, value in fields.items()
    if value is None
  }


def accepted(config: ml_collections.ConfigDict, field: str) -> str:
  """Returns which values a field has by its type, for errors."""
  *sections, name = field.split('.')
  section = functools.reduce(lambda part, key: part[key], sections, config)
  if isinstance(section[name], ml_collections.ConfigDict):
    return (
      f'set field by field, --config.{field}.NAME=VALUE; its names are '
      f'{", ".join(flatten(section[name]))}'
    )
  own = section.get_type(name)
  return _TYPES.get(own, f'of type {own.__name__}')


def set_value(
  config: ml_collections.ConfigDict, field: str, value: object
) -> None:
  """Sets a field that a config has.

  Raises:
    ValueError: in one line, if the field needs a value of another type.
  """
  must_be = accepted(config, field)
  is_missing = value is None and field not in optional(config)
  # True is an int in Python.
  is_flag = isinstance(value, bool) and must_be in (_TYPES[int], _TYPES[float])
  try:
    if is_missing or is_flag:
      raise TypeError(value)
    config.update_from_flattened_dict({field: value})
  except TypeError as error:
    raise ValueError(
      f'{field}={value!r}: wrong type; must be {must_be}'
    ) from error


def load(
  path: str, variant: str, *, flag: str = ''
) -> ml_collections.ConfigDict:
  """Returns the config of a file.

  Args:
    path: the file.
    variant: the argument of its `get_config`.
    flag: what errors put before the path.

  Raises:
    ValueError: in one line, if the file makes no config.
  """
  try:
    get_config = runpy.run_path(path).get('get_config')
    if get_config is None:
      raise TypeError('the file has no get_config(variant)')
    inspect.signature(get_config).bind(variant)
    config = get_config(variant)
  except ValueError as error:
    if pathlib.Path(path).resolve().parent == _CONFIGS:
      raise
    # `variants.parse` knows the name, not the file.
    text = _VARIANTS.sub(f'{flag}{path}:', str(error))
    raise ValueError(text) from error
  except (Exception, SystemExit) as error:  # A file may raise anything.
    raise ValueError(
      f'{flag}{path}: cannot be loaded ({type(error).__name__}: {error}); must '
      'define get_config(variant), as an experiment in configs/ does'
    ) from error
  problem = ''
  if not isinstance(config, ml_collections.ConfigDict):
    problem = f'a {type(config).__name__}'
  elif missing := [x for x in defaults() if x not in config]:
    problem = f'a config without {missing[0]}'
  if problem:
    raise ValueError(
      f'{flag}{path}: get_config returned {problem}; must return a config that '
      'starts from configs.base.get_config()'
    )
  return config


def near(name: str, config: ml_collections.ConfigDict) -> list[str]:
  """Returns fields that a wrong name may mean, the most likely first."""
  fields = flatten(config)
  if name in fields:
    return [name]
  last = name.rpartition('.')[2]
  names = other_trainers.FIELDS
  meant = [names[last]] if last in names else []
  meant += [x for x in fields if x.rpartition('.')[2] == last]
  # A long section, such as `algorithm`, makes all of its fields similar.
  return meant or [
    field
    for field in difflib.get_close_matches(name, fields, cutoff=0.85)
    if difflib.get_close_matches(last, [field.rpartition('.')[2]])
  ]


def suggest(field: str, config: ml_collections.ConfigDict) -> str:
  """Returns which fields a wrong name may mean; '' if there are none."""
  meant = near(field, config)
  return f'did you mean {", ".join(meant)}?' if meant else ''


def unknown(
  config: ml_collections.ConfigDict, own: Iterable[str]
) -> Iterator[str]:
  """Yields a line for each field that nothing reads.

  Args:
    config: the experiment.
    own: fields and sections that are known, but not in configs/base.py.
  """
  known = flatten(defaults()).keys() | set(own)
  for field, value in flatten(config).items():
    sections = itertools.accumulate(field.split('.'), '{}.{}'.format)
    if known.isdisjoint(sections):
      accepted = suggest(field, defaults()) or (
        'must be one of configs/base.py or an option of your own module'
      )
      yield f'{field}={value}: no such field; {accepted}'


def non_default(
  config: ml_collections.ConfigDict, fields: Iterable[str]
) -> Iterator[tuple[str, object, object]]:
  """Yields (field, value, default) of fields that differ from the default.

  An empty default is `(empty)`, for errors.
  """
  for field in fields:
    value, default = get(config, field), get(defaults(), field)
    if value != default:
      yield field, value, '(empty)' if default == '' else default


def unmet(
  config: ml_collections.ConfigDict, refused: Set[str]
) -> Iterator[str]:
  """Yields a line for each set field without effect that is not `refused`."""
  for field, value, default in non_default(config, _DEPENDENT):
    switch, accepted, is_on = _DEPENDENT[field]
    if field not in refused and not is_on(get(config, switch)):
      yield (
        f'{field}={value}: has no effect; needs {switch} to be {accepted}, or '
        f'must be {default}'
      )
