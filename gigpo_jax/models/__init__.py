"""The models."""

import math

import jax

from gigpo_jax.models import qwen


def num_parameters(config: qwen.QwenConfig) -> int:
  """Returns the number of parameters, without making them."""
  shapes = jax.tree.leaves(
    qwen.shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  return sum(math.prod(shape) for shape in shapes)
