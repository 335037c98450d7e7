"""Models of several benchmarks, peak rates of a device, costs of a model."""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gigpo_jax import mesh, models, sampler
from gigpo_jax.models import parameters, qwen

# 5.0M parameters.
TINY = qwen.QwenConfig(
  vocab_size=4096,
  hidden_size=256,
  intermediate_size=1024,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  dtype='float32',
  remat='none',
)


def random_params(model: qwen.QwenConfig, devices: jax.sharding.Mesh) -> dict:
  """Returns random parameters on the devices of a mesh."""
  init = jax.jit(
    functools.partial(parameters.init, model),
    out_shardings=mesh.shardings(devices, parameters.logical_axes(model)),
  )
  return init(jax.random.key(0))


def hugging_face(model: qwen.QwenConfig):
  """Returns a transformers model of the same shape, with random weights."""
  import transformers

  return transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(
      vocab_size=model.vocab_size,
      hidden_size=model.hidden_size,
      intermediate_size=model.intermediate_size,
      num_hidden_layers=model.num_layers,
      num_attention_heads=model.num_heads,
      num_key_value_heads=model.num_kv_heads,
      tie_word_embeddings=model.tie_embeddings,
    )
  )


def matmul_rate(dtype: str, width: int) -> float:
  """Returns the operations/s of a product of two square matrices."""
  x = jax.random.normal(jax.random.key(0), (width, width), dtype)
  return 2 * width**3 / _fastest(jax.jit(lambda x: x @ x), x)


def copy_rate(mib: int) -> float:
  """Returns bytes/s, read plus written, of a pass over `mib` MiB."""
  big = jax.random.bits(jax.random.key(0), (mib << 18,), jnp.uint32)
  return 2 * big.nbytes / _fastest(jax.jit(lambda x: x + 1), big)


def forward_flops(
  model: qwen.QwenConfig, tokens: int, completion_tokens: int = 0
) -> float:
  """Returns the operations of a forward pass over a row.

  Causal attention counts half. A backward pass takes twice as many operations.

  Args:
    model: shape of the network.
    tokens: number of tokens of the row.
    completion_tokens: number of its tokens whose logits are computed.
  """
  head = models.num_head_parameters(model)
  body = models.num_body_parameters(model)
  attention = model.num_layers * model.num_heads * model.head_dim * tokens
  return 2.0 * (tokens * (body + attention) + completion_tokens * head)


def weight_bytes(model: qwen.QwenConfig) -> int:
  """Returns the bytes that a decode step reads of the parameters."""
  stored = sampler.parameter_bytes(model, 'model')
  if model.tie_embeddings:
    return stored
  # A step reads a few rows of the embeddings only.
  itemsize = jnp.dtype(model.dtype).itemsize
  return stored - models.num_head_parameters(model) * itemsize


def decode_flops(model: qwen.QwenConfig, tokens: int) -> float:
  """Returns the operations of decoding a token after `tokens` others."""
  attention = model.num_layers * model.num_heads * model.head_dim
  return forward_flops(model, 1, 1) + 4.0 * attention * tokens


def core_matmul_rate() -> float:
  """Returns the float32 operations per CPU second of matmuls."""
  width = 1024
  x = jax.random.normal(jax.random.key(0), (width, width))
  times = _times(jax.jit(lambda x: x @ x), x, 15, time.process_time)
  return 2 * width**3 / statistics.median(times)


def _fastest(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
  """Returns the minimum time of a call in seconds."""
  return min(_times(function, x, 10, time.perf_counter))


def _times(
  function: Callable[[jax.Array], jax.Array],
  x: jax.Array,
  repeats: int,
  clock: Callable[[], float],
) -> list[float]:
  """Returns the seconds of each call after a first one."""
  jax.block_until_ready(function(x))
  times = []
  for _ in range(repeats):
    start = clock()
    jax.block_until_ready(function(x))
    times.append(clock() - start)
  return times
