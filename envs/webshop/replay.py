r"""Replays recorded episodes of the original WebShop and reports differences.

python -m envs.webshop.replay --data_dir=DIR TRACES.jsonl.gz

Each line of the recording is an episode. `goal_idx` is its goal. `first` is the
page after the reset: obs, rich, url, has_search_bar, clickables. `steps` has
each action with the page after it, the reward and done. After a purchase there
is `reward_info`. The first line may have `prices`, by product.

Rewards are compared part by part. The type score depends on the tagger (see
titles.py). The total on the last page is therefore only compared if the
recorded type score is 1.
"""

import argparse
import collections
import gzip
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import tqdm

from envs.webshop import engine, goals, products

_MAX_PRINTED = 3  # differences to print for each field
_CONTEXT = 60  # characters to print before the first difference
_PARTS = ('r_att', 'r_option', 'r_price')
_PAGE = ('obs', 'rich', 'url', 'has_search_bar', 'clickables')
_SCORE = re.compile(r'(Your score \(min 0.0, max 1.0\)(?: \[SEP\] |\n))[\d.]+')


def compare(
  data_dir: str, traces: str, *, seed: int = 0
) -> Iterator[tuple[str, str, Any, Any]]:
  """Yields (field, location, replayed, recorded) for each compared value.

  Args:
    data_dir: folder of the official files that the recording was made with.
    traces: path of the recording, gzipped or not.
    seed: seed of prices and goals in the recording.

  Raises:
    ValueError: in one line, if the recording cannot be read.
  """
  catalogue = products.load(data_dir)
  shops = [
    engine.Shop(catalogue, observation=mode, seed=seed)
    for mode in engine.OBSERVATIONS
  ]
  all_goals = goals.build(catalogue, seed=seed)
  for episode in tqdm.tqdm(_read(traces), desc='episodes', disable=None):
    if not 0 <= episode['goal_idx'] < len(all_goals):
      raise ValueError(
        f'{traces}: goal_idx={episode["goal_idx"]}: {data_dir} has '
        f'{len(all_goals)} goals; must be the files of the recording'
      )
    if 'prices' in episode:
      yield from _compare_prices(catalogue, episode['prices'], seed)
    yield from _compare_episode(shops, all_goals, episode)


def _read(path: str) -> list[dict]:
  opener = gzip.open if str(path).endswith('.gz') else open
  try:
    with opener(path, 'rt', encoding='utf-8') as file:
      episodes = [json.loads(line) for line in file]
  except (OSError, EOFError, ValueError) as error:
    raise ValueError(f'{path}: cannot be read: {error}') from error
  for n, episode in enumerate(episodes, 1):
    try:
      pages = [episode['first'], *episode['steps']]
      checks = [set(_PAGE) <= set(page) for page in pages]
      checks += [{'action', 'reward', 'done'} <= set(p) for p in pages[1:]]
      checks += [isinstance(episode['goal_idx'], int)]
    except (KeyError, TypeError):
      checks = [False]
    if not all(checks):
      raise ValueError(
        f'{path}: line {n} is not a recorded episode; must have goal_idx, '
        'first and steps'
      )
  return episodes


def _compare_prices(catalogue, recorded, seed) -> Iterator[tuple]:
  drawn = goals.prices(catalogue, seed=seed)
  for index in range(len(catalogue)):
    asin = catalogue.asin(index)
    if asin in recorded:
      yield 'price', asin, float(drawn[index]), recorded[asin]


def _compare_episode(shops, all_goals, episode) -> Iterator[tuple]:
  index = episode['goal_idx']
  location = f'goal {index}'
  if 'goal' in episode:
    yield (
      'goal',
      location,
      all_goals[index].instruction_text,
      episode['goal']['instruction_text'],
    )
  sessions = [engine.Session(shop) for shop in shops]
  pages = [s.reset(all_goals[index], session=str(index)) for s in sessions]
  yield from _compare_page(pages, episode['first'], f'{location}, first page')
  info = episode.get('reward_info') or {}
  for n, step in enumerate(episode['steps']):
    action = step['action']
    pages = [session.step(action) for session in sessions]
    location_of_step = f'{location}, step {n}, {action}'
    bought = step['done'] and info
    if bought:
      yield from _compare_reward(pages[0], step, info, location_of_step)
    else:
      yield 'reward', location_of_step, pages[0].reward, step['reward']
    yield 'done', location_of_step, pages[0].done, step['done']
    yield from _compare_page(
      pages,
      step,
      location_of_step,
      with_score=not bought or info['r_type'] == 1,
    )


def _compare_page(
  pages, recorded, location, *, with_score=True
) -> Iterator[tuple]:
  text, rich = pages
  for field, replayed in (('obs', text.text), ('rich', rich.text)):
    expected = recorded[field]
    if not with_score:
      replayed, expected = (
        _SCORE.sub(r'\1?', page) for page in (replayed, expected)
      )
    yield field, location, replayed, expected
  yield 'url', location, text.url, recorded['url']
  bar = recorded['has_search_bar']
  yield 'has_search_bar', location, text.has_search_bar, bar
  yield 'clickables', location, list(text.clickables), recorded['clickables']


def _compare_reward(page, step, info, location) -> Iterator[tuple]:
  parts = page.reward_parts or {}
  for name in _PARTS:
    yield name, location, parts.get(name), info.get(name)
  if info['r_type'] == 1:
    yield 'r_type', location, parts.get('r_type'), info['r_type']
    yield 'reward', location, page.reward, step['reward']


def report(comparisons: Iterator[tuple[str, str, Any, Any]]) -> bool:
  """Prints differences and the number of equal values of each field.

  Args:
    comparisons: (field, location, replayed, recorded), from `compare`.

  Returns:
    Whether at least one value was compared and all are equal.
  """
  compared, equal = collections.Counter(), collections.Counter()
  for field, location, replayed, recorded in comparisons:
    compared[field] += 1
    equal[field] += replayed == recorded
    num_different = compared[field] - equal[field]
    if replayed != recorded and num_different <= _MAX_PRINTED:
      print(f'{field}, {location}:{_difference(replayed, recorded)}')
  for field in compared:
    print(f'{field:15} {equal[field]:6} of {compared[field]} equal')
  return equal == compared and bool(compared)


def _difference(replayed: Any, recorded: Any) -> str:
  a, b = str(replayed), str(recorded)
  first = next(
    (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
    min(len(a), len(b)),
  )
  part = slice(max(0, first - _CONTEXT), first + 2 * _CONTEXT)
  return f'\n  replayed {a[part]!r}\n  recorded {b[part]!r}'


def main() -> None:
  """Parses the command line and compares; exits with 1 on a difference."""
  parser = argparse.ArgumentParser(
    description='Replays recorded episodes of the original WebShop.'
  )
  parser.add_argument('traces', type=pathlib.Path)
  parser.add_argument('--data_dir', required=True)
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  try:
    all_equal = report(
      compare(arguments.data_dir, arguments.traces, seed=arguments.seed)
    )
  except ValueError as error:
    sys.exit(str(error))
  sys.exit(0 if all_equal else 1)


if __name__ == '__main__':
  main()
