"""Benchmark the advantage kernel against Python, and its share of a run.

    python benchmarks/advantages.py
    python benchmarks/advantages.py --workdir runs/alfworld-tiny

The rows resemble an ALFWorld iteration: groups of 8 episodes of 50 steps, each
step in one of 30 states of its group. The kernel's time includes the 128-bit
hashes of the anchors and the transfer to a numpy array. Baselines:

- `released`: the algorithm of the paper's released code, in Python and numpy.
Ids are strings, and each row searches all rows for those of its episode. Its
time grows with the square of the rows, so it is skipped above 6,400 rows.

- `plain`: loops and dictionaries, in time proportional to the rows.
"""

import argparse
import statistics
import time
import uuid
from collections.abc import Callable

import jax
import numpy as np

from gigpo_jax import advantages, anchors, metrics

_MAX_RELEASED_ROWS = 6_400
_MEMBERS, _STEPS, _STATES = 8, 50, 30


def make_rows(count: int) -> dict[str, np.ndarray]:
  """Returns the arguments of `advantages.gigpo`."""
  rng = np.random.default_rng(0)
  row = np.arange(count)
  episodes, groups = row // _STEPS, row // (_STEPS * _MEMBERS)
  states = rng.integers(_STATES, size=count)
  texts = [f'{g} {s}' for g, s in zip(groups, states, strict=True)]
  wins = rng.random(episodes.max() + 1) < 0.5
  steps = row % _STEPS
  return {
    'rewards': np.where((steps == _STEPS - 1) & wins[episodes], 10.0, 0.0),
    'groups': groups,
    'episodes': episodes,
    'steps': steps,
    'anchors': anchors.digests(texts),
    'valid': rng.random(count) < 0.95,
  }


def plain(
  rewards, groups, episodes, steps, states, valid, discount=0.95, penalty=0.1
) -> np.ndarray:
  """Returns the advantages, computed with loops.

  The rows of an episode must be contiguous and in order.
  """
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
  moments = [
    {key: _moments(sample) for key, sample in groups_.items()}
    for groups_ in (of_group, of_anchor)
  ]
  result = np.zeros(len(rewards))
  for r, key in enumerate(keys):
    for value, (mean, std, count) in (
      (sums[episodes[r]], moments[0][groups[r]]),
      (returns[r], moments[1][key]),
    ):
      if count > 1:
        result[r] += (value - mean) / (std + 1e-6)
  return result


def released(
  rewards, groups, episodes, states, discount=0.95, penalty=0.1, *, valid
) -> np.ndarray:
  """Returns the advantages, computed as the paper's released code does.

  Ids are strings. The rows of an episode must be in order.
  """
  rewards = rewards - penalty * ~valid
  of_episode = {}
  for episode in np.unique(episodes):
    chosen = rewards[np.where(episodes == episode)[0]]
    returns, total = np.zeros(len(chosen)), 0.0
    for t in reversed(range(len(chosen))):
      total = chosen[t] + discount * total
      returns[t] = total
    of_episode[episode] = returns
  returns, sums = np.zeros(len(rewards)), np.zeros(len(rewards))
  for r, episode in enumerate(episodes):
    rows = np.where(episodes == episode)[0]
    returns[r] = of_episode[episode][np.where(rows == r)[0][0]]
    sums[r] = rewards[rows].sum()
  clusters = np.empty(len(rewards), object)
  for group in np.unique(groups):
    by_state: dict = {}
    for r in np.where(groups == group)[0]:
      by_state.setdefault(states[r], []).append(r)
    for rows in by_state.values():
      name = str(uuid.uuid4())
      for r in rows:
        clusters[r] = name
  first_rows = {}
  for r, pair in enumerate(zip(groups, episodes, strict=True)):
    first_rows.setdefault(pair, r)
  all_rows = range(len(rewards))
  return _normalize_groups(
    sums, groups, first_rows.values()
  ) + _normalize_groups(returns, clusters, all_rows)


def _normalize_groups(values, keys, entries) -> np.ndarray:
  members: dict = {}
  for r in entries:
    members.setdefault(keys[r], []).append(values[r])
  moments = {key: _moments(sample) for key, sample in members.items()}
  result = np.zeros(len(values))
  for r in range(len(values)):
    mean, std, count = moments[keys[r]]
    result[r] = (values[r] - mean) / (std + 1e-6) if count > 1 else 0.0
  return result


def _string_ids(rows: dict[str, np.ndarray]) -> dict:
  """Returns the arguments of `released` for rows."""
  return {
    'rewards': rows['rewards'],
    'groups': np.array([f'group {g}' for g in rows['groups']], object),
    'episodes': np.array([f'episode {e}' for e in rows['episodes']], object),
    'states': [state.tobytes() for state in rows['anchors']],
    'valid': rows['valid'],
  }


def _moments(values: list[float]) -> tuple[float, float, int]:
  std = np.std(values, ddof=1) if len(values) > 1 else 0.0
  return float(np.mean(values)), float(std), len(values)


def seconds(function: Callable, repeats: int) -> float:
  """Returns the median time of a call in seconds, after one warm-up call."""
  function()
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    function()
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--workdir', help='also print the share of this run')
  options = parser.parse_args()
  print(f'{jax.devices()[0].device_kind}, {len(jax.devices())} device(s)')
  print('| rows | kernel, ms | released, ms | times | plain, ms | times |')
  print('|---|---|---|---|---|---|')
  kernel_secs = {}
  for count in (1_000, 6_400, 64_000, 1_000_000):
    rows = make_rows(count)
    actual = np.asarray(advantages.gigpo(**rows))
    expected = plain(*rows.values())
    np.testing.assert_allclose(actual, expected, atol=2e-3)
    kernel_secs[count] = fast = seconds(
      lambda rows=rows: np.asarray(advantages.gigpo(**rows)), options.repeats
    )
    slow = seconds(lambda rows=rows: plain(*rows.values()), 1 + (count < 10**6))
    released_cells = '| |'
    if count <= _MAX_RELEASED_ROWS:
      string_rows = _string_ids(rows)
      np.testing.assert_allclose(released(**string_rows), expected, atol=1e-9)
      longest = seconds(
        lambda string_rows=string_rows: released(**string_rows), 1
      )
      released_cells = f'{1e3 * longest:,.0f} | {longest / fast:,.0f} |'
    print(
      f'| {count:,} | {1e3 * fast:.2f} | {released_cells} {1e3 * slow:,.0f} '
      f'| {slow / fast:.0f} |',
      flush=True,
    )
  print(
    f'1M rows take {kernel_secs[1_000_000] / kernel_secs[64_000]:.1f} times as '
    f'long as 64k rows, with {1_000_000 / 64_000:.1f} times as many rows'
  )
  if options.workdir:
    lines = metrics.read(options.workdir)
    credit, rows, iteration = (
      statistics.median(x[f'time/{name}_secs'] for x in lines[:-1])
      for name in ('credit', 'rows', 'iteration')
    )
    print(
      f'{options.workdir}: advantages take {1e3 * credit:.1f} ms of '
      f'{iteration:.1f} s per iteration ({credit / iteration:.3%}); building '
      f'rows and anchor ids takes {1e3 * rows:.1f} ms'
    )


if __name__ == '__main__':
  main()
