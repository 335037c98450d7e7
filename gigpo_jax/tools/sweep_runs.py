"""The runs of a sweep: what a file lists, and how far each of them is."""

import dataclasses
import functools
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Sequence

import ml_collections
import numpy as np

import configs
from gigpo_jax import deprecated, metrics
from gigpo_jax.run import (
  config_fields,
  model_builders,
  policy_files,
  run_config,
)
from gigpo_jax.runtime import files
from gigpo_jax.tools import outcomes

_ROOT = pathlib.Path(__file__).parents[2]
_RATE = 'optimizer.learning_rate'
# Limit of file systems on the name of a folder's log, FOLDER.log.
_MAX_FOLDER_BYTES = 255 - len('.log')


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of launch/train.py.

  Attributes:
    name: name of the variant; runs of the same name differ in their seed.
    config: value of the --config flag.
    seed: seed of everything random.
    overrides: (config field, value) pairs.
    test: (config field, value) pairs for the evaluation of the trained policy;
      empty for no such evaluation.
    experiment: only runs of the same experiment are compared; by default the
      name of the config file.
  """

  name: str
  config: str
  seed: int
  overrides: tuple[tuple[str, object], ...] = ()
  test: tuple[tuple[str, object], ...] = ()
  experiment: str = ''

  def __post_init__(self):
    stem = pathlib.Path(self.config.partition(':')[0]).stem
    object.__setattr__(self, 'experiment', self.experiment or stem)

  @property
  def key(self) -> tuple[str, str, int]:
    """Key of the run in the table: (experiment, name, seed)."""
    return self.experiment, self.name, self.seed

  @functools.cached_property
  def settings(self) -> str:
    """What the table keeps of a run's config, such as `config.py env.a=1`.

    It includes the learning rate, which a config file chooses by method.
    """
    rate = self.load().optimizer.learning_rate
    changes = dict(self.overrides) | {_RATE: rate}
    return ' '.join(
      (self.config, *(f'{k}={v}' for k, v in sorted(changes.items())))
    )

  @property
  def test_settings(self) -> str:
    """What the table of tests keeps: the run's settings and those of its test.

    An example is `config.py env.a=1 test: evaluation.b=2`.
    """
    fields = (f'{k}={v}' for k, v in sorted(self.test))
    return ' '.join((self.settings, 'test:', *fields))

  def has_test_settings(self, stored: str, *, same_run: bool) -> bool:
    """Returns whether settings in a table of tests are the run's.

    Args:
      stored: the settings; '' in tables of older releases.
      same_run: whether the run in the table of evaluations is this one.
    """
    return stored == self.test_settings or (not stored and same_run)

  def has_settings(self, stored: str | None) -> bool:
    """Returns whether settings in a table are the run's, as far as known.

    Tables of older releases have none, or lack the learning rate.
    """
    if stored is None or stored == self.settings:
      return True
    without = [x for x in self.settings.split(' ') if not x.startswith(_RATE)]
    return _RATE not in stored and stored == ' '.join(without)

  @property
  def folder(self) -> str:
    """Name of the work directory."""
    return file_name(f'{self.experiment}-{self.name}-{self.seed}')

  def load(
    self, fields: Sequence[tuple[str, object]] = ()
  ) -> ml_collections.ConfigDict:
    """Returns the run's config.

    Args:
      fields: further (config field, value) pairs.

    Raises:
      ValueError: in one line, if the config or a field does not exist.
    """
    path, _, variant = self.config.partition(':')
    changes = dict((*self.overrides, *fields))
    overrides = {k: _expand_home(k, value) for k, value in changes.items()}
    overrides = {'seed': self.seed} | overrides
    try:
      file = configs.find(path) or path
      config = config_fields.load(file, variant).lock()
      overrides = deprecated.renamed(overrides, config)
      for field in overrides.keys() - config_fields.flatten(config).keys():
        advice = config_fields.suggest(field, config) or 'see configs/base.py'
        raise ValueError(f'{field}: no such field; {advice}')
      for field, value in overrides.items():
        config_fields.set_value(config, field, value)
    except (KeyError, OSError, TypeError, ValueError) as error:
      message = ' '.join(str(error).split())
      raise ValueError(f'{self.label}{message}') from error
    return config

  @property
  def label(self) -> str:
    """Start of errors about the run."""
    return f'--sweep: run {self.folder}: '

  def command(self, root: pathlib.Path) -> list[str]:
    """Returns the command that trains the run in a folder under `root`."""
    return self._launch('train', self.overrides, root / self.folder)

  def test_command(self, root: pathlib.Path) -> list[str]:
    """Returns the command that evaluates the trained policy."""
    policy, result = root / self.folder / 'policy', self.test_result(root)
    fields = (*self.overrides, *self.test)
    command = self._launch('evaluate', fields, result.parent)
    return [*command, f'--model={policy}']

  def test_result(self, root: pathlib.Path) -> pathlib.Path:
    """Returns the file that `test_command` writes."""
    return root / self.folder / 'test' / 'evaluation.json'

  def next_command(self, root: pathlib.Path) -> list[str] | None:
    """Returns the command to run next, or None if the run is complete."""
    self.load(self.test)  # Refuses unknown fields before the training.
    if not finished(self, root):
      return self.command(root)
    if self.test and read_test(self, root) is None:
      return self.test_command(root)
    return None

  def _launch(
    self,
    script: str,
    fields: Sequence[tuple[str, object]],
    workdir: pathlib.Path,
  ) -> list[str]:
    return [
      sys.executable,
      str(_ROOT / 'launch' / f'{script}.py'),
      f'--config={self.config}',
      f'--config.seed={self.seed}',
      *(f'--config.{field}={value}' for field, value in fields),
      f'--workdir={workdir}',
    ]


def read(given: str | pathlib.Path) -> list[Run]:
  """Returns the runs that a file lists in RUNS, a list of dictionaries.

  Each dictionary has the keys name, config and seed, and optionally experiment
  and, as dictionaries of config fields, overrides and test; see `Run`. The
  trained policies of runs with test are evaluated with these fields and
  compared task by task.

  Args:
    given: path of the file; a path within the project works from any folder.

  Raises:
    ValueError: in one line, if the file or its list is invalid, or two runs
      share a folder.
  """
  path = configs.find(str(given))
  if path is None or not os.path.isfile(path):
    raise ValueError(
      f'--sweep={given}: no such file; must be a Python file that defines RUNS'
    )
  try:
    entries = runpy.run_path(str(path)).get('RUNS')
  except (Exception, SystemExit) as error:  # A file may raise anything.
    raise ValueError(
      f'--sweep={path}: cannot be loaded ({type(error).__name__}: {error}); '
      'must be a Python file that defines RUNS'
    ) from error
  if not entries or not isinstance(entries, list | tuple):
    raise ValueError(
      f'--sweep={path}: RUNS is missing, empty or no list; must be a list of '
      'runs'
    )
  runs = [_run_of(entry, f'--sweep={path}') for entry in entries]
  folders = [run.folder for run in runs]
  if duplicates := sorted({f for f in folders if folders.count(f) > 1}):
    raise ValueError(
      f'--sweep={path}: {duplicates} are listed twice; runs must be unique'
    )
  return runs


def _run_of(entry: object, flag: str) -> Run:
  """Returns the run that an entry of RUNS describes.

  Raises:
    ValueError: in one line that begins with the flag, if it describes none.
  """
  if not isinstance(entry, dict):
    raise ValueError(f'{flag}: {entry}: must be a dictionary')
  types = {'name': str, 'config': str, 'seed': int, 'experiment': str}
  unknown = entry.keys() - types.keys() - {'overrides', 'test'}
  missing = types.keys() - {'experiment'} - entry.keys()
  if unknown or missing:
    raise ValueError(
      f'{flag}: {entry} has unknown keys {sorted(unknown)} and lacks '
      f'{sorted(missing)}; must have name, config, seed and optionally '
      'experiment, overrides and test'
    )
  changes = [entry.get(name, {}) for name in ('overrides', 'test')]
  if not all(isinstance(fields, dict) for fields in changes):
    raise ValueError(
      f'{flag}: {entry}: overrides and test must be dictionaries'
    )
  names = [name for fields in changes for name in fields]
  if 'seed' in changes[0] or not all(isinstance(name, str) for name in names):
    raise ValueError(
      f'{flag}: {entry}: overrides and test must have names of config fields, '
      'overrides not seed'
    )
  values = {name: _python(entry[name]) for name in types if name in entry}
  for name, value in values.items():
    if type(value) is not types[name]:
      raise ValueError(
        f'{flag}: {name}={value!r}: must be of type {types[name].__name__}'
      )
  try:
    overrides, test = (_plain(tuple(fields.items())) for fields in changes)
  except TypeError as error:
    raise ValueError(f'{flag}: {entry}: overrides and test {error}') from error
  run = Run(**values, overrides=overrides, test=test)
  folder = run.folder
  if not folder.isprintable() or len(folder.encode()) > _MAX_FOLDER_BYTES:
    raise ValueError(
      f'{flag}: run {folder!r:.80}: cannot be a folder; experiment-name-seed '
      f'must be printable and at most {_MAX_FOLDER_BYTES} bytes'
    )
  return run


def _python(value: object) -> object:
  """Returns a value with Python's numbers instead of NumPy's."""
  return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _plain(value: object) -> object:
  """Returns a value that can be hashed, with tuples instead of lists.

  Raises:
    TypeError: if it cannot be the value of a field.
  """
  value = _python(value)
  if isinstance(value, list | tuple):
    return tuple(map(_plain, value))
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise TypeError(
    f'have {value!r:.80}, a {type(value).__name__}; must have None, numbers, '
    'texts or tuples of these'
  )


def _expand_home(field: str, value: object) -> object:
  """Returns a value with the home folder instead of `~`, as flags have it."""
  is_path = isinstance(value, str) and re.match('~(/|$)', value)
  if is_path and not field.startswith('env.'):
    return os.path.expanduser(value)
  return value


def file_name(text: str) -> str:
  """Returns a text that can be part of the name of a file."""
  return re.sub('[ /]', '-', text)


def finished(run: Run, root: pathlib.Path) -> bool:
  """Returns whether a run has completed all its iterations.

  Raises:
    ValueError: in one line, if its folder holds a run with another config.
  """
  folder, config = root / run.folder, run.load()
  advice = 'give the run another name in the sweep, or move the folder'
  inputs = _moved_model(config, folder)
  run_config.check_resume(config, str(folder), inputs=inputs, advice=advice)
  return policy_files.is_finished(folder, config.num_iterations)


def _moved_model(
  config: ml_collections.ConfigDict, folder: pathlib.Path
) -> dict[str, str]:
  """Returns the files of the model if a run has another path; otherwise {}."""
  try:
    stored = config_fields.flatten(files.read_stored(folder / 'config.json'))
    if stored.get('model.path') not in (None, config.model.path):
      return model_builders.describe_files(config)
  except (OSError, ValueError):  # No config or model: `check_resume` says so.
    pass
  return {}


def read_test(run: Run, root: pathlib.Path) -> dict[str, list[bool]] | None:
  """Returns the successes by task of a run's test; None if it must be made.

  It must be made if its file is missing or damaged, or is not of the run's
  policy as it is now, with the config that the sweep has now.
  """
  path, folder = run.test_result(root), root / run.folder
  try:
    by_task = outcomes.read_evaluation(path)
  except ValueError:  # Missing or damaged.
    return None
  report = files.read_stored(path)
  stored, wanted = report.get('config', {}), run.load(run.test)
  if not run_config.is_same(stored, wanted, ignored=['model.path']):
    return None
  (policy,) = report['policies'].values()
  iterations = policy_files.iterations(folder / 'policy')
  if None in (iterations, policy.get('iterations')):  # Of an earlier release.
    is_current = not metrics.is_older(path, folder)
  else:
    is_current = policy['iterations'] == iterations
  return by_task if is_current else None
