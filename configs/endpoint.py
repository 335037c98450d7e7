"""GiGPO on episodes that an agent harness plays through launch/serve.py.

    python launch/serve.py --config=configs/endpoint.py --config.model.path=..

The harness brings tasks, tools and rewards; docs/endpoint.md describes its
requests. On a laptop, the tiny policy of examples/walk_start.py plays the
harness examples/walk_harness.py; that page also has the commands that make its
warm start.

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `smoke`, the tiny path in two minutes), an algorithm (`grpo`, `ppo`, ...)
and other changes, see `variants.CHANGES`.
"""

import ml_collections

from configs import base, sizes, variants


def _harness() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'endpoint'
  # Number of tasks of each split; the harness gets their index.
  config.env.num_tasks = 1024
  # Limit of turns of an episode.
  config.env.max_steps = 16
  # Whether requests may offer tools; the chat template must support them.
  config.env.tools = True
  variants.use_conversation(config)
  config.rollout.max_prompt_tokens = 16_384
  config.rollout.prompt_buckets = (2048, 4096, 8192, 16_384)
  config.learner.length_buckets = (16_896,)
  # A harness may wait for other services.
  config.pool.step_timeout_secs = 300.0
  # If set, the harness also plays the tasks of the split `valid`.
  config.evaluation.every = 0
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy, for the harness examples/walk_harness.py."""
  sizes.use_tool_policy(config, prompt_tokens=352)
  config.num_iterations = 30
  config.env.max_steps = 6
  config.rollout.batch_buckets = (16,)  # Episodes that the harness plays.
  config.sft.num_episodes = 2000
  config.sft.noise = 0.6
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _smoke(config: ml_collections.ConfigDict) -> None:
  sizes.use_smoke(config)
  config.evaluation.every = 0


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'smoke': (_tiny, _smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _harness, SIZES)
