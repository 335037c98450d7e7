"""Sums over the updates of an iteration, of which its metrics are made."""

import math
from collections.abc import Iterable, Mapping

import flax.struct
import jax
import jax.numpy as jnp

_MAX = '/max'  # Values of names with this ending have a maximum instead.


@flax.struct.dataclass
class UpdateSums:
  """Sums over the tokens and the updates of an iteration, on the device.

  An update is skipped if its objective or gradient is not finite. Its tokens do
  not count, because their values need not be finite either.

  Attributes:
    tokens: sum, or maximum, over tokens by name, with the update in progress.
    applied: the same without it, and without skipped updates.
    objective: sum of the weighted losses of the update in progress.
    grad_norm: sum of the norms of the gradients that were applied.
    skipped: number of skipped updates.
    skipped_in_row: number of consecutive skipped updates up to now, those of
      earlier iterations included.
    most_skipped_in_row: the largest such number in this iteration.
    step_scale: factor of the updates; None: 1.
  """

  tokens: dict[str, jax.Array]
  applied: dict[str, jax.Array]
  objective: jax.Array
  grad_norm: jax.Array
  skipped: jax.Array
  skipped_in_row: jax.Array
  most_skipped_in_row: jax.Array
  step_scale: jax.Array | None

  def add(
    self,
    values: Mapping[str, jax.Array],
    mask: jax.Array,
    objective: jax.Array,
    *,
    count: str = 'update/tokens',
  ) -> 'UpdateSums':
    """Adds the tokens of a microbatch.

    Args:
      values: values of its tokens by name.
      mask: the tokens that count.
      objective: the sum of their weighted losses.
      count: name of the number of tokens.
    """
    tokens = dict(self.tokens)
    for name, x in values.items():
      if name.endswith(_MAX):
        largest = jnp.max(jnp.where(mask, x, -jnp.inf))
        tokens[name] = jnp.maximum(tokens[name], largest)
      else:
        tokens[name] += jnp.sum(jnp.where(mask, x, 0))
    tokens[count] += jnp.sum(mask, dtype=jnp.float32)
    return self.replace(tokens=tokens, objective=self.objective + objective)

  def end_update(self, applied: jax.Array, norm: jax.Array) -> 'UpdateSums':
    """Counts an update.

    Args:
      applied: whether it was applied; otherwise it was skipped.
      norm: the norm of its gradient.
    """
    tokens = jax.tree.map(
      lambda new, old: jnp.where(applied, new, old), self.tokens, self.applied
    )
    in_row = jnp.where(applied, 0.0, self.skipped_in_row + 1)
    return self.replace(
      tokens=tokens,
      applied=tokens,
      objective=jnp.zeros_like(norm),
      grad_norm=self.grad_norm + jnp.where(applied, norm, 0),
      skipped=self.skipped + (1.0 - applied),
      skipped_in_row=in_row,
      most_skipped_in_row=jnp.maximum(self.most_skipped_in_row, in_row),
    )

  def metrics(self, updates: int) -> dict[str, float]:
    """Returns the metrics of an iteration.

    If all updates were skipped, means and maxima are NaN. If no token was
    trained otherwise, there are none.

    Args:
      updates: number of updates.
    """
    sums = {name: float(x) for name, x in self.tokens.items()}
    tokens, skipped = sums.pop('update/tokens'), float(self.skipped)
    means = {k: sums.pop(k) for k in [*sums] if k.startswith('teacher/')}
    if means:
      # Its mean is over the teacher's own tokens.
      nothing = math.nan if skipped and not tokens else 1
      means['teacher/loss'] /= means['teacher/tokens'] or nothing
    if tokens:
      means |= {
        k: x if k.endswith(_MAX) else x / tokens for k, x in sums.items()
      }
    elif skipped:
      means |= dict.fromkeys(sums, math.nan)
    return means | {
      'update/grad_norm': float(self.grad_norm) / max(updates - skipped, 1),
      'update/skipped': skipped,
      'update/skipped_in_row': float(self.skipped_in_row),
      'update/most_skipped_in_row': float(self.most_skipped_in_row),
      'update/count': float(updates),
      'update/tokens': tokens,
    }


def zeros(
  names: Iterable[str], skipped: jax.Array, step_scale: jax.Array | None
) -> UpdateSums:
  """Returns the sums before the first update of an iteration.

  Args:
    names: names of the values of tokens, and of their numbers.
    skipped: number of consecutive skipped updates at the end of the last
      iteration.
    step_scale: factor of the updates; None: 1.
  """
  # Weakly typed values would compile every program a second time.
  zero = jnp.zeros((), jnp.float32)
  tokens = {
    name: zero - jnp.inf if name.endswith(_MAX) else zero for name in names
  }
  return UpdateSums(
    tokens=tokens,
    applied=tokens,
    objective=zero,
    grad_norm=zero,
    skipped=zero,
    skipped_in_row=skipped,
    most_skipped_in_row=zero,
    step_scale=step_scale,
  )


def skipped_problem(
  metrics: Mapping[str, float], limit: int, name: str = 'update'
) -> str:
  """Returns a line if too many updates in a row were skipped; '' if not.

  Args:
    metrics: metrics of the updates.
    limit: `config.learner.max_skipped_in_row`.
    name: 'update' or 'critic'.
  """
  most = metrics[f'{name}/most_skipped_in_row']
  if most < limit:
    return ''
  return (
    f'learner.max_skipped_in_row={limit}: the loss or gradient of {most:.0f} '
    f'successive updates was not finite ({name}/most_skipped_in_row)'
  )
