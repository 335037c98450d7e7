"""GRPO (arXiv:2402.03300): GiGPO that compares whole episodes only."""

from gigpo_jax.algorithms import gigpo


def make(step_weight: float = 0.0, **kwargs) -> gigpo.GiGPO:
  """Returns GiGPO with a step weight of 0, whatever the config's is."""
  del step_weight
  return gigpo.GiGPO(step_weight=0.0, **kwargs)
