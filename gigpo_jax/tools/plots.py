"""Image files of plots, and tables in Markdown."""

import contextlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# Formats in which matplotlib can store a title as plain text.
TITLED = ('.png', '.svg', '.pdf')


@contextlib.contextmanager
def image(
  path: str | pathlib.Path, *, dpi: int = 120, title: str = '', **options: Any
) -> Iterator[tuple[Any, Any]]:
  """Yields a figure and its axes; writes them to an image file at the end.

  Args:
    path: path of the image.
    dpi: dots per inch.
    title: hidden title, see `has_title`; dropped by formats other than TITLED.
    **options: further arguments of `pyplot.subplots`.
  """
  # matplotlib is slow to import.
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(layout='constrained', **options)
  yield figure, axes
  is_titled = title and pathlib.Path(path).suffix.lower() in TITLED
  extra = {'metadata': {'Title': title}} if is_titled else {}
  figure.savefig(path, dpi=dpi, **extra)
  pyplot.close(figure)


def has_title(path: pathlib.Path, title: str) -> bool:
  """Returns whether a file is a PNG, SVG or PDF with a title of `image`."""
  if path.suffix.lower() not in TITLED:
    return False
  try:
    return title.encode() in path.read_bytes()
  except OSError:
    return False


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  """Returns a Markdown table, without columns that are empty in all rows."""
  cells = [list(map(str, row)) for row in rows]
  shown = [
    i for i in range(len(columns)) if not cells or any(row[i] for row in cells)
  ]
  head, *body = (
    f'| {" | ".join(line[i] for i in shown)} |' for line in [columns, *cells]
  )
  return '\n'.join([head, '|---' * len(shown) + '|', *body])
