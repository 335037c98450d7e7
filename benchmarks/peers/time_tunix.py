"""Times google-tunix: its sampler, a GRPO update, log-probs, full iterations.

python benchmarks/peers/time_tunix.py --shape tiny --what generate --batch 16

Written for the released package 0.1.7. A later checkout on PYTHONPATH, whose
RLCluster is called RLEngine, runs as well; $TUNIX_LABEL names its version.
"""

import argparse
import importlib.metadata
import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shapes
from flax import nnx
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster as cluster_lib
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

GROUP = 8
Cluster = getattr(cluster_lib, 'RLCluster', None) or cluster_lib.RLEngine


class IntTokenizer:
  """'12 7 99' <-> [12, 7, 99], by Tunix's contract for tokenizers."""

  def __init__(self, vocab: int):
    self.vocab = vocab

  def encode(self, text: str, **_) -> list[int]:
    """Returns the ids of a text."""
    return [int(token) for token in text.split()]

  def decode(self, ids, **_) -> str:
    """Returns the text of ids."""
    return ' '.join(str(int(token)) for token in ids)

  def bos_id(self) -> int:
    """Returns 0, so that Tunix adds no token at the start."""
    return 0

  def eos_id(self) -> int:
    """Returns the last id."""
    return self.vocab - 1

  def pad_id(self) -> int:
    """Returns the id of padding."""
    return 0


def _texts(ids: np.ndarray) -> list[str]:
  return [' '.join(map(str, row.tolist())) for row in ids]


def build(shape: shapes.Shape, remat: str) -> qwen2.Qwen2:
  """Returns a model with random weights."""
  config = qwen2.ModelConfig(
    num_layers=shape.num_layers,
    vocab_size=shape.vocab,
    embed_dim=shape.d_model,
    hidden_dim=shape.d_ff,
    num_heads=shape.num_heads,
    head_dim=shape.head_dim,
    num_kv_heads=shape.num_kv_heads,
    rope_theta=shape.rope_theta,
    norm_eps=shape.norm_eps,
    use_tied_embedding=shape.tied,
    remat_config=getattr(qwen2.RematConfig, remat),
    dtype=jnp.float32,
    param_dtype=jnp.float32,
  )
  model = qwen2.Qwen2(config, rngs=nnx.Rngs(params=0))
  # Tunix initializes embeddings with unit variance, with which a random model
  # of tied embeddings repeats one token; Hugging Face's scale is 0.02.
  embedding = model.embedder.input_embedding
  embedding.value = embedding.value * 0.02
  return model


def _row(options: argparse.Namespace, warm: shapes.Runs) -> dict:
  import tunix

  released = 'site-packages' in tunix.__path__[0]
  version = importlib.metadata.version('google-tunix')
  return {
    'framework': 'tunix',
    'version': version if released else os.environ.get('TUNIX_LABEL', ''),
    'shape': options.shape,
    'what': options.what,
    'batch': options.batch,
    'prompt': shapes.PROMPT,
    'new': shapes.NEW,
    'threads': options.threads,
    **shapes.warm_fields(warm),
  }


def _emit(
  options: argparse.Namespace,
  warm: shapes.Runs,
  runs: shapes.Runs,
  first: shapes.Runs | None = None,
) -> None:
  row = _row(options, warm)
  shapes.emit(
    **shapes.rates(row, options.batch, shapes.PROMPT, shapes.NEW, runs, first)
  )


def generate(shape: shapes.Shape, options: argparse.Namespace) -> None:
  """Times sampling."""
  sampler = sampler_lib.Sampler(
    build(shape, options.remat),
    IntTokenizer(shape.vocab),
    sampler_lib.CacheConfig(
      cache_size=shapes.PROMPT + shapes.NEW,
      num_layers=shape.num_layers,
      num_kv_heads=shape.num_kv_heads,
      head_dim=shape.head_dim,
    ),
  )
  texts = _texts(shapes.prompts(shape, options.batch))
  seeds = iter(range(10**6))

  def run(tokens: int) -> None:
    output = sampler(
      texts,
      max_generation_steps=tokens,
      max_prompt_length=shapes.PROMPT,
      temperature=1.0,
      top_p=1.0,
      top_k=None,
      seed=next(seeds),
    )
    assert len(output.tokens) == options.batch

  warm, full = shapes.timed(lambda: run(shapes.NEW), options.repeats)
  _, first = shapes.timed(lambda: run(1), options.repeats)
  _emit(options, warm, full, first)


def _learner(
  shape: shapes.Shape, options: argparse.Namespace
) -> tuple[Cluster, grpo_learner.GRPOLearner]:
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp')
  )
  with mesh:
    actor, reference = (build(shape, options.remat) for _ in range(2))
  roles = cluster_lib.Role
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
  cluster = Cluster(
    actor=actor,
    reference=reference,
    tokenizer=IntTokenizer(shape.vocab),
    cluster_config=cluster_lib.ClusterConfig(
      role_to_mesh=dict.fromkeys(
        (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh
      ),
      rollout_engine='vanilla',
      training_config=cluster_lib.RLTrainingConfig(
        actor_optimizer=optimizer, eval_every_n_steps=10**6, max_steps=10**6
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=shapes.NEW,
        max_prompt_length=shapes.PROMPT,
        kv_cache_size=shapes.PROMPT + shapes.NEW,
        temperature=1.0,
        top_p=1.0,
        return_logprobs=True,
      ),
    ),
  )

  def reward(prompts, completions, **_):
    return np.random.default_rng(0).normal(size=len(completions))

  return cluster, grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    algo_config=grpo_learner.GRPOConfig(num_generations=GROUP, beta=0.04),
    reward_fns=reward,
  )


def train(shape: shapes.Shape, options: argparse.Namespace) -> None:
  """Times GRPO updates of a synthetic batch."""
  cluster, _ = _learner(shape, options)
  ids = shapes.prompts(shape, options.batch, shapes.PROMPT + shapes.NEW)
  draws = np.random.default_rng(1).normal(size=options.batch)
  size = (options.batch, shapes.NEW)
  log_probs = jnp.full(size, -np.log(shape.vocab), jnp.float32)
  example = grpo_learner.TrainExample(
    prompt_ids=jnp.asarray(ids[:, : shapes.PROMPT]),
    prompt_mask=jnp.ones((options.batch, shapes.PROMPT), bool),
    completion_ids=jnp.asarray(ids[:, shapes.PROMPT :]),
    completion_mask=jnp.ones(size, bool),
    advantages=jnp.asarray(draws, jnp.float32),
    ref_per_token_logps=log_probs,
    old_per_token_logps=log_probs,
  )

  def step() -> None:
    cluster.update_actor([example], None, False)
    jax.block_until_ready(nnx.state(cluster.actor_trainer.model))

  _emit(options, *shapes.timed(step, options.repeats, warmup=2))


def log_probs(shape: shapes.Shape, options: argparse.Namespace) -> None:
  """Times reference log-probs, as the learner computes them."""
  cluster, _ = _learner(shape, options)
  ids = shapes.prompts(shape, options.batch, shapes.PROMPT + shapes.NEW)

  def step() -> None:
    log_probs = cluster.get_ref_per_token_logps(
      prompt_tokens=jnp.asarray(ids[:, : shapes.PROMPT]),
      completion_tokens=jnp.asarray(ids[:, shapes.PROMPT :]),
      pad_id=0,
      eos_id=shape.vocab - 1,
      micro_batch_size=options.batch,
    )
    jax.block_until_ready(log_probs)

  _emit(options, *shapes.timed(step, options.repeats))


def iterations(shape: shapes.Shape, options: argparse.Namespace) -> None:
  """Times full iterations: rollout, reference log-probs, update."""
  import time

  _, learner = _learner(shape, options)
  num_prompts = max(options.batch // GROUP, 1)
  texts = np.array(_texts(shapes.prompts(shape, num_prompts)))
  stamps: list[tuple[float, float]] = []

  def stamp() -> None:
    stamps.append((time.perf_counter(), time.process_time()))

  def data():
    for _ in range(options.repeats + 2):
      stamp()
      yield {'prompts': texts}

  learner.train(data())
  stamp()
  times = np.diff(np.array(stamps), axis=0).tolist()
  warm, runs = shapes.Runs(), shapes.Runs()
  warm.add(*times[0])
  for wall, cpu in times[2:]:
    runs.add(wall, cpu)
  _emit(options, warm, runs)


MEASURES = {
  'generate': generate,
  'train': train,
  'log_probs': log_probs,
  'iterations': iterations,
}


def main() -> None:
  """Prints a row as JSON."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--shape', default='tiny', choices=shapes.SHAPES)
  parser.add_argument('--what', default='generate', choices=MEASURES)
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--threads', type=int, default=1)
  parser.add_argument('--remat', default='NONE')
  options = parser.parse_args()
  MEASURES[options.what](shapes.SHAPES[options.shape], options)


if __name__ == '__main__':
  main()
