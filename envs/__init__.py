"""Registry of environments; a module is imported when it is first needed.

An environment is a module with a class `Env` and a function
`tasks(split, **kwargs)`; see `envs.base`. It may also define

    ANCHORS: the anchors that its observations offer; default ('observation',).
      With several, `Env` takes an argument `anchor`. The last one tells states
      apart best.
    CONTEXTS: the contexts that it offers; default ('history',). With several,
      `Env` takes an argument `context`; see `envs.narrator`.
    REPLAYS: whether its episodes can be replayed from their responses; default
      True. If not, no episode can be paused or start in a later state.
    HARNESS: the command to which an agent harness brings its episodes; default:
      none, its episodes are its own.
    DATA: a `base.Data`, if it reads official data. `Env` takes an argument
      `data_dir`.
    PRESETS: variant -> {config field: value}, the changes of config variants.
    agents(kwargs): names of its agents, if there are several; default: ().
    uses_tools(kwargs): whether its conversations have tools; default False.
    check_options(kwargs): yields a line for each wrong option.
    check_installation(kwargs): yields a line for each missing requirement.
    conflicts(config): yields a line for each option outside `config.env` that
      it does not support.

To add an environment, add a module and a line of REGISTRY, or name an
importable module of another project.
"""

import contextlib
import importlib
import importlib.util
import operator
import os
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from envs import base

# Largest integer of an option, and largest number of tasks of a split.
MAX_INT = 2**31 - 1

# name: module of the environment.
REGISTRY = {
  'alfworld': 'envs.alfworld.env',
  'endpoint': 'envs.endpoint',
  'gymnasium': 'envs.gymnasium_env',
  'helpdesk': 'envs.helpdesk.env',
  'keydoor': 'envs.keydoor',
  'mcp': 'envs.mcp_env',
  'minigrid': 'envs.minigrid_env',
  'openenv': 'envs.openenv_env',
  'scienceworld': 'envs.scienceworld_env',
  'search_qa': 'envs.search_qa.env',
  'sokoban': 'envs.sokoban',
  'textarena': 'envs.textarena_env',
  'textworld': 'envs.textworld_games',
  'toy': 'envs.toy',
  'verifiers': 'envs.verifiers_env',
  'webshop': 'envs.webshop.env',
}

# Value of data_dir: no official data.
GENERATED = 'generated'


def data(name: str) -> base.Data | None:
  """Returns the official data of an environment; None if it needs none."""
  return getattr(_module(name), 'DATA', None)


def data_dir(name: str, given: str | None) -> str | None:
  """Returns the folder of an environment's data.

  Args:
    name: name of an environment with data.
    given: the configured folder, if any; 'generated' for no official data.

  Returns:
    The folder; None for 'generated'; '' if neither `given` nor the
    environment's variable names a folder.
  """
  if given == GENERATED:
    return None
  return given or os.environ.get(data(name).variable, '')


def anchors(name: str) -> tuple[str, ...]:
  """Returns the anchors that an environment's observations offer."""
  return getattr(_module(name), 'ANCHORS', ('observation',))


def anchor(name: str, wanted: str) -> str:
  """Returns the anchor that an environment reports for `algorithm.anchor`.

  Args:
    name: name of the environment.
    wanted: an anchor that it offers; 'state' for the one that tells states
      apart best. Other anchors are derived from the first one.
  """
  offered = anchors(name)
  if wanted in offered:
    return wanted
  return offered[-1] if wanted == 'state' else offered[0]


def contexts(name: str) -> tuple[str, ...]:
  """Returns the contexts that an environment offers."""
  return getattr(_module(name), 'CONTEXTS', ('history',))


def replays(name: str) -> bool:
  """Returns whether episodes can be replayed from their responses."""
  return getattr(_module(name), 'REPLAYS', True)


def has_expert(name: str) -> bool:
  """Returns whether the environment demonstrates its tasks."""
  return hasattr(_module(name).Env, 'demonstrate')


def harness(name: str) -> str:
  """Returns the command to which a harness brings episodes, or ''."""
  return getattr(_module(name), 'HARNESS', '')


def uses_tools(name: str, kwargs: Mapping[str, Any]) -> bool:
  """Returns whether the conversations of an environment have tools."""
  return bool(_call_own(name, 'uses_tools', kwargs, 'whether it has tools'))


def agents(name: str, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the names of an environment's agents; () if there is only one."""
  expected = 'a tuple with the names of its agents'
  names = _call_own(name, 'agents', kwargs, expected)
  names = () if names is None else names
  if isinstance(names, str) or not isinstance(names, Iterable):
    raise ValueError(
      f'env.name={name}: agents returned {names!r:.80}; it must return '
      f'{expected}'
    )
  return tuple(names)


def answer_start(name: str, kwargs: Mapping[str, Any]) -> str | None:
  """Returns the start of a response up to the answer of a task.

  None if the tasks of the environment have no reference answer. Otherwise its
  `tasks` have a method `answer(index)`.
  """
  return _call_own(name, 'answer_start', kwargs, 'a text or None')


def _call_own(
  name: str, function: str, kwargs: Mapping[str, Any], expected: str
) -> Any:
  """Returns the value of an environment's function; None if it has none.

  Raises:
    ValueError: in one line, if the function raises anything.
  """
  own = getattr(_module(name), function, None)
  if own is None:
    return None
  field = f'env.name={name}'
  with explain_errors(field, function, f'it must return {expected}'):
    return own(kwargs)


def presets(name: str) -> Mapping[str, Mapping[str, Any]]:
  """Returns the changes of config variants for an environment."""
  return getattr(_module(name), 'PRESETS', {})


def check_options(name: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong option of an environment."""
  # Imported here because it is of no use to worker processes.
  from envs import checks

  problems = [
    *checks.unknown(name, _module(name).Env, kwargs),
    *checks.shared(kwargs),
  ]
  if len(anchors(name)) > 1:
    problems += checks.one_of(kwargs, anchor=anchors(name))
  yield from problems
  if problems:  # The own check may rely on their types.
    return
  yield from own_lines(
    _module(name), 'check_options', kwargs, f'env.name={name}'
  )


def check_installation(name: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each missing requirement of an environment."""
  yield from own_lines(
    _module(name), 'check_installation', kwargs, f'env.name={name}'
  )


def conflicts(config: Any) -> Iterator[str]:
  """Yields a line for each option that a config's environment rejects."""
  name = config.env.name
  yield from own_lines(_module(name), 'conflicts', config, f'env.name={name}')


def own_lines(
  module: types.ModuleType, function: str, argument: Any, field: str
) -> Iterator[str]:
  """Yields the lines of a module's function, or one about its mistake.

  Args:
    module: the module of an environment, an algorithm or a plug-in.
    function: name of the function, which the module may lack.
    argument: its argument.
    field: the config field that names the module, and its value.
  """
  own = getattr(module, function, None)
  if own is None:
    return
  expected = 'it must yield a line for each problem'
  try:
    with explain_errors(field, function, expected):
      lines = own(argument)
      is_iterable = isinstance(lines, Iterable) and not isinstance(lines, str)
      lines = [*lines] if is_iterable else [None]
  except ValueError as error:
    lines = str(error).splitlines()
  if not all(isinstance(line, str) for line in lines):
    lines = [f'{field}: {function} returned no lines; {expected}']
  yield from lines


def _module(name: str) -> types.ModuleType:
  module = named_module('env.name', name, REGISTRY)
  if name in REGISTRY:
    return module
  for wanted in ('Env', 'tasks'):
    if not hasattr(module, wanted):
      raise ValueError(
        f'env.name={name}: the module has no {wanted}; must have Env and tasks'
      )
  for names in ('ANCHORS', 'CONTEXTS'):
    if isinstance(value := getattr(module, names, ()), str):
      raise ValueError(
        f'env.name={name}: {names}={value!r} is a text; must be a tuple of '
        'names'
      )
  return module


def named_module(
  field: str, name: str, registry: Mapping[str, str]
) -> types.ModuleType:
  """Returns the module that a field names.

  Args:
    field: the field of the config.
    name: its value, a key of the registry or an importable module.
    registry: modules by name.

  Raises:
    ValueError: in one line, if it names no module, or the module's own code
      raises anything.
  """
  if name not in registry:
    if problem := file_problem(name):
      raise ValueError(f'{field}={name}: {problem}')
    if not can_import(name):
      raise ValueError(
        f'{field}={name}: unknown; must be one of '
        f'{", ".join(sorted(registry))}, or a module that Python imports'
      )
  try:
    return import_module(registry.get(name, name))
  except ImportError as error:
    raise ValueError(
      f'{field}={name}: cannot be imported ({error}); must be a module that '
      'Python imports'
    ) from error


def import_module(name: str) -> types.ModuleType:
  """Returns a module that an option names.

  Raises:
    ImportError: whatever the code of the module raises, in one line.
  """
  try:
    return importlib.import_module(name)
  except ImportError:
    raise
  except SyntaxError as error:  # Its text has the file and the line.
    raise ImportError(f'SyntaxError: {error}') from error
  except (Exception, SystemExit) as error:
    # Imported here, because it imports this package.
    from envs import worker

    raise ImportError(worker.format_exception(error)) from error


def import_attribute(path: str) -> Any:
  """Returns the function or class that an option names as `module:attribute`.

  Raises:
    ImportError: in one line, if it names nothing that can be called.
  """
  module, _, attribute = path.partition(':')
  if not module or not attribute:
    raise ImportError('not of the form module:name')
  if problem := file_problem(module):
    raise ImportError(problem)
  try:
    value = getattr(import_module(module), attribute)
  except AttributeError as error:
    raise ImportError(str(error)) from error
  if not callable(value):
    raise ImportError(f'a {type(value).__name__}, not a function or class')
  return value


def file_problem(name: str) -> str:
  """Returns what to use instead of a file; '' if a name is that of a module."""
  path = pathlib.PurePath(name)
  if path.suffix != '.py' and len(path.parts) < 2:
    return ''
  return (
    f'a file, not a module; use {path.stem} and run the command in the folder '
    'of this file, or add the folder to $PYTHONPATH'
  )


def can_import(name: str) -> bool:
  """Returns whether a module of this name exists."""
  try:
    return importlib.util.find_spec(name) is not None
  except (ImportError, ValueError):
    return False


def check(name: str) -> None:
  """Checks that an environment exists.

  Raises:
    ValueError: in one line, if it does not.
  """
  _module(name)


def make(name: str, **kwargs: Any) -> base.Env:
  """Returns a new environment instance, to play episodes.

  Raises:
    TypeError: if it lacks a method that the rollout calls.
  """
  return _make(name, kwargs, ('reset', 'step', 'close'))


def make_expert(name: str, **kwargs: Any) -> base.Env:
  """Returns a new environment instance, for `demonstrate` alone.

  Raises:
    ValueError: in one line, if it cannot be created, or lacks `demonstrate` or
      `close`.
  """
  expected = 'it must take the options of env, and have demonstrate and close'
  with explain_errors(f'env.name={name}', 'Env', expected):
    return _make(name, kwargs, ('demonstrate', 'close'))


def _make(
  name: str, kwargs: Mapping[str, Any], methods: Sequence[str]
) -> base.Env:
  env = _module(name).Env(**kwargs)
  for method in methods:
    if not callable(getattr(env, method, None)):
      raise TypeError(
        f'Env has no {method}(); must have {", ".join(methods[:-1])} and '
        f'{methods[-1]}'
      )
  return env


def demonstrate(
  name: str, env: base.Env, task: base.Task, *, noise: float, seed: int
) -> list[tuple[base.Observation, str]]:
  """Returns an expert's steps in a task; none if it shows none.

  Args:
    name: name of the environment, for messages.
    env: the environment.
    task: the task.
    noise: probability of a mistake.
    seed: seed of the noise.

  Raises:
    ValueError: in one line, if the expert fails, or shows something else.
  """
  # Imported here, because it imports this package.
  from envs import messages

  field = f'env.name={name}'
  expected = 'it must yield pairs (prompt or messages, response)'
  with explain_errors(field, 'demonstrate', expected):
    shown = env.demonstrate(task, noise=noise, seed=seed)
    steps = [(_observation(given), text) for given, text in shown or ()]
    for n, (observation, text) in enumerate(steps):
      try:
        messages.check('reset', observation)
        messages.check_text('response', text)
      except messages.UnusableReplyError as error:
        raise ValueError(
          f'{field}: step {n} of demonstrate is unusable: '
          f'{messages.to_line(str(error))}; {expected}'
        ) from error
    return steps


@contextlib.contextmanager
def closing(env: base.Env) -> Iterator[base.Env]:
  """Closes an environment at the end; ignores its errors, as workers do."""
  # Imported here, because it imports this package.
  from envs import worker

  try:
    yield env
  finally:
    with contextlib.suppress(*worker.ERRORS):
      env.close()


def _observation(given: base.Input | base.Observation) -> base.Observation:
  """Returns the input of a demonstrated step as an observation."""
  if isinstance(given, base.Observation):
    return given
  is_prompt = isinstance(given, str)
  messages = () if is_prompt else tuple(given)
  if not all(isinstance(message, base.Message) for message in messages):
    raise TypeError(f'{given!r} is no input of a step')
  return base.Observation(
    prompt=given if is_prompt else '',
    short_prompt='',
    anchor='',
    text='',
    messages=messages,
  )


def _is_explained(error: BaseException) -> bool:
  """Returns whether an error names the field that is wrong."""
  types = ValueError, ConnectionError, TimeoutError
  return isinstance(error, types) and bool(re.match(r'[\w.]+=', str(error)))


@contextlib.contextmanager
def explain_errors(field: str, call: str, expected: str) -> Iterator[None]:
  """Turns exceptions of a user's module into errors of one line.

  Args:
    field: the config field that names the module, and its value.
    call: what is called.
    expected: what it must be or return.

  Raises:
    ValueError: in one line, instead of exceptions that name no field.
  """
  try:
    yield
  except (Exception, SystemExit) as error:  # A module may raise anything.
    if _is_explained(error):
      raise ValueError(str(error)) from error
    # Imported here, because it imports this package.
    from envs import worker

    name = field.partition('=')[2].partition(':')[0]
    file = getattr(sys.modules.get(name), '__file__', None)
    raise ValueError(
      f'{field}: {call} raises {worker.format_exception(error, file)}; '
      f'{expected}'
    ) from error


def tasks(name: str, split: str, **kwargs: Any) -> base.TaskInfo:
  """Returns the tasks of a split; takes the same kwargs as `make`.

  Raises:
    ValueError: in one line, if the environment cannot list them.
  """
  expected = 'it must return the tasks of a split'
  with explain_errors(f'env.name={name}', 'tasks', expected):
    info = _module(name).tasks(split, **kwargs)
  if not hasattr(info, 'task_type') and hasattr(info, 'kind'):
    warnings.warn(
      f'env.name={name}: the method kind of its tasks is deprecated; rename it '
      'to task_type',
      DeprecationWarning,
      stacklevel=2,
    )
    type(info).task_type = type(info).kind
  for wanted in ('__len__', 'task_type'):
    if not hasattr(info, wanted):
      raise ValueError(
        f'env.name={name}: its tasks, a {type(info).__name__}, have no '
        f'{wanted}; must have __len__() and task_type(index)'
      )
  return info


def count(name: str, split: str, info: base.TaskInfo) -> int:
  """Returns the number of tasks of a split.

  Args:
    name: name of the environment, for messages.
    split: name of the split.
    info: what `tasks` returned.

  Raises:
    ValueError: in one line, if the environment fails, or returns no number.
  """
  field, call = f'env.name={name}', f'__len__() of split {split}'
  expected = f'must return an integer from 0 to {MAX_INT:,}'
  with explain_errors(field, call, expected):
    # `len` has other errors for negative and huge numbers.
    size = operator.index(type(info).__len__(info))
  if not 0 <= size <= MAX_INT:
    shown = size if size.bit_length() < 64 else 'too large'
    raise ValueError(f'{field}: {call} is {shown}; {expected}')
  return size
