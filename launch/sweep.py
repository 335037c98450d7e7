r"""Runs many experiments side by side, and gathers what came of them.

    python launch/sweep.py --sweep=configs/sweeps/main.py --workdir=runs/main

The same command again goes on where it stopped.
"""

import signal
import sys

from absl import app, flags

from launch import interrupt, lines

_SWEEP = flags.DEFINE_string('sweep', None, 'Python file with a list RUNS.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where the runs live.')
_AT_ONCE = flags.DEFINE_integer(
  'at_once', 2, 'Runs side by side.', lower_bound=1
)
_KNOWN = flags.DEFINE_list(
  'known', [], 'CSVs of runs that live elsewhere, and are not run again.'
)
_GATHER = flags.DEFINE_bool('gather', False, 'Whether to run nothing.')


def main(argv: list[str]) -> None:
  """Runs; 2 is a mistake of the user, 1 a run that failed."""
  del argv
  from gigpo_jax import sweep

  interrupt.describe(lambda: 'the same command resumes the sweep')
  # The runs are told to leave, too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

  try:
    for flag in ('sweep', 'workdir'):
      if not flags.FLAGS[flag].value:
        raise ValueError(f'--{flag}: missing; needed')
    code = sweep.main(
      _SWEEP.value,
      _WORKDIR.value,
      at_once=_AT_ONCE.value,
      only_gather=_GATHER.value,
      known=_KNOWN.value,
    )
  except ValueError as error:
    lines.refuse(str(error))
  sys.exit(code)


if __name__ == '__main__':
  with interrupt.handled():
    app.run(main, flags_parser=lines.parse)
