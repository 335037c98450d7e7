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


def num_active_parameters(config: qwen.QwenConfig) -> int:
  """Returns how many parameters a token is multiplied by: of a few experts."""
  if not config.num_experts:
    return num_parameters(config)
  one = 3 * config.hidden_size * config.intermediate_size
  idle = config.num_experts - config.experts_per_token
  return num_parameters(config) - config.num_layers * idle * one
