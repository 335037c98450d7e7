"""Variants of experiments: what the words after the colon change.

`--config=configs/alfworld.py:tiny,grpo` has the variants `tiny` and `grpo`: a
size of the config file and one of CHANGES. `configs.sizes` has functions for
sizes.
"""

import ast
import dataclasses
import difflib
import importlib
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_collections

from configs import base, other_trainers

# What to use instead of words that are no variants.
_HINTS = {
  base.DEFAULT_ALGORITHM: f'{base.DEFAULT_ALGORITHM} is the default',
  **other_trainers.METHODS,
  **dict.fromkeys(
    ('1.7b', '3b', '4b', '8b', '14b', '32b'),
    'a size of a pretrained model is that of --config.model.path',
  ),
}

# Changes an experiment in place.
Change = Callable[[ml_collections.ConfigDict], None]


def make(
  file: str,
  arg: str,
  full_size: Callable[[], ml_collections.ConfigDict],
  sizes: Mapping[str, Sequence[Change]],
  own: Mapping[str, Change] | None = None,
) -> ml_collections.ConfigDict:
  """Returns the experiment of a config file for some variants.

  Args:
    file: path of the config file.
    arg: variants, joined by commas: at most one of `sizes`, and any of CHANGES
      and `own`.
    full_size: returns the experiment, to which the other functions apply.
    sizes: the functions that make each size, in order; the first size is the
      default.
    own: further variants, which come last, in this order.

  Raises:
    ValueError: if `arg` contains an unknown variant, two sizes, or variants
      that exclude each other.
  """
  own = own or {}
  size_name, changes = parse(
    arg,
    pathlib.Path(file).stem,
    sizes=tuple(sizes),
    changes=(*CHANGES, *own),
  )
  size_name = size_name or next(iter(sizes), '')
  config = full_size()
  config.variant = ','.join(word for word in (size_name, *changes) if word)
  for change in sizes.get(size_name, ()):
    change(config)
  apply(config, [change for change in changes if change not in own])
  for change in changes:
    if change in own:
      own[change](config)
  return config


def size(config: ml_collections.ConfigDict) -> str:
  """Returns the size that an experiment was made for."""
  return config.variant.partition(',')[0]


def parse(
  arg: str, name: str, *, sizes: Sequence[str], changes: Sequence[str]
) -> tuple[str, list[str]]:
  """Returns (size or '', other variants) of `--config=configs/NAME.py:ARG`.

  Args:
    arg: variants, joined by commas.
    name: name of the config file, for errors.
    sizes: accepted sizes.
    changes: accepted other variants.

  Raises:
    ValueError: if `arg` contains an unknown variant or two sizes.
  """
  variants = [word.strip() for word in arg.split(',') if word.strip()]
  known = (*sizes, *changes)
  unknown = [v for v in variants if v not in known]
  chosen = [v for v in variants if v in sizes]
  if unknown or len(chosen) > 1:
    near = [m for v in unknown for m in difflib.get_close_matches(v, known, 1)]
    hint = f'did you mean {", ".join(near)}? ' if near else ''
    hint = next((f'{_HINTS[v]}; ' for v in unknown if v in _HINTS), hint)
    problem = (
      f'unknown {", ".join(unknown)}' if unknown else 'more than one size'
    )
    accepted = [f'at most one of {", ".join(sizes)}'] if sizes else []
    accepted += [f'{", ".join(changes)}, joined by commas'] if changes else []
    raise ValueError(
      f'--config=configs/{name}.py:{arg}: {problem}; {hint}accepts '
      f'{" and ".join(accepted)}'
    )
  return ''.join(chosen), [b for b in changes if b in variants]


def _registered(folder: str) -> dict[str, str]:
  """Returns the module of each plug-in of a folder, by name; imports none."""
  path = pathlib.Path(__file__).parents[1] / f'gigpo_jax/{folder}/__init__.py'
  for node in ast.parse(path.read_text(encoding='utf-8')).body:
    if isinstance(node, ast.Assign):
      if ast.unparse(node.targets[0]) == 'REGISTRY':
        return ast.literal_eval(node.value)
  raise LookupError(f'{path}: no REGISTRY')


_MODULES = _registered('algorithms')
# Plug-ins that are added to a chain: (section, field) of their names.
_CHAINS = {
  ('algorithm', 'modulators'): _registered('modulators'),
  ('filter', 'select'): _registered('selectors'),
}
# Variants of every experiment: algorithms, presets, adapters and plug-ins.
ALGORITHMS = tuple(sorted(_MODULES.keys() - {base.DEFAULT_ALGORITHM}))
PRESETS = ('paper', 'reference_code', 'sampo')
PLUGINS = tuple(name for modules in _CHAINS.values() for name in modules)
CHANGES = (*PRESETS, *ALGORITHMS, 'lora', *PLUGINS)


def apply(config: ml_collections.ConfigDict, changes: Sequence[str]) -> None:
  """Applies variants to a config.

  Args:
    config: the experiment, changed in place.
    changes: names from CHANGES.

  Raises:
    ValueError: if there are two algorithms or two presets, or if
      `reference_code` is combined with an algorithm that the released code
      does not have.
  """
  for names, category in ((ALGORITHMS, 'algorithm'), (PRESETS, 'preset')):
    chosen = [change for change in changes if change in names]
    if len(chosen) > 1:
      raise ValueError(
        f'--config=...:{",".join(chosen)}: more than one {category}; '
        'must be at most one'
      )
  # Presets depend on the algorithm, whose own changes are applied last.
  for change in changes:
    if change in ALGORITHMS:
      config.algorithm.name = change
  for change in changes:
    if change in ALGORITHMS:
      use_algorithm(config, change)
    elif change in PLUGINS:
      use_plugin(config, change)
    else:
      {
        'paper': use_paper,
        'reference_code': use_reference_code,
        'sampo': use_sampo,
        'lora': use_adapters,
      }[change](config)


def use_algorithm(config: ml_collections.ConfigDict, name: str) -> None:
  """Selects another algorithm; the number of episodes stays the same."""
  config.algorithm.name = name
  module = _algorithm(name)
  # Options of the algorithm that `get_config` does not list.
  for field in dataclasses.fields(module.Algorithm):
    if field.init and field.name not in config.algorithm:
      config.algorithm[field.name] = field.default
  _change(config, getattr(module, 'PRESETS', {}).get(name, {}))


def use_plugin(config: ml_collections.ConfigDict, name: str) -> None:
  """Adds a modulator or a selector to its chain."""
  for (section, field), modules in _CHAINS.items():
    if name in modules:
      config[section][field] = (*config[section][field], name)
      module = importlib.import_module(modules[name])
      _change(config, getattr(module, 'PRESETS', {}).get(name, {}))


def unapplied(
  config: ml_collections.ConfigDict,
) -> Iterator[tuple[str, str, object, object]]:
  """Yields fields that differ from the presets of algorithm and plug-ins.

  These are set by a variant, such as `:g2po`, and not by a field, such as
  `algorithm.name=g2po`.

  Yields:
    (variant, field, the config's value, the variant's value).
  """
  for name, field, preset in _presets(config):
    # An environment may lack a field of `env`.
    values, key = _section(config, field)
    if key in values and not callable(preset) and values[key] != preset:
      yield name, field, values[key], preset


def preset_fields(config: ml_collections.ConfigDict) -> set[str]:
  """Returns the fields that the presets of algorithm and plug-ins set."""
  return {field for _, field, _ in _presets(config)}


def _presets(
  config: ml_collections.ConfigDict,
) -> Iterator[tuple[str, str, object]]:
  """Yields (variant, field, value) of the presets of all plug-ins."""
  modules = {config.algorithm.name: _algorithm(config.algorithm.name)}
  for (section, field), registered in _CHAINS.items():
    for name in config[section][field]:
      if name in registered:
        modules[name] = importlib.import_module(registered[name])
  for name, module in modules.items():
    for field, preset in getattr(module, 'PRESETS', {}).get(name, {}).items():
      yield name, field, preset


def released() -> tuple[str, ...]:
  """Returns the algorithms of the paper's released code."""
  return tuple(
    name
    for name in sorted(_MODULES)
    if 'reference_code' in getattr(_algorithm(name), 'PRESETS', {})
  )


def _algorithm(name: str) -> types.ModuleType:
  # Imported by name and on use: configs do not depend on the trainer.
  return importlib.import_module(_MODULES.get(name, name))


def _section(
  config: ml_collections.ConfigDict, field: str
) -> tuple[ml_collections.ConfigDict, str]:
  """Returns the section of a field, and the field's name in it."""
  section, _, name = field.rpartition('.')
  return config[section] if section else config, name


def _change(
  config: ml_collections.ConfigDict, preset: Mapping[str, object]
) -> None:
  """Sets fields; a function gets the current value and returns the new value.

  A preset that changes the size of a group keeps the number of episodes. A
  field of `env` is for the environments that have it.
  """
  rollout = config.rollout
  episodes = rollout.groups * rollout.episodes_per_group
  for field, value in preset.items():
    values, name = _section(config, field)
    if field.startswith('env.') and name not in values:
      continue
    values[name] = value(values[name]) if callable(value) else value
  rollout.groups = episodes // rollout.episodes_per_group


def _change_environment(
  config: ml_collections.ConfigDict, variant: str
) -> None:
  """Applies a variant's changes for the config's environment."""
  # Imported on use, because only some variants need it.
  import envs

  _change(config, envs.presets(config.env.name).get(variant, {}))


def use_paper(config: ml_collections.ConfigDict) -> None:
  """Drops the entropy bonus, which the paper does not have."""
  config.loss.entropy_weight = 0.0


def use_reference_code(config: ml_collections.ConfigDict) -> None:
  """Follows the released code where it differs from the paper, for comparison.

  Raises:
    ValueError: if the released code does not have the config's algorithm.
  """
  name = config.algorithm.name
  presets = getattr(_algorithm(name), 'PRESETS', {})
  if 'reference_code' not in presets:
    raise ValueError(
      f'--config=...:reference_code,{name}: the released code has no {name}; '
      f'reference_code accepts {", ".join(released())}'
    )
  _change(config, presets['reference_code'])
  config.loss.dual_clip = 3.0
  config.loss.kl_clamp = 10.0
  _change_environment(config, 'reference_code')


def use_sampo(config: ml_collections.ConfigDict) -> None:
  """Selects SAMPO, the best of one controlled study (arXiv:2602.21534).

  The study reports 92.7 % success on ALFWorld, GiGPO 81.1 %, GRPO 62.4 %.
  """
  _change_environment(config, 'sampo')
  config.loss.ratio_level = 'row'
  config.loss.clip_epsilon = 3e-3
  config.loss.clip_epsilon_high = 4e-3
  config.loss.aggregation = 'sequence_mean'
  config.filter.drop_zero_variance = True
  config.filter.warmup_iterations = 10


def use_adapters(config: ml_collections.ConfigDict) -> None:
  """Trains low-rank adapters at a multiple of the learning rate."""
  config.lora.rank = 32
  # Merged into bfloat16 matrices, small adapters would be rounded away.
  config.rollout.weights = 'adapters'
  # The policies in float32 are tiny: rank 32 is a quarter of their width or
  # more. At ten times the rate, two agents diverge (docs/environment.md).
  tiny = config.model.dtype == 'float32'
  config.optimizer.learning_rate *= 3 if tiny else 10


def use_conversation(config: ml_collections.ConfigDict) -> None:
  """Makes each episode one growing conversation."""
  config.env.context = 'conversation'
  config.rollout.prompt_overflow = 'end'
  config.rollout.reuse_cache = 'prompts'
  config.learner.share_prompts = True
