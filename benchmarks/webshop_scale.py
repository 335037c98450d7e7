"""Benchmark a shop of any size from its cache: start, search, memory.

    python -m envs.webshop.catalogue --out DIR --num_products 1181436
    python benchmarks/webshop_scale.py --data_dir DIR

The official full set has 1,181,436 products. The first run builds the cache;
take the table of a later run, in which this process opens the shop as a worker
does. Searches are for instructions of random goals, for words of a random
title, and for a single word of it, each at most once.
"""

import argparse
import random
import time

import numpy as np
import psutil

from envs import base
from envs.webshop import env as webshop_env

_SEARCHES = 300
_RESULTS = 50


def _row(name: str, value: str) -> None:
  print(f'| {name} | {value} |', flush=True)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--data_dir', required=True)
  parser.add_argument('--num_products', type=int)
  options = vars(parser.parse_args())
  print('| | |\n|---|---|')
  start = time.monotonic()
  env = webshop_env.Env(**options)
  tasks = webshop_env.tasks('train', **options)
  env.reset(base.Task('train', 0))
  _row('start to the first page, s', f'{time.monotonic() - start:.1f}')
  shop = env.shop(base.Task('train', 0))
  _row('products', f'{len(shop.catalogue):,}')
  _row('training goals', f'{len(tasks):,}')
  rng = random.Random(0)
  goals = [tasks[rng.randrange(len(tasks))] for _ in range(_SEARCHES)]
  titles = [
    shop.catalogue[rng.randrange(len(shop.catalogue))].title.lower().split()
    for _ in range(_SEARCHES)
  ]
  queries = {
    'a full instruction': [goal.instruction_text for goal in goals],
    'four words of a title': [
      ' '.join(rng.sample(title, min(4, len(title)))) for title in titles
    ],
    'one word of a title': [rng.choice(title) for title in titles],
  }
  for name, searches in queries.items():
    times = []
    for query in dict.fromkeys(searches):
      start = time.perf_counter()
      shop.catalogue.index.search(query, _RESULTS)
      times.append(1e3 * (time.perf_counter() - start))
    parts = (np.mean(times), *np.percentile(times, [50, 95, 100]))
    text = ', '.join(f'{part:.1f}' for part in parts)
    _row(f'{name}: mean, median, 95th percentile, maximum, ms', text)
  memory = psutil.Process().memory_full_info()
  _row('resident, MiB', f'{memory.rss / 2**20:,.0f}')
  _row(
    'of which not shared with other workers, MiB', f'{memory.uss / 2**20:,.0f}'
  )


if __name__ == '__main__':
  main()
