"""A world as the native engine reads it, and the names a player sees.

Ids become numbers and display names once per game; nothing here changes
during play, so that a reset copies a few sets only.
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
  """What a world's play never changes, objects and receptacles as numbers.

  Numbers follow the ids in lower case, the order of ALFWorld's listings.
  """

  def __init__(self, world: world_lib.World) -> None:
    receptacles = sorted(world.receptacles, key=lambda r: r.id.lower())
    objects = sorted(world.objects, key=lambda o: o.id.lower())
    number = {r.id: n for n, r in enumerate(receptacles)}
    object_number = {o.id: n for n, o in enumerate(objects)}
    # Locations count only if something is there, as they do in ALFWorld.
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
        self.contents[number[receptacle]].add(n)
      if o.location:
        self.placed[o.location].add(n)
      for flag in o.flags:
        self.flagged[flag].add(n)
      for outer in o.inside:
        self.inner[object_number[outer]].append(n)
    self._set_goal(world.goal)

  def _set_goal(self, goal: world_lib.Goal) -> None:
    flag, self.goal_quality = _GOAL_QUALITIES.get(goal.task_type, ('', ''))
    self.goal = goal
    kinds = enumerate(self.types)
    self.goal_objects = {n for n, kind in kinds if kind == goal.object_type}
    if flag:
      self.goal_objects &= self.flagged[flag]
    lights = {
      n for n, kind in enumerate(self.types) if kind == goal.receptacle_type
    }
    self.goal_lights = lights & self.flagged['toggleable']
    self.goal_receptacles = [
      n
      for n, kind in enumerate(self.receptacle_types)
      if kind == goal.receptacle_type
    ]


def display_names(ids: Iterable[str]) -> dict[str, str]:
  """Returns the name that a player sees of each PDDL id, such as 'mug 2'.

  The last of a kind in the order of ids gets number 1.
  """
  kinds = {i: _kind(i.lower()) for i in ids}
  left = collections.Counter(kinds.values())
  names = {}
  for i in sorted(kinds, key=str.lower):
    names[i] = f'{kinds[i]} {left[kinds[i]]}'
    left[kinds[i]] -= 1
  return names


def _kind(name: str) -> str:
  # ALFWorld's own rule for Sink|...|SinkBasin, applied to whatever says so.
  kind = name.split('_bar_', 1)[0]
  return f'{kind}basin' if 'basin' in name else kind
