"""The advantage kernel beside plain Python, and its share of an iteration.

    python benchmarks/advantages.py
    python benchmarks/advantages.py --workdir runs/alfworld-tiny

Rows as an ALFWorld iteration has them: groups of 8 episodes of 50 steps, each
in one of 30 states of its group. The plain version is what a loop over rows
with dictionaries and numpy's mean and std is, float64, as the released code
does it. Both begin with 128-bit hashes of the anchors and end with numpy
arrays.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from gigpo_jax import advantages, anchors, metrics

_MEMBERS, _STEPS, _STATES = 8, 50, 30


def make_rows(number: int) -> dict[str, np.ndarray]:
  """Returns the arguments of `advantages.gigpo`."""
  rng = np.random.default_rng(0)
  row = np.arange(number)
  episodes, groups = row // _STEPS, row // (_STEPS * _MEMBERS)
  states = rng.integers(_STATES, size=number)
  texts = [f'{g} {s}' for g, s in zip(groups, states, strict=True)]
  wins = rng.random(episodes.max() + 1) < 0.5
  steps = row % _STEPS
  return {
    'rewards': np.where((steps == _STEPS - 1) & wins[episodes], 10.0, 0.0),
    'groups': groups,
    'episodes': episodes,
    'steps': steps,
    'anchors': anchors.digests(texts),
    'valid': rng.random(number) < 0.95,
  }


def plain(
  rewards, groups, episodes, steps, states, valid, discount=0.95, penalty=0.1
) -> np.ndarray:
  """Returns the same by loops; rows of an episode stand in order."""
  del steps
  rewards = [
    r - penalty * (not ok) for r, ok in zip(rewards, valid, strict=True)
  ]
  returns, total = [0.0] * len(rewards), 0.0
  for r in range(len(rewards) - 1, -1, -1):
    follows = r + 1 < len(rewards) and episodes[r + 1] == episodes[r]
    total = rewards[r] + (discount * total if follows else 0.0)
    returns[r] = total
  sums: dict = {}
  for r, episode in enumerate(episodes):
    sums[episode] = sums.get(episode, 0.0) + rewards[r]
  of_group: dict = {}
  for group, episode in dict.fromkeys(zip(groups, episodes, strict=True)):
    of_group.setdefault(group, []).append(sums[episode])
  of_anchor: dict = {}
  keys = [
    (group, state.tobytes())
    for group, state in zip(groups, states, strict=True)
  ]
  for r, key in enumerate(keys):
    of_anchor.setdefault(key, []).append(returns[r])
  told = [
    {key: _moments(found) for key, found in groups_.items()}
    for groups_ in (of_group, of_anchor)
  ]
  found = np.zeros(len(rewards))
  for r, key in enumerate(keys):
    for value, (mean, std, number) in (
      (sums[episodes[r]], told[0][groups[r]]),
      (returns[r], told[1][key]),
    ):
      if number > 1:
        found[r] += (value - mean) / (std + 1e-6)
  return found


def _moments(values: list[float]) -> tuple[float, float, int]:
  std = np.std(values, ddof=1) if len(values) > 1 else 0.0
  return float(np.mean(values)), float(std), len(values)


def seconds(function: Callable, repeats: int) -> float:
  """Returns the median of a call, the first one left out."""
  function()
  taken = []
  for _ in range(repeats):
    begin = time.perf_counter()
    function()
    taken.append(time.perf_counter() - begin)
  return statistics.median(taken)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--workdir', help='of a run, for the share of its time')
  options = parser.parse_args()
  print(f'{jax.devices()[0].device_kind}, {len(jax.devices())} device(s)')
  print('| rows | kernel, ms | plain Python, ms | times |\n|---|---|---|---|')
  taken = {}
  for number in (1_000, 6_400, 64_000, 1_000_000):
    rows = make_rows(number)
    found = np.asarray(advantages.gigpo(**rows))
    expected = plain(*rows.values())
    np.testing.assert_allclose(found, expected, atol=2e-3)
    taken[number] = fast = seconds(
      lambda rows=rows: np.asarray(advantages.gigpo(**rows)), options.repeats
    )
    slow = seconds(
      lambda rows=rows: plain(*rows.values()), 1 + (number < 10**6)
    )
    print(
      f'| {number:,} | {1e3 * fast:.2f} | {1e3 * slow:.0f} '
      f'| {slow / fast:.0f} |',
      flush=True,
    )
  print(
    f'1M rows take {taken[1_000_000] / taken[64_000]:.1f} times as long as '
    f'64k, which are {1_000_000 / 64_000:.1f} times as many'
  )
  if options.workdir:
    lines = metrics.read(options.workdir)
    credit, rows, whole = (
      statistics.median(x[f'time/{name}_secs'] for x in lines[:-1])
      for name in ('credit', 'rows', 'iteration')
    )
    print(
      f'{options.workdir}: {1e3 * credit:.1f} ms of {whole:.1f} s an '
      f'iteration: {credit / whole:.3%}; making rows, and numbering their '
      f'anchors, takes {1e3 * rows:.1f} ms'
    )


if __name__ == '__main__':
  main()
