r"""Runs many experiments in parallel and tabulates their results.

    python launch/sweep.py --sweep=configs/sweeps/main.py --workdir=runs/main

Rerun the command to resume the sweep.
"""

import signal
import sys

from absl import app, flags

from launch import interrupt, lines

_SWEEP = flags.DEFINE_string('sweep', None, 'Python file with a list RUNS.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Parent folder of the runs.')
_AT_ONCE = flags.DEFINE_integer(
  'at_once', 2, 'Number of parallel runs.', lower_bound=1
)
_KNOWN = flags.DEFINE_list(
  'known', [], 'CSV tables of finished runs; these runs are skipped.'
)
_GATHER = flags.DEFINE_bool(
  'gather', False, 'Whether to only tabulate finished runs.'
)


def _run(argv: list[str]) -> None:
  """Exits with 2 after a mistake of the user, with 1 if a run failed."""
  del argv
  from gigpo_jax.tools import sweep

  interrupt.set_outlook(lambda: 'the same command resumes the sweep')
  # The exit also ends the runs.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

  try:
    for flag in ('sweep', 'workdir'):
      if not flags.FLAGS[flag].value:
        raise ValueError(f'--{flag}: missing; must be set')
    code = sweep.main(
      _SWEEP.value,
      _WORKDIR.value,
      at_once=_AT_ONCE.value,
      only_gather=_GATHER.value,
      known=_KNOWN.value,
    )
  except ValueError as error:
    lines.exit_with_error(str(error))
  sys.exit(code)


def main() -> None:
  """Parses the flags and runs the sweep."""
  with interrupt.handle():
    app.run(_run, flags_parser=lines.parse)


if __name__ == '__main__':
  main()
