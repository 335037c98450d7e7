"""A picture of a rollout: what each slot of the sampler did, and when."""

import pathlib
from collections.abc import Iterator, Sequence

_COLORS = {'prefill': '#d95f02', 'decode': '#1b9e77'}
_WAITING = '#cfd8e6'


def plot(
  spans: Sequence[tuple[int, str, float, float]],
  env_spans: Sequence[tuple[float, float]],
  folder: pathlib.Path,
) -> pathlib.Path | None:
  """Draws rollout_timeline.png: a row a slot.

  An empty slot is waiting for an environment as long as one is at work, and
  white when there is nothing left to do.

  Args:
    spans: of `sampler.Stats`.
    env_spans: of `rollout.Clock`.
    folder: where it goes.

  Returns:
    The picture's path; None if nothing was sampled.
  """
  if not spans:
    return None
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  waits = list(joined(env_spans))
  first = min(begin for begin, _ in [*waits, *(span[2:] for span in spans)])
  slots = 1 + max(slot for slot, *_ in spans)
  figure, axis = pyplot.subplots(
    figsize=(10, 2 + min(slots, 128) * 0.06), layout='constrained'
  )
  axis.broken_barh(
    [(begin - first, end - begin) for begin, end in waits],
    (-0.5, slots),
    color=_WAITING,
    linewidth=0,
    label='waiting for an environment',
  )
  for name, color in _COLORS.items():
    for slot in range(slots):
      parts = [
        (begin - first, end - begin)
        for n, kind, begin, end in spans
        if n == slot and kind == name
      ]
      axis.broken_barh(parts, (slot - 0.45, 0.9), color=color, linewidth=0)
    axis.plot([], [], color=color, linewidth=6, label=name)
  axis.set(xlabel='seconds', ylabel='slot', ylim=(slots - 0.5, -0.5))
  axis.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  figure.legend(loc='outside upper center', ncols=3)
  figure.savefig(folder / 'rollout_timeline.png', dpi=110)
  pyplot.close(figure)
  return folder / 'rollout_timeline.png'


def joined(
  spans: Sequence[tuple[float, float]],
) -> Iterator[tuple[float, float]]:
  """Yields the parts of time that any of the spans covers, in order."""
  begin = end = None
  for start, stop in sorted(spans):
    if end is None or start > end:
      if end is not None:
        yield begin, end
      begin, end = start, stop
    end = max(end, stop)
  if end is not None:
    yield begin, end
