"""Estimate an experiment's memory and time on TPUs or GPUs, without one.

The compilers of libtpu and of jax's CUDA plugin need no device. They compile
the largest programs of sampler and learner for a TPU slice or the GPUs of a
host. The report has the memory of each program and the bytes that a chip
receives from others, or that it does not fit. `tpu_time` estimates the time.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator

import jax
import ml_collections
import tqdm

from gigpo_jax import algorithms, builders, models, options, sampler
from gigpo_jax import config as config_lib
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import (
  huggingface,
  kv_cache,
  parameters,
  published,
  qwen,
)
from gigpo_jax.run import model_builders, model_check, remat
from gigpo_jax.runtime import errors
from gigpo_jax.tools import hlo, tpu_time
from gigpo_jax.tools import topology as topology_lib

# Share of a GPU's memory that jax reserves.
_MEMORY_SHARE = 'XLA_CLIENT_MEM_FRACTION'
_SHAPES = {'': 'Qwen2.5-1.5B'} | {
  size: f'Qwen2.5-{size.upper()}' for size in ('0.5b', '1.5b', '7b', '32b')
}


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program.

  Attributes:
    name: 'prefill', 'decode', 'accumulate', ...
    peak: bytes per chip while it runs, including arguments; None: unknown,
      because it does not fit.
    other_data: bytes per chip of data in memory that the program does not use.
    run: its tokens, and the bytes that a chip receives from others.
    problem: the compiler's message if the program does not fit, else ''.
  """

  name: str
  peak: float | None
  other_data: float
  run: tpu_time.Runs
  problem: str = ''

  @property
  def total(self) -> float:
    """Returns the bytes per chip while it runs; infinite if unknown."""
    return math.inf if self.peak is None else self.peak + self.other_data


@dataclasses.dataclass(frozen=True)
class Report:
  """Estimates for an experiment on a slice.

  Attributes:
    parameters: number of parameters of the model.
    topology: name of the slice.
    chip: chip of the slice.
    mesh: sizes of the mesh axes larger than 1, by name.
    tensor: chips that a copy of the model is sharded over for sampling.
    remat: what the backward pass recomputes; see `qwen_config.REMATS`.
    programs: all programs.
    phases: work of a chip in the phases of an iteration; empty if a program
      does not fit.
  """

  parameters: int
  topology: str
  chip: tpu_time.Chip
  mesh: dict[str, int]
  tensor: int
  remat: str
  programs: tuple[Program, ...]
  phases: tuple[tpu_time.Phase, ...]

  @property
  def secs(self) -> tuple[float, float]:
    """Returns seconds of an iteration with perfect and without overlap."""
    ranges = [phase.secs(self.chip) for phase in self.phases]
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)

  @property
  def not_fitting(self) -> list[str]:
    """Returns the names of the programs that do not fit."""
    return [p.name for p in self.programs if p.total > self.chip.memory]


def main(
  config: ml_collections.ConfigDict, topology: str, *, shape: str = ''
) -> None:
  """Prints the memory and the time of an experiment on a slice.

  See `estimate` for arguments and errors.
  """
  work = tpu_time.Workload()
  report = estimate(config, topology, shape=shape, work=work)
  _print(report)
  if report.phases:
    _print_phases(report, config, work)


def estimate(
  config: ml_collections.ConfigDict,
  topology: str,
  *,
  shape: str = '',
  work: tpu_time.Workload | None = None,
) -> Report:
  """Compiles an experiment for a slice and returns its estimates.

  Args:
    config: the experiment; its batch sizes are rounded up to multiples that the
      slice can divide.
    topology: name of the slice, such as v5e:4x4.
    shape: name of the model's shape in `published.SHAPES`; '': the shape of
      `model.path`, or of the config's variant.
    work: sizes of an episode; None: the defaults of `tpu_time.Workload`.

  Raises:
    ValueError: if the slice or the shape is unknown; in one line.
  """
  topology_lib.check(topology)
  config_lib.check_fields(config)
  chip, model = _chip(topology), _model(config, shape)
  devices = topology_lib.make_devices(topology)
  mesh = model_builders.make_mesh(config, model, devices, chip.memory)
  model = model_builders.configure_model(model, config, mesh)
  mesh_lib.check(mesh, parameters.shapes(model), parameters.logical_axes(model))
  tensor = model_builders.sampling_tensor(config, model, mesh, int(chip.memory))
  host = topology_lib.host_devices(topology, devices, tensor)
  _round_up(config, len(host) // tensor)
  policy = model_builders.ModelBundle(model, mesh, None, None, None)
  if config.model.remat == 'auto':
    limit = remat.USABLE * chip.memory

    def fits(mode: str) -> bool:
      bundle = remat.with_mode(policy, mode)
      return remat.update_bytes(config, bundle, _has_critic(config)) <= limit

    model = dataclasses.replace(model, remat=remat.fastest(fits))
  work = work or tpu_time.Workload()
  programs = tuple(_programs(config, model, mesh, host, tensor, work))
  phases: list[tpu_time.Phase] = []
  if all(p.peak is not None for p in programs):
    runs = {p.name: p.run for p in programs}
    phases = tpu_time.phases(config, model, mesh, tensor, runs, work)
  return Report(
    models.num_parameters(model),
    topology,
    chip,
    {axis: size for axis, size in mesh.shape.items() if size > 1},
    tensor,
    model.remat,
    programs,
    tuple(phases),
  )


def _has_critic(config: ml_collections.ConfigDict) -> bool:
  return algorithms.of_section(config.algorithm).needs_values


def _chip(topology: str) -> tpu_time.Chip:
  """Returns the chip, of whose memory jax reserves a part on a GPU."""
  chip = tpu_time.CHIPS[topology.partition(':')[0]]
  if not topology_lib.is_gpu(topology):
    return chip
  share = float(os.environ.get(_MEMORY_SHARE, 0.75))
  return dataclasses.replace(chip, memory=share * chip.memory)


def _model(config: ml_collections.ConfigDict, shape: str) -> qwen.QwenConfig:
  if config.model.path and not shape:
    directory = model_check.model_directory(config.model.path)
    return huggingface.read_config(directory)
  size = config.get('variant', '').partition(',')[0]
  shape = shape or _SHAPES.get(size, size)
  options.check_choice('--shape', shape, tuple(published.SHAPES))
  return published.SHAPES[shape]


def _round_up(config, copies: int) -> None:
  """Rounds batch sizes up to multiples that the slice can divide."""
  with config.unlocked():
    config.rollout.batch_buckets = _multiples(
      config.rollout.batch_buckets, copies
    )


def _programs(
  config, model, mesh, host, tensor, work: tpu_time.Workload
) -> Iterator[Program]:
  """Compiles the programs one at a time and yields them."""
  engine = make_sampler(
    config, model, mesh_lib.make_mesh(-1, 1, 1, devices=host), tensor
  )
  # `prepare` runs on the full mesh, the other programs of the sampler on the
  # devices that sample together.
  full_sampler = make_sampler(config, model, mesh, tensor)
  policy = model_builders.ModelBundle(model, mesh, None, None, None)
  learner = builders.make_learner(config, policy, builders.make_loss(config))
  state, base = learner.abstract_state()
  lowered = {'prepare': full_sampler.lower(state.params, base)['prepare']}
  del full_sampler
  unsharded = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, base)
  )
  lowered |= {
    k: v for k, v in engine.lower(*unsharded).items() if k != 'prepare'
  }
  updates = ['accumulate', 'apply']
  if builders.needs_reference(config):
    updates.insert(0, 'reference outputs')
  if config.loss.old_log_probs != 'sampler':
    updates.insert(0, 'outputs')
  lowered |= learner.lower(updates)
  tokens = _tokens(lowered, len(host) // tensor)
  trips = _chunks_of_logits(lowered, work)
  resident = _resident_bytes(
    config, policy, learner, tensor, len(host) // tensor
  )
  platform = host[0].platform
  for name, program in tqdm.tqdm(
    lowered.items(), desc='compiling', leave=False, disable=None
  ):
    other = sum(resident[data] for data in (*_OTHER_DATA[name], 'critic'))
    try:
      compiled = program.compile(remat.ESTIMATE_OPTIONS.get(platform))
    except jax.errors.JaxRuntimeError as error:
      if not errors.is_out_of_memory(error):
        raise
      match = re.search(
        r'Used [\d.]+\w of [\d.]+\w hbm|[^,.]*\([\d.]+G\)', str(error)
      )
      reason = match[0] if match else ' '.join(str(error).split())[:120]
      run = tpu_time.Runs(tokens.get(name, 0), math.nan)
      yield Program(name, None, other, run, reason)
      continue
    peak = remat.program_bytes(compiled, platform)
    received = hlo.exchange_bytes(compiled.as_text(), trips=trips.get(name, 1))
    run = tpu_time.Runs(tokens.get(name, 0), math.fsum(received.values()))
    yield Program(name, peak, other, run)


def _chunks_of_logits(lowered: dict, work: tpu_time.Workload) -> dict[str, int]:
  """Returns how many chunks of logits the learner's programs compute."""
  chunks = {}
  for name in ('outputs', 'reference outputs', 'accumulate'):
    if name in lowered:
      arrays = lowered[name].args_info[0][2]
      tokens = math.prod(arrays['tokens'].shape)
      targets = arrays['targets'].shape
      chunks[name] = tpu_time.num_chunks(work, tokens, targets)
  return chunks


def _tokens(lowered: dict, copies: int) -> dict[str, int]:
  """Returns the tokens of one run of each program; see `tpu_time.Runs`."""
  (_, prompts, *_), _ = lowered['prefill'].args_info
  (_, _, state, *_), _ = lowered['decode'].args_info
  outputs = lowered['decode'].out_info[-1]
  tokens = {
    'prefill': math.prod(prompts.shape) // copies,
    'decode': state.shape[0] * outputs[0].shape[0] // copies,
  }
  for name in ('outputs', 'reference outputs', 'accumulate'):
    if name in lowered:
      arrays = lowered[name].args_info[0][2]
      tokens[name] = math.prod(arrays['tokens'].shape)
  return tokens


# Data that is in memory while a program runs but that it does not use.
_OTHER_DATA = {
  'prepare': ('moments', 'reference'),
  'prefill': ('masters', 'frozen', 'moments', 'reference', 'cache', 'parked'),
  'decode': ('masters', 'frozen', 'moments', 'reference', 'parked'),
  'outputs': ('moments', 'reference'),
  'reference outputs': ('masters', 'moments'),
  'accumulate': ('moments', 'reference'),
  'apply': ('frozen', 'reference'),
}


def _resident_bytes(
  config, policy, learner, tensor: int, copies: int
) -> dict[str, float]:
  """Returns the bytes per chip of data kept in memory between programs."""
  model, critic = policy.model, ()
  if _has_critic(config):
    critic = builders.make_critic(config, policy).abstract_state()
  state, base = learner.abstract_state()
  masters, moments, frozen = map(
    mesh_lib.bytes_per_device, (state.params, state.opt_state, base)
  )
  reference = mesh_lib.bytes_per_device(learner.abstract_reference())
  rollouts = config.rollout
  length = rollouts.max_prompt_tokens + rollouts.max_completion_tokens
  slots = rollouts.batch_buckets[-1]
  parked = -(-rollouts.parked_slots // copies) * copies
  row = length * kv_cache.token_bytes(model) + kv_cache.state_bytes(model)
  return {
    'masters': masters,
    'frozen': frozen,
    'moments': moments,
    'critic': mesh_lib.bytes_per_device(critic),
    'reference': reference if builders.needs_reference(config) else 0,
    'cache': slots * row / copies / tensor,
    'parked': parked * row / copies / tensor,
  }


def make_sampler(
  config: ml_collections.ConfigDict,
  model: qwen.QwenConfig,
  mesh: jax.sharding.Mesh,
  tensor: int,
) -> sampler.Sampler:
  """Returns an experiment's sampler for a model without a checkpoint.

  Args:
    config: the experiment.
    model: shape of the network.
    mesh: the devices; they may be descriptions of devices.
    tensor: devices that a copy of the model is sharded over.
  """
  rollouts = config.rollout
  return sampler.Sampler(
    model,
    mesh,
    batch_buckets=_multiples(rollouts.batch_buckets, mesh.size // tensor),
    stop_ids=(0,),
    vocab_size=model.vocab_size,
    tensor=tensor,
    **model_builders.sampler_kwargs(config),
  )


def _multiples(sizes: tuple[int, ...], copies: int) -> tuple[int, ...]:
  return tuple(sorted({-(-size // copies) * copies for size in sizes}))


def _print(report: Report) -> None:
  size = math.prod(report.mesh.values())
  print(
    f'{report.parameters / 1e9:.2f}B parameters on {size} chips '
    f'({report.topology}), mesh {report.mesh}, sampling in groups of '
    f'{report.tensor}, remat {report.remat}; '
    f'{report.chip.memory / 2**30:.2f} GiB per chip'
  )
  print('| program, GiB | memory | other data | total | received | fits |')
  print('|---|---|---|---|---|---|')
  for p in report.programs:
    other = p.other_data / 2**30
    if p.peak is None:
      print(f'| {p.name} | - | {other:.2f} | - | - | {p.problem} |')
      continue
    print(
      f'| {p.name} | {p.peak / 2**30:.2f} | {other:.2f} '
      f'| {p.total / 2**30:.2f} | {p.run.received / 2**30:.2f} '
      f'| {"no" if p.name in report.not_fitting else "yes"} |'
    )
  if not report.not_fitting:
    print('fits')
    return
  advice = {
    'prepare': 'raise rollout.tensor',
    'decode': 'lower rollout.batch_buckets or raise rollout.tensor',
    'prefill': 'lower rollout.batch_buckets or raise rollout.tensor',
    'outputs': 'lower learner.microbatch_tokens',
    'reference outputs': 'lower learner.microbatch_tokens',
    'accumulate': 'lower learner.microbatch_tokens',
    'apply': 'optimizer.mu_dtype=bfloat16',
  }
  actions = dict.fromkeys(advice[name] for name in report.not_fitting)
  more = 'or use more chips'
  if topology_lib.is_gpu(report.topology) and _MEMORY_SHARE not in os.environ:
    more += f', or set {_MEMORY_SHARE}=0.9'
  print(f'does not fit: {"; ".join([*actions, more])}')


def _print_phases(
  report: Report, config: ml_collections.ConfigDict, work: tpu_time.Workload
) -> None:
  rows = [
    (p.name, *p.parts(report.chip), *p.secs(report.chip)) for p in report.phases
  ]
  rows.append(
    (
      'iteration',
      *(sum(column) for column in zip(*(r[1:] for r in rows), strict=True)),
    )
  )
  print(
    '| estimated s | matmuls | memory | communication | all, overlapped '
    '| all, in sequence |\n|---|---|---|---|---|---|'
  )
  for name, *secs in rows:
    print(f'| {name} | {" | ".join(f"{x:.1f}" for x in secs)} |')
  low, high = report.secs
  episodes = config.rollout.groups * config.rollout.episodes_per_group
  print(
    f'an iteration of {episodes} episodes of {work.turns:g} turns, '
    f'{work.prompt_tokens:g} + {work.response_tokens:g} tokens each, takes '
    f'{low:.0f} to {high:.0f} s: from perfect overlap to none, matmuls '
    f'at {tpu_time.MATMUL_SHARE:.0%} of peak, full slots'
  )
  if _has_critic(config):
    print("the critic's updates are not in this time")
  if config.rollout.draft_tokens:
    print(
      f'drafts (rollout.draft_tokens={config.rollout.draft_tokens}) are not in '
      'this time: a decoding pass is counted as one token of each slot'
    )
