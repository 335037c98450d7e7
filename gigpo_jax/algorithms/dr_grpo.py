"""Dr. GRPO (arXiv:2503.20783): GRPO without the division by the std.

E is the return of an episode, the undiscounted sum of its rewards. The loss
divides the sum over a response's tokens by a constant; set
loss.aggregation=fixed_length.
"""

import dataclasses
from collections.abc import Iterator

import ml_collections

from gigpo_jax.algorithms import grpo

PRESETS = {'dr_grpo': {'loss.aggregation': 'fixed_length'}}


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the loss is aggregated in another way."""
  if config.loss.aggregation != 'fixed_length':
    yield (
      f'loss.aggregation={config.loss.aggregation}: dr_grpo divides by a '
      'constant; must be fixed_length'
    )


@dataclasses.dataclass(frozen=True)
class Algorithm(grpo.Algorithm):
  """A = E - mean, over the episodes of a group."""

  norm: str = dataclasses.field(default='mean', init=False)
