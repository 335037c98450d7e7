"""gigpo_jax: GiGPO for LLM agents in JAX.

The modules below can be used by themselves, from any loop, without a config.
Each is imported when it is first asked for, so that `import gigpo_jax` neither
takes time nor starts jax: `gigpo_jax.advantages.gigpo(...)`.
"""

import importlib
import os
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from gigpo_jax import (
    advantages,
    algorithms,
    anchors,
    batch,
    env_pool,
    learner,
    losses,
    mesh,
    models,
    optimizer,
    rollout,
    sampler,
    token_batch,
    tokenizer,
    trajectory,
  )

__all__ = [
  'advantages',
  'algorithms',
  'anchors',
  'batch',
  'env_pool',
  'learner',
  'losses',
  'mesh',
  'models',
  'optimizer',
  'rollout',
  'sampler',
  'token_batch',
  'tokenizer',
  'trajectory',
]

# transformers advises at import to install PyTorch; none is needed.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')


def __getattr__(name: str) -> types.ModuleType:
  if name in __all__:
    return importlib.import_module(f'{__name__}.{name}')
  raise AttributeError(f'module {__name__} has no attribute {name}')


def __dir__() -> list[str]:
  return __all__
