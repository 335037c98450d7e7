"""Generates households: unlimited games of all six task types.

A game is a pure function of (seed, split, index) and the options; no game
file, no simulator. One game is one room, furnished by the tables of `facts`;
every game can be won, and none is won before it starts.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from envs.alfworld import expert, facts, world

# Official floor plans count from here; up to 30 are ALFRED's own, so that the
# generated ones go on from 31.
_FIRST_PLAN = {'kitchen': 0, 'living': 200, 'bedroom': 300, 'bathroom': 400}
_PLANS = range(31, 100)
_MAX_INSTANCES = 3
_SHARED_LOCATION_RATE = 0.12
# Doors and drawers that cannot be opened: what is in them shows.
_OPEN_FRONT_RATE = 0.15
_STACKED = frozenset(('Cabinet', 'Drawer', 'Shelf', 'StoveBurner'))
_HORIZONS = (-30, -15, 0, 15, 30, 45, 60)
_BASINS = {'SinkBasin': 'Sink', 'BathtubBasin': 'Bathtub'}

_T = TypeVar('_T')


class _Dice:
  """Draws from a block of uniform numbers; numpy's own are slow one by one."""

  def __init__(self, entropy: Sequence[int]):
    seed = np.random.SeedSequence(list(entropy))
    self._generator = np.random.Generator(np.random.Philox(seed))
    self._block: list[float] = []

  def unit(self) -> float:
    """Returns a number in [0, 1)."""
    if not self._block:
      self._block = self._generator.random(512).tolist()
    return self._block.pop()

  def between(self, low: int, high: int) -> int:
    """Returns a whole number from low to high, both included."""
    return low + int(self.unit() * (high - low + 1))

  def pick(self, items: Sequence[_T]) -> _T:
    """Returns one of the items."""
    return items[int(self.unit() * len(items))]

  def weigh(self, weights: Mapping[_T, float]) -> _T:
    """Returns a key, in proportion to its weight."""
    sums = list(itertools.accumulate(weights.values()))
    place = bisect.bisect_right(sums, self.unit() * sums[-1])
    return list(weights)[min(place, len(sums) - 1)]

  def shuffled(self, items: Sequence[_T]) -> list[_T]:
    """Returns the items in random order."""
    return [item for _, item in sorted((self.unit(), i) for i in items)]


def check_options(
  *,
  rooms: Sequence[str] = facts.ROOMS,
  receptacles: Sequence[int] | None = None,
  distractors: Sequence[int] | None = None,
  task_types: Sequence[str] = world.TASK_TYPES,
) -> None:
  """Raises ValueError, in one line, unless `generate` can use the options."""
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
  for name, span, least in (
    ('receptacles', receptacles, 4),
    ('distractors', distractors, 0),
  ):
    if span is not None and not (
      len(span) == 2 and least <= span[0] <= span[1]
    ):
      raise ValueError(
        f'env.generator.{name}={tuple(span)}: must be (low, high) with '
        f'{least} <= low <= high, or None for as many as ALFRED has'
      )
  if not _kinds(tuple(rooms), tuple(task_types)):
    raise ValueError(
      f'env.generator.rooms={tuple(rooms)}: no task of {tuple(task_types)} can '
      'be set there'
    )


def kind(
  split: str,
  index: int,
  *,
  seed: int = 0,
  rooms: Sequence[str] = facts.ROOMS,
  task_types: Sequence[str] = world.TASK_TYPES,
) -> str:
  """Returns the task type of a game without furnishing it."""
  dice = _dice(split, index, seed)
  return dice.weigh(_kinds(tuple(rooms), tuple(task_types)))


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
  """Returns one game; equal arguments give equal games, everywhere.

  Args:
    split: any name; splits are separate streams and share no game.
    index: number of the game within the split.
    seed: another seed, another set of games.
    rooms: sorts of rooms to draw from, of `facts.ROOMS`.
    receptacles: fewest and most receptacles; None for as many as ALFRED's
      rooms have.
    distractors: fewest and most things besides those to bring and the lamp;
      None for as many as ALFRED's rooms have.
    task_types: task types to draw from, in ALFRED's proportions.

  Raises:
    ValueError: if the options fit no game.
  """
  check_options(
    rooms=rooms,
    receptacles=receptacles,
    distractors=distractors,
    task_types=task_types,
  )
  dice = _dice(split, index, seed)
  task_type = dice.weigh(_kinds(tuple(rooms), tuple(task_types)))
  room = dice.weigh(
    {
      room: sum(facts.GOALS[task_type, room][0].values())
      for room in rooms
      if (task_type, room) in facts.GOALS
    }
  )
  goal = _goal(dice, task_type, room)
  builder = _Builder(dice, room, goal)
  builder.furnish(receptacles)
  builder.fill(distractors)
  sentence = dice.pick(facts.TEMPLATES[task_type]).format(
    goal.object_type.lower(), goal.receptacle_type.lower()
  )
  plan_number = _FIRST_PLAN[room] + dice.pick(_PLANS)
  name = (
    f'{task_type}-{goal.object_type}-None-{goal.receptacle_type}-{plan_number}'
    f'/trial_{split}_{seed}_{index:06d}'
  )
  game = builder.world(name, sentence)
  assert expert.plan(game), f'{name}: won at the start'
  return game


def _dice(split: str, index: int, seed: int) -> _Dice:
  return _Dice((seed, int.from_bytes(split.encode(), 'big'), index))


def _kinds(rooms: tuple[str, ...], types: tuple[str, ...]) -> dict[str, int]:
  return {
    task_type: weight
    for task_type, weight in facts.TASK_WEIGHTS.items()
    if task_type in types
    and any((task_type, room) in facts.GOALS for room in rooms)
  }


def _goal(dice: _Dice, task_type: str, room: str) -> world.Goal:
  objects, receptacles = facts.GOALS[task_type, room]
  thing = dice.weigh(objects)
  if task_type != 'look_at_obj_in_light':
    receptacles = {
      place: weight
      for place, weight in receptacles.items()
      if place in facts.PLACES[thing]
    }
  return world.Goal(task_type, thing, dice.weigh(receptacles))


class _Builder:
  """One room in the making."""

  def __init__(self, dice: _Dice, room: str, goal: world.Goal):
    self._dice = dice
    self._room = room
    self._goal = goal
    self._ids: set[str] = set()
    self._locations: dict[str, None] = {}
    self._receptacles: list[world.Receptacle] = []
    self._objects: list[world.Object] = []

  def furnish(self, span: tuple[int, int] | None) -> None:
    """Places the receptacles, those that the task needs among them."""
    needed = self._needed()
    counts = {
      kind: self._dice.weigh(dict(zip(*numbers, strict=True)))
      for kind, numbers in facts.RECEPTACLES[self._room].items()
    }
    if span is not None:
      drawn = [kind for kind, count in counts.items() for _ in range(count)]
      for kind in needed:
        if kind in drawn:
          drawn.remove(kind)
      number = max(0, self._dice.between(*span) - len(needed))
      while len(drawn) < number:
        # Nobody has two fridges, but there is always room for a shelf.
        present = {*needed, *drawn} - _STACKED
        spare = [kind for kind in counts if kind not in present]
        drawn.append(self._dice.pick(spare))
      rest = self._dice.shuffled(drawn)[:number]
      counts = {kind: (*needed, *rest).count(kind) for kind in counts}
    for kind in needed:
      counts[kind] = max(counts[kind], 1)
    for kind, count in counts.items():
      location = ''
      for _ in range(count):
        shared = kind in _STACKED and location
        if not shared or self._dice.unit() >= _SHARED_LOCATION_RATE:
          location = self._location()
        openable = kind in facts.OPENABLE
        if kind in ('Cabinet', 'Drawer'):
          openable = self._dice.unit() >= _OPEN_FRONT_RATE
        self._receptacles.append(
          world.Receptacle(self._id(kind), kind, location, openable)
        )

  def _needed(self) -> list[str]:
    """Returns the kinds of receptacles without which the task has no game."""
    goal, plan = self._goal, facts.RECEPTACLES[self._room]
    if goal.task_type == 'look_at_obj_in_light':
      needed = [self._dice.pick(sorted(facts.LAMP_PLACES & plan.keys()))]
    else:
      needed = [goal.receptacle_type]
    if goal.task_type in facts.TOOLS:
      needed.append(facts.TOOLS[goal.task_type])
    sources = {
      kind: sum(n * w for n, w in zip(*numbers, strict=True))
      for kind, numbers in plan.items()
      if kind in facts.PLACES[goal.object_type] and kind != goal.receptacle_type
    }
    return list(dict.fromkeys((*needed, self._dice.weigh(sources))))

  def fill(self, span: tuple[int, int] | None) -> None:
    """Places the things to bring, the lamp, and the others."""
    goal, dice = self._goal, self._dice
    least = 2 if goal.task_type == 'pick_two_obj_and_place' else 1
    most = _MAX_INSTANCES if span is None else least
    for _ in range(dice.between(least, most)):
      self._put(goal.object_type, self._open_to_target())
    if goal.task_type == 'look_at_obj_in_light':
      self._put('DeskLamp', facts.LAMP_PLACES)
    kinds = []
    for kind, frequency in facts.OBJECTS[self._room].items():
      if kind != goal.object_type and dice.unit() * 30 < frequency:
        if kind != 'DeskLamp':
          kinds += [kind] * dice.between(1, _MAX_INSTANCES)
        elif self._places(facts.LAMP_PLACES) and (
          goal.task_type != 'look_at_obj_in_light'
        ):
          self._put(kind, facts.LAMP_PLACES)
    kinds = [kind for kind in kinds if self._places(facts.PLACES[kind])]
    if span is not None:
      kinds = dice.shuffled(kinds)[: dice.between(*span)]
    for kind in kinds:
      self._put(kind, facts.PLACES[kind])

  def _open_to_target(self) -> frozenset[str]:
    """Returns where things to bring may lie, so that the goal is not met."""
    places = facts.PLACES[self._goal.object_type]
    if self._goal.task_type in facts.TOOLS:
      return places
    return places - {self._goal.receptacle_type}

  def _put(self, kind: str, places: frozenset[str]) -> None:
    place = self._receptacles[self._dice.weigh(self._places(places))]
    self._objects.append(
      world.Object(
        self._id(kind), kind, place.location, place.id, facts.FLAGS[kind]
      )
    )

  def _places(self, kinds: frozenset[str]) -> dict[int, float]:
    return {
      n: facts.ROOMINESS.get(receptacle.type, 1.0)
      for n, receptacle in enumerate(self._receptacles)
      if receptacle.type in kinds
    }

  def _number(self, low: float, high: float) -> str:
    value = low + (high - low) * self._dice.unit()
    whole, part = f'{abs(value):05.2f}'.split('.')
    return f'{"minus" if value < 0 else "plus"}_{whole}_dot_{part}'

  def _id(self, kind: str) -> str:
    while True:
      x, y, z = (self._number(*s) for s in ((-4, 4), (0, 2.3), (-4, 4)))
      suffix = f'_bar_{kind}' if kind in _BASINS else ''
      stem = _BASINS.get(kind, kind)
      name = f'{stem}_bar__{x}_bar__{y}_bar__{z}{suffix}'
      if name not in self._ids:
        self._ids.add(name)
        return name

  def _location(self) -> str:
    while True:
      x, z = self._dice.between(-16, 16), self._dice.between(-16, 16)
      turn, tilt = self._dice.between(0, 3), self._dice.pick(_HORIZONS)
      words = [
        str(number).replace('-', '_minus_') for number in (x, z, turn, tilt)
      ]
      name = '_bar_'.join(('loc', *words))
      if name not in self._locations:
        self._locations[name] = None
        return name

  def world(self, name: str, sentence: str) -> world.World:
    """Returns the room as it stands, the player in the middle of it."""
    start = self._location()
    present = {o.type for o in self._objects if o.type in facts.PLACES}
    return world.World(
      name=name,
      receptacles=tuple(sorted(self._receptacles, key=lambda r: r.id)),
      objects=tuple(sorted(self._objects, key=lambda o: o.id)),
      can_contain=frozenset(
        (place, kind)
        for place in {r.type for r in self._receptacles}
        for kind in present
        if place in facts.PLACES[kind]
      ),
      locations=tuple(self._locations),
      start=start,
      goal=self._goal,
      task=sentence,
    )
