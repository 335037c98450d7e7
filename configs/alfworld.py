"""GiGPO on ALFWorld: the paper's main experiment (Table 1, rows GiGPO).

    python launch/train.py --config=configs/alfworld.py            # 1.5B
    python launch/train.py --config=configs/alfworld.py:tiny       # CPU
    python launch/train.py --config=configs/alfworld.py:tiny,grpo

Variants are joined by commas:

- a size: `1.5b` (default), `0.5b`, `7b`; `small` for one GPU, without a
  download; `tiny` for a CPU; `mini` for sweeps, `mini_full` for sweeps
  in rooms of ALFRED's size; `smoke` for tests;
- an algorithm: `grpo`, `ppo`, ...;
- `conversation`: an episode is one growing conversation;
- `planner`: a planner takes the first turn, an actor all others;
- other changes, see `variants.CHANGES`.

Published success on valid_seen, mean of 3 seeds, 150 iterations: 1.5B GiGPO
86.7 %, GRPO 72.8 %; 7B GiGPO 90.8 %, GRPO 77.6 %. The paper used 2 x H100 for
1.5B: about 290 s per iteration, 12 hours. Results of this project are in
docs/results.md.
"""

import ml_collections

import configs
from configs import base, sizes, variants

# Learning rates of `:mini`; see sizes.use_mini.
RATES = {
  'ecpo': 1.5e-4,
  'g2po': 1.5e-4,
  'gagpo': 1.5e-4,
  'gigpo': 1.5e-4,
  'graphgpo': 7.5e-5,
  'grpo': 7.5e-5,
  'hgpo': 1.5e-4,
  'pgpo': 1.5e-4,
  'ppo': 7.5e-5,
  'rloo': 7.5e-5,
  'sampo': 7.5e-5,
}

# Those of `:mini_full`.
FULL_RATES = {'g2po': 7.5e-5, 'gigpo': 1.5e-4, 'grpo': 1.5e-4}

# Those of `:small`, see configs/sweeps/tuning_small.py, and the rate of methods
# that were not tuned.
SMALL_RATES = {'g2po': 3e-5, 'gigpo': 1e-5, 'grpo': 1e-5}
SMALL_RATE = 1e-5


def _paper() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'alfworld'
  # native: this project's engine | textworld: the reference engine, with the
  # same output but slower. It executes Python expressions from game files.
  config.env.engine = 'native'
  # Whether textworld may run games whose grammar contains code other than
  # ALFWorld's. Set this only for games from a trusted source.
  config.env.trust_games = False
  # Folder of `alfworld-download`. '': $ALFWORLD_DATA. 'generated': generated
  # games (envs/alfworld/houses.py).
  config.env.data_dir = ''
  config.env.max_steps = 50  # turns per episode; paper
  config.env.history_length = 2  # turns of history in a prompt; paper
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  config.env.require_admissible = False
  # Order in which the expert of the warm start searches receptacles: random |
  # likely | sweep.
  config.env.expert_order = 'random'
  config.env.generator = ml_collections.ConfigDict()
  config.env.generator.seed = 0
  # Chosen by simulation for few programs; benchmarks/results/simulated.md.
  config.rollout.prompt_buckets = (1024, 2048)
  config.rollout.batch_buckets = (32, 64, 128)
  config.pool.num_workers = 8
  # TextWorld leaks about 1 MB per game.
  config.pool.max_resets_per_worker = 2000
  config.evaluation.split = 'valid_seen'
  config.evaluation.inside_rollout = True
  config.sft.init = ''  # Imitation starts from model.path.
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a 0.6M-parameter policy and generated one-room games, for a CPU."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 60
  config.model.path = 'configs/warm_starts/alfworld_tiny'
  config.env.data_dir = 'generated'
  config.env.generator.receptacles = (4, 6)
  config.env.generator.distractors = (2, 5)
  # ALFWorld's splits have 140 and 134 games. More give narrower intervals.
  config.env.generator.num_held_out = 512
  config.env.max_steps = 16
  config.env.expert_order = 'sweep'
  config.pool.max_resets_per_worker = 0  # The native engine does not leak.
  config.rollout.max_prompt_tokens = 320
  config.rollout.max_completion_tokens = 40
  config.rollout.prompt_buckets = (192, 320)
  config.optimizer.learning_rate = 4e-4
  config.learner.microbatch_tokens = 2880
  config.learner.length_buckets = (160, 192, 224, 360)
  config.evaluation.split = 'valid_unseen'
  config.evaluation.inside_rollout = False  # A CPU is busy anyway.
  config.evaluation.every = 12
  config.checkpoint.every = 5
  # The first stage of the warm start; see
  # configs/warm_starts/make_alfworld_tiny.sh.
  config.sft.num_episodes = 4000
  config.sft.noise = 0.35


def _small(config: ml_collections.ConfigDict) -> None:
  """Selects a 0.1B-parameter policy and rooms of ALFRED's size, for one GPU.

  `launch/sft.py --config=configs/alfworld.py:small` makes the warm start.
  """
  config.num_iterations = 80
  config.model.dtype = 'bfloat16'
  config.pool.num_workers = 4
  config.env.generator = ml_collections.ConfigDict({'seed': 0})
  config.env.generator.num_held_out = 512
  config.env.max_steps = 30
  config.env.expert_order = 'likely'
  config.rollout.groups = 16
  config.rollout.max_prompt_tokens = 640
  config.rollout.prompt_buckets = (320, 640)
  config.rollout.batch_buckets = (128,)
  rate = sizes.tuned_rate(config, SMALL_RATES, SMALL_RATE)
  config.optimizer.learning_rate = rate
  config.optimizer.b2 = 0.98
  config.learner.microbatch_tokens = 21_760
  config.learner.length_buckets = (256, 384, 680)
  config.evaluation.num_tasks = 128
  config.evaluation.inside_rollout = True
  config.evaluation.every = 10
  config.sft.num_episodes = 3000
  config.sft.noise = 0.5
  config.sft.learning_rate = 5e-4
  config.sft.minibatch_rows = 32
  config.sft.model.layers = 12
  config.sft.model.width = 768
  config.sft.model.heads = 12
  config.sft.model.kv_heads = 4
  config.sft.model.mlp = 3072
  config.model.path = sizes.warm_start(__file__, 'small', shared=False)


def _use_conversation(config: ml_collections.ConfigDict) -> None:
  """Makes an episode a conversation; a tiny one has a warm start of its own."""
  variants.use_conversation(config)
  sizes.make_room_for_turns(config, brief_tokens=120)
  if config.env.prompt_style == 'brief':
    if config.model.path == 'configs/warm_starts/alfworld_tiny':
      config.model.path += '_conversation'
    config.learner.microbatch_tokens = 6_000


def _use_planner(config: ml_collections.ConfigDict) -> None:
  """Selects two agents; a small planner has room for five or six actions."""
  config.env.name = 'envs.alfworld.planner'
  if config.env.prompt_style != 'brief':
    return
  config.env.max_plan_chars = 120
  # Made by configs/warm_starts/make_alfworld_tiny_planner.sh.
  own = 'configs/warm_starts/alfworld_tiny_planner'
  if configs.find(own):
    config.model.path = own
  config.rollout.max_completion_tokens = 72
  config.learner.length_buckets = (160, 192, 224, 256, 392)
  config.learner.microbatch_tokens = 3136
  # From the warm start without a planner.
  config.sft.init = ''
  config.sft.num_episodes = min(config.sft.num_episodes, 400)
  config.sft.learning_rate = 2e-3


def _full_rooms(config: ml_collections.ConfigDict) -> None:
  """Selects rooms with as many receptacles and objects as ALFRED's have."""
  sizes.use_mini(config, FULL_RATES)
  config.num_iterations = 16
  config.env.generator = ml_collections.ConfigDict({'seed': 0})
  config.env.generator.num_held_out = 512
  config.env.max_steps = 30
  config.env.expert_order = 'likely'
  config.rollout.max_prompt_tokens = 640
  config.rollout.prompt_buckets = (320, 640)
  config.learner.length_buckets = (360, 680)
  config.evaluation.every = 8
  config.evaluation.num_tasks = 64
  # From the warm start of `tiny`; see
  # configs/warm_starts/make_alfworld_mini_full.sh.
  config.sft.init = ''
  config.sft.num_episodes = 1500
  config.sft.noise = 0.5
  config.sft.learning_rate = 2e-3
  config.model.path = sizes.warm_start(__file__, 'mini_full', shared=False)


def _mini(config: ml_collections.ConfigDict) -> None:
  sizes.use_mini(config, RATES)
  config.num_iterations = 56
  config.evaluation.every = 28


def _large(config: ml_collections.ConfigDict) -> None:
  config.learner.microbatch_tokens = 20_480


# `small` and the sizes for CPUs start from `tiny`.
SIZES = {
  '1.5b': (),
  '0.5b': (),
  '7b': (_large,),
  'small': (_tiny, _small),
  'tiny': (_tiny,),
  'mini': (_tiny, _mini),
  'mini_full': (_tiny, _full_rooms),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  own = {'conversation': _use_conversation, 'planner': _use_planner}
  return variants.make(__file__, arg, _paper, SIZES, own)
