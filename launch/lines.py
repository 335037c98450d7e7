"""Parsing of flags: help, and errors of the user in one line."""

import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

from absl import flags

_HELP = ('--help', '-h', '-help', '--helpshort', '--helpfull')


def parse(argv: list[str], *, module: str) -> list[str]:
  """Parses the flags, for `app.run`; an error ends the process in one line.

  Args:
    argv: the command line.
    module: module of the command; `--help` prints its docstring.
  """
  show_help(argv, lambda: describe(module))
  try:
    rest = flags.FLAGS(expand_home(argv))
    check_arguments(rest)
  except flags.UnrecognizedFlagError as error:
    exit_with_error(f'{describe_error(error)}; --help lists the flags')
  except (flags.Error, ValueError) as error:
    exit_with_error(describe_error(error))
  return rest


def describe_error(error: Exception) -> str:
  """Returns an error of a command line in one line."""
  text = ' '.join(str(error).split())
  match = re.match(r"flag (--\w+=.*?): \('Non-boolean argument", text)
  return f'{match[1]}: wrong type; must be True or False' if match else text


def expand_home(argv: Sequence[str]) -> list[str]:
  """Returns the flags with the home folder instead of `~`.

  Shells replace it at the start of a word only, not in `--workdir=~/run`.
  Environments interpret their own fields.
  """
  return [
    re.sub(
      r'^(--?(?!config\.env\.)[\w.]+=)(~(?:/.*)?)$',
      lambda match: match[1] + os.path.expanduser(match[2]),
      argument,
    )
    for argument in argv
  ]


def refuse_nan(flag: str) -> None:
  """Makes a flag with a number refuse NaN, which its bounds accept."""
  flags.register_validator(
    flag, lambda value: not math.isnan(value), 'must be a number'
  )


def show_help(argv: list[str], text: Callable[[], str]) -> None:
  """Prints a text and ends the process if the flags ask for help."""
  if set(_HELP) & set(argv[1:]):
    print(text())
    sys.exit(0)


def describe(module: str, shared: Sequence[str] = ()) -> str:
  """Returns the docstring of a command's module and its flags.

  Args:
    module: name of the module.
    shared: names of flags that come first.
  """
  # absl lists a script's flags under its path.
  key = sys.argv[0] if module == '__main__' else module
  shown = [flags.FLAGS[name] for name in shared]
  for name, defined in flags.FLAGS.flags_by_module_dict().items():
    # A command may have the flags of another, as serve.py those of train.py.
    if name == key or name.startswith('launch.'):
      shown += [flag for flag in defined if flag not in shown]
  listed = [(sys.modules[module].__doc__ or '').strip(), '\nFlags:']
  for flag in shown:
    default = '' if flag.default in (None, '', []) else f' ({flag.default})'
    # absl adds how to repeat a flag in its own words.
    text, *_ = flag.help.split(';\n')
    listed += [f'  --{flag.name}{default}', wrap(text, 6)]
  return '\n'.join(listed)


def wrap(text: str, indent: int) -> str:
  """Returns a text in lines of at most 79 characters with an indent."""
  margin = ' ' * indent
  return textwrap.fill(
    text, 79, initial_indent=margin, subsequent_indent=margin
  )


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
