"""Store the config of a run in its work directory, and compare configs."""

import json
import pathlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from gigpo_jax import deprecated
from gigpo_jax.run import config_fields
from gigpo_jax.runtime import files

# File name of the config in a work directory.
_STORED = 'config.json'
# Key of the inputs in the stored config.
_INPUTS = 'inputs'
_MODEL = 'model.path'
# Value of a field that a config lacks.
_MISSING = 'missing'
# Fields that may differ between the processes of a run.
_LOCAL = frozenset(
  {
    'checkpoint.keep',
    'episodes.every',
    'metrics.wandb',
    'pool.max_resets_per_worker',
    'pool.max_worker_mib',
    'pool.num_workers',
    'pool.reset_timeout_secs',
    'pool.step_timeout_secs',
    'reward.judge.request_secs',
    'reward.num_workers',
    'reward.timeout_secs',
  }
)
# Fields that may differ when a run resumes: these, and how the devices share
# the work, which may change the last bits of a sum.
_MAY_DIFFER = _LOCAL | {
  'checkpoint.every',
  'learner.microbatch_tokens',
  'mesh.data',
  'mesh.expert',
  'mesh.fsdp',
  'mesh.sequence',
  'mesh.tensor',
  'model.remat',
  'pool.num_envs',
  'rollout.tensor',
}


def save(
  config: ml_collections.ConfigDict,
  workdir: str,
  name: str = _STORED,
  *,
  inputs: Mapping[str, str] | None = None,
  keep_earlier: bool = False,
) -> None:
  """Stores the config in a work directory.

  Args:
    config: the experiment.
    workdir: the folder.
    name: name of the file.
    inputs: what the run reads apart from the config; see `check_resume`.
    keep_earlier: whether to keep a file of another experiment under a free
      name, with a line that names it.
  """
  content = json.loads(config.to_json_best_effort())
  stored = content | {_INPUTS: dict(inputs or {}), 'version': files.VERSION}
  text = json.dumps(stored, indent=2, sort_keys=True) + '\n'
  path = pathlib.Path(workdir) / name
  if keep_earlier and _is_another(path, stored):
    backup = files.back_up(path)
    print(f'{path}: the earlier file is kept as {backup.name}', flush=True)
  files.write_atomic(path, text)


def _is_another(path: pathlib.Path, stored: Mapping[str, Any]) -> bool:
  """Returns whether a file has fields that a resume must not change."""
  if not path.exists():
    return False
  try:
    old = fixed_fields(files.read_stored(path))
  except ValueError:  # Damaged.
    return True
  new = fixed_fields(stored)
  ignored = dict.fromkeys(('num_iterations', 'version'))  # Longer, or newer.
  return old | ignored != new | ignored


def holds_run(workdir: str) -> bool:
  """Returns whether a folder is the work directory of launch/train.py.

  Raises:
    ValueError: in one line, if its config.json is that of another program.
  """
  root = pathlib.Path(workdir)
  try:
    is_other = 'rollout' not in files.read_object(root / _STORED)
  except (OSError, ValueError):  # Missing or damaged.
    is_other = False
  if is_other:
    raise ValueError(
      f'--workdir={workdir}: its {_STORED} is of another program and would be '
      'overwritten; must be another folder'
    )
  return any((root / name).exists() for name in (_STORED, 'checkpoints'))


def stored_section(workdir: str, name: str) -> dict[str, int]:
  """Returns the whole numbers in a section of a run's stored config.

  Args:
    workdir: work directory of the run.
    name: name of the section.

  Returns:
    The numbers by field; {} if there is no readable config.
  """
  try:
    section = files.read_stored(pathlib.Path(workdir) / _STORED).get(name)
  except ValueError:  # Missing or damaged.
    return {}
  values = section.items() if isinstance(section, dict) else ()
  return {key: value for key, value in values if isinstance(value, int)}


def stored_inputs(stored: Mapping[str, Any]) -> dict[str, str]:
  """Returns what a run read apart from its config; see `check_resume`.

  Args:
    stored: the values in its config.json.
  """
  inputs = stored.get(_INPUTS)
  return inputs if isinstance(inputs, dict) else {}


def check_workdir(workdir: str, flag: str = '--workdir') -> None:
  """Creates a work directory and checks that it is writable.

  Args:
    workdir: the folder.
    flag: the flag that names it.

  Raises:
    ValueError: in one line, if it is not.
  """
  if '://' in workdir:
    raise ValueError(
      f'{flag}={workdir}: cannot write to a bucket; must be a local or mounted '
      'folder'
    )
  path = pathlib.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(bytes(4096))
      file.flush()
  except OSError as error:
    raise ValueError(
      f'{flag}={workdir}: cannot be written ({error.strerror}); must be a '
      'writable folder with free space'
    ) from error


def check_resume(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  allow_change: bool = False,
  name: str = _STORED,
  length: str = 'num_iterations',
  results: Sequence[str] = ('metrics.jsonl',),
  inputs: Mapping[str, str] | None = None,
  advice: str = 'use another --workdir',
) -> None:
  """Compares the config with the one in a work directory, if a run started.

  Args:
    config: the experiment.
    workdir: work directory of the run.
    allow_change: whether the run may resume with another config; the changes
      are printed.
    name: name of the file with the config.
    length: the field with the length of the run, which may grow.
    results: patterns of folders and non-empty files, one of which a run has
      that got beyond its start. A checkpoint is another.
    inputs: what the run reads apart from the config, such as the fingerprint of
      the files of a model, by a text that names it.
    advice: what to do if the config is another; the end of the error.

  Raises:
    ValueError: in one line with the differing fields, if the work directory
      holds a run of another config.
  """
  path = pathlib.Path(workdir) / name
  current = json.loads(config.to_json_best_effort())
  outputs = [file for pattern in results for file in path.parent.glob(pattern)]
  started = any(file.is_dir() or file.stat().st_size for file in outputs)
  saved = files.numbered_folders(path.parent / 'checkpoints')
  if not (saved or (started and path.exists())):
    return
  played = saved[-1] + 1 if saved else 0
  if name == _STORED and config.num_iterations < played:
    raise ValueError(
      f'num_iterations={config.num_iterations}: the run in --workdir={workdir} '
      f'has {played} iterations; must be at least {played}, or another '
      '--workdir'
    )
  try:
    stored = files.read_stored(path)
    if not isinstance(stored.get('num_iterations'), int):
      raise ValueError('lacks num_iterations')
    deprecated.update_stored(stored, current)
    old_inputs = stored.pop(_INPUTS, {})
    if not isinstance(old_inputs, dict):
      raise ValueError(f'its {_INPUTS} are not an object')
  except ValueError as error:
    if allow_change:
      return
    raise ValueError(
      f'--workdir={workdir}: its {name} cannot be read ({error}); {advice}'
    ) from error
  may_differ = set(_MAY_DIFFER)
  # The same files at another path, such as an absolute one.
  model = _model_files(stored, old_inputs)
  if model and model == _model_files(current, inputs or {}):
    may_differ.add(_MODEL)
  changed = [
    _change(field, old, new)
    for field, (old, new) in differences(stored, current)
    if field not in may_differ
    # A longer run is the same experiment.
    and not (field == length and old is not _MISSING and new >= old)
    and not (old is _MISSING and _is_default(field, new))
  ]
  changed += [
    _change(key, old, inputs[key])
    for key, old in old_inputs.items()
    if key in (inputs or {}) and inputs[key] != old
  ]
  if changed and allow_change:
    print(f'resuming with another config: {", ".join(changed)}', flush=True)
  elif changed:
    raise ValueError(
      f'--workdir={workdir}: holds a run of another config: '
      f'{", ".join(changed)}; {advice}'
    )


def _model_files(
  config: Mapping[str, Any], inputs: Mapping[str, str]
) -> dict[str, str]:
  """Returns the inputs that are files of the model, without its path."""
  start = f'{_MODEL}={config_fields.flatten(config).get(_MODEL)}: '
  return {
    key.removeprefix(start): text
    for key, text in inputs.items()
    if key.startswith(start)
  }


def _change(field: str, old: object, new: object) -> str:
  """Returns a line about a field, in which None and 'None' differ."""
  if str(old) == str(new):
    return f'{field}={new!r} (was {old!r})'
  return f'{field}={new} (was {old})'


def _is_default(field: str, value: object) -> bool:
  """Returns whether a field that an older release lacks has its default.

  The defaults of environment fields are unknown; a falsy value counts as one.
  """
  default = _fields(config_fields.defaults()).get(field)
  return not value if default is None else value == default


def experiment(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the fields that all processes of a run share, as 'env.name'."""
  return {k: v for k, v in _fields(config).items() if k not in _LOCAL}


def is_same(
  stored: Mapping[str, Any],
  config: ml_collections.ConfigDict,
  ignored: Collection[str],
) -> bool:
  """Returns whether two configs differ only in what a resume may change.

  Args:
    stored: the fields of a config by dotted names, possibly of an older
      release; fields that it lacks may have any value.
    config: the other one.
    ignored: further fields that may differ.
  """
  nested: dict[str, Any] = {}
  for field, value in stored.items():
    *sections, name = field.split('.')
    section = nested
    for key in sections:
      section = section.setdefault(key, {})
    section[name] = value
  current = json.loads(config.to_json_best_effort())
  deprecated.update_stored(nested, current)
  old, new = fixed_fields(nested), fixed_fields(current)
  return all(old.get(k, x) == x for k, x in new.items() if k not in ignored)


def fixed_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a stored config that a resume must not change."""
  fields = config_fields.flatten(stored)
  return {k: v for k, v in fields.items() if k not in _MAY_DIFFER}


def _fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the values of all fields as they are stored."""
  return config_fields.flatten(json.loads(config.to_json_best_effort()))


def differences(
  old: dict, new: dict, missing: object = _MISSING
) -> Iterator[tuple[str, tuple]]:
  """Yields each field in which configs differ, and its values.

  Args:
    old: a config, as stored or flat.
    new: another one.
    missing: value of a field that a config lacks.
  """
  old, new = map(config_fields.flatten, (old, new))
  for field in sorted(old.keys() | new.keys()):
    values = old.get(field, missing), new.get(field, missing)
    if values[0] != values[1]:
      yield field, values
