"""Times Hugging Face transformers on PyTorch: generate and a GRPO update.

python benchmarks/peers/time_torch.py --shape tiny --what generate --batch 16
"""

import argparse

import shapes
import torch
import transformers


def build(shape: shapes.Shape, attention: str) -> transformers.Qwen2ForCausalLM:
  """Returns a model with random weights."""
  config = transformers.Qwen2Config(
    vocab_size=shape.vocab,
    hidden_size=shape.d_model,
    intermediate_size=shape.d_ff,
    num_hidden_layers=shape.num_layers,
    num_attention_heads=shape.num_heads,
    num_key_value_heads=shape.num_kv_heads,
    rms_norm_eps=shape.norm_eps,
    rope_parameters={
      'rope_type': 'default',
      'rope_theta': float(shape.rope_theta),
    },
    tie_word_embeddings=shape.tied,
    max_position_embeddings=4096,
    attn_implementation=attention,
  )
  torch.manual_seed(0)
  return transformers.Qwen2ForCausalLM(config).to(torch.float32)


def _row(options: argparse.Namespace, warm: shapes.Runs) -> dict:
  return {
    'framework': 'transformers',
    'version': f'{transformers.__version__}, torch {torch.__version__}',
    'shape': options.shape,
    'what': options.what,
    'batch': options.batch,
    'prompt': shapes.PROMPT,
    'new': shapes.NEW,
    'threads': torch.get_num_threads(),
    **shapes.warm_fields(warm),
  }


def generate(
  model: transformers.Qwen2ForCausalLM, options: argparse.Namespace
) -> None:
  """Times sampling."""
  ids = torch.tensor(
    shapes.prompts(shapes.SHAPES[options.shape], options.batch),
    dtype=torch.long,
  )
  model.eval()

  def run(tokens: int) -> None:
    with torch.inference_mode():
      generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=0,
        eos_token_id=None,
      )
    assert generated.shape == (options.batch, shapes.PROMPT + tokens)

  warm, full = shapes.timed(lambda: run(shapes.NEW), options.repeats)
  _, first = shapes.timed(lambda: run(1), options.repeats)
  shapes.emit(
    **shapes.rates(
      _row(options, warm),
      options.batch,
      shapes.PROMPT,
      shapes.NEW,
      full,
      first,
    )
  )


def train(
  model: transformers.Qwen2ForCausalLM, options: argparse.Namespace
) -> None:
  """Times updates: clipped ratio, k3 KL, entropy, AdamW."""
  ids = torch.tensor(
    shapes.prompts(
      shapes.SHAPES[options.shape], options.batch, shapes.PROMPT + shapes.NEW
    ),
    dtype=torch.long,
  )
  completions = ids[:, shapes.PROMPT :]
  advantages = torch.randn(options.batch, 1)
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
  model.train()
  before: list[torch.Tensor] = []

  def step() -> None:
    logits = model(ids, logits_to_keep=shapes.NEW + 1, use_cache=False).logits
    every = torch.log_softmax(logits[:, :-1].float(), -1)
    log_probs = every.gather(-1, completions[..., None])[..., 0]
    with torch.no_grad():
      _ = -(every.exp() * every).sum(-1).mean().item()
    if not before:
      before.append(log_probs.detach().clone())
    (old,) = before
    ratio = torch.exp(log_probs - old)
    clipped = ratio.clamp(0.8, 1.2)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    gap = old - log_probs
    kl = torch.exp(gap) - gap - 1
    optimizer.zero_grad(set_to_none=True)
    (policy + 0.04 * kl).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

  warm, runs = shapes.timed(step, options.repeats)
  shapes.emit(
    **shapes.rates(
      _row(options, warm), options.batch, shapes.PROMPT, shapes.NEW, runs
    )
  )


def main() -> None:
  """Prints a row as JSON."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--shape', default='tiny', choices=shapes.SHAPES)
  parser.add_argument(
    '--what', default='generate', choices=('generate', 'train')
  )
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--threads', type=int, default=1)
  parser.add_argument('--attention', default='sdpa')
  options = parser.parse_args()
  torch.set_num_threads(options.threads)
  model = build(shapes.SHAPES[options.shape], options.attention)
  {'generate': generate, 'train': train}[options.what](model, options)


if __name__ == '__main__':
  main()
