"""Build the model of an experiment, with mesh, tokenizer and sampler.

The config stops here; `builders` makes the other parts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

from envs import turns
from gigpo_jax import config as config_lib
from gigpo_jax import mesh, models, sampler, tokenizer
from gigpo_jax.models import (
  attention,
  decode_attention,
  huggingface,
  lora,
  parameters,
  qwen,
  qwen_config,
)
from gigpo_jax.run import model_check, run_config
from gigpo_jax.runtime import distributed

# The platform of each kernel of attention.
_PLATFORMS = attention.PLATFORMS | decode_attention.PLATFORMS


@dataclasses.dataclass(frozen=True)
class ModelBundle:
  """A model on its mesh, with its tokenizer and sampler.

  Attributes:
    model: config of the network.
    mesh: the devices.
    tokenizer: tokenizer of the checkpoint.
    load: loads the checkpoint's parameters onto the mesh.
    sampler: samples completions for prompts.
  """

  model: qwen.QwenConfig
  mesh: jax.sharding.Mesh
  tokenizer: tokenizer.Tokenizer
  load: Callable[[], dict]
  sampler: sampler.Sampler

  def compile_together(self, params: dict, base: dict | None = None) -> None:
    """Compiles the sampler's programs in all processes; not in a single one.

    Each process samples its own requests, and a process that compiles a program
    alone may wait for the others; see `compilation.Compiler`.

    Args:
      params: parameters of the policy.
      base: frozen parameters of a network with adapters; None: no adapters.
    """
    if distributed.is_multi_process():
      self.sampler.warm_up(params, base)


def describe_files(config: ml_collections.ConfigDict) -> dict[str, str]:
  """Returns texts that tell the model's files apart, by their names."""
  directory = model_check.model_directory(config.model.path)
  texts = huggingface.fingerprints(directory)
  return {f'model.path={config.model.path}: {k}': x for k, x in texts.items()}


def make_model_bundle(config: ml_collections.ConfigDict) -> ModelBundle:
  """Returns the model of an experiment; initializes the devices.

  Raises:
    ValueError: in one line, if JAX_PLATFORMS has no devices, or the hosts of a
      run differ in config or model.
  """
  distributed.start_devices()
  directory = model_check.model_directory(config.model.path)
  distributed.check_same(run_config.experiment(config) | describe_files(config))
  shape = huggingface.read_config(directory)
  devices = make_mesh(config, shape, jax.devices(), mesh.device_bytes())
  model = configure_model(shape, config, devices)
  mesh.check(devices, parameters.shapes(model), parameters.logical_axes(model))
  text = tokenizer.Tokenizer(
    directory, enable_thinking=config.model.enable_thinking
  )
  return ModelBundle(
    model=model,
    mesh=devices,
    tokenizer=text,
    load=functools.partial(_load, directory, model, devices, config.seed),
    sampler=sampler.Sampler(
      model,
      devices,
      batch_buckets=tuple(config.rollout.batch_buckets),
      stop_ids=text.stop_ids,
      vocab_size=text.vocab_size,
      tensor=sampling_tensor(config, model, devices, mesh.device_bytes()),
      find_stop=(
        text.stop_finder(turns.ENDS) if config.rollout.stop_at_action else None
      ),
      **sampler_kwargs(config),
    ),
  )


def make_mesh(
  config: ml_collections.ConfigDict,
  shape: qwen.QwenConfig,
  devices: Sequence[jax.Device],
  device_bytes: float | None,
) -> jax.sharding.Mesh:
  """Returns the mesh of an experiment.

  Args:
    config: the experiment.
    shape: shape of the network.
    devices: all devices.
    device_bytes: memory of a device; None: unknown.
  """
  sizes = dict(config.mesh)
  if sizes['data'] == 0 and sizes['fsdp'] != -1:
    # The remaining devices, unless another axis has them.
    sizes['data'] = 1 if -1 in sizes.values() else -1
  elif sizes['data'] == 0:
    # Devices that share an element of a row's activations, and of a host.
    others = sizes['expert'] * sizes['sequence'] * sizes['tensor']
    first = devices[0].process_index
    per_host = sum(device.process_index == first for device in devices)
    # Bytes per parameter of parameters, gradients and moments, or of frozen
    # parameters.
    itemsize = 2 if config.lora.rank else 16
    sizes['data'] = mesh.replicas(
      len(devices) // others,
      per_host // math.gcd(per_host, others),
      width=shape.hidden_size,
      state_bytes=itemsize * models.num_parameters(shape),
      device_bytes=device_bytes,
    )
  return mesh.make_mesh(**sizes, devices=devices)


def sampler_kwargs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the `Sampler` arguments that depend only on the config."""
  rollouts = config.rollout
  options = [make_sampling(config, evaluation=x) for x in (False, True)]
  return {
    'seed': config.seed,
    'truncates': any(sampling.truncates for sampling in options),
    'prompt_buckets': config_lib.buckets_up_to(
      rollouts.prompt_buckets, rollouts.max_prompt_tokens
    ),
    'max_completion_tokens': rollouts.max_completion_tokens,
    'decode_tokens': rollouts.decode_tokens,
    'draft_tokens': rollouts.draft_tokens,
    'weights': rollouts.weights,
    'reuse': rollouts.reuse_cache,
    'prefill_chunk': rollouts.prefill_chunk,
    'parked': rollouts.parked_slots,
  }


def configure_model(
  model: qwen.QwenConfig,
  config: ml_collections.ConfigDict,
  devices: jax.sharding.Mesh,
) -> qwen.QwenConfig:
  """Returns a network with the choices of an experiment for its devices.

  For model.remat=auto, see `remat.resolve`.

  Args:
    model: shape of the network.
    config: the experiment.
    devices: the mesh.

  Raises:
    ValueError: in one line, if a kernel is for another platform.
  """
  device = devices.devices.flat[0]
  model = dataclasses.replace(model, dtype=config.model.dtype)
  choices = qwen_config.platform_fields(
    model, device.platform, _compute_capability(device)
  )
  if config.mesh.sequence != 1:
    choices['attention'] = 'xla'  # The others cannot shard rows.
  for field in ('attention', 'decode_attention'):
    if config.model[field] != 'auto':
      choices[field] = config.model[field]
    kernel = choices[field]
    platform = _PLATFORMS.get(kernel, device.platform)
    if platform != device.platform:
      raise ValueError(
        f'model.{field}={kernel}: is for {platform}s, not for '
        f'{device.platform}s; must be auto or xla'
      )
  return dataclasses.replace(
    model,
    **choices,
    remat='layer' if config.model.remat == 'auto' else config.model.remat,
    cache=config.rollout.cache,
    adapters=_adapters(config),
  )


def _compute_capability(device: jax.Device) -> float:
  """Returns the capability of an NVIDIA GPU; 0 for GPUs of other makers."""
  try:
    return float(getattr(device, 'compute_capability', math.inf))
  except ValueError:  # 'gfx942'
    return 0.0


def _adapters(config: ml_collections.ConfigDict) -> lora.Lora | None:
  if not config.lora.rank:
    return None
  return lora.Lora(
    config.lora.rank,
    config.lora.alpha,
    tuple(config.lora.targets),
    tuple(config.lora.agents),
  )


def _load(
  directory: str, model: qwen.QwenConfig, devices: jax.sharding.Mesh, seed: int
) -> dict:
  """Returns a checkpoint's parameters, with new adapters if configured.

  Parameters that are not trained are in the compute dtype.
  """
  if not model.adapters:
    return huggingface.load(directory, model, devices)
  base = huggingface.load(directory, model, devices, dtype=model.dtype)
  shardings, _ = lora.split(
    mesh.shardings(devices, parameters.logical_axes(model))
  )
  adapters = jax.jit(
    lambda key: lora.split(parameters.init(model, key))[0],
    out_shardings=shardings,
  )(jax.random.key(seed))
  return lora.combine(base, adapters)


def sampling_tensor(
  config: ml_collections.ConfigDict,
  model: qwen.QwenConfig,
  devices: jax.sharding.Mesh,
  device_bytes: int | None,
) -> int:
  """Returns the number of devices that share a copy of the sampler's model.

  Args:
    config: the experiment; `rollout.tensor` of 0 means the smallest number with
      which the model fits.
    model: the policy's shape.
    devices: the learner's mesh.
    device_bytes: memory of a device; None if it is unknown.

  Raises:
    ValueError: if the model cannot be divided so; in one line.
  """
  tensor = config.rollout.tensor or mesh.sampling_tensor(
    devices,
    sampler.parameter_bytes(model, config.rollout.weights),
    device_bytes,
    parameters.max_tensor_shards(model),
  )
  mesh.check(
    mesh.sampling_mesh(devices, tensor),
    parameters.shapes(model),
    parameters.logical_axes(model),
    field='rollout',
  )
  return tensor


def make_sampling(
  config: ml_collections.ConfigDict, *, evaluation: bool = False
) -> sampler.Sampling:
  """Returns the sampling options for training or evaluation."""
  options = config.evaluation if evaluation else config.rollout
  return sampler.Sampling(
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    min_p=options.min_p,
  )
