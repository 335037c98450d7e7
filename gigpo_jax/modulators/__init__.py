"""Registry of modulators, which change the advantages of an algorithm.

`algorithm.modulators` names a chain. Each modulator is a pure function of
advantages, rows and signals, and a module with a frozen dataclass `Modulator`;
see `plugins`. To add one, add a module and a line of REGISTRY.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float

from gigpo_jax import batch, plugins
from gigpo_jax.runtime import errors

# name: module that holds `Modulator`.
REGISTRY = {
  'adora': 'gigpo_jax.modulators.adora',
  'dcpo': 'gigpo_jax.modulators.dcpo',
  'dgpo': 'gigpo_jax.modulators.dgpo',
  'egpo': 'gigpo_jax.modulators.egpo',
  'empg': 'gigpo_jax.modulators.empg',
  'progrpo': 'gigpo_jax.modulators.progrpo',
}

FAMILY = plugins.Family('algorithm.modulators', REGISTRY, 'Modulator')


class Modulator(Protocol):
  """Changes advantages.

  Attributes:
    needs: names of outputs of the learner that it reads; see `Learner.signals`.
    needs_group: whether it compares episodes of a task, and so requires at
      least two per group.
  """

  needs: tuple[str, ...]
  needs_group: bool

  def __call__(
    self,
    advantages: Float[np.ndarray, ' R'] | Float[np.ndarray, 'R C'],
    rows: batch.Rows,
    signals: plugins.Signals,
  ) -> Float[np.ndarray, ' R'] | Float[np.ndarray, 'R C']:
    """Returns advantages, one per row or per completion token; 0 for padding.

    Args:
      advantages: those of the algorithm, after the modulators before this one.
      rows: the rows of the iteration.
      signals: the outputs that it needs.
    """


def apply(
  chain: Sequence[Modulator],
  advantages: np.ndarray,
  rows: batch.Rows,
  signals: plugins.Signals,
) -> np.ndarray:
  """Returns the advantages after all modulators, float32."""
  for modulator in chain:
    with errors.show_traceback(FAMILY.field):
      advantages = np.asarray(modulator(advantages, rows, signals), np.float32)
    plugins.check_values(FAMILY.field, advantages, rows)
  return np.asarray(advantages, np.float32)
