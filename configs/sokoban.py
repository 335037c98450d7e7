"""GiGPO on Sokoban in text: the released code's third experiment.

    python launch/train.py --config=configs/sokoban.py --config.model.path=..

On a laptop, train from the included warm start, which imitates an expert that
makes mistakes (configs/warm_starts/make.sh):

    python launch/train.py --config=configs/sokoban.py:tiny

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `mini` for sweeps, from the warm start of `tiny`; `smoke`, the tiny path
in two minutes), an algorithm (`grpo`, `ppo`, ...) and other changes, see
`variants.CHANGES`. envs/sokoban.py generates the levels.

Sizes and weights are those of the released code. Its results are not
comparable: it shows the room as a picture to Qwen2.5-VL-3B, and this
environment shows it as text.
"""

import ml_collections

from configs import base, sizes, variants

# Learning rates of `:mini`; see sizes.use_mini. The best of three on seeds 100
# and 101 and the split test, and of two that are equal within a level of 2,048,
# the smaller one; docs/results/details.md.
RATES = {
  'gigpo': 7.5e-5,
  'grpo': 7.5e-5,
  'rloo': 7.5e-5,
  'ppo': 7.5e-5,
  'gagpo': 7.5e-5,
  'ecpo': 1.5e-4,
  'g2po': 7.5e-5,
  'graphgpo': 1.5e-4,
  'hgpo': 7.5e-5,
  'pgpo': 7.5e-5,
}


def _released() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'sokoban'
  config.env.size = (6, 6)  # code; rows and columns, including walls
  config.env.num_boxes = 2  # code
  # (min, max) length of a level's shortest solution, in moves.
  config.env.solution_steps = (4, 15)
  config.env.seed = 0
  config.env.max_steps = 15  # code
  config.env.history_length = 2  # K; code
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  config.pool.num_workers = 4
  config.algorithm.norm = 'mean'  # code, Sokoban
  config.rollout.groups = 32  # code, Sokoban
  config.rollout.max_prompt_tokens = 1024  # code, Sokoban
  config.rollout.prompt_buckets = (512, 1024)
  config.learner.minibatch_rows = 64  # code, Sokoban
  config.learner.length_buckets = (1536,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128  # code
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy and levels with one box near its target."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 60
  config.env.num_boxes = 1
  config.env.solution_steps = (3, 9)
  config.env.max_steps = 12
  config.env.history_length = 0
  config.rollout.max_prompt_tokens = 128
  config.rollout.max_completion_tokens = 24
  config.rollout.prompt_buckets = (64, 128)
  config.algorithm.norm = 'mean_std'
  # As in `:mini`, which has half of the groups.
  config.optimizer.learning_rate = 7.5e-5
  config.optimizer.b2 = 0.98
  config.learner.minibatch_rows = 256
  config.learner.length_buckets = (80, 152)
  config.evaluation.num_tasks = 512
  config.evaluation.every = 30
  config.sft.num_episodes = 7000
  config.sft.noise = 0.3
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _mini(config: ml_collections.ConfigDict) -> None:
  sizes.use_mini(config, RATES)
  config.num_iterations = 60
  config.rollout.groups = 4
  config.rollout.batch_buckets = (32,)
  config.learner.minibatch_rows = 128
  config.evaluation.every = 30


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'mini': (_tiny, _mini),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _released, SIZES)
