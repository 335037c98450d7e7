"""Options that mix the agents of an environment with several agents."""

import itertools
from collections.abc import Iterator

import ml_collections

import envs
from gigpo_jax import algorithms, modulators, plugins


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option that several agents cannot have."""
  if len(envs.agents(config.env.name, config.env)) <= 1:
    return
  reason = f'env.name={config.env.name} has several agents'
  if config.algorithm.anchor == 'shuffled':
    yield (
      f'algorithm.anchor=shuffled: {reason}, whose states it would mix; must '
      'be another anchor'
    )
  try:
    algorithm = algorithms.of_section(config.algorithm.to_dict())
    chain = modulators.FAMILY.make(config.algorithm)
  except ValueError:  # Reported with the algorithm.
    return
  if algorithms.num_continuations(algorithm):
    yield (
      f'algorithm.name={config.algorithm.name}: {reason}, and a state has one '
      'value; must be an algorithm without continuations'
    )
  if hasattr(algorithm, 'branches_per_turn'):
    yield (
      f'algorithm.name={config.algorithm.name}: {reason}, and vines of a state '
      'are those of one; must be an algorithm without '
      'algorithm.branches_per_turn'
    )
  if config.reward.agents == 'own':
    reason += ', of which reward.agents=own knows only the rewards'
    yield from _own_success(config, reason, algorithm, chain)


def _own_success(
  config: ml_collections.ConfigDict,
  reason: str,
  algorithm: algorithms.Algorithm,
  chain: tuple[modulators.Modulator, ...],
) -> Iterator[str]:
  """Yields options that read the success or the score of an agent."""
  names = tuple(config.algorithm.modulators)
  if plugins.reads_success(algorithm):
    yield (
      f'algorithm.name={config.algorithm.name}: {reason}; must be an algorithm '
      'that does not read their success'
    )
  for name in itertools.compress(names, map(plugins.reads_success, chain)):
    yield (
      f'algorithm.modulators={names}: {reason}; {name} reads their success and '
      'must be left out'
    )
  if 'score' in config.algorithm.components:
    yield (
      f'algorithm.components={tuple(config.algorithm.components)}: {reason}; '
      'must not have score'
    )
  sft = config.sft
  imitates = sft.loss == 'imitation' and (sft.data or sft.rounds)
  if sft.only_successful and (imitates or config.teacher.data):
    yield f'sft.only_successful=True: {reason}; must be False'
