"""S-GRPO (arXiv:2504.20834): trains on a random subset of a response's tokens.

The first tokens of a response are always trained on, each later one with a
probability. The choice is a function of the seed and the iteration.

# Differs from the paper: its constants were not found; the defaults are this
project's.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import ml_collections
import numpy as np

from gigpo_jax import batch, options, plugins, selectors


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the loss is one of whole rows."""
  yield from selectors.refuse_row_loss(config, 's_grpo')


@dataclasses.dataclass(frozen=True)
class Selector:
  """Keeps the first tokens, and each later one with a probability.

  Attributes:
    early_tokens: number of first tokens that are always kept; not published.
    token_probability: probability of each later token; not published.
  """

  needs: ClassVar[tuple[str, ...]] = ()
  needs_group: ClassVar[bool] = False

  early_tokens: int = options.number(8, low=0)
  token_probability: float = options.number(0.5, low=0, high=1)

  def __post_init__(self):
    options.check(self)
    if self.early_tokens == self.token_probability == 0:
      raise ValueError(
        f'token_probability={self.token_probability}: chooses no token with '
        'early_tokens=0; must be above 0'
      )

  def __call__(
    self, advantages: np.ndarray, rows: batch.Rows, signals: plugins.Signals
  ) -> np.ndarray:
    """Returns True for the chosen tokens."""
    del advantages
    mask = rows.completion_mask
    rng = np.random.Generator(np.random.Philox(list(signals.seed)))
    chosen = rng.random(mask.shape) < self.token_probability
    chosen[:, : self.early_tokens] = True
    return mask & chosen
