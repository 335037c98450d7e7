"""A picture of a rollout: what each slot of the sampler did, and when."""

import pathlib
from collections.abc import Sequence

_COLORS = {'prefill': '#d95f02', 'decode': '#1b9e77'}


def plot(
  spans: Sequence[tuple[int, str, float, float]], folder: pathlib.Path
) -> pathlib.Path | None:
  """Draws rollout_timeline.png: a row a slot, white where it was empty.

  Args:
    spans: of `sampler.Stats`.
    folder: where it goes.

  Returns:
    The picture's path; None if nothing was sampled.
  """
  if not spans:
    return None
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  first = min(begin for _, _, begin, _ in spans)
  slots = 1 + max(slot for slot, *_ in spans)
  figure, axis = pyplot.subplots(figsize=(10, 1.5 + min(slots, 128) * 0.06))
  for name, color in _COLORS.items():
    for slot in range(slots):
      parts = [
        (begin - first, end - begin)
        for n, kind, begin, end in spans
        if n == slot and kind == name
      ]
      axis.broken_barh(parts, (slot - 0.45, 0.9), color=color, linewidth=0)
    axis.plot([], [], color=color, linewidth=6, label=name)
  axis.plot([], [], color='white', linewidth=6, label='waiting for an env')
  axis.set(xlabel='seconds', ylabel='slot', ylim=(slots - 0.5, -0.5))
  figure.legend(loc='outside upper center', ncols=3)
  figure.savefig(folder / 'rollout_timeline.png', dpi=110)
  pyplot.close(figure)
  return folder / 'rollout_timeline.png'
