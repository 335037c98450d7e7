"""Levels of the key-and-door grid: rules, generator, exact optimal values.

`envs.keydoor` plays them as text. `make_graph` lists all states of a level and
`optimal_values` solves it by dynamic programming.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from envs import seeds

MOVES = ('up', 'down', 'left', 'right')
ACTIONS = (*MOVES, 'take', 'open')

_COLOURS = tuple('red blue green yellow black white brown grey'.split())
_COLUMNS = 'abcdefghijklmnopqrstuvwxyz'
_MAX_ROWS = 9
_MAX_LEVELS = 2_000  # candidates to try for one level


class State(NamedTuple):
  """State of an episode.

  Attributes:
    cell: cell of the agent; cells are counted row by row.
    held: index of the key in hand; -1 for none.
    opened: number of opened doors; they are opened from left to right.
  """

  cell: int
  held: int
  opened: int


@dataclasses.dataclass(frozen=True)
class Level:
  """A level and its initial state.

  Attributes:
    size: rows and columns of the grid, walls between rooms included.
    floor: cells of the rooms and of the doors.
    doors: cell of each door, from left to right.
    keys: cell of each key; key k opens door k, the others are decoys.
    colours: colour of each key and of the door that it opens.
    traps: cells that end the episode without success.
    exit: cell that ends the episode with success.
    start: the initial state.
    steps: length of the shortest solution.
  """

  size: tuple[int, int]
  floor: frozenset[int]
  doors: tuple[int, ...]
  keys: tuple[int, ...]
  colours: tuple[str, ...]
  traps: frozenset[int]
  exit: int
  start: State
  steps: int

  @property
  def layout(self) -> tuple:
    """All that distinguishes levels, except for names of colours."""
    decoys = tuple(sorted(self.keys[len(self.doors) :]))
    keys = self.keys[: len(self.doors)]
    traps = tuple(sorted(self.traps))
    return self.size, self.doors, keys, decoys, traps, self.exit, self.start

  def name(self, cell: int) -> str:
    """Returns the name of a cell, such as 'b3'."""
    row, column = divmod(cell, self.size[1])
    return f'{_COLUMNS[column]}{row + 1}'

  def is_over(self, state: State) -> bool:
    """Returns whether a state is the exit or a trap."""
    return state.cell == self.exit or state.cell in self.traps


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the level generator.

  Attributes:
    room: rows and columns of a room.
    doors: number of doors; there is one room more.
    decoys: number of keys that open no door.
    traps: share of the cells of the rooms that are traps.
    solution_steps: (min, max) length of the shortest solution.
    seed: base seed of the levels.

  Raises:
    ValueError: in one line, if an option is out of range.
  """

  room: tuple[int, int] = (4, 4)
  doors: int = 2
  decoys: int = 2
  traps: float = 0.1
  solution_steps: tuple[int, int] = (1, 40)
  seed: int = 0

  def __post_init__(self):
    for name in ('room', 'solution_steps'):  # lists cannot be cached
      object.__setattr__(self, name, tuple(getattr(self, name)))
    seeds.check_seed(self.seed, 'env.generator.seed')
    for problem in _problems(dataclasses.asdict(self)):
      raise ValueError(problem)

  @property
  def size(self) -> tuple[int, int]:
    """Rows and columns of the grid, walls between rooms included."""
    rows, columns = self.room
    return rows, columns * (self.doors + 1) + self.doors


def _problems(options: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each option of the generator that is out of range."""
  for name in ('doors', 'decoys'):
    if options[name] < 0:
      yield f'env.generator.{name}={options[name]}: must be at least 0'
  room, steps = options['room'], options['solution_steps']
  if len(room) != 2 or min(room) < 1:
    yield f'env.generator.room={room}: must be (rows, columns), each at least 1'
    return
  columns = room[1] * (options['doors'] + 1) + options['doors']
  if room[0] > _MAX_ROWS or columns > len(_COLUMNS):
    yield (
      f'env.generator.room={room}: {room[0]} rows and {columns} columns in '
      f'all; must be at most {_MAX_ROWS} and {len(_COLUMNS)}'
    )
  if options['doors'] + options['decoys'] > len(_COLOURS):
    yield (
      f'env.generator.decoys={options["decoys"]}: doors and decoys have '
      f'different colours; must be at most {len(_COLOURS)} in all'
    )
  if not 0 <= options['traps'] < 1:
    yield f'env.generator.traps={options["traps"]}: a share; must be in [0, 1)'
  if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
    yield (
      f'env.generator.solution_steps={steps}: must be (min, max) number of '
      'steps, with 1 <= min <= max'
    )


def apply(level: Level, state: State, action: str) -> State:
  """Returns the state after an action; the same state if it does nothing."""
  cell, held, opened = state
  if action == 'take':
    is_used = cell in level.keys[:opened]  # The key stays in the lock.
    if cell not in level.keys or is_used:
      return state
    return State(cell, level.keys.index(cell), opened)
  if action == 'open':
    fits = held == opened and cell + 1 in level.doors[opened : opened + 1]
    return State(cell, -1, opened + 1) if fits else state
  width = level.size[1]
  target = cell + dict(zip(MOVES, (-width, width, -1, 1), strict=True))[action]
  # Steps beyond the left or right border would end in another row.
  same_row = target // width == cell // width
  if same_row == (action in ('left', 'right')) and target in level.floor:
    if target not in level.doors[opened:]:
      return State(target, held, opened)
  return state


def admissible(level: Level, state: State) -> tuple[str, ...]:
  """Returns the actions that change a state."""
  return tuple(a for a in ACTIONS if apply(level, state, a) != state)


@dataclasses.dataclass(frozen=True)
class Graph:
  """All states of a level that can be reached from its start.

  Attributes:
    states: the states, by distance from the start.
    index: index of each state.
    next_SA: index of the state after each of ACTIONS; the same state if the
      action does nothing or the episode is over.
    success_S: whether the state is the exit.
    over_S: whether the state is the exit or a trap.
    steps_S: length of the shortest way to the exit; -1 if there is none.
  """

  states: tuple[State, ...]
  index: Mapping[State, int]
  next_SA: np.ndarray
  success_S: np.ndarray
  over_S: np.ndarray
  steps_S: np.ndarray


@functools.lru_cache(maxsize=512)
def make_graph(level: Level) -> Graph:
  """Returns the states of a level, by breadth-first search."""
  index = {level.start: 0}
  states, next_states = [level.start], []
  for state in states:  # grows while it is iterated
    over = level.is_over(state)
    row = []
    for action in ACTIONS:
      after = state if over else apply(level, state, action)
      if after not in index:
        index[after] = len(states)
        states.append(after)
      row.append(index[after])
    next_states.append(row)
  next_SA = np.array(next_states, np.int32)
  success_S = np.array([state.cell == level.exit for state in states])
  over_S = np.array([level.is_over(state) for state in states])
  steps_S = np.where(success_S, 0, len(states))  # len(states): no way known
  while np.any(shorter := steps_S[next_SA].min(1) + 1 < steps_S):
    steps_S = np.where(shorter, steps_S[next_SA].min(1) + 1, steps_S)
  steps_S = np.where(steps_S == len(states), -1, steps_S)
  return Graph(tuple(states), index, next_SA, success_S, over_S, steps_S)


def optimal_values(
  graph: Graph, horizon: int, *, discount: float = 1.0, noise: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns V* and Q* for each number of remaining steps, exactly.

  The value is the highest expected discounted success. With t steps remaining,

      Q_t(s, a) = (1 - noise) X_t(s, a) + noise mean_b X_t(s, b),
      X_t(s, a) = 1 if a leads to the exit, else discount V_{t-1}(s'),
      V_t(s) = max_a Q_t(s, a), V_0 = 0,

  with b over the actions that change s (Bellman's recursion). With discount 1
  it is the probability to succeed within t steps. Otherwise success after k
  steps counts discount^(k - 1). SUCCESS_REWARD times the value is the expected
  return of the same policy, without penalties.

  Args:
    graph: the states of a level.
    horizon: largest number of remaining steps, T; at least 0.
    discount: gamma, in [0, 1].
    noise: probability that an action is replaced by one drawn uniformly from
      those that change the state, as in `Env.demonstrate`.

  Returns:
    V [T + 1, S] and Q [T + 1, S, A], float64; 0 where the episode is over.
  """
  num_states, num_actions = graph.next_SA.shape
  values_TS = np.zeros((horizon + 1, num_states))
  values_TSA = np.zeros((horizon + 1, num_states, num_actions))
  changes_SA = graph.next_SA != np.arange(num_states)[:, None]
  uniform_SA = changes_SA / np.maximum(changes_SA.sum(1, keepdims=True), 1)
  for t in range(1, horizon + 1):
    later_SA = discount * values_TS[t - 1][graph.next_SA]
    chosen_SA = np.where(graph.success_S[graph.next_SA], 1.0, later_SA)
    random_S = (uniform_SA * chosen_SA).sum(1)
    mixed_SA = (1 - noise) * chosen_SA + noise * random_S[:, None]
    values_TSA[t] = np.where(graph.over_S[:, None], 0, mixed_SA)
    values_TS[t] = values_TSA[t].max(1)
  return values_TS, values_TSA


@functools.lru_cache(maxsize=8192)
def generate(split: str, seed: int, options: Options) -> Level:
  """Generates a solvable level; equal arguments give equal levels.

  Args:
    split: split of the level. A hash of the layout decides to which split a
      layout belongs, so that splits share no layout, whatever their seeds.
    seed: seed of the level.
    options: options of the generator.

  Raises:
    ValueError: in one line, if no such level is found.
  """
  low, high = options.solution_steps
  for attempt in range(_MAX_LEVELS):
    level = _draw(np.random.default_rng([seed, attempt]), options)
    if level is None or seeds.split_of(level.layout) != split:
      continue
    steps = int(make_graph.__wrapped__(level).steps_S[0])
    if low <= steps <= high:
      return dataclasses.replace(level, steps=steps)
  raise ValueError(
    f'env.generator.solution_steps={options.solution_steps}: no such level of '
    f'split {split} among {_MAX_LEVELS}; must be other lengths, a larger room='
    f'{options.room} or fewer traps={options.traps}'
  )


def _draw(rng: np.random.Generator, options: Options) -> Level | None:
  """Draws a level, which may have no solution; None if it has no space."""
  rows, width = options.size
  rooms = options.doors + 1
  cells_RC = np.arange(rows * width).reshape(rows, width)
  pitch = options.room[1] + 1
  walls = [cells_RC[:, pitch * k - 1] for k in range(1, rooms)]
  doors = tuple(int(rng.choice(wall)) for wall in walls)
  free = [
    rng.permutation(
      cells_RC[:, pitch * k : pitch * (k + 1) - 1].ravel()
    ).tolist()
    for k in range(rooms)
  ]
  floor = frozenset(cell for room in free for cell in room) | set(doors)
  # The key of a door is in front of it, in any room. Decoys are anywhere.
  places = [0, *(int(rng.integers(k + 1)) for k in range(options.doors))]
  places += rng.integers(rooms, size=options.decoys).tolist() + [rooms - 1]
  if any(places.count(k) > len(room) for k, room in enumerate(free)):
    return None
  start, *keys, last = (free[k].pop() for k in places)
  rest = rng.permutation([cell for room in free for cell in room]).tolist()
  traps = rest[: round(options.traps * rows * options.room[1] * rooms)]
  colours = rng.permutation(_COLOURS)[: len(keys)].tolist()
  return Level(
    options.size,
    floor,
    doors,
    tuple(keys),
    tuple(colours),
    frozenset(traps),
    last,
    State(start, -1, 0),
    0,
  )


def shortest_plan(graph: Graph, state: State) -> list[str] | None:
  """Returns the actions of a shortest solution; None if there is none."""
  s = graph.index[state]
  if graph.steps_S[s] < 0:
    return None
  plan = []
  while graph.steps_S[s] > 0:
    steps_A = graph.steps_S[graph.next_SA[s]]
    a = int(np.argmax(steps_A == graph.steps_S[s] - 1))
    plan.append(ACTIONS[a])
    s = int(graph.next_SA[s, a])
  return plan
