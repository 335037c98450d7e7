"""Checks of an environment's options; most yield `env.OPTION=VALUE: ...`."""

import inspect
import math
from collections.abc import (
  Callable,
  Collection,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

import envs
from envs import narrator


def at_least(
  options: Mapping[str, Any], note: str = '', **lowest: int
) -> Iterator[str]:
  """Yields options that are no integers from a bound on; None passes.

  Args:
    options: the environment's options.
    note: added to the error, such as '; None is all'.
    **lowest: option=lowest accepted value.
  """
  for name, low in lowest.items():
    value = options.get(name)
    is_int = isinstance(value, int)
    if value is None or (is_int and low <= value <= envs.MAX_INT):
      continue
    accepted = f'an integer of at least {low}{note}'
    if is_int and value > envs.MAX_INT:
      accepted = f'at most {envs.MAX_INT:,}'
    yield f'env.{name}={value}: out of range; must be {accepted}'


def is_between(value: Any, low: int, high: int) -> bool:
  """Returns whether a value is a number within bounds."""
  return isinstance(value, int | float) and low <= value <= high


def one_of(
  options: Mapping[str, Any], **known: Collection[str]
) -> Iterator[str]:
  """Yields options with unknown values; options that are None pass."""
  for name, values in known.items():
    value = options.get(name)
    if value is not None and value not in values:
      yield f'env.{name}={value}: unknown; must be one of {", ".join(values)}'


def import_named(
  field: str, name: str, *, accepted: str, takes: Sequence[str] = ()
) -> Any:
  """Returns what an option names as `module:function` or `module:Class`.

  Args:
    field: the option.
    name: its value.
    accepted: what the option accepts, for the error.
    takes: names of the arguments of a function; (): not checked.

  Raises:
    ValueError: in one line, if it names nothing, or a function that cannot be
      called with these arguments.
  """
  try:
    target = envs.import_attribute(name)
  except ImportError as error:
    raise ValueError(
      f'{field}={name}: unknown ({error}); must be {accepted}'
    ) from error
  if takes and not isinstance(target, type):
    try:
      _bind(target, takes)
    except TypeError as error:
      raise ValueError(
        f'{field}={name}: {error}; must be a function of ({", ".join(takes)})'
      ) from error
  return target


def _bind(function: Callable[..., Any], arguments: Sequence[str]) -> None:
  """Raises TypeError if a function does not take so many arguments."""
  try:
    signature = inspect.signature(function)
  except ValueError:  # Some built-in functions have no signature.
    return
  signature.bind(*arguments)


def unknown(
  name: str, make: Callable[..., Any], options: Mapping[str, Any]
) -> Iterator[str]:
  """Yields options that an environment does not accept.

  Args:
    name: name of the environment.
    make: makes it from its options.
    options: the options, and those that are not passed to every environment.
  """
  try:
    parameters = inspect.signature(make).parameters.values()
  except (TypeError, ValueError):  # It is reported when it is made.
    return
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return
  own = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
  dropped = {'name'} if len(envs.contexts(name)) > 1 else {'name', 'context'}
  for option in options:
    if option not in dropped and option not in own:
      value = _one_line(options[option])
      yield (
        f'env.{option}={value}: {name} has no such option; it has '
        f'{", ".join(own) or "none"}'
      )


def _one_line(value: Any) -> str:
  # A section of a config prints several.
  return ' '.join(str(getattr(value, 'to_dict', lambda: value)()).split())


def shared(options: Mapping[str, Any]) -> Iterator[str]:
  """Yields problems of the options that most environments have."""
  yield from at_least(
    options, max_steps=1, history_length=0, max_result_chars=1
  )
  yield from one_of(options, prompt_style=narrator.STYLES)
  for name in ('success_return', 'success_score', 'timeout_secs'):
    value = options.get(name)
    above = 0 if name == 'timeout_secs' else -math.inf
    if isinstance(value, int | float) and not above < value < math.inf:
      accepted = 'finite and above 0' if not above else 'finite'
      yield f'env.{name}={value}: out of range; must be {accepted}'
  generator = options.get('generator')
  # A ConfigDict is no Mapping.
  if generator is not None and not hasattr(generator, 'items'):
    yield f'env.generator={generator}: must be a group of options'
    return
  seed = (generator or {}).get('seed')
  if seed is not None and not is_between(seed, 0, envs.MAX_INT):
    yield (
      f'env.generator.seed={seed}: out of range; must be a non-negative 32-bit '
      'integer'
    )
