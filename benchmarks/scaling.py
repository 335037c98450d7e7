"""Simulate weak and strong scaling over the hosts of a TPU slice.

    python benchmarks/scaling.py

Prints two tables of simulated seconds for Qwen2.5-1.5B on v5e with 4 chips per
host. Weak scaling: 4 groups of 8 episodes, 64 rows per update and 35 evaluation
tasks (every 5 iterations) for each host. Strong scaling: 4 times that in total,
as in configs/alfworld.py. See simulate.py.
"""

import argparse

import simulate
import workload

HOSTS = (1, 2, 4, 8, 16, 32, 64)
CHIPS_PER_HOST = 4


def run(hosts: int, size: int) -> simulate.Iteration:
  """Returns a simulated iteration.

  Args:
    hosts: number of hosts.
    size: the work, in units of 4 groups, 64 rows per update and 35 evaluation
      tasks.
  """
  chips = CHIPS_PER_HOST * hosts
  return simulate.simulate(
    simulate.Setting('Qwen2.5-1.5B', 'v5e', chips, hosts=hosts),
    simulate.Options(sequences=chips, minibatch_rows=64 * size),
    workload.Workload(groups=4 * size, evaluation_tasks=35 * size),
  )


def table(hosts: list[int], *, weak: bool) -> None:
  """Prints a table with a line for each number of hosts."""
  print(
    '| hosts | chips | episodes | rollout | evaluation | matmuls '
    '| communication | iteration | efficiency |\n'
    '|---|---|---|---|---|---|---|---|---|'
  )
  first = None
  for count in hosts:
    size = count if weak else 4
    result = run(count, size)
    first = first or result
    update = result.update
    scale = 1 if weak else count / hosts[0]
    shares = [
      one / (scale * many)
      for one, many in zip(first.secs, result.secs, strict=True)
    ]
    cells = [
      f'{x:.0f}'
      for x in (
        result.rollout.secs,
        result.evaluation_secs,
        update.log_prob_secs + update.update_secs,
        update.exchange_secs,
      )
    ]
    low, high = result.secs
    print(
      f'| {count} | {CHIPS_PER_HOST * count} | {32 * size} '
      f'| {" | ".join(cells)} | {low:.0f}-{high:.0f} '
      f'| {min(shares):.0%}-{max(shares):.0%} |',
      flush=True,
    )


def main() -> None:
  """Prints both tables."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--hosts', nargs='*', type=int, default=list(HOSTS))
  hosts = parser.parse_args().hosts
  for weak in (True, False):
    print('Weak scaling' if weak else 'Strong scaling')
    table(hosts, weak=weak)


if __name__ == '__main__':
  main()
