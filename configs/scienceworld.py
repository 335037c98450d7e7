"""GiGPO on ScienceWorld, experiments of elementary science in text.

    python launch/train.py --config=configs/scienceworld.py \
        --config.model.path=..

needs Java and `pip install -e '.[scienceworld]'`. On a laptop, imitate the
simulator's solutions and train:

    python launch/sft.py --config=configs/scienceworld.py:tiny
    python launch/train.py --config=configs/scienceworld.py:tiny

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `smoke`, the tiny path in minutes), an algorithm (`grpo`, `ppo`, ...) and
other changes, see `variants.CHANGES`.
"""

import ml_collections

from configs import base, sizes, variants


def _house() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'scienceworld'
  # Names of the simulator's tasks. (): all 30.
  config.env.tasks = ()
  # 'easy': all simplifications, such as open doors and teleportation. '': none.
  config.env.simplifications = 'easy'
  config.env.max_steps = 50
  config.env.history_length = 2
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  # The room, the inventory and the score; or 'observation'.
  config.algorithm.anchor = 'state'
  # Each environment has a Java process.
  config.rollout.groups = 4
  config.pool.num_workers = 8
  config.pool.reset_timeout_secs = 300.0
  config.rollout.max_prompt_tokens = 4096
  config.rollout.prompt_buckets = (1024, 2048, 4096)
  config.learner.length_buckets = (4608,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy and one task, finding something that is no animal."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 20
  config.env.tasks = ('find-non-living-thing',)
  config.env.max_steps = 12
  config.env.history_length = 1
  config.env.require_think = False
  config.rollout.groups = 2
  config.rollout.episodes_per_group = 8
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_completion_tokens = 32
  config.rollout.prompt_buckets = (256, 1024)
  config.rollout.batch_buckets = (16,)
  config.learner.length_buckets = (256, 400, 1056)
  config.learner.microbatch_tokens = 2112
  config.algorithm.invalid_penalty = 0.01
  config.evaluation.every = 10
  config.evaluation.num_tasks = 64
  config.sft.num_episodes = 150
  config.sft.minibatch_rows = 8
  config.sft.epochs = 5
  config.model.path = sizes.warm_start(__file__, variants.size(config))


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _house, SIZES)
