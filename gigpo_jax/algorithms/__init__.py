"""Algorithms by name: from rows to one advantage a row.

A module of the registry has `make(**kwargs)`, which returns an `Algorithm`.
To add one: a file here and a line below.
"""

import importlib
from typing import Protocol

import numpy as np

from gigpo_jax import batch

REGISTRY = {
  'gigpo': 'gigpo_jax.algorithms.gigpo',
  'grpo': 'gigpo_jax.algorithms.grpo',
}


class Algorithm(Protocol):
  """How good each row was."""

  def advantages(self, rows: batch.Rows) -> tuple[np.ndarray, dict[str, float]]:
    """Returns an advantage a row, [R] float32, and metrics by name."""


def make(name: str, **kwargs) -> Algorithm:
  """Returns an algorithm of the registry.

  Raises:
    ValueError: if the name is unknown, or the algorithm refuses an option.
  """
  if name not in REGISTRY:
    raise ValueError(
      f'algorithm.name={name}: unknown; must be one of {", ".join(REGISTRY)}'
    )
  return importlib.import_module(REGISTRY[name]).make(**kwargs)
