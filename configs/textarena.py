"""GiGPO on a TextArena game: the Tower of Hanoi, Nim, or any other.

    python launch/train.py --config=configs/textarena.py --config.model.path=..

On a laptop, make a warm start that learns the form of a response from random
play, and train it:

    python launch/sft.py --config=configs/textarena.py:tiny
    python launch/train.py --config=configs/textarena.py:tiny

Nim for two, against a random player or against itself; both variants start from
random play of both players:

    python launch/sft.py --config=configs/textarena.py:self_play
    python launch/train.py --config=configs/textarena.py:duel
    python launch/train.py --config=configs/textarena.py:self_play

For another game, copy this file and change `config.env`, which
envs/textarena_env.py documents.

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `smoke`, the tiny path in two minutes; `duel`, Nim against a random
player at the size of `tiny`; `self_play`, the same against itself, but
evaluated against a random player), an algorithm (`grpo`, `ppo`, ...) and other
changes, see `variants.CHANGES`.

All tasks, including held-out ones, use the same tower, or the same piles with
other moves of the random player. Success therefore measures how well the policy
knows this tower or these piles, not such games in general.
"""

import ml_collections

from configs import base, sizes, variants


def _tower() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'textarena'
  config.env.id = 'TowerOfHanoi-v0'
  config.env.options = ml_collections.ConfigDict()
  # All moves, if they are few. (): any text, as the game's rules describe it.
  config.env.actions = ('[a b]', '[a c]', '[b a]', '[b c]', '[c a]', '[c b]')
  # The other player: random or module:function. '': games for one player. self:
  # self-play, evaluated against random; self:NAME: evaluated against NAME.
  config.env.opponent = ''
  # Number of the policy's player, 0 or 1.
  config.env.player = 0
  # Lowest reward of a success.
  config.env.success_reward = 1.0
  config.env.seed = 0
  config.env.max_steps = 14
  config.env.history_length = 2
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  config.pool.num_workers = 4
  config.rollout.max_prompt_tokens = 2048
  config.rollout.prompt_buckets = (512, 1024, 2048)
  config.learner.length_buckets = (2560,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy and a tower of two disks."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 30
  config.env.options.num_disks = 2
  # All tasks are the same: few groups of many episodes, of which some succeed.
  config.rollout.groups = 2
  config.rollout.episodes_per_group = 32
  config.rollout.max_prompt_tokens = 320
  config.rollout.max_completion_tokens = 32
  config.rollout.prompt_buckets = (320,)
  # Many groups have no success at first. Normalized, the penalty alone would
  # have advantages as large as those of success.
  config.algorithm.invalid_penalty = 0.0
  config.learner.minibatch_rows = 64
  config.learner.length_buckets = (256, 352)
  config.evaluation.every = 15
  config.sft.num_episodes = 1000
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _duel(config: ml_collections.ConfigDict) -> None:
  """Selects Nim; an illegal move may be repeated once, then loses."""
  config.env.id = 'Nim-v0'
  config.env.options = ml_collections.ConfigDict()
  config.env.options.piles = [2, 3]
  config.env.actions = ('[0 1]', '[0 2]', '[1 1]', '[1 2]', '[1 3]')
  config.env.opponent = 'random'
  config.env.max_steps = 10
  config.env.history_length = 0
  config.env.require_think = False
  # Members of a group meet the same moves of the opponent: many groups, so that
  # an update does not adapt to a few of them.
  config.num_iterations = 60
  config.rollout.groups = 8
  config.rollout.episodes_per_group = 8
  config.rollout.max_prompt_tokens = 240
  config.rollout.max_completion_tokens = 16
  config.rollout.prompt_buckets = (240,)
  config.rollout.batch_buckets = (64,)
  config.loss.old_log_probs = 'sampler'  # as in `:mini` of other configs
  config.model.path = sizes.warm_start(__file__, 'self_play')
  config.optimizer.learning_rate = 2e-4
  config.optimizer.b2 = 0.98
  config.learner.microbatch_tokens = 4096
  config.learner.length_buckets = (256,)
  config.evaluation.num_tasks = 256
  config.evaluation.every = 30
  config.sft.num_episodes = 1000
  config.sft.epochs = 4
  sizes.use_two_layers(config)


def _self_play(config: ml_collections.ConfigDict) -> None:
  config.env.opponent = 'self'
  config.reward.agents = 'own'
  config.env.max_steps = 24


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'duel': (_tiny, _duel),
  'self_play': (_tiny, _duel, _self_play),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _tower, SIZES)
