"""Estimate an experiment's memory and time on a TPU slice without TPUs.

libtpu's compiler needs no chip. It compiles the largest programs of sampler and
learner for a slice and reports the memory of each, or that it does not fit.
Times are rooflines from data sheets, which are lower bounds.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator

import jax
import ml_collections
import tqdm

from gigpo_jax import builders, models, sampler
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface, parameters, published, qwen
from gigpo_jax.run import model_check

# Without these variables, libtpu looks for a slice and for other hosts.
_ENVIRON = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
  'TPU_STDERR_LOG_LEVEL': '3',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_SHAPES = {'': 'Qwen2.5-1.5B'} | {
  size: f'Qwen2.5-{size.upper()}' for size in ('0.5b', '1.5b', '7b', '32b')
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU chip, from its data sheet.

  Attributes:
    flops: peak bfloat16 FLOP/s.
    memory: bytes of memory available to programs.
    memory_rate: memory bandwidth in bytes/s.
    link_rate: total bytes/s that the chip can receive from its neighbors.
  """

  flops: float
  memory: float
  memory_rate: float
  link_rate: float


CHIPS = {
  'v5e': Chip(197e12, 15.75 * 2**30, 819e9, 100e9),
  'v5p': Chip(459e12, 95.0 * 2**30, 2765e9, 300e9),
  'v6e': Chip(918e12, 31.25 * 2**30, 1640e9, 224e9),
}


@dataclasses.dataclass(frozen=True)
class Workload:
  """Average sizes of an episode, for the roofline.

  Attributes:
    turns: turns of an episode.
    prompt_tokens: prompt tokens of a turn.
    response_tokens: response tokens of a turn.
  """

  turns: float = 20.0
  prompt_tokens: float = 600.0
  response_tokens: float = 120.0


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program.

  Attributes:
    name: 'prefill', 'decode', 'accumulate', ...
    peak: bytes per chip while it runs, including arguments; None: unknown,
      because it does not fit.
    other_data: bytes per chip of data in memory that the program does not use.
    collective: bytes that a chip receives from other chips in one run.
    problem: the compiler's message if the program does not fit, else ''.
  """

  name: str
  peak: float | None
  other_data: float
  collective: float
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
    programs: all programs.
    secs: lower bound of the seconds of each phase of an iteration, by name.
    update_flops: FLOP of the update of an iteration.
  """

  parameters: int
  topology: str
  chip: Chip
  mesh: dict[str, int]
  tensor: int
  programs: tuple[Program, ...]
  secs: dict[str, float]
  update_flops: float

  @property
  def not_fitting(self) -> list[str]:
    """Returns the names of the programs that do not fit."""
    return [p.name for p in self.programs if p.total > self.chip.memory]


def main(
  config: ml_collections.ConfigDict, topology: str, *, shape: str = ''
) -> None:
  """Prints the memory and the roofline of an experiment on a slice.

  See `estimate` for arguments and errors.
  """
  work = Workload()
  rows = config.learner.microbatch_rows
  report = estimate(config, topology, shape=shape, work=work)
  if config.learner.microbatch_rows != rows:
    print(
      f'learner.microbatch_rows={config.learner.microbatch_rows}: rounded up '
      'to a multiple of the shards'
    )
  _print(report)
  episodes = config.rollout.groups * config.rollout.episodes_per_group
  print(
    f'roofline of an iteration of {episodes} episodes of {work.turns:g} turns, '
    f'{work.prompt_tokens:g} + {work.response_tokens:g} tokens each: '
    + ', '.join(f'{name} {secs:.1f} s' for name, secs in report.secs.items())
    + f'; total {sum(report.secs.values()):.1f} s, '
    f'{report.update_flops / 1e15:.1f} PFLOP in the update'
  )


def estimate(
  config: ml_collections.ConfigDict,
  topology: str,
  *,
  shape: str = '',
  work: Workload | None = None,
) -> Report:
  """Compiles an experiment for a slice and returns its estimates.

  Args:
    config: the experiment; its batch sizes are rounded up to multiples that the
      slice can divide.
    topology: name of the slice, such as v5e:4x4.
    shape: name of the model's shape in `published.SHAPES`; '': the shape of
      `model.path`, or of the config's variant.
    work: sizes of an episode; None: the defaults of `Workload`.

  Raises:
    ValueError: if the slice or the shape is unknown; in one line.
  """
  chip_name = topology.partition(':')[0]
  if chip_name not in CHIPS or not re.fullmatch(r'\w+:\d+(x\d+)+', topology):
    raise ValueError(
      f'--topology={topology}: unknown; must be like v5e:4x4, v5p:2x2x1 or '
      'v6e:2x4'
    )
  chip, model = CHIPS[chip_name], _model(config, shape)
  devices = _devices(topology)
  mesh = mesh_lib.make_mesh(**config.mesh, devices=devices)
  model = dataclasses.replace(model, **builders.model_kwargs(config, mesh))
  mesh_lib.check(mesh, parameters.shapes(model), parameters.logical_axes(model))
  tensor = config.rollout.tensor or mesh_lib.sampling_tensor(
    mesh,
    sampler.parameter_bytes(model, config.rollout.weights),
    int(chip.memory),
    parameters.max_tensor_shards(model),
  )
  host = _host(topology, devices, tensor)
  _round_up(config, mesh, len(host) // tensor)
  programs = tuple(_programs(config, model, mesh, host, tensor))
  secs, flops = _rooflines(
    config, model, chip, mesh, tensor, programs, work or Workload()
  )
  return Report(
    models.num_parameters(model),
    topology,
    chip,
    {axis: size for axis, size in mesh.shape.items() if size > 1},
    tensor,
    programs,
    secs,
    flops,
  )


def _model(config: ml_collections.ConfigDict, shape: str) -> qwen.QwenConfig:
  if config.model.path and not shape:
    directory = model_check.model_directory(config.model.path)
    return huggingface.read_config(directory)
  size = config.get('variant', '').partition(',')[0]
  shape = shape or _SHAPES.get(size, size)
  if shape not in published.SHAPES:
    raise ValueError(
      f'--shape={shape}: unknown; must be one of {", ".join(published.SHAPES)}'
    )
  return published.SHAPES[shape]


def _devices(topology: str) -> list[jax.Device]:
  for name, value in _ENVIRON.items():
    os.environ.setdefault(name, value)
  from jax.experimental import topologies

  small = (
    {'chips_per_host_bounds': [1, 1, 1]} if topology[-4:] == ':1x1' else {}
  )
  try:
    return list(
      topologies.get_topology_desc(topology, platform='tpu', **small).devices
    )
  except Exception as error:
    reason = ' '.join(str(error).split())[:160]
    raise ValueError(
      f'--topology={topology}: {reason}; must be an existing slice, and libtpu '
      "must be installed (pip install 'jax[tpu]')"
    ) from error


def _host(
  topology: str, devices: list[jax.Device], tensor: int
) -> list[jax.Device]:
  """Returns the devices that sample together: of one host, or all devices.

  The devices of a host are replaced by a slice of the same size, because the
  compiler does not accept a part of a slice.
  """
  count = sum(d.process_index == devices[0].process_index for d in devices)
  if count == len(devices) or count % tensor:
    return devices
  chip_name, _, sizes = topology.partition(':')
  host_sizes = {4: '2x2', 8: '2x4'}[count] + 'x1' * (sizes.count('x') - 1)
  return _devices(f'{chip_name}:{host_sizes}')


def _round_up(config, mesh, copies: int) -> None:
  """Rounds batch sizes up to multiples that the slice can divide."""
  shards = mesh_lib.batch_shards(mesh)
  rows = config.learner.microbatch_rows
  with config.unlocked():
    config.learner.microbatch_rows = -(-rows // shards) * shards
    config.rollout.batch_buckets = _multiples(
      config.rollout.batch_buckets, copies
    )


def _programs(config, model, mesh, host, tensor) -> Iterator[Program]:
  """Compiles the programs one at a time and yields them."""
  engine = make_sampler(
    config, model, mesh_lib.make_mesh(-1, 1, 1, devices=host), tensor
  )
  # `prepare` runs on the full mesh, the other programs of the sampler on the
  # devices that sample together.
  full_sampler = make_sampler(config, model, mesh, tensor)
  policy = builders.ModelBundle(model, mesh, None, None, None)
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
  lowered |= learner.lower()
  resident = _resident_bytes(
    config, model, learner, tensor, len(host) // tensor
  )
  for name, program in tqdm.tqdm(
    lowered.items(), desc='compiling', leave=False, disable=None
  ):
    other = sum(resident[data] for data in _OTHER_DATA[name])
    try:
      compiled = program.compile()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      match = re.search(
        r'Used [\d.]+\w of [\d.]+\w hbm|[^,.]*\([\d.]+G\)', str(error)
      )
      reason = match[0] if match else ' '.join(str(error).split())[:120]
      yield Program(name, None, other, 0.0, reason)
      continue
    peak = compiled.memory_analysis().peak_memory_in_bytes
    yield Program(name, peak, other, collective_bytes(compiled.as_text()))


# Data that is in memory while a program runs but that it does not use.
_OTHER_DATA = {
  'prepare': ('moments', 'reference'),
  'prefill': ('masters', 'frozen', 'moments', 'reference', 'cache'),
  'decode': ('masters', 'frozen', 'moments', 'reference'),
  'accumulate': ('moments', 'reference'),
  'apply': ('frozen', 'reference'),
}


def _resident_bytes(
  config, model, learner, tensor: int, copies: int
) -> dict[str, float]:
  """Returns the bytes per chip of data kept in memory between programs."""
  state, base = learner.abstract_state()
  masters, moments, frozen = map(
    _bytes_per_chip, (state.params, state.opt_state, base)
  )
  # With adapters, the frozen parameters are the reference policy.
  has_reference = config.loss.kl_weight and not model.adapters
  rollouts = config.rollout
  length = rollouts.max_prompt_tokens + rollouts.max_completion_tokens
  # Elements of the keys and values of a token.
  token_size = 2 * model.num_layers * model.num_kv_heads * model.head_dim
  itemsize = 2 if model.dtype == 'bfloat16' else 4
  slots = rollouts.batch_buckets[-1]
  return {
    'masters': masters,
    'frozen': frozen,
    'moments': moments,
    'reference': masters * itemsize / 4 if has_reference else 0,
    'copy': sampler.parameter_bytes(model, rollouts.weights) / tensor,
    'cache': slots * length * token_size * itemsize / copies / tensor,
  }


def _bytes_per_chip(tree) -> float:
  return math.fsum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


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
    **builders.sampler_kwargs(config),
  )


def _multiples(sizes: tuple[int, ...], copies: int) -> tuple[int, ...]:
  return tuple(sorted({-(-size // copies) * copies for size in sizes}))


def _print(report: Report) -> None:
  size = math.prod(report.mesh.values())
  print(
    f'{report.parameters / 1e9:.2f}B parameters on {size} chips '
    f'({report.topology}), mesh {report.mesh}, sampling in groups of '
    f'{report.tensor}; {report.chip.memory / 2**30:.2f} GiB per chip'
  )
  print('| program | GiB | other data | total | received, GiB | fits |')
  print('|---|---|---|---|---|---|')
  for p in report.programs:
    other = p.other_data / 2**30
    if p.peak is None:
      print(f'| {p.name} | - | {other:.2f} | - | - | {p.problem} |')
      continue
    print(
      f'| {p.name} | {p.peak / 2**30:.2f} | {other:.2f} '
      f'| {p.total / 2**30:.2f} | {p.collective / 2**30:.2f} '
      f'| {"no" if p.name in report.not_fitting else "yes"} |'
    )
  if not report.not_fitting:
    print('fits')
    return
  advice = {
    'prepare': 'raise rollout.tensor',
    'decode': 'lower rollout.batch_buckets or raise rollout.tensor',
    'prefill': 'lower rollout.batch_buckets or raise rollout.tensor',
    'accumulate': 'lower learner.microbatch_rows',
    'apply': 'optimizer.mu_dtype=bfloat16',
  }
  actions = dict.fromkeys(advice[name] for name in report.not_fitting)
  print(f'does not fit: {"; ".join([*actions, "or use a larger slice"])}')


def _rooflines(
  config, model, chip, mesh, tensor, programs, work: Workload
) -> tuple[dict[str, float], float]:
  """Returns (lower bounds of the seconds of each phase, FLOP of the update)."""
  num_active = models.num_active_parameters(model)
  head = model.vocab_size * model.hidden_size
  body = num_active - head * (1 if model.tie_embeddings else 2)
  episodes = config.rollout.groups * config.rollout.episodes_per_group
  rows = episodes * work.turns
  peak = chip.flops * mesh.size
  groups = mesh.size // tensor
  slots = config.rollout.batch_buckets[-1]
  weights = sampler.parameter_bytes(model, config.rollout.weights)
  # Bytes of the keys and values of a token, in bfloat16.
  token_bytes = 4 * model.num_layers * model.num_kv_heads * model.head_dim
  slot_bytes = (work.prompt_tokens + work.response_tokens / 2) * token_bytes
  decoded = rows * work.response_tokens
  # A group reads all weights to decode one token of each of its slots.
  active_slots = min(slots, max(1.0, episodes / groups))
  bytes_read = (
    decoded
    / groups
    / active_slots
    * (weights + active_slots * slot_bytes)
    / tensor
  )
  passes = 6 + 2 * (config.model.remat == 'layer')
  passes += 2 * (config.loss.old_log_probs == 'learner')
  passes += 2 * bool(config.loss.kl_weight)
  # Logits are computed for the tokens of the response only.
  row_products = body * (work.prompt_tokens + work.response_tokens)
  row_products += head * work.response_tokens
  collective = {p.name: p.collective for p in programs}
  microbatches = math.ceil(rows / config.learner.microbatch_rows)
  exchanged = microbatches * collective['accumulate']
  exchanged += collective['prepare']
  flops = passes * rows * row_products
  secs = {
    'prefill': 2 * body * rows * work.prompt_tokens / peak,
    'decode': max(
      bytes_read / chip.memory_rate, 2 * (body + head) * decoded / peak
    ),
    'update': flops / peak,
    'exchange between chips': exchanged / chip.link_rate,
  }
  return secs, flops


# Patterns that find the collectives in the text of a compiled program.

_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) (?:\([^{]*\) -> .*)?\{$')
_OPERATION = re.compile(
  r'= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|'
  r'collective-permute)(?:-start)?\(([^)]*)'
)
_DEFINED = re.compile(r'\s+(?:ROOT )?%?([\w.-]+) = (.*?) [\w-]+\(')
_NAME = re.compile(r'%?([\w.-]+)')
_SHAPE = re.compile(r'(pred|[a-z]+\d+)\[([\d,]*)\]')
_CALLED = re.compile(r'(?:body|calls|to_apply)=%?([\w.-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r'condition=%?([\w.-]+)')
_LIMIT = re.compile(r'= [su]32\[\]\S* constant\((\d+)\)')
_BYTES = {'pred': 1, 'bf16': 2, 's8': 1, 'u8': 1, 's64': 8, 'u64': 8, 'f64': 8}


def collective_bytes(text: str) -> float:
  """Returns the bytes that a device receives in one run of a program.

  Counts the output of each collective; for a reduce-scatter its input, and for
  an all-reduce twice its size. A collective in a loop counts once per trip. If
  the number of trips is not recorded, a loop is assumed to count from 0 by ones
  to the constant in its condition. Of several branches, the largest counts.

  Args:
    text: HLO text of the compiled program.
  """
  own: dict[str, float] = {}
  limits: dict[str, int] = {}
  calls: dict[str, list[tuple[str, str, int]]] = {}
  branches: dict[str, list[list[str]]] = {}
  sizes: dict[str, float] = {}
  name, entry = '', ''
  for line in text.splitlines():
    if line and not line[0].isspace():
      match = _COMPUTATION.match(line)
      if match:
        name = match[1]
        own[name], calls[name], branches[name] = 0.0, [], []
        entry = name if line.startswith('ENTRY') else entry
      continue
    if defined := _DEFINED.match(line):
      shapes = _SHAPE.findall(defined[2])
      sizes[defined[1]] = max((_size(*shape) for shape in shapes), default=0)
    operation = _OPERATION.search(line)
    if operation and name:
      shapes = _SHAPE.findall(operation[1])
      size = max((_size(*shape) for shape in shapes), default=0)
      input_size = sum(sizes.get(n, 0) for n in _NAME.findall(operation[3]))
      own[name] += {
        'reduce-scatter': max(size, input_size),
        'all-reduce': 2 * size,
      }.get(operation[2], size)
      continue
    if match := _BRANCHES.search(line):
      branches[name].append(_NAME.findall(match[1]))
    if limit := _LIMIT.search(line):
      limits[name] = max(limits.get(name, 1), int(limit[1]))
    trips, condition = _TRIPS.search(line), _CONDITION.search(line)
    for called in _CALLED.findall(line):
      num_trips = int(trips[1]) if trips else 0
      calls[name].append((called, condition[1] if condition else '', num_trips))

  @functools.cache
  def total(computation: str) -> float:
    inner = (
      (trips or limits.get(condition, 1) if condition else 1) * total(called)
      for called, condition, trips in calls.get(computation, ())
    )
    chosen = (max(map(total, names)) for names in branches.get(computation, ()))
    return own.get(computation, 0.0) + math.fsum(inner) + math.fsum(chosen)

  return total(entry)


def _size(dtype: str, dimensions: str) -> float:
  """Returns the bytes of an array by its HLO type and dimensions."""
  num_elements = math.prod(int(x) for x in dimensions.split(',') if x)
  return _BYTES.get(dtype, 4) * num_elements
