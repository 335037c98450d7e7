"""Converts `World` to and from ALFWorld's PDDL problems and game files.

The PDDL domain and the text grammar belong to ALFWorld. They are read from the
installed alfworld package when a game file is written; the package itself is
not imported.
"""

import importlib.util
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from envs.alfworld import world as world_lib

# Task type -> atoms of its goal; {o} and {r} are the types in World.goal. The
# same table is used to write goals and to recognise them.
_IN = '(objectType ?o {o}Type)(receptacleType ?r {r}Type)(inReceptacle ?o ?r)'
_GOALS = {
  'pick_and_place_simple': _IN,
  'look_at_obj_in_light': (
    '(objectType ?ot {r}Type)(toggleable ?ot)(isToggled ?ot)'
    '(receptacleAtLocation ?r ?l)(atLocation ?a ?l)(inReceptacle ?ot ?r)'
    '(objectType ?o {o}Type)(holds ?a ?o)'
  ),
  'pick_clean_then_place_in_recep': _IN + '(cleanable ?o)(isClean ?o)',
  'pick_heat_then_place_in_recep': _IN + '(heatable ?o)(isHot ?o)',
  'pick_cool_then_place_in_recep': _IN + '(coolable ?o)(isCool ?o)',
  'pick_two_obj_and_place': (
    '(objectType ?o1 {o}Type)(receptacleType ?r {r}Type)(inReceptacle ?o1 ?r)'
    '(not (= ?o1 ?o2))(objectType ?o2 {o}Type)(inReceptacle ?o2 ?r)'
  ),
}
_VARIABLE_TYPES = {'?r': 'receptacle', '?a': 'agent', '?l': 'location'}
# Types that ALFWorld's actions mention, so every problem must declare them.
_DOMAIN_OBJECT_TYPES = ('Knife', 'ButterKnife')
_DOMAIN_RECEPTACLE_TYPES = ('SinkBasin', 'Microwave', 'Fridge')
# Init facts that a World represents, in addition to the flags of its objects.
_FACTS = (
  *('receptacleType', 'receptacleAtLocation', 'openable', 'canContain'),
  *('objectType', 'objectAtLocation', 'inReceptacle', 'inReceptacleObject'),
  'atLocation',
)
# Init facts that no precondition, goal or text of the domain depends on.
_UNUSED_FACTS = ('=', 'checked', 'examined', 'full', 'wasInReceptacle')
_GAME_KEYS = ('pddl_domain', 'grammar', 'pddl_problem')
_TASK_RULE = re.compile(r'Your task is to: (.*?)"\s*\}')

_Expression = Any  # a word, or a list of expressions


def to_problem(world: world_lib.World) -> str:
  """Returns the world as a PDDL problem of ALFWorld's domain.

  Only the object and receptacle types in use are declared. ALFWorld declares
  all types; no text depends on the difference.
  """
  object_types = {o.type for o in world.objects} - {''}
  object_types |= {o for _, o in world.can_contain} | {*_DOMAIN_OBJECT_TYPES}
  receptacle_types = {r.type for r in world.receptacles}
  receptacle_types |= {r for r, _ in world.can_contain}
  receptacle_types |= {*_DOMAIN_RECEPTACLE_TYPES}
  object_types.add(world.goal.object_type)
  in_light = world.goal.task_type == 'look_at_obj_in_light'
  goal_types = object_types if in_light else receptacle_types
  goal_types.add(world.goal.receptacle_type)
  declared = [('agent1', 'agent')]
  declared += [(f'{t}Type', 'otype') for t in sorted(object_types)]
  declared += [(f'{t}Type', 'rtype') for t in sorted(receptacle_types)]
  declared += [(o.id, 'object') for o in world.objects]
  declared += [(r.id, 'receptacle') for r in world.receptacles]
  declared += [(location, 'location') for location in world.locations]
  return '\n'.join(
    (
      f'(define (problem plan_{world.name.split("/")[-1]})',
      '(:domain alfred)',
      '(:objects',
      *(f'  {name} - {pddl_type}' for name, pddl_type in declared),
      ')',
      '(:init',
      *(f'  ({" ".join(fact)})' for fact in _facts(world)),
      ')',
      f'(:goal {_goal(world.goal)})',
      ')\n',
    )
  )


def _facts(world: world_lib.World) -> Iterator[tuple[str, ...]]:
  yield 'atLocation', 'agent1', world.start
  for r in world.receptacles:
    yield 'receptacleType', r.id, f'{r.type}Type'
    if r.location:
      yield 'receptacleAtLocation', r.id, r.location
    if r.openable:
      yield 'openable', r.id
  for o in world.objects:
    yield from _object_facts(o)
  for receptacle_type, object_type in sorted(world.can_contain):
    yield 'canContain', f'{receptacle_type}Type', f'{object_type}Type'


def _object_facts(o: world_lib.Object) -> Iterator[tuple[str, ...]]:
  if o.type:
    yield 'objectType', o.id, f'{o.type}Type'
  if o.location:
    yield 'objectAtLocation', o.id, o.location
  for receptacle in filter(None, (o.receptacle, *o.also_in)):
    yield 'inReceptacle', o.id, receptacle
  for outer in o.inside:
    yield 'inReceptacleObject', o.id, outer
  for flag in sorted(o.flags):
    yield flag, o.id


def _goal(goal: world_lib.Goal) -> str:
  body = _GOALS[goal.task_type].format(
    o=goal.object_type, r=goal.receptacle_type
  )
  variables = sorted(set(re.findall(r'\?\w+', body)))
  typed = ' '.join(
    f'{v} - {_VARIABLE_TYPES.get(v, "object")}' for v in variables
  )
  return f'(exists ({typed}) (and {body}))'


def from_problem(text: str, *, task: str, name: str) -> world_lib.World:
  """Returns the world that an ALFWorld problem describes.

  Args:
    text: the PDDL problem.
    task: the goal sentence, such as 'put a mug in desk.'
    name: name of the game, for error messages and folders.

  Raises:
    ValueError: if the text is not an ALFWorld problem, has several agents, or
      has a goal that is not one of the six task types.
  """
  sections = {s[0]: s[1:] for s in _parse(text)[1:] if isinstance(s, list)}
  missing = {':objects', ':init', ':goal'} - sections.keys()
  if missing:
    raise ValueError(
      f'{name}: the problem has no {", ".join(sorted(missing))} section'
    )
  declared = _parse_declarations(sections[':objects'])
  agents = [n for n, pddl_type in declared if pddl_type == 'agent']
  if len(agents) != 1:
    raise ValueError(f'{name}: {len(agents)} agents; must be 1')
  init = _Init(sections[':init'], name)
  receptacles = tuple(
    init.make_receptacle(r)
    for r, pddl_type in declared
    if pddl_type == 'receptacle' and r in init.mentioned
  )
  objects = tuple(
    init.make_object(o)
    for o, pddl_type in declared
    if pddl_type == 'object' and o in init.mentioned
  )
  init.check_facts({o.id for o in objects})
  world = world_lib.World(
    name=name,
    receptacles=receptacles,
    objects=objects,
    can_contain=frozenset(
      (_strip_suffix(r), _strip_suffix(o))
      for r, contained in init.facts.get('canContain', {}).items()
      for o in contained
    ),
    locations=tuple(n for n, pddl_type in declared if pddl_type == 'location'),
    start=init.get_one('atLocation', agents[0]),
    goal=_read_goal(sections[':goal'][0], name),
    task=task,
  )
  _check_places(world)
  return world


class _Init:
  """The facts of a problem's init section.

  Args:
    expressions: the facts.
    name: name of the game, for error messages.

  Attributes:
    facts: further arguments by predicate and first argument.
    mentioned: all arguments. ALFWorld also declares types as objects; no fact
      mentions those.
  """

  def __init__(self, expressions: list[_Expression], name: str):
    self._name = name
    self.facts: dict[str, dict[str, list[str]]] = {}
    for predicate, *arguments in expressions:
      if predicate not in _UNUSED_FACTS:
        by_key = self.facts.setdefault(predicate, {})
        values = by_key.setdefault(arguments[0], [])
        values += arguments[1:]
    self.mentioned = {key for by_key in self.facts.values() for key in by_key}
    self.mentioned |= {
      value
      for by_key in self.facts.values()
      for values in by_key.values()
      for value in values
    }
    self._unary = [
      p for p, by_key in self.facts.items() if not any(by_key.values())
    ]

  def get_one(
    self, predicate: str, key: str, default: str | None = None
  ) -> str:
    """Returns the only argument after `key`, or the default if it has none."""
    values = self.facts.get(predicate, {}).get(key, [])
    if len(values) > 1 or not values and default is None:
      raise ValueError(
        f'{self._name}: {len(values)} x {predicate} {key}; must be 1'
      )
    return values[0] if values else default

  def make_receptacle(self, r: str) -> world_lib.Receptacle:
    """Returns a receptacle of the world."""
    return world_lib.Receptacle(
      id=r,
      type=_strip_suffix(self.get_one('receptacleType', r)),
      location=self.get_one('receptacleAtLocation', r, ''),
      openable=r in self.facts.get('openable', {}),
    )

  def make_object(self, o: str) -> world_lib.Object:
    """Returns an object of the world."""
    holders = self.facts.get('inReceptacle', {}).get(o, [])
    return world_lib.Object(
      id=o,
      type=_strip_suffix(self.get_one('objectType', o, '')),
      location=self.get_one('objectAtLocation', o, ''),
      receptacle=holders[0] if holders else None,
      flags=frozenset(p for p in self._unary if o in self.facts[p]),
      also_in=tuple(holders[1:]),
      inside=tuple(self.facts.get('inReceptacleObject', {}).get(o, ())),
    )

  def check_facts(self, objects: set[str]) -> None:
    """Raises ValueError for a fact that a World cannot represent."""
    for predicate, by_key in self.facts.items():
      is_flag = predicate in self._unary and by_key.keys() <= objects
      if not is_flag and predicate not in _FACTS:
        raise ValueError(
          f'{self._name}: init fact {predicate} is not supported'
        )


def _check_places(world: world_lib.World) -> None:
  """Raises ValueError if something is in an unknown receptacle or object."""
  receptacles = {r.id for r in world.receptacles}
  objects = {o.id for o in world.objects}
  for o in world.objects:
    inside = {*filter(None, (o.receptacle, *o.also_in))} - receptacles
    if unknown := sorted(inside | set(o.inside) - objects):
      raise ValueError(
        f'{world.name}: {o.id} is in {unknown[0]}, which is not declared'
      )


def _read_goal(expression: _Expression, name: str) -> world_lib.Goal:
  atoms = frozenset(_atoms(expression))
  types = {a[1:-4] for a in re.findall(r' \w+Type', ' '.join(atoms))}
  for task_type in world_lib.TASK_TYPES:
    for o in sorted(types):
      for r in sorted(types):
        body = _GOALS[task_type].format(o=o, r=r)
        if atoms == frozenset(_atoms(_parse(f'(and {body})'))):
          return world_lib.Goal(task_type, o, r)
  raise ValueError(
    f'{name}: the goal is none of {", ".join(world_lib.TASK_TYPES)}: '
    f'{" ".join(sorted(atoms))}'
  )


def _atoms(expression: _Expression) -> Iterator[str]:
  """Yields the atoms of a (nested) conjunction as text."""
  head, *rest = expression
  if head == 'and':
    for part in rest:
      yield from _atoms(part)
  elif head == 'exists':
    yield from _atoms(rest[1])
  elif head == 'not':
    yield f'not {" ".join(rest[0])}'
  elif all(isinstance(part, str) for part in rest):
    yield ' '.join(expression)
  else:
    yield f'({head} ...)'


def _parse(text: str) -> list[_Expression]:
  stack: list[list[_Expression]] = [[]]
  for token in re.findall(r'[()]|[^\s()]+', re.sub(r';[^\n]*', '', text)):
    if token == '(':
      stack.append([])
    elif token == ')':
      if len(stack) == 1:
        raise ValueError('PDDL: one closing parenthesis too many')
      closed = stack.pop()
      stack[-1].append(closed)
    else:
      stack[-1].append(token)
  if len(stack) > 1 or not stack[0] or not isinstance(stack[0][0], list):
    raise ValueError('PDDL: parentheses do not match')
  return stack[0][0]


def _parse_declarations(tokens: list[_Expression]) -> list[tuple[str, str]]:
  """Returns pairs (name, PDDL type) of a typed list: `a b - type c - type`."""
  declared, pending = [], []
  words = iter(tokens)
  for word in words:
    if word == '-':
      pddl_type = next(words)
      declared += [(name, pddl_type) for name in pending]
      pending = []
    else:
      pending.append(word)
  return declared


def _strip_suffix(name: str) -> str:
  return name.removesuffix('Type')


def _read_package_file(name: str) -> str:
  # Not imported: importing alfworld creates a cache folder in the user's home.
  spec = importlib.util.find_spec('alfworld')
  if spec is None or not spec.submodule_search_locations:
    raise ImportError(
      "alfworld is not installed: run `pip install -e '.[alfworld]'`"
    )
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return (folder / 'data' / name).read_text()


def to_game(
  world: world_lib.World, *, walkthrough: list[str] | None = None
) -> dict[str, object]:
  """Returns the contents of the world's `game.tw-pddl` file as a dictionary.

  Args:
    world: the game.
    walkthrough: commands that solve the game; None if unknown.
  """
  sentence = json.dumps(world.task.removesuffix('.'), ensure_ascii=False)[1:-1]
  return {
    'pddl_domain': _read_package_file('alfred.pddl'),
    'grammar': _read_package_file('alfred.twl2').replace(
      'UNKNOWN GOAL', sentence
    ),
    'pddl_problem': to_problem(world),
    'solvable': True,
    'walkthrough': walkthrough,
  }


def load_game(path: str | pathlib.Path) -> dict[str, object]:
  """Loads a game file and checks the entries that engines need.

  Args:
    path: a `game.tw-pddl` file, or its folder.

  Raises:
    ValueError: in one line with the path, if the file cannot be read or is not
      a game.
  """
  path = _game_path(path)
  try:
    game = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise ValueError(f'{path}: not a readable game file: {error}') from error
  for key in _GAME_KEYS:
    if not isinstance(game, dict) or not isinstance(game.get(key), str):
      raise ValueError(
        f'{path}: not a game file: has no text {key!r}; must have '
        f'{", ".join(_GAME_KEYS)}'
      )
  if not _TASK_RULE.search(game['grammar']):
    raise ValueError(f'{path}: the grammar states no task')
  return game


def read_game(path: str | pathlib.Path) -> world_lib.World:
  """Returns the world of a game file; raises ValueError as `load_game` does."""
  path = _game_path(path)
  game = load_game(path)
  task = json.loads(f'"{_TASK_RULE.search(game["grammar"])[1]}"')
  name = f'{path.parent.parent.name}/{path.parent.name}'
  try:
    return from_problem(game['pddl_problem'], task=task, name=name)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  except (LookupError, RecursionError, TypeError) as error:
    raise ValueError(
      f'{path}: not an ALFWorld problem ({type(error).__name__}: {error})'
    ) from error


def spelling(game: dict[str, object]) -> str:
  """Returns the verb with which a game's grammar puts objects: move or put."""
  return 'move' if '"move {o} to {r}"' in game['grammar'] else 'put'


def _game_path(path: str | pathlib.Path) -> pathlib.Path:
  path = pathlib.Path(path)
  return path / 'game.tw-pddl' if path.is_dir() else path
