r"""Runs many experiments in parallel and tabulates their results.

    python launch/sweep.py --sweep=configs/sweeps/main.py --workdir=runs/main

Rerun the command to resume the sweep.
"""

import functools
import os
import signal
import sys
import types
from typing import NoReturn

from gigpo_jax.runtime import output
from launch import interrupt


class _Terminated(BaseException):
  """SIGTERM. Code that handles exits of modules does not catch it."""


def _terminate(signum: int, frame: types.FrameType | None) -> NoReturn:
  del signum, frame
  raise _Terminated


@interrupt.handle()
@output.handle()
def main() -> None:
  """Parses the flags and runs the sweep."""
  from absl import app, flags

  from launch import lines

  sweep = flags.DEFINE_string('sweep', None, 'Python file with a list RUNS.')
  workdir = flags.DEFINE_string('workdir', None, 'Parent folder of the runs.')
  at_once = flags.DEFINE_integer(
    'at_once', 2, 'Number of parallel runs.', lower_bound=1
  )
  known = flags.DEFINE_list(
    'known', [], 'CSV tables of finished runs; these runs are skipped.'
  )
  gather = flags.DEFINE_bool(
    'gather', False, 'Whether to only tabulate finished runs.'
  )

  def run(argv: list[str]) -> None:
    """Exits with 2 after a mistake of the user, with 1 if a run failed."""
    del argv
    from gigpo_jax.runtime import errors
    from gigpo_jax.tools import sweep as sweep_lib

    # Configs may name modules there, as in the runs.
    sys.path.append(os.getcwd())
    interrupt.set_outlook(lambda: 'the same command resumes the sweep')
    # The exception also ends the runs.
    signal.signal(signal.SIGTERM, _terminate)
    try:
      for flag in (sweep, workdir):
        if not flag.value:
          raise ValueError(f'--{flag.name}: missing; must be set')
      with errors.explain_disk_errors(workdir.value):
        code = sweep_lib.main(
          sweep.value,
          workdir.value,
          at_once=at_once.value,
          only_gather=gather.value,
          known=known.value,
        )
    except ValueError as error:
      lines.exit_with_error(str(error))
    except errors.RunError as error:
      lines.exit_with_error(str(error), status=1)
    except _Terminated:
      sys.exit(143)
    sys.exit(code)

  app.run(run, flags_parser=functools.partial(lines.parse, module=__name__))


if __name__ == '__main__':
  main()
