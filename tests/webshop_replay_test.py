"""Tests against recorded episodes and goals of the original WebShop.

The data are the complete recordings or the samples in tests/data.
"""

import dataclasses
import gzip
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
import reference_data

from envs.webshop import goals, products, titles

ROOT = pathlib.Path(__file__).parents[1]
DATA = reference_data.WEBSHOP
TRACES = DATA / 'golden_traces.jsonl.gz'
# Numbers of episodes, steps, purchases, products and goals.
if reference_data.IS_FULL:
  # 53 of the purchases have a type score of 1.
  EPISODES, STEPS, PURCHASES, PRODUCTS, GOALS = 99, 983, 83, 1_000, 6_910
else:
  EPISODES, STEPS, PURCHASES, PRODUCTS, GOALS = 16, 87, 16, 60, 213


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  folder = tmp_path_factory.getbasetemp() / 'webshop_cache'
  monkeypatch.setenv('GIGPO_JAX_CACHE', str(folder))


def replay(traces):
  command = [sys.executable, '-m', 'envs.webshop.replay']
  command += [f'--data_dir={DATA}', str(traces)]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_every_recorded_step_is_reproduced():
  result = replay(TRACES)
  assert result.returncode == 0, result.stdout + result.stderr
  counts = {
    field: (int(equal), int(total))
    for field, equal, _, total, _ in map(str.split, result.stdout.splitlines())
  }
  assert all(equal == total for equal, total in counts.values())
  totals = {field: total for field, (_, total) in counts.items()}
  for field in ('obs', 'rich', 'url', 'has_search_bar', 'clickables'):
    assert totals[field] == EPISODES + STEPS
  assert totals['done'] == STEPS
  for part in ('r_att', 'r_option', 'r_price'):
    assert totals[part] == PURCHASES
  assert totals['price'] == PRODUCTS


def test_a_difference_is_reported(tmp_path):
  with gzip.open(TRACES, 'rt') as file:
    episode = json.loads(next(file))
  episode['steps'][1]['obs'] = episode['steps'][1]['obs'].replace('$', '€')
  changed = tmp_path / 'changed.jsonl'
  changed.write_text(json.dumps(episode) + '\n')
  result = replay(changed)
  assert result.returncode == 1
  assert 'recorded' in result.stdout and '€' in result.stdout


def test_the_last_page_is_compared_without_its_score(tmp_path):
  with gzip.open(TRACES, 'rt') as file:
    episodes = [json.loads(line) for line in file]
  episode = next(
    e for e in episodes if 0 < e.get('reward_info', {}).get('r_type', 0) < 1
  )
  changed = tmp_path / 'changed.jsonl'
  score = str(episode['steps'][-1]['reward'])
  for field in ('obs', 'rich'):
    page = episode['steps'][-1][field]
    assert score in page
    episode['steps'][-1][field] = page.replace(score, '0.25')
  changed.write_text(json.dumps(episode) + '\n')
  result = replay(changed)
  assert result.returncode == 0, result.stdout
  episode['steps'][-1]['obs'] += ' [SEP] more'
  changed.write_text(json.dumps(episode) + '\n')
  assert replay(changed).returncode == 1


def test_title_scores_equal_the_recorded_ones():
  # The recordings were made with TextBlob's tagger on spaCy's words.
  if importlib.util.find_spec('en_core_web_sm'):
    pytest.skip('spaCy is installed and would be the tagger')
  catalogue = products.load(DATA)
  all_goals = goals.build(catalogue)
  bought = 0
  with gzip.open(TRACES, 'rt') as file:
    for episode in map(json.loads, file):
      info = episode.get('reward_info')
      if info:
        asin = episode['steps'][-1]['url'].split('/')[5]
        title = catalogue[catalogue.find(asin)].title
        goal = all_goals[episode['goal_idx']].name
        assert titles.overlap(title, goal) == info['title_score']
        bought += 1
  assert bought == PURCHASES


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"goal_idx": 0}', 'line 1 is not a recorded episode'),
    ('[3]', 'line 1 is not a recorded episode'),
    ('{"goal_idx": 10000, "steps": [], "first": FIRST}', 'goal_idx=10000'),
  ],
)
def test_invalid_episodes_are_errors_in_one_line(tmp_path, line, message):
  with gzip.open(TRACES, 'rt') as file:
    first = json.dumps(json.loads(next(file))['first'])
  changed = tmp_path / 'changed.jsonl'
  changed.write_text(line.replace('FIRST', first))
  result = replay(changed)
  assert result.returncode == 1
  assert message in result.stderr.strip().splitlines()[-1]
  assert 'Traceback' not in result.stderr


def test_a_damaged_recording_is_an_error(tmp_path):
  broken = tmp_path / 'broken.jsonl'
  broken.write_text('{"goal_idx": 0')
  result = replay(broken)
  assert result.returncode == 1
  assert len(result.stderr.strip().splitlines()) == 1


def test_all_recorded_goals_are_reproduced():
  catalogue = products.load(DATA)
  with gzip.open(DATA / 'golden_goals.jsonl.gz', 'rt') as file:
    recorded = [json.loads(line) for line in file]
  built = [dataclasses.asdict(goal) for goal in goals.build(catalogue, seed=0)]
  assert len(built) == len(recorded) == GOALS
  for a, b in zip(built, recorded, strict=True):
    assert a | {'attributes': list(a['attributes'])} == b


def test_colors_equal_the_originals():
  from envs.webshop import reward

  words = json.loads((DATA / 'color_words.json').read_text())
  assert words == reward._COLORS
