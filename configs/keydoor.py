"""GiGPO on keys and doors: a grid whose difficulty is set by a few numbers.

    python launch/train.py --config=configs/keydoor.py --config.model.path=..

On a laptop, train from the included warm start, which imitates an expert that
makes mistakes (configs/warm_starts/make.sh):

    python launch/train.py --config=configs/keydoor.py:tiny

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `mini` for sweeps, from the warm start of `tiny`; `smoke`, the tiny path
in two minutes), an algorithm (`grpo`, `ppo`, ...) and other changes, see
`variants.CHANGES`. envs/keydoor_levels.py generates the levels.
configs/sweeps/keydoor.py changes their properties one at a time, to measure
when step advantages help.
"""

import ml_collections

from configs import base, sizes, variants

# Learning rates of `:mini`; see sizes.use_mini. The best of three, GiGPO's on
# two seeds and 512 levels, the others' on one seed and 128 levels;
# docs/results/details.md and docs/results/history.md.
RATES = {
  'gigpo': 1.5e-4,
  'grpo': 1.5e-4,
  'ecpo': 3e-4,
  'g2po': 1.5e-4,
  'gagpo': 3e-4,
  'graphgpo': 3e-4,
  'hgpo': 1.5e-4,
  'pgpo': 1.5e-4,
  'ppo': 1.5e-4,
  'rloo': 7.5e-5,
}


def _rooms() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'keydoor'
  config.env.generator = ml_collections.ConfigDict()
  config.env.generator.room = (4, 4)  # rows and columns
  config.env.generator.doors = 2
  config.env.generator.decoys = 2  # keys that open no door
  # Share of cells that end the episode without success.
  config.env.generator.traps = 0.1
  # (min, max) length of a level's shortest solution.
  config.env.generator.solution_steps = (10, 40)
  config.env.generator.seed = 0
  # The horizon; levels do not depend on it.
  config.env.max_steps = 60
  # Parts of the state that observations hide: position, held.
  config.env.aliased = ()
  # Whether prompts hide them, too. False: anchors alone hide them.
  config.env.alias_prompts = True
  config.env.history_length = 2
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  config.pool.num_workers = 2
  config.rollout.max_prompt_tokens = 1024
  config.rollout.prompt_buckets = (512, 1024)
  config.learner.length_buckets = (1536,)
  config.evaluation.split = 'test'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy and levels of two small rooms."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 60
  config.env.generator.room = (3, 3)
  config.env.generator.doors = 1
  config.env.generator.traps = 0.06
  config.env.generator.solution_steps = (6, 16)
  config.env.max_steps = 24
  config.env.history_length = 0
  config.rollout.max_prompt_tokens = 128
  config.rollout.max_completion_tokens = 24
  config.rollout.prompt_buckets = (96, 128)
  config.optimizer.learning_rate = 1.5e-4
  config.optimizer.b2 = 0.98
  config.learner.minibatch_rows = 64
  config.learner.length_buckets = (104, 152)
  config.evaluation.num_tasks = 512
  config.evaluation.every = 20
  config.sft.num_episodes = 5000
  config.sft.noise = 0.5
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _mini(config: ml_collections.ConfigDict) -> None:
  sizes.use_mini(config, RATES)
  config.num_iterations = 60
  config.evaluation.every = 30


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'mini': (_tiny, _mini),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _rooms, SIZES)
