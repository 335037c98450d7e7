r"""Shows a run in a browser: curves, episodes, steps, tokens, advantages.

    python launch/view.py --workdir=runs/alfworld-tiny
    python launch/view.py --workdir=runs/alfworld-tiny --export=run.html

A run keeps its episodes with `--config.episodes.every=1`.
"""

import sys

from absl import app, flags, logging

from launch import lines

_WORKDIR = flags.DEFINE_string('workdir', None, 'Work directory of the run.')
_EXPORT = flags.DEFINE_string(
  'export', None, 'HTML file to export the page with all its data to.'
)
_ITERATIONS = flags.DEFINE_list(
  'iterations', [], 'Iterations to export; default: all.'
)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
_PORT = flags.DEFINE_integer(
  'port',
  8010,
  'Port to listen on; 0: any free port.',
  lower_bound=0,
  upper_bound=65535,
)
_NAMES = flags.DEFINE_list(
  'names',
  [],
  'Additional host names that browsers may use for the page, such as that of a '
  'proxy. localhost, the host name and all addresses are always accepted.',
)


def _run(argv: list[str]) -> None:
  """Exports or serves; exits with 2 after a mistake of the user."""
  del argv
  # Hides the info messages of libraries that read episodes.
  logging.set_verbosity(logging.ERROR)
  from gigpo_jax.tools import viewer

  try:
    if not _WORKDIR.value:
      raise ValueError('--workdir: missing; must be set')
    numbers = [_number(text) for text in _ITERATIONS.value]
    if _EXPORT.value:
      viewer.export(_WORKDIR.value, _EXPORT.value, numbers)
      print(_EXPORT.value)
    else:
      viewer.serve(_WORKDIR.value, _HOST.value, _PORT.value, _NAMES.value)
  except (ValueError, OSError) as error:
    lines.exit_with_error(str(error))
  except KeyboardInterrupt:
    sys.exit(0)


def _number(text: str) -> int:
  if not text.strip().isdecimal():
    raise ValueError(f'--iterations={text}: must be numbers, joined by commas')
  return int(text)


def main() -> None:
  """Parses the flags and shows the run."""
  app.run(_run, flags_parser=lines.parse)


if __name__ == '__main__':
  main()
