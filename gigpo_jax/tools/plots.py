"""Image files of plots, and tables in Markdown."""

import contextlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def image(
  path: str | pathlib.Path, *, dpi: int = 120, **options: Any
) -> Iterator[tuple[Any, Any]]:
  """Yields a figure and its axes; writes them to an image file at the end.

  Args:
    path: path of the image.
    dpi: dots per inch.
    **options: further arguments of `pyplot.subplots`.
  """
  # matplotlib is slow to import.
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(layout='constrained', **options)
  yield figure, axes
  figure.savefig(path, dpi=dpi)
  pyplot.close(figure)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  """Returns a Markdown table."""
  lines = [columns, *rows]
  cells = [f'| {" | ".join(map(str, line))} |' for line in lines]
  return '\n'.join([cells[0], '|---' * len(columns) + '|', *cells[1:]])
