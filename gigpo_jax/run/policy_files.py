"""The files of a trained policy: a Hugging Face folder, and adapters."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from gigpo_jax.models import huggingface, lora
from gigpo_jax.run import model_builders
from gigpo_jax.runtime import distributed


def check_export(export: str, checkpoints: Sequence[str]) -> None:
  """Checks the flag --export of evaluations.

  Raises:
    ValueError: in one line, if the policy cannot be written.
  """
  if export and len(checkpoints) != 1:
    raise ValueError(
      f'--export={export}: writes the policy of one checkpoint; needs exactly '
      'one --checkpoint'
    )
  if export and (pathlib.Path(export) / 'policy').exists():
    raise ValueError(
      f'--export={export}: already has a folder policy; must be a new folder'
    )


def export(
  folder: pathlib.Path,
  bundle: model_builders.ModelBundle,
  base: Any,
  params: Any,
  start: str,
) -> None:
  """Writes the policy, and adapters also separately, as Hugging Face files.

  If agents have adapters of their own, each agent has a folder.

  Args:
    folder: parent of the folders `policy` and `adapters`.
    bundle: the model.
    base: the frozen parameters.
    params: the trained parameters.
    start: `config.model.path`, to which the adapters belong.
  """
  model = bundle.model
  policies = lora.by_agent(model.adapters, params)
  if model.adapters:
    single = lora.for_agent(model.adapters)
    model = dataclasses.replace(model, adapters=single)
  with distributed.atomic_directory(folder / 'policy') as path:
    for agent, own in policies.items():
      huggingface.save(
        os.path.join(path, agent),
        model,
        lora.combine(base, own),
        tokenizer_directory=bundle.tokenizer.directory,
      )
  if not model.adapters:
    return
  with distributed.atomic_directory(folder / 'adapters') as path:
    for agent, own in policies.items():
      huggingface.save_adapters(os.path.join(path, agent), model, own, start)
