r"""GiGPO on an environment of the package verifiers: letters, or any other.

    python launch/train.py --config=configs/verifiers.py \
        --config.model.path=.. --config.env.environment=MODULE

On a laptop, make a warm start for envs/verifiers_letters.py, by imitation of an
expert that takes a random letter in 50 % of its steps, and train it:

    python launch/sft.py --config=configs/verifiers.py:tiny
    python launch/train.py --config=configs/verifiers.py:tiny

For another environment, name its module or package in `config.env.environment`;
envs/verifiers_env.py documents the other fields.

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `smoke`, the tiny path in two minutes), an algorithm (`grpo`, `ppo`, ...)
and other changes, see `variants.CHANGES`.
"""

import ml_collections

from configs import base, sizes, variants


def _letters() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'verifiers'
  # A module or an installed package with load_environment.
  config.env.environment = 'envs.verifiers_letters'
  # Arguments of load_environment.
  config.env.options = ml_collections.ConfigDict()
  # Fields of the rollout's state by which steps are grouped. (): the messages.
  config.env.state_fields = ('left',)
  # Lowest reward of a success.
  config.env.success_reward = 1.0
  config.env.timeout_secs = 20.0
  config.env.max_result_chars = 8000
  config.env.max_steps = 6
  # Play for a warm start, module:function; see envs/demonstrators.py.
  config.env.demonstrator = 'envs.verifiers_letters:demonstrate'
  variants.use_conversation(config)
  config.pool.num_workers = 4
  config.rollout.max_prompt_tokens = 8192
  config.rollout.prompt_buckets = (1024, 2048, 4096, 8192)
  config.learner.length_buckets = (8704,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  sizes.use_tool_policy(config, prompt_tokens=352)
  config.model.path = sizes.warm_start(__file__, variants.size(config))


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _letters, SIZES)
