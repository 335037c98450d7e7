"""Algorithms by name: from rows to advantages.

Each is a module of this folder with a class `Algorithm`, a frozen dataclass.
Its fields are the options that it has, fields of `config.algorithm` of the
same names. To add one: a file here, or a module of another project, which is
named as Python finds it.
"""

import dataclasses
import importlib
import pathlib
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float

import envs
from gigpo_jax import advantages as advantages_lib
from gigpo_jax import batch

NAMES = tuple(
  sorted(
    path.stem
    for path in pathlib.Path(__file__).parent.glob('*.py')
    if path.stem != '__init__'
  )
)


class Credit(NamedTuple):
  """How good what was done was.

  Attributes:
    advantages: of each row, or of each of its tokens; 0 for padding.
    metrics: by name.
    value_targets: what a critic is to learn; None without one.
    links: which places it is to learn that of; None: of all tokens.
    parts: what the advantages are made of, where they have such parts.
  """

  advantages: Float[np.ndarray, ' R'] | Float[np.ndarray, 'R C']
  metrics: dict[str, float]
  value_targets: Float[np.ndarray, 'R C'] | None = None
  links: Bool[np.ndarray, 'R C'] | None = None
  parts: advantages_lib.Parts | None = None


class Algorithm(Protocol):
  """How good each row was.

  Attributes:
    needs_values: whether it takes a critic's values.
    needs_group: whether it compares episodes of a task, and so needs several.
  """

  needs_values: bool
  needs_group: bool

  def credit(
    self, rows: batch.Rows, values: Float[np.ndarray, 'R C'] | None = None
  ) -> Credit:
    """Returns advantages of rows, with the critic's values where needed."""


def make(name: str, **options) -> Algorithm:
  """Returns an algorithm.

  Args:
    name: one of NAMES, or a module with a class `Algorithm`.
    **options: those that it does not have are passed over.

  Raises:
    ValueError: if the name is unknown, or the algorithm refuses an option.
  """
  if name not in NAMES and not envs.can_import(name):
    raise ValueError(
      f'algorithm.name={name}: unknown; must be one of {", ".join(NAMES)}, or '
      'a module that Python finds'
    )
  path = f'{__name__}.{name}' if name in NAMES else name
  module = importlib.import_module(path)
  if not hasattr(module, 'Algorithm'):
    raise ValueError(
      f'algorithm.name={name}: the module has no Algorithm; must have one'
    )
  known = defaults(module.Algorithm)
  return module.Algorithm(**{k: v for k, v in options.items() if k in known})


def defaults(algorithm: type[Algorithm] | Algorithm) -> dict[str, object]:
  """Returns the options that an algorithm has."""
  fields = dataclasses.fields(algorithm)
  return {field.name: field.default for field in fields if field.init}
