"""A `World` prepared for the native engine, and the display names of objects.

PDDL ids are mapped to integers and to display names once per game. A layout is
constant during play, so a reset only copies a few sets.
"""

import collections
from collections.abc import Iterable

from envs.alfworld import world as world_lib

_GOAL_QUALITIES = {
  'pick_clean_then_place_in_recep': ('cleanable', 'isClean'),
  'pick_heat_then_place_in_recep': ('heatable', 'isHot'),
  'pick_cool_then_place_in_recep': ('coolable', 'isCool'),
}


class Layout:
  """The constant part of a game, with integer indices for its entities.

  Objects and receptacles are indexed in the order of their lower-cased ids,
  which is the order of ALFWorld's listings.
  """

  def __init__(self, world: world_lib.World) -> None:
    receptacles = sorted(world.receptacles, key=lambda r: r.id.lower())
    objects = sorted(world.objects, key=lambda o: o.id.lower())
    receptacle_index = {r.id: n for n, r in enumerate(receptacles)}
    object_index = {o.id: n for n, o in enumerate(objects)}
    # As in ALFWorld, empty locations get no display number.
    locations = {world.start, *(e.location for e in (*receptacles, *objects))}
    names = display_names(
      e.id for e in (*receptacles, *objects)
    ) | display_names(locations - {''})
    self.task = world.task.removesuffix('.')
    self.start = world.start
    self.names = [names[o.id] for o in objects]
    self.types = [o.type for o in objects]
    self.receptacle_names = [names[r.id] for r in receptacles]
    self.receptacle_types = [r.type for r in receptacles]
    self.location_of = [r.location for r in receptacles]
    self.location_names = {at: names[at] for at in locations - {''}}
    self.reachable_names = [names[r.id] for r in receptacles if r.location]
    self.openable = {n for n, r in enumerate(receptacles) if r.openable}
    self.can_contain = world.can_contain
    self.receptacles_at = collections.defaultdict(list)
    for n, r in enumerate(receptacles):
      if r.location:
        self.receptacles_at[r.location].append(n)
    self.contents = [set() for _ in receptacles]
    self.placed = collections.defaultdict(set)
    self.flagged = collections.defaultdict(set)
    self.inner = collections.defaultdict(list)
    for n, o in enumerate(objects):
      for receptacle in filter(None, (o.receptacle, *o.also_in)):
        self.contents[receptacle_index[receptacle]].add(n)
      if o.location:
        self.placed[o.location].add(n)
      for flag in o.flags:
        self.flagged[flag].add(n)
      for outer in o.inside:
        self.inner[object_index[outer]].append(n)
    self._set_goal(world.goal)

  def _set_goal(self, goal: world_lib.Goal) -> None:
    flag, self.goal_quality = _GOAL_QUALITIES.get(goal.task_type, ('', ''))
    self.goal = goal
    types = enumerate(self.types)
    self.goal_objects = {n for n, name in types if name == goal.object_type}
    if flag:
      self.goal_objects &= self.flagged[flag]
    lights = {
      n for n, name in enumerate(self.types) if name == goal.receptacle_type
    }
    self.goal_lights = lights & self.flagged['toggleable']
    self.goal_receptacles = [
      n
      for n, name in enumerate(self.receptacle_types)
      if name == goal.receptacle_type
    ]


def display_names(ids: Iterable[str]) -> dict[str, str]:
  """Returns the display name of each PDDL id, such as 'mug 2'.

  Entities of one type are numbered downwards in the order of their ids: the
  last one gets number 1.
  """
  types = {i: _display_type(i.lower()) for i in ids}
  remaining = collections.Counter(types.values())
  names = {}
  for i in sorted(types, key=str.lower):
    names[i] = f'{types[i]} {remaining[types[i]]}'
    remaining[types[i]] -= 1
  return names


def _display_type(name: str) -> str:
  # ALFWorld's rule, made for ids such as Sink_bar_..._bar_SinkBasin. Like
  # there, it applies to every id that contains 'basin'.
  stem = name.split('_bar_', 1)[0]
  return f'{stem}basin' if 'basin' in name else stem
