"""REBEL (arXiv:2404.16767): regression to relative rewards.

The loss `row_regression` fits the log-ratio of a row to the policy before the
update, divided by eta, to the advantage. Its docstring derives the advantage
from the pairs of the paper. E is the undiscounted sum of an episode's rewards,
minus a penalty for each invalid response.

# Differs from the paper: all pairs of a group, not one; a row is a turn of an
episode, with the return of the whole episode; the mean log-ratio of a group
counts as 0.
"""

import dataclasses
from collections.abc import Iterator

import ml_collections

from gigpo_jax.algorithms import a_star_po, grpo

_LOSS = a_star_po.LOSS | {'log_ratio_to': 'old', 'log_ratio_weight': 1.0}

PRESETS = {'rebel': {f'loss.{name}': x for name, x in _LOSS.items()}}


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option of the loss with an unsupported value."""
  for name in (*a_star_po.LOSS, 'log_ratio_to'):
    if config.loss[name] != _LOSS[name]:
      yield (
        f'loss.{name}={config.loss[name]}: rebel is a regression of whole rows '
        f'on the policy before the update; must be {_LOSS[name]}'
      )


@dataclasses.dataclass(frozen=True)
class Algorithm(grpo.Algorithm):
  """A = E - mean, and (log(pi / old) / eta - A)^2 as the loss of a row."""

  norm: str = dataclasses.field(default='mean', init=False)
