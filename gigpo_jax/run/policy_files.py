"""The files of a trained policy: a Hugging Face folder, and adapters."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from gigpo_jax import metrics
from gigpo_jax.models import huggingface, lora
from gigpo_jax.run import model_builders, run_config
from gigpo_jax.runtime import distributed, files

# The folders that `export` replaces.
FOLDERS = ('policy', 'adapters')
# File in the folder `policy`.
_TRAINING = 'training.json'


def iterations(policy: pathlib.Path) -> int | None:
  """Returns how many iterations have trained a policy; None if not known.

  Args:
    policy: the folder `policy` that `export` wrote.
  """
  try:
    stored = files.read_stored(policy / _TRAINING).get('iterations')
  except ValueError:  # Missing or damaged.
    return None
  return stored if isinstance(stored, int) else None


def is_finished(folder: pathlib.Path, num_iterations: int) -> bool:
  """Returns whether a run has metrics of all iterations, and its policy.

  Args:
    folder: its work directory.
    num_iterations: number of its iterations.
  """
  lines = metrics.read(folder)
  # Agents with adapters of their own have a policy each.
  policies = list((folder / 'policy').glob('**/config.json'))
  if not lines or not policies:
    return False
  if lines[-1]['iteration'] < num_iterations - 1:
    return False
  # A finished run can be resumed with more iterations, and then be killed
  # before it writes its policy again.
  trained = iterations(folder / 'policy')
  if trained is None:  # Of an earlier release.
    return not any(metrics.is_older(path, folder) for path in policies)
  return trained >= num_iterations


def check_export(export: str, checkpoints: Sequence[str]) -> None:
  """Checks the flag --export of evaluations.

  Raises:
    ValueError: in one line, if the policy cannot be written.
  """
  if not export:
    return
  if len(checkpoints) != 1:
    raise ValueError(
      f'--export={export}: writes the policy of one checkpoint; needs exactly '
      'one --checkpoint'
    )
  folder = pathlib.Path(export)
  for name in FOLDERS:
    if (folder / name).exists() and not _was_interrupted(folder):
      raise ValueError(
        f'--export={export}: already has a folder {name}; must be a new folder'
      )


def _was_interrupted(folder: pathlib.Path) -> bool:
  """Returns whether an export ended before it renamed the policy.

  The adapters in the work directory of a run are the run's own.
  """
  is_partial = (folder / 'policy.tmp').is_dir()
  is_partial &= not (folder / 'policy').exists()
  return is_partial and not run_config.holds_run(str(folder))


def check_target(start: str | None, workdir: str) -> None:
  """Checks that the policy to write is not the one to start from.

  Args:
    start: `config.model.path`.
    workdir: folder in which the new policy is written.

  Raises:
    ValueError: in one line, if it is.
  """
  policy = (pathlib.Path(workdir) / 'policy').resolve()
  if start and pathlib.Path(start).resolve() == policy:
    raise ValueError(
      f'--workdir={workdir}: its policy/ is model.path, which the run would '
      'overwrite at its end; must be another folder'
    )


def check_owner(workdir: str) -> None:
  """Checks that a policy in the work directory of a run is the run's own.

  Raises:
    ValueError: in one line, if the run would overwrite another one.
  """
  if not run_config.holds_run(workdir):
    refuse_existing(workdir, FOLDERS)


def refuse_existing(workdir: str, names: Sequence[str]) -> None:
  """Checks that a folder has no results of another command.

  Args:
    workdir: the folder.
    names: names or patterns of files and folders in it that the command would
      replace.

  Raises:
    ValueError: in one line, if one of them exists.
  """
  for name in names:
    if existing := sorted(pathlib.Path(workdir).glob(name)):
      raise ValueError(
        f'--workdir={workdir}: its {existing[0].name} is of another command '
        'and would be overwritten; must be another folder'
      )


def export(
  folder: pathlib.Path,
  bundle: model_builders.ModelBundle,
  base: Any,
  params: Any,
  start: str,
  *,
  iterations: int | None = None,
) -> None:
  """Writes the policy, and adapters also separately, as Hugging Face files.

  If agents have adapters of their own, each agent has a folder.

  Args:
    folder: parent of the folders `policy` and `adapters`.
    bundle: the model.
    base: the frozen parameters.
    params: the trained parameters.
    start: `config.model.path`, to which the adapters belong.
    iterations: number of iterations of the run that has trained the policy;
      None: not known.
  """
  model = bundle.model
  policies = lora.by_agent(model.adapters, params)
  if model.adapters:
    single = lora.for_agent(model.adapters)
    model = dataclasses.replace(model, adapters=single)
  with contextlib.ExitStack() as stack:
    # The adapters are entered last and so renamed first: a finished policy
    # means a finished export.
    path = stack.enter_context(distributed.atomic_directory(folder / 'policy'))
    for agent, own in policies.items():
      huggingface.save(
        os.path.join(path, agent),
        model,
        lora.combine(base, own),
        tokenizer_directory=bundle.tokenizer.directory,
        stop_ids=bundle.tokenizer.stop_ids,
      )
    if iterations is not None and distributed.is_main_process():
      text = json.dumps({'iterations': iterations, 'version': files.VERSION})
      files.write_atomic(pathlib.Path(path, _TRAINING), text + '\n')
    if not model.adapters:
      return
    adapters = distributed.atomic_directory(folder / 'adapters')
    path = stack.enter_context(adapters)
    for agent, own in policies.items():
      huggingface.save_adapters(os.path.join(path, agent), model, own, start)
