"""A tiny model for tests of the sampler."""

import functools

import jax
import numpy as np
import reference

from gigpo_jax.models import qwen

CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  dtype='float32',
  remat='none',
)


@functools.cache
def params() -> dict:
  """Returns parameters with which samples depend on all earlier tokens.

  Their distributions are neither flat nor spikes. With the scale of a new
  network, the last token alone decides, and a wrong cache changes no sample.
  """
  random = reference.init(CONFIG, jax.random.key(0))
  layers = dict(random['layers'])
  layers['attention'] = {k: 10 * x for k, x in layers['attention'].items()}
  return random | {'embed': 12 * random['embed'], 'layers': layers}


def enumerate_rows(slots: tuple, first: int) -> tuple:
  """Returns slots with the numbers from `first` on as their states."""
  cache, state_BX = slots
  numbers = first + np.arange(len(state_BX), dtype=np.int32)
  states = np.tile(numbers[:, None], state_BX.shape[1])
  return cache, jax.device_put(states, state_BX.sharding)
