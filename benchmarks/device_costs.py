"""Costs of a device's work, from bytes, operations and a few rates.

A decoding step takes the larger of two limits, reading memory and multiplying
matrices, at the rates of the device; a prefill takes their sum, an update the
matmuls alone. Decoding and prefills also take a constant per layer for small
kernels. Pure functions of numbers; nothing here starts a device.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from gigpo_jax.models import qwen
from gigpo_jax.tools import tpu_time

# Passes over the logits of a step, in float32, to sample a token. An estimate.
_LOGIT_PASSES = 6
# Bytes per parameter that an optimizer step reads and writes: parameters,
# gradients and two moments in float32.
_APPLY_BYTES = 28


@dataclasses.dataclass(frozen=True)
class Device:
  """Rates of a device; `sources` says where each number comes from.

  Attributes:
    name: name in DEVICES.
    matmul_rate: operations/s of large bfloat16 matmuls.
    copy_rate: bytes/s that a copy moves.
    decode_share: share of `copy_rate` that decoding reads memory with.
    prefill_share: share of `matmul_rate` in a prefill.
    update_share: share of `matmul_rate` in updates and log-probs.
    layer_secs: time of a layer of a decoding step or prefill in addition to
      these rates: starts of kernels, small kernels.
    program_secs: time of a program in addition to its layers.
    collective_secs: latency of a reduction over the devices of a model copy.
    exchange_rate: bytes/s that a device receives from other devices.
    sources: where the numbers come from, by name of the field.
  """

  name: str
  matmul_rate: float
  copy_rate: float
  decode_share: float
  prefill_share: float
  update_share: float
  layer_secs: float
  program_secs: float
  collective_secs: float
  exchange_rate: float
  sources: dict[str, str] = dataclasses.field(default_factory=dict)


_GUESS = 'estimated'
_SHARES = dict.fromkeys(
  ('decode_share', 'prefill_share', 'update_share', 'layer_secs'), _GUESS
) | dict.fromkeys(('program_secs', 'collective_secs'), _GUESS)


def _tpu(name: str) -> Device:
  """Returns a TPU with the rates of `tpu_time`, and estimated costs."""
  chip = tpu_time.CHIPS[name]
  published = dict.fromkeys(
    ('matmul_rate', 'copy_rate', 'exchange_rate'), 'gigpo_jax.tools.tpu_time'
  )
  return Device(
    name=name,
    matmul_rate=chip.flops,
    copy_rate=chip.memory_rate,
    decode_share=0.8,
    prefill_share=0.6,
    update_share=0.5,
    layer_secs=20e-6,
    program_secs=100e-6,
    collective_secs=10e-6,
    exchange_rate=chip.link_rate,
    sources=_SHARES | published,
  )


def _hopper(
  name: str,
  matmul: float,
  copy: float,
  *,
  guessed: Sequence[str] = (),
  **costs: float,
) -> Device:
  """Returns a GPU with measured rates.

  Args:
    name: see `Device`.
    matmul: see `Device`.
    copy: see `Device`.
    guessed: names of the costs that are not fitted to measurements.
    **costs: further costs.
  """
  return Device(
    name=name,
    matmul_rate=matmul,
    copy_rate=copy,
    decode_share=1.0,
    program_secs=100e-6,
    collective_secs=20e-6,
    exchange_rate=300e9,
    **costs,
    sources=_SHARES
    | dict.fromkeys(('matmul_rate', 'copy_rate'), 'measured')
    | dict.fromkeys(
      ('decode_share', *(set(costs) - set(guessed))),
      'fitted to the measurements of results/accelerator.md or rollout.md',
    )
    | {'exchange_rate': _GUESS},
  )


DEVICES = {
  'h100': _hopper(
    'h100',
    652e12,
    2700e9,
    guessed=['update_share'],
    prefill_share=0.90,
    update_share=0.5,
    layer_secs=0.110e-3,
  ),
  'h200': _hopper(
    'h200',
    716e12,
    3943e9,
    prefill_share=1.0,
    update_share=0.67,
    layer_secs=0.060e-3,
  ),
  'v5e': _tpu('v5e'),
  'v5p': _tpu('v5p'),
}


def load(name: str) -> Device:
  """Returns a device by name, or from a JSON file with fields of `Device`.

  Args:
    name: a name in DEVICES; or a path, whose fields replace those of the
      device that its field "device" names.
  """
  if name in DEVICES:
    return DEVICES[name]
  fields = json.loads(pathlib.Path(name).read_text())
  device = DEVICES[fields.pop('device')]
  sources = device.sources | dict.fromkeys(fields, pathlib.Path(name).name)
  return dataclasses.replace(device, sources=sources, **fields)


@dataclasses.dataclass(frozen=True)
class Kernels:
  """What the programs do; the defaults are those of a config.

  Attributes:
    weight_bytes: bytes per parameter in the sampler.
    cache_bytes: bytes per number in the key/value cache.
    ragged: whether decoding reads used positions only, instead of all; None: as
      by default, on GPUs only.
    layer_scale: `layer_secs` relative to the device's, such as 0.5 if fused
      products halve the number of kernels.
    draft: tokens of a draft that a decoding step checks; 0: none.
    recompute: whether the backward pass recomputes all layers.
  """

  weight_bytes: float = 2.0
  cache_bytes: float = 2.0
  ragged: bool | None = None
  layer_scale: float = 1.0
  draft: int = 0
  recompute: bool = True


def layer_parameters(model: qwen.QwenConfig) -> int:
  """Returns the number of parameters in the matrices of all layers."""
  heads, kv = model.num_heads, model.num_kv_heads
  attention = 2 * model.hidden_size * (heads + kv) * model.head_dim
  mlp = 3 * model.hidden_size * model.intermediate_size
  return model.num_layers * (attention + mlp)


def head_parameters(model: qwen.QwenConfig) -> int:
  """Returns the number of parameters in the matrix that makes logits."""
  return model.vocab_size * model.hidden_size


def parameters(model: qwen.QwenConfig) -> int:
  """Returns the number of parameters in all matrices."""
  tables = 1 if model.tie_embeddings else 2
  return layer_parameters(model) + tables * head_parameters(model)


def cache_numbers(model: qwen.QwenConfig) -> int:
  """Returns the numbers that the cache holds per position."""
  return 2 * model.num_layers * model.num_kv_heads * model.head_dim


def forward_flops(
  model: qwen.QwenConfig, tokens: float, length: float, logits: float
) -> float:
  """Returns the operations of a forward pass with causal attention.

  Args:
    model: shape of the model.
    tokens: number of tokens.
    length: number of tokens that attend to each other.
    logits: number of tokens whose logits are computed.
  """
  attention = 2 * length * model.num_layers * model.num_heads * model.head_dim
  products = 2 * layer_parameters(model) + attention
  return tokens * products + 2 * logits * head_parameters(model)


def decode_secs(
  device: Device,
  model: qwen.QwenConfig,
  *,
  rows: float,
  positions: float,
  tensor: int = 1,
  kernels: Kernels = Kernels(),
) -> float:
  """Returns the seconds of a decoding step of one token.

  Args:
    device: the device.
    model: shape of the model.
    rows: slots of a copy of the model.
    positions: positions of the cache that are read, summed over these slots.
    tensor: devices of a copy.
    kernels: what the programs do.
  """
  weights = layer_parameters(model) + head_parameters(model)
  cached = positions * cache_numbers(model) * kernels.cache_bytes
  tokens = rows * (1 + kernels.draft)
  logits = tokens * model.vocab_size * 4 * _LOGIT_PASSES
  read = (weights * kernels.weight_bytes + cached + logits) / tensor
  flops = 2 * tokens * weights / tensor
  limit = max(
    read / (device.copy_rate * device.decode_share),
    flops / (device.matmul_rate * device.prefill_share),
  )
  return limit + _overhead(device, model, tensor, kernels)


def _overhead(
  device: Device, model: qwen.QwenConfig, tensor: int, kernels: Kernels
) -> float:
  """Returns the seconds of a forward pass in addition to its limits."""
  reductions = 2 * device.collective_secs if tensor > 1 else 0.0
  layer = device.layer_secs * kernels.layer_scale + reductions
  return model.num_layers * layer


def prefill_secs(
  device: Device,
  model: qwen.QwenConfig,
  *,
  rows: float,
  length: int,
  tensor: int = 1,
  kernels: Kernels = Kernels(),
) -> float:
  """Returns the seconds of a prefill of `rows` prompts of `length` tokens."""
  flops = forward_flops(model, rows * length, length, 0) / tensor
  inserted = rows * length * cache_numbers(model) * 2 * kernels.cache_bytes
  return (
    flops / (device.matmul_rate * device.prefill_share)
    + inserted / tensor / device.copy_rate
    + _overhead(device, model, tensor, kernels)
    + device.program_secs
  )


def extend_secs(
  device: Device,
  model: qwen.QwenConfig,
  *,
  rows: float,
  tokens: int,
  length: int,
  tensor: int = 1,
  kernels: Kernels = Kernels(),
) -> float:
  """Returns the seconds of a chunk that attends to all positions of its rows.

  Args:
    device: the device.
    model: shape of the model.
    rows: rows of a copy of the model.
    tokens: tokens of a row.
    length: positions of a row.
    tensor: devices of a copy.
    kernels: forms of the programs.
  """
  # Each token attends to `length` positions: without a mask, twice the pairs.
  flops = forward_flops(model, rows * tokens, 2 * length, 0) / tensor
  # Scores are written and read twice, in float32.
  scores = 16 * rows * tokens * length * model.num_heads * model.num_layers
  return (
    flops / (device.matmul_rate * device.prefill_share)
    + scores / tensor / device.copy_rate
    + _overhead(device, model, tensor, kernels)
    + device.program_secs
  )


def microbatch_secs(
  device: Device,
  model: qwen.QwenConfig,
  *,
  sequences: int,
  length: int,
  logits: float,
  devices: int,
  passes: float,
) -> float:
  """Returns the seconds of a microbatch, without exchange.

  Args:
    device: the device.
    model: shape of the model.
    sequences: number of sequences.
    length: tokens of a sequence, with padding.
    logits: completion tokens of the microbatch, with padding.
    devices: number of devices.
    passes: operations in units of a forward pass: 1 for log-probs, 3 for
      gradients, 4 if layers are recomputed.
  """
  flops = forward_flops(model, sequences * length, length, logits)
  rate = devices * device.matmul_rate * device.update_share
  return passes * flops / rate


def exchange_secs(
  device: Device, model: qwen.QwenConfig, *, devices: int, gradients: bool
) -> float:
  """Returns the seconds to exchange the parameters of a microbatch.

  Sharded parameters are gathered in bfloat16 for each pass over the layers;
  gradients are summed in float32.

  Args:
    device: the device.
    model: shape of the model.
    devices: devices that share a copy of the learner's parameters.
    gradients: whether the microbatch has a backward pass.
  """
  bytes_per_parameter = 2 + (2 + 4 if gradients else 0)
  share = 1 - 1 / devices
  return share * parameters(model) * bytes_per_parameter / device.exchange_rate


def apply_secs(device: Device, model: qwen.QwenConfig, devices: int) -> float:
  """Returns the seconds of an optimizer step."""
  return _APPLY_BYTES * parameters(model) / (device.copy_rate * devices)
