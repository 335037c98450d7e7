"""Simulated updates: microbatches of rows, and their seconds.

Pure functions of the lengths of rows; the costs are those of device_costs.py.
"""

import dataclasses
import functools
import math

import device_costs
import numpy as np

from gigpo_jax import batch, packing
from gigpo_jax.models import qwen


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of updates; the defaults are those of configs/alfworld.py.

  Attributes:
    max_completion: `rollout.max_completion_tokens`.
    sequence_tokens: tokens of a sequence.
    sequences: sequences of a microbatch, at least one per device;
      `learner.microbatch_tokens` is their product.
    minibatch_rows: `learner.minibatch_rows`.
    forward_passes: passes for log-probs: of the policy and of the reference.
    kernels: what the programs do.
  """

  max_completion: int = 512
  sequence_tokens: int = 2560
  sequences: int = 16
  minibatch_rows: int = 256
  forward_passes: int = 2
  kernels: device_costs.Kernels = device_costs.Kernels()


@dataclasses.dataclass(frozen=True)
class UpdateTimes:
  """Simulated log-probs and updates of an iteration.

  Attributes:
    log_prob_secs: forward passes, without exchange.
    update_secs: updates, without exchange.
    exchange_secs: exchange of parameters and gradients, if none overlaps.
    padding: share of the computed tokens that are padding.
  """

  log_prob_secs: float
  update_secs: float
  exchange_secs: float
  padding: float

  def divided_by(self, count: int) -> 'UpdateTimes':
    """Returns the mean of several iterations, of which this is the sum."""
    return UpdateTimes(
      self.log_prob_secs / count,
      self.update_secs / count,
      self.exchange_secs / count,
      self.padding,
    )


def simulate(
  device: device_costs.Device,
  model: qwen.QwenConfig,
  options: Options,
  lengths: np.ndarray,
  devices: int,
) -> UpdateTimes:
  """Returns the times of the updates of an iteration.

  Args:
    device: rates of a device.
    model: shape of the model.
    options: how rows are packed and what is computed.
    lengths: (prompt, response) tokens of each row.
    devices: number of devices.
  """
  rng = np.random.default_rng(0)
  rows = rng.permutation(lengths)
  count = math.ceil(len(rows) / options.minibatch_rows)
  minibatches = np.array_split(rows, count)
  # Log-probs take all rows of an iteration at once, in the largest shape.
  forward = microbatches(lengths, options, devices, largest=True)
  backward = [
    m for part in minibatches for m in microbatches(part, options, devices)
  ]

  def secs(shapes: list, passes: float) -> float:
    return sum(
      device_costs.microbatch_secs(
        device,
        model,
        sequences=sequences,
        length=length,
        logits=logits,
        devices=devices,
        passes=passes,
      )
      for sequences, length, logits in shapes
    )

  exchange = functools.partial(
    device_costs.exchange_secs, device, model, devices=devices
  )
  padded = sum(sequences * length for sequences, length, _ in backward)
  return UpdateTimes(
    log_prob_secs=options.forward_passes * secs(forward, 1.0),
    update_secs=secs(backward, 4.0 if options.kernels.recompute else 3.0)
    + count * device_costs.apply_secs(device, model, devices),
    exchange_secs=options.forward_passes
    * len(forward)
    * exchange(gradients=False)
    + len(backward) * exchange(gradients=True),
    padding=1 - lengths.sum() / padded,
  )


def microbatches(
  lengths: np.ndarray,
  options: Options,
  devices: int,
  *,
  largest: bool = False,
) -> list[tuple[int, int, int]]:
  """Returns (sequences, their length, completion tokens) of microbatches.

  Args:
    lengths: (prompt, response) tokens of each row.
    options: how rows are packed.
    devices: shards; the sequences are a multiple of this number.
    largest: see `packing.Packer.microbatches`.
  """
  packer = packing.Packer(
    options.sequences * options.sequence_tokens,
    devices,
    (options.sequence_tokens,),
    options.max_completion,
  )
  prompts, completions = lengths.T
  rows = batch.pack(
    [np.zeros(n, int) for n in prompts],
    [np.zeros(n, int) for n in completions],
    max_prompt_tokens=int(prompts.max()),
    max_completion_tokens=options.max_completion,
    row_multiple=1,
  )
  return [
    (*m.tokens.shape, int(m.mask.sum()))
    for m in packer.microbatches(rows, np.arange(len(lengths)), largest=largest)
  ]
