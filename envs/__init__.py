"""The environments, by name. Nothing is imported before it is asked for."""

import importlib
import os
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
  if name not in REGISTRY:
    known = ', '.join(sorted(REGISTRY))
    raise ValueError(f'env.name={name}: unknown environment; known: {known}')
  return importlib.import_module(REGISTRY[name])


def make(name: str, **kwargs: Any) -> base.Env:
  """Returns a new environment instance."""
  return _module(name).Env(**kwargs)


def tasks(name: str, split: str, **kwargs: Any) -> base.TaskInfo:
  """Returns the tasks of a split; takes the same kwargs as `make`."""
  return _module(name).tasks(split, **kwargs)
