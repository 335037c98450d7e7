r"""Makes the samples in this folder.

python tests/data/make_samples.py REFERENCE_DATA

ALFWorld's are parts of the reference data. WebShop's are a generated shop with
episodes recorded in it, for the texts of the original products are not free.
"""

import argparse
import dataclasses
import gzip
import json
import pathlib
import random
import shutil
from collections.abc import Iterator

from envs.webshop import catalogue, engine, goals, products, titles

HERE = pathlib.Path(__file__).parent
EPISODES = 16
MAX_STEPS = 12


def alfworld(whole: pathlib.Path, out: pathlib.Path) -> None:
  """Copies every fifth floor plan and task name, and the official game."""
  (out / 'layouts').mkdir(parents=True)
  for path in whole.glob('layouts/*-openable.json'):
    number = int(path.name.removeprefix('FloorPlan').split('-')[0])
    if number % 5 == 3:
      shutil.copyfile(path, out / 'layouts' / path.name)
  names = json.loads((whole / 'official_task_names.json').read_text())
  names = {split: found[::5] for split, found in names.items()}
  (out / 'official_task_names.json').write_text(json.dumps(names, indent=0))
  game = 'official_game_single_agent'
  for path in (whole / game).rglob('*.*'):
    if path.is_file():
      target = out / path.relative_to(whole)
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(path, target)
  shutil.copyfile(whole / 'LICENSE.alfworld', out / 'LICENSE.alfworld')


def webshop(whole: pathlib.Path, out: pathlib.Path) -> None:
  """Generates a shop, and records its goals and episodes."""
  out.mkdir()
  for name in ('color_words.json', 'LICENSE.webshop.md'):
    shutil.copyfile(whole / name, out / name)
  items, instructions = catalogue.generate(num_products=60, seed=1)
  _write(out / 'items_shuffle_1000.json', items)
  _write(out / 'items_ins_v2_1000.json', instructions)
  found = products.load(str(out))
  every = goals.build(found, seed=0)
  with gzip.GzipFile(out / 'golden_goals.jsonl.gz', 'w', mtime=0) as file:
    for goal in every:
      file.write(_line(dataclasses.asdict(goal)))
  shops = [engine.Shop(found, observation=f) for f in engine.OBSERVATIONS]
  prices = goals.prices(found, seed=0).tolist()
  with gzip.GzipFile(out / 'golden_traces.jsonl.gz', 'w', mtime=0) as file:
    for index in range(EPISODES):
      episode = _episode(shops, every, index)
      if not index:
        asins = map(found.asin, range(len(found)))
        episode['prices'] = dict(zip(asins, prices, strict=True))
      file.write(_line(episode))


def _episode(shops: list, every: goals.Goals, index: int) -> dict:
  goal = every[index]
  sessions = [engine.Session(shop) for shop in shops]
  text, rich = (s.reset(goal, session=str(index)) for s in sessions)
  episode = {
    'goal_idx': index,
    'goal': dataclasses.asdict(goal),
    'first': _page(text, rich),
    'steps': [],
  }
  rng = random.Random(index)
  bought = ''
  for action in _actions(rng, goal, episode):
    text, rich = (session.step(action) for session in sessions)
    step = {'action': action, 'reward': text.reward, 'done': text.done}
    episode['steps'].append(step | _page(text, rich))
    if 'item_page' in text.url:
      bought = text.url.split('/')[5]
  if text.done:
    title = shops[0].catalogue[shops[0].catalogue.number(bought)].title
    score = titles.overlap(title, goal.name)
    episode['reward_info'] = text.parts | {'title_score': score}
  return episode


def _actions(
  rng: random.Random, goal: goals.Goal, episode: dict
) -> Iterator[str]:
  """Yields actions until a purchase: half of the customers know the goal."""
  knows = rng.random() < 0.5
  yield f'search[{goal.name if knows else goal.query}]'
  for left in range(MAX_STEPS, 0, -1):
    page = episode['steps'][-1]
    if page['done']:
      return
    can = page['clickables']
    wanted = [goal.asin.lower(), *map(str.lower, goal.goal_options.values())]
    best = [c for c in can if c in wanted and c not in page['url'].lower()]
    if page['has_search_bar']:
      yield f'search[{goal.query}]'
    elif knows and best:
      yield f'click[{best[0]}]'
    elif 'buy now' in can and (knows or left <= MAX_STEPS // 2):
      yield 'click[buy now]'
    else:
      yield f'click[{rng.choice(can)}]'


def _page(text: engine.Page, rich: engine.Page) -> dict:
  return {
    'obs': text.text,
    'rich': rich.text,
    'url': text.url,
    'has_search_bar': text.has_search_bar,
    'clickables': list(text.clickables),
  }


def _line(value: object) -> bytes:
  return json.dumps(value).encode() + b'\n'


def _write(path: pathlib.Path, value: object) -> None:
  path.write_text(json.dumps(value, indent=0, ensure_ascii=False))


def main() -> None:
  """Parses the command line and replaces the samples."""
  parser = argparse.ArgumentParser(description='Makes samples of test data.')
  parser.add_argument('reference_data', type=pathlib.Path)
  whole = parser.parse_args().reference_data
  for make in (alfworld, webshop):
    out = HERE / make.__name__
    shutil.rmtree(out, ignore_errors=True)
    make(whole / make.__name__, out)


if __name__ == '__main__':
  main()
