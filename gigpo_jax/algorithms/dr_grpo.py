"""Dr. GRPO (arXiv:2503.20783): GRPO without the division by the deviation.

Its loss divides the sum over a response's tokens by a constant; set
loss.aggregation=fixed_length.
"""

import dataclasses

from gigpo_jax.algorithms import gigpo


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A = E - mean, over the episodes of a group."""

  step_weight: float = dataclasses.field(default=0.0, init=False)
  norm: str = dataclasses.field(default='mean', init=False)
