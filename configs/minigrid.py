"""GiGPO on MiniGrid and BabyAI levels in text.

    python launch/train.py --config=configs/minigrid.py --config.model.path=..

On a laptop, make a warm start by imitating BabyAI's bot and train it:

    python launch/sft.py --config=configs/minigrid.py:tiny
    python launch/train.py --config=configs/minigrid.py:tiny

For another level, set `config.env.id`. Levels of BabyAI have an expert.

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `smoke`, the tiny path in two minutes), an algorithm (`grpo`, `ppo`, ...)
and other changes, see `variants.CHANGES`.
"""

import ml_collections

from configs import base, sizes, variants


def _local() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'minigrid'
  config.env.id = 'BabyAI-GoToLocal-v0'
  config.env.seed = 0
  config.env.max_steps = 32
  config.env.history_length = 2
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  # The entire grid. 'observation' compares what the agent sees.
  config.algorithm.anchor = 'state'
  config.pool.num_workers = 4
  config.rollout.max_prompt_tokens = 1024
  config.rollout.prompt_buckets = (512, 1024)
  config.learner.length_buckets = (1536,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy and a room of 4 x 4 cells with three objects."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 40
  config.env.id = 'BabyAI-GoToLocalS6N3-v0'
  config.env.max_steps = 12
  config.env.history_length = 0
  config.rollout.max_prompt_tokens = 160
  config.rollout.max_completion_tokens = 24
  config.rollout.prompt_buckets = (160,)
  config.learner.length_buckets = (128, 184)
  config.algorithm.invalid_penalty = 0.01
  config.evaluation.every = 20
  config.sft.num_episodes = 2000
  config.sft.noise = 0.5
  config.model.path = sizes.warm_start(__file__, variants.size(config))


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _local, SIZES)
