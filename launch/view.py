r"""Shows a run in a browser: curves, episodes, steps, tokens, advantages.

    python launch/view.py --workdir=runs/alfworld-tiny
    python launch/view.py --workdir=runs/alfworld-tiny --export=run.html

A run keeps its episodes with `--config.episodes.every=1`.
"""

import functools

from gigpo_jax.runtime import output
from launch import interrupt


@interrupt.handle()
@output.handle()
def main() -> None:
  """Parses the flags and shows the run."""
  from absl import app, flags, logging

  from launch import lines

  workdir = flags.DEFINE_string('workdir', None, 'Work directory of the run.')
  export = flags.DEFINE_string(
    'export', None, 'HTML file to export the page with all its data to.'
  )
  iterations = flags.DEFINE_list(
    'iterations', [], 'Iterations to export, such as 0,10; default: all.'
  )
  host = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
  port = flags.DEFINE_integer(
    'port',
    8010,
    'Port to listen on; 0: any free port.',
    lower_bound=0,
    upper_bound=65535,
  )
  names = flags.DEFINE_list(
    'names',
    [],
    'Additional host names that browsers may use for the page, such as that '
    'of a proxy. localhost, the host name and all addresses are always '
    'accepted.',
  )

  def run(argv: list[str]) -> None:
    """Exports or serves; exits with 2 after a mistake of the user."""
    del argv
    # Hides the info messages of libraries that read episodes.
    logging.set_verbosity(logging.ERROR)
    from gigpo_jax.tools import viewer

    interrupt.set_outlook(lambda: 'the same command shows the page again')
    try:
      if not workdir.value:
        raise ValueError('--workdir: missing; must be set')
      numbers = [_number(text) for text in iterations.value]
      if numbers and not export.value:
        raise ValueError(
          f'--iterations={",".join(iterations.value)}: selects what to export; '
          'must be empty, or needs --export'
        )
      if export.value:
        viewer.export(workdir.value, export.value, numbers)
        print(export.value)
      else:
        viewer.serve(workdir.value, host.value, port.value, names.value)
    except (ValueError, OSError) as error:
      lines.exit_with_error(str(error))

  app.run(run, flags_parser=functools.partial(lines.parse, module=__name__))


def _number(text: str) -> int:
  if not text.strip().isdecimal():
    raise ValueError(f'--iterations={text}: must be numbers, joined by commas')
  return int(text)


if __name__ == '__main__':
  main()
