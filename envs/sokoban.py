"""Sokoban in text: push every box onto a target.

Moves and rewards are gym-sokoban's, the task is that of GiGPO's release: rooms
of 6 x 6 with two boxes, 15 steps. Levels are made by rule, backwards from the
end, so that each has a solution of a known length; `solve` finds it forwards.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from envs import base, narrator, seeds

ACTIONS = ('up', 'down', 'left', 'right')

# As in gym-sokoban: of a step, of a box pushed onto a target or off it, and of
# the last box.
STEP_REWARD, BOX_REWARD, SUCCESS_REWARD = -0.1, 1.0, 10.0

_WALL, _FLOOR, _TARGET, _PLACED, _BOX, _PLAYER, _STANDING = '#_O√XPS'
_WALL_SHARE = 0.25  # of the cells inside
_MAX_ROOMS = 200  # tried for a level
_MAX_STATES = 50_000  # looked at in a room
_KINDS = ('short', 'medium', 'long')

_ROLE = 'You are an expert agent operating in the Sokoban environment.'
_TASK = 'push every box onto a target.'
_RULES = f"""\
The room is a grid, a line a row. Each cell is one of
{_WALL} wall: nothing can stand there or be pushed there
{_FLOOR} floor: free to walk on and to push boxes over
{_TARGET} target: where a box has to go
{_BOX} box
{_PLACED} box on a target
{_PLAYER} you
{_STANDING} you, standing on a target
You walk one cell a step. Walking into a box pushes it one cell on, if the \
cell behind it is free of walls and boxes; otherwise nothing moves. Boxes \
cannot be pulled: one that is pushed into a corner stays there."""


class State(NamedTuple):
  """Where things are: cells, numbered row by row."""

  player: int
  boxes: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Level:
  """A room and how it is at first.

  Attributes:
    size: its rows and columns, walls around it included.
    floor: cells without a wall.
    targets: of these, where boxes have to go.
    start: the first state.
    moves: length of the shortest solution.
  """

  size: tuple[int, int]
  floor: frozenset[int]
  targets: frozenset[int]
  start: State
  moves: int

  @property
  def steps(self) -> dict[str, int]:
    """What each action adds to a cell's number."""
    width = self.size[1]
    return dict(zip(ACTIONS, (-width, width, -1, 1), strict=True))


@dataclasses.dataclass(frozen=True)
class Options:
  """What levels are a function of, besides split and index.

  Attributes:
    size: rows and columns, walls around the room included.
    num_boxes: how many boxes and targets.
    solution_steps: least and greatest length of the shortest solution.
    seed: another seed, another set of levels.

  Raises:
    ValueError: in one line, if there are no such levels.
  """

  size: tuple[int, int] = (6, 6)
  num_boxes: int = 2
  solution_steps: tuple[int, int] = (4, 15)
  seed: int = 0

  def __post_init__(self):
    seeds.check_seed(self.seed)
    if len(self.size) != 2 or min(self.size) < 3 or max(self.size) > 20:
      raise ValueError(
        f'env.size={self.size}: must be rows and columns, walls included, of '
        '3 to 20'
      )
    if self.num_boxes < 1:
      raise ValueError(f'env.num_boxes={self.num_boxes}: must be at least 1')
    if len(self.solution_steps) != 2 or not (
      1 <= self.solution_steps[0] <= self.solution_steps[1]
    ):
      raise ValueError(
        f'env.solution_steps={self.solution_steps}: must be the least and the '
        'greatest number of steps, from 1 on'
      )


def move(level: Level, state: State, action: str) -> State:
  """Returns the state after an action; the same if nothing moves."""
  step = level.steps[action]
  to, beyond = state.player + step, state.player + 2 * step
  if to not in level.floor:
    return state
  if to not in state.boxes:
    return State(to, state.boxes)
  if beyond not in level.floor or beyond in state.boxes:
    return state
  return State(to, state.boxes - {to} | {beyond})


def solve(
  level: Level, state: State, most: int | None = None
) -> list[str] | None:
  """Returns the fewest actions that end a state, at most so many, or None."""
  paths: dict[State, list[str]] = {state: []}
  queue = [state]
  for state in queue:
    if state.boxes == level.targets:
      return paths[state]
    if most is not None and len(paths[state]) >= most:
      continue
    for action in ACTIONS:
      after = move(level, state, action)
      if after not in paths:
        paths[after] = [*paths[state], action]
        queue.append(after)
  return None


def draw(level: Level, state: State) -> str:
  """Returns the room in symbols, cells divided by blanks."""

  def symbol(cell: int) -> str:
    on_target = cell in level.targets
    if cell not in level.floor:
      return _WALL
    if cell == state.player:
      return _STANDING if on_target else _PLAYER
    if cell in state.boxes:
      return _PLACED if on_target else _BOX
    return _TARGET if on_target else _FLOOR

  height, width = level.size
  return '\n'.join(
    ' '.join(symbol(row * width + column) for column in range(width))
    for row in range(height)
  )


@functools.lru_cache(maxsize=4096)
def generate(seed: int, options: Options) -> Level:
  """Returns a level, a function of its arguments.

  Raises:
    ValueError: in one line, if no room of that size has such a level.
  """
  fewest, most = options.solution_steps
  for attempt in range(_MAX_ROOMS):
    rng = np.random.default_rng([seed, attempt])
    floor = _room(rng, options.size)
    if len(floor) <= options.num_boxes:
      continue
    targets = rng.choice(sorted(floor), options.num_boxes, replace=False)
    level = Level(
      options.size, floor, frozenset(targets.tolist()), State(0, frozenset()), 0
    )
    layers = list(itertools.islice(_backwards(level), most + 1))
    if len(layers) > fewest:
      moves = int(rng.integers(fewest, len(layers)))
      start = layers[moves][rng.integers(len(layers[moves]))]
      return dataclasses.replace(level, start=start, moves=moves)
  raise ValueError(
    f'env.solution_steps={options.solution_steps}: no such level found in '
    f'{_MAX_ROOMS} rooms of env.size={options.size} with env.num_boxes='
    f'{options.num_boxes}; must be fewer steps, a larger room or other boxes'
  )


def _room(rng: np.random.Generator, size: tuple[int, int]) -> frozenset[int]:
  """Returns the largest connected part of a room with walls strewn in."""
  height, width = size
  free = rng.random(size) >= _WALL_SHARE
  free[[0, -1], :] = free[:, [0, -1]] = False
  left = set(np.flatnonzero(free).tolist())
  largest: list[int] = []
  while left:
    part = [min(left)]
    left.discard(part[0])
    for cell in part:
      for step in (-width, width, -1, 1):
        if cell + step in left:
          left.discard(cell + step)
          part.append(cell + step)
    largest = max(largest, part, key=len)
  return frozenset(largest)


def _backwards(level: Level) -> Iterator[list[State]]:
  """Yields the states whose shortest solution has 0, 1, 2, .. moves."""
  ends = sorted(level.floor - level.targets)
  layer = [State(player, level.targets) for player in ends]
  seen = set(layer)
  steps = level.steps.values()
  while layer and len(seen) <= _MAX_STATES:
    yield layer
    following = []
    for state, step in itertools.product(layer, steps):
      for before in _before(level, state, step):
        if before not in seen:
          seen.add(before)
          following.append(before)
    layer = following


def _before(level: Level, state: State, step: int) -> Iterator[State]:
  """Yields the states that a step turns into this one: a walk, a push."""
  came_from, pushed = state.player - step, state.player + step
  if came_from not in level.floor or came_from in state.boxes:
    return
  yield State(came_from, state.boxes)
  if pushed in state.boxes:
    yield State(came_from, state.boxes - {pushed} | {state.player})


class Levels(seeds.Seeds):
  """The levels of a split, by number.

  Raises:
    ValueError: in one line, if there is no such split.
  """

  def __init__(self, split: str, options: Options):
    super().__init__(split, options.seed)
    self._options = options

  def level(self, index: int) -> Level:
    """Returns a level."""
    return generate(self[index], self._options)

  def kind(self, index: int) -> str:
    """Returns in which third of the possible lengths its solution is."""
    fewest, most = self._options.solution_steps
    place = (self.level(index).moves - fewest) * len(_KINDS)
    return _KINDS[place // (most - fewest + 1)]


def tasks(split: str, **kwargs) -> Levels:
  """Returns the levels of a split; takes the kwargs of `Env`."""
  return Env(**kwargs).levels(split)


class Env:
  """One room at a time.

  Args:
    size: see `Options`, as are the next three.
    num_boxes: how many.
    solution_steps: least and greatest length of the shortest solution.
    seed: of the levels.
    max_steps: turns after which an unfinished episode ends.
    history_length: K, how many past turns the prompt shows.
    prompt_style: one of `narrator.STYLES`.
    require_think: whether a response must hold a `<think>` part.

  Raises:
    ValueError: in one line, if an argument cannot be used.
  """

  def __init__(
    self,
    *,
    size: tuple[int, int] = (6, 6),
    num_boxes: int = 2,
    solution_steps: tuple[int, int] = (4, 15),
    seed: int = 0,
    max_steps: int = 15,
    history_length: int = 2,
    prompt_style: str = 'paper',
    require_think: bool = True,
  ):
    self._options = Options(tuple(size), num_boxes, tuple(solution_steps), seed)
    if max_steps < self._options.solution_steps[1]:
      raise ValueError(
        f'env.max_steps={max_steps}: fewer than the longest solutions; must be '
        f'at least the second of env.solution_steps={solution_steps}'
      )
    # Tells at once whether there are such levels at all.
    self.levels('train').level(0)
    self._max_steps = max_steps
    self._narrator = narrator.Narrator(
      _ROLE,
      rules=_RULES,
      history_length=history_length,
      prompt_style=prompt_style,
      require_think=require_think,
    )
    self._level: Level
    self._state: State

  def levels(self, split: str) -> Levels:
    """Returns the levels of a split."""
    return Levels(split, self._options)

  def prepare(self, task: base.Task) -> None:
    """Makes the level."""
    self.levels(task.split).level(task.index)

  def reset(self, task: base.Task) -> base.Observation:
    """Enters the level."""
    self._level = self.levels(task.split).level(task.index)
    self._state = self._level.start
    self._narrator.begin(_TASK)
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    """Walks or pushes; a response that names no direction waits a step."""
    action, valid = self._narrator.project(response)
    valid = valid and action in ACTIONS
    before = self._state
    if valid:
      self._state = move(self._level, before, action)
    self._narrator.take(action)
    success = self._state.boxes == self._level.targets
    done = success or self._narrator.step >= self._max_steps
    reward = STEP_REWARD
    reward += BOX_REWARD * (self._placed(self._state) - self._placed(before))
    reward += SUCCESS_REWARD if success else 0.0
    return base.StepResult(
      observation=None if done else self._observe(),
      final_anchor=draw(self._level, self._state) if done else None,
      reward=reward,
      valid=valid,
      action=action,
      success=success,
      done=done,
      metrics={'blocked_action_rate': float(self._state == before)},
      score=(
        self._placed(self._state) / self._options.num_boxes if done else None
      ),
    )

  def close(self) -> None:
    """Holds nothing."""

  def demonstrate(
    self, task: base.Task, *, noise: float, seed: int
  ) -> Iterator[tuple[str, str]]:
    """Yields (prompt, response) of an oracle that errs now and then.

    Args:
      task: the level to play.
      noise: probability that a step's action is drawn uniformly. The oracle
        goes on from where it led, and gives up where there is no way left.
      seed: of the noise.
    """
    rng = np.random.default_rng([seed, task.index])
    observation: base.Observation | None = self.reset(task)
    plan = solve(self._level, self._state)
    while observation is not None and plan is not None:
      action = plan[0]
      if rng.random() < noise:
        action = ACTIONS[rng.integers(len(ACTIONS))]
      response = self._narrator.respond(self._thought(action), action)
      yield observation.prompt, response
      observation = self.step(response).observation
      if action == plan[0]:
        plan = plan[1:]
      else:
        left = self._max_steps - self._narrator.step
        plan = solve(self._level, self._state, left)

  def _thought(self, action: str) -> str:
    after = move(self._level, self._state, action)
    if after == self._state:
      return f'I try {action}.'
    pushes = after.boxes != self._state.boxes
    return f'I push a box {action}.' if pushes else f'I walk {action}.'

  def _placed(self, state: State) -> int:
    return len(state.boxes & self._level.targets)

  def _observe(self) -> base.Observation:
    board = draw(self._level, self._state)
    return self._narrator.observe(board, anchor=board, actions=ACTIONS)
