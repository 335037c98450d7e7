"""Choose what the backward pass recomputes, from the memory of the update."""

import dataclasses
from collections.abc import Callable

import jax
import ml_collections

from gigpo_jax import builders
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import qwen_config
from gigpo_jax.run import model_builders
from gigpo_jax.runtime import console, distributed, errors

# Share of a device's memory that the update may take; fragmentation and the
# runtime need the rest.
USABLE = 0.95

# Options of a compilation that only estimates memory, by platform. A GPU does
# not try out the kernels.
ESTIMATE_OPTIONS = {'gpu': {'xla_gpu_autotune_level': 0}}


def resolve(
  config: ml_collections.ConfigDict,
  bundle: model_builders.ModelBundle,
  *,
  has_critic: bool = False,
) -> model_builders.ModelBundle:
  """Returns the model with the mode of `model.remat`; prints what auto chose.

  auto is the first of none, matrices and layer whose update fits the memory of
  a device. Where that memory is unknown, as on CPUs, auto is none for networks
  whose layers are unrolled, and layer for deeper ones.

  Args:
    config: the experiment.
    bundle: the model.
    has_critic: whether a critic's state is in memory as well.
  """
  if config.model.remat != 'auto':
    return bundle
  limit = mesh_lib.device_bytes()

  def fits(mode: str) -> bool:
    needed = update_bytes(config, with_mode(bundle, mode), has_critic)
    return all(distributed.all_gather_objects(needed <= USABLE * limit))

  if limit is not None:
    mode = fastest(fits)
  elif bundle.model.num_layers <= qwen_config.MAX_UNROLLED:
    mode = 'none'
  else:
    mode = 'layer'
  console.log(f'model.remat=auto: {mode}')
  return with_mode(bundle, mode)


def fastest(fits: Callable[[str], bool]) -> str:
  """Returns the fastest mode that fits; the last mode is not tried."""
  *modes, last = qwen_config.REMATS
  return next(filter(fits, modes), last)


def with_mode(
  bundle: model_builders.ModelBundle, mode: str
) -> model_builders.ModelBundle:
  """Returns the model with a mode of rematerialization."""
  model = dataclasses.replace(bundle.model, remat=mode)
  return dataclasses.replace(bundle, model=model)


def update_bytes(
  config: ml_collections.ConfigDict,
  bundle: model_builders.ModelBundle,
  has_critic: bool = False,
) -> float:
  """Returns the bytes per device during an update; compiles its program.

  The result is infinite if the compiler finds that they exceed the memory.

  Args:
    config: the experiment.
    bundle: the model; its devices need not exist.
    has_critic: whether a critic's state is in memory as well.
  """
  learner = builders.make_learner(config, bundle, builders.make_loss(config))
  state, _ = learner.abstract_state()
  resident = [state.opt_state]
  if builders.needs_reference(config):
    resident.append(learner.abstract_reference())
  if has_critic:
    resident.append(builders.make_critic(config, bundle).abstract_state())
  lowered = learner.lower(['accumulate'])['accumulate']
  platform = bundle.mesh.devices.flat[0].platform
  try:
    compiled = lowered.compile(ESTIMATE_OPTIONS.get(platform))
  except jax.errors.JaxRuntimeError as error:
    if not errors.is_out_of_memory(error):
      raise
    return float('inf')
  needed = program_bytes(compiled, platform)
  return needed + mesh_lib.bytes_per_device(resident)


def program_bytes(compiled: jax.stages.Compiled, platform: str) -> int:
  """Returns the bytes per device that a program needs, with its arguments."""
  memory = compiled.memory_analysis()
  if platform == 'tpu':
    return memory.peak_memory_in_bytes
  # Temporary memory is one allocation, and the peak may exclude it.
  needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  return needed + memory.output_size_in_bytes - memory.alias_size_in_bytes
