r"""GiGPO on an environment behind an OpenEnv server.

    python launch/train.py --config=configs/openenv.py \
        --config.model.path=.. --config.env.task='..' \
        --config.env.server=http://127.0.0.1:8000

envs/openenv_env.py documents `config.env`. The policy must know how to call
tools; any instruct model of Qwen2.5 or Qwen3 does.

On a laptop, start the server of an example, a row of lamps, in another
terminal. Then make a warm start by imitation of an expert that plays at random
in 60 % of its steps, and train it:

    python -m envs.lamps_server 8000
    python launch/sft.py --config=configs/openenv.py:tiny
    python launch/train.py --config=configs/openenv.py:tiny

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `smoke`, the tiny path in two minutes), an algorithm (`grpo`, `ppo`, ...)
and other changes, see `variants.CHANGES`.

The five lamps have 31 initial states, which training and held-out tasks share.
Success therefore measures how well the policy knows these lamps.
"""

import ml_collections
from ml_collections import config_dict

from configs import base, sizes, variants


def _server() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'openenv'
  # URL of the server.
  config.env.server = config_dict.placeholder(str)
  # The task as a sentence; '' if the first observation states it.
  config.env.task = ''
  # Further arguments of the server's reset, besides the seed.
  config.env.options = ml_collections.ConfigDict()
  # Lowest sum of rewards of a success.
  config.env.success_return = 1.0
  config.env.seed = 0
  config.env.timeout_secs = 20.0
  config.env.max_result_chars = 8000
  config.env.max_steps = 20
  # Play for a warm start, module:function; see envs/demonstrators.py.
  config.env.demonstrator = ''
  variants.use_conversation(config)
  config.pool.num_workers = 4
  config.rollout.max_prompt_tokens = 8192
  config.rollout.prompt_buckets = (1024, 2048, 4096, 8192)
  config.learner.length_buckets = (8704,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy and the lamps of envs/lamps_server.py."""
  sizes.use_tool_policy(config, prompt_tokens=288)
  config.env.server = 'http://127.0.0.1:8000'
  config.env.task = 'Switch all lamps off.'
  config.env.max_steps = 5
  config.env.demonstrator = 'envs.lamps_server:demonstrate'
  config.sft.noise = 0.6
  config.model.path = sizes.warm_start(__file__, variants.size(config))


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _server, SIZES)
