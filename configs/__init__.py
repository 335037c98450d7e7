"""Experiment configs, one per file; `find` locates files of the project."""

import os
import pathlib

# Trains on any machine, without downloads.
TINY = 'python launch/train.py --config=configs/alfworld.py:tiny'


def find(path: str) -> str | None:
  """Returns the path itself or below the project's folder; None if missing."""
  inside = pathlib.Path(__file__).parents[1] / path
  return next((str(p) for p in (path, inside) if os.path.exists(p)), None)
