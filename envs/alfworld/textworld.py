"""The original ALFWorld engine, driven through TextWorld's low-level API.

This is the reference for `native.py`. TextWorld and alfworld are imported when
the first engine is created. Repeated work in TextWorld (parsing templates,
copying contexts, grounding) is memoized from outside, once per process, without
changing any text. Not thread-safe.

TextWorld evaluates Python expressions in a game's grammar. ALFWorld's own
grammar only joins names and texts. A game whose grammar contains any other
expression is refused, unless its origin is trusted.
"""

import ast
import copy
import functools
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

from envs.alfworld import pddl
from envs.alfworld import world as world_lib

# Number of cached groundings, some MB each. The games of a group share one.
_CACHED_GROUNDINGS = 8


# Syntax nodes that are allowed in a grammar's expressions, such as
# `o.indefinite + ' ' + o.name`.
_ALLOWED_NODES = (
  *(ast.Expression, ast.BinOp, ast.Add, ast.BoolOp, ast.And, ast.Or, ast.Load),
  *(ast.Name, ast.Attribute, ast.Constant),
)

_Game = world_lib.World | dict[str, object] | str | pathlib.Path


class TextWorldEngine:
  """Plays one game at a time, with the interface of `NativeEngine`."""

  def __init__(self, *, trust_games: bool = False) -> None:
    """Starts TextWorld.

    Args:
      trust_games: whether games may run Python code in their grammar.

    Raises:
      ImportError: in one line, if alfworld is not installed or does not support
        this Python version.
    """
    modules = _modules()
    infos = modules.textworld.EnvInfos(won=True, admissible_commands=True)
    self._env = modules.alfred_tw_env.AlfredDemangler(
      modules.pddl_env.PddlEnv(infos), shuffle=False
    )
    self._trust_games = trust_games
    self._game: dict[str, object] | None = None

  def load(self, game: _Game) -> None:
    """Loads a game, which `reset` then starts.

    Args:
      game: a world, the dictionary of a game file, or the path of one.

    Raises:
      ValueError: in one line with the file name, if the game file is invalid,
        or contains code and is not trusted.
    """
    file, game = game, _game(game)
    if game != self._game:
      # TextWorld never frees the propositions of a game. They compare by value,
      # so clearing the cache does not affect games in progress.
      _modules().mementos._memento_cache.clear()
      self._game = None
      self._env.load(game)
      if not self._trust_games:
        _check_grammar(self._env.unwrapped._logic, file)
      self._game = game

  def prepare(self, game: _Game) -> None:
    """Does the slow part of `load` in advance, into a small cache."""
    game = _game(game)
    _modules().fast_downward.pddl2sas(game['pddl_domain'], game['pddl_problem'])

  def reset(self) -> world_lib.State:
    """Starts the loaded game from its initial state."""
    return _state(self._env.reset())

  def step(self, command: str) -> world_lib.State:
    """Plays a command; an inadmissible command changes nothing."""
    return _state(self._env.step(command)[0])

  def close(self) -> None:
    """Returns the planner library, one copy per engine, for reuse."""
    if self._env is not None:
      _modules().spare_libraries.append(self._env.unwrapped.downward_lib)
      self._env = None


def _game(game: _Game) -> dict[str, object]:
  if isinstance(game, world_lib.World):
    return pddl.to_game(game)
  return game if isinstance(game, dict) else pddl.load_game(game)


def _check_grammar(logic: Any, game: _Game) -> None:
  """Raises ValueError if a grammar contains code."""
  for text in _expressions(logic):
    if not _is_allowed(text):
      name = game if isinstance(game, (str, pathlib.Path)) else 'the game'
      raise ValueError(
        f'env.trust_games=False: the grammar of {name} contains code, '
        f'which TextWorld would run: {text!r:.100}; use env.engine=native, '
        'which runs none, or env.trust_games=True if you trust its origin'
      )


def _expressions(logic: Any) -> Iterator[str]:
  """Yields the expressions that TextWorld may evaluate."""
  textgen = _modules().textgen
  symbols = [
    symbol
    for action in logic.actions.values()
    for text in (action.template, action.feedback_rule)
    for symbol in textgen._parse_and_convert(text, rule_name='symbols')
  ]
  symbols += [
    symbol
    for rules in logic.grammar._rules.values()
    for rule in rules
    for symbol in rule.rhs
  ]
  while symbols:
    symbol = symbols.pop()
    if isinstance(symbol, textgen.EvalSymbol):
      yield symbol.expression
    for inner in ('symbol', 'expression'):
      if isinstance(vars(symbol).get(inner), textgen.Symbol):
        symbols.append(vars(symbol)[inner])


@functools.lru_cache(4096)
def _is_allowed(text: str) -> bool:
  try:
    nodes = list(ast.walk(ast.parse(text.strip(), mode='eval')))
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return False
  private = any(
    name.startswith('_')
    for node in nodes
    for name in (getattr(node, 'id', ''), getattr(node, 'attr', ''))
  )
  texts = all(
    isinstance(n.value, str) for n in nodes if isinstance(n, ast.Constant)
  )
  return (
    texts and not private and all(isinstance(n, _ALLOWED_NODES) for n in nodes)
  )


def _state(state: Any) -> world_lib.State:
  won = bool(state['won'])
  return world_lib.State(
    feedback=state.feedback,
    admissible=tuple(state['admissible_commands']),
    won=won,
    # TextWorld reports neither after a reset.
    score=state.get('score', int(won)),
    done=state.get('done', won),
  )


@functools.cache
def _modules() -> types.SimpleNamespace:
  """Imports TextWorld once and installs the caches."""
  if sys.version_info >= (3, 13):
    raise ImportError(
      'engine=textworld: TextWorld does not support Python 3.13 and '
      'later; use engine=native'
    )
  # Otherwise alfworld creates a cache folder in the home directory.
  os.environ.setdefault(
    'ALFWORLD_DATA', os.path.join(tempfile.gettempdir(), 'alfworld')
  )
  arguments = sys.argv
  try:
    import fast_downward
    import mementos.core
    import textworld
    from alfworld.agents.environment import alfred_tw_env
    from textworld import logic
    from textworld.envs.pddl import pddl as pddl_env
    from textworld.envs.pddl import textgen
  except ModuleNotFoundError as error:
    raise ImportError(
      f'engine=textworld: {error.name} is not installed: run '
      "`pip install -e '.[alfworld]'`"
    ) from error
  finally:
    sys.argv = arguments
  fast_downward.pddl2sas = _memoize_grounding(fast_downward.pddl2sas)
  logic.Rule.parse_conjunctive_query = functools.lru_cache(4096)(
    logic.Rule.parse_conjunctive_query
  )
  _speed_up_templates(textgen)
  spare_libraries: list[Any] = []
  fast_downward.load_lib = _reuse_libraries(
    fast_downward.load_lib, spare_libraries
  )
  return types.SimpleNamespace(
    spare_libraries=spare_libraries,
    textgen=textgen,
    fast_downward=fast_downward,
    mementos=mementos.core,
    textworld=textworld,
    alfred_tw_env=alfred_tw_env,
    pddl_env=pddl_env,
  )


def _reuse_libraries(
  load: Callable[[], Any], spare: list[Any]
) -> Callable[[], Any]:
  """Returns a loader that reuses libraries of closed engines.

  Unloading a library while others are loaded crashes the process at exit.
  """

  def load_lib() -> Any:
    return spare.pop() if spare else load()

  return load_lib


def _memoize_grounding(ground: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a cached version of the grounding function.

  TextWorld grounds each problem twice at every load and reset. The second
  grounding is for its planner, which is not used here.
  """

  @functools.lru_cache(_CACHED_GROUNDINGS)
  def grounded(domain: str, problem: str) -> Any:
    arguments = sys.argv
    try:
      return ground(domain, problem)
    finally:
      # The translator overwrites sys.argv.
      sys.argv = arguments

  def pddl2sas(
    domain: str, problem: str, verbose: bool = False, optimize: bool = False
  ) -> Any:
    del verbose, optimize
    return grounded(domain, problem)

  return pddl2sas


def _speed_up_templates(textgen: types.ModuleType) -> None:
  """Parses each template once and copies contexts shallowly.

  TextWorld only changes the two dictionaries of a context, not their values,
  and only the context of a symbol.
  """
  parse = textgen._parse_and_convert

  @functools.lru_cache(4096)
  def parsed(text: str, rule_name: str) -> Any:
    return parse(text, rule_name=rule_name)

  def copy_context(context: dict[str, Any]) -> dict[str, Any]:
    return context | {
      'variables': dict(context['variables']),
      'mapping': dict(context['mapping']),
    }

  def cloned(symbol: Any) -> Any:
    clone = copy.copy(symbol)
    for inner in ('symbol', 'expression'):
      if isinstance(vars(clone).get(inner), textgen.Symbol):
        setattr(clone, inner, cloned(vars(clone)[inner]))
    return clone

  def copy_symbol(symbol: Any, context: dict[str, Any]) -> Any:
    clone = cloned(symbol)
    clone.context = copy_context(context)
    return clone

  def parse_and_convert(text: str, rule_name: str, trace: bool = False) -> Any:
    del trace
    return [cloned(symbol) for symbol in parsed(text, rule_name)]

  textgen._parse_and_convert = parse_and_convert
  textgen.copy_context = copy_context
  textgen.Symbol.copy = copy_symbol
  textgen.deepcopy = lambda symbols: [cloned(symbol) for symbol in symbols]
