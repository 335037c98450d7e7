"""Parsing of flags, with errors of the user in one line."""

import sys
from collections.abc import Callable

from absl import flags


def parse(argv: list[str]) -> list[str]:
  """Parses the flags, for `app.run`; an error ends the process in one line."""
  try:
    rest = flags.FLAGS(argv)
    check_arguments(rest)
  except (flags.Error, ValueError) as error:
    exit_with_error(' '.join(str(error).split()))
  return rest


def check_arguments(rest: list[str]) -> None:
  """Raises ValueError if there are arguments other than flags."""
  if unknown := rest[1:]:
    raise ValueError(
      f'{" ".join(unknown)}: unknown; must be flags, --NAME=VALUE'
    )


def exit_with_error(
  text: str, exit_process: Callable[[int], None] = sys.exit, status: int = 2
) -> None:
  """Prints an error to stderr and ends the process.

  Args:
    text: the error.
    exit_process: function that ends the process with a status.
    status: exit status.
  """
  sys.stderr.write(text.strip() + '\n')
  exit_process(status)
