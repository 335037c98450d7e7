"""Data classes for ALFWorld games, shared by engines, generator and expert.

A `World` is the initial state and the goal of one game, independent of PDDL.
`pddl.py` converts it to and from ALFWorld's problem files.
"""

import dataclasses

TASK_TYPES = (
  'pick_and_place_simple',
  'look_at_obj_in_light',
  'pick_clean_then_place_in_recep',
  'pick_heat_then_place_in_recep',
  'pick_cool_then_place_in_recep',
  'pick_two_obj_and_place',
)


@dataclasses.dataclass(frozen=True)
class Receptacle:
  """A piece of furniture, or similar, that holds objects.

  Attributes:
    id: PDDL name, such as 'Cabinet_bar__plus_00_dot_02_bar_...'.
    type: type without suffix, such as 'Cabinet'.
    location: PDDL name of the location from which the agent reaches it; several
      receptacles may share one. Empty if it cannot be reached.
    openable: whether it starts closed and hides its contents until opened.
  """

  id: str
  type: str
  location: str
  openable: bool


@dataclasses.dataclass(frozen=True)
class Object:
  """An object, such as a potato or a lamp.

  Attributes:
    id: PDDL name.
    type: type without suffix, such as 'Potato'; empty if it has none.
    location: PDDL name of the location from which the agent reaches it; empty
      if it cannot be reached.
    receptacle: id of the receptacle that holds it; None if there is none.
    flags: names of its unary init facts: 'pickupable', 'isReceptacleObject',
      'cleanable', 'heatable', 'coolable', 'toggleable', 'sliceable', ...
    also_in: ids of further receptacles that hold it. Official games list a mug
      both in the coffee machine and on the counter under it.
    inside: ids of the objects (bowls, pots) that contain it; affects texts
      only.
  """

  id: str
  type: str
  location: str
  receptacle: str | None
  flags: frozenset[str]
  also_in: tuple[str, ...] = ()
  inside: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Goal:
  """The goal of a game.

  Attributes:
    task_type: one of TASK_TYPES.
    object_type: type of the goal object, such as 'Potato'.
    receptacle_type: type of the receptacle to put it in; for
      look_at_obj_in_light, the type of the lamp to use ('DeskLamp').
  """

  task_type: str
  object_type: str
  receptacle_type: str


@dataclasses.dataclass(frozen=True)
class World:
  """One game: initial state and goal.

  Attributes:
    name: folder name of the game in the official style,
      'pick_heat_then_place_in_recep-Potato-None-SinkBasin-14/trial_...'.
    receptacles: all receptacles, in PDDL order.
    objects: all objects, in PDDL order.
    can_contain: pairs (receptacle type, object type) that are allowed.
    locations: all location names, including those without a receptacle.
    start: initial location of the agent.
    goal: the goal.
    task: the goal sentence, such as 'heat some potato and put it in sinkbasin.'
  """

  name: str
  receptacles: tuple[Receptacle, ...]
  objects: tuple[Object, ...]
  can_contain: frozenset[tuple[str, str]]
  locations: tuple[str, ...]
  start: str
  goal: Goal
  task: str


@dataclasses.dataclass(frozen=True)
class State:
  """The result of an engine's reset or step; texts are ALFWorld's, verbatim.

  Attributes:
    feedback: the observation text.
    admissible: the admissible commands, sorted; includes `help`.
    won: whether the goal holds now.
    score: 1 if `won`, else 0.
    done: whether the engine has ended the game.
  """

  feedback: str
  admissible: tuple[str, ...]
  won: bool
  score: int
  done: bool
