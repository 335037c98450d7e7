"""The environments, by name. Nothing is imported before it is asked for.

One of another project goes by the name of its module.
"""

import importlib
import importlib.util
import os
import warnings
from typing import Any

from envs import base

# name: module that holds `Env` (the environment) and `tasks(split, **kwargs)`.
REGISTRY = {
  'alfworld': 'envs.alfworld.env',
  'gymnasium': 'envs.gymnasium_env',
  'search_qa': 'envs.search_qa.env',
  'sokoban': 'envs.sokoban',
  'textarena': 'envs.textarena_env',
  'textworld': 'envs.textworld_games',
  'toy': 'envs.toy',
  'webshop': 'envs.webshop.env',
}

# name: variable of the folder of its official data.
DATA_VARIABLES = {
  'alfworld': 'ALFWORLD_DATA',
  'search_qa': 'SEARCH_QA_DATA',
  'webshop': 'WEBSHOP_DATA',
}
GENERATED = 'generated'


def data_dir(name: str, given: str | None) -> str | None:
  """Returns the folder of an environment's data; '' if nothing names one.

  Args:
    name: of the environment, in DATA_VARIABLES.
    given: the folder, if it is known; 'generated' for none at all, None.
  """
  if given == GENERATED:
    return None
  return given or os.environ.get(DATA_VARIABLES[name], '')


def _module(name: str) -> Any:
  if name in REGISTRY:
    return importlib.import_module(REGISTRY[name])
  if not can_import(name):
    raise ValueError(
      f'env.name={name}: unknown environment; must be one of '
      f'{", ".join(sorted(REGISTRY))}, or a module that Python finds'
    )
  module = importlib.import_module(name)
  for wanted in ('Env', 'tasks'):
    if not hasattr(module, wanted):
      raise ValueError(
        f'env.name={name}: the module has no {wanted}; must have Env and tasks'
      )
  return module


def can_import(name: str) -> bool:
  """Whether there is a module of this name."""
  try:
    return importlib.util.find_spec(name) is not None
  except (ImportError, ValueError):
    return False


def check(name: str) -> None:
  """Raises ValueError, in one line, if there is no such environment."""
  _module(name)


def make(name: str, **kwargs: Any) -> base.Env:
  """Returns a new environment instance."""
  return _module(name).Env(**kwargs)


def tasks(name: str, split: str, **kwargs: Any) -> base.TaskInfo:
  """Returns the tasks of a split; takes the same kwargs as `make`."""
  info = _module(name).tasks(split, **kwargs)
  if not hasattr(info, 'task_type') and hasattr(info, 'kind'):
    warnings.warn(
      f'env.name={name}: the method kind of its tasks is deprecated; rename it '
      'to task_type',
      DeprecationWarning,
      stacklevel=2,
    )
    type(info).task_type = type(info).kind
  return info
