"""GiGPO on a generated help desk with tools, in the style of tau-bench.

    python launch/train.py --config=configs/helpdesk.py --config.model.path=..

On a laptop, train from the included warm start, which imitates an expert that
makes mistakes (configs/warm_starts/make.sh):

    python launch/train.py --config=configs/helpdesk.py:tiny

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `mini` for sweeps, from the warm start of `tiny`; `smoke`, the tiny path
in two minutes), an algorithm (`grpo`, `ppo`, ...) and other changes, see
`variants.CHANGES`. envs/helpdesk/cases.py generates the cases. An episode is a
growing conversation with tools; success is an exact match of the final
database.
"""

import ml_collections

from configs import base, sizes, variants

# Learning rates of `:mini`; see sizes.use_mini. docs/results/history.md has how
# they were tuned.
RATES = {'g2po': 1.5e-4, 'gigpo': 3e-4, 'grpo': 3e-4}


def _cases() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'helpdesk'
  config.env.generator = ml_collections.ConfigDict()
  config.env.generator.users = 3  # of the database; two share their name
  config.env.generator.seed = 0
  # A solution has 4 to 7 steps.
  config.env.max_steps = 12
  config.env.prompt_style = 'paper'
  variants.use_conversation(config)
  config.pool.num_workers = 2
  config.rollout.max_prompt_tokens = 6144
  config.rollout.prompt_buckets = (1536, 3072, 6144)
  config.learner.length_buckets = (6656,)
  config.evaluation.split = 'test'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy, which learns the tools by imitation."""
  sizes.use_tool_policy(config, prompt_tokens=704)
  config.num_iterations = 20
  config.evaluation.every = 10
  config.env.max_steps = 9
  # Two conversations share a sequence.
  config.learner.microbatch_tokens = 2 * config.learner.length_buckets[-1]
  config.sft.num_episodes = 4000
  config.sft.noise = 0.2
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _mini(config: ml_collections.ConfigDict) -> None:
  sizes.use_mini(config, RATES)
  config.rollout.batch_buckets = (32,)
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
  return variants.make(__file__, arg, _cases, SIZES)
