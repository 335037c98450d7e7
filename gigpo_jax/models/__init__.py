"""Language models, and counts of their parameters."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gigpo_jax import options
from gigpo_jax.models import (
  attention,
  decode_attention,
  layer_runs,
  parameters,
  qwen,
  qwen_config,
)


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the model and its arithmetic, `config.model`."""

  path: str | None = None
  dtype: str = options.choice('bfloat16', qwen_config.DTYPES)
  remat: str = options.choice('auto', ('auto', *qwen_config.REMATS))
  attention: str = options.choice('auto', ('auto', *attention.IMPLEMENTATIONS))
  decode_attention: str = options.choice(
    'auto', ('auto', *decode_attention.IMPLEMENTATIONS)
  )
  enable_thinking: bool = False

  def __post_init__(self):
    options.check(self)
    for field, kernel in (
      ('attention', 'cudnn'),
      ('decode_attention', 'paged'),
    ):
      if getattr(self, field) == kernel and self.dtype == 'float32':
        raise ValueError(
          f'{field}={kernel}: computes in bfloat16; needs model.dtype=bfloat16'
        )


def shapes(config: qwen.QwenConfig) -> dict[str, Any]:
  """Returns a jax.ShapeDtypeStruct for each parameter of a network."""
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    parameters.shapes(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def num_parameters(config: qwen.QwenConfig) -> int:
  """Returns the number of parameters of a network, from its shape alone."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes(config)))


def num_head_parameters(config: qwen.QwenConfig) -> int:
  """Returns the number of parameters of the matrix that makes logits."""
  return config.vocab_size * config.hidden_size


def num_body_parameters(config: qwen.QwenConfig) -> int:
  """Returns the number of active parameters without the vocabulary's."""
  tables = 1 if config.tie_embeddings else 2
  return num_active_parameters(config) - tables * num_head_parameters(config)


def num_active_parameters(config: qwen.QwenConfig) -> int:
  """Returns the number of parameters that process one token.

  In a mixture of experts, these include only the token's own experts.
  """
  if not config.num_experts:
    return num_parameters(config)
  expert_size = 3 * config.hidden_size * config.intermediate_size
  idle_experts = config.num_experts - config.experts_per_token
  return num_parameters(config) - (
    len(layer_runs.layers_of(config, 'experts')) * idle_experts * expert_size
  )
