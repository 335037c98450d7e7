"""Tests of envs/keydoor.py: rules, levels, the expert, optimal values."""

import dataclasses
import itertools
import types

import numpy as np
import pytest

import envs
from envs import base, keydoor, keydoor_levels, seeds
from envs.keydoor_levels import ACTIONS, State

TASK = base.Task('train', 3)
# Rows and columns of a map: S start, R red key, B blue key (a decoy), D red
# door, T trap, E exit, # wall, _ floor. Cells are a1 to e2.
#   S R # T E
#   _ B D _ _
LEVEL = keydoor_levels.Level(
  size=(2, 5),
  floor=frozenset(range(10)) - {2},
  doors=(7,),
  keys=(1, 6),
  colours=('red', 'blue'),
  traps=frozenset([3]),
  exit=4,
  start=State(0, -1, 0),
  steps=8,
)
# right (to the key), take, down, open, right (door), right, right, up.
SOLUTION = ('right', 'take', 'down', 'open', 'right', 'right', 'right', 'up')
SMALL = keydoor_levels.Options(
  room=(2, 2), doors=1, decoys=1, traps=0.15, solution_steps=(1, 12)
)


def _respond(action: str) -> str:
  return f'<think>so</think><action>{action}</action>'


def _make(monkeypatch, **kwargs) -> keydoor.Env:
  monkeypatch.setattr(keydoor_levels, 'generate', lambda *_: LEVEL)
  return keydoor.Env(**kwargs)


def test_a_solution_worked_out_by_hand(monkeypatch):
  env = _make(monkeypatch)
  first = env.reset(TASK)
  assert first.task == (
    'go to the exit at e1. Keys: blue b2, red b1. Doors: red c2. Traps: d1.'
  )
  assert first.text == 'You are at a1. You hold nothing. Open doors: 0.'
  assert first.actions == ('down', 'right')
  results = [env.step(_respond(action)) for action in SOLUTION]
  assert [r.observation.text for r in results[:-1]] == [
    'You are at b1. You hold nothing. Open doors: 0.',
    'You are at b1. You hold the red key. Open doors: 0.',
    'You are at b2. You hold the red key. Open doors: 0.',
    'You are at b2. You hold nothing. Open doors: 1.',
    'You are at c2. You hold nothing. Open doors: 1.',
    'You are at d2. You hold nothing. Open doors: 1.',
    'You are at e2. You hold nothing. Open doors: 1.',
  ]
  assert results[2].observation.actions == ('up', 'left', 'take', 'open')
  last = results[-1]
  assert last.success and last.done and last.observation is None
  assert [r.reward for r in results] == [0.0] * 7 + [10.0]
  assert last.final_anchor == 'You are at the exit.'
  assert last.metrics == {'inadmissible_action_rate': 0.0, 'trap_rate': 0.0}


@pytest.mark.parametrize(
  ('state', 'action', 'after'),
  [
    (State(0, -1, 0), 'left', State(0, -1, 0)),  # the border
    (State(5, -1, 0), 'left', State(5, -1, 0)),  # not to the end of row 1
    (State(1, -1, 0), 'right', State(1, -1, 0)),  # the wall
    (State(6, 0, 0), 'right', State(6, 0, 0)),  # the locked door
    (State(6, 0, 1), 'right', State(7, 0, 1)),
    (State(0, -1, 0), 'take', State(0, -1, 0)),  # nothing to take
    (State(6, 0, 0), 'take', State(6, 1, 0)),  # the red key returns
    (State(1, 1, 0), 'take', State(1, 0, 0)),
    (State(1, -1, 1), 'take', State(1, -1, 1)),  # it is in the lock
    (State(6, 1, 0), 'open', State(6, 1, 0)),  # the wrong key
    (State(6, 0, 0), 'open', State(6, -1, 1)),
    (State(6, 1, 1), 'open', State(6, 1, 1)),  # already open
    (State(1, 0, 0), 'open', State(1, 0, 0)),  # not next to it
    (State(4, -1, 1), 'right', State(4, -1, 1)),
  ],
)
def test_rules(state, action, after):
  assert keydoor_levels.apply(LEVEL, state, action) == after
  is_listed = action in keydoor_levels.admissible(LEVEL, state)
  assert is_listed == (after != state)


def test_a_trap_ends_the_episode(monkeypatch):
  env = _make(monkeypatch)
  env.reset(TASK)
  plan = (*SOLUTION[:6], 'up')
  *_, last = (env.step(_respond(action)) for action in plan)
  assert last.done and not last.success and last.reward == 0
  assert last.final_anchor == 'You are in a trap.'
  assert last.metrics['trap_rate'] == 1


def test_the_step_limit_ends_the_episode(monkeypatch):
  env = _make(monkeypatch)
  env.reset(TASK)
  results = [env.step(_respond('open')) for _ in range(60)]
  assert [r.done for r in results] == [False] * 59 + [True]
  assert all(r.valid and not r.reward for r in results)
  assert results[-1].metrics == {
    'inadmissible_action_rate': 1.0,
    'trap_rate': 0.0,
  }
  assert results[-1].final_anchor == results[0].observation.anchor


@pytest.mark.parametrize(
  'response',
  ['up', '<action>up</action>', _respond('jump'), '<think>x</think><action>up'],
)
def test_an_invalid_response_uses_up_a_step_and_changes_nothing(response):
  env = keydoor.Env()
  text = env.reset(TASK).text
  result = env.step(response)
  assert not result.valid and result.observation.text == text


def test_aliased_parts_are_hidden(monkeypatch):
  hidden = {
    'position': 'You are in room 1. You hold the red key. Open doors: 0.',
    'held': 'You are at b1. Open doors: 0.',
  }
  for aliased, text in hidden.items():
    for in_prompts in (True, False):
      env = _make(monkeypatch, aliased=(aliased,), alias_prompts=in_prompts)
      env.reset(TASK)
      *_, seen = (env.step(_respond(a)).observation for a in SOLUTION[:2])
      assert seen.anchor == text
      assert (text == seen.text) == in_prompts
      assert (text in seen.prompt) == in_prompts
  both = _make(monkeypatch, aliased=keydoor.ALIASES, anchor=keydoor.ANCHORS[1])
  assert both.reset(TASK).anchor == (
    'You are in room 1. Open doors: 0. down, right'
  )
  full = _make(monkeypatch, aliased=keydoor.ALIASES, anchor='state')
  seen = full.reset(TASK)
  assert seen.anchor == 'You are at a1. You hold nothing. Open doors: 0.'
  assert seen.text == 'You are in room 1. Open doors: 0.'


def test_the_room_of_a_door_is_the_room_on_its_left(monkeypatch):
  env = _make(monkeypatch, aliased=('position',))
  env.reset(TASK)
  texts = [env.step(_respond(a)).observation.text[:17] for a in SOLUTION[:6]]
  assert texts == ['You are in room 1'] * 5 + ['You are in room 2']


def test_anchors_depend_on_the_state_only():
  env = keydoor.Env()
  first = env.reset(TASK)
  move, back = {'up': 'down', 'left': 'right'}, None
  move |= {b: a for a, b in move.items()}
  there = env.step(_respond(first.actions[0])).observation
  back = env.step(_respond(move[first.actions[0]])).observation
  assert first.anchor == back.anchor == first.text != there.anchor
  assert first.prompt != back.prompt


def test_levels_are_solvable_and_as_asked():
  options = keydoor_levels.Options(room=(3, 4), doors=2, decoys=1, traps=0.1)
  for seed in range(30):
    level = keydoor_levels.generate('train', seed, options)
    graph = keydoor_levels.make_graph(level)
    plan = keydoor_levels.shortest_plan(graph, level.start)
    assert len(plan) == level.steps
    state = level.start
    for action in plan:
      state = keydoor_levels.apply(level, state, action)
    assert state.cell == level.exit
    assert level.size == (3, 14) and len(level.floor) == 3 * 12 + 2
    assert len(level.doors) == 2 and len(level.keys) == 3
    assert len(level.traps) == 4  # 0.1 of 36 cells
    things = {level.exit, level.start.cell, *level.keys}
    assert len(things) == 5 and not things & level.traps
    assert len(set(level.colours)) == 3
    # Each key of a door is in a room in front of it.
    for door, key in zip(level.doors, level.keys, strict=False):
      assert key % 14 < door % 14


def test_splits_share_no_layout_even_with_equal_seeds():
  options = dataclasses.replace(SMALL, decoys=0, traps=0)
  layouts = {
    split: {
      keydoor_levels.generate(split, seed, options).layout
      for seed in range(100)
    }
    for split in seeds.SPLITS
  }
  # So few layouts that seeds alone would repeat them.
  assert len(layouts['train']) < 100
  for one, other in itertools.combinations(layouts.values(), 2):
    assert not one & other


def test_names_of_colours_do_not_distinguish_layouts():
  renamed = dataclasses.replace(LEVEL, colours=('grey', 'black'))
  assert renamed.layout == LEVEL.layout
  moved = dataclasses.replace(LEVEL, exit=9)
  assert moved.layout != LEVEL.layout


def test_levels_depend_on_split_index_and_seed_only():
  first = envs.make('keydoor').reset(TASK)
  used = envs.make('keydoor', max_steps=50, aliased=('held',))
  used.reset(base.Task('train', 4))
  assert used.reset(TASK).task == first.task
  keydoor_levels.generate.cache_clear()
  assert envs.make('keydoor').reset(TASK) == first
  other = envs.make('keydoor', generator={'seed': 1})
  texts = {used.reset(base.Task('valid', 3)).task, other.reset(TASK).task}
  assert len(texts | {first.task}) == 3


def test_the_levels_of_the_splits_stay_the_same():
  levels = []
  for split in ('train', 'valid', 'test'):
    level = keydoor.tasks(split).level(0)
    cells = (level.start.cell, *level.doors, *level.keys, level.exit)
    levels.append((level.steps, ' '.join(map(level.name, cells))))
  assert levels == [
    (28, 'a4 e3 j4 a3 c4 g4 c2 n1'),
    (22, 'd3 e3 j4 d4 c1 i1 b3 l3'),
    (23, 'd3 e1 j1 c1 f2 d2 l3 n4'),
  ]


@pytest.mark.parametrize('steps', [5, 8])
def test_levels_of_a_single_length(steps):
  options = dataclasses.replace(SMALL, solution_steps=(steps, steps))
  assert keydoor_levels.generate('train', 0, options).steps == steps


def test_task_types_are_thirds_of_the_length():
  tasks = envs.tasks('keydoor', 'valid')
  level = tasks.level(0)
  third = (level.steps - 1) * 3 // 40
  assert tasks.task_type(0) == ('short', 'medium', 'long')[third]


def test_the_expert_solves_every_level():
  env = keydoor.Env()
  for index in range(10):
    steps = list(env.demonstrate(base.Task('test', index), noise=0.0, seed=0))
    assert len(steps) == env._level.steps
    assert env._state.cell == env._level.exit


def test_the_expert_needs_no_more_steps_than_the_solution(monkeypatch):
  options = {'solution_steps': (len(SOLUTION), len(SOLUTION))}
  env = _make(monkeypatch, generator=options, max_steps=len(SOLUTION))
  steps = list(env.demonstrate(TASK, noise=0.0, seed=0))
  assert len(steps) == len(SOLUTION) and env._state.cell == LEVEL.exit


def test_the_mistakes_of_the_expert_depend_on_seed_and_task(monkeypatch):
  env = _make(monkeypatch)  # All tasks have the same level.
  responses = [
    [r for _, r in env.demonstrate(base.Task('train', n), noise=0.9, seed=seed)]
    for n, seed in ((3, 0), (3, 0), (4, 0), (3, 1))
  ]
  assert responses[0] == responses[1]
  assert responses[0] != responses[2] and responses[0] != responses[3]


def test_the_expert_names_where_it_goes(monkeypatch):
  env = _make(monkeypatch)
  thoughts = [
    response.partition('</think>')[0].removeprefix('<think>')
    for _, response in env.demonstrate(TASK, noise=0.0, seed=0)
  ]
  assert thoughts == [
    *['To the red key at b1.'] * 2,
    *['To the red door at c2.'] * 2,
    *['To the exit at e1.'] * 4,
  ]


def test_a_noisy_expert_errs_and_stops_when_nothing_can_be_won():
  env, outcomes = keydoor.Env(max_steps=45), []
  for index in range(20):
    list(env.demonstrate(base.Task('train', index), noise=0.3, seed=1))
    outcomes.append(env._state.cell == env._level.exit)
    if not outcomes[-1] and not env._level.is_over(env._state):
      graph = keydoor_levels.make_graph(env._level)
      plan = keydoor_levels.shortest_plan(graph, env._state)
      assert plan is None or env._narrator.step + len(plan) > 45
  assert 0 < sum(outcomes) < 20


def test_optimal_values_worked_out_by_hand():
  graph = keydoor_levels.make_graph(LEVEL)
  values_TS, values_TSA = keydoor_levels.optimal_values(graph, 8)
  # The shortest way has 8 steps.
  assert values_TS[:, 0].tolist() == [0] * 8 + [1]
  s = graph.index[State(9, -1, 1)]  # below the exit
  np.testing.assert_array_equal(values_TSA[1, s], [1, 0, 0, 0, 0, 0])
  # With discount 0.5, a wasted step halves the value; left is two steps.
  values_TS, values_TSA = keydoor_levels.optimal_values(graph, 9, discount=0.5)
  np.testing.assert_array_equal(values_TSA[9, s], [1, 0.5, 0.25, 0.5, 0.5, 0.5])
  assert values_TS[9, 0] == 0.5**7
  # One step is left and half of the actions are random; up or left change the
  # state: 0.5 * 1 + 0.5 * 0.5.
  values_TS, _ = keydoor_levels.optimal_values(graph, 1, noise=0.5)
  assert values_TS[1, s] == 0.75
  trap = graph.index[State(3, -1, 1)]
  assert not values_TSA[:, [trap, graph.index[State(4, -1, 1)]]].any()


def _reference(level, state, left, discount, noise, known):
  """Returns (V, Q by action) by recursion over the rules."""
  if (state, left) in known:
    return known[state, left]
  if not left or level.is_over(state):
    return 0.0, dict.fromkeys(ACTIONS, 0.0)
  outcomes = {}
  for action in ACTIONS:
    after = keydoor_levels.apply(level, state, action)
    later, _ = _reference(level, after, left - 1, discount, noise, known)
    outcomes[action] = 1.0 if after.cell == level.exit else discount * later
  drawn = [outcomes[a] for a in keydoor_levels.admissible(level, state)]
  mean = sum(drawn) / len(drawn)
  q = {a: (1 - noise) * x + noise * mean for a, x in outcomes.items()}
  known[state, left] = max(q.values()), q
  return known[state, left]


@pytest.mark.parametrize(
  ('discount', 'noise'), [(1, 0.4), (0.9, 0), (0.8, 0.3)]
)
def test_optimal_values_equal_a_recursion(discount, noise):
  for seed in range(3):
    level = keydoor_levels.generate('train', seed, SMALL)
    graph = keydoor_levels.make_graph(level)
    values_TS, values_TSA = keydoor_levels.optimal_values(
      graph, 12, discount=discount, noise=noise
    )
    known = {}
    for s, t in itertools.product(range(len(graph.states)), (0, 1, 5, 12)):
      value, q = _reference(level, graph.states[s], t, discount, noise, known)
      assert values_TS[t, s] == pytest.approx(value, abs=1e-12)
      expected = [q[action] for action in ACTIONS]
      np.testing.assert_allclose(values_TSA[t, s], expected, atol=1e-12)


@pytest.mark.slow
def test_optimal_values_equal_the_best_of_all_plans():
  horizon, discount = 6, 0.9
  options = dataclasses.replace(SMALL, solution_steps=(5, 6))
  env = keydoor.Env(generator=dataclasses.asdict(options), max_steps=horizon)
  for index in range(2):
    task = base.Task('train', index)
    best = max(
      _play(env, task, plan, discount=discount)
      for plan in itertools.product(ACTIONS, repeat=horizon)
    )
    graph = keydoor_levels.make_graph(env._level)
    values_TS, _ = keydoor_levels.optimal_values(
      graph, horizon, discount=discount
    )
    assert best == pytest.approx(values_TS[-1, 0]) and best > 0


def _play(env, task, plan, *, discount) -> float:
  """Returns the discounted success of a plan."""
  env.reset(task)
  for step, action in enumerate(plan):
    result = env.step(_respond(action))
    if result.done:
      return discount**step * result.success
  return 0.0


@pytest.mark.parametrize(
  ('generator', 'message'),
  [
    ({'doors': -1}, 'doors=-1: must be at least 0'),
    ({'room': (0, 3)}, 'room=(0, 3): must be (rows, columns), each at least 1'),
    ({'room': (10, 3)}, '10 rows and 11 columns in all; must be at most 9'),
    ({'decoys': 7}, 'decoys=7: doors and decoys have different colours'),
    ({'traps': 1.0}, 'traps=1.0: a share; must be in [0, 1)'),
    ({'traps': 0.9}, 'no such level of split'),
    ({'solution_steps': (5, 4)}, 'with 1 <= min <= max'),
    ({'seed': -1}, 'env.generator.seed=-1: must be from 0'),
    ({'dors': 1}, 'env.generator.dors: unknown; must be one of room, doors'),
  ],
)
def test_options_out_of_range_are_refused(generator, message):
  with pytest.raises(ValueError) as error:
    keydoor.Env(generator=generator)
  (line,) = str(error.value).splitlines()
  assert message in line


def test_other_mistakes_are_refused():
  with pytest.raises(ValueError, match='max_steps=39: fewer than the longest'):
    keydoor.Env(max_steps=39)
  (line,) = keydoor.check_options({'aliased': ('keys',)})
  assert line == 'env.aliased=keys: unknown; must be one of position, held'
  config = types.SimpleNamespace(
    algorithm=types.SimpleNamespace(anchor='similarity')
  )
  assert 'algorithm.anchor=similarity' in next(keydoor.conflicts(config))
