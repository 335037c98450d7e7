"""Two ALFWorld experts: a planner with full state, and a text-only explorer.

`plan` returns a shortest list of winning commands for a `World`. `Explorer`
sees only observation texts and admissible commands. At each turn it returns a
thought and a command; small policies are warm-started on its episodes.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from envs.alfworld import facts, layout, world

ORDERS = ('random', 'likely', 'sweep')

# Task type -> (verb of the treatment, flag that the object must have, type of
# the appliance).
_TREATMENTS = {
  'pick_clean_then_place_in_recep': ('clean', 'cleanable', 'SinkBasin'),
  'pick_heat_then_place_in_recep': ('heat', 'heatable', 'Microwave'),
  'pick_cool_then_place_in_recep': ('cool', 'coolable', 'Fridge'),
}


def plan(game: world.World) -> list[str]:
  """Returns a shortest list of commands that wins the game.

  The agent holds one object at a time, receptacles stay open, and one command
  walks between any two locations. A shortest solution therefore only takes,
  treats and puts goal objects, walks to where the next action happens and opens
  closed receptacles on the way. The remaining choices are the objects,
  appliances and receptacles; all combinations are tried.

  Args:
    game: the game; its goal may hold at the start.

  Returns:
    The commands; empty if the goal holds at the start.

  Raises:
    ValueError: if the goal cannot be reached.
  """
  return min(_Planner(game).plans(), key=len)


# An action on an object: (command template, object, receptacle where it
# happens, whether the receptacle must be open).
_Action = tuple[str, world.Object, world.Receptacle, bool]


class _Planner:
  """Enumerates the action sequences that may be shortest, as commands."""

  def __init__(self, game: world.World):
    self._game = game
    entities = (*game.receptacles, *game.objects)
    self._names = layout.display_names(entity.id for entity in entities)
    self._by_id = {r.id: r for r in game.receptacles if r.location}
    self._targets = [
      r for r in self._by_id.values() if r.type == game.goal.receptacle_type
    ]
    self._objects = [o for o in game.objects if o.type == game.goal.object_type]

  def plans(self) -> Iterator[list[str]]:
    """Yields winning plans; at least one of them is a shortest plan.

    Raises:
      ValueError: if the goal cannot be reached.
    """
    goal = self._game.goal
    if goal.task_type == 'look_at_obj_in_light':
      sequences = self._look_sequences()
    elif goal.task_type == 'pick_two_obj_and_place':
      sequences = self._place_sequences(2)
    elif goal.task_type == 'pick_and_place_simple':
      sequences = self._place_sequences(1)
    else:
      sequences = self._treat_sequences(*_TREATMENTS[goal.task_type])
    plans = [self._to_commands(actions) for actions in sequences]
    if not plans:
      raise ValueError(f'{self._game.name}: the goal cannot be reached')
    yield from plans

  def _holders(self, item: world.Object) -> list[world.Receptacle]:
    """Returns the reachable receptacles that contain an object."""
    ids = (item.receptacle, *item.also_in)
    return [self._by_id[i] for i in ids if i in self._by_id]

  def _take_actions(self, item: world.Object) -> Iterator[_Action]:
    if 'pickupable' in item.flags:
      for receptacle in self._holders(item):
        yield 'take {} from {}', item, receptacle, True

  def _put_actions(
    self, item: world.Object, receptacle: world.Receptacle
  ) -> list[_Action]:
    return [('move {} to {}', item, receptacle, True)]

  def _fits(self, item: world.Object) -> bool:
    pair = (self._game.goal.receptacle_type, item.type)
    return pair in self._game.can_contain

  def _look_sequences(self) -> Iterator[list[_Action]]:
    lamps = [
      (lamp, receptacle)
      for lamp in self._game.objects
      if lamp.type == self._game.goal.receptacle_type
      and 'toggleable' in lamp.flags
      for receptacle in self._holders(lamp)
    ]
    for item, (lamp, receptacle) in itertools.product(self._objects, lamps):
      for take in self._take_actions(item):
        # A switch also works in a closed receptacle.
        use = ('use {}', lamp, receptacle, False)
        yield [take, use]

  def _place_sequences(self, num_objects: int) -> Iterator[list[_Action]]:
    for target in self._targets:
      inside = [o for o in self._objects if target in self._holders(o)]
      outside = [o for o in self._objects if o not in inside]
      missing = max(0, num_objects - len(inside))
      if missing > len(outside) or missing and not self._fits(outside[0]):
        continue
      for chosen in itertools.permutations(outside, missing):
        for takes in itertools.product(*map(self._take_actions, chosen)):
          actions: list[_Action] = []
          for take in takes:
            actions += [take, *self._put_actions(take[1], target)]
          yield actions

  def _treat_sequences(
    self, verb: str, flag: str, tool_type: str
  ) -> Iterator[list[_Action]]:
    tools = [r for r in self._by_id.values() if r.type == tool_type]
    for item, tool in itertools.product(self._objects, tools):
      if flag not in item.flags:
        continue
      for take in self._take_actions(item):
        actions = [take, (f'{verb} {{}} with {{}}', item, tool, False)]
        # An object that is listed in two receptacles leaves only one of them
        # when it is taken.
        remaining = [r for r in self._holders(item) if r is not take[2]]
        if any(r in self._targets for r in remaining):
          yield actions
        elif self._fits(item):
          for target in self._targets:
            yield [*actions, *self._put_actions(item, target)]

  def _to_commands(self, actions: list[_Action]) -> list[str]:
    """Returns the commands of the actions, with walks and openings between."""
    location, opened, commands = self._game.start, set(), []
    for command, item, receptacle, must_be_open in actions:
      name = self._names[receptacle.id]
      if receptacle.location != location:
        commands.append(f'go to {name}')
        location = receptacle.location
      if must_be_open and receptacle.openable and receptacle.id not in opened:
        commands.append(f'open {name}')
        opened.add(receptacle.id)
      commands.append(command.format(self._names[item.id], name))
    return commands


_TASKS = tuple(
  (task_type, re.compile(template.rstrip('.').replace('{}', r'(\w+)')))
  for task_type, templates in facts.TEMPLATES.items()
  for template in templates
)
_QUALITIES = {'clean': 'clean', 'heat': 'hot', 'cool': 'cool'}
_TAKEN_TEXT = re.compile(r'You pick up the (\w+ \d+) from the (\w+ \d+)\.')
_PUT_TEXT = re.compile(
  r'You (?:move|put) the (\w+ \d+) (?:to|in/on) the (\w+ \d+)'
)
_TREATED_TEXT = re.compile(r'You (clean|heat|cool) the (\w+ \d+) using')
_CONTENTS_TEXT = re.compile(
  r'(?:On the (\w+ \d+)|The (\w+ \d+) is open\. In it), you see ([^.]*)\.'
)
_FACING_TEXT = re.compile(r'You are facing the ([^.]*)\.')
_TAKE_COMMAND = re.compile(r'take (\w+ \d+) from (\w+ \d+)')
_PUT_COMMAND = re.compile(r'(?:move|put) (\w+ \d+) (?:to|in/on) (\w+ \d+)')
# Object type -> receptacle type -> capacity, in lower case as texts have them.
_CAPACITIES = {
  object_type.lower(): {
    name.lower(): facts.CAPACITIES.get(name, 1.0) for name in receptacle_types
  }
  for object_type, receptacle_types in {
    **facts.PLACES,
    'DeskLamp': facts.LAMP_PLACES,
  }.items()
}


def read_task(sentence: str) -> tuple[str, str, str]:
  """Parses a goal sentence into (task type, object type, receptacle or lamp).

  Raises:
    ValueError: if the sentence matches none of ALFWorld's templates.
  """
  for task_type, pattern in _TASKS:
    match = pattern.fullmatch(sentence.strip().rstrip('.'))
    if match:
      return task_type, match[1], match[2]
  raise ValueError(
    f'task {sentence!r}: not in the form of ALFWorld; must match one of its '
    'sentence templates'
  )


def _type_of(name: str) -> str:
  """Returns the type in a display name: 'mug' of 'mug 2'."""
  return name.rsplit(' ', 1)[0]


def _sort_key(name: str) -> tuple[str, int]:
  """Returns a key that sorts 'mug 2' before 'mug 10'."""
  type_name, number = name.rsplit(' ', 1)
  return type_name, int(number)


class Explorer:
  """An expert that only sees the texts of the game, and remembers them.

  It searches for the goal object one receptacle after another and opens closed
  ones. It takes every useful action as soon as it is admissible. Its choices
  thus follow, wherever possible, from the task, the admissible commands and the
  last turns, so a policy can imitate them from its prompt.

  Its memory is updated from the texts, not from the commands it returned, so
  the caller may play other commands in between.
  """

  def __init__(
    self, task: str, rng: np.random.Generator, *, order: str = 'random'
  ):
    """Starts an episode.

    Args:
      task: the goal sentence.
      rng: draws the next receptacle to search.
      order: order of the search. 'random': uniform over the receptacles not yet
        searched; 'likely': those first that most often contain the goal object;
        'sweep': the next one in the order of the admissible commands.

    Raises:
      ValueError: if the task has an unknown form or the order is unknown.
    """
    if order not in ORDERS:
      raise ValueError(f'order={order}: must be one of {", ".join(ORDERS)}')
    self._task_type, self._object_type, self._goal = read_task(task)
    self._verb, _, tool = _TREATMENTS.get(self._task_type, ('', '', ''))
    self._tool = tool.lower()
    self._rng = rng
    self._order = order
    self._receptacles: set[str] = set()
    self._visited: set[str] = set()
    # Receptacles whose contents were seen.
    self._searched: set[str] = set()
    # Object -> the receptacle that it is in.
    self._known_objects: dict[str, str] = {}
    self._treated: set[str] = set()
    self._held: str | None = None
    # Receptacle that the held object was taken from.
    self._origin = ''

  def act(self, feedback: str, admissible: Sequence[str]) -> tuple[str, str]:
    """Returns (thought, command) for the engine's latest text.

    Args:
      feedback: the observation text.
      admissible: the admissible commands.
    """
    self._commands = sorted(admissible)
    self._update_memory(feedback)
    if self._held is None:
      return self._find_object()
    if _type_of(self._held) != self._object_type:
      return self._put_down()
    if self._task_type == 'look_at_obj_in_light':
      return self._look()
    if self._verb and self._held not in self._treated:
      return self._treat()
    return self._place()

  def _update_memory(self, feedback: str) -> None:
    for name, receptacle in _TAKEN_TEXT.findall(feedback):
      self._held, self._origin = name, receptacle
      self._known_objects.pop(name, None)
    for name, receptacle in _PUT_TEXT.findall(feedback):
      self._held = None
      self._known_objects[name] = receptacle
    for verb, name in _TREATED_TEXT.findall(feedback):
      if verb == self._verb:
        self._treated.add(name)
      elif 'clean' not in (verb, self._verb):
        # Heating undoes cooling, and the reverse.
        self._treated.discard(name)
    for on, inside, names in _CONTENTS_TEXT.findall(feedback):
      self._set_contents(on or inside, re.findall(r'\ba (\w+ \d+)', names))
    for receptacles in _FACING_TEXT.findall(feedback):
      self._receptacles.update(re.findall(r'\w+ \d+', receptacles))
    self._read_commands()

  def _read_commands(self) -> None:
    self._exits = [c[6:] for c in self._commands if c.startswith('go to ')]
    self._receptacles.update(self._exits)
    self._here = [
      receptacle
      for receptacle in sorted(self._receptacles, key=_sort_key)
      if f'examine {receptacle}' in self._commands
    ]
    self._visited.update(self._here)
    self._takes = [
      m.groups() for m in map(_TAKE_COMMAND.match, self._commands) if m
    ]
    self._lamps = [
      c[4:] for c in self._commands if c.startswith(f'use {self._goal} ')
    ]
    for lamp in self._lamps:
      self._known_objects[lamp] = self._here[0]
    if self._held is None:
      for receptacle in self._here:
        if f'open {receptacle}' not in self._commands:
          contents = [name for name, at in self._takes if at == receptacle]
          self._set_contents(receptacle, contents + self._lamps)

  def _set_contents(self, receptacle: str, names: list[str]) -> None:
    """Records the contents of a receptacle; forgets removed objects."""
    self._searched.add(receptacle)
    for name, at in list(self._known_objects.items()):
      if at == receptacle and name not in names:
        del self._known_objects[name]
    self._known_objects.update(
      (name, receptacle) for name in names if name not in self._lamps
    )

  def _receptacles_with(self, object_type: str) -> list[str]:
    """Returns the receptacles of all known objects of a type."""
    return [
      self._known_objects[name]
      for name in sorted(self._known_objects, key=_sort_key)
      if _type_of(name) == object_type
    ]

  def _target(self) -> str:
    """Returns the goal receptacle to use.

    If two objects are needed, it is the one that contains most of them.
    """
    candidates = [r for r in self._receptacles if _type_of(r) == self._goal]
    holders = self._receptacles_with(self._object_type)
    if self._task_type != 'pick_two_obj_and_place':
      holders = []
    return min(candidates, key=lambda r: (-holders.count(r), _sort_key(r)))

  def _find_object(self) -> tuple[str, str]:
    wanted = self._object_type
    # An object in the target stays there if it needs no treatment.
    keeps = self._task_type in (
      'pick_and_place_simple',
      'pick_two_obj_and_place',
    )
    excluded = (self._target(),) if keeps else ()
    for name, receptacle in self._takes:
      if _type_of(name) == wanted and receptacle not in excluded:
        return (
          f'I see a {wanted}, so I take it.',
          f'take {name} from {receptacle}',
        )
    for receptacle in self._receptacles_with(wanted):
      if receptacle not in excluded:
        thought = f'I saw a {wanted}, so I go back to it.'
        return self._go_to(receptacle, thought)
    for receptacle in self._here:
      closed = f'open {receptacle}' in self._commands
      if closed and receptacle not in self._searched:
        return self._open(receptacle)
    return self._explore(wanted, self._searched)

  def _look(self) -> tuple[str, str]:
    if self._lamps:
      thought = f'I have the {self._object_type}, so I use the {self._goal}.'
      return thought, f'use {self._lamps[0]}'
    for receptacle in self._receptacles_with(self._goal):
      thought = f'I saw a {self._goal}, so I go back to it.'
      return thought, f'go to {receptacle}'
    return self._explore(self._goal, self._visited)

  def _treat(self) -> tuple[str, str]:
    for command in self._commands:
      if command.startswith(f'{self._verb} {self._held} with '):
        return (
          f'I have the {self._object_type}, so I {self._verb} it with the '
          f'{self._tool}.'
        ), command
    tools = [r for r in self._exits if _type_of(r) == self._tool]
    if not tools:
      return self._explore(self._tool, self._visited)
    return (
      f'I have the {self._object_type}, so I go to the {self._tool}.',
      f'go to {min(tools, key=_sort_key)}',
    )

  def _place(self) -> tuple[str, str]:
    target = self._target()
    # Two objects must go into the same receptacle.
    same = self._task_type == 'pick_two_obj_and_place'
    candidates = [
      receptacle
      for receptacle in (target, *self._here)
      if _type_of(receptacle) == self._goal
      and (receptacle == target or not same)
    ]
    put_commands = self._put_commands()
    for receptacle in candidates:
      if receptacle in put_commands:
        return f'Now I put it in the {self._goal}.', put_commands[receptacle]
    thought = f'I have the {self._object_type}, so I go to the {self._goal}.'
    if self._verb:
      quality = _QUALITIES[self._verb]
      thought = (
        f'The {self._object_type} is {quality}, so I go to the {self._goal}.'
      )
    here = [receptacle for receptacle in candidates if receptacle in self._here]
    return self._go_to((here or [target])[0], thought)

  def _put_commands(self) -> dict[str, str]:
    """Returns receptacle -> admissible command that puts the held object."""
    matches = map(_PUT_COMMAND.match, self._commands)
    return {m[2]: m[0] for m in matches if m and m[1] == self._held}

  def _put_down(self) -> tuple[str, str]:
    put_commands = self._put_commands()
    thought = f'I do not need the {_type_of(self._held)}, so I put it down.'
    if put_commands:
      receptacle = (
        self._origin if self._origin in put_commands else min(put_commands)
      )
      return thought, put_commands[receptacle]
    return self._go_to(self._origin, thought)

  def _go_to(self, receptacle: str, thought: str) -> tuple[str, str]:
    if f'open {receptacle}' in self._commands:
      return self._open(receptacle)
    if receptacle in self._exits:
      return thought, f'go to {receptacle}'
    return self._explore(self._object_type, self._searched)

  def _open(self, receptacle: str) -> tuple[str, str]:
    thought = f'The {_type_of(receptacle)} is closed, so I open it.'
    return thought, f'open {receptacle}'

  def _explore(self, wanted: str, explored: set[str]) -> tuple[str, str]:
    """Visits an unexplored receptacle to look for an object or appliance.

    Args:
      wanted: type of the object or appliance.
      explored: receptacles to skip; cleared if none is left.
    """
    receptacles = [r for r in self._exits if r not in explored]
    if not receptacles:
      # The caller's commands moved the object: search everywhere again.
      explored.clear()
      receptacles = self._exits
    if self._order == 'likely':
      capacities = _CAPACITIES.get(wanted, {})
      best = max(capacities.get(_type_of(r), 0.0) for r in receptacles)
      receptacles = [
        r for r in receptacles if capacities.get(_type_of(r), 0.0) == best
      ]
    if self._order == 'sweep':
      current = max(self._here, default='')
      receptacle = min(receptacles, key=lambda r: (r <= current, r))
    else:
      receptacle = receptacles[self._rng.integers(len(receptacles))]
    return f'I need to find a {wanted}.', f'go to {receptacle}'
