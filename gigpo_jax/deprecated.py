"""Names of the previous release, which work with a warning in this release.

    # At the end of a module whose public names changed:
    __getattr__ = deprecated.names(__name__, {'old_name': 'module:new_name'})

FIELDS lists renamed config fields. Old fields are accepted on the command line,
in config files, in sweeps and in the config.json of a run. METRICS lists
renamed metrics, which metrics.jsonl and tables of sweeps may have.
"""

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import ml_collections

# Old config field: new field.
FIELDS = {
  'filter.without_spread': 'filter.drop_zero_variance',
  'loss.corridor_weight': 'loss.entropy_band.weight',
  'loss.corridor_low': 'loss.entropy_band.low',
  'loss.corridor_high': 'loss.entropy_band.high',
  'loss.corridor_decay': 'loss.entropy_band.decay',
}
# Old metric: new metric. Files with old metrics are read without a warning.
METRICS = {
  'advantage/dear_share': 'advantage/costlier_mode_share',
  'advantage/groups_without_spread': 'advantage/zero_variance_groups',
  'filter/groups_with_spread_share': 'filter/nonzero_variance_share',
  'time/credit_secs': 'time/advantages_secs',
}


class RenamedWarning(DeprecationWarning):
  """An old name was used."""


def warn(old: str, new: str, *, stacklevel: int = 3) -> None:
  """Warns that an old name was used; by default of the caller's caller."""
  warnings.warn(
    f'{old} is deprecated and is removed in the next release; use {new}',
    RenamedWarning,
    stacklevel=stacklevel,
  )


def show_warnings() -> None:
  """Shows the user each warning about an old name once, in one line."""
  warnings.filterwarnings('once', category=RenamedWarning)
  show = warnings.showwarning

  def show_line(message, category, *args, **kwargs):
    if issubclass(category, RenamedWarning):
      sys.stderr.write(f'{message}\n')
    else:
      show(message, category, *args, **kwargs)

  warnings.showwarning = show_line


def names(
  module: str,
  moved: Mapping[str, str],
  parameters: Mapping[str, Mapping[str, str]] | None = None,
) -> Callable[[str], Any]:
  """Returns the `__getattr__` of a module with renamed public names.

  Args:
    module: `__name__` of the module.
    moved: old name -> `module:name`, or a name in the same module.
    parameters: old name -> {old parameter: new parameter}.
  """

  def get(name: str) -> Any:
    if name not in moved:
      raise AttributeError(f'module {module!r} has no attribute {name!r}')
    path, _, new = moved[name].rpartition(':')
    path = path or module
    warn(f'{module}.{name}', f'{path}.{new}')
    value = getattr(importlib.import_module(path), new)
    renamed_parameters = (parameters or {}).get(name)
    if not renamed_parameters:
      return value

    @functools.wraps(value)
    def call(*args, **kwargs):
      return value(
        *args, **{renamed_parameters.get(k, k): v for k, v in kwargs.items()}
      )

    return call

  return get


def method(old: str, new: str) -> Callable:
  """Returns a method that calls another one and warns.

  Args:
    old: old name, for the warning, such as 'Class.name'.
    new: name of the method to call.
  """

  def call(self, *args, **kwargs):
    warn(old, new)
    return getattr(self, new)(*args, **kwargs)

  return call


def attribute(old: str, new: str) -> property:
  """Returns a property that reads another attribute and warns."""

  def read(self):
    warn(old, new)
    return getattr(self, new)

  return property(read)


def renamed(fields: Mapping[str, Any], config: Mapping) -> dict[str, Any]:
  """Returns fields, by dotted names, under the names that a config has.

  Args:
    fields: values or flags by field.
    config: the config; an old field that it has keeps its name.
  """
  return {_new_name(field, config): value for field, value in fields.items()}


def renamed_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns stored metrics under their new names."""
  return {METRICS.get(name, name): value for name, value in values.items()}


def flag(argument: str, config: Mapping) -> str:
  """Returns a command-line argument, with a new field instead of an old one."""
  match = re.fullmatch(r'(--?config\.)([\w.]+)(.*)', argument, re.DOTALL)
  if not match:
    return argument
  start, field, rest = match.groups()
  return f'{start}{_new_name(field, config)}{rest}'


def update(config: Any, given: Mapping[str, Any] | None = None) -> None:
  """Moves the values of old fields of a config file to the new fields.

  Args:
    config: a ConfigDict, changed in place.
    given: fields set on the command line, which override the config file.
  """
  for old, new in FIELDS.items():
    if _has(config, old) and _has(config, new):
      warn(old, new)
      with config.unlocked():
        _move(config, old, None if new in (given or ()) else new)


# Defaults of older releases and of this one, which differ in speed, memory and
# rounding only.
DEFAULTS = {'model.decode_attention': ('xla', 'auto')}
# Defaults with equal results. In a config of this release, which has the field
# _NEW_FIELD, the old default is a choice with another result.
_OLDER_DEFAULTS = {'algorithm.episode_weight': (0.0, None)}
_NEW_FIELD = 'algorithm.step_lambda'


def update_stored(stored: dict, config: Mapping) -> None:
  """Updates fields and defaults of a stored config, without warnings.

  Args:
    stored: content of a config.json, changed in place.
    config: the current config.
  """
  for old, new in FIELDS.items():
    if _has(stored, old) and _has(config, new):
      _move(stored, old, new)
  if _has(stored, 'model.files'):  # Now among the inputs.
    del stored['model']['files']
  older = {} if _has(stored, _NEW_FIELD) else _OLDER_DEFAULTS
  for field, defaults in (DEFAULTS | older).items():
    section, name = field.split('.')
    if not (_has(stored, field) and _has(config, field)):
      continue
    if (stored[section][name], config[section][name]) == defaults:
      stored[section][name] = defaults[1]


def _new_name(field: str, config: Mapping) -> str:
  new = FIELDS.get(field)
  if new is None or _has(config, field) or not _has(config, new):
    return field
  warn(field, new, stacklevel=4)
  return new


def _has(config: Any, field: str) -> bool:
  for name in field.split('.'):
    is_section = isinstance(config, Mapping | ml_collections.ConfigDict)
    if not is_section or name not in config:
      return False
    config = config[name]
  return True


def _move(config: MutableMapping, old: str, new: str | None) -> None:
  """Deletes a field, after copying its value to the new field, if any."""
  *sections, name = old.split('.')
  section = functools.reduce(lambda part, key: part[key], sections, config)
  value = section[name]
  del section[name]
  if new is not None:
    *sections, name = new.split('.')
    for key in sections:
      if key not in config:
        config[key] = {}
      config = config[key]
    config[name] = value
