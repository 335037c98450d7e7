"""The original's recorded episodes and goals, where they are at hand."""

import dataclasses
import gzip
import json
import os
import pathlib
import subprocess
import sys

import pytest

from envs.webshop import goals, products

ROOT = pathlib.Path(__file__).parents[1]
DATA = pathlib.Path(
  os.environ.get('GIGPO_JAX_SHARED', ROOT.parent / 'shared')
).joinpath('data', 'webshop')
TRACES = DATA / 'golden_traces.jsonl.gz'

pytestmark = pytest.mark.skipif(
  not TRACES.exists(), reason=f'no recordings of the original in {DATA}'
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  folder = tmp_path_factory.getbasetemp() / 'webshop_cache'
  monkeypatch.setenv('GIGPO_JAX_CACHE', str(folder))


def replay(traces):
  command = [sys.executable, '-m', 'envs.webshop.replay']
  command += [f'--data_dir={DATA}', str(traces)]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_every_step_is_equal():
  done = replay(TRACES)
  assert done.returncode == 0, done.stdout + done.stderr
  agree = [line.split() for line in done.stdout.splitlines()]
  assert {line[0] for line in agree} >= {'obs', 'rich', 'clickables', 'done'}
  assert all(line[1] == line[3] for line in agree)


def test_a_difference_is_found(tmp_path):
  with gzip.open(TRACES, 'rt') as file:
    episode = json.loads(next(file))
  episode['steps'][1]['obs'] = episode['steps'][1]['obs'].replace('$', '€')
  changed = tmp_path / 'changed.jsonl'
  changed.write_text(json.dumps(episode) + '\n')
  done = replay(changed)
  assert done.returncode == 1
  assert 'recorded' in done.stdout and '€' in done.stdout


def test_broken_recording_is_refused(tmp_path):
  broken = tmp_path / 'broken.jsonl'
  broken.write_text('{"goal_idx": 0')
  done = replay(broken)
  assert done.returncode == 1
  assert len(done.stderr.strip().splitlines()) == 1


def test_all_goals_are_equal():
  catalogue = products.load(DATA)
  with gzip.open(DATA / 'golden_goals.jsonl.gz', 'rt') as file:
    recorded = [json.loads(line) for line in file]
  ours = [dataclasses.asdict(goal) for goal in goals.build(catalogue, seed=0)]
  assert len(ours) == len(recorded) == 6_910
  for a, b in zip(ours, recorded, strict=True):
    assert a | {'attributes': list(a['attributes'])} == b


def test_colours_are_the_originals():
  from envs.webshop import reward

  words = json.loads((DATA / 'color_words.json').read_text())
  assert words == reward._COLORS
