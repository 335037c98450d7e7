r"""Plays recorded episodes of the original again, and says where we differ.

python -m envs.webshop.replay --data_dir=DIR TRACES.jsonl.gz

A line of the recording is an episode: `goal_idx`, `first` (the page after the
reset: obs, rich, url, has_search_bar, clickables), `steps` (action, the same
of the page after it, reward, done) and, after a purchase, `reward_info`. The
first line may hold `prices`, by product. Rewards are compared part by part;
their total, which the last page shows, where the recorded type part is 1,
because the type part depends on the tagger (see titles.py).
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

_SHOWN = 3  # differences shown for each field
_AROUND = 60  # characters shown before the first that differs
_PARTS = ('r_att', 'r_option', 'r_price')
_PAGE = ('obs', 'rich', 'url', 'has_search_bar', 'clickables')
_SCORE = re.compile(r'(Your score \(min 0.0, max 1.0\)(?: \[SEP\] |\n))[\d.]+')


def compare(
  data_dir: str, traces: str, *, seed: int = 0
) -> Iterator[tuple[str, str, Any, Any]]:
  """Yields (field, where, ours, recorded) for all that is compared.

  Args:
    data_dir: official files of the catalogue that was recorded.
    traces: the recording, gzipped or not.
    seed: of prices and goals at the recording.
  """
  catalogue = products.load(data_dir)
  shops = [
    engine.Shop(catalogue, observation=form, seed=seed)
    for form in engine.OBSERVATIONS
  ]
  every = goals.build(catalogue, seed=seed)
  for episode in tqdm.tqdm(_read(traces), desc='episodes', disable=None):
    if not 0 <= episode['goal_idx'] < len(every):
      raise ValueError(
        f'{traces}: goal_idx={episode["goal_idx"]}: {data_dir} has '
        f'{len(every)} goals'
      )
    if 'prices' in episode:
      yield from _prices(catalogue, episode['prices'], seed)
    yield from _episode(shops, every, episode)


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
      whole = [set(_PAGE) <= set(page) for page in pages]
      whole += [{'action', 'reward', 'done'} <= set(p) for p in pages[1:]]
      whole += [isinstance(episode['goal_idx'], int)]
    except (KeyError, TypeError):
      whole = [False]
    if not all(whole):
      raise ValueError(f'{path}: line {n} is no recorded episode')
  return episodes


def _prices(catalogue, recorded, seed) -> Iterator[tuple]:
  drawn = goals.prices(catalogue, seed=seed)
  for number in range(len(catalogue)):
    asin = catalogue.asin(number)
    if asin in recorded:
      yield 'price', asin, float(drawn[number]), recorded[asin]


def _episode(shops, every, episode) -> Iterator[tuple]:
  index = episode['goal_idx']
  where = f'goal {index}'
  if 'goal' in episode:
    yield (
      'goal',
      where,
      every[index].instruction_text,
      episode['goal']['instruction_text'],
    )
  sessions = [engine.Session(shop) for shop in shops]
  pages = [s.reset(every[index], session=str(index)) for s in sessions]
  yield from _page(pages, episode['first'], f'{where}, first page')
  info = episode.get('reward_info') or {}
  for n, step in enumerate(episode['steps']):
    action = step['action']
    pages = [session.step(action) for session in sessions]
    place = f'{where}, step {n}, {action}'
    bought = step['done'] and info
    if bought:
      yield from _reward(pages[0], step, info, place)
    else:
      yield 'reward', place, pages[0].reward, step['reward']
    yield 'done', place, pages[0].done, step['done']
    yield from _page(
      pages, step, place, scored=not bought or info['r_type'] == 1
    )


def _page(pages, recorded, where, *, scored=True) -> Iterator[tuple]:
  text, rich = pages
  for field, ours in (('obs', text.text), ('rich', rich.text)):
    theirs = recorded[field]
    if not scored:
      ours, theirs = (_SCORE.sub(r'\1?', page) for page in (ours, theirs))
    yield field, where, ours, theirs
  yield 'url', where, text.url, recorded['url']
  bar = recorded['has_search_bar']
  yield 'has_search_bar', where, text.has_search_bar, bar
  yield 'clickables', where, list(text.clickables), recorded['clickables']


def _reward(page, step, info, where) -> Iterator[tuple]:
  parts = page.parts or {}
  for name in _PARTS:
    yield name, where, parts.get(name), info.get(name)
  if info['r_type'] == 1:
    yield 'r_type', where, parts.get('r_type'), info['r_type']
    yield 'reward', where, page.reward, step['reward']


def report(differences: Iterator[tuple[str, str, Any, Any]]) -> bool:
  """Prints how many agree, field by field; returns whether all do."""
  number, agree = collections.Counter(), collections.Counter()
  for field, where, ours, recorded in differences:
    number[field] += 1
    agree[field] += ours == recorded
    if ours != recorded and number[field] - agree[field] <= _SHOWN:
      print(f'{field}, {where}:{_difference(ours, recorded)}')
  for field in number:
    print(f'{field:15} {agree[field]:6} of {number[field]} equal')
  return agree == number and bool(number)


def _difference(ours: Any, recorded: Any) -> str:
  a, b = str(ours), str(recorded)
  first = next(
    (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
    min(len(a), len(b)),
  )
  part = slice(max(0, first - _AROUND), first + 2 * _AROUND)
  return f'\n  ours     {a[part]!r}\n  recorded {b[part]!r}'


def main() -> None:
  """Parses the command line; exit code 1 if anything differs."""
  parser = argparse.ArgumentParser(
    description='Replays recorded episodes of the original WebShop.'
  )
  parser.add_argument('traces', type=pathlib.Path)
  parser.add_argument('--data_dir', required=True)
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  try:
    same = report(
      compare(arguments.data_dir, arguments.traces, seed=arguments.seed)
    )
  except ValueError as error:
    sys.exit(str(error))
  sys.exit(0 if same else 1)


if __name__ == '__main__':
  main()
