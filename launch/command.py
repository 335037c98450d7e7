"""Common parts of all commands: flags, help, one-line errors, Ctrl-C."""

import ast
import functools
import logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections
from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

import configs
from configs import variants
from envs import processes
from gigpo_jax import deprecated
from gigpo_jax.run import config_fields
from launch import interrupt, lines

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Experiment, such as configs/alfworld.py:tiny.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Work directory; default runs/<config>-<variant>, for launch/sft.py with the '
  'suffix -sft. launch/train.py and launch/serve.py resume the run in it.',
)

# Errors that a wrong command line causes.
_MISTAKES = (
  flags.Error,
  ValueError,
  TypeError,
  OSError,
  AttributeError,
  LookupError,
)
# Flags of other trainers (TRL, verl-agent) that are no fields, or fields of
# another meaning.
_OTHER_FLAGS = {
  'max_steps': (
    "TRL's max_steps counts updates, of which an iteration has several; set "
    '--config.num_iterations. Turns of an episode: --config.env.max_steps'
  ),
  'num_iterations': (
    "TRL's num_iterations, the passes over a batch, is --config.learner."
    'epochs; --config.num_iterations is the length of the run'
  ),
  **dict.fromkeys(
    ('default_local_dir', 'output_dir'), 'did you mean --workdir?'
  ),
  **dict.fromkeys(
    ('resume_from_checkpoint', 'resume_mode'),
    'a run resumes if its command is run again with the same --workdir',
  ),
}


def run(
  main: Callable[[ml_collections.ConfigDict, str], None],
  *,
  ending: str | None = '',
  replaced: Mapping[str, str] | None = None,
) -> None:
  """Parses the flags and calls main(config, workdir).

  Call it within `interrupt.handle` and `output.handle`.

  An error of the user (ValueError) is printed without a traceback, and the
  process ends with status 2. An error that ends a run (`errors.RunError`) is
  printed in the same way, and the process ends with status 1.

  Modules of the user in the current folder can be named in the config, as with
  `python -m`; installed ones come first.

  Args:
    main: the command; `--help` prints the docstring of its module.
    ending: suffix of the default work directory; None: the command has no
      --workdir.
    replaced: fields that have no effect on the command -> those that replace
      them, or ''.
  """
  processes.end_with_named_parent()
  if ending is None:
    delattr(flags.FLAGS, _WORKDIR.name)
  sys.path.append(os.getcwd())
  parse = functools.partial(
    _parse, module=main.__module__, replaced=replaced or {}
  )
  app.run(lambda _: _call(main, ending), flags_parser=parse)


def _parse(
  argv: list[str], *, module: str, replaced: Mapping[str, str]
) -> list[str]:
  lines.show_help(argv, lambda: _help(module))
  config = ml_collections.ConfigDict()
  try:
    deprecated.show_warnings()
    argv = _join_config(lines.expand_home(argv))
    argv = [_find_config(argument) for argument in argv]
    config = _check_config_file(argv)
    argv = [
      _clear_tuple(deprecated.flag(argument, config), config)
      for argument in argv
    ]
    if config and (unknown := list(_unknown_fields(argv, config))):
      lines.exit_with_error('\n'.join(unknown))
    argv, empty = _split_none(_keep_last(argv), config)
    # The config flag reads the overrides from sys.argv.
    sys.argv = argv
    rest = flags.FLAGS(argv, known_only=False)
    lines.check_arguments(rest)
    if _CONFIG.value is None:
      raise ValueError(
        '--config: missing; try --config=configs/alfworld.py:tiny'
      )
    given = config_flags.get_override_values(flags.FLAGS['config'])
    for field in sorted(given.keys() & replaced.keys()):
      instead = replaced[field] and f'; set {replaced[field]}'
      raise ValueError(
        f'{field}={given[field]}: has no effect on this command{instead}'
      )
    deprecated.update(_CONFIG.value, given)
    _CONFIG.value.update_from_flattened_dict(dict.fromkeys(empty))
  except flags.IllegalFlagValueError as error:
    lines.exit_with_error(_wrong_type(lines.describe_error(error), config))
  except flags.UnrecognizedFlagError as error:
    lines.exit_with_error(f'{error}; {_suggest_field(error.flagname, config)}')
  except _MISTAKES as error:
    lines.exit_with_error(' '.join(str(error).split()))
  return rest


def _suggest_field(flag: str, config: ml_collections.ConfigDict) -> str:
  """Returns what to set instead of an unknown flag."""
  near = config_fields.near(flag, config) if config else []
  if near and flag not in _OTHER_FLAGS:
    return f'did you mean --config.{" or --config.".join(near)}?'
  return _OTHER_FLAGS.get(
    flag.rpartition('.')[2], 'a field is set by --config.FIELD=VALUE'
  )


def _help(module: str) -> str:
  """Returns the docstring of a command's module, its flags and the configs."""
  sizes = [
    f'  configs/{path.name}:{"|".join(names)}'
    for path in sorted(pathlib.Path(configs.__file__).parent.glob('*.py'))
    if (names := _sizes(path))
  ]
  return '\n'.join(
    [
      lines.describe(
        module, [n for n in ('config', 'workdir') if n in flags.FLAGS]
      ),
      '  --config.FIELD=VALUE',
      lines.wrap(
        'Any field of the config; configs/base.py lists the fields.', 6
      ),
      '\nConfigs and their sizes:',
      *sizes,
      '\nFurther variants, after the size and joined by commas:',
      lines.wrap(', '.join(variants.CHANGES), 2),
      lines.wrap(
        'Some config files have others; docs/running.md lists them.', 2
      ),
    ]
  )


def _sizes(path: pathlib.Path) -> list[str]:
  """Returns the sizes that a config file accepts; does not run it."""
  for node in ast.parse(path.read_text(encoding='utf-8')).body:
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'SIZES':
      return [ast.literal_eval(key) for key in node.value.keys]
  return []


def _join_config(argv: list[str]) -> list[str]:
  """Returns the flags with `--config=FILE` instead of `--config FILE`."""
  joined = argv[:1]
  for argument in argv[1:]:
    if joined[-1] in ('-config', '--config'):
      joined[-1] = f'--config={argument}'
    else:
      joined.append(re.sub(r'^-(?=config\b.)', '--', argument))
  return joined


def _find_config(argument: str) -> str:
  """Returns a flag with the path of its config file, from any folder."""
  name, _, value = argument.partition('=')
  path, colon, variant = value.partition(':')
  if name != '--config' or not path.endswith('.py'):
    return argument
  return f'{name}={configs.find(path) or path}{colon}{variant}'


def _check_config_file(argv: list[str]) -> ml_collections.ConfigDict:
  """Returns the config without overrides; empty without --config.

  Loads the config file before the flag does, whose errors are long.
  """
  config = ml_collections.ConfigDict()
  for argument in argv:
    name, _, value = argument.partition('=')
    if name == '--config':
      if config:
        raise ValueError(
          f'{argument}: another --config is given; must be one, with variants '
          'after its name, as in configs/alfworld.py:tiny,lora'
        )
      path, _, variant = value.partition(':')
      if not pathlib.Path(path).is_file():
        raise ValueError(
          f'--config={path}: no such file; {_suggest_file(path)}must be one of '
          'configs/*.py, or your own'
        )
      config = config_fields.load(path, variant, flag='--config=')
  return config


def _suggest_file(path: str) -> str:
  """Returns which config file a wrong path may mean; '' if there is none."""
  name = path.removesuffix('.py')
  for file in (f'{name}.py', f'configs/{name}.py'):
    if configs.find(file):
      return f'did you mean {file}? '
  return ''


def _unknown_fields(
  argv: list[str], config: ml_collections.ConfigDict
) -> Iterator[str]:
  """Yields a line for each flag that sets a field that the config lacks."""
  for argument in argv:
    match = re.fullmatch(r'--config\.([\w.]+).*', argument, re.DOTALL)
    values = config
    for name in match[1].split('.') if match else ():
      if not isinstance(values, ml_collections.ConfigDict):
        break  # An entry of a field.
      if name not in values:
        accepted = _OTHER_FLAGS.get(match[1]) or (
          config_fields.suggest(match[1], config)
          or 'must be one of configs/base.py or of the config file, which adds '
          'the options of modules of your own'
        )
        text = ' '.join(argument.removeprefix('--config.').split())
        yield f'{text}: no such field; {accepted}'
        break
      values = values[name]


def _clear_tuple(argument: str, config: ml_collections.ConfigDict) -> str:
  """Returns a flag with () instead of nothing as the value of a tuple."""
  match = re.fullmatch(r'--config\.([\w.]+)=', argument)
  is_tuple = match and isinstance(config_fields.get(config, match[1]), tuple)
  return f'{argument}()' if is_tuple else argument


def _keep_last(argv: list[str]) -> list[str]:
  """Returns the flags with only the last value of each config field.

  The config's flag would join the values of a tuple.
  """
  names = [
    match[0] if (match := re.match(r'--config\.[^=]+=', x)) else None
    for x in argv
  ]
  return [
    argument
    for n, (name, argument) in enumerate(zip(names, argv, strict=True))
    if name is None or name not in names[n + 1 :]
  ]


def _split_none(
  argv: list[str], config: ml_collections.ConfigDict
) -> tuple[list[str], list[str]]:
  """Returns the flags without `--config.FIELD=None`, and these fields.

  The config's flag cannot parse None for an optional number.
  """
  optional = {f'--config.{x}=None' for x in config_fields.optional(config)}
  rest = [argument for argument in argv if argument not in optional]
  last = {argument.partition('=')[0]: argument for argument in argv}
  empty = [
    name.removeprefix('--config.')
    for name, argument in last.items()
    if argument in optional
  ]
  return rest, empty


def _wrong_type(text: str, config: ml_collections.ConfigDict) -> str:
  """Returns the error of a flag whose value cannot be parsed."""
  match = re.match(r'flag --config\.([\w.]+)=(.*?): ', text)
  if not match:
    return text
  accepted = config_fields.accepted(config, match[1])
  return f'{match[1]}={match[2]}: wrong type; must be {accepted}'


def _call(
  main: Callable[[ml_collections.ConfigDict, str], None], ending: str | None
) -> None:
  # The checkpoint library logs a lot. Its errors are raised, too. Warnings of
  # jax, such as that it uses no GPU, are shown.
  absl_logging.set_verbosity(absl_logging.FATAL)
  sys.unraisablehook = functools.partial(_drop_late_write, sys.unraisablehook)
  if 'JAX_LOGGING_LEVEL' not in os.environ:
    logging.getLogger('jax').setLevel(logging.WARNING)
  workdir = '' if ending is None else _workdir(ending)
  # Worker processes import this file too and must not import jax.
  from gigpo_jax.runtime import compilation, distributed, errors, hardware

  hardware.keep_freed_memory()
  compilation.enable_cache()
  interrupt.set_outlook(lambda: 'the same command starts again')
  try:
    with distributed.explain_lost_process():
      main(_CONFIG.value, workdir)
  except ValueError as error:
    lines.exit_with_error(str(error), distributed.exit_process)
  except errors.RunError as error:
    lines.exit_with_error(str(error), distributed.exit_process, status=1)
  except SystemExit as error:  # Stdout cannot be written, see `output`.
    distributed.exit_process(error.code)
  except Exception:
    traceback.print_exc()
    distributed.exit_process(1)


def _drop_late_write(show: Callable[..., None], error: Any) -> None:
  """Handles an error in a callback; shows it unless it adds nothing.

  After a failed write of a checkpoint, e.g. to a full disk, the writes next to
  it report to an event loop that is closed.

  Args:
    show: the hook that shows errors.
    error: argument of `sys.unraisablehook`.
  """
  is_late = error.object is None and str(error.exc_value) == (
    'Event loop is closed'
  )
  if not is_late:
    show(error)


def _workdir(ending: str) -> str:
  if _WORKDIR.value == '':
    lines.exit_with_error('--workdir=: empty; must be a folder')
  return _WORKDIR.value or _default_workdir() + ending


def _default_workdir() -> str:
  path = config_flags.get_config_filename(flags.FLAGS['config'])
  variant = _CONFIG.value.get('variant', '').replace(',', '-')
  name = '-'.join(part for part in (pathlib.Path(path).stem, variant) if part)
  return str(pathlib.Path('runs') / name)
