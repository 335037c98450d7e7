"""Slow reference implementations of optimized computations."""

import functools

import jax
import jax.numpy as jnp

from gigpo_jax.models import parameters, qwen


@functools.partial(jax.jit, static_argnums=0)
def init(config: qwen.QwenConfig, key: jax.Array) -> dict:
  """Returns random parameters, computed by a single program."""
  return parameters.init(config, key)


def hidden_states(config: qwen.QwenConfig, params: dict, tokens, **kwargs):
  """Returns hidden states, computed by a single program.

  Traced at every call, because tests change constants of modules.
  """
  run = jax.jit(functools.partial(qwen.hidden_states, config))
  return run(params, tokens, **kwargs)


def logits(config: qwen.QwenConfig, params: dict, hidden) -> jax.Array:
  """Returns the logits of hidden states, computed by a single program."""
  return jax.jit(functools.partial(qwen.logits, config))(params, hidden)


def prefill(config: qwen.QwenConfig, params: dict, tokens, **kwargs) -> tuple:
  """Returns the cache of prompts, computed by a single program."""
  run = jax.jit(functools.partial(qwen.prefill, config))
  return run(params, tokens, **kwargs)


@functools.partial(
  jax.jit, static_argnames=('config', 'max_completion', 'temperature')
)
def completion_log_probs(
  config: qwen.QwenConfig,
  params: dict,
  tokens_BL: jax.Array,
  prompt_lengths_B: jax.Array,
  *,
  max_completion: int,
  temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probs and entropies of the completions, float32 [B, C] both.

  Rows are computed separately, without packing.

  Args:
    config: shape of the network.
    params: parameters of the network.
    tokens_BL: prompt and completion, contiguous from position 0.
    prompt_lengths_B: number of prompt tokens.
    max_completion: C; outputs past a row's completion are meaningless.
    temperature: sampling temperature.
  """
  hidden_BLD = qwen.hidden_states(config, params, tokens_BL)
  # The hidden state at the preceding token predicts completion token c.
  index_BC = prompt_lengths_B[:, None] - 1 + jnp.arange(max_completion)
  index_BC = jnp.clip(index_BC, 0, tokens_BL.shape[1] - 2)
  hidden_BCD = jnp.take_along_axis(hidden_BLD, index_BC[..., None], axis=1)
  targets_BC = jnp.take_along_axis(tokens_BL, index_BC + 1, axis=1)
  return qwen.token_log_probs(
    config, params, hidden_BCD, targets_BC, temperature=temperature
  )
