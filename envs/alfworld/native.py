"""A fast re-implementation of ALFWorld's thirteen actions and their texts.

The engine plays a `World`: it takes commands and returns `State`s. Its texts
equal those of the TextWorld engine byte for byte (`textworld.py`; tests play
both engines side by side). It is a few hundred times as fast and needs none of
TextWorld's dependencies. It reads neither files nor PDDL.
"""

from collections.abc import Callable, Iterable

from envs.alfworld import layout as layout_lib
from envs.alfworld import world as world_lib

SPELLINGS = ('move', 'put')
display_names = layout_lib.display_names

_WELCOME = '-= Welcome to TextWorld, ALFRED! =-\n\n'
_IN_THE_MIDDLE = (
  'You are in the middle of a room. Looking quickly around you, you see '
)
_HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
# Type of the appliance -> (verb, flag that the object must have).
_TREATMENTS = {
  'SinkBasin': ('clean', 'cleanable'),
  'Microwave': ('heat', 'heatable'),
  'Fridge': ('cool', 'coolable'),
}
_QUALITIES = ('isClean', 'isHot', 'isCool', 'isSliced', 'isToggled')

_Commands = dict[str, tuple[Callable[..., str], tuple[int, ...]]]


class NativeEngine:
  """Plays one world at a time; the same interface as `TextWorldEngine`."""

  def __init__(self, *, spelling: str = 'move') -> None:
    """Selects the version of ALFWorld's grammar.

    Args:
      spelling: 'move' for the grammar of alfworld 0.4 (`move X to Y`, `help`);
        'put' for the grammar before it, which the papers' prompts show
        (`put X in/on Y`, no `help`; the agent arrives at 'loc 3' instead of at
        the receptacle).

    Raises:
      ValueError: if the spelling is unknown.
    """
    if spelling not in SPELLINGS:
      raise ValueError(
        f'spelling={spelling}: unknown spelling; must be one of '
        f'{", ".join(SPELLINGS)}'
      )
    self._moves = spelling == 'move'
    self._layout: layout_lib.Layout | None = None

  def close(self) -> None:
    """Does nothing; there is nothing to free."""

  def prepare(self, world: world_lib.World) -> None:
    """Does nothing; `load` takes a fraction of a millisecond."""

  def load(self, world: world_lib.World) -> None:
    """Loads a world; `reset` then starts it."""
    self._layout = layout_lib.Layout(world)
    self._go_to_at: dict[str, _Commands] = {}

  def reset(self) -> world_lib.State:
    """Restores the initial state and returns it, with the opening text."""
    layout = self._layout
    self._location = layout.start
    self._held: int | None = None
    self._opened: set[int] = set()
    self._contents = [set(contents) for contents in layout.contents]
    self._removed = [set() for _ in layout.contents]
    self._placed = {at: set(os) for at, os in layout.placed.items()}
    self._objects_with = {q: set(layout.flagged[q]) for q in _QUALITIES}
    if layout.receptacles_at.get(self._location):
      scene = self._look()
    else:
      scene = f'{_IN_THE_MIDDLE}{_list(layout.reachable_names)}.'
    return self._state(f'{_WELCOME}{scene}\n\nYour task is to: {layout.task}.')

  def step(self, command: str) -> world_lib.State:
    """Executes a command; an inadmissible command changes nothing.

    As in ALFWorld, a won game can be continued. `won` becomes False again if
    the goal is undone.
    """
    action = self._commands.get(command.strip())
    if action is None:
      return self._state('Nothing happens.')
    function, arguments = action
    return self._state(function(*arguments))

  def _state(self, feedback: str) -> world_lib.State:
    self._commands = self._admissible_commands()
    won = self._won()
    return world_lib.State(
      feedback=feedback,
      admissible=tuple(sorted(self._commands)),
      won=won,
      score=int(won),
      done=won,
    )

  def _won(self) -> bool:
    layout = self._layout
    targets = layout.goal_objects
    if layout.goal.task_type == 'look_at_obj_in_light':
      return self._held in targets and any(
        layout.goal_lights & self._objects_with['isToggled'] & self._contents[r]
        for r in layout.receptacles_at.get(self._location, ())
      )
    if layout.goal_quality:
      targets = targets & self._objects_with[layout.goal_quality]
    needed = 2 if layout.goal.task_type == 'pick_two_obj_and_place' else 1
    return any(
      len(targets & self._contents[r]) >= needed
      for r in layout.goal_receptacles
    )

  def _admissible_commands(self) -> _Commands:
    layout, held = self._layout, self._held
    commands = self._go_to_commands().copy()
    for r in layout.receptacles_at.get(self._location, ()):
      name = layout.receptacle_names[r]
      commands[f'examine {name}'] = (self._examine_receptacle, (r,))
      accessible = True
      if r in layout.openable:
        accessible = r in self._opened
        if accessible:
          commands[f'close {name}'] = (self._close, (r,))
        else:
          commands[f'open {name}'] = (self._open, (r,))
      self._add_content_commands(commands, r, accessible)
      if held is not None:
        self._add_held_commands(commands, r, accessible)
    if held is not None:
      # Only the held object can be examined. A superfluous comma in the
      # domain's precondition for other objects names a type without instances.
      commands[f'examine {layout.names[held]}'] = (self._examine, (held,))
      if layout.types[held] in ('Knife', 'ButterKnife'):
        objects_here = self._placed.get(self._location, set())
        for o in layout.flagged['sliceable'] & objects_here:
          command = f'slice {layout.names[o]} with {layout.names[held]}'
          commands[command] = (self._slice, (o, held))
    return commands

  def _go_to_commands(self) -> _Commands:
    if self._location not in self._go_to_at:
      layout = self._layout
      commands: _Commands = {
        'look': (self._look, ()),
        'inventory': (self._inventory, ()),
      }
      if self._moves:
        commands['help'] = (self._help, ())
      for r, name in enumerate(layout.receptacle_names):
        if layout.location_of[r] not in ('', self._location):
          commands[f'go to {name}'] = (self._go_to, (r,))
      self._go_to_at[self._location] = commands
    return self._go_to_at[self._location]

  def _add_content_commands(
    self, commands: _Commands, r: int, accessible: bool
  ) -> None:
    layout = self._layout
    for o in self._contents[r]:
      name = layout.names[o]
      if o in layout.flagged['toggleable']:
        # As in ALFWorld's domain, a switch also works in a closed receptacle.
        commands[f'use {name}'] = (self._use, (o,))
      if accessible and self._held is None:
        if o in layout.flagged['pickupable']:
          command = f'take {name} from {layout.receptacle_names[r]}'
          commands[command] = (self._take, (o, r))

  def _add_held_commands(
    self, commands: _Commands, r: int, accessible: bool
  ) -> None:
    layout, held = self._layout, self._held
    name, receptacle = layout.names[held], layout.receptacle_names[r]
    receptacle_type = layout.receptacle_types[r]
    pair = (receptacle_type, layout.types[held])
    if accessible and pair in layout.can_contain:
      if self._moves:
        commands[f'move {name} to {receptacle}'] = (self._put, (held, r))
      else:
        commands[f'put {name} in/on {receptacle}'] = (self._put, (held, r))
    if receptacle_type in _TREATMENTS:
      verb, flag = _TREATMENTS[receptacle_type]
      if held in layout.flagged[flag]:
        commands[f'{verb} {name} with {receptacle}'] = (self._treat, (held, r))

  # One method per action. Each changes the state and returns the text.

  def _help(self) -> str:
    return _HELP

  def _look(self) -> str:
    layout = self._layout
    here = layout.receptacles_at.get(self._location, ())
    if not here:
      # Only the opening text lists the room's receptacles.
      return f'{_IN_THE_MIDDLE}nothing.'
    facing = _join([layout.receptacle_names[r] for r in here])
    # "Next to it" lists the objects at this location that were taken out of a
    # receptacle here. Like ALFWorld, it repeats an object for each receptacle.
    placed = self._placed.get(self._location, set())
    removed = sorted(o for r in here for o in self._removed[r] & placed)
    names = _list(layout.names[o] for o in removed)
    return f'You are facing the {facing}. Next to it, you see {names}.'

  def _inventory(self) -> str:
    if self._held is None:
      return 'You are not carrying anything.'
    return f'You are carrying: a {self._layout.names[self._held]}.'

  def _go_to(self, r: int) -> str:
    self._location = self._layout.location_of[r]
    if self._moves:
      destination = self._layout.receptacle_names[r]
    else:
      destination = self._layout.location_names[self._location]
    return f'You arrive at {destination}. {self._examine_receptacle(r)}'

  def _examine_receptacle(self, r: int) -> str:
    layout = self._layout
    name = layout.receptacle_names[r]
    if r in layout.openable and r not in self._opened:
      return f'The {name} is closed.'
    contents = _list(layout.names[o] for o in sorted(self._contents[r]))
    if r in layout.openable:
      return f'The {name} is open. In it, you see {contents}.'
    return f'On the {name}, you see {contents}.'

  def _examine(self, o: int) -> str:
    layout = self._layout
    name = layout.names[o]
    if o in layout.flagged['isReceptacleObject']:
      inner = _list(layout.names[i] for i in layout.inner[o])
      return f'This is a normal {name}. In it, you see {inner}.'
    clean, hot, cool, sliced, toggled = (
      o in self._objects_with[q] for q in _QUALITIES
    )
    temperature = 'hot' if hot else 'cool' if cool else ''
    if temperature and clean:
      quality = f'{temperature} and clean'
    else:
      # ALFWorld calls an object cold if it is cool, not clean and not sliced.
      quality = temperature or ('clean' if clean else '')
      quality = 'cold' if quality == 'cool' and not sliced else quality
    if quality:
      return f'This is a {quality} {"sliced " if sliced else ""}{name}.'
    if o in layout.flagged['toggleable'] and toggled:
      return f'This {name} is on.'
    if o in layout.flagged['sliceable'] and sliced:
      return f'This is a sliced {name}.'
    return f"There's nothing special about {name}."

  def _open(self, r: int) -> str:
    self._opened.add(r)
    name = self._layout.receptacle_names[r]
    return f'You open the {name}. {self._examine_receptacle(r)}'

  def _close(self, r: int) -> str:
    self._opened.discard(r)
    return f'You close the {self._layout.receptacle_names[r]}.'

  def _take(self, o: int, r: int) -> str:
    layout = self._layout
    self._contents[r].discard(o)
    self._removed[r].add(o)
    self._placed.get(self._location, set()).discard(o)
    self._held = o
    receptacle = layout.receptacle_names[r]
    return f'You pick up the {layout.names[o]} from the {receptacle}.'

  def _put(self, o: int, r: int) -> str:
    name, receptacle = self._layout.names[o], self._layout.receptacle_names[r]
    self._contents[r].add(o)
    self._removed[r].discard(o)
    self._placed.setdefault(self._location, set()).add(o)
    self._held = None
    if self._moves:
      return f'You move the {name} to the {receptacle}.'
    return f'You put the {name} in/on the {receptacle}.'

  def _treat(self, o: int, r: int) -> str:
    verb, _ = _TREATMENTS[self._layout.receptacle_types[r]]
    if verb == 'clean':
      self._objects_with['isClean'].add(o)
    else:
      hot = verb == 'heat'
      gained, lost = ('isHot', 'isCool') if hot else ('isCool', 'isHot')
      self._objects_with[gained].add(o)
      self._objects_with[lost].discard(o)
    name, appliance = self._layout.names[o], self._layout.receptacle_names[r]
    return f'You {verb} the {name} using the {appliance}.'

  def _use(self, o: int) -> str:
    # ALFWorld never reports "off": its text tests whether the switch was ever
    # used, not whether the light is on.
    self._objects_with['isToggled'].add(o)
    return f'You turn on the {self._layout.names[o]}.'

  def _slice(self, o: int, knife: int) -> str:
    self._objects_with['isSliced'].add(o)
    names = self._layout.names
    return f'You sliced the {names[o]} with the {names[knife]}.'


def _join(names: list[str]) -> str:
  if len(names) < 2:
    return ''.join(names)
  return f'{", ".join(names[:-1])}, and {names[-1]}'


def _list(names: Iterable[str]) -> str:
  return _join([f'a {name}' for name in names]) or 'nothing'
