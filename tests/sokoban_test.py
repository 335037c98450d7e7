"""Tests of envs/sokoban.py: moves, rewards, generated levels, the oracle."""

import dataclasses
import itertools

import numpy as np
import pytest

import envs
from envs import base, seeds, sokoban

TASK = base.Task('train', 3)
# # # # # #
# P X _ O #
# _ X O _ #
# # # # # #
ROOM = sokoban.Level(
  size=(4, 6),
  floor=frozenset([7, 8, 9, 10, 13, 14, 15, 16]),
  targets=frozenset([10, 15]),
  start=sokoban.State(7, frozenset([8, 14])),
  moves=6,
)


def _respond(action: str) -> str:
  return f'<think>so</think><action>{action}</action>'


@pytest.fixture
def env_with_room(monkeypatch) -> sokoban.Env:
  monkeypatch.setattr(sokoban, 'generate', lambda *_: ROOM)
  return sokoban.Env()


def test_moves_and_rewards_worked_out_by_hand(env_with_room):
  first = env_with_room.reset(TASK)
  assert first.text == ('# # # # # #\n# P X _ O #\n# _ X O _ #\n# # # # # #')
  results = [
    env_with_room.step(_respond(a)) for a in ('up', 'right', 'right', 'down')
  ]
  boards = [result.observation.text.splitlines() for result in results]
  # Up is a wall. Moving right twice pushes the box onto the target.
  assert boards[0] == first.text.splitlines()
  assert boards[1][1] == '# _ P X O #'
  assert boards[2][1] == '# _ _ P √ #'
  # Down: the player steps onto the other target.
  assert boards[3][1:3] == ['# _ _ _ √ #', '# _ X S _ #']
  assert [r.reward for r in results] == pytest.approx([-0.1, -0.1, 0.9, -0.1])
  assert [r.metrics['blocked_action_rate'] for r in results] == [1, 0, 0, 0]


def test_placing_the_last_box_is_a_success(env_with_room):
  env_with_room.reset(TASK)
  plan = ['right', 'right', 'left', 'left', 'down', 'right']
  results = [env_with_room.step(_respond(action)) for action in plan]
  rewards = [-0.1, 0.9, -0.1, -0.1, -0.1, 10.9]
  assert [r.reward for r in results] == pytest.approx(rewards)
  assert [r.success for r in results] == [False] * 5 + [True]
  last = results[-1]
  assert last.done and last.observation is None and last.score == 1.0
  assert last.final_anchor.splitlines()[2] == '# _ P √ _ #'


def test_two_boxes_in_a_row_block_and_a_box_can_leave_its_target():
  state = sokoban.State(8, frozenset([9, 10]))
  assert sokoban.move(ROOM, state, 'right') == state
  placed = dataclasses.replace(
    ROOM, start=sokoban.State(14, frozenset([8, 15]))
  )
  after = sokoban.move(placed, placed.start, 'right')
  assert after == sokoban.State(15, frozenset([8, 16]))


def test_pushing_a_box_off_its_target_costs_one_point(monkeypatch):
  start = sokoban.State(14, frozenset([8, 15]))
  level = dataclasses.replace(ROOM, start=start)
  monkeypatch.setattr(sokoban, 'generate', lambda *_: level)
  env = sokoban.Env()
  env.reset(TASK)
  assert env.step(_respond('right')).reward == pytest.approx(-1.1)


def test_shortest_solutions_worked_out_by_hand():
  assert len(sokoban.solve(ROOM, ROOM.start)) == 6
  assert len(sokoban.solve(ROOM, ROOM.start, 6)) == 6
  assert sokoban.solve(ROOM, ROOM.start, 5) is None
  # A box in a corner without a target cannot be moved again.
  stuck = sokoban.State(9, frozenset([7, 14]))
  assert sokoban.solve(ROOM, stuck) is None


@pytest.mark.parametrize(
  'options',
  [
    sokoban.Options(),
    sokoban.Options(num_boxes=1, solution_steps=(2, 10)),
    sokoban.Options(size=(7, 5), solution_steps=(7, 7), seed=1),
  ],
)
def test_every_level_has_a_solution_of_the_stated_length(options):
  for index in range(40):
    level = sokoban.generate('train', index, options)
    assert len(level.targets) == len(level.start.boxes) == options.num_boxes
    assert {level.start.player, *level.start.boxes} <= level.floor
    plan = sokoban.solve(level, level.start)
    min_moves, max_moves = options.solution_steps
    assert len(plan) == level.moves
    assert min_moves <= level.moves <= max_moves


def test_the_oracle_solves_every_level():
  env = sokoban.Env()
  for index in range(30):
    steps = list(env.demonstrate(base.Task('valid', index), noise=0.0, seed=0))
    level = env.levels('valid').level(index)
    assert len(steps) == level.moves
    assert env._state.boxes == level.targets


def test_the_oracle_plans_again_after_a_random_action():
  env = sokoban.Env(max_steps=40)
  solved = 0
  for index in range(30):
    list(env.demonstrate(base.Task('train', index), noise=0.3, seed=1))
    solved += env._state.boxes == env._level.targets
    if env._state.boxes != env._level.targets and env._narrator.step < 40:
      assert sokoban.solve(env._level, env._state) is None
  assert 10 < solved < 30


def test_the_oracle_stops_if_no_solution_fits_into_the_steps():
  env = sokoban.Env(max_steps=15)
  for index in range(10):
    for _ in env.demonstrate(base.Task('train', index), noise=0.5, seed=1):
      steps_left = 15 - env._narrator.step
      assert sokoban.solve(env._level, env._state, steps_left)


def test_random_play_ends():
  env, rng = sokoban.Env(), np.random.default_rng(0)
  for index in range(20):
    env.reset(base.Task('train', index))
    results = []
    while not (results and results[-1].done):
      action = sokoban.ACTIONS[rng.integers(4)]
      results.append(env.step(_respond(action)))
    result = results[-1]
    assert result.success or len(results) == 15
    assert result.final_anchor and 0 <= result.score <= 1


def test_anchors_depend_on_the_board_only(env_with_room):
  first = env_with_room.reset(TASK)
  moved, back = (
    env_with_room.step(_respond(a)).observation for a in ('down', 'up')
  )
  assert first.anchor == back.anchor == first.text != moved.anchor
  assert first.prompt != back.prompt
  # Short prompts contain the step number.
  assert first.short_prompt != back.short_prompt


def test_splits_share_no_room_even_with_equal_seeds():
  # So few rooms that seeds alone would repeat them.
  options = sokoban.Options(size=(5, 5), num_boxes=1, solution_steps=(3, 9))
  rooms = {
    split: {sokoban.generate(split, seed, options).room for seed in range(100)}
    for split in seeds.SPLITS
  }
  assert len(rooms['train']) < 50
  for one, other in itertools.combinations(rooms.values(), 2):
    assert not one & other


def test_rotated_and_reflected_rooms_are_equal():
  def turned(cell):  # a quarter turn; rows become columns
    row, column = divmod(cell, 6)
    return column * 4 + 3 - row

  def mirrored(cell):
    row, column = divmod(cell, 6)
    return row * 6 + 5 - column

  for size, image in (((6, 4), turned), ((4, 6), mirrored)):
    floor, targets = (
      frozenset(map(image, cells)) for cells in (ROOM.floor, ROOM.targets)
    )
    level = dataclasses.replace(ROOM, size=size, floor=floor, targets=targets)
    assert level.room == ROOM.room
  moved = dataclasses.replace(ROOM, targets=frozenset([9, 15]))
  assert moved.room != ROOM.room
  # The room is the same wherever the player and the boxes start.
  start = sokoban.State(9, frozenset([8, 14]))
  assert dataclasses.replace(ROOM, start=start).room == ROOM.room


def test_levels_depend_on_split_index_and_seed_only():
  first = envs.make('sokoban').reset(TASK)
  used = envs.make('sokoban')
  used.reset(base.Task('train', 4))
  used.step(_respond('up'))
  assert used.reset(TASK) == first
  sokoban.generate.cache_clear()
  assert envs.make('sokoban').reset(TASK) == first
  others = (base.Task('valid', 3), base.Task('train', 2))
  boards = {used.reset(task).text for task in others}
  boards.add(envs.make('sokoban', seed=1).reset(TASK).text)
  assert len(boards | {first.text}) == 4


@pytest.mark.parametrize(
  'response',
  ['up', '<action>up</action>', _respond('jump'), '<think>x</think><action>up'],
)
def test_an_invalid_response_uses_up_a_step_and_changes_nothing(response):
  env = sokoban.Env()
  board = env.reset(TASK).text
  result = env.step(response)
  assert not result.valid and result.reward == sokoban.STEP_REWARD
  assert result.observation.text == board


def test_prompts():
  env = sokoban.Env()
  first = env.reset(TASK)
  assert first.text in first.prompt and '√ box on a target' in first.prompt
  assert "['up', 'down', 'left', 'right']" in first.prompt
  second = env.step(_respond('left')).observation
  assert f"[Observation 1: '{first.text}', Action 1: 'left']" in second.prompt
  assert 'You are now at step 2' in second.prompt
  assert 'Action 1' not in second.short_prompt
  brief = sokoban.Env(prompt_style='brief', require_think=False)
  board = brief.reset(TASK).text
  assert brief.step('<action>left</action>').valid
  assert brief.reset(TASK).prompt == (
    'Task: push every box onto a target.\n'
    f'{board}\nActions: up, down, left, right'
  )


def test_task_types_give_the_length_of_solutions():
  levels = envs.tasks('sokoban', 'valid', solution_steps=(4, 12))
  assert len(levels) == 1000
  bounds = {'short': (4, 6), 'medium': (7, 9), 'long': (10, 12)}
  for index in range(30):
    low, high = bounds[levels.task_type(index)]
    assert low <= levels.level(index).moves <= high


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'size': (6,)}, r'env.size=\(6,\): must be \(rows, columns\)'),
    ({'size': (2, 6)}, r'env.size=\(2, 6\): must be'),
    ({'seed': -1}, 'env.seed=-1: must be from 0 to 1,000'),
    ({'num_boxes': 0}, 'env.num_boxes=0: must be at least 1'),
    ({'num_boxes': 30}, 'no such level of split train .* env.num_boxes=30'),
    ({'solution_steps': (9, 4)}, 'env.solution_steps=.*must be .min, max.'),
    ({'max_steps': 10}, 'env.max_steps=10: fewer than the longest'),
    ({'prompt_style': 'long'}, 'env.prompt_style=long: must be one of paper'),
  ],
)
def test_invalid_arguments_are_errors_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    envs.tasks('sokoban', 'train', **changes)
  assert len(str(error.value).splitlines()) == 1


def test_splits_and_base_seeds_share_no_seed():
  firsts = [
    seeds.Seeds(split, n)[0] for n in range(3) for split in seeds.SPLITS
  ]
  assert firsts == [100_000 * n for n in range(9)]


def test_unknown_splits_are_errors():
  with pytest.raises(ValueError, match='split=x: must be one of train, valid'):
    envs.tasks('sokoban', 'x')
