"""Slow and plain ways to what the project computes otherwise."""

import jax
import jax.numpy as jnp

from gigpo_jax.models import qwen


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

  Each row by itself, not packed with others.

  Args:
    config: shape of the network.
    params: its parameters.
    tokens_BL: prompt and completion, contiguous from position 0.
    prompt_lengths_B: tokens of the prompt.
    max_completion: C; positions past a row's completion mean nothing.
    temperature: of the distribution that was sampled.
  """
  hidden_BLD = qwen.hidden_states(config, params, tokens_BL)
  # The state before completion token c is that of the token ahead of it.
  index_BC = prompt_lengths_B[:, None] - 1 + jnp.arange(max_completion)
  index_BC = jnp.clip(index_BC, 0, tokens_BL.shape[1] - 2)
  hidden_BCD = jnp.take_along_axis(hidden_BLD, index_BC[..., None], axis=1)
  targets_BC = jnp.take_along_axis(tokens_BL, index_BC + 1, axis=1)
  return qwen.token_log_probs(
    config, params, hidden_BCD, targets_BC, temperature=temperature
  )
