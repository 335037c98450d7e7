"""Tests of ALFWorld's games: generation, tables, official files."""

import collections
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import reference_data

from envs import seeds
from envs.alfworld import expert, facts, games, houses, native, pddl, world

ROOT = pathlib.Path(__file__).parents[1]
SMALL = {'receptacles': (5, 8), 'distractors': (3, 7)}
# Types that may share a location.
STACKED = {'Cabinet', 'Drawer', 'Shelf', 'StoveBurner'}


def test_small_games_are_small():
  sizes = set()
  for index in range(200):
    game = houses.generate('train', index, **SMALL)
    sizes.add(len(game.receptacles))
    assert 4 <= len(game.objects) <= 10
    assert 3 <= len(expert.plan(game)) <= 11
  assert sizes == {5, 6, 7, 8}


@pytest.mark.parametrize('room', facts.ROOMS)
def test_receptacles_sets_the_size_of_a_room(room):
  for span in ((4, 4), (12, 14), (40, 40)):
    for index in range(20):
      game = houses.generate(
        'train', index, rooms=(room,), receptacles=span, distractors=(0, 0)
      )
      assert span[0] <= len(game.receptacles) <= span[1]
      # Only some types are added to reach the size.
      for name, count in collections.Counter(
        r.type for r in game.receptacles
      ).items():
        most = max(facts.RECEPTACLES[room][name][0])
        assert count <= most or name in STACKED


@pytest.mark.parametrize('room', facts.ROOMS)
def test_distractors_are_between_their_bounds(room):
  for span in ((0, 0), (3, 3), (30, 40)):
    for index in range(20):
      game = houses.generate(
        'train', index, rooms=(room,), receptacles=(4, 6), distractors=span
      )
      # A lamp is no distractor, even where the task does not need it.
      others = {game.goal.object_type, 'DeskLamp'}
      count = sum(item.type not in others for item in game.objects)
      assert span[0] <= count <= span[1]


def test_games_follow_the_containment_table():
  for index in range(100):
    game = houses.generate('train', index)
    receptacles = {r.id: r for r in game.receptacles}
    assert len(receptacles) == len(game.receptacles)
    assert len({o.id for o in game.objects}) == len(game.objects)
    for item in game.objects:
      receptacle = receptacles[item.receptacle]
      assert item.location == receptacle.location
      if item.type == 'DeskLamp':
        assert item.flags == {'toggleable'}
        assert receptacle.type in facts.LAMP_PLACES and not receptacle.openable
      else:
        assert (receptacle.type, item.type) in game.can_contain
        assert 'pickupable' in item.flags
    assert game.start not in {r.location for r in game.receptacles}
    assert {r.location for r in game.receptacles} < set(game.locations)


def test_shared_locations_and_open_drawers_occur():
  rooms = [houses.generate('train', index) for index in range(60)]
  opens = {
    (r.type, r.openable)
    for game in rooms
    for r in game.receptacles
    if r.type in ('Cabinet', 'Drawer')
  }
  assert len(opens) == 4
  shared = set()
  for game in rooms:
    for location in {r.location for r in game.receptacles}:
      here = [r.type for r in game.receptacles if r.location == location]
      if len(here) > 1:
        assert len(set(here)) == 1
        shared.add(here[0])
  assert shared == STACKED


def test_floor_plans_are_none_of_the_official_ones():
  for room in facts.ROOMS:
    for index in range(40):
      game = houses.generate('train', index, rooms=(room,), **SMALL)
      plan = int(game.name.split('/')[0].rsplit('-', 1)[-1])
      assert room_of(plan) == room and plan % 100 > 30


def test_a_game_in_light_has_one_lamp():
  types = ('look_at_obj_in_light',)
  for index in range(60):
    game = houses.generate('train', index, task_types=types)
    assert sum(o.type == 'DeskLamp' for o in game.objects) == 1


def test_objects_to_treat_may_start_at_their_goal():
  types = ('pick_heat_then_place_in_recep',)
  starts = set()
  for index in range(60):
    game = houses.generate('train', index, task_types=types)
    goals = {
      r.id for r in game.receptacles if r.type == game.goal.receptacle_type
    }
    starts |= {
      o.receptacle in goals
      for o in game.objects
      if o.type == game.goal.object_type
    }
  assert starts == {False, True}


def test_generation_is_deterministic():
  program = (
    'from envs.alfworld import houses, pddl; import hashlib\n'
    "games = [houses.generate('train', i) for i in range(9)]\n"
    "text = ''.join(pddl.to_problem(g) + g.task + g.name for g in games)\n"
    'print(hashlib.sha1(text.encode()).hexdigest())'
  )
  outputs = {
    subprocess.run(
      [sys.executable, '-c', program],
      env={**os.environ, 'PYTHONHASHSEED': seed, 'PYTHONPATH': str(ROOT)},
      capture_output=True,
      check=True,
      text=True,
    ).stdout
    for seed in ('0', '1')
  }
  assert len(outputs) == 1
  assert houses.generate('train', 3) == houses.generate('train', 3)


def test_splits_seeds_and_games_differ():
  contents = set()
  for split in games.NUM_GAMES:
    for seed in (0, 1):
      for index in range(50):
        game = houses.generate(split, index, seed=seed, **SMALL)
        contents.add((game.receptacles, game.objects))
  assert len(contents) == 3 * 2 * 50


def test_options_choose_rooms_and_task_types():
  types = ('pick_heat_then_place_in_recep', 'look_at_obj_in_light')
  counts = collections.Counter(
    houses.task_type('train', index, rooms=('bedroom',), task_types=types)
    for index in range(20)
  )
  assert set(counts) == {'look_at_obj_in_light'}


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'rooms': ('attic',)}, r'rooms=\(.attic.,\): must be some of kitchen'),
    ({'task_types': ()}, 'task_types=.*must be some of pick'),
    ({'receptacles': (8, 5)}, 'receptacles=.*low <= high'),
    ({'receptacles': (1, 5)}, 'receptacles=.*4 <= low'),
    ({'distractors': (3,)}, 'distractors='),
    (
      {'rooms': ('bathroom',), 'task_types': ('look_at_obj_in_light',)},
      'no task of',
    ),
    ({'num_games': 0}, 'num_games=0'),
    ({'num_held_out': 0}, 'num_held_out=0'),
  ],
)
def test_bad_generator_options(options, message):
  with pytest.raises(ValueError, match=message):
    games.open_split('train', **options)


def test_num_held_out_keeps_the_first_games():
  few = games.open_split('valid_unseen', **SMALL)
  more = games.open_split('valid_unseen', num_held_out=512, **SMALL)
  assert (len(few), len(more)) == (134, 512)
  assert few.world(133) == more.world(133)
  assert len(games.open_split('train', num_held_out=512, **SMALL)) == 3553
  both = {'num_games': 5, 'num_held_out': 7}
  sizes = [len(games.open_split(split, **both)) for split in games.NUM_GAMES]
  assert sizes == [5, 7, 7]


# -- tables ------------------------------------------------------------------


def test_tables_agree_with_the_installed_package():
  spec = importlib.util.find_spec('alfworld')
  if spec is None:
    pytest.skip('alfworld is not installed')
  path = pathlib.Path(spec.submodule_search_locations[0])
  spec = importlib.util.spec_from_file_location(
    'alfworld_constants', path / 'gen' / 'constants.py'
  )
  constants = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(constants)
  movable = constants.MOVABLE_RECEPTACLES_SET
  official = {
    (receptacle, object_type)
    for receptacle, object_types in constants.VAL_RECEPTACLE_OBJECTS.items()
    for object_type in object_types
    if receptacle not in movable and 'Sliced' not in object_type
  }
  packaged = {
    (p, object_type)
    for object_type, receptacles in facts.PLACES.items()
    for p in receptacles
  }
  assert packaged == official
  flags = {'Clean': 'able', 'Heat': 'able', 'Cool': 'able', 'Slice': 'able'}
  for verb in flags:
    name = 'Sliceable' if verb == 'Slice' else f'{verb}able'
    official = set(constants.VAL_ACTION_OBJECTS[name]) & facts.PLACES.keys()
    assert {
      k for k in facts.PLACES if name.lower() in facts.FLAGS[k]
    } == official
  assert {
    k for k in facts.PLACES if 'isReceptacleObject' in facts.FLAGS[k]
  } == movable


def room_of(plan):
  return {0: 'kitchen', 2: 'living', 3: 'bedroom', 4: 'bathroom'}[
    int(plan) // 100
  ]


def test_rooms_resemble_the_official_ones():
  official = collections.defaultdict(list)
  for path in reference_data.ALFWORLD.glob('layouts/*-openable.json'):
    plan = path.name.removeprefix('FloorPlan').split('-')[0]
    types = [name.split('|')[0] for name in json.loads(path.read_text())]
    official[room_of(plan)].append(collections.Counter(types))
  for room, plans in official.items():
    generated = [
      collections.Counter(
        r.type
        for r in houses.generate('train', index, rooms=(room,)).receptacles
      )
      for index in range(200)
    ]
    for receptacle_type in (
      'Cabinet',
      'Drawer',
      'CounterTop',
      'Shelf',
      'SideTable',
    ):
      expected = np.mean([plan[receptacle_type] for plan in plans])
      actual = np.mean([plan[receptacle_type] for plan in generated])
      assert abs(actual - expected) < 1.2, (
        room,
        receptacle_type,
      )


def test_goals_resemble_the_official_ones():
  names = json.loads(
    (reference_data.ALFWORLD / 'official_task_names.json').read_text()
  )
  official, generated = collections.Counter(), collections.Counter()
  pairs = set()
  for name in names['train']:
    task_type, object_type, _, receptacle, _ = name.split('/')[0].split('-')
    official[task_type] += 1 / len(names['train'])
    pairs.add((task_type, object_type, receptacle))
  known, total = 0, 1500
  for index in range(total):
    goal = houses.generate('train', index).goal
    generated[goal.task_type] += 1 / total
    known += (goal.task_type, goal.object_type, goal.receptacle_type) in pairs
  for task_type, frequency in official.items():
    assert abs(generated[task_type] - frequency) < 0.06
  # The other pairs are valid, but do not occur in the official tasks.
  assert known / total > 0.6


def test_tasks_are_as_frequent_in_each_room_as_the_official_ones():
  task_type = 'pick_and_place_simple'
  path = reference_data.ALFWORLD / 'official_task_names.json'
  names = json.loads(path.read_text())['train']
  official = [name for name in names if name.startswith(f'{task_type}-')]
  generated = [
    houses.generate('train', n, task_types=(task_type,)).name
    for n in range(300)
  ]
  shares = []
  for names in (official, generated):
    rooms = [room_of(n.split('/')[0].rsplit('-', 1)[-1]) for n in names]
    shares.append([rooms.count(room) / len(rooms) for room in facts.ROOMS])
  np.testing.assert_allclose(*shares, atol=0.08)


# -- game sets ---------------------------------------------------------------


def test_generated_set():
  split = games.open_split('train', num_games=20, seed=5, **SMALL)
  assert len(split) == 20
  assert len(games.open_split('valid_unseen')) == 134
  assert split.path(0) is None
  assert split.world(3) == houses.generate('train', 3, seed=5, **SMALL)
  assert split.task_type(3) == split.world(3).goal.task_type
  for index in (20, -1):
    for read in (split.world, split.task_type, split.path):
      with pytest.raises(IndexError, match=f'train/{index}: the split has 20'):
        read(index)
  bedrooms = games.open_split('train', rooms=('bedroom',))
  for index in range(20):
    assert bedrooms.task_type(index) == bedrooms.world(index).goal.task_type
  with pytest.raises(ValueError, match='split=test: must be one of train'):
    games.open_split('test')


@pytest.fixture
def official(tmp_path):
  """Returns a split with four valid games and five to be filtered out."""
  folder = tmp_path / 'json_2.1.1' / 'valid_seen'
  paths = []
  for index in range(9):
    game = houses.generate('valid_seen', index, **SMALL)
    paths.append(games.write_game(game, folder))

  def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

  edit(paths[0], solvable=False)
  edit(
    paths[1].with_name('traj_data.json'),
    task_type='pick_and_place_with_movable_recep',
  )
  paths[2].unlink()
  for path, word in ((paths[3], 'movable'), (paths[4], 'Sliced')):
    task = path.parent.parent
    os.renames(path.parent, task.with_name(f'{word}-{task.name}') / 'trial')
  return tmp_path, paths[5:]


def test_official_set_is_filtered(official):
  folder, expected = official
  for data_dir in (folder, folder / 'json_2.1.1'):
    split = games.open_split(
      'valid_seen', data_dir=str(data_dir), expected_counts=False
    )
    assert len(split) == 4
    paths = [split.path(index) for index in range(4)]
    assert sorted(paths) == sorted(map(str, expected))
    for index in range(4):
      assert split.task_type(index) == split.world(index).goal.task_type
      assert split.world(index) == pddl.read_game(paths[index])
    for index in (4, -1):
      for read in (split.world, split.task_type, split.path):
        with pytest.raises(IndexError, match=f'valid_seen/{index}: the split'):
          read(index)


def test_both_ends_of_a_sorted_official_set_have_all_task_types(tmp_path):
  # Evaluations take the first games, demonstrations the last.
  folder = tmp_path / 'json_2.1.1' / 'valid_seen'
  for index in range(90):
    game = houses.generate('valid_seen', index, **SMALL)
    games.write_game(game, folder)
  split = games.open_split(
    'valid_seen', data_dir=str(tmp_path), expected_counts=False
  )
  types = [split.task_type(index) for index in range(len(split))]
  assert len(types) == 90
  assert len(set(types)) == len(world.TASK_TYPES)
  assert set(types[:30]) == set(types[-30:]) == set(types)


def test_order_of_two_tasks_does_not_depend_on_others():
  tasks = [(name, n) for name in ('boil', 'melt') for n in range(20)]
  mixed = seeds.mix(tasks)
  assert sorted(mixed) == tasks
  assert mixed == seeds.mix(reversed(tasks))
  assert [t for t in mixed if t[1] % 2] == seeds.mix(
    [t for t in tasks if t[1] % 2]
  )


def test_official_set_keeps_the_chosen_task_types(official):
  folder, paths = official
  manifest = folder / 'json_2.1.1' / 'valid_seen' / 'generated.json'
  manifest.write_text('{"num_games": 4}')
  chosen = pddl.read_game(paths[0]).goal.task_type
  split = games.open_split(
    'valid_seen', data_dir=str(folder), task_types=(chosen,)
  )
  assert 0 < len(split) < 4
  assert {split.task_type(n) for n in range(len(split))} == {chosen}


def test_names_of_folders_above_a_split_do_not_matter(official, monkeypatch):
  folder, paths = official
  moved = folder / 'movable' / 'Sliced'
  os.renames(folder / 'json_2.1.1', moved / 'json_2.1.1')
  monkeypatch.setenv('HOME', str(folder / 'movable'))
  for data_dir in (str(moved), '~/Sliced'):
    split = games.open_split(
      'valid_seen', data_dir=data_dir, expected_counts=False
    )
    assert len(split) == len(paths)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('{}', "generated.json: lacks the number of games .'num_games'"),
    ('[', 'generated.json: lacks the number of games'),
    ('3', 'generated.json: lacks the number of games'),
    ('{"num_games": 0}', 'has 0 valid_seen games'),
    (None, 'has 0 valid_seen games, not 140'),
  ],
)
def test_folders_without_games_are_errors(tmp_path, text, message):
  folder = tmp_path / 'valid_seen'
  folder.mkdir()
  if text is not None:
    (folder / 'generated.json').write_text(text)
  with pytest.raises(ValueError, match=message):
    games.open_split(
      'valid_seen', data_dir=str(tmp_path), expected_counts=False
    )


def test_official_set_errors(official, tmp_path):
  folder, paths = official
  data_dir = str(folder)
  with pytest.raises(ValueError, match='has 4 valid_seen games, not 140'):
    games.open_split('valid_seen', data_dir=data_dir)
  with pytest.raises(ValueError, match='no folder json_2.1.1/train; download'):
    games.open_split('train', data_dir=data_dir)
  trajectory = paths[1].with_name('traj_data.json')
  text = trajectory.read_text()
  trajectory.write_text('{}')
  with pytest.raises(ValueError, match='traj_data.json: .*has no task_type'):
    games.open_split('valid_seen', data_dir=data_dir, expected_counts=False)
  trajectory.write_text(text)
  paths[0].write_text(paths[0].read_text()[:1000])
  with pytest.raises(ValueError, match='game.tw-pddl: not a readable'):
    games.open_split('valid_seen', data_dir=data_dir, expected_counts=False)


def test_official_set_reads_each_file_once(official, monkeypatch):
  data_dir = str(official[0])
  first = games.open_split(
    'valid_seen', data_dir=data_dir, expected_counts=False
  )
  monkeypatch.setattr(pathlib.Path, 'read_bytes', None)
  again = games.open_split(
    'valid_seen', data_dir=data_dir, expected_counts=False
  )
  assert [again.path(n) for n in range(len(again))] == [
    first.path(n) for n in range(len(first))
  ]


def write_games(tmp_path, capsys, count, *options):
  arguments = ['--out', str(tmp_path), '--num', str(count), *options]
  games.main([*arguments, '--receptacles', '5', '8', '--distractors', '3', '7'])
  assert f'{count} games in' in capsys.readouterr().out
  return games.open_split('train', data_dir=str(tmp_path))


def test_written_games_are_read_by_open_split(tmp_path, capsys):
  split = write_games(tmp_path, capsys, 12, '--seed', '4')
  source = {
    game.name: game
    for game in (
      houses.generate('train', i, seed=4, **SMALL) for i in range(12)
    )
  }
  assert len(split) == 12
  engine = native.NativeEngine()
  for index in range(12):
    game = split.world(index)
    walkthrough = json.loads(pathlib.Path(split.path(index)).read_text())[
      'walkthrough'
    ]
    assert walkthrough == expert.plan(game) == expert.plan(source[game.name])
    engine.load(game)
    state = engine.reset()
    for command in walkthrough:
      assert command in state.admissible
      assert not state.won
      state = engine.step(command)
    assert state.won
  with pytest.raises(SystemExit):
    write_games(tmp_path, capsys, 3)
  assert 'is not empty' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    games.main(['--out', '/dev/null/x', '--num', '2'])
  error = capsys.readouterr().err
  assert 'error: --out=/dev/null/x: cannot be written' in error


def test_another_split_can_be_written(tmp_path, capsys):
  options = ('--receptacles', '5', '8', '--split', 'valid_seen', '--seed', '4')
  games.main(['--out', str(tmp_path), '--num', '2', *options])
  capsys.readouterr()
  split = games.open_split('valid_seen', data_dir=str(tmp_path))
  assert len(split) == 2
  assert 'trial_valid_seen_4' in split.world(0).name
  folder = tmp_path / 'json_2.1.1' / 'valid_seen'
  manifest = json.loads((folder / 'generated.json').read_text())
  assert manifest['seed'] == 4 and manifest['receptacles'] == [5, 8]


@pytest.mark.parametrize(
  'task_type', ['look_at_obj_in_light', 'pick_two_obj_and_place']
)
def test_trajectories_name_the_lamp_or_the_receptacle(tmp_path, task_type):
  game = houses.generate('train', 0, task_types=(task_type,), **SMALL)
  path = games.write_game(game, tmp_path).with_name('traj_data.json')
  data = json.loads(path.read_text())['pddl_params']
  lamp, receptacle = data['toggle_target'], data['parent_target']
  target = game.goal.receptacle_type
  in_light = task_type == 'look_at_obj_in_light'
  assert (lamp, receptacle) == ((target, '') if in_light else ('', target))


# Runs in its own process: the planner's library fails if it is loaded next to
# copies that other tests loaded and freed.
STOCK = """
import json, sys
data, games, plans = json.load(open(sys.argv[1]))
import textworld
from alfworld.agents.environment import alfred_tw_env as stock
from textworld.envs import PddlEnv
config = {
  'env': {
    'goal_desc_human_anns_prob': 0,
    'task_types': [1, 2, 3, 4, 5, 6],
    'domain_randomization': False,
  },
  'dataset': {'data_path': data, 'num_train_games': -1},
}
loaded = stock.AlfredTWEnv(config, train_eval='train').game_files
assert sorted(loaded) == sorted(games), (loaded, games)
infos = textworld.EnvInfos(
  won=True, admissible_commands=True, facts=True, extras=['gamefile']
)
engine = stock.AlfredInfos(stock.AlfredDemangler(PddlEnv(infos)))
expert_engine = stock.AlfredExpert(engine)
for game, plan in list(zip(games, plans))[::3]:
  # ALFWorld's expert finds its files too; its plans are not checked.
  expert_engine.load(game)
  assert expert_engine.reset()['extra.expert_plan']
  state = engine.reset()
  for command in plan:
    assert command in state['admissible_commands']
    state, _, _ = engine.step(command)
  assert state['won']
print('won')
"""


def test_stock_alfworld_loads_and_wins_written_games(
  tmp_path, capsys, monkeypatch
):
  pytest.importorskip('textworld')
  monkeypatch.setenv('ALFWORLD_DATA', str(tmp_path))
  split = write_games(tmp_path, capsys, 12)
  facts = (
    str(tmp_path / 'json_2.1.1' / 'train'),
    [split.path(index) for index in range(12)],
    [expert.plan(split.world(index)) for index in range(12)],
  )
  (tmp_path / 'facts.json').write_text(json.dumps(facts))
  (tmp_path / 'stock.py').write_text(STOCK)
  done = subprocess.run(
    [sys.executable, tmp_path / 'stock.py', tmp_path / 'facts.json'],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout.endswith('won\n'), done.stderr
