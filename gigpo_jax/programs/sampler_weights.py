"""The sampler's copy of the parameters: merged, fused, cast or quantized."""

import dataclasses
import functools

import jax

from gigpo_jax.models import lora, parameters, quantization, qwen

# Forms of the parameters; see `sampler.Sampler`.
WEIGHTS = ('model', 'int8', 'adapters')


def parameter_bytes(config: qwen.QwenConfig, weights: str) -> int:
  """Returns the bytes of a model's parameters in the sampler.

  Args:
    config: shape of the model.
    weights: one of WEIGHTS.
  """
  copy = sampled(config, weights != 'adapters')
  made = functools.partial(prepare, config, copy, weights == 'int8')
  params = jax.eval_shape(
    lambda: made(parameters.init(config, jax.random.key(0)), {})
  )
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def sampled(
  config: qwen.QwenConfig, merge: bool, tensor: int = 1
) -> qwen.QwenConfig:
  """Returns the shape of the sampler's copy of the model.

  Args:
    config: shape of the model.
    merge: whether adapters are merged into the matrices.
    tensor: devices that a copy is sharded over.
  """
  adapters = None if merge else config.adapters
  return dataclasses.replace(config, adapters=adapters, fused=tensor)


def prepare(
  trained: qwen.QwenConfig,
  config: qwen.QwenConfig,
  int8: bool,
  params: dict,
  base: dict,
) -> dict:
  """Returns parameters in the form that `qwen.prefill` and `decode` take.

  Args:
    trained: shape of the learner's model.
    config: shape of the sampler's copy; see `sampled`.
    int8: whether to quantize the matrices.
    params: the learner's parameters.
    base: frozen parameters of a network with adapters, else {}.
  """
  params = lora.combine(base, params)
  if trained.adapters and not config.adapters:
    params = lora.merge(trained.adapters, params)
  params = parameters.fuse(config, params)
  if int8:
    params = quantization.quantize(config, params)
  else:
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  return parameters.unstack_layers(config, params)
