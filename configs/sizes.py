"""Small sizes of experiments, and the warm starts that they need."""

import pathlib
import re
from collections.abc import Mapping

import ml_collections

import configs
from configs import base, variants

# Warm starts that are part of the project.
INCLUDED = 'configs/warm_starts'
# Learning rate of `:mini` for methods without a tuned rate.
MINI_RATE = 7.5e-5


def use_tiny_policy(config: ml_collections.ConfigDict) -> None:
  """Selects a 0.6M-parameter policy from launch/sft.py, for a CPU."""
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  if 'prompt_style' in config.env:
    config.env.prompt_style = 'brief'
  config.pool.num_workers = 1
  config.rollout.groups = 8
  config.rollout.episodes_per_group = 8
  # Few buckets, because each takes seconds to compile. () derives them from the
  # token limits, which the environment's config sets.
  config.rollout.max_prompt_tokens = 512
  config.rollout.max_completion_tokens = 64
  config.rollout.prompt_buckets = ()
  config.rollout.batch_buckets = (16, 64)
  config.learner.length_buckets = ()
  config.loss.kl_weight = 0.0
  config.loss.entropy_weight = 0.0
  config.optimizer.learning_rate = 2e-4
  config.learner.minibatch_rows = 256
  config.learner.microbatch_tokens = 4096
  config.evaluation.num_tasks = 256
  # As in training: the paper's 0.4 raises the success of the warm start.
  config.evaluation.temperature = 1.0
  config.sft.init = 'scratch'
  # A policy this small learns to copy only if it also trains on prompts.
  config.sft.completion_only = False
  config.sft.learning_rate = 3e-3
  config.sft.warmup_updates = 50
  config.sft.minibatch_rows = 16
  config.sft.model.layers = 3
  config.sft.model.width = 128
  config.sft.model.heads = 4
  config.sft.model.kv_heads = 4
  config.sft.model.mlp = 256


def use_tool_policy(
  config: ml_collections.ConfigDict, *, prompt_tokens: int
) -> None:
  """Selects a 0.1M-parameter policy for short conversations with tools.

  It suits tasks in which a few tokens of the last message decide what to do.
  Imitation takes about a thousand small updates; after fewer, the policy knows
  the form of a response but does not read.

  Args:
    config: the experiment, changed in place.
    prompt_tokens: upper bound of a conversation before its last response.
  """
  use_tiny_policy(config)
  length = prompt_tokens + 32
  config.num_iterations = 15
  config.rollout.groups = 4
  config.rollout.episodes_per_group = 16
  config.rollout.max_prompt_tokens = prompt_tokens
  config.rollout.max_completion_tokens = 32
  config.rollout.prompt_buckets = (prompt_tokens,)
  config.rollout.batch_buckets = (64,)
  # As in `use_mini`.
  config.loss.old_log_probs = 'sampler'
  # Few episodes succeed at first; a larger penalty would outweigh them.
  config.algorithm.invalid_penalty = 0.01
  # At 8e-4, the form of the calls was lost within eight iterations.
  config.optimizer.learning_rate = 3e-4
  config.optimizer.b2 = 0.98
  config.learner.minibatch_rows = 64
  config.learner.microbatch_tokens = 8 * length
  config.learner.length_buckets = (length,)
  config.evaluation.every = 15
  config.sft.num_episodes = 3000
  config.sft.noise = 0.5
  config.sft.minibatch_rows = 8  # Episodes.
  config.sft.epochs = 2
  use_two_layers(config)


def use_two_layers(config: ml_collections.ConfigDict) -> None:
  """Gives the warm start a network of 0.1M parameters."""
  config.sft.model.layers = 2
  config.sft.model.width = 64
  config.sft.model.mlp = 128


# Path where launch/sft.py writes the warm start of `configs/NAME.py:SIZE`.
WARM_START = re.compile(r'runs/(\w+)-(\w+)-sft/policy')


def warm_start(file: str, size: str, *, shared: bool = True) -> str:
  """Returns the path of the warm start of a small size.

  The path is the default output of `launch/sft.py --config=FILE:SIZE`. If that
  does not exist, it is the warm start that the project includes, if any.

  Args:
    file: path of the config file.
    size: a small variant, such as 'tiny'.
    shared: whether the size has the network and the prompts of `tiny`, so that
      it may start from the included warm start of `tiny`.
  """
  name = pathlib.Path(file).stem
  made = 'tiny' if size == 'mini' and shared else size
  own = f'runs/{name}-{made}-sft/policy'
  included = f'{INCLUDED}/{name}_{"tiny" if shared else size}'
  if not configs.find(own) and configs.find(included):
    return included
  return own


def tuned_rate(
  config: ml_collections.ConfigDict,
  rates: Mapping[str, float],
  untuned: float,
) -> float:
  """Returns the learning rate of the methods among a config's variants.

  Args:
    config: the experiment.
    rates: tuned learning rate per method.
    untuned: the rate of methods without an entry.
  """
  known = (*variants.ALGORITHMS, 'sampo')
  methods = [word for word in config.variant.split(',') if word in known]
  methods = methods or [base.DEFAULT_ALGORITHM]
  return min(rates.get(method, untuned) for method in methods)


def use_mini(
  config: ml_collections.ConfigDict, rates: Mapping[str, float]
) -> None:
  """Shortens a tiny config to about six minutes of one CPU core.

  With compiled programs, it takes three to four.

  Args:
    config: the tiny experiment, changed in place.
    rates: tuned learning rate per method, see configs/sweeps/tuning.py. Methods
      without an entry use the smallest of these rates and MINI_RATE.
  """
  untuned = min([MINI_RATE, *rates.values()])
  config.optimizer.learning_rate = tuned_rate(config, rates, untuned)
  config.rollout.groups = 2
  config.rollout.batch_buckets = (16,)
  # As many updates per iteration as `tiny` has.
  config.learner.minibatch_rows = 64
  # In float32 on a CPU, these differ from the learner's log-probs only in the
  # last bits, and save a forward pass.
  config.loss.old_log_probs = 'sampler'
  config.evaluation.num_tasks = 128


def use_smoke(config: ml_collections.ConfigDict) -> None:
  """Shortens warm start and run to one or two minutes."""
  config.num_iterations = 2
  config.rollout.groups = 4
  config.rollout.episodes_per_group = 4
  # One bucket each, because compilation takes most of the time.
  config.rollout.batch_buckets = (16,)
  longest = config.rollout.max_prompt_tokens
  config.rollout.prompt_buckets = (longest,)
  config.learner.length_buckets = (
    longest + config.rollout.max_completion_tokens,
  )
  config.evaluation.num_tasks = 16
  config.evaluation.every = 2
  config.checkpoint.every = 1
  config.sft.num_episodes = 200
  config.sft.epochs = 1


def make_room_for_turns(
  config: ml_collections.ConfigDict, *, brief_tokens: int
) -> None:
  """Sets limits of tokens that hold the turns of a conversation.

  Args:
    config: config of an environment with `env.prompt_style`.
    brief_tokens: upper bound of a turn's tokens with brief prompts.
  """
  if config.env.prompt_style == 'brief':
    config.rollout.max_prompt_tokens = brief_tokens * config.env.max_steps
    config.rollout.prompt_buckets = ()
    config.learner.length_buckets = ()
    config.sft.minibatch_rows = 4  # Episodes.
  else:
    config.rollout.max_prompt_tokens = 16_384
    config.rollout.prompt_buckets = (2048, 4096, 8192, 16_384)
    config.learner.length_buckets = (16_896,)
  # From the warm start for prompts with history.
  config.sft.init = ''
  config.sft.num_episodes = 1000
  config.sft.learning_rate = 1e-3
