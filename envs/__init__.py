"""The environments, by name. Nothing is imported before it is asked for."""

import importlib
from typing import Any

from envs import base

# name: module that holds `Env` (the environment) and `tasks(split, **kwargs)`.
REGISTRY = {
  'alfworld': 'envs.alfworld.env',
  'toy': 'envs.toy',
  'webshop': 'envs.webshop.env',
}


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
