"""GRPO (arXiv:2402.03300): GiGPO with the episode advantage only.

E is the return of an episode, the undiscounted sum of its rewards.
"""

import dataclasses

from gigpo_jax.algorithms import gigpo

PRESETS = {'reference_code': gigpo.PRESETS['reference_code']}


@dataclasses.dataclass(frozen=True)
class Algorithm(gigpo.Algorithm):
  """A = (E - mean) / (std + 1e-6) over the episodes of a group."""

  step_weight: float = dataclasses.field(default=0.0, init=False)
  episode_weight: float | None = dataclasses.field(default=None, init=False)
