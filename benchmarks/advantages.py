"""The advantage kernel beside Python, and its share of an iteration.

    python benchmarks/advantages.py
    python benchmarks/advantages.py --workdir runs/alfworld-tiny

Rows as an ALFWorld iteration has them: groups of 8 episodes of 50 steps, each
in one of 30 states of its group. Beside the kernel, which begins with 128-bit
hashes of the anchors and ends with a numpy array:

- `released`: the way of the paper's released code, in Python and numpy. Ids are
  strings, and for each row all rows are searched for those of its episode, so
  that its time rises with the square of the rows; it is left out above 6,400.
- `plain`: the best that loops and dictionaries do, in time as the rows.
"""

import argparse
import statistics
import time
import uuid
from collections.abc import Callable

import jax
import numpy as np

from gigpo_jax import advantages, anchors, metrics

_MOST_SEARCHED = 6_400
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


def released(
  rewards, groups, episodes, states, discount=0.95, penalty=0.1, *, valid
) -> np.ndarray:
  """Returns the same; ids are strings, rows of an episode stand in order."""
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
    found: dict = {}
    for r in np.where(groups == group)[0]:
      found.setdefault(states[r], []).append(r)
    for rows in found.values():
      name = str(uuid.uuid4())
      for r in rows:
        clusters[r] = name
  once = {}
  for r, pair in enumerate(zip(groups, episodes, strict=True)):
    once.setdefault(pair, r)
  every = range(len(rewards))
  return _compared(sums, groups, once.values()) + _compared(
    returns, clusters, every
  )


def _compared(values, keys, entries) -> np.ndarray:
  listed: dict = {}
  for r in entries:
    listed.setdefault(keys[r], []).append(values[r])
  told = {key: _moments(found) for key, found in listed.items()}
  found = np.zeros(len(values))
  for r in range(len(values)):
    mean, std, number = told[keys[r]]
    found[r] = (values[r] - mean) / (std + 1e-6) if number > 1 else 0.0
  return found


def _named(rows: dict[str, np.ndarray]) -> dict:
  """Returns arguments of `released`."""
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
  print('| rows | kernel, ms | released, ms | times | plain, ms | times |')
  print('|---|---|---|---|---|---|')
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
    told = '| |'
    if number <= _MOST_SEARCHED:
      named = _named(rows)
      np.testing.assert_allclose(released(**named), expected, atol=1e-9)
      longest = seconds(lambda named=named: released(**named), 1)
      told = f'{1e3 * longest:,.0f} | {longest / fast:,.0f} |'
    print(
      f'| {number:,} | {1e3 * fast:.2f} | {told} {1e3 * slow:,.0f} '
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
