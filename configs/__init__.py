"""Experiments, one a file, and where to find what comes with them."""

import os
import pathlib


def find(path: str) -> str | None:
  """Returns where a path is, from this folder or from the project's."""
  inside = pathlib.Path(__file__).parents[1] / path
  return next((str(p) for p in (path, inside) if os.path.exists(p)), None)
