"""RLOO (arXiv:2402.14740): the mean of the other episodes as baseline.

E is the return of an episode, the undiscounted sum of its rewards. N is the
number of episodes in a group.
"""

import dataclasses

from gigpo_jax.algorithms import grpo

PRESETS = {'reference_code': grpo.PRESETS['reference_code']}


@dataclasses.dataclass(frozen=True)
class Algorithm(grpo.Algorithm):
  """A = E - mean of the group's other episodes.

  This is (E - mean) N / (N - 1).
  """

  norm: str = dataclasses.field(default='leave_one_out', init=False)
