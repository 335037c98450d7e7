"""Slow reference implementations of optimized computations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gigpo_jax import mesh, sampler
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


def decode(config, params, cache, tokens_B, positions_B):
  """Decodes one token of each row; returns (logits [B, V], cache)."""
  logits_B1V, cache = qwen.decode(
    config, params, cache, tokens_B[:, None], positions_B[:, None]
  )
  return logits_B1V[:, 0], cache


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


def assert_greedy_equals_generate(
  model, config: qwen.QwenConfig, params, prompts, *, tokens: int, stop_id=None
):
  """Asserts that greedy samples are those of transformers' `generate`.

  Args:
    model: the model of transformers.
    config: shape of our network.
    params: our parameters.
    prompts: token ids of each prompt, at most 16.
    tokens: most tokens of a completion.
    stop_id: id that ends a completion; None for none.
  """
  import torch

  engine = sampler.Sampler(
    config,
    mesh.make_mesh(1, -1, 1),
    seed=0,
    prompt_buckets=(8, 16),
    batch_buckets=(8,),
    max_completion_tokens=tokens,
    stop_ids=() if stop_id is None else (stop_id,),
    vocab_size=config.vocab_size,
  )
  argmax = sampler.Sampling(temperature=0.0)
  requests = [
    sampler.Request(p, (0, 0, 0, i, 0), argmax) for i, p in enumerate(prompts)
  ]
  answers = engine.generate(params, requests)
  for prompt, answer in zip(prompts, answers, strict=True):
    ids = torch.tensor(prompt[None], dtype=torch.long)
    expected = model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=tokens,
      do_sample=False,
      eos_token_id=stop_id,
      pad_token_id=0,
    )[0, len(prompt) :].numpy()
    np.testing.assert_array_equal(answer.ids, expected)
