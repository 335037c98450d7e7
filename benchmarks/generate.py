"""Benchmark prefill and decode speed.

`benchmarks/peers/rounds.py` runs this benchmark and other frameworks in turn;
`shapes` is a module in that folder. One measurement samples 64 tokens after
prompts of 256 tokens for a full batch; another samples a single token.

    PYTHONPATH=benchmarks/peers:. python benchmarks/generate.py --batch 16
"""

import argparse

import jax
import models
import numpy as np
import shapes

from gigpo_jax import mesh, sampler
from gigpo_jax.models import parameters, qwen


def _parse_options() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--shape', default='tiny', choices=shapes.SHAPES)
  parser.add_argument('--what', default='generate', choices=('generate',))
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--threads', type=int, default=1)
  return parser.parse_args()


def _make_model(shape) -> qwen.QwenConfig:
  return qwen.QwenConfig(
    vocab_size=shape.vocab,
    hidden_size=shape.d_model,
    intermediate_size=shape.d_ff,
    num_layers=shape.num_layers,
    num_heads=shape.num_heads,
    num_kv_heads=shape.num_kv_heads,
    head_dim=shape.head_dim,
    rope_theta=shape.rope_theta,
    rms_norm_eps=shape.norm_eps,
    tie_embeddings=shape.tied,
    dtype='float32',
    remat='none',
  )


def main() -> None:
  """Prints one row as JSON."""
  options = _parse_options()
  shape = shapes.SHAPES[options.shape]
  model = _make_model(shape)
  engine = sampler.Sampler(
    model,
    mesh.make_mesh(1, -1, 1),
    seed=0,
    prompt_buckets=(shapes.PROMPT,),
    batch_buckets=(options.batch,),
    max_completion_tokens=shapes.NEW,
    stop_ids=(),
    vocab_size=shape.vocab,
  )
  params = parameters.init(model, jax.random.key(0))
  prompts = shapes.prompts(shape, options.batch).astype(np.int32)
  calls = iter(range(10**9))

  def run(tokens: int) -> None:
    # Use new random streams each time, and no cached prompts.
    call = next(calls)
    engine.load(params)
    completions = engine.generate(
      params,
      [
        sampler.Request(ids, (0, call, n, 0, 0), max_tokens=tokens)
        for n, ids in enumerate(prompts)
      ],
    )
    assert all(len(completion.ids) == tokens for completion in completions)

  rate = models.core_matmul_rate()
  warm, full = shapes.timed(lambda: run(shapes.NEW), options.repeats)
  _, first = shapes.timed(lambda: run(1), options.repeats)
  rate = (rate + models.core_matmul_rate()) / 2
  row = {
    'framework': 'gigpo_jax',
    'version': '',
    'shape': shape.name,
    'what': 'generate',
    'batch': options.batch,
    'prompt': shapes.PROMPT,
    'new': shapes.NEW,
    'threads': options.threads,
    **shapes.warm_fields(warm),
  }
  row = shapes.rates(row, options.batch, shapes.PROMPT, shapes.NEW, full, first)
  # Floating-point operations of a token.
  prefill = models.forward_flops(model, shapes.PROMPT) / shapes.PROMPT
  decode = models.decode_flops(model, shapes.PROMPT + shapes.NEW // 2)
  shapes.emit(
    **row,
    prefill_matmul_share=row['prefill_tok_per_cpu_s'] * prefill / rate,
    decode_matmul_share=row['decode_tok_per_cpu_s'] * decode / rate,
  )


if __name__ == '__main__':
  main()
