"""Plot a rollout: the activity of each slot of the sampler over time."""

import pathlib
from collections.abc import Iterator, Sequence

from gigpo_jax.tools import plots

_COLORS = {'prefill': '#d95f02', 'decode': '#1b9e77'}
_WAITING_COLOR = '#cfd8e6'


def plot(
  spans: Sequence[tuple[int, str, float, float]],
  env_spans: Sequence[tuple[float, float]],
  folder: pathlib.Path,
) -> pathlib.Path | None:
  """Draws rollout_timeline.png with one row per slot.

  Where a slot is empty, the plot shows whether any environment was stepping at
  that time. White means that no work was left.

  Args:
    spans: (slot, phase, start, end) in seconds, from `sampler.Stats`.
    env_spans: (start, end) in seconds, from `rollout.RolloutClock`.
    folder: folder to write the image to.

  Returns:
    The image's path; None if nothing was sampled.
  """
  if not spans:
    return None
  busy = list(merge_spans(env_spans))
  first = min(start for start, _ in [*busy, *(span[2:] for span in spans)])
  slots = 1 + max(slot for slot, *_ in spans)
  path = folder / 'rollout_timeline.png'
  size = 10, 2 + min(slots, 128) * 0.06
  with plots.image(path, dpi=110, figsize=size) as (figure, axis):
    axis.broken_barh(
      [(start - first, end - start) for start, end in busy],
      (-0.5, slots),
      color=_WAITING_COLOR,
      linewidth=0,
      label='waiting for an environment',
    )
    for name, color in _COLORS.items():
      for slot in range(slots):
        bars = [
          (start - first, end - start)
          for n, phase, start, end in spans
          if n == slot and phase == name
        ]
        axis.broken_barh(bars, (slot - 0.45, 0.9), color=color, linewidth=0)
      axis.plot([], [], color=color, linewidth=6, label=name)
    axis.set(xlabel='seconds', ylabel='slot', ylim=(slots - 0.5, -0.5))
    axis.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    figure.legend(loc='outside upper center', ncols=3)
  return path


def merge_spans(
  spans: Sequence[tuple[float, float]],
) -> Iterator[tuple[float, float]]:
  """Yields the union of intervals as disjoint intervals, in order."""
  start = end = None
  for next_start, next_end in sorted(spans):
    if end is None or next_start > end:
      if end is not None:
        yield start, end
      start, end = next_start, next_end
    end = max(end, next_end)
  if end is not None:
    yield start, end
