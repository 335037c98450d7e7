"""Models of several benchmarks, and peak rates of a device."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gigpo_jax.models import qwen

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


def _fastest(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
  """Returns the minimum time of a call in seconds."""
  jax.block_until_ready(function(x))
  times = []
  for _ in range(10):
    start = time.perf_counter()
    jax.block_until_ready(function(x))
    times.append(time.perf_counter() - start)
  return min(times)
