"""Registry of selectors, which choose the tokens that an update trains on.

`filter.select` names a chain. Each selector is a pure function of advantages,
rows and signals, and a module with a frozen dataclass `Selector`; see
`plugins`. To add one, add a module and a line of REGISTRY. Rows without a
chosen token are not computed, which saves time. The other rows are computed in
full, but the other tokens neither count in the loss nor in its normalizer.
Advantages stay those of all rows.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import ml_collections
import numpy as np
from jaxtyping import Bool, Float

from gigpo_jax import batch, losses, plugins
from gigpo_jax.runtime import errors

# name: module that holds `Selector`.
REGISTRY = {
  'best_and_worst': 'gigpo_jax.selectors.best_and_worst',
  'capo': 'gigpo_jax.selectors.capo',
  'd3s': 'gigpo_jax.selectors.d3s',
  'mismatch': 'gigpo_jax.selectors.mismatch',
  's_grpo': 'gigpo_jax.selectors.s_grpo',
  'snr': 'gigpo_jax.selectors.snr',
  'truncated': 'gigpo_jax.selectors.truncated',
}

FAMILY = plugins.Family('filter.select', REGISTRY, 'Selector')


def refuse_row_loss(
  config: ml_collections.ConfigDict, name: str
) -> Iterator[str]:
  """Yields a line if a loss of whole rows would ignore the chosen tokens."""
  if losses.is_per_row(config.loss.name):
    yield (
      f'filter.select={name}: chooses tokens, but loss.name='
      f'{config.loss.name} trains whole rows; must be a selector of rows, or ()'
    )


def refuse_by_reward(
  config: ml_collections.ConfigDict, reason: str
) -> Iterator[str]:
  """Yields a line for each filter of groups by their rewards.

  Args:
    config: the experiment.
    reason: why an algorithm needs the other groups, too.
  """
  if config.filter.drop_zero_variance:
    yield f'filter.drop_zero_variance=True: {reason}; must be False'
  for name in config.filter.select:
    if _is_by_reward(name):
      yield f'filter.select={name}: {reason}; must be another selector, or ()'


def measures(config: ml_collections.ConfigDict) -> bool:
  """Returns whether a selector of the chain may report metrics."""
  chain = FAMILY.names(config.filter)
  return any(hasattr(FAMILY.find(name), 'metrics') for name in chain)


def _is_by_reward(name: str) -> bool:
  """Returns whether a selector drops groups of equal returns."""
  try:
    return getattr(FAMILY.find(name), 'by_reward', False)
  except ValueError:  # Unknown; `FAMILY.conflicts` reports it.
    return False


class Selector(Protocol):
  """Chooses rows or tokens; for attributes see `modulators.Modulator`.

  A selector may also have `metrics`, which returns metrics by name; see
  `plugins.metrics`. `by_reward` is True if it drops groups of equal returns.
  """

  needs: tuple[str, ...]
  needs_group: bool

  def __call__(
    self,
    advantages: Float[np.ndarray, ' R'] | Float[np.ndarray, 'R C'],
    rows: batch.Rows,
    signals: plugins.Signals,
  ) -> Bool[np.ndarray, ' R'] | Bool[np.ndarray, 'R C']:
    """Returns True for the rows or completion tokens to train on.

    Args:
      advantages: the final advantages.
      rows: the rows of the iteration; those without a chosen token are padding.
      signals: the outputs that it needs.
    """


def apply(
  chain: Sequence[Selector],
  advantages: np.ndarray,
  rows: batch.Rows,
  signals: plugins.Signals,
) -> tuple[batch.Rows, Bool[np.ndarray, 'R C'], dict[str, float]]:
  """Returns the rows that a chain keeps, their chosen tokens, and metrics."""
  chosen = rows.completion_mask
  if signals.rows is None:
    signals = dataclasses.replace(signals, rows=rows)
  num_rows, num_tokens = rows.real.sum(), chosen.sum()
  metrics: dict[str, float] = {}
  for selector in chain:
    with errors.show_traceback(FAMILY.field):
      metrics |= plugins.metrics(selector, advantages, rows, signals)
      mask = np.asarray(selector(advantages, rows, signals))
    plugins.check_values(FAMILY.field, mask, rows)
    if mask.dtype != bool:
      raise ValueError(
        f'{FAMILY.field}: returned {mask.dtype}; must be bool, True for the '
        'rows or tokens to train on'
      )
    chosen &= mask if mask.ndim > 1 else mask[:, None]
    rows = keep(rows, chosen.any(axis=1))
  metrics |= {
    'filter/rows_share': float(rows.real.sum() / max(num_rows, 1)),
    'filter/tokens_share': float(chosen.sum() / max(num_tokens, 1)),
  }
  return rows, chosen, metrics if chain else {}


def keep(rows: batch.Rows, mask: Bool[np.ndarray, ' R']) -> batch.Rows:
  """Returns rows in which those outside of the mask are padding."""
  return dataclasses.replace(
    rows,
    groups=np.where(mask, rows.groups, -1),
    lengths=np.where(mask, rows.lengths, 0),
    prompt_lengths=np.where(mask, rows.prompt_lengths, 0),
  )
