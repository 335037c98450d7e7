"""Drops responses that reached the token limit (DAPO, arXiv:2503.14476).

"Overlong filtering": the reward of a truncated response says little about it.
TRL calls this mask_truncated_completions.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from gigpo_jax import batch, plugins


@dataclasses.dataclass(frozen=True)
class Selector:
  """Keeps rows whose response ended before the token limit."""

  needs: ClassVar[tuple[str, ...]] = ()
  needs_group: ClassVar[bool] = False

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns True for complete responses."""
    del advantages, signals
    return rows.real & ~rows.truncated
