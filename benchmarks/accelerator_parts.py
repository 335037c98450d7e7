"""The measurements of benchmarks/accelerator.py, one process each.

A measurement appends its results to OUT/records.jsonl as soon as it has them,
so that they remain if it fails later. Traces for xprof are in OUT/traces.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Iterator, Sequence

import forced
import jax
import kernel_check
import learner as learner_benchmark
import ml_collections
import models
import numpy as np
import rollout as rollout_benchmark
import torch_peer

from configs import alfworld, sizes
from gigpo_jax import (
  batch,
  builders,
  mesh,
  sampler,
  tokenizer,
  train,
  trajectory,
)
from gigpo_jax.models import (
  huggingface,
  kv_cache,
  parameters,
  published,
  qwen,
)
from gigpo_jax.run import (
  collection,
  model_builders,
  model_check,
  run_builders,
  run_state,
)
from gigpo_jax.runtime import compilation, hardware

# Its tokenizer serves every shape.
_TEXT = f'{sizes.INCLUDED}/alfworld_tiny'
_TINY_LENGTHS = forced.Lengths(
  max_turns=4,
  short_turns=2,
  prompt_tokens=120,
  response_tokens=8,
  max_prompt_tokens=320,
  max_response_tokens=40,
)


@dataclasses.dataclass(frozen=True)
class Setup:
  """What all measurements of a shape share.

  Attributes:
    shape: name of the shape.
    out: folder of the results.
    config: the experiment.
    lengths: lengths of its episodes.
    slots: numbers of slots of the decode measurement.
    matmul: width of the matrices of the rate measurement.
    copy_mib: size of its copy in MiB.
  """

  shape: str
  out: pathlib.Path
  config: ml_collections.ConfigDict
  lengths: forced.Lengths
  slots: tuple[int, ...]
  matmul: int
  copy_mib: int

  @property
  def is_tiny(self) -> bool:
    """Whether the shape is the one for a CPU."""
    return self.shape == 'tiny'

  @property
  def network(self) -> qwen.QwenConfig:
    """Shape of the network."""
    if self.is_tiny:
      return huggingface.read_config(model_check.model_directory(_TEXT))
    return published.SHAPES[f'Qwen2.5-{self.shape.upper()}']

  def make_mesh(self) -> jax.sharding.Mesh:
    """Returns the mesh of the config."""
    return model_builders.make_mesh(
      self.config, self.network, jax.devices(), mesh.device_bytes()
    )

  def make_model(self, devices: jax.sharding.Mesh) -> qwen.QwenConfig:
    """Returns the network as the config uses it on these devices."""
    return model_builders.configure_model(self.network, self.config, devices)


def make_setup(shape: str, out: pathlib.Path) -> Setup:
  """Returns the sizes of the measurements for a shape."""
  is_tiny = shape == 'tiny'
  config = alfworld.get_config('smoke' if is_tiny else shape)
  config.env.data_dir = 'generated'
  config.evaluation.every = 0
  if is_tiny:
    config.rollout.groups = 2
    config.rollout.batch_buckets = (8,)
    config.rollout.prompt_buckets = (320,)
    config.learner.minibatch_rows = 16
    config.loss.kl_weight = 0.01  # As the large shapes, with a reference.
    return Setup(shape, out, config, _TINY_LENGTHS, (4, 8), 256, 8)
  slots = (128, 32, 256)
  return Setup(shape, out, config, forced.Lengths(), slots, 8192, 4096)


def record(setup: Setup, part: str, name: str, **fields) -> None:
  """Appends a result of a part; a later one of the same name replaces it."""
  line = json.dumps({'part': part, 'name': name, **fields})
  with (setup.out / 'records.jsonl').open('a') as file:
    file.write(line + '\n')
  print(line, flush=True)


class Compilations:
  """Counts the programs that jax compiles or loads from its cache."""

  def __init__(self):
    self.events: collections.Counter[str] = collections.Counter()
    self.programs, self.secs = 0, 0.0
    jax.monitoring.register_event_listener(
      lambda name, **_: self.events.update([name])
    )
    jax.monitoring.register_event_duration_secs_listener(self._add)

  @property
  def cached(self) -> int:
    """Returns the number of programs loaded from the persistent cache."""
    return self.events['/jax/compilation_cache/cache_hits']

  def _add(self, name: str, secs: float, **_) -> None:
    if name == '/jax/core/compile/backend_compile_duration':
      self.programs += 1
      self.secs += secs
      if secs > 1:
        print(f'program {self.programs}: {secs:.1f} s', flush=True)


def _flags(options: argparse.Namespace) -> str:
  """Returns the flags and fields with which a part differs."""
  return ' '.join([options.flags, *options.field]).strip()


def peak_gib() -> float | None:
  """Returns the peak memory of the first device, if it reports it."""
  stats = jax.devices()[0].memory_stats() or {}
  peak = stats.get('peak_bytes_in_use')
  return peak / 2**30 if peak else None


@contextlib.contextmanager
def trace(setup: Setup, name: str) -> Iterator[None]:
  """Writes a trace of the context for xprof."""
  with jax.profiler.trace(str(setup.out / 'traces' / name)):
    yield


# The parts.


def rates(setup: Setup, options: argparse.Namespace) -> None:
  """Measures the limits of one device."""
  device = jax.devices()[0]
  dtype = 'float32' if device.platform == 'cpu' else 'bfloat16'
  record(
    setup,
    options.part,
    'rates',
    device=device.device_kind,
    platform=device.platform,
    devices=jax.device_count(),
    jax=jax.__version__,
    dtype=dtype,
    matmul=models.matmul_rate(dtype, setup.matmul),
    copy=models.copy_rate(setup.copy_mib),
  )


def check(setup: Setup, options: argparse.Namespace) -> None:
  """Compares the kernels of the platform with plain attention in float32."""
  for name, errors in kernel_check.measure(jax.default_backend()):
    record(setup, options.part, name, errors=errors)


def make_bundle(setup: Setup) -> model_builders.ModelBundle:
  """Returns a policy with random weights that never stops by itself."""
  config = setup.config
  devices = setup.make_mesh()
  model = setup.make_model(devices)
  mesh.check(devices, parameters.shapes(model), parameters.logical_axes(model))
  config.rollout.tensor = model_builders.sampling_tensor(
    config, model, devices, mesh.device_bytes()
  )
  return model_builders.ModelBundle(
    model=model,
    mesh=devices,
    tokenizer=tokenizer.Tokenizer(model_check.model_directory(_TEXT)),
    load=functools.partial(models.random_params, model, devices),
    sampler=sampler.Sampler(
      model,
      devices,
      batch_buckets=tuple(config.rollout.batch_buckets),
      stop_ids=(),
      vocab_size=model.vocab_size,
      tensor=config.rollout.tensor,
      **model_builders.sampler_kwargs(config),
    ),
  )


def compile_all(setup: Setup, parts: run_builders.Parts) -> run_state.RunState:
  """Returns the first state of a run after compiling all its programs."""
  bundle = parts.bundle
  with compilation.Compiler() as compiler:
    programs = run_builders.start_compilation(parts, compiler)
    params = bundle.load()
    reference = None
    if parts.needs_reference:
      reference = builders.make_reference(bundle, params)
    state = run_state.RunState(parts.learner.init(params), reference=reference)
    rows = builders.make_dummy_rows(setup.config)
    train.estimate_advantages(parts, state, run_state.History(), rows)
    return run_builders.warm_up(parts, state, programs, compiler.start)


def start(setup: Setup, options: argparse.Namespace) -> None:
  """Measures the time from the start of the process to the first rollout."""
  counts = Compilations()
  bundle = make_bundle(setup)
  with jax.set_mesh(bundle.mesh):
    parts = run_builders.make_parts(setup.config, str(setup.out), bundle)
    compile_all(setup, parts)
    _record_start(setup, options, counts)


def _record_start(
  setup: Setup, options: argparse.Namespace, counts: Compilations
) -> None:
  record(
    setup,
    options.part,
    'start',
    programs=counts.programs,
    cached=counts.cached,
    compile_secs=counts.secs,
    secs=time.time() - options.started,
  )


def iteration(setup: Setup, options: argparse.Namespace) -> None:
  """Measures a complete iteration with episodes of forced lengths."""
  counts = Compilations()
  folder = setup.out / 'iteration'
  folder.mkdir(exist_ok=True)
  bundle = make_bundle(setup)
  with (
    jax.set_mesh(bundle.mesh),
    builders.make_pool(setup.config) as pool,
  ):
    parts = run_builders.make_parts(setup.config, str(folder), bundle)
    state = compile_all(setup, parts)
    _record_start(setup, options, counts)
    compiled, flags = counts.programs, _flags(options)
    runner = builders.make_runner(setup.config, bundle, pool)
    runner = dataclasses.replace(
      runner,
      pool=forced.Pool(pool, setup.lengths.turns),
      sampler=forced.Sampler(bundle.sampler, setup.lengths.response),
      tokenizer=forced.Tokenizer(bundle.tokenizer, setup.lengths.prompt),
    )
    begin = time.perf_counter()
    groups, metrics = collection.collect(parts, runner, state, 0)
    secs = time.perf_counter() - begin
    record(
      setup,
      options.part,
      'rollout',
      flags=flags,
      secs=secs,
      compilations=counts.programs - compiled,
      episodes=len(groups.kept),
      **_rollout_costs(setup, bundle.model, groups.kept, metrics),
      **{k: v for k, v in metrics.items() if k.startswith('rollout/')},
    )
    with contextlib.closing(run_builders.open_logs(parts, 0)) as logs:
      begin, history = time.perf_counter(), run_state.History()
      state, metrics = train.update(parts, state, history, groups, 0, logs)
      jax.block_until_ready(state.policy)
    record(
      setup,
      options.part,
      'learner',
      flags=flags,
      secs=time.perf_counter() - begin,
      compilations=counts.programs - compiled,
      flops=_learner_flops(bundle.model, groups.kept),
      peak_gib=peak_gib(),
      padding=metrics.get('packs/padding'),
      remat=parts.bundle.model.remat,
      gap=metrics.get('sampler/log_prob_difference_mean'),
    )


def _rollout_costs(
  setup: Setup,
  model: qwen.QwenConfig,
  episodes: Sequence[trajectory.Trajectory],
  metrics: dict[str, float],
) -> dict[str, float]:
  """Returns what a device computes and reads at full occupancy of the slots."""
  rows = [(len(s.prompt_ids), len(s.completion_ids)) for s in _steps(episodes)]
  options, devices = setup.config.rollout, jax.device_count()
  slots = min(options.batch_buckets[-1], len(episodes))
  decoded = sum(c for _, c in rows)
  cached = sum(c * (p + c / 2) for p, c in rows)
  computed = 1 - metrics['rollout/shared_prompt_share']
  return {
    'turns': len(rows) / len(episodes),
    'prompt_tokens': sum(p for p, _ in rows) / len(rows),
    'response_tokens': decoded / len(rows),
    'prefill_flops': sum(models.forward_flops(model, p) for p, _ in rows)
    * computed
    / devices,
    'decode_bytes': decoded
    / slots
    * models.weight_bytes(model)
    / options.tensor
    + cached * kv_cache.token_bytes(model) / devices,
  }


def _learner_flops(
  model: qwen.QwenConfig, episodes: Sequence[trajectory.Trajectory]
) -> float:
  """Returns a device's operations for update and reference log-probs."""
  rows = [(len(s.prompt_ids), len(s.completion_ids)) for s in _steps(episodes)]
  forward = sum(models.forward_flops(model, p + c, c) for p, c in rows)
  return 4 * forward / jax.device_count()


def _steps(
  episodes: Sequence[trajectory.Trajectory],
) -> list[trajectory.Step]:
  return [step for episode in episodes for step in episode.steps]


def decode(setup: Setup, options: argparse.Namespace) -> None:
  """Measures decode steps and prefills for prompts of one length."""
  devices = mesh.make_mesh(1, -1, 1)
  model = dataclasses.replace(setup.make_model(devices), remat='none')
  params = models.random_params(model, devices)
  prompt = options.prompt if not setup.is_tiny else options.prompt // 16
  for slots in setup.slots:
    engine = rollout_benchmark.make_sampler(
      slots,
      model,
      (prompt,),
      draft_tokens=setup.config.rollout.draft_tokens,
    )
    step, prefill = rollout_benchmark.step_and_prefill_secs(
      engine, params, slots, prompt
    )
    # Cache length after half of the timed steps.
    cached = slots / devices.size * (prompt + 40) * kv_cache.token_bytes(model)
    flops = slots / devices.size * models.forward_flops(model, prompt)
    record(
      setup,
      options.part,
      f'{slots} x {prompt}',
      slots=slots,
      prompt=prompt,
      step_secs=step,
      step_bytes=models.weight_bytes(model) + cached,
      prefill_secs=prefill,
      prefill_flops=flops,
      flags=_flags(options),
    )
    if slots == setup.slots[0]:
      with trace(setup, options.part):
        rollout_benchmark.sample(engine, params, slots, prompt, 16)
    del engine


def update(setup: Setup, options: argparse.Namespace) -> None:
  """Measures the log-probs and the update of one mini-batch."""
  counts = Compilations()
  setup.config.model.remat = options.remat
  devices = setup.make_mesh()
  model = setup.make_model(devices)
  rows, flops = _make_rows(setup, model)
  subject = builders.make_learner(
    setup.config,
    model_builders.ModelBundle(model, devices, None, None, None),
    builders.make_loss(setup.config),
  )
  step = learner_benchmark.Step(subject, model, rows)
  # The smaller peak first: the device reports the peak of the process.
  for name, call, passes in (
    ('log-probs', step.log_probs, 1),
    ('update', step, 3),
  ):
    compiled = counts.secs
    call()
    begin = time.perf_counter()
    call()
    secs = time.perf_counter() - begin
    record(
      setup,
      options.part,
      name,
      remat=options.remat,
      flags=_flags(options),
      compile_secs=counts.secs - compiled,
      secs=secs,
      tokens=int(rows.lengths.sum()),
      flops=passes * flops / jax.device_count(),
      peak_gib=peak_gib(),
    )
  if not options.flags:
    with trace(setup, options.part):
      step()


def _make_rows(
  setup: Setup, model: qwen.QwenConfig
) -> tuple[batch.Rows, float]:
  """Returns a mini-batch of rows, and the operations of a forward pass."""
  count = setup.config.learner.minibatch_rows
  prompts = [setup.lengths.prompt(n) for n in range(count)]
  completions = [setup.lengths.response((n,)) for n in range(count)]
  draw = functools.partial(
    np.random.default_rng(0).integers, 2, model.vocab_size, dtype=np.int32
  )
  rows = learner_benchmark.make_rows(
    [draw(size=n) for n in prompts],
    [draw(size=n) for n in completions],
    setup.config.rollout.max_prompt_tokens,
  )
  sizes = zip(prompts, completions, strict=True)
  return rows, sum(models.forward_flops(model, p + c, c) for p, c in sizes)


def small(setup: Setup, options: argparse.Namespace) -> None:
  """Runs a few iterations of training with a random small policy."""
  config = alfworld.get_config('smoke' if setup.is_tiny else 'small')
  config.model.path = str(setup.out / 'small_policy')
  config.num_iterations = 2 if setup.is_tiny else 3
  config.evaluation.every = 0
  config.checkpoint.every = config.num_iterations
  if setup.is_tiny:
    config.rollout = setup.config.rollout
    config.env.max_steps = 3
  shape = config.sft.model
  text = model_check.model_directory(_TEXT)
  model = qwen.QwenConfig(
    vocab_size=tokenizer.Tokenizer(text).vocab_size,
    hidden_size=shape.width,
    intermediate_size=shape.mlp,
    num_layers=shape.layers,
    num_heads=shape.heads,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.width // shape.heads,
  )
  params = parameters.init(model, jax.random.key(0))
  huggingface.save(config.model.path, model, params, text)
  del params
  workdir = setup.out / 'small'
  train.train(config, str(workdir))
  for line in (workdir / 'metrics.jsonl').read_text().splitlines():
    values = json.loads(line)
    if 'time/iteration_secs' in values:
      record(setup, options.part, f'iteration {values["iteration"]}', **values)


def torch(setup: Setup, options: argparse.Namespace) -> None:
  """Measures Hugging Face transformers on a CUDA device, if there is one."""
  model = setup.make_model(mesh.make_mesh(1, -1, 1))
  for name, fields in torch_peer.measure(model):
    record(setup, options.part, name, **fields)


PARTS = {
  'check': check,
  'rates': rates,
  'cold': start,
  'warm': start,
  'iteration': iteration,
  'decode': decode,
  'update': update,
  'small': small,
  'torch': torch,
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Returns the options of a part."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--part', required=True)
  parser.add_argument('--shape', required=True)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--started', type=float, required=True)
  parser.add_argument('--remat', default='layer')
  parser.add_argument('--prompt', type=int, default=1024)
  parser.add_argument('--slots', default='', help='such as 128,32')
  parser.add_argument('--flags', default='')
  parser.add_argument(
    '--field', action='append', default=[], help='change: field=value'
  )
  return parser.parse_args(arguments)


def change_fields(
  config: ml_collections.ConfigDict, changes: Sequence[str]
) -> None:
  """Sets fields of a config, each given as 'field=value'."""
  for field, _, text in (change.partition('=') for change in changes):
    try:
      value = ast.literal_eval(text)
    except ValueError:
      value = text
    config.update_from_flattened_dict({field: value})


def main(arguments: Sequence[str]) -> None:
  """Runs a part."""
  options = parse(arguments)
  hardware.keep_freed_memory()
  compilation.enable_cache()
  setup = make_setup(options.shape, options.out)
  if options.slots:
    slots = tuple(map(int, options.slots.split(',')))
    setup = dataclasses.replace(setup, slots=slots)
  change_fields(setup.config, options.field)
  PARTS[options.part.partition('-')[0]](setup, options)
