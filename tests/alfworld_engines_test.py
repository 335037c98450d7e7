"""Tests that both ALFWorld engines return exactly the same texts."""

import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
import reference_data

from configs import alfworld as alfworld_config
from envs import base
from envs.alfworld import env, expert, games, houses, native, pddl, textworld
from envs.alfworld import world as world_lib

OFFICIAL = reference_data.OFFICIAL_GAME
needs_alfworld = pytest.mark.skipif(
  importlib.util.find_spec('alfworld') is None or sys.version_info >= (3, 13),
  reason='alfworld is not installed, or cannot run on this Python',
)
SIMPLE = 'pick_and_place_simple'
MALFORMED = (
  '',
  'look around',
  'Look',
  '  look ',
  'inventory\n',
  'go to',
  'go to the moon',
  'take mug 1',
  'put mug 1 in/on desk 1',
  'help me',
  'examine agent1',
)
RECEPTACLES = {
  'Fridge': True,
  'Microwave': True,
  'Sink': False,
  'Bathtub': False,
  'Drawer': True,
  'Cabinet': True,
  'Desk': False,
}
OBJECTS = {
  'Potato': 'pickupable cleanable heatable coolable sliceable',
  'Pot': 'pickupable cleanable coolable isReceptacleObject',
  'Knife': 'pickupable cleanable',
  'ButterKnife': 'pickupable',
  'DeskLamp': 'toggleable',
  'CellPhone': 'pickupable toggleable',
  'Statue': '',
}


ODD_GOALS = {
  'pick_and_place_simple': ('CellPhone', 'Desk'),
  'look_at_obj_in_light': ('Knife', 'DeskLamp'),
  'pick_clean_then_place_in_recep': ('Potato', 'Drawer'),
  'pick_heat_then_place_in_recep': ('Potato', 'SinkBasin'),
  'pick_cool_then_place_in_recep': ('Pot', 'BathtubBasin'),
  'pick_two_obj_and_place': ('ButterKnife', 'Desk'),
}


def odd_id(rng: random.Random, name: str) -> str:
  x, y = rng.randint(0, 99), rng.randint(0, 99)
  sign = rng.choice(('plus', 'minus'))
  return f'{name}_bar__{sign}_00_dot_{x:02}_bar__plus_01_dot_{y:02}'


def odd_receptacles(
  rng: random.Random, locations: tuple[str, ...]
) -> list[world_lib.Receptacle]:
  receptacles = []
  for name, openable in RECEPTACLES.items():
    for copy in range(rng.choice((1, 1, 2, 3))):
      basin = name in ('Sink', 'Bathtub')
      # The first of each type is reachable, and so is the goal.
      location = rng.choice(locations[1:] + ('',) * (copy > 0))
      receptacles.append(
        world_lib.Receptacle(
          id=f'{odd_id(rng, name)}{copy}' + f'_bar_{name}Basin' * basin,
          type=f'{name}Basin' if basin else name,
          location=location,
          openable=openable and rng.random() < 0.8,
        )
      )
  return receptacles


def odd_objects(
  rng: random.Random,
  locations: tuple[str, ...],
  receptacles: list[world_lib.Receptacle],
) -> list[world_lib.Object]:
  objects = []
  for name, flags in OBJECTS.items():
    for copy in range(rng.choice((2, 2, 3))):
      candidates = rng.sample([r for r in receptacles if r.location], 2)
      flags_now = set(flags.split())
      if rng.random() < 0.2:
        flags_now.add(rng.choice(('isHot', 'isCool', 'isClean', 'isSliced')))
      afloat = copy == 2 and rng.random() < 0.5
      moved = rng.random() < 0.1
      objects.append(
        world_lib.Object(
          id=f'{odd_id(rng, name)}{copy}',
          type=name,
          location=rng.choice(locations) if moved else candidates[0].location,
          receptacle=None if afloat else candidates[0].id,
          flags=frozenset(flags_now),
          also_in=() if afloat or rng.random() < 0.8 else (candidates[1].id,),
          inside=tuple(o.id for o in objects if rng.random() < 0.05),
        )
      )
  return objects


def odd_world(seed: int) -> world_lib.World:
  """Returns a small world with rare states that a generator avoids.

  Shared locations, receptacles without a location, objects on the floor, in two
  places at once, inside one another, sliced or hot from the start, lamps behind
  closed doors, and a start in front of a cupboard.
  """
  rng = random.Random(seed)
  locations = tuple(f'loc_bar_{i}_bar_2_bar_0_bar_30' for i in range(5))
  receptacles = odd_receptacles(rng, locations)
  objects = odd_objects(rng, locations, receptacles)
  task_type = world_lib.TASK_TYPES[seed % 6]
  return world_lib.World(
    name=f'{task_type}/trial_{seed}',
    receptacles=tuple(receptacles),
    objects=tuple(objects),
    can_contain=frozenset(
      (r.type, o)
      for r in receptacles
      for o in OBJECTS
      if rng.random() < 0.7 or (o, r.type) in ODD_GOALS.values()
    ),
    locations=locations,
    start=rng.choice(locations),
    goal=world_lib.Goal(task_type, *ODD_GOALS[task_type]),
    task=f'do number {seed} with the potato.',
  )


def choose(
  rng: random.Random, state: world_lib.State, earlier: list[str]
) -> str:
  """Returns a command: mostly admissible, and then mostly no "go to"."""
  dice = rng.random()
  if dice < 0.08:
    return rng.choice(MALFORMED)
  if dice < 0.2:
    return rng.choice(earlier)
  busy = [c for c in state.admissible if not c.startswith('go to')]
  return rng.choice(busy if dice < 0.75 else state.admissible)


# The unmodified engine of alfworld, without caches: commands in, texts out.
STOCK = """
import json, sys
game, commands = json.load(sys.stdin)
import textworld
from textworld.envs.pddl import PddlEnv
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
infos = textworld.EnvInfos(won=True, admissible_commands=True)
env = AlfredDemangler(PddlEnv(infos), shuffle=False)
env.load(game)
states = [env.reset()] + [env.step(command)[0] for command in commands]
keys = ('feedback', 'admissible_commands', 'won')
print(json.dumps([[s[key] for key in keys] for s in states]))
"""


def play_both(
  world: world_lib.World,
  commands: list[str],
  num_random: int,
  reference: textworld.TextWorldEngine,
  engine: native.NativeEngine | None = None,
) -> world_lib.State:
  """Plays the commands, then random ones; returns the state in between."""
  engine = engine or native.NativeEngine()
  engine.load(world)
  state, expected = engine.reset(), reference.reset()
  assert state == expected, world.name
  rng = random.Random(world.name)
  earlier, after = ['look'], state
  for turn in range(len(commands) + num_random):
    scripted = turn < len(commands)
    command = commands[turn] if scripted else choose(rng, state, earlier)
    earlier += [command]
    state, expected = engine.step(command), reference.step(command)
    assert state == expected, (world.name, earlier)
    after = state if scripted else after
  return after


def parts(count: int, quick: int) -> list:
  """Returns parameters of a test; all but the first `quick` are slow."""
  return [
    pytest.param(n, marks=[pytest.mark.slow] * (n >= quick))
    for n in range(count)
  ]


@pytest.fixture(scope='module')
def reference():
  pytest.importorskip('alfworld')
  return textworld.TextWorldEngine()


@needs_alfworld
@pytest.mark.parametrize('part', parts(8, 0))
def test_equal_states_on_odd_worlds(reference, part):
  for seed in range(part, 80, 8):
    world = odd_world(seed)
    reference.load(world)
    play_both(world, [], 60, reference)


@needs_alfworld
@pytest.mark.parametrize('part', parts(100, 1))
def test_equal_states_on_generated_games(reference, part):
  for index in range(part, 300, 100):
    world = houses.generate('train', index, seed=1)
    reference.load(world)
    state = play_both(world, expert.plan(world), 12, reference)
    assert state.won and state.done and state.score == 1, world.name


@needs_alfworld
@pytest.mark.slow
def test_memoized_engine_equals_the_stock_engine(reference, tmp_path):
  world = odd_world(7)
  rng = random.Random(0)
  reference.load(world)
  states, commands = [reference.reset()], ['look']
  for _ in range(60):
    commands.append(choose(rng, states[-1], commands))
    states.append(reference.step(commands[-1]))
  stock = subprocess.run(
    [sys.executable, '-c', STOCK],
    input=json.dumps([pddl.to_game(world), commands[1:]]),
    capture_output=True,
    text=True,
    check=True,
    env={**os.environ, 'ALFWORLD_DATA': str(tmp_path)},
  )
  memoized = [[s.feedback, list(s.admissible), s.won] for s in states]
  assert json.loads(stock.stdout.splitlines()[-1]) == memoized


def memory_mib() -> float:
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE') / 2**20


@needs_alfworld
@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='no /proc')
def test_memory_is_flat_over_different_games(reference):
  def play(first: int, last: int) -> float:
    for index in range(first, last):
      reference.load(houses.generate('train', index, seed=2))
      reference.reset()
      reference.step('look')
    return memory_mib()

  warm_mib = play(0, 30)
  # Without clearing TextWorld's cache, memory grows by about 1 MiB per game.
  assert play(30, 80) - warm_mib < 25


@needs_alfworld
@pytest.mark.parametrize(
  'steps', [100, pytest.param(500, marks=pytest.mark.slow)]
)
def test_equal_states_on_the_official_game(reference, steps):
  reference.load(OFFICIAL)
  world = pddl.read_game(OFFICIAL)
  play_both(world, [], steps, reference)
  assert play_both(world, expert.plan(world), 20, reference).won


@pytest.mark.slow
@needs_alfworld
def test_old_spelling_equals_the_old_grammar(reference):
  # The packaged grammar and domain with the changes of alfworld 0.4 reverted.
  changes = (
    ('move {o} to {r}', 'put {o} in/on {r}'),
    ('You move the {o.name} to the', 'You put the {o.name} in/on the'),
    ('You arrive at {r.name}', 'You arrive at {lend.name}'),
  )
  for seed in range(12):
    world = odd_world(seed)
    game = pddl.to_game(world)
    assert pddl.spelling(game) == 'move'
    for new, old in changes:
      game['grammar'] = game['grammar'].replace(new, old)
    game['grammar'] = game['grammar'].split('action help')[0]
    game['pddl_domain'] = game['pddl_domain'].split('(:action help')[0] + ')'
    assert pddl.spelling(game) == 'put'
    reference.load(game)
    play_both(world, [], 60, reference, native.NativeEngine(spelling='put'))


def test_won_game_continues_and_can_be_undone():
  engine = native.NativeEngine()
  indices = (
    i for i in range(99) if houses.task_type('train', i, seed=1) == SIMPLE
  )
  world = houses.generate('train', next(indices), seed=1)
  engine.load(world)
  engine.reset()
  states = [engine.step(command) for command in expert.plan(world)]
  assert [s.score for s in states] == [0] * (len(states) - 1) + [1]
  take = (
    expert.plan(world)[-1].replace('move', 'take').replace(' to ', ' from ')
  )
  undone = engine.step(take)
  assert undone.feedback.startswith('You pick up')
  assert (undone.won, undone.score, undone.done) == (False, 0, False)


# -- the native engine by hand -----------------------------------------------

ROOM = (
  # Type, last part of the id, index of the location, whether it opens.
  ('Desk', 'a', 1, False),
  ('Shelf', 'a', 2, False),
  ('Shelf', 'b', 2, False),
  ('Fridge', 'a', 3, True),
  ('Microwave', 'a', 4, True),
  ('TVStand', 'a', 5, False),
  ('TowelHolder', 'a', 6, False),
)
THINGS = (
  ('Mug', 'pickupable cleanable', 'Shelf_bar__a'),
  ('Pen', 'pickupable', 'Shelf_bar__b'),
  ('Potato', 'pickupable heatable coolable sliceable', 'Shelf_bar__b'),
  ('Knife', 'pickupable', 'Desk_bar__a'),
  ('DeskLamp', 'toggleable', 'Desk_bar__a'),
)


def small_world(
  task_type: str,
  object_type: str,
  receptacle_type: str,
  things: tuple[tuple[str, str, str], ...] = THINGS,
) -> world_lib.World:
  """Returns a world with the room above, in which the agent starts afar."""
  locations = tuple(f'loc_bar_{n}_bar_2_bar_0_bar_30' for n in range(7))
  receptacles = tuple(
    world_lib.Receptacle(f'{name}_bar__{part}', name, locations[at], openable)
    for name, part, at, openable in ROOM
  )
  at = {r.id: r.location for r in receptacles}
  objects = tuple(
    world_lib.Object(
      id=f'{name}_bar__{n}',
      type=name,
      location=at[holder],
      receptacle=holder,
      flags=frozenset(flags.split()),
    )
    for n, (name, flags, holder) in enumerate(things)
  )
  return world_lib.World(
    name='small/trial',
    receptacles=receptacles,
    objects=objects,
    can_contain=frozenset(
      (r.type, o.type) for r in receptacles for o in objects
    ),
    locations=locations,
    start=locations[0],
    goal=world_lib.Goal(task_type, object_type, receptacle_type),
    task='do it.',
  )


def play_natively(
  world: world_lib.World, *commands: str, spelling: str = 'move'
) -> list[world_lib.State]:
  engine = native.NativeEngine(spelling=spelling)
  engine.load(world)
  states = [engine.reset()]
  for command in commands:
    assert command in states[-1].admissible, command
    states.append(engine.step(command))
  return states


@pytest.mark.parametrize('seed', range(6))
def test_reset_restores_the_initial_state(seed):
  rng = random.Random(seed)
  engine = native.NativeEngine()
  engine.load(odd_world(seed))
  states, commands = [engine.reset()], []
  for _ in range(60):
    commands.append(choose(rng, states[-1], ['look']))
    states.append(engine.step(commands[-1]))
  assert [engine.reset(), *map(engine.step, commands)] == states


def test_reset_puts_moved_objects_back():
  engine = native.NativeEngine()
  engine.load(small_world('pick_and_place_simple', 'Mug', 'Desk'))
  engine.reset()
  carry = ('go to shelf 1', 'take potato 1 from shelf 1', 'go to desk 1')
  for command in (*carry, 'move potato 1 to desk 1'):
    engine.step(command)
  engine.reset()
  for command in ('go to desk 1', 'take knife 1 from desk 1', 'go to shelf 1'):
    state = engine.step(command)
  assert 'slice potato 1 with knife 1' in state.admissible


def test_an_object_is_examined_under_the_lamp():
  world = small_world('look_at_obj_in_light', 'Pen', 'DeskLamp')
  *_, there, lit, away, held, won = play_natively(
    world,
    *('go to desk 1', 'use desklamp 1'),
    *('go to shelf 1', 'take pen 1 from shelf 1', 'go to desk 1'),
  )
  assert not any(state.won for state in (there, lit, away, held))
  assert won.won


def test_two_objects_must_be_in_one_receptacle():
  things = [('Pen', 'pickupable', 'Desk_bar__a')] * 2
  world = small_world('pick_two_obj_and_place', 'Pen', 'Shelf', things)

  def carry(pen: int, shelf: int) -> list[str]:
    return [
      'go to desk 1',
      f'take pen {pen} from desk 1',
      f'go to shelf {shelf}',
      f'move pen {pen} to shelf {shelf}',
    ]

  assert play_natively(world, *carry(1, 1), *carry(2, 1))[-1].won
  apart = play_natively(world, *carry(1, 1), *carry(2, 2))
  assert not any(state.won for state in apart)


def test_heat_and_cold_exclude_each_other():
  world = small_world('pick_heat_then_place_in_recep', 'Potato', 'Desk')
  states = play_natively(
    world,
    *('go to shelf 1', 'take potato 1 from shelf 1', 'go to microwave 1'),
    *('heat potato 1 with microwave 1', 'examine potato 1', 'go to fridge 1'),
    *('cool potato 1 with fridge 1', 'examine potato 1', 'go to desk 1'),
    *('move potato 1 to desk 1', 'take knife 1 from desk 1'),
    *('slice potato 1 with knife 1', 'move knife 1 to desk 1'),
    *('take potato 1 from desk 1', 'examine potato 1'),
  )
  assert [s.feedback for s in states if s.feedback.startswith('This is')] == [
    'This is a hot potato 1.',
    'This is a cold potato 1.',
    'This is a cool sliced potato 1.',
  ]
  assert not any(state.won for state in states)


def test_a_hot_object_counts_only_if_it_can_be_heated():
  for flag, won in (('heatable', True), ('cleanable', False)):
    potato = ('Potato', f'pickupable isHot {flag}', 'Shelf_bar__b')
    world = small_world(
      'pick_heat_then_place_in_recep', 'Potato', 'Desk', (*THINGS, potato)
    )
    commands = ('go to shelf 1', 'take potato 1 from shelf 1', 'go to desk 1')
    *_, last = play_natively(world, *commands, 'move potato 1 to desk 1')
    assert last.won == won


def test_listings_are_in_the_order_of_lower_case_names():
  # Each of the two is moved to the other shelf and back.
  first, *_, swapped = play_natively(
    small_world('pick_and_place_simple', 'Mug', 'Desk'),
    *('go to shelf 1', 'take mug 1 from shelf 2', 'move mug 1 to shelf 1'),
    *('take mug 1 from shelf 1', 'move mug 1 to shelf 2'),
    *('take pen 1 from shelf 1', 'move pen 1 to shelf 2'),
    *('take pen 1 from shelf 2', 'move pen 1 to shelf 1', 'look'),
  )
  assert 'a towelholder 1, and a tvstand 1.\n' in first.feedback
  assert swapped.feedback == (
    'You are facing the shelf 2, and shelf 1. Next to it, you see a mug 1, '
    'and a pen 1.'
  )


def test_the_old_spelling_by_hand():
  first, arrived, _, moved = play_natively(
    small_world('pick_and_place_simple', 'Mug', 'Desk'),
    *('go to shelf 1', 'take pen 1 from shelf 1', 'put pen 1 in/on shelf 2'),
    spelling='put',
  )
  assert 'help' not in first.admissible
  # Locations are numbered downwards too; the start is loc 7.
  assert arrived.feedback == (
    'You arrive at loc 5. On the shelf 1, you see a pen 1, and a potato 1.'
  )
  assert moved.feedback == 'You put the pen 1 in/on the shelf 2.'


def test_unknown_spelling_is_refused():
  with pytest.raises(ValueError, match='spelling=drop: unknown'):
    native.NativeEngine(spelling='drop')


@pytest.mark.parametrize('seed', range(12))
def test_problem_round_trip(seed):
  world = odd_world(seed)
  text = pddl.to_problem(world)
  parsed = pddl.from_problem(text, task=world.task, name=world.name)
  assert parsed == world


def test_official_problem_round_trip():
  world = pddl.read_game(OFFICIAL)
  assert world.goal == world_lib.Goal(
    'pick_heat_then_place_in_recep', 'Potato', 'SinkBasin'
  )
  assert world.task == 'heat some potato and put it in sinkbasin.'
  assert world.name.startswith('pick_heat_then_place_in_recep-Potato-None')
  text = pddl.to_problem(world)
  assert pddl.from_problem(text, task=world.task, name=world.name) == world


_STATUE = 'Statue_bar__minus_00_dot_24_bar__plus_01_dot_420'


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (('isHot ?o', 'isSliced ?o'), 'the goal is none of'),
    (('agent1 - agent', 'agent1 - agent agent2 - agent'), '2 agents'),
    (('(:init', '(:init (opened x)'), 'opened is not supported'),
    (('(:goal', '(:aim'), 'no :goal'),
    ((')', '', 1), 'parentheses do not match'),
    (
      ('(:init', f'(:init (inReceptacle {_STATUE} nowhere)'),
      'Statue_.* is in nowhere, which is not declared',
    ),
  ],
  ids=['goal', 'agents', 'fact', 'section', 'parentheses', 'place'],
)
def test_foreign_problem_is_refused_by_name(change, message):
  text = pddl.to_problem(odd_world(3)).replace(*change)
  with pytest.raises(ValueError, match=message) as error:
    pddl.from_problem(text, task='', name='some game')
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('{"pddl_domain": "(defi', 'not a readable game file'),
    ('{"pddl_domain": "x", "grammar": 3}', "no text 'grammar'"),
    ('[]', "no text 'pddl_domain'"),
    (
      json.dumps({'pddl_domain': '', 'grammar': '', 'pddl_problem': ''}),
      'states no task',
    ),
    (None, 'not a readable game file'),
  ],
  ids=['cut', 'missing', 'list', 'no task', 'absent'],
)
def test_corrupt_game_is_refused_in_one_line(tmp_path, text, message):
  path = tmp_path / 'game.tw-pddl'
  if text is not None:
    path.write_text(text)
  for read in (pddl.read_game, pddl.load_game):
    with pytest.raises(ValueError, match=message) as error:
      read(path)
    assert str(path) in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
  'change',
  [
    ('(:init', '(:init (foo)'),
    ('(:init', '(:init word'),
    ('(:init', '(:init ()'),
    ('(:goal', '(:goal) (:goal'),
    ('(:goal', f'(:goal {"(and " * 5000}{")" * 5000}) (:end'),
  ],
  ids=['fact', 'word', 'empty', 'goal', 'deep'],
)
def test_a_damaged_problem_names_the_file(tmp_path, change):
  world = odd_world(3)
  problem = pddl.to_problem(world).replace(*change)
  if change[1].startswith('(:goal)'):
    problem = problem[: problem.index('(:goal)')] + '(:goal))'
  path = tmp_path / 'game.tw-pddl'
  grammar = f'task :: "Your task is to: {world.task}" }}'
  game = {'pddl_domain': '', 'grammar': grammar, 'pddl_problem': problem}
  path.write_text(json.dumps(game))
  with pytest.raises(ValueError, match=f'^{path}: ') as error:
    pddl.read_game(path)
  assert '\n' not in str(error.value)


@needs_alfworld
def test_game_file_holds_the_five_keys(tmp_path):
  world = odd_world(1)
  game = pddl.to_game(world, walkthrough=['look'])
  assert set(game) == {
    *('pddl_domain', 'grammar', 'pddl_problem', 'solvable', 'walkthrough')
  }
  folder = tmp_path / world.name
  folder.mkdir(parents=True)
  (folder / 'game.tw-pddl').write_text(json.dumps(game))
  assert pddl.read_game(folder) == world


@needs_alfworld
def test_engine_keeps_the_command_line(reference):
  before = list(sys.argv)
  reference.load(odd_world(5))
  reference.reset()
  assert sys.argv == before


@needs_alfworld
def test_engines_of_one_process_are_independent(reference):
  references = [reference, textworld.TextWorldEngine()]
  engines = [native.NativeEngine() for _ in references]
  states = [None, None]
  rng = random.Random(0)
  for turn in range(80):
    engine_index = rng.randrange(2)
    if turn % 20 < 2:
      engine_index = turn % 2
      world = odd_world(100 + turn)
      engines[engine_index].load(world)
      references[engine_index].load(world)
      states[engine_index] = engines[engine_index].reset()
      assert states[engine_index] == references[engine_index].reset()
    command = choose(rng, states[engine_index], ['look'])
    states[engine_index] = engines[engine_index].step(command)
    assert states[engine_index] == references[engine_index].step(command)
  references[1].close()
  assert reference.step('help').feedback.startswith('Available commands:')
  # A new engine may reuse the planner of the closed engine.
  later = textworld.TextWorldEngine()
  later.load(odd_world(7))
  engines[1].load(odd_world(7))
  assert later.reset() == engines[1].reset()


HIDDEN = "{__import__('os').environ.__setitem__('GAME_RAN', '1')}"


@needs_alfworld
@pytest.mark.parametrize(
  'change',
  [
    ('{r.indefinite} {r.name or r.id}', HIDDEN),
    ('{r.name or r.id}', '{r.name or r.__class__.__name__}'),
    ('take {o} from {r}', 'take {o} from {r}' + HIDDEN),
    ('"rhs": "You open', '"rhs": "[{exit() | openable(r:receptacle)}]'),
    ('{o.name} is on', '{(lambda: 1)()} is on'),
  ],
  ids=['seen at once', 'private', 'command', 'list', 'seen late'],
)
def test_games_with_code_in_their_grammar_are_refused(tmp_path, change):
  game = pddl.to_game(odd_world(1))
  assert change[0] in game['grammar']
  game['grammar'] = game['grammar'].replace(*change)
  path = tmp_path / 'game.tw-pddl'
  path.write_text(json.dumps(game))
  engine = textworld.TextWorldEngine()
  message = f'env.trust_games=False: the grammar of {path} contains code, which'
  for _ in range(2):
    with pytest.raises(ValueError, match=message) as error:
      engine.load(path)
    assert '\n' not in str(error.value)
  assert 'GAME_RAN' not in os.environ
  # This uses the same process and the same cached parses.
  trusting = textworld.TextWorldEngine(trust_games=True)
  trusting.load(path)
  with pytest.raises(ValueError, match=message):
    engine.load(path)
  engine.load(odd_world(1))
  assert engine.reset().feedback
  native_engine = native.NativeEngine()
  native_engine.load(pddl.read_game(path))
  assert native_engine.reset().feedback
  for used in (engine, trusting):
    used.close()


@pytest.mark.parametrize(
  ('expression', 'is_allowed'),
  [
    ("o.indefinite + ' ' + o.name", True),
    ("o.name or r.name and ''", True),
    ('o.__class__', False),
    ('_x', False),
    ('open(o.name)', False),
    ("'%s' % r.indefinite", False),
    ('[o.name]', False),
    ('o[0]', False),
    ('lambda: o', False),
    ("f'{o.name}'", False),
    ('(x := o.name)', False),
    ('1', False),
    ('o.name; o', False),
    ('(' * 10_000, False),
  ],
  ids=lambda x: str(x)[:30],
)
def test_a_grammar_may_only_join_names_and_texts(expression, is_allowed):
  assert textworld._is_allowed(expression) == is_allowed


@needs_alfworld
def test_trust_games_is_a_config_field(tmp_path):
  world = houses.generate('train', 0, seed=1)
  data = tmp_path / 'data' / 'json_2.1.1' / 'train'
  path = games.write_game(world, data)
  text = path.read_text()
  path.write_text(text.replace('{r.indefinite}', "{'%s' % r.indefinite}"))
  config = alfworld_config.get_config().env.to_dict()
  config.pop('name')
  assert config['engine'] == 'native' and not config['trust_games']
  config |= {
    'data_dir': str(data.parent),
    'generator': {'expected_counts': False},
  }
  task = base.Task('train', 0)
  refused = env.Env(**(config | {'engine': 'textworld'}))
  with pytest.raises(ValueError, match='env.trust_games=False: '):
    refused.reset(task)
  trusted = env.Env(**(config | {'engine': 'textworld', 'trust_games': True}))
  assert trusted.reset(task) == env.Env(**config).reset(task)
  for used in (refused, trusted):
    used.close()


def test_python_without_textworld_support_is_refused(monkeypatch):
  monkeypatch.setattr(sys, 'version_info', (3, 13, 0))
  with pytest.raises(ImportError, match='3.13 and later; use engine=native'):
    textworld._modules.__wrapped__()


def test_missing_package_names_the_remedy(monkeypatch):
  monkeypatch.setitem(sys.modules, 'fast_downward', None)
  with pytest.raises(ImportError, match=r"pip install -e '.\[alfworld\]'"):
    textworld._modules.__wrapped__()


def test_native_engine_imports_neither_textworld_nor_jax():
  code = (
    'import sys; from envs.alfworld import native, pddl, textworld;'
    "print(sorted({'jax', 'textworld', 'alfworld'} & set(sys.modules)))"
  )
  root = pathlib.Path(__file__).parents[1]
  out = subprocess.check_output([sys.executable, '-c', code], cwd=root)
  assert out.decode().strip() == '[]'
