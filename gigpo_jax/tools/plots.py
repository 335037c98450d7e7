"""Image files of plots, and tables in Markdown."""

import contextlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gigpo_jax.runtime import files

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

  # Names of folders and runs are no formulas.
  with matplotlib.rc_context({'text.parse_math': False}):
    figure, axes = pyplot.subplots(layout='constrained', **options)
    yield figure, axes
    is_titled = title and pathlib.Path(path).suffix.lower() in TITLED
    extra = {'metadata': {'Title': title}} if is_titled else {}
    path = pathlib.Path(path)
    with files.replacing(path) as partial:
      figure.savefig(partial, format=path.suffix[1:], dpi=dpi, **extra)
    pyplot.close(figure)


def check_output(out: str, flag: str, title: str) -> pathlib.Path:
  """Returns the path of a plot to write; without a suffix, it is a PNG.

  Args:
    out: the path that the user gave.
    flag: the flag that has it.
    title: hidden title of the plots of this command.

  Raises:
    ValueError: in one line, if it is a folder, or a file that is no earlier
      plot.
  """
  path = pathlib.Path(out)
  if path.is_dir():
    raise ValueError(
      f'{flag}={out}: is a folder; must be an image file, such as curves.png'
    )
  if not path.suffix:
    path = path.with_suffix('.png')
  if path.suffix.lower() not in TITLED:
    raise ValueError(
      f'{flag}={out}: unknown format; must end in {", ".join(TITLED)}'
    )
  if not path.parent.is_dir():
    raise ValueError(
      f'{flag}={out}: no such folder; must be in one that exists'
    )
  if path.is_file() and not has_title(path, title):
    raise ValueError(
      f'{flag}={path}: exists and is no plot of this command; must be a new '
      'file or an earlier plot'
    )
  return path


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
