"""Tests of ALFWorld's experts: shortest plans, and exploration."""

import collections
import dataclasses

import numpy as np
import pytest

from envs.alfworld import expert, facts, houses, native, world

FULL: dict = {}
SMALL = {'receptacles': (5, 8), 'distractors': (3, 7)}
DIFFICULTIES = pytest.mark.parametrize(
  'options', [FULL, SMALL], ids=['full', 'small']
)
MEANS = {
  'pick_and_place_simple': 'put',
  'pick_clean_then_place_in_recep': 'clean',
  'pick_heat_then_place_in_recep': 'heat',
  'pick_cool_then_place_in_recep': 'cool',
}


def play(engine, commands):
  state = engine.reset()
  for command in commands:
    assert command in state.admissible
    assert not state.won
    state = engine.step(command)
  return state


@DIFFICULTIES
def test_plans_win_generated_games(options):
  engine, task_types = native.NativeEngine(), collections.Counter()
  for index in range(200):
    game = houses.generate('train', index, **options)
    assert game.goal.task_type == houses.task_type('train', index)
    task_types[game.goal.task_type] += 1
    engine.load(game)
    assert play(engine, expert.plan(game)).won
  assert set(task_types) == set(world.TASK_TYPES)


# -- shortest plans ---------------------------------------------------------


class Simulator:
  """ALFWorld's rules on hashable states, for a breadth-first search.

  State: location, held object (-1: none), receptacle of each object (-1: none),
  opened receptacles, objects treated as the goal asks, lamps switched on.
  Closing, slicing and looking never shorten a plan and are left out.
  """

  def __init__(self, game):
    self.game = game
    self.index = {r.id: n for n, r in enumerate(game.receptacles)}
    self.start = (
      game.start,
      -1,
      tuple(self.index[o.receptacle] for o in game.objects),
      frozenset(),
      frozenset(),
      frozenset(),
    )

  def successors(self, state):
    at, held, where, opened, treated, lit = state
    for location in {r.location for r in self.game.receptacles} - {at}:
      yield location, held, where, opened, treated, lit
    for r, receptacle in enumerate(self.game.receptacles):
      if receptacle.location != at:
        continue
      if receptacle.openable and r not in opened:
        yield at, held, where, opened | {r}, treated, lit
      reach = not receptacle.openable or r in opened
      for o, item in enumerate(self.game.objects):
        if where[o] == r and 'toggleable' in item.flags:
          yield at, held, where, opened, treated, lit | {o}
        if held == o and self.treats(receptacle, item):
          yield at, held, where, opened, treated | {o}, lit
        if reach:
          for hand, where_now in self.moves(state, o, r):
            yield at, hand, where_now, opened, treated, lit

  def moves(self, state, o, r):
    _, held, where, *_ = state
    item, receptacle = self.game.objects[o], self.game.receptacles[r]
    if where[o] == r and held < 0 and 'pickupable' in item.flags:
      yield o, (*where[:o], -1, *where[o + 1 :])
    if held == o and (receptacle.type, item.type) in self.game.can_contain:
      yield -1, (*where[:o], r, *where[o + 1 :])

  def treats(self, receptacle, item):
    flag = {'clean': 'cleanable', 'heat': 'heatable', 'cool': 'coolable'}
    verb = MEANS.get(self.game.goal.task_type)
    tool = facts.TOOLS.get(self.game.goal.task_type)
    return receptacle.type == tool and flag[verb] in item.flags

  def won(self, state):
    at, held, where, _, treated, lit = state
    goal, items = self.game.goal, self.game.objects
    if goal.task_type == 'look_at_obj_in_light':
      return (
        held >= 0
        and items[held].type == goal.object_type
        and any(self.game.receptacles[where[o]].location == at for o in lit)
      )
    inside = collections.Counter(
      where[o]
      for o, item in enumerate(items)
      if item.type == goal.object_type
      and where[o] >= 0
      and self.game.receptacles[where[o]].type == goal.receptacle_type
      and (goal.task_type not in facts.TOOLS or o in treated)
    )
    min_objects = 2 if goal.task_type == 'pick_two_obj_and_place' else 1
    return max(inside.values(), default=0) >= min_objects

  def shortest(self):
    frontier, visited, length = [self.start], {self.start}, 0
    while not any(map(self.won, frontier)):
      following = []
      for state in frontier:
        for successor in self.successors(state):
          if successor not in visited:
            visited.add(successor)
            following.append(successor)
      frontier, length = following, length + 1
    return length


@pytest.mark.parametrize('task_type', world.TASK_TYPES)
def test_plan_is_as_short_as_breadth_first_search(task_type):
  options = {'receptacles': (4, 4), 'distractors': (0, 1)}
  for index in range(8):
    game = houses.generate('train', index, task_types=(task_type,), **options)
    assert len(expert.plan(game)) == Simulator(game).shortest()


def test_plan_handles_an_object_in_two_receptacles():
  # As in ALFWorld, an object taken from one receptacle stays in the other.
  # After heating it is already at its target.
  game = next(
    game
    for game in (houses.generate('train', index) for index in range(500))
    if game.goal.task_type in facts.TOOLS
    and sum(o.type == game.goal.object_type for o in game.objects) == 1
  )
  target = next(
    r.id for r in game.receptacles if r.type == game.goal.receptacle_type
  )
  objects = tuple(
    dataclasses.replace(o, also_in=(target,))
    if o.type == game.goal.object_type and o.receptacle != target
    else o
    for o in game.objects
  )
  shorter = dataclasses.replace(game, objects=objects)
  engine = native.NativeEngine()
  engine.load(shorter)
  assert play(engine, expert.plan(shorter)).won
  assert len(expert.plan(shorter)) < len(expert.plan(game))


def test_plan_is_as_short_from_any_start_and_state():
  options = {'receptacles': (4, 4), 'distractors': (0, 1)}
  types = ('pick_two_obj_and_place',)
  num_apart = 0
  for index in range(12):
    game = houses.generate('train', index, task_types=types, **options)
    (target, *_) = (
      r for r in game.receptacles if r.type == game.goal.receptacle_type
    )
    first, second = (o for o in game.objects if o.type == game.goal.object_type)
    num_apart += first.location != second.location
    moved = dataclasses.replace(
      first, location=target.location, receptacle=target.id
    )
    objects = tuple(moved if o is first else o for o in game.objects)
    inside = dataclasses.replace(game, objects=objects)
    variants = [inside] + [
      dataclasses.replace(game, start=r.location) for r in game.receptacles
    ]
    for variant in variants:
      assert len(expert.plan(variant)) == Simulator(variant).shortest()
    assert len(expert.plan(inside)) < len(expert.plan(game))
  assert num_apart


def test_plan_uses_a_lamp_in_a_closed_receptacle():
  types = ('look_at_obj_in_light',)
  game = houses.generate('train', 0, task_types=types, receptacles=(4, 4))
  (lamp,) = (o for o in game.objects if o.type == 'DeskLamp')
  receptacles = tuple(
    dataclasses.replace(r, openable=True) if r.id == lamp.receptacle else r
    for r in game.receptacles
  )
  closed = dataclasses.replace(game, receptacles=receptacles)
  engine = native.NativeEngine()
  engine.load(closed)
  assert play(engine, expert.plan(closed)).won
  assert len(expert.plan(closed)) == len(expert.plan(game))


@pytest.mark.parametrize('missing', ['objects', 'hands', 'locations'])
def test_plan_of_an_unsolvable_game_is_an_error(missing):
  game = houses.generate('train', 0)
  objects, receptacles = game.objects, game.receptacles
  if missing == 'objects':
    objects = ()
  elif missing == 'hands':
    objects = tuple(
      dataclasses.replace(o, flags=o.flags - {'pickupable'}) for o in objects
    )
  else:
    receptacles = tuple(
      dataclasses.replace(r, location='') for r in receptacles
    )
  game = dataclasses.replace(game, objects=objects, receptacles=receptacles)
  with pytest.raises(ValueError, match='cannot be reached'):
    expert.plan(game)


# -- the exploring expert ---------------------------------------------------


def explore(game, *, order, noise=0.0, steps=400, spelling='move'):
  rng = np.random.default_rng(0)
  engine = native.NativeEngine(spelling=spelling)
  engine.load(game)
  state = engine.reset()
  explorer = expert.Explorer(game.task, rng, order=order)
  thoughts = []
  for step in range(1, steps + 1):
    choices = [c for c in state.admissible if c != 'help']
    thought, command = explorer.act(state.feedback, choices)
    assert command in choices
    thoughts.append(thought)
    if rng.random() < noise:
      command = choices[rng.integers(len(choices))]
    state = engine.step(command)
    if state.won:
      return step, thoughts
  raise AssertionError(f'{game.name}: not won in {steps} steps')


@DIFFICULTIES
@pytest.mark.parametrize('order', expert.ORDERS)
def test_explorer_wins_every_game(order, options):
  steps = []
  for index in range(100):
    game = houses.generate('valid_seen', index, **options)
    steps.append(explore(game, order=order)[0])
    assert steps[-1] >= len(expert.plan(game))
  # Opening everything in two rounds of the largest room would take more steps.
  assert np.mean(steps) < (11 if options else 21)


def test_explorer_wins_with_noise():
  for index in range(60):
    game = houses.generate('valid_seen', index, **SMALL)
    explore(game, order='random', noise=0.3)


def test_explorer_and_plan_from_any_start_and_in_the_old_spelling():
  for index in range(60):
    game = houses.generate('train', index)
    start = game.receptacles[index % len(game.receptacles)].location
    game = dataclasses.replace(game, start=start)
    engine = native.NativeEngine()
    engine.load(game)
    assert play(engine, expert.plan(game)).won
    explore(game, order='random', spelling='put')


def test_explorer_has_few_distinct_thoughts():
  thoughts = set()
  for index in range(60):
    game = houses.generate(
      'train', index, task_types=('pick_heat_then_place_in_recep',)
    )
    goal = game.goal
    for thought in explore(game, order='random')[1]:
      thought = thought.replace(f' {goal.object_type.lower()}', ' X')
      if not thought.endswith('is closed, so I open it.'):
        thoughts.add(
          thought.replace(f' {goal.receptacle_type.lower()}.', ' Y.')
        )
  assert thoughts == {
    'I need to find a X.',
    'I see a X, so I take it.',
    'I have the X, so I go to the microwave.',
    'I have the X, so I heat it with the microwave.',
    'The X is hot, so I go to the Y.',
    'Now I put it in the Y.',
  }


WALKS = ('go to drawer 1', 'go to drawer 10', 'go to drawer 2', 'go to shelf 1')
# Where the explorer is in some turns.
HERE = ('desk 1', 'drawer 3', 'stool 1')


@pytest.mark.parametrize(
  ('task', 'turns', 'command'),
  [
    pytest.param(
      'put a hot egg in shelf.',
      [
        ('You pick up the egg 1 from the drawer 1.', []),
        ('You heat the egg 1 using the microwave 1.', []),
        ('You clean the egg 1 using the sinkbasin 1.', []),
      ],
      'go to shelf 1',
      id='cleaning keeps the heat',
    ),
    pytest.param(
      'put a hot egg in shelf.',
      [
        ('You pick up the egg 1 from the drawer 1.', []),
        ('You heat the egg 1 using the microwave 1.', []),
        ('You cool the egg 1 using the fridge 1.', ['go to microwave 1']),
      ],
      'go to microwave 1',
      id='cooling undoes heating',
    ),
    pytest.param(
      'put a hot egg in shelf.',
      [
        (
          'You pick up the egg 1 from the drawer 1.',
          ['go to microwave 10', 'go to microwave 2'],
        ),
      ],
      'go to microwave 2',
      id='the first appliance',
    ),
    pytest.param(
      'put two pen in drawer.',
      [
        ('The drawer 10 is open. In it, you see a pen 1.', []),
        ('You pick up the pen 2 from the shelf 1.', []),
      ],
      'go to drawer 10',
      id='the receptacle of the other object',
    ),
    pytest.param(
      'put two pen in drawer.',
      [
        ('The drawer 10 is open. In it, you see a pen 1.', []),
        (
          'You pick up the pen 2 from the shelf 1.',
          ['examine drawer 3', 'move pen 2 to drawer 3'],
        ),
      ],
      'go to drawer 10',
      id='only the receptacle of the other object',
    ),
    pytest.param(
      'put a pen in drawer.',
      [
        (
          'You pick up the pen 2 from the shelf 1.',
          ['examine drawer 3', 'move pen 2 to drawer 3'],
        ),
      ],
      'move pen 2 to drawer 3',
      id='a receptacle that is here',
    ),
    pytest.param(
      'put a mug in drawer.',
      [
        (
          'You pick up the pen 1 from the shelf 3.',
          ['move pen 1 to shelf 2', 'move pen 1 to shelf 3'],
        ),
      ],
      'move pen 1 to shelf 3',
      id='back to where it was',
    ),
    pytest.param(
      'put a mug in drawer.',
      [('On the shelf 1, you see a mug 10, and a mug 2.', [])],
      'go to shelf 1',
      id='back to an object',
    ),
    pytest.param(
      'put a mug in shelf.',
      [
        ('The drawer 10 is open. In it, you see a mug 1.', []),
        ('The drawer 10 is open. In it, you see nothing.', []),
        ('On the shelf 1, you see nothing.', []),
        ('The drawer 2 is open. In it, you see nothing.', []),
      ],
      'go to drawer 1',
      id='a mug that is gone',
    ),
    pytest.param(
      'put a mug in shelf.',
      [
        ('The drawer 3 is open. In it, you see nothing.', []),
        ('You close the drawer 3.', ['examine drawer 3', 'open drawer 3']),
      ],
      'go to shelf 1',
      id='no second search',
    ),
    pytest.param(
      'look at pen under the desklamp.',
      [
        ('', ['examine desk 1', 'use desklamp 1']),
        ('You pick up the pen 1 from the shelf 1.', ['go to desk 1']),
      ],
      'go to desk 1',
      id='back to the lamp',
    ),
    pytest.param(
      'put a mug in shelf.',
      [('The drawer 1 is open. In it, you see nothing.', ['examine drawer 1'])],
      'go to drawer 10',
      id='onwards',
    ),
    pytest.param(
      'put a mug in shelf.',
      [('On the stool 1, you see nothing.', ['examine stool 1'])],
      'go to drawer 1',
      id='from the front again',
    ),
  ],
)
def test_explorer_by_hand(task, turns, command):
  explorer = expert.Explorer(task, np.random.default_rng(0), order='sweep')
  explorer.act('', [*WALKS, *(f'go to {receptacle}' for receptacle in HERE)])
  for feedback, commands in turns:
    _, chosen = explorer.act(feedback, [*WALKS, *commands])
  assert chosen == command


@pytest.mark.parametrize(
  ('sentence', 'parsed'),
  [
    ('put a mug in desk.', ('pick_and_place_simple', 'mug', 'desk')),
    ('put some mug on desk', ('pick_and_place_simple', 'mug', 'desk')),
    (
      'heat some potato and put it in sinkbasin.',
      ('pick_heat_then_place_in_recep', 'potato', 'sinkbasin'),
    ),
    (
      'put a cool pan in cabinet.',
      ('pick_cool_then_place_in_recep', 'pan', 'cabinet'),
    ),
    (
      'find two pen and put them in safe.',
      ('pick_two_obj_and_place', 'pen', 'safe'),
    ),
    (
      'examine the cd with the desklamp.',
      ('look_at_obj_in_light', 'cd', 'desklamp'),
    ),
  ],
)
def test_read_task(sentence, parsed):
  assert expert.read_task(sentence) == parsed


def test_explorer_refuses_unknown_tasks_and_orders():
  for task in ('Wash the dishes.', 'put a mug in desk, and wash it.'):
    with pytest.raises(ValueError, match='not in the form'):
      expert.Explorer(task, np.random.default_rng(0))
  with pytest.raises(ValueError, match='order=best: must be one of random'):
    expert.Explorer('put a a in b', np.random.default_rng(0), order='best')
