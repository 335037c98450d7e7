"""Estimate the time of an iteration from the work of the chips, TPUs or GPUs.

A chip multiplies matrices, reads and writes its memory, and receives data from
other chips. With perfect overlap, a phase takes as long as the slowest of the
three; without overlap, it takes their sum. Both are estimates: the device is
assumed never to wait for the host, and all slots to be in use.
"""

import dataclasses
import math

import jax
import ml_collections

from gigpo_jax import builders, models, sampler
from gigpo_jax.models import kv_cache, lora, qwen
from gigpo_jax.programs import learner_programs

# Share of the peak that large matmuls reach. MaxText reports 56 to
# 67 % for complete training steps on v5e-256 (its README).
MATMUL_SHARE = 0.75

# Response tokens of the shard that has the most, relative to the mean; assumed.
_MOST_RESPONSES = 1.5

# Share of padding in full microbatches, at most; tests/packing_test.py.
PADDING = 0.05


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU chip or a GPU.

  Attributes:
    flops: peak bfloat16 FLOP/s.
    memory: bytes of memory; on a TPU, those available to programs.
    memory_rate: memory bandwidth in bytes/s.
    link_rate: bytes/s that the chip receives: on a TPU from its two neighbors
      in a ring, which is how XLA gathers over one axis of a mesh; on a GPU by
      NVLink.
  """

  flops: float
  memory: float
  memory_rate: float
  link_rate: float


# Rates: "How to Scale Your Model", chapter "How to Think About TPUs" (a link in
# one direction has half of `link_rate`). Memory: reported by XLA's compiler.
# GPUs: NVIDIA's data sheets, without sparsity; NVLink in one direction.
CHIPS = {
  'v5e': Chip(1.97e14, 15.75 * 2**30, 8.2e11, 9e10),
  'v5p': Chip(4.59e14, 95.0 * 2**30, 2.8e12, 1.8e11),
  'v6e': Chip(9.2e14, 31.25 * 2**30, 1.6e12, 1.8e11),
  'h100': Chip(9.89e14, 79.1 * 2**30, 3.35e12, 4.5e11),
  'h200': Chip(9.89e14, 140.4 * 2**30, 4.8e12, 4.5e11),
}


@dataclasses.dataclass(frozen=True)
class Workload:
  """Average sizes of an episode.

  Attributes:
    turns: turns of an episode.
    prompt_tokens: prompt tokens of a turn.
    response_tokens: response tokens of a turn.
  """

  turns: float = 24.0
  prompt_tokens: float = 700.0
  response_tokens: float = 120.0


def num_chunks(work: Workload, tokens: int, targets: tuple[int, int]) -> int:
  """Returns how many chunks of a microbatch's logits are computed.

  Chunks without a response token in any shard are skipped.

  Args:
    work: sizes of an episode.
    tokens: tokens of the microbatch.
    targets: its shards, and the response tokens that a shard has room for.
  """
  shards, room = targets
  share = work.response_tokens / (work.prompt_tokens + work.response_tokens)
  most = _MOST_RESPONSES * share * tokens / shards
  chunk = learner_programs.logits_chunk(room)
  return math.ceil(min(most, room) / chunk)


@dataclasses.dataclass(frozen=True)
class Runs:
  """What a chip does in one run of a program.

  Attributes:
    tokens: tokens of the run: of all chips for programs of the learner, of one
      copy of the model for those of the sampler.
    received: bytes that a chip receives from others.
  """

  tokens: int
  received: float


@dataclasses.dataclass(frozen=True)
class Phase:
  """The work of a chip in a phase of an iteration.

  Attributes:
    name: name of the phase.
    flops: FLOP of matmuls.
    memory_bytes: bytes read from and written to its memory.
    received: bytes received from other chips.
  """

  name: str
  flops: float
  memory_bytes: float
  received: float

  def parts(self, chip: Chip) -> tuple[float, float, float]:
    """Returns seconds of matmuls, memory and exchange, if alone."""
    return (
      self.flops / (MATMUL_SHARE * chip.flops),
      self.memory_bytes / chip.memory_rate,
      self.received / chip.link_rate,
    )

  def secs(self, chip: Chip) -> tuple[float, float]:
    """Returns seconds with perfect overlap and without overlap."""
    parts = self.parts(chip)
    return max(parts), sum(parts)


class _Sizes:
  """Sizes that all phases use.

  Attributes:
    body: parameters that process every token.
    head: parameters that process every response token again, for its logits.
    gathered: parameters that a chip of the learner reads in a pass: the body
      and the head, with all experts of its shard.
    trained: trained parameters.
    features: numbers that the products of all layers read and write per token.
    rows: rows of an iteration.
    chips: number of chips.
    shards: chips that share a matrix product of the learner.
  """

  def __init__(self, config, model: qwen.QwenConfig, mesh, work: Workload):
    self.config, self.model, self.work = config, model, work
    self.head = models.num_head_parameters(model)
    self.body = models.num_body_parameters(model)
    heads = (model.num_heads + model.num_kv_heads) * model.head_dim
    width = model.intermediate_size
    if model.num_experts:
      width = model.experts_per_token * width + model.shared_size
    per_layer = 7 * model.hidden_size + 2 * heads + 3 * width
    self.features = model.num_layers * per_layer
    shapes = models.shapes(model)
    idle = models.num_parameters(model) - models.num_active_parameters(model)
    self.gathered = self.body + self.head
    if idle:
      used = idle / (model.num_experts / model.experts_per_token - 1)
      self.gathered += (idle + used) / mesh.shape['expert'] - used
    trained = lora.split(shapes)[0] if model.adapters else shapes
    self.trained = sum(math.prod(x.shape) for x in jax.tree.leaves(trained))
    episodes = config.rollout.groups * config.rollout.episodes_per_group
    self.episodes = episodes
    self.rows = episodes * work.turns
    self.chips, self.shards = mesh.size, mesh.shape['tensor']


def phases(
  config: ml_collections.ConfigDict,
  model: qwen.QwenConfig,
  mesh: jax.sharding.Mesh,
  tensor: int,
  runs: dict[str, Runs],
  work: Workload,
) -> list[Phase]:
  """Returns the phases of an iteration.

  Args:
    config: the experiment.
    model: shape of the network.
    mesh: the chips.
    tensor: chips that a copy of the model is sharded over for sampling.
    runs: work of one run of each program.
    work: sizes of an episode.
  """
  sizes = _Sizes(config, model, mesh, work)
  learner = [_learner_phase(sizes, 'update', 'accumulate', runs)]
  if config.loss.old_log_probs == 'learner':
    learner.insert(0, _learner_phase(sizes, 'log-probs', 'outputs', runs))
  if builders.needs_reference(config):
    phase = _learner_phase(
      sizes, 'reference log-probs', 'reference outputs', runs
    )
    learner.insert(0, phase)
  return [
    _prepare(sizes, tensor, runs['prepare']),
    _prefill(sizes, tensor, runs['prefill']),
    _decode(sizes, tensor, runs['decode']),
    *learner,
  ]


def _prepare(sizes: _Sizes, tensor: int, run: Runs) -> Phase:
  """Returns the phase in which the sampler takes over the parameters."""
  num_parameters = models.num_parameters(sizes.model)
  weights = sampler.parameter_bytes(sizes.model, sizes.config.rollout.weights)
  memory = 4 * num_parameters / sizes.chips + weights / tensor
  return Phase('prepare', 0.0, memory, run.received)


def _prefill(sizes: _Sizes, tensor: int, run: Runs) -> Phase:
  tokens = sizes.rows * sizes.work.prompt_tokens
  weights = sampler.parameter_bytes(sizes.model, sizes.config.rollout.weights)
  count = tokens * tensor / sizes.chips / run.tokens
  memory = count * weights / tensor
  memory += 2 * sizes.features * tokens / sizes.chips
  flops = 2 * sizes.body * tokens / sizes.chips
  return Phase('prefill', flops, memory, count * run.received)


def _decode(sizes: _Sizes, tensor: int, run: Runs) -> Phase:
  model, work = sizes.model, sizes.work
  copies = sizes.chips // tensor
  decoded = sizes.rows * work.response_tokens
  # A copy reads all weights to decode one token of each of its slots.
  decode_tokens = sizes.config.rollout.decode_tokens
  slots = min(run.tokens // decode_tokens, max(1.0, sizes.episodes / copies))
  steps = decoded / copies / slots
  weights = sampler.parameter_bytes(model, sizes.config.rollout.weights)
  slot_tokens = work.prompt_tokens + work.response_tokens / 2
  slot_bytes = slot_tokens * kv_cache.token_bytes(model)
  # A step reads and writes the state; the cache holds two of them.
  slot_bytes += kv_cache.state_bytes(model)
  return Phase(
    'decode',
    2 * (sizes.body + sizes.head) * decoded / sizes.chips,
    steps * (weights + slots * slot_bytes) / tensor,
    steps * run.received / decode_tokens,
  )


def _learner_phase(
  sizes: _Sizes, name: str, program: str, runs: dict[str, Runs]
) -> Phase:
  """Returns a phase of microbatches; for updates with the optimizer's step."""
  work, run = sizes.work, runs[program]
  # Log-probs take all rows at once, updates the rows of a mini-batch. The last
  # microbatch of each counts in full size, so that the time of updates in
  # which it has a smaller shape (`packing.shapes`) is estimated too high.
  parts = 1
  if program == 'accumulate':
    parts = math.ceil(sizes.rows / sizes.config.learner.minibatch_rows)
  row_tokens = work.prompt_tokens + work.response_tokens
  tokens = sizes.rows * row_tokens / (1 - PADDING)
  count = parts * math.ceil(tokens / parts / run.tokens)
  tokens = count * run.tokens
  # Passes over the layers and over the head, whose logits are recomputed.
  passes, head_passes = (1, 1) if program != 'accumulate' else (3, 4)
  if program == 'accumulate' and sizes.model.remat == 'layer':
    passes += 1
  if program == 'accumulate' and sizes.model.adapters:
    # The frozen weights have no gradients.
    passes, head_passes = passes - 1, head_passes - 1
  products = passes * sizes.body * tokens
  responses = sizes.rows * work.response_tokens
  products += head_passes * sizes.head * responses
  # A microbatch writes and reads the gathered weights in each pass.
  memory = 4 * count * passes * sizes.gathered / sizes.shards
  memory += 2 * passes * sizes.features * tokens / sizes.chips
  logits = sizes.model.vocab_size * responses / sizes.chips
  memory += 8 * head_passes * logits
  received = count * run.received
  if program == 'accumulate':
    # Gradients in float32; parameters and moments are read and written.
    memory += (8 * count + 28 * parts) * sizes.trained / sizes.chips
    received += parts * runs['apply'].received
  return Phase(name, 2 * products / sizes.chips, memory, received)
