"""Checks of the low-rank adapters of a config."""

from collections.abc import Iterator, Set

import ml_collections

import envs
from gigpo_jax import sampler_checks


def of_sampler(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line if the sampler reads adapters wrongly, or without a need."""
  weights, rank = config.rollout.weights, config.lora.rank
  if weights == 'adapters' and not rank:
    yield (
      'rollout.weights=adapters: there are no adapters; needs lora.rank above 0'
    )
  dtype = 'int8' if weights == 'int8' else config.model.dtype
  if rank and weights != 'adapters' and dtype != 'float32':
    yield (
      f'rollout.weights={weights}: would merge adapters (lora.rank={rank}) '
      f'into {dtype} matrices, which rounds them away; must be adapters, as in '
      'the variant :lora, which also raises the learning rate'
    )


def of_agents(
  config: ml_collections.ConfigDict, refused: Set[str]
) -> Iterator[str]:
  """Yields the conflicts of adapters of agents, if they are not `refused`."""
  agents, weights = tuple(config.lora.agents), config.rollout.weights
  if not agents or 'lora.agents' in refused:
    return
  try:
    sampler_checks.check_adapters(agents, weights)
  except ValueError as error:
    yield str(error)
  if config.teacher.mu_peak and config.teacher.loss != 'distillation':
    yield (
      f'teacher.mu_peak={config.teacher.mu_peak}: the rows of the teacher name '
      f'no agent of lora.agents={agents}; must be 0'
    )
  known = envs.agents(config.env.name, config.env)
  if set(agents) != set(known):
    yield (
      f'lora.agents={agents}: the agents of env.name={config.env.name} are '
      f'{known}; must be {"these" if known else "()"}'
    )
