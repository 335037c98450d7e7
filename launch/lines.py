"""Mistakes of the user as lines, for commands without a config."""

import sys
from collections.abc import Callable

from absl import flags


def parse(argv: list[str]) -> list[str]:
  """Parses the flags, as `app.run` asks for it; a wrong one is a line."""
  try:
    rest = flags.FLAGS(argv)
    check_stray(rest)
  except (flags.Error, ValueError) as error:
    refuse(' '.join(str(error).split()))
  return rest


def check_stray(rest: list[str]) -> None:
  """Raises ValueError if there is anything but flags."""
  if stray := rest[1:]:
    raise ValueError(f'{" ".join(stray)}: unknown; must be flags, --NAME=VALUE')


def refuse(
  text: str, leave: Callable[[int], None] = sys.exit, status: int = 2
) -> None:
  """Says what is wrong, and ends the process."""
  sys.stderr.write(text.strip() + '\n')
  leave(status)
