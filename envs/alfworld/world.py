"""A household as data: what engines, generator and expert share.

A `World` is the initial state and the goal of one game, independent of PDDL.
`pddl.py` writes it as an ALFWorld problem and reads one back.
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
  """A place that holds objects.

  Attributes:
    id: PDDL name, such as 'Cabinet_bar__plus_00_dot_02_bar_...'.
    type: type without suffix, such as 'Cabinet'.
    location: PDDL name of where the agent stands to reach it; several
      receptacles may share one. Empty if it cannot be reached.
    openable: whether it starts closed and its contents show when opened.
  """

  id: str
  type: str
  location: str
  openable: bool


@dataclasses.dataclass(frozen=True)
class Object:
  """A thing.

  Attributes:
    id: PDDL name.
    type: type without suffix, such as 'Potato'; empty if it has none.
    location: PDDL name of the place it is reached from; empty if of none.
    receptacle: id of the receptacle it lies in; None if it lies in none.
    flags: of 'pickupable', 'isReceptacleObject', 'cleanable', 'heatable',
      'coolable', 'toggleable', 'sliceable' and any other unary init fact.
    also_in: further receptacles that hold it: official games list a mug in
      the coffee machine and on the counter under it.
    inside: ids of the objects (bowls, pots) that contain it; text only.
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
  """What has to be achieved.

  Attributes:
    task_type: one of TASK_TYPES.
    object_type: type of the object to bring, such as 'Potato'.
    receptacle_type: type of the receptacle to put it in or, for
      look_at_obj_in_light, of the light to use ('DeskLamp').
  """

  task_type: str
  object_type: str
  receptacle_type: str


@dataclasses.dataclass(frozen=True)
class World:
  """One game: initial state and goal.

  Attributes:
    name: folder name of the game, official style
      ('pick_heat_then_place_in_recep-Potato-None-SinkBasin-14/trial_...').
    receptacles: all receptacles, in PDDL order.
    objects: all instances, in PDDL order.
    can_contain: (receptacle type, object type) pairs.
    locations: all location names; more than the receptacles' is allowed.
    start: location of the agent.
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
  """What an engine says after reset or step, byte for byte as ALFWorld says it.

  Attributes:
    feedback: the observation text.
    admissible: the admissible commands, sorted, `help` included.
    won: whether the goal holds.
    score: 1 once won, else 0.
    done: whether the engine has ended the game.
  """

  feedback: str
  admissible: tuple[str, ...]
  won: bool
  score: int
  done: bool
