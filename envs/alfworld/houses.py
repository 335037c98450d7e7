"""Generates ALFWorld games of all six task types, in unlimited number.

A game is a pure function of (seed, split, index) and the options; it needs no
game file and no simulator. Each game is one room, furnished according to the
tables in `facts.py`. Every game can be won, and no game starts won.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from envs.alfworld import expert, facts, world

# Numbers of floor plans, by room. ALFRED's own plans are the first 30 of each
# room; generated games use the numbers from 31 on.
_FIRST_PLAN = {'kitchen': 0, 'living': 200, 'bedroom': 300, 'bathroom': 400}
_PLANS = range(31, 100)
_MAX_INSTANCES = 3  # objects of one type
_SHARED_LOCATION_RATE = 0.12
# Share of cabinets and drawers without a door, whose contents always show.
_OPEN_FRONT_RATE = 0.15
# Types without a maximum number per room, which may share a location.
_STACKED = frozenset(('Cabinet', 'Drawer', 'Shelf', 'StoveBurner'))
_HORIZONS = (-30, -15, 0, 15, 30, 45, 60)
_BASINS = {'SinkBasin': 'Sink', 'BathtubBasin': 'Bathtub'}

_T = TypeVar('_T')


class _Random:
  """A random generator that draws uniform numbers in blocks.

  Single draws from numpy's generators are slow.
  """

  def __init__(self, entropy: Sequence[int]):
    seed = np.random.SeedSequence(list(entropy))
    self._generator = np.random.Generator(np.random.Philox(seed))
    self._block: list[float] = []

  def uniform(self) -> float:
    """Returns a number in [0, 1)."""
    if not self._block:
      self._block = self._generator.random(512).tolist()
    return self._block.pop()

  def integer(self, low: int, high: int) -> int:
    """Returns an integer from low to high, both included."""
    return low + int(self.uniform() * (high - low + 1))

  def choice(self, items: Sequence[_T]) -> _T:
    """Returns one of the items, uniformly."""
    return items[int(self.uniform() * len(items))]

  def weighted_choice(self, weights: Mapping[_T, float]) -> _T:
    """Returns a key with a probability proportional to its weight."""
    sums = list(itertools.accumulate(weights.values()))
    index = bisect.bisect_right(sums, self.uniform() * sums[-1])
    return list(weights)[min(index, len(sums) - 1)]

  def shuffled(self, items: Sequence[_T]) -> list[_T]:
    """Returns the items in random order."""
    return [item for _, item in sorted((self.uniform(), i) for i in items)]


def check_options(
  *,
  rooms: Sequence[str] = facts.ROOMS,
  receptacles: Sequence[int] | None = None,
  distractors: Sequence[int] | None = None,
  task_types: Sequence[str] = world.TASK_TYPES,
) -> None:
  """Raises ValueError, in one line, if an option is invalid for `generate`."""
  for name, values, known in (
    ('rooms', rooms, facts.ROOMS),
    ('task_types', task_types, world.TASK_TYPES),
  ):
    unknown = [value for value in values if value not in known]
    if unknown or not values:
      raise ValueError(
        f'env.generator.{name}={tuple(values)}: must be some of '
        f'{", ".join(known)}'
      )
  for name, bounds, minimum in (
    ('receptacles', receptacles, 4),
    ('distractors', distractors, 0),
  ):
    if bounds is not None and not (
      len(bounds) == 2 and minimum <= bounds[0] <= bounds[1]
    ):
      raise ValueError(
        f'env.generator.{name}={tuple(bounds)}: must be (low, high) with '
        f'{minimum} <= low <= high, or None for as many as ALFRED has'
      )
  if not _task_type_weights(tuple(rooms), tuple(task_types)):
    raise ValueError(
      f'env.generator.rooms={tuple(rooms)}: no task of {tuple(task_types)} is '
      'possible in these rooms'
    )


def task_type(
  split: str,
  index: int,
  *,
  seed: int = 0,
  rooms: Sequence[str] = facts.ROOMS,
  task_types: Sequence[str] = world.TASK_TYPES,
) -> str:
  """Returns the task type of a game without generating the game."""
  rng = _rng(split, index, seed)
  return rng.weighted_choice(
    _task_type_weights(tuple(rooms), tuple(task_types))
  )


def generate(
  split: str,
  index: int,
  *,
  seed: int = 0,
  rooms: Sequence[str] = facts.ROOMS,
  receptacles: tuple[int, int] | None = None,
  distractors: tuple[int, int] | None = None,
  task_types: Sequence[str] = world.TASK_TYPES,
) -> world.World:
  """Generates a game; equal arguments give equal games on every machine.

  Args:
    split: any name; each split has its own random stream.
    index: index of the game within the split.
    seed: seed of the set of games.
    rooms: room types to draw from; some of `facts.ROOMS`.
    receptacles: (min, max) number of receptacles; None for ALFRED's numbers.
    distractors: (min, max) number of objects in addition to the goal objects
      and the lamp; None for ALFRED's numbers.
    task_types: task types to draw from, in ALFRED's proportions.

  Raises:
    ValueError: if an option is invalid or no game has all of them.
  """
  check_options(
    rooms=rooms,
    receptacles=receptacles,
    distractors=distractors,
    task_types=task_types,
  )
  rng = _rng(split, index, seed)
  task_type = rng.weighted_choice(
    _task_type_weights(tuple(rooms), tuple(task_types))
  )
  room = rng.weighted_choice(
    {
      room: sum(facts.GOALS[task_type, room][0].values())
      for room in rooms
      if (task_type, room) in facts.GOALS
    }
  )
  goal = _draw_goal(rng, task_type, room)
  builder = _Builder(rng, room, goal)
  builder.add_receptacles(receptacles)
  builder.add_objects(distractors)
  sentence = rng.choice(facts.TEMPLATES[task_type]).format(
    goal.object_type.lower(), goal.receptacle_type.lower()
  )
  plan_number = _FIRST_PLAN[room] + rng.choice(_PLANS)
  name = (
    f'{task_type}-{goal.object_type}-None-{goal.receptacle_type}-{plan_number}'
    f'/trial_{split}_{seed}_{index:06d}'
  )
  game = builder.world(name, sentence)
  assert expert.plan(game), f'{name}: won at the start'
  return game


def _rng(split: str, index: int, seed: int) -> _Random:
  return _Random((seed, int.from_bytes(split.encode(), 'big'), index))


def _task_type_weights(
  rooms: tuple[str, ...], types: tuple[str, ...]
) -> dict[str, int]:
  """Returns the weights of the given task types that the rooms allow."""
  return {
    task_type: weight
    for task_type, weight in facts.TASK_WEIGHTS.items()
    if task_type in types
    and any((task_type, room) in facts.GOALS for room in rooms)
  }


def _draw_goal(rng: _Random, task_type: str, room: str) -> world.Goal:
  object_weights, receptacle_weights = facts.GOALS[task_type, room]
  object_type = rng.weighted_choice(object_weights)
  if task_type != 'look_at_obj_in_light':
    receptacle_weights = {
      receptacle_type: weight
      for receptacle_type, weight in receptacle_weights.items()
      if receptacle_type in facts.PLACES[object_type]
    }
  return world.Goal(
    task_type, object_type, rng.weighted_choice(receptacle_weights)
  )


class _Builder:
  """Builds the room of one game.

  The order of the draws is part of the game: a change of it changes all games.
  """

  def __init__(self, rng: _Random, room: str, goal: world.Goal):
    self._rng = rng
    self._room = room
    self._goal = goal
    self._ids: set[str] = set()
    self._locations: dict[str, None] = {}
    self._receptacles: list[world.Receptacle] = []
    self._objects: list[world.Object] = []

  def add_receptacles(self, bounds: tuple[int, int] | None) -> None:
    """Adds receptacles, including those that the task needs.

    Args:
      bounds: (min, max) number of receptacles; None for ALFRED's numbers.
    """
    needed = self._needed_receptacles()
    counts = {
      name: self._rng.weighted_choice(dict(zip(*weights, strict=True)))
      for name, weights in facts.RECEPTACLES[self._room].items()
    }
    if bounds is not None:
      drawn = [name for name, count in counts.items() for _ in range(count)]
      for name in needed:
        if name in drawn:
          drawn.remove(name)
      num_optional = max(0, self._rng.integer(*bounds) - len(needed))
      while len(drawn) < num_optional:
        # Only stackable types may repeat: a second shelf, but no second fridge.
        present = {*needed, *drawn} - _STACKED
        candidates = [name for name in counts if name not in present]
        drawn.append(self._rng.choice(candidates))
      optional = self._rng.shuffled(drawn)[:num_optional]
      counts = {name: (*needed, *optional).count(name) for name in counts}
    for name in needed:
      counts[name] = max(counts[name], 1)
    for name, count in counts.items():
      location = ''
      for _ in range(count):
        can_share = name in _STACKED and location
        if not can_share or self._rng.uniform() >= _SHARED_LOCATION_RATE:
          location = self._new_location()
        openable = name in facts.OPENABLE
        if name in ('Cabinet', 'Drawer'):
          openable = self._rng.uniform() >= _OPEN_FRONT_RATE
        self._receptacles.append(
          world.Receptacle(self._new_id(name), name, location, openable)
        )

  def _needed_receptacles(self) -> list[str]:
    """Draws the receptacle types without which the task is impossible."""
    goal, available = self._goal, facts.RECEPTACLES[self._room]
    if goal.task_type == 'look_at_obj_in_light':
      lamp_types = sorted(facts.LAMP_PLACES & available.keys())
      needed = [self._rng.choice(lamp_types)]
    else:
      needed = [goal.receptacle_type]
    if goal.task_type in facts.TOOLS:
      needed.append(facts.TOOLS[goal.task_type])
    # A receptacle for the goal object to start in, weighted by its frequency.
    sources = {
      name: sum(n * w for n, w in zip(*weights, strict=True))
      for name, weights in available.items()
      if name in facts.PLACES[goal.object_type] and name != goal.receptacle_type
    }
    return list(dict.fromkeys((*needed, self._rng.weighted_choice(sources))))

  def add_objects(self, bounds: tuple[int, int] | None) -> None:
    """Adds the goal objects, the lamp and the distractors.

    Args:
      bounds: (min, max) number of distractors; None for ALFRED's numbers.
    """
    goal, rng = self._goal, self._rng
    low = 2 if goal.task_type == 'pick_two_obj_and_place' else 1
    high = _MAX_INSTANCES if bounds is None else low
    for _ in range(rng.integer(low, high)):
      self._add_object(goal.object_type, self._source_types())
    if goal.task_type == 'look_at_obj_in_light':
      self._add_object('DeskLamp', facts.LAMP_PLACES)
    others = {
      name: frequency
      for name, frequency in facts.OBJECTS[self._room].items()
      if name not in (goal.object_type, 'DeskLamp')
      and self._capacities(facts.PLACES[name])
    }
    distractors = []
    for name, frequency in facts.OBJECTS[self._room].items():
      if name != goal.object_type and rng.uniform() * 30 < frequency:
        if name != 'DeskLamp':
          distractors += [name] * rng.integer(1, _MAX_INSTANCES)
        elif self._capacities(facts.LAMP_PLACES) and (
          goal.task_type != 'look_at_obj_in_light'
        ):
          self._add_object(name, facts.LAMP_PLACES)
    distractors = [name for name in distractors if name in others]
    if bounds is not None:
      distractors, count = rng.shuffled(distractors), rng.integer(*bounds)
      while len(distractors) < count:
        distractors.append(rng.weighted_choice(others))
      distractors = distractors[:count]
    for name in distractors:
      self._add_object(name, facts.PLACES[name])

  def _source_types(self) -> frozenset[str]:
    """Returns the receptacle types in which goal objects may start.

    Without a tool to use, the goal receptacle is excluded: the goal would hold
    at the start.
    """
    types = facts.PLACES[self._goal.object_type]
    if self._goal.task_type in facts.TOOLS:
      return types
    return types - {self._goal.receptacle_type}

  def _add_object(
    self, object_type: str, receptacle_types: frozenset[str]
  ) -> None:
    index = self._rng.weighted_choice(self._capacities(receptacle_types))
    receptacle = self._receptacles[index]
    self._objects.append(
      world.Object(
        self._new_id(object_type),
        object_type,
        receptacle.location,
        receptacle.id,
        facts.FLAGS[object_type],
      )
    )

  def _capacities(self, receptacle_types: frozenset[str]) -> dict[int, float]:
    """Returns index -> capacity of the receptacles of the given types."""
    return {
      n: facts.CAPACITIES.get(receptacle.type, 1.0)
      for n, receptacle in enumerate(self._receptacles)
      if receptacle.type in receptacle_types
    }

  def _coordinate(self, low: float, high: float) -> str:
    value = low + (high - low) * self._rng.uniform()
    integer, fraction = f'{abs(value):05.2f}'.split('.')
    return f'{"minus" if value < 0 else "plus"}_{integer}_dot_{fraction}'

  def _new_id(self, name: str) -> str:
    """Returns an unused PDDL id for an object or receptacle of a type."""
    while True:
      x, y, z = (self._coordinate(*s) for s in ((-4, 4), (0, 2.3), (-4, 4)))
      suffix = f'_bar_{name}' if name in _BASINS else ''
      stem = _BASINS.get(name, name)
      new_id = f'{stem}_bar__{x}_bar__{y}_bar__{z}{suffix}'
      if new_id not in self._ids:
        self._ids.add(new_id)
        return new_id

  def _new_location(self) -> str:
    """Returns an unused PDDL name of a location."""
    while True:
      x, z = self._rng.integer(-16, 16), self._rng.integer(-16, 16)
      turn, tilt = self._rng.integer(0, 3), self._rng.choice(_HORIZONS)
      words = [
        str(value).replace('-', '_minus_') for value in (x, z, turn, tilt)
      ]
      name = '_bar_'.join(('loc', *words))
      if name not in self._locations:
        self._locations[name] = None
        return name

  def world(self, name: str, sentence: str) -> world.World:
    """Returns the finished game; the agent starts in the middle of the room."""
    start = self._new_location()
    present = {o.type for o in self._objects if o.type in facts.PLACES}
    return world.World(
      name=name,
      receptacles=tuple(sorted(self._receptacles, key=lambda r: r.id)),
      objects=tuple(sorted(self._objects, key=lambda o: o.id)),
      can_contain=frozenset(
        (receptacle_type, object_type)
        for receptacle_type in {r.type for r in self._receptacles}
        for object_type in present
        if receptacle_type in facts.PLACES[object_type]
      ),
      locations=tuple(self._locations),
      start=start,
      goal=self._goal,
      task=sentence,
    )
