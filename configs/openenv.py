"""GiGPO on an environment behind an OpenEnv server.

    python launch/train.py --config=configs/openenv.py --config.model.path=..
      --config.env.server=http://127.0.0.1:8000 --config.env.task='..'

envs/openenv_env.py documents `config.env`. There is no expert, so the policy
must know how to call tools; any instruct model of Qwen2.5 or Qwen3 does.

Variants, joined by commas: an algorithm (`grpo`, `ppo`, ...) and other changes,
see `variants.CHANGES`.
"""

import ml_collections
from ml_collections import config_dict

from configs import base, variants

SIZES = ('1.5b',)


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  size, changes = variants.parse(
    arg, 'openenv', sizes=SIZES, changes=variants.CHANGES
  )
  config = _server()
  config.variant = ','.join([size or '1.5b', *changes])
  variants.apply(config, changes)
  return config


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
  variants.use_conversation(config)
  config.pool.num_workers = 4
  config.rollout.max_prompt_tokens = 8192
  config.rollout.prompt_buckets = (1024, 2048, 4096, 8192)
  config.learner.length_buckets = (8704,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config
