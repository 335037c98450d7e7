"""Simulated updates: microbatches of rows, and their seconds.

Pure functions of the lengths of rows; the costs are those of device_costs.py.
"""

import dataclasses
import functools
import math

import device_costs
import numpy as np

from gigpo_jax.models import qwen


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of updates; the defaults are those of configs/alfworld.py.

  Attributes:
    max_completion: `rollout.max_completion_tokens`.
    packed: whether several rows share a sequence.
    sequence_tokens: tokens of a packed sequence.
    packed_sequences: packed sequences of a microbatch.
    microbatch_rows: `learner.microbatch_rows`, without packing.
    length_buckets: `learner.length_buckets`, without packing.
    minibatch_rows: `learner.minibatch_rows`.
    forward_passes: passes for log-probs: of the policy and of the reference.
    kernels: what the programs do.
  """

  max_completion: int = 512
  packed: bool = False
  sequence_tokens: int = 2560
  packed_sequences: int = 4
  microbatch_rows: int = 16
  length_buckets: tuple[int, ...] = (640, 1024, 1536, 2560)
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
  # Log-probs take all rows of an iteration at once.
  forward = microbatches(lengths, options, devices)
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
  lengths: np.ndarray, options: Options, devices: int
) -> list[tuple[int, int, int]]:
  """Returns (sequences, padded length, completion tokens) of microbatches.

  Args:
    lengths: (prompt, response) tokens of each row.
    options: how rows are packed.
    devices: the sequences are a multiple of this number.
  """
  totals = np.sort(lengths.sum(axis=1))[::-1]
  if options.packed:
    bins = first_fit(totals, options.sequence_tokens)
    sequences = -(-options.packed_sequences // devices) * devices
    count = math.ceil(len(bins) / sequences)
    logits = int(lengths[:, 1].sum() / count)
    return [(sequences, options.sequence_tokens, logits)] * count
  sequences = -(-options.microbatch_rows // devices) * devices
  return [
    (
      sequences,
      next(b for b in options.length_buckets if b >= totals[start]),
      sequences * options.max_completion,
    )
    for start in range(0, len(totals), sequences)
  ]


def first_fit(lengths: np.ndarray, capacity: int) -> list[int]:
  """Returns the tokens of bins that are filled first-fit."""
  bins: list[int] = []
  for length in lengths:
    for n, used in enumerate(bins):
      if used + length <= capacity:
        bins[n] += int(length)
        break
    else:
      bins.append(int(length))
  return bins
