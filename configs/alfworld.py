"""GiGPO on ALFWorld: the paper's main experiment (Table 1, rows GiGPO).

    python launch/train.py --config=configs/alfworld.py            # 1.5B
    python launch/train.py --config=configs/alfworld.py:tiny       # any laptop
    python launch/train.py --config=configs/alfworld.py:tiny,grpo

Variants, joined by commas: a size (`1.5b`, the default, `0.5b`, `7b`; `tiny`
for two CPU cores, `mini` for sweeps, `smoke` for continuous integration), an
algorithm (`grpo`, `ppo`, ..) and other changes, see `base.CHANGES`.

Published success on valid_seen, mean of 3 seeds, 150 iterations: 1.5B GiGPO
86.7 %, GRPO 72.8 %; 7B GiGPO 90.8 %, GRPO 77.6 %. Hardware there: 2 x H100
(1.5B), about 290 s an iteration, 12 hours. Our own figures: README.
"""

import ml_collections

from configs import base

SIZES = ('0.5b', '1.5b', '7b', 'tiny', 'mini', 'smoke')


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  size, changes = base.parse_variants(
    arg, 'alfworld', sizes=SIZES, changes=base.CHANGES
  )
  size = size or '1.5b'
  config = _paper()
  config.variant = ','.join([size, *changes])
  if size in ('tiny', 'mini', 'smoke'):
    _tiny(config)
  if size == 'mini':
    _mini(config)
  if size == 'smoke':
    _smoke(config)
  if size == '7b':
    config.learner.microbatch_rows = 8
  base.apply(config, changes)
  return config


def _paper() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'alfworld'
  # textworld: the reference engine | native: ours, byte-identical, faster.
  config.env.engine = 'textworld'
  # Folder of `alfworld-download`; '' takes $ALFWORLD_DATA; 'generated' makes
  # games by rule (envs/alfworld/houses.py).
  config.env.data_dir = ''
  config.env.max_steps = 50  # paper
  config.env.history_length = 2  # K; paper
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  config.env.require_admissible = False
  # How the expert of a warm start looks for things: random | likely | sweep.
  config.env.expert_order = 'random'
  config.env.generator = ml_collections.ConfigDict()
  config.env.generator.seed = 0
  config.pool.num_workers = 8
  # TextWorld keeps 1 MB of every game it has seen.
  config.pool.max_resets_per_worker = 2000
  config.evaluation.split = 'valid_seen'
  config.sft.init = ''
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """A 0.6M-parameter policy, generated one-room games, two CPU cores."""
  config.num_iterations = 60
  config.model.path = 'configs/warm_starts/alfworld_tiny'
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  config.env.engine = 'native'
  config.env.data_dir = 'generated'
  config.env.generator.receptacles = (4, 6)
  config.env.generator.distractors = (2, 5)
  config.env.max_steps = 16
  config.env.prompt_style = 'brief'
  config.env.expert_order = 'sweep'
  config.pool.num_workers = 1
  config.pool.max_resets_per_worker = 0
  config.rollout.groups = 8
  config.rollout.max_prompt_tokens = 320
  config.rollout.max_completion_tokens = 40
  config.rollout.prompt_buckets = (192, 320)
  config.rollout.batch_buckets = (16, 64)
  config.loss.kl_weight = 0.0
  config.loss.entropy_weight = 0.0
  config.optimizer.learning_rate = 4e-4
  config.learner.minibatch_rows = 256
  config.learner.microbatch_rows = 8
  config.learner.length_buckets = (160, 192, 224, 360)
  config.evaluation.split = 'valid_unseen'
  config.evaluation.num_tasks = 128
  # The policy as it samples in training; the paper's 0.4 flatters the start.
  config.evaluation.temperature = 1.0
  config.evaluation.every = 12
  config.checkpoint.every = 5
  # launch/sft.py with these makes the first stage of the warm start; see
  # configs/warm_starts/make_alfworld_tiny.sh.
  config.sft.init = 'scratch'
  config.sft.num_episodes = 4000
  config.sft.noise = 0.35
  # Learning the prompts too is what teaches so small a policy to copy.
  config.sft.completion_only = False
  config.sft.learning_rate = 3e-3
  config.sft.warmup_updates = 50
  config.sft.minibatch_rows = 16
  config.sft.vocab_size = 1024
  config.sft.model.layers = 3
  config.sft.model.width = 128
  config.sft.model.heads = 4
  config.sft.model.kv_heads = 4
  config.sft.model.mlp = 256


def _mini(config: ml_collections.ConfigDict) -> None:
  """The tiny path in eight minutes of one core, for many runs."""
  config.num_iterations = 30
  config.rollout.groups = 4
  config.rollout.batch_buckets = (16, 32)
  # As many updates in an iteration.
  config.learner.minibatch_rows = 128
  config.evaluation.num_tasks = 128
  config.evaluation.every = 15


def _smoke(config: ml_collections.ConfigDict) -> None:
  """The tiny path, cut to under two minutes."""
  config.num_iterations = 2
  config.rollout.groups = 4
  config.rollout.episodes_per_group = 4
  config.rollout.batch_buckets = (16,)
  config.evaluation.num_tasks = 16
  config.evaluation.every = 2
  config.checkpoint.every = 1
