"""Reads and writes ALFWorld's PDDL problems and `game.tw-pddl` files.

`World` in, problem text out, and back. The domain and the text grammar are
not ours: they are read from the installed alfworld package when a game file
is asked for, without importing it. Knows no engine.
"""

import importlib.util
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from envs.alfworld import world as world_lib

# The goal of each task type as the set of its atoms; {o} and {r} stand for
# the types of World.goal. One table writes goals and recognises them.
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
# Types that the domain's actions name, so that every problem declares them.
_DOMAIN_OBJECT_TYPES = ('Knife', 'ButterKnife')
_DOMAIN_RECEPTACLE_TYPES = ('SinkBasin', 'Microwave', 'Fridge')
# Init facts of a World, besides the flags of its objects.
_FACTS = (
  *('receptacleType', 'receptacleAtLocation', 'openable', 'canContain'),
  *('objectType', 'objectAtLocation', 'inReceptacle', 'inReceptacleObject'),
  'atLocation',
)
# Init facts that no precondition, goal or text of the domain reads.
_IDLE_FACTS = ('=', 'checked', 'examined', 'full', 'wasInReceptacle')
_GAME_KEYS = ('pddl_domain', 'grammar', 'pddl_problem')
_TASK_RULE = re.compile(r'Your task is to: (.*?)"\s*\}')

_Expression = Any  # A word, or a list of expressions.


def to_problem(world: world_lib.World) -> str:
  """Returns the world as a PDDL problem of ALFWorld's domain.

  Of the object and receptacle classes only those present are declared, where
  ALFWorld lists all; no text depends on it.
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
      *(f'  {name} - {kind}' for name, kind in declared),
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
    name: name of the game, for messages and folders.

  Raises:
    ValueError: if the text is no such problem, has several agents, or its
      goal is not one of the six official ones.
  """
  sections = {s[0]: s[1:] for s in _parse(text)[1:] if isinstance(s, list)}
  missing = {':objects', ':init', ':goal'} - sections.keys()
  if missing:
    raise ValueError(f'{name}: the problem has no {", ".join(sorted(missing))}')
  declared = _declared(sections[':objects'])
  agents = [n for n, kind in declared if kind == 'agent']
  if len(agents) != 1:
    raise ValueError(f'{name}: {len(agents)} agents; must be 1')
  facts: dict[str, dict[str, list[str]]] = {}
  for predicate, *arguments in sections[':init']:
    if predicate not in _IDLE_FACTS:
      values = facts.setdefault(predicate, {}).setdefault(arguments[0], [])
      values += arguments[1:]

  def one(predicate: str, key: str, default: str | None = None) -> str:
    values = facts.get(predicate, {}).get(key, [])
    if len(values) > 1 or not values and default is None:
      raise ValueError(f'{name}: {len(values)} x {predicate} {key}; must be 1')
    return values[0] if values else default

  # ALFWorld declares classes as objects too; they are in no fact.
  named = {n for of in facts.values() for n in of}
  named |= {n for of in facts.values() for ns in of.values() for n in ns}
  receptacles = tuple(
    world_lib.Receptacle(
      id=r,
      type=_untyped(one('receptacleType', r)),
      location=one('receptacleAtLocation', r, ''),
      openable=r in facts.get('openable', {}),
    )
    for r, kind in declared
    if kind == 'receptacle' and r in named
  )
  unary = [p for p, of in facts.items() if not any(of.values())]
  objects = []
  for o, kind in declared:
    if kind == 'object' and o in named:
      within = facts.get('inReceptacle', {}).get(o, [])
      objects.append(
        world_lib.Object(
          id=o,
          type=_untyped(one('objectType', o, '')),
          location=one('objectAtLocation', o, ''),
          receptacle=within[0] if within else None,
          flags=frozenset(p for p in unary if o in facts[p]),
          also_in=tuple(within[1:]),
          inside=tuple(facts.get('inReceptacleObject', {}).get(o, ())),
        )
      )
  _check_facts(facts, unary, {o.id for o in objects}, name)
  return world_lib.World(
    name=name,
    receptacles=receptacles,
    objects=tuple(objects),
    can_contain=frozenset(
      (_untyped(r), _untyped(o))
      for r, contained in facts.get('canContain', {}).items()
      for o in contained
    ),
    locations=tuple(n for n, kind in declared if kind == 'location'),
    start=one('atLocation', agents[0]),
    goal=_read_goal(sections[':goal'][0], name),
    task=task,
  )


def _check_facts(
  facts: dict[str, dict[str, list[str]]],
  unary: list[str],
  objects: set[str],
  name: str,
) -> None:
  """Refuses what a World cannot express, rather than dropping it."""
  for predicate, of in facts.items():
    flag = predicate in unary and of.keys() <= objects
    if not flag and predicate not in _FACTS:
      raise ValueError(f'{name}: init fact {predicate} is not supported')


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
  """Yields the atoms of a conjunction, whatever its nesting, as text."""
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
        raise ValueError('PDDL: a closing parenthesis too many')
      closed = stack.pop()
      stack[-1].append(closed)
    else:
      stack[-1].append(token)
  if len(stack) > 1 or not stack[0] or not isinstance(stack[0][0], list):
    raise ValueError('PDDL: parentheses do not match')
  return stack[0][0]


def _declared(tokens: list[_Expression]) -> list[tuple[str, str]]:
  declared, pending = [], []
  words = iter(tokens)
  for word in words:
    if word == '-':
      kind = next(words)
      declared += [(name, kind) for name in pending]
      pending = []
    else:
      pending.append(word)
  return declared


def _untyped(name: str) -> str:
  return name.removesuffix('Type')


def _package_file(name: str) -> str:
  # Importing alfworld creates a cache folder in the home directory.
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
  """Returns the world as the dictionary that a `game.tw-pddl` file holds."""
  sentence = json.dumps(world.task.removesuffix('.'), ensure_ascii=False)[1:-1]
  return {
    'pddl_domain': _package_file('alfred.pddl'),
    'grammar': _package_file('alfred.twl2').replace('UNKNOWN GOAL', sentence),
    'pddl_problem': to_problem(world),
    'solvable': True,
    'walkthrough': walkthrough,
  }


def load_game(path: str | pathlib.Path) -> dict[str, object]:
  """Returns the dictionary of a game file, checked for what engines read.

  Args:
    path: a `game.tw-pddl` file or the folder it lies in.

  Raises:
    ValueError: in one line naming the file, if it cannot be read or used.
  """
  path = _game_path(path)
  try:
    game = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise ValueError(f'{path}: not a readable game file: {error}') from error
  for key in _GAME_KEYS:
    if not isinstance(game, dict) or not isinstance(game.get(key), str):
      raise ValueError(f'{path}: not a game file: has no text {key!r}')
  if not _TASK_RULE.search(game['grammar']):
    raise ValueError(f'{path}: the grammar states no task')
  return game


def read_game(path: str | pathlib.Path) -> world_lib.World:
  """Returns the world of a game file; see `load_game` for what it refuses."""
  path = _game_path(path)
  game = load_game(path)
  task = json.loads(f'"{_TASK_RULE.search(game["grammar"])[1]}"')
  name = f'{path.parent.parent.name}/{path.parent.name}'
  try:
    return from_problem(game['pddl_problem'], task=task, name=name)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def spelling(game: dict[str, object]) -> str:
  """Returns how a game's grammar puts an object down: 'move' or 'put'."""
  return 'move' if '"move {o} to {r}"' in game['grammar'] else 'put'


def _game_path(path: str | pathlib.Path) -> pathlib.Path:
  path = pathlib.Path(path)
  return path / 'game.tw-pddl' if path.is_dir() else path
