"""Tests of the example of an agent harness: its house, its play, its start."""

import importlib
import itertools
import json
import pathlib
import types

import pytest

import envs
from envs import base, tool_calls

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'
BACK = {'north': 'south', 'south': 'north', 'east': 'west', 'west': 'east'}
TO_GARDEN = {
  'hall': 'north',
  'study': 'east',
  'library': 'south',
  'attic': 'west',
  'kitchen': 'east',
  'cellar': 'north',
  'garage': 'east',
  'pantry': 'south',
}


@pytest.fixture(name='harness')
def fixture_harness(monkeypatch):
  monkeypatch.syspath_prepend(EXAMPLES)
  return importlib.import_module('walk_harness')


class _Client:
  """Answers with the direction that `choose` returns for a room."""

  def __init__(self, choose):
    self.anchors, self._choose = [], choose
    self.chat = types.SimpleNamespace(completions=self)

  def create(self, *, messages, tools, metadata, model):
    assert model == 'policy' and messages and tools
    self.anchors.append(metadata['anchor'])
    direction = self._choose(metadata['anchor'])
    arguments = json.dumps({'direction': direction})
    call = types.SimpleNamespace(
      id='1', function=types.SimpleNamespace(arguments=arguments)
    )
    message = types.SimpleNamespace(
      tool_calls=[call] if direction else None, model_dump=lambda **_: {}
    )
    return types.SimpleNamespace(
      choices=[types.SimpleNamespace(message=message)]
    )


def test_doors_lead_back(harness):
  for room, doors in harness.HOUSE.items():
    for direction, other in doors.items():
      assert direction in harness.DIRECTIONS
      if other != harness.GOAL:
        assert harness.HOUSE[other][BACK[direction]] == room


def test_every_task_can_be_solved(harness):
  lengths = {}
  for task in range(2 * len(harness.HOUSE)):
    client = _Client(TO_GARDEN.get)
    room = harness.first_room(task)
    assert harness.play(client, room)
    assert client.anchors[0] == room
    lengths[room] = len(client.anchors)
  assert set(lengths) == set(harness.HOUSE)
  assert lengths['pantry'] == 1 and lengths['hall'] == 5
  assert max(lengths.values()) < harness.MAX_STEPS


def test_walls_and_words_cost_a_step(harness):
  assert harness.walk('hall', 'south') == (
    'hall',
    'There is no door. You are in the hall.',
  )
  assert harness.walk('hall', None)[0] == 'hall'
  for choose in (lambda room: 'south', lambda room: ''):
    client = _Client(choose)
    assert not harness.play(client, 'hall')
    assert client.anchors == ['hall'] * harness.MAX_STEPS


def test_the_warm_start_walks_with_detours(harness, monkeypatch):
  monkeypatch.syspath_prepend(EXAMPLES)
  start = importlib.import_module('walk_start')
  assert {room: start.shortest_way(room) for room in TO_GARDEN} == TO_GARDEN
  env = envs.make_expert('walk_start', max_steps=6)
  used: dict[float, set] = {0.0: set(), 1.0: set()}
  for index, noise in itertools.product(range(20), used):
    task = base.Task('train', index)
    steps = list(env.demonstrate(task, noise=noise, seed=0))
    assert steps == list(env.demonstrate(task, noise=noise, seed=0))
    assert 1 <= len(steps) <= harness.MAX_STEPS
    room = harness.first_room(index)
    for observation, response in steps:
      assert observation.messages[0].text.endswith(f'You are in the {room}.')
      (call,) = tool_calls.parse(response).calls
      used[noise].add((room, call.arguments['direction']))
      room, _ = harness.walk(room, call.arguments['direction'])
  assert used[0.0] == set(TO_GARDEN.items())
  assert {direction for _, direction in used[1.0]} == set(harness.DIRECTIONS)
