"""GiGPO with the tools of an MCP server: a safe behind notes, or any other.

    python launch/train.py --config=configs/mcp.py --config.model.path=..

On a laptop, make a warm start by imitation with mistakes and train it:

    python launch/sft.py --config=configs/mcp.py:tiny
    python launch/train.py --config=configs/mcp.py:tiny

For another server, set `config.env.server`, `config.env.tasks` and the tools
that serve the environment; envs/mcp_env.py documents them.

Variants, joined by commas: a size (`1.5b`, the default; `tiny` for two CPU
cores; `smoke`, the tiny path in two minutes), an algorithm (`grpo`, `ppo`, ...)
and other changes, see `variants.CHANGES`.
"""

import ml_collections

from configs import base, sizes, variants


def _notes() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'mcp'
  # A URL, or a command; `python` is the interpreter of the run.
  config.env.server = 'python -m envs.notes_server'
  # A file with a task a line as JSON, or module:function.
  config.env.tasks = 'envs.notes_server:tasks'
  # Names of the policy's tools. (): all that the environment does not use.
  config.env.tools = ()
  # Tools that serve the environment; '' for none.
  config.env.reset_tool = 'reset'
  config.env.state_tool = 'state'
  config.env.score_tool = 'score'
  # Lowest score of a success.
  config.env.success_score = 1.0
  # System message; '' uses the server's instructions.
  config.env.system = ''
  # Environment variables that a server's command gets.
  config.env.variables = ('PYTHONPATH',)
  config.env.timeout_secs = 20.0
  config.env.max_result_chars = 8000
  config.env.max_steps = 6
  variants.use_conversation(config)
  config.pool.num_workers = 4
  config.rollout.max_prompt_tokens = 8192
  config.rollout.prompt_buckets = (1024, 2048, 4096, 8192)
  config.learner.length_buckets = (8704,)
  config.evaluation.split = 'valid'
  config.evaluation.num_tasks = 128
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  sizes.use_tool_policy(config, prompt_tokens=320)
  config.pool.num_envs = 16  # Each has a server, which takes a second to start.
  config.rollout.batch_buckets = (16,)
  config.sft.num_episodes = 1500
  config.sft.epochs = 6
  config.sft.noise = 0.4
  config.model.path = sizes.warm_start(__file__, variants.size(config))


SIZES = {
  '1.5b': (),
  'tiny': (_tiny,),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _notes, SIZES)
