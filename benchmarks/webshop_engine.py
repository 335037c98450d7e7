"""Benchmark the shop in one process: speed, search, start and memory.

    python benchmarks/webshop_engine.py                     # generated shop
    python benchmarks/webshop_engine.py --data_dir DIR      # official files

Random customers search for words of the instruction, then click at random.
"""

import argparse
import time

import numpy as np
import psutil

from envs.webshop import catalogue as generated
from envs.webshop import engine, goals, products, titles

_SESSIONS = 128


def _mib() -> float:
  return psutil.Process().memory_info().rss / 2**20


def _action(rng, page: engine.Page, goal: goals.Goal) -> str:
  words = goal.instruction_text.split()
  if page.has_search_bar or rng.random() < 0.05:
    chosen = rng.choice(words, size=min(4, len(words)), replace=False)
    return f'search[{" ".join(chosen)}]'
  return f'click[{page.clickables[rng.integers(len(page.clickables))]}]'


def measure(data_dir: str | None, steps: int) -> list[tuple[str, str]]:
  """Returns (name, value) of each measurement, with units."""
  before = _mib()
  start = time.monotonic()
  if data_dir:
    catalogue = products.load(data_dir)
  else:
    catalogue = products.from_records(*generated.generate())
  wishes = goals.build(catalogue)
  shop = engine.Shop(catalogue)
  titles.nouns('Loads the tagger, which takes a second')
  start_secs = time.monotonic() - start
  shared = _mib() - before
  rng = np.random.default_rng(0)
  start = time.monotonic()
  for goal in rng.choice(len(wishes), size=300):
    words = wishes[goal].instruction_text.lower().split()
    # A random word prevents hits in the cache of searches.
    words.append(f'x{rng.integers(10**9)}')
    shop.search(tuple(words))
  search = (time.monotonic() - start) / 300
  sessions = [engine.Session(shop) for _ in range(_SESSIONS)]
  order = [wishes[i] for i in rng.choice(len(wishes), size=_SESSIONS)]
  pages = [s.reset(g) for s, g in zip(sessions, order, strict=True)]
  start = time.monotonic()
  resets, seconds = 0, 0.0
  for n in range(steps):
    i = n % _SESSIONS
    if pages[i].done:
      reset = time.monotonic()
      order[i] = wishes[rng.integers(len(wishes))]
      pages[i] = sessions[i].reset(order[i])
      seconds += time.monotonic() - reset
      resets += 1
    pages[i] = sessions[i].step(_action(rng, pages[i], order[i]))
  playing = time.monotonic() - start - seconds
  return [
    ('products, goals', f'{len(catalogue):,}, {len(wishes):,}'),
    ('start, s', f'{start_secs:.2f}'),
    ('steps/s', f'{steps / playing:,.0f}'),
    ('resets/s', f'{resets / max(seconds, 1e-9):,.0f}'),
    ('search for a full instruction, ms', f'{1e3 * search:.2f}'),
    ('catalogue, goals and index, MiB', f'{shared:,.0f}'),
    (
      f'each of {_SESSIONS} sessions, MiB',
      f'{(_mib() - before - shared) / _SESSIONS:.2f}',
    ),
  ]


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--data_dir')
  parser.add_argument('--steps', type=int, default=50_000)
  options = parser.parse_args()
  print('| | |\n|---|---|')
  for name, value in measure(options.data_dir, options.steps):
    print(f'| {name} | {value} |')


if __name__ == '__main__':
  main()
