"""REINFORCE++ with a group mean as baseline (arXiv:2501.03262, section 3).

E is the return of an episode, the undiscounted sum of its rewards.
"""

import dataclasses
from typing import ClassVar

from gigpo_jax.algorithms import reinforce_pp

PRESETS = reinforce_pp.PRESETS


@dataclasses.dataclass(frozen=True)
class Algorithm(reinforce_pp.Algorithm):
  """A = E - mean of the group, whitened over the tokens."""

  needs_group: ClassVar[bool] = True
  baseline: ClassVar[str] = 'group'
