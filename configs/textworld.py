"""GiGPO on games of TextWorld's own generator.

    python launch/train.py --config=configs/textworld.py --config.model.path=..

On a laptop, train from the included warm start, which imitates an expert that
makes mistakes (configs/warm_starts/make.sh):

    python launch/train.py --config=configs/textworld.py:tiny

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `mini` for sweeps, from the warm start of `tiny`; `smoke`, the tiny path
in two minutes), an algorithm (`grpo`, `ppo`, ...) and other changes, see
`variants.CHANGES`.

Needs Python 3.11 or 3.12. Each game is compiled into the cache when it is first
played, which takes half a second of one core. For other games, copy this file
and change `env.challenge`; see envs/textworld_games.py.
"""

import ml_collections

from configs import base, sizes, variants

# Learning rates of `:mini`; see sizes.use_mini.
RATES = {'g2po': 2.5e-5, 'gigpo': 2.5e-5, 'grpo': 2.5e-5}


def _games() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'textworld'
  # custom | coin_collector | treasure_hunter | cooking | simple
  config.env.challenge = 'custom'
  # Arguments of `tw-make` for the challenge; custom games have these three.
  config.env.settings = ml_collections.ConfigDict()
  config.env.settings.rooms = 5
  config.env.settings.objects = 8
  config.env.settings.quest_length = 5
  config.env.num_games = 1_000  # maximum per split
  config.env.seed = 0
  config.env.max_steps = 30
  config.env.history_length = 2
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  config.pool.num_workers = 8
  config.rollout.max_prompt_tokens = 2048
  config.learner.length_buckets = (2560,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy and a coin in the fifth room of a chain."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 20
  config.env.challenge = 'coin_collector'
  config.env.settings = ml_collections.ConfigDict({'level': 5})
  config.env.num_games = 256
  config.env.max_steps = 10
  config.env.history_length = 1
  config.rollout.max_prompt_tokens = 512
  config.rollout.max_completion_tokens = 64
  config.rollout.prompt_buckets = (256, 512)
  config.learner.length_buckets = (256, 384, 576)
  # Ten updates of 64 rows at 2e-4 made the policy deterministic, then worse.
  config.optimizer.learning_rate = 5e-5
  config.optimizer.b2 = 0.98
  config.evaluation.every = 10
  # With half of the actions drawn at random, the policy did not learn to read
  # the exits.
  config.sft.num_episodes = 2000
  config.sft.noise = 0.2
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _mini(config: ml_collections.ConfigDict) -> None:
  sizes.use_mini(config, RATES)
  config.num_iterations = 40
  config.evaluation.every = 20


def _smoke(config: ml_collections.ConfigDict) -> None:
  sizes.use_smoke(config)
  config.env.num_games = 40
  config.sft.num_episodes = 80


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'mini': (_tiny, _mini),
  'smoke': (_tiny, _smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _games, SIZES)
