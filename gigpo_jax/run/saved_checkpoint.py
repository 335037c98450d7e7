"""A policy in a checkpoint of a run: `--checkpoint` of an evaluation.

The flag is the work directory of the run, for its newest checkpoint, or
WORKDIR/checkpoints/ITERATION.
"""

import pathlib

import ml_collections

from gigpo_jax import builders, checkpoint
from gigpo_jax.run import config_fields, model_builders, run_config
from gigpo_jax.runtime import console, files

# Fields that change what a policy reads and how it answers.
_PROMPT_FIELDS = ('env.', 'model.', 'rollout.max_', 'rollout.prompt_overflow')


def _locate(path: str) -> tuple[pathlib.Path, int | None]:
  """Returns the checkpoint folder of a run, and the iteration if given."""
  folder = pathlib.Path(path)
  if folder.parent.name == 'checkpoints' and folder.name.isdecimal():
    return folder.parent, int(folder.name)
  return folder / 'checkpoints', None


def check(path: str, flag: str = 'checkpoint') -> None:
  """Checks that a checkpoint, or one of a run, can be read.

  Args:
    path: the checkpoint, or the run.
    flag: name of the flag that has the path.

  Raises:
    ValueError: in one line, if it cannot.
  """
  folder, iteration = _locate(path)
  if iteration is not None:
    if not (folder / str(iteration)).is_dir():
      existing = ', '.join(map(str, files.numbered_folders(folder))) or 'none'
      raise ValueError(
        f'--{flag}={path}: does not exist; must be a checkpoint; {folder} has '
        f'{existing}'
      )
    if reason := checkpoint.find_damage(folder / str(iteration)):
      raise ValueError(f'--{flag}={path}: damaged ({reason}); choose another')
  elif not checkpoint.check_folder(folder):
    raise ValueError(
      f'--{flag}={path}: has no checkpoints/; must be the --workdir of '
      'a run, or WORKDIR/checkpoints/ITERATION'
    )


def compare(config: ml_collections.ConfigDict, path: str) -> None:
  """Compares the config with that of the run that saved a checkpoint.

  Prints which fields of the prompts differ.

  Raises:
    ValueError: in one line, if the config has no model and the run had one, or
      the checkpoint has adapters of another network, of changed weights, or
      with another scale.
  """
  folder, _ = _locate(path)
  stored_path = folder.parent / 'config.json'
  if not stored_path.is_file():
    return
  values = files.read_stored(stored_path)
  stored = config_fields.flatten(values)
  current = run_config.experiment(config)
  if stored.get('model.path') and not config.model.path:
    raise ValueError(
      f'model.path={config.model.path}: the run of --checkpoint={path} has '
      f'{stored["model.path"]}; set --config.model.path to it'
    )
  differing = [
    f'{field}={value} (trained with {stored[field]})'
    for field, value in current.items()
    if field.startswith(_PROMPT_FIELDS) and stored.get(field, value) != value
  ]
  if differing:
    console.log(f'--checkpoint={path}: {", ".join(differing)}')
  if not (stored.get('lora.rank') or config.lora.rank):
    return
  for field in ('model.path', *(n for n in current if n.startswith('lora.'))):
    if field in stored and stored[field] != current[field]:
      raise ValueError(
        f'{field}={current[field]}: the adapters of --checkpoint={path} were '
        f'trained with {stored[field]}; must be the same'
      )
  inputs = run_config.stored_inputs(values)
  for name, text in model_builders.describe_files(config).items():
    if inputs.get(name, text) == text:
      continue
    if name.endswith('tokenizer files'):
      console.log(f'--checkpoint={path}: {name} have changed since')
    else:
      raise ValueError(
        f'model.path={config.model.path}: its files have changed since the '
        f'adapters of --checkpoint={path} were trained; must be the same'
      )


def restore(
  config: ml_collections.ConfigDict,
  bundle: model_builders.ModelBundle,
  path: str,
) -> tuple[dict, dict]:
  """Returns the parameters in a checkpoint, and the frozen parameters.

  Args:
    config: the experiment.
    bundle: its model.
    path: the checkpoint, or the run whose newest one is meant.
  """
  learner = builders.make_learner(config, bundle, builders.make_loss(config))
  state, base = learner.abstract_state()
  if config.lora.rank:  # Only the adapters are in the checkpoint.
    state = checkpoint.abstract_state(learner.init(bundle.load()))
    base = learner.base
  return restore_params(path, {'policy': state.params})['policy'], base


def restore_params(path: str, shapes: dict[str, dict]) -> dict[str, dict]:
  """Returns parameters in a checkpoint.

  Args:
    path: the checkpoint, or the run whose newest one is meant.
    shapes: shapes, dtypes and shardings of the parameters, by name of the state
      that has them: `policy` or `critic`.
  """
  # The state of an optimizer depends on its options.
  template = {name: {'params': params} for name, params in shapes.items()}
  folder, iteration = _locate(path)
  with checkpoint.Checkpointer(folder, read_only=True) as checkpointer:
    iteration, states, _ = checkpointer.restore(
      template, iteration=iteration, partial=True
    )
  console.log(f'{" and ".join(shapes)} after iteration {iteration}')
  return {name: states[name]['params'] for name in shapes}
