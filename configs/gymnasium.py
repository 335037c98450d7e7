"""GiGPO on a Gymnasium environment: FrozenLake, or any other.

    python launch/train.py --config=configs/gymnasium.py --config.model.path=..

On a laptop, train from the included warm start, which has learned the form of a
response from random play of FrozenLake:

    python launch/train.py --config=configs/gymnasium.py:tiny

The slippery lake, `:mini`, starts from an included policy, too, which imitates
a noisy expert:

    python launch/train.py --config=configs/gymnasium.py:mini

A car that is pushed uphill by a continuous force starts by imitation, too:

    python launch/sft.py --config=configs/gymnasium.py:car
    python launch/train.py --config=configs/gymnasium.py:car

For another environment, copy this file and change `config.env`, which
envs/gymnasium_env.py documents. `python launch/sft.py --config=COPY.py:tiny`
makes its warm start, which the run then finds.

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `mini`, the slippery lake, for sweeps; `car`, MountainCarContinuous for
one core; `smoke`, the tiny path in two minutes), an algorithm (`grpo`, `ppo`,
...) and other changes, see `variants.CHANGES`.

All tasks, including held-out ones, use the same lake. Success therefore
measures how well the policy knows this lake, not lakes in general. Tasks of the
car differ in its position at the start.
"""

import ml_collections
from ml_collections import config_dict

from configs import base, sizes, variants

# Learning rates of `:mini`; see sizes.use_mini.
RATES = {'gigpo': 1.5e-4, 'grpo': 1.5e-4, 'g2po': 1.5e-4}


def _lake() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'gymnasium'
  config.env.id = 'FrozenLake-v1'
  config.env.options = ml_collections.ConfigDict()
  config.env.options.is_slippery = False
  config.env.options.map_name = '4x4'
  # The innermost first; each is ('module:Class', {argument: value}).
  config.env.wrappers = ()
  config.env.actions = ('left', 'down', 'right', 'up')
  config.env.task = (
    'walk from the start S to the goal G over frozen cells F, around the holes '
    'H. You are at the cell in brackets.'
  )
  # auto: a generic description; render: the environment's text; or
  # module:function.
  config.env.observe = 'render'
  config.env.names = ()
  # Lowest sum of rewards of a success. None: the environment ends the episode
  # with a positive reward.
  config.env.success_return = config_dict.placeholder(float)
  config.env.seed = 0
  config.env.max_steps = 20
  config.env.history_length = 2
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  # Play for a warm start, module:function; see envs/demonstrators.py.
  config.env.demonstrator = ''
  config.pool.num_workers = 4
  config.rollout.max_prompt_tokens = 1024
  config.rollout.prompt_buckets = (512, 1024)
  config.learner.length_buckets = (1536,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  sizes.use_tiny_policy(config)
  config.num_iterations = 30
  # All tasks are the same: few groups of many episodes, of which some succeed.
  config.rollout.groups = 2
  config.rollout.episodes_per_group = 32
  config.rollout.max_prompt_tokens = 192
  config.rollout.max_completion_tokens = 24
  config.rollout.prompt_buckets = (192,)
  config.optimizer.learning_rate = 2.5e-4
  config.learner.minibatch_rows = 64
  config.learner.length_buckets = (128, 160, 216)
  config.evaluation.every = 15
  config.sft.num_episodes = 2000
  config.sft.noise = 1.0  # teaches the form of a response only
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _slippery(config: ml_collections.ConfigDict) -> None:
  """Selects the slippery lake, in which two of three steps go astray."""
  sizes.use_mini(config, RATES)
  config.env.options.is_slippery = True
  config.env.max_steps = 50
  # Larger groups than elsewhere, because few episodes succeed at the start.
  config.rollout.episodes_per_group = 16
  # Few of the 32 episodes are left in the last turns.
  config.rollout.batch_buckets = (8, 32)
  config.sft.noise = 0.4
  config.model.path = sizes.warm_start(__file__, 'mini', shared=False)


def _car(config: ml_collections.ConfigDict) -> None:
  """Selects a car that is too weak to climb a hill in one go.

  An episode succeeds at the environment's own threshold, a return of 90: the
  flag pays 100, and a step of force x costs x^2 / 10. Full force takes too many
  steps and ends below 90.
  """
  config.num_iterations = 15
  config.env.id = 'MountainCarContinuous-v0'
  config.env.options = ml_collections.ConfigDict()
  config.env.wrappers = (
    ('gymnasium.wrappers:RepeatAction', {'num_repeats': 15}),
    (
      'gymnasium.wrappers:DiscretizeObservation',
      {'bins': (9, 6), 'multidiscrete': True},
    ),
  )
  config.env.actions = ('force',)
  config.env.names = ('position', 'speed')
  config.env.task = 'reach the flag with little force.'
  config.env.observe = 'auto'
  config.env.success_return = 90.0
  config.env.max_steps = 10
  config.env.history_length = 0
  config.env.require_think = False
  config.env.demonstrator = 'envs.mountain_car:demonstrate'
  config.rollout.max_prompt_tokens = 64
  config.rollout.max_completion_tokens = 16
  config.rollout.prompt_buckets = (64,)
  config.rollout.batch_buckets = (64,)
  config.learner.length_buckets = (80,)
  # Divided by their deviation, returns of groups without success would teach to
  # save force above all.
  config.algorithm.norm = 'mean'
  config.algorithm.discount = 1.0  # Success is a matter of the entire return.
  config.algorithm.invalid_penalty = 1.0
  config.evaluation.num_tasks = 256
  config.sft.num_episodes = 1500
  config.sft.noise = 0.2
  sizes.use_two_layers(config)
  config.model.path = sizes.warm_start(__file__, 'car', shared=False)


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'mini': (_tiny, _slippery),
  'car': (_tiny, _car),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _lake, SIZES)
