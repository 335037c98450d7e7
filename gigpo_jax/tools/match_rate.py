r"""Find the learning rate at which a method moves as far as another run.

    python -m gigpo_jax.tools.match_rate runs/tuning/tuning.csv \
        --target='gigpo 0.00015' --method=grpo --experiment=alfworld

Reads the table of a sweep such as configs/sweeps/tuning.py, whose runs are
named 'METHOD RATE'. The distance of a run is its `ratio/kl`, the mean KL to the
policy before the update, averaged over iterations and seeds. Between the two
rates whose distances enclose that of the target, the logarithm of the distance
is interpolated linearly in the logarithm of the rate.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from gigpo_jax.runtime import output
from gigpo_jax.tools import sweep_table


def distances(
  rows: Sequence[Mapping[str, float | str | None]], experiment: str
) -> dict[str, float]:
  """Returns the mean `ratio/kl` of each run name of an experiment, in nats.

  Args:
    rows: rows of `sweep_table.read`. A row has the means over the iterations
      since the previous row of its run; the first row of a run has none.
    experiment: name of the config file.
  """
  totals: dict[str, list[float]] = {}
  previous: dict[tuple[str, int], float] = {}
  for row in rows:
    if row['experiment'] != experiment:
      continue
    key = row['name'], row['seed']
    iterations = row['iteration'] - previous.get(key, 0)
    previous[key] = row['iteration']
    if row['ratio/kl'] is not None:
      total = totals.setdefault(row['name'], [0.0, 0.0])
      total[0] += iterations * row['ratio/kl']
      total[1] += iterations
  return {name: kl / count for name, (kl, count) in totals.items() if count}


def match(points: Mapping[float, float], target: float) -> float:
  """Returns the learning rate at which the distance is the target.

  Args:
    points: distance by learning rate, both above 0.
    target: a distance.

  Raises:
    ValueError: in one line, if no two neighbouring rates enclose the target.
  """
  rates = sorted(points)
  for low, high in zip(rates, rates[1:], strict=False):
    if points[low] <= target <= points[high]:
      ends = np.log([points[low], points[high]])
      logs = np.log([low, high])
      return float(np.exp(np.interp(np.log(target), ends, logs)))
  known = ', '.join(f'{points[rate]:.3g} at {rate:g}' for rate in rates)
  raise ValueError(
    f'--target: its ratio/kl is {target:.3g}, but the rates have '
    f'{known or "none"}; add rates that enclose it to the sweep'
  )


def _rate(text: str) -> float | None:
  """Returns a learning rate; None if the text is another part of a name."""
  try:
    return float(text)
  except ValueError:
    return None


@output.handle()
def main(argv: Sequence[str] | None = None) -> int:
  """Prints the distances and the matched rate; returns 2 on errors."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('table', help='CSV that launch/sweep.py wrote')
  parser.add_argument('--target', required=True, help='name of a run')
  parser.add_argument('--method', required=True, help='prefix of run names')
  parser.add_argument('--experiment', required=True, help='such as alfworld')
  options = parser.parse_args(argv)
  try:
    rows = sweep_table.read(options.table)
    by_name = distances(rows, options.experiment)
    if not by_name:
      names = {row['experiment'] for row in rows}
      raise ValueError(
        f'--experiment={options.experiment}: not in {options.table}; must be '
        f'one of {", ".join(sorted(names))}'
      )
    if options.target not in by_name:
      raise ValueError(
        f'--target={options.target}: no such run; must be one of '
        f'{", ".join(sorted(by_name)) or "(none)"}'
      )
    prefix = f'{options.method} '
    points = {
      rate: kl
      for name, kl in by_name.items()
      if name.startswith(prefix)
      and (rate := _rate(name.removeprefix(prefix))) is not None
    }
    rate = match(points, by_name[options.target])
  except ValueError as error:
    sys.stderr.write(f'{error}\n')
    return 2
  for name, kl in sorted(by_name.items()):
    print(f'{name}: {kl:.3g} nats')
  print(f'{options.method} moves as far as {options.target} at {rate:.3g}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
