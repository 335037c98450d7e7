"""Two experts: one knows the world, one only reads what a player reads.

`plan` turns a `World` into a shortest list of winning commands. `Explorer`
turns observation text and admissible commands into a thought and a command,
one turn at a time; it is what small policies are warmed up on.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from envs.alfworld import facts, layout, world

ORDERS = ('random', 'likely', 'sweep')

# Task type: the verb that treats the object, the flag it needs, the tool.
_TREATMENTS = {
  'pick_clean_then_place_in_recep': ('clean', 'cleanable', 'SinkBasin'),
  'pick_heat_then_place_in_recep': ('heat', 'heatable', 'Microwave'),
  'pick_cool_then_place_in_recep': ('cool', 'coolable', 'Fridge'),
}


def plan(game: world.World) -> list[str]:
  """Returns a shortest sequence of commands that wins the game.

  A hand holds one thing, opened stays open, and every place is one walk from
  every other. So a shortest solution only takes, treats and puts what the goal
  names, walks when the next act is elsewhere and opens what is closed; what
  is left to choose is which things, tools and places. All are tried.

  Args:
    game: the game; its goal may hold at the start.

  Returns:
    The commands; empty if the goal holds at the start.

  Raises:
    ValueError: if no sequence wins.
  """
  return min(_Planner(game).plans(), key=len)


# An act: command without names, thing, receptacle where it is done, and
# whether that has to be open.
_Act = tuple[str, world.Object, world.Receptacle, bool]


class _Planner:
  """All sequences of acts that may be shortest, spelt as commands."""

  def __init__(self, game: world.World):
    self._game = game
    things = (*game.receptacles, *game.objects)
    self._names = layout.display_names(thing.id for thing in things)
    self._by_id = {r.id: r for r in game.receptacles if r.location}
    self._targets = [
      r for r in self._by_id.values() if r.type == game.goal.receptacle_type
    ]
    self._objects = [o for o in game.objects if o.type == game.goal.object_type]

  def plans(self) -> Iterator[list[str]]:
    """Yields at least one plan, a shortest one among them."""
    goal = self._game.goal
    if goal.task_type == 'look_at_obj_in_light':
      found = self._look()
    elif goal.task_type == 'pick_two_obj_and_place':
      found = self._place(2)
    elif goal.task_type == 'pick_and_place_simple':
      found = self._place(1)
    else:
      found = self._treat(*_TREATMENTS[goal.task_type])
    plans = [self._spell(acts) for acts in found]
    if not plans:
      raise ValueError(f'{self._game.name}: the goal cannot be reached')
    yield from plans

  def _places(self, thing: world.Object) -> list[world.Receptacle]:
    ids = (thing.receptacle, *thing.also_in)
    return [self._by_id[i] for i in ids if i in self._by_id]

  def _takes(self, thing: world.Object) -> Iterator[_Act]:
    if 'pickupable' in thing.flags:
      for place in self._places(thing):
        yield 'take {} from {}', thing, place, True

  def _put(self, thing: world.Object, place: world.Receptacle) -> list[_Act]:
    return [('move {} to {}', thing, place, True)]

  def _fits(self, thing: world.Object) -> bool:
    pair = (self._game.goal.receptacle_type, thing.type)
    return pair in self._game.can_contain

  def _look(self) -> Iterator[list[_Act]]:
    lamps = [
      (lamp, place)
      for lamp in self._game.objects
      if lamp.type == self._game.goal.receptacle_type
      and 'toggleable' in lamp.flags
      for place in self._places(lamp)
    ]
    for thing, (lamp, place) in itertools.product(self._objects, lamps):
      for take in self._takes(thing):
        # A switch works through a closed door, and its touch is remembered.
        use = ('use {}', lamp, place, False)
        yield [take, use]

  def _place(self, number: int) -> Iterator[list[_Act]]:
    for target in self._targets:
      inside = [o for o in self._objects if target in self._places(o)]
      outside = [o for o in self._objects if o not in inside]
      missing = max(0, number - len(inside))
      if missing > len(outside) or missing and not self._fits(outside[0]):
        continue
      for chosen in itertools.permutations(outside, missing):
        for takes in itertools.product(*map(self._takes, chosen)):
          acts: list[_Act] = []
          for take in takes:
            acts += [take, *self._put(take[1], target)]
          yield acts

  def _treat(
    self, verb: str, flag: str, tool_type: str
  ) -> Iterator[list[_Act]]:
    tools = [r for r in self._by_id.values() if r.type == tool_type]
    for thing, tool in itertools.product(self._objects, tools):
      if flag not in thing.flags:
        continue
      for take in self._takes(thing):
        acts = [take, (f'{verb} {{}} with {{}}', thing, tool, False)]
        # A thing that lies in two receptacles leaves only one when taken.
        rest = [r for r in self._places(thing) if r is not take[2]]
        if any(r in self._targets for r in rest):
          yield acts
        elif self._fits(thing):
          for target in self._targets:
            yield [*acts, *self._put(thing, target)]

  def _spell(self, acts: list[_Act]) -> list[str]:
    location, opened, commands = self._game.start, set(), []
    for command, thing, place, through in acts:
      name = self._names[place.id]
      if place.location != location:
        commands.append(f'go to {name}')
        location = place.location
      if through and place.openable and place.id not in opened:
        commands.append(f'open {name}')
        opened.add(place.id)
      commands.append(command.format(self._names[thing.id], name))
    return commands


_TASKS = tuple(
  (task_type, re.compile(template.rstrip('.').replace('{}', r'(\w+)')))
  for task_type, templates in facts.TEMPLATES.items()
  for template in templates
)
_QUALITIES = {'clean': 'clean', 'heat': 'hot', 'cool': 'cool'}
_TOOK = re.compile(r'You pick up the (\w+ \d+) from the (\w+ \d+)\.')
_PUT = re.compile(r'You (?:move|put) the (\w+ \d+) (?:to|in/on) the (\w+ \d+)')
_TREATED = re.compile(r'You (clean|heat|cool) the (\w+ \d+) using')
_SHOWN = re.compile(
  r'(?:On the (\w+ \d+)|The (\w+ \d+) is open\. In it), you see ([^.]*)\.'
)
_FACING = re.compile(r'You are facing the ([^.]*)\.')
_TAKE = re.compile(r'take (\w+ \d+) from (\w+ \d+)')
_DROP = re.compile(r'(?:move|put) (\w+ \d+) (?:to|in/on) (\w+ \d+)')
_LIKELY = {
  kind.lower(): {
    place.lower(): facts.ROOMINESS.get(place, 1.0) for place in places
  }
  for kind, places in {**facts.PLACES, 'DeskLamp': facts.LAMP_PLACES}.items()
}


def read_task(sentence: str) -> tuple[str, str, str]:
  """Returns (task type, thing, place or lamp) of a goal sentence.

  Raises:
    ValueError: if no template of ALFWorld makes the sentence.
  """
  for task_type, pattern in _TASKS:
    match = pattern.fullmatch(sentence.strip().rstrip('.'))
    if match:
      return task_type, match[1], match[2]
  raise ValueError(f'task {sentence!r}: not in the form of ALFWorld')


def _kind(name: str) -> str:
  return name.rsplit(' ', 1)[0]


def _by_number(name: str) -> tuple[str, int]:
  kind, number = name.rsplit(' ', 1)
  return kind, int(number)


class Explorer:
  """An expert that sees what a player sees and remembers it.

  It looks for the thing place by place, opening what is closed, and does at
  once what can be done, so that its choice follows from the task, what is
  admissible and the last turns wherever that is possible. Others may play
  turns in between: it goes by what it reads, not by what it said.
  """

  def __init__(
    self, task: str, rng: np.random.Generator, *, order: str = 'random'
  ):
    """Starts an episode.

    Args:
      task: the goal sentence.
      rng: draws the next place to look at.
      order: 'random', uniform over the places not yet looked at; 'likely',
        those first that tend to hold the thing; 'sweep', the next one in the
        order of the admissible commands.

    Raises:
      ValueError: if the task or the order is unknown.
    """
    if order not in ORDERS:
      raise ValueError(f'order={order}: must be one of {", ".join(ORDERS)}')
    self._type, self._thing, self._goal = read_task(task)
    self._verb, _, tool = _TREATMENTS.get(self._type, ('', '', ''))
    self._tool = tool.lower()
    self._rng = rng
    self._order = order
    self._receptacles: set[str] = set()
    self._visited: set[str] = set()
    self._seen: set[str] = set()
    self._where: dict[str, str] = {}
    self._treated: set[str] = set()
    self._held: str | None = None
    self._origin = ''

  def act(self, feedback: str, admissible: Sequence[str]) -> tuple[str, str]:
    """Returns (thought, command) for what the engine last said."""
    self._commands = sorted(admissible)
    self._read(feedback)
    if self._held is None:
      return self._seek()
    if _kind(self._held) != self._thing:
      return self._drop()
    if self._type == 'look_at_obj_in_light':
      return self._look()
    if self._verb and self._held not in self._treated:
      return self._treat()
    return self._place()

  def _read(self, feedback: str) -> None:
    for thing, place in _TOOK.findall(feedback):
      self._held, self._origin = thing, place
      self._where.pop(thing, None)
    for thing, place in _PUT.findall(feedback):
      self._held = None
      self._where[thing] = place
    for verb, thing in _TREATED.findall(feedback):
      if verb == self._verb:
        self._treated.add(thing)
      elif 'clean' not in (verb, self._verb):
        self._treated.discard(thing)
    for on, within, things in _SHOWN.findall(feedback):
      self._show(on or within, re.findall(r'\ba (\w+ \d+)', things))
    for places in _FACING.findall(feedback):
      self._receptacles.update(re.findall(r'\w+ \d+', places))
    self._read_commands()

  def _read_commands(self) -> None:
    self._exits = [c[6:] for c in self._commands if c.startswith('go to ')]
    self._receptacles.update(self._exits)
    self._here = [
      place
      for place in sorted(self._receptacles, key=_by_number)
      if f'examine {place}' in self._commands
    ]
    self._visited.update(self._here)
    self._takes = [m.groups() for m in map(_TAKE.match, self._commands) if m]
    self._lamps = [
      c[4:] for c in self._commands if c.startswith(f'use {self._goal} ')
    ]
    for lamp in self._lamps:
      self._where[lamp] = self._here[0]
    if self._held is None:
      for place in self._here:
        if f'open {place}' not in self._commands:
          held = [thing for thing, at in self._takes if at == place]
          self._show(place, held + self._lamps)

  def _show(self, place: str, things: list[str]) -> None:
    self._seen.add(place)
    for thing, at in list(self._where.items()):
      if at == place and thing not in things:
        del self._where[thing]
    self._where.update((t, place) for t in things if t not in self._lamps)

  def _known(self, kind: str) -> list[str]:
    return [
      self._where[thing]
      for thing in sorted(self._where, key=_by_number)
      if _kind(thing) == kind
    ]

  def _target(self) -> str:
    """Returns the receptacle to bring things to: where most of them are."""
    places = [p for p in self._receptacles if _kind(p) == self._goal]
    there = self._known(self._thing)
    if self._type != 'pick_two_obj_and_place':
      there = []
    return min(places, key=lambda p: (-there.count(p), _by_number(p)))

  def _seek(self) -> tuple[str, str]:
    thing = self._thing
    stays = self._type in ('pick_and_place_simple', 'pick_two_obj_and_place')
    done = (self._target(),) if stays else ()
    for name, place in self._takes:
      if _kind(name) == thing and place not in done:
        return f'I see a {thing}, so I take it.', f'take {name} from {place}'
    for place in self._known(thing):
      if place not in done:
        return self._reach(place, f'I saw a {thing}, so I go back to it.')
    for place in self._here:
      if f'open {place}' in self._commands and place not in self._seen:
        return self._open(place)
    return self._explore(thing, self._seen)

  def _look(self) -> tuple[str, str]:
    if self._lamps:
      thought = f'I have the {self._thing}, so I use the {self._goal}.'
      return thought, f'use {self._lamps[0]}'
    for place in self._known(self._goal):
      thought = f'I saw a {self._goal}, so I go back to it.'
      return thought, f'go to {place}'
    return self._explore(self._goal, self._visited)

  def _treat(self) -> tuple[str, str]:
    for command in self._commands:
      if command.startswith(f'{self._verb} {self._held} with '):
        return (
          f'I have the {self._thing}, so I {self._verb} it with the '
          f'{self._tool}.'
        ), command
    tools = [p for p in self._exits if _kind(p) == self._tool]
    if not tools:
      return self._explore(self._tool, self._visited)
    return (
      f'I have the {self._thing}, so I go to the {self._tool}.',
      f'go to {min(tools, key=_by_number)}',
    )

  def _place(self) -> tuple[str, str]:
    target = self._target()
    two = self._type == 'pick_two_obj_and_place'
    fitting = [
      place
      for place in (target, *self._here)
      if _kind(place) == self._goal and (place == target or not two)
    ]
    drops = self._drops()
    for place in fitting:
      if place in drops:
        return f'Now I put it in the {self._goal}.', drops[place]
    thought = f'I have the {self._thing}, so I go to the {self._goal}.'
    if self._verb:
      quality = _QUALITIES[self._verb]
      thought = f'The {self._thing} is {quality}, so I go to the {self._goal}.'
    here = [place for place in fitting if place in self._here]
    return self._reach((here or [target])[0], thought)

  def _drops(self) -> dict[str, str]:
    matches = map(_DROP.match, self._commands)
    return {m[2]: m[0] for m in matches if m and m[1] == self._held}

  def _drop(self) -> tuple[str, str]:
    drops = self._drops()
    thought = f'I do not need the {_kind(self._held)}, so I put it down.'
    if drops:
      place = self._origin if self._origin in drops else min(drops)
      return thought, drops[place]
    return self._reach(self._origin, thought)

  def _reach(self, place: str, thought: str) -> tuple[str, str]:
    if f'open {place}' in self._commands:
      return self._open(place)
    if place in self._exits:
      return thought, f'go to {place}'
    return self._explore(self._thing, self._seen)

  def _open(self, place: str) -> tuple[str, str]:
    return f'The {_kind(place)} is closed, so I open it.', f'open {place}'

  def _explore(self, kind: str, known: set[str]) -> tuple[str, str]:
    places = [place for place in self._exits if place not in known]
    if not places:
      # Something was moved behind our back: look everywhere again.
      known.clear()
      places = self._exits
    if self._order == 'likely':
      likely = _LIKELY.get(kind, {})
      best = max(likely.get(_kind(place), 0.0) for place in places)
      places = [p for p in places if likely.get(_kind(p), 0.0) == best]
    if self._order == 'sweep':
      current = max(self._here, default='')
      place = min(places, key=lambda p: (p <= current, p))
    else:
      place = places[self._rng.integers(len(places))]
    return f'I need to find a {kind}.', f'go to {place}'
