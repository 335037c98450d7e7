"""A shop of any size from its cache: start, searches, memory.

    python -m envs.webshop.catalogue --out DIR --num_products 1181436
    python benchmarks/webshop_scale.py --data_dir DIR

The official full set has 1,181,436 products. The first call makes the cache,
the table is of a later start: this process opens the shop as a worker does.
Searches are for the instructions of random goals, for words of a random title
and for one of its words, none of them twice.
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
  begin = time.monotonic()
  env = webshop_env.Env(**options)
  tasks = webshop_env.tasks('train', **options)
  env.reset(base.Task('train', 0))
  _row('start to the first page, s', f'{time.monotonic() - begin:.1f}')
  shop = env.shop(base.Task('train', 0))
  _row('products', f'{len(shop.catalogue):,}')
  _row('training goals', f'{len(tasks):,}')
  rng = random.Random(0)
  wanted = [tasks[rng.randrange(len(tasks))] for _ in range(_SEARCHES)]
  titles = [
    shop.catalogue[rng.randrange(len(shop.catalogue))].title.lower().split()
    for _ in range(_SEARCHES)
  ]
  queries = {
    'a whole instruction': [goal.instruction_text for goal in wanted],
    'four words of a title': [
      ' '.join(rng.sample(title, min(4, len(title)))) for title in titles
    ],
    'one word of a title': [rng.choice(title) for title in titles],
  }
  for name, asked in queries.items():
    taken = []
    for query in dict.fromkeys(asked):
      begin = time.perf_counter()
      shop.catalogue.index.search(query, _RESULTS)
      taken.append(1e3 * (time.perf_counter() - begin))
    parts = (np.mean(taken), *np.percentile(taken, [50, 95, 100]))
    text = ', '.join(f'{part:.1f}' for part in parts)
    _row(f'{name}: mean, median, 95 %, most, ms', text)
  memory = psutil.Process().memory_full_info()
  _row('resident, MiB', f'{memory.rss / 2**20:,.0f}')
  _row('of it not shared with other workers, MiB', f'{memory.uss / 2**20:,.0f}')


if __name__ == '__main__':
  main()
