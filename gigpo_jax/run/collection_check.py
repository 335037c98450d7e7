"""Checks of which episodes a config collects."""

import math
from collections.abc import Iterator

import ml_collections

from gigpo_jax import options

# Largest number of tokens in the rows of an iteration, with padding. The host
# holds several arrays with four bytes for each of them, 64 GiB.
_MAX_TOKENS = 2**34


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields conflicts of the rows' size, the filter and rollout.carry_over."""
  yield from _too_many_tokens(config)
  members = config.rollout.episodes_per_group
  if config.filter.drop_zero_variance and members < options.MIN_GROUP:
    yield (
      'filter.drop_zero_variance=True: one episode has no variance; needs '
      'rollout.episodes_per_group of at least 2'
    )
  if config.filter.drop_zero_variance and config.reward.scored:
    yield (
      'filter.drop_zero_variance=True: filters by the rewards of the '
      f'environment, before reward.scored={tuple(config.reward.scored)}; must '
      'be False'
    )
  if config.filter.drop_zero_variance and config.tasks.draw == 'stages':
    yield (
      'filter.drop_zero_variance=True: the tasks of refills have no stage; '
      'must be False with tasks.draw=stages'
    )
  if config.rollout.carry_over > 0:
    yield from _carry_over(config)


def _too_many_tokens(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if full-length episodes would not fit into memory."""
  rollout, turns = config.rollout, config.env.get('max_steps') or 1
  width = rollout.max_prompt_tokens + rollout.max_completion_tokens
  tokens = rollout.groups * rollout.episodes_per_group * turns * width
  if tokens > _MAX_TOKENS:
    yield (
      f'env.max_steps={turns}: rollout.groups={rollout.groups} of '
      f'rollout.episodes_per_group={rollout.episodes_per_group} have '
      f'{tokens:,} tokens if all turns have {width}; must be at most '
      f'{_MAX_TOKENS:,}'
    )


def _carry_over(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields conflicts of rollout.carry_over."""
  turns, (field, limit) = config.rollout.carry_over, _turn_limit(config)
  if config.filter.drop_zero_variance:
    yield (
      f'rollout.carry_over={turns}: filter.drop_zero_variance replaces groups '
      'within an iteration; must be 0, or filter.drop_zero_variance=False'
    )
  if config.guard.action == 'rollback':
    yield (
      f'rollout.carry_over={turns}: a rollback would continue episodes of the '
      'policy that it discards; must be 0, or guard.action=shrink'
    )
  if limit and turns >= limit:
    yield (
      f'rollout.carry_over={turns}: no episode has more turns; must be below '
      f'{field}={limit}, or 0'
    )
  # A group that has waited max_staleness times runs to its end.
  is_short = config.num_iterations <= config.rollout.max_staleness
  if limit and is_short and config.num_iterations * turns < limit:
    yield (
      f'rollout.carry_over={turns}: an episode of {field}={limit} turns does '
      f'not end within num_iterations={config.num_iterations}; must be at '
      f'least {-(-limit // config.num_iterations)}, or 0'
    )
  if not config.loss.tis_clip and config.loss.old_log_probs != 'sampler':
    yield (
      f'rollout.carry_over={turns}: earlier policies sample some turns; needs '
      'loss.old_log_probs=sampler, or loss.tis_clip, such as 2.0'
    )


def _turn_limit(config: ml_collections.ConfigDict) -> tuple[str, int | None]:
  """Returns the smallest limit of all episodes' turns, and its field."""
  field, limit = 'env.max_steps', config.env.get('max_steps')
  horizon, end = config.rollout.horizon, config.num_iterations
  turns = {start: turns for start, turns in horizon if start < end}
  # Before the first iteration of the schedule there is no limit.
  if 0 in turns and (longest := max(turns.values())) < (limit or math.inf):
    return 'the largest limit of rollout.horizon', longest
  return field, limit
