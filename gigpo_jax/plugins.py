"""Chains of small plug-ins: modulators of advantages and selectors of rows.

A folder such as gigpo_jax/modulators holds one module per plug-in, and its
REGISTRY maps names to modules. A module defines a frozen dataclass. Its fields
are its options and have the names of fields of a section of the config. A
module may also define PRESETS and `conflicts`, as an algorithm does. A selector
may have a method `metrics` with the arguments of a call. A plug-in of another
project is 'module:function', or 'module:Class' for one with options.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

import envs
from envs import checks
from gigpo_jax import batch
from gigpo_jax import options as options_lib

# Metrics that no plug-in may overwrite: names, and beginnings of names.
_TRAINER_METRICS = ('iteration', 'loss/total')
_TRAINER_GROUPS = ('train/', 'eval/', 'time/', 'spent/', 'update/', 'rollout/')

# Outputs of the learner that a plug-in can need; also NAME@X for all but
# `prompt_log_probs`.
OUTPUTS = ('log_probs', 'entropies', 'prompt_log_probs', 'feature_squares')


@dataclasses.dataclass(frozen=True)
class Signals:
  """What plug-ins read besides advantages and rows.

  Attributes:
    outputs: the learner's outputs before the update, by name; the plug-ins of
      a chain list the names that they need (`Learner.signals`).
    progress: share of the run's iterations that are done, in [0, 1).
    seed: seed of the run and iteration, for random choices.
    learning_rate: learning rate of the iteration's first update, times the
      step scale of the guards.
    invalid_penalty: what the algorithm subtracts from the reward of an invalid
      response.
    rows: the rows of whole episodes, in the same order as the rows of a call,
      from which earlier selectors may have dropped some; None: the same rows.
  """

  outputs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  progress: float = 0.0
  seed: tuple[int, ...] = (0,)
  learning_rate: float = 0.0
  invalid_penalty: float = 0.0
  rows: batch.Rows | None = None


@dataclasses.dataclass(frozen=True)
class Function:
  """A function of (advantages, rows, signals) as a plug-in without options."""

  function: Callable[..., np.ndarray]

  needs = ()
  needs_group = False

  def __call__(self, *args: Any) -> np.ndarray:
    """Returns the function's result."""
    return self.function(*args)


@dataclasses.dataclass(frozen=True)
class Family:
  """The plug-ins of one chain of a config: modulators or selectors.

  Attributes:
    field: the field of the config with the chain's names.
    registry: module of each plug-in, by name.
    class_name: name of the dataclass in these modules.
  """

  field: str
  registry: Mapping[str, str]
  class_name: str

  @property
  def section(self) -> str:
    """The section of the config with the names and the options."""
    return self.field.partition('.')[0]

  def names(self, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a chain, given the section of the config."""
    return tuple(values[self.field.rpartition('.')[2]])

  def make(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the plug-ins of a chain, in order.

    Args:
      values: the section of the config. A plug-in takes its own options.

    Raises:
      ValueError: if a name is unknown or occurs twice, or an option is wrong.
    """
    names = self.names(values)
    if len(set(names)) < len(names):
      raise ValueError(
        f'{self.field}={names}: names one twice; must be different names'
      )
    return tuple(
      options_lib.make(
        self.find(name),
        values,
        field=f'{self.field}={name}',
        needs=('needs', 'needs_group', '__call__'),
      )
      for name in names
    )

  def options(self, names: Sequence[str] | None = None) -> set[str]:
    """Returns the names of all options of plug-ins; None: of all known ones."""
    names = self.registry if names is None else names
    factories = map(self.find, names)
    return {o for f in factories for o in options_lib.defaults(f)}

  def problems(self, values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each option of a known plug-in with a wrong value."""
    lines = {}
    for name in self.registry:
      lines |= dict.fromkeys(options_lib.problems(self.find(name), values))
    yield from lines

  def conflicts(self, config: ml_collections.ConfigDict) -> Iterator[str]:
    """Yields a line for each option that a plug-in of the chain rejects."""
    values = config[self.section]
    members = config.rollout.episodes_per_group
    for name, plugin in zip(self.names(values), self.make(values), strict=True):
      if plugin.needs_group and members < options_lib.MIN_GROUP:
        yield (
          f'rollout.episodes_per_group={members}: {name} compares the episodes '
          'of a group; must be at least 2'
        )
      needed = {output.partition('@')[0] for output in plugin.needs}
      if unknown := sorted(needed.difference(OUTPUTS)):
        yield (
          f'{self.field}={name}: needs {unknown[0]}; must be of '
          f'{", ".join(OUTPUTS)}'
        )
      module = importlib.import_module(type(plugin).__module__)
      field = f'{self.field}={name}'
      yield from envs.own_lines(module, 'conflicts', config, field)

  def find(self, name: str) -> Callable[..., Any]:
    """Returns what makes a plug-in from its options.

    Raises:
      ValueError: in one line, if the name is unknown.
    """
    path = f'{self.registry.get(name, name)}'
    if name in self.registry:
      path += f':{self.class_name}'
    factory = checks.import_named(
      self.field,
      path,
      accepted=f'of {", ".join(self.registry)}, or module:function',
      takes=('advantages', 'rows', 'signals'),
    )
    if isinstance(factory, type):
      return factory
    return functools.partial(Function, factory)


def check_values(field: str, values: np.ndarray, rows: batch.Rows) -> None:
  """Checks that there is one finite value per row or per completion token.

  Args:
    field: config field that names the code which returned the values.
    values: the values.
    rows: the rows.

  Raises:
    ValueError: in one line, if the shape is another or a value is not finite.
  """
  per_token = rows.completion_mask.shape
  if np.shape(values) not in (per_token, per_token[:1]):
    raise ValueError(
      f'{field}: returned shape {np.shape(values)}; must be {per_token[:1]}, '
      f'one per row, or {per_token}, one per completion token'
    )
  if bad := np.size(values) - np.isfinite(values).sum():
    raise ValueError(
      f'{field}: returned {bad} values that are not finite; must be numbers'
    )


def check_metrics(field: str, values: Mapping[str, float]) -> None:
  """Checks that metrics are numbers under names of their own.

  Args:
    field: config field that names the code which returned the metrics.
    values: the metrics.

  Raises:
    ValueError: in one line, if one is not.
  """
  for name, value in values.items():
    if value is None or isinstance(value, str) or np.ndim(value):
      raise ValueError(
        f'{field}: returned {name}, a {type(value).__name__}; must be a number'
      )
  check_metric_names(field, values)


def check_metric_names(field: str, names: Iterable[str]) -> None:
  """Checks that metrics have names of their own.

  Args:
    field: config field that names the code which returned the metrics.
    names: names of the metrics.

  Raises:
    ValueError: in one line, if one has a name of the trainer.
  """
  for name in names:
    if not isinstance(name, str):
      raise ValueError(
        f'{field}: returned a metric named {name!r}; must be a text'
      )
    if name in _TRAINER_METRICS or name.startswith(_TRAINER_GROUPS):
      raise ValueError(
        f'{field}: returned {name}, a metric of the trainer; must have another '
        'name, such as own/NAME'
      )


def metrics(plugin: Any, *args: Any) -> dict[str, float]:
  """Returns the metrics of a plug-in for the arguments of a call."""
  return plugin.metrics(*args) if hasattr(plugin, 'metrics') else {}


def reads_success(plugin: Any) -> bool:
  """Returns whether an algorithm or a plug-in reads `Rows.success`.

  With several agents, this is the success of the team.
  """
  return getattr(plugin, 'reads_success', False)


def needed_outputs(chain: Sequence[Any]) -> tuple[str, ...]:
  """Returns the learner's outputs that plug-ins need."""
  return tuple(dict.fromkeys(n for plugin in chain for n in plugin.needs))
