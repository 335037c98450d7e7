"""Models that several benchmarks measure, and what a device can do."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gigpo_jax.models import qwen

# Of 5.0M parameters.
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
  """Returns transformers' network of the same shape, of random weights."""
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
  """Returns operations a second of a product of two square matrices."""
  x = jax.random.normal(jax.random.key(0), (width, width), dtype)
  return 2 * width**3 / _fastest(jax.jit(lambda x: x @ x), x)


def copy_rate(mib: int) -> float:
  """Returns bytes a second, read and written, of a pass over `mib` MiB."""
  big = jax.random.bits(jax.random.key(0), (mib << 18,), jnp.uint32)
  return 2 * big.nbytes / _fastest(jax.jit(lambda x: x + 1), big)


def _fastest(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
  """Returns the least seconds of a call."""
  jax.block_until_ready(function(x))
  taken = []
  for _ in range(10):
    begin = time.perf_counter()
    jax.block_until_ready(function(x))
    taken.append(time.perf_counter() - begin)
  return min(taken)
