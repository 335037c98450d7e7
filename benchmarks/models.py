"""Models that several benchmarks measure."""

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
