"""Benchmark the start of a large run: compilation and loading.

    python benchmarks/startup.py --what programs --shape Qwen2.5-1.5B
    python benchmarks/startup.py --what compile --shape Qwen2.5-1.5B
    python benchmarks/startup.py --what load --shape Qwen2.5-0.5B

programs: compiles all programs of sampler and learner with the config of
`configs/alfworld.py`, on the available devices, from shapes alone. Reports the
CPU seconds of all threads. The programs of advantages are not included.

compile: compiles the largest programs of the sampler and the learner with the
config of `configs/alfworld.py`, on the available devices. Runs in two
processes, the second with the persistent cache of the first.

load: writes a checkpoint of random bfloat16 numbers and loads it in another
process, onto `--devices` virtual devices. Reports the peak memory above that of
the parameters, as a multiple of the largest tensor in the type it is loaded
into. A small transfer comes first, so that the memory of jax itself is not
counted.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from gigpo_jax import builders, mesh
from gigpo_jax import learner as learner_lib
from gigpo_jax import sampler as sampler_lib
from gigpo_jax.models import huggingface, parameters, published
from gigpo_jax.run import model_builders
from gigpo_jax.runtime import compilation
from gigpo_jax.tools import tpu_compile

# The learner's programs that an iteration of the paper's config runs.
_UPDATE = ('outputs', 'reference outputs', 'accumulate', 'apply')


def make_parts(
  name: str,
) -> tuple[sampler_lib.Sampler, learner_lib.Learner]:
  """Returns sampler and learner of the paper's config for a model's shape."""
  from configs import alfworld

  config = alfworld.get_config()
  shape = published.SHAPES[name]
  devices = model_builders.make_mesh(
    config, shape, jax.devices(), mesh.device_bytes()
  )
  model = model_builders.configure_model(shape, config, devices)
  engine = tpu_compile.make_sampler(
    config, model, devices, devices.shape['tensor']
  )
  learner = builders.make_learner(
    config,
    model_builders.ModelBundle(model, devices, None, None, None),
    builders.make_loss(config),
  )
  return engine, learner


def lowerings(
  engine: sampler_lib.Sampler, learner: learner_lib.Learner
) -> list[tuple[str, compilation.Lowering]]:
  """Returns (name, function that lowers the program) of all programs."""
  state, base = learner.abstract_state()
  return [
    (name, lower)
    for programs in (
      engine.lowerings(state.params, base),
      learner.lowerings(reference=True),
    )
    for (name, *_), lower in programs.items()
  ]


def compile_all(options: argparse.Namespace) -> None:
  """Compiles all programs; prints the CPU seconds by name."""
  secs = collections.defaultdict(list)
  for name, lower in lowerings(*make_parts(options.shape)):
    start = time.process_time()
    lowered = lower()
    traced = time.process_time()
    lowered.compile()
    secs[name].append((traced - start, time.process_time() - traced))
  print('| program | number | tracing | compilation |')
  print('|---|---|---|---|')
  total = [pair for pairs in secs.values() for pair in pairs]
  for name, pairs in (secs | {'total': total}).items():
    trace, compilation = map(sum, zip(*pairs, strict=True))
    print(f'| {name} | {len(pairs)} | {trace:.1f} | {compilation:.1f} |')


def compile_once(options: argparse.Namespace) -> None:
  """Compiles the programs; prints the seconds of each."""
  engine, learner = make_parts(options.shape)
  start = time.monotonic()
  state, base = learner.abstract_state()
  lowered = engine.lower(state.params, base)
  lowered |= learner.lower(_UPDATE)
  timings = [f'traced {time.monotonic() - start:.1f}']
  for name, program in lowered.items():
    start = time.monotonic()
    program.compile()
    timings.append(f'{name} {time.monotonic() - start:.1f}')
  layers = published.SHAPES[options.shape].num_layers
  print(f'{layers} layers, seconds: ' + ', '.join(timings))


def compile_twice(options: argparse.Namespace) -> None:
  """Compiles without and with a persistent cache."""
  with tempfile.TemporaryDirectory() as folder:
    cache = {
      'JAX_COMPILATION_CACHE_DIR': folder,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    for name in ('cold', 'from the cache'):
      print(f'{name}: {_child(options, "compile", cache)}', flush=True)


def _child(options: argparse.Namespace, measurement: str, environ: dict) -> str:
  """Returns the last line that this program prints in another process."""
  arguments = ['--what', measurement, '--shape', options.shape, '--here']
  done = subprocess.run(
    [sys.executable, __file__, *arguments, '--path', options.path],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | environ,
  )
  return done.stdout.splitlines()[-1]


def load_once(options: argparse.Namespace) -> None:
  """Loads a checkpoint; prints the peak memory above the parameters."""
  model = huggingface.read_config(options.path)
  devices = mesh.make_mesh(1, -1, 1)
  jax.block_until_ready(
    mesh.place_rows(devices, np.zeros((devices.size, 8), np.int32))
  )
  before = _peak()
  params = jax.block_until_ready(huggingface.load(options.path, model, devices))
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  largest = 4 * model.vocab_size * model.hidden_size
  excess = _peak() - before - sum(sizes)
  print(
    f'{devices.size} devices: parameters {sum(sizes) / 2**30:.2f} GiB, '
    f'{excess / 2**30:.2f} GiB above them: '
    f'{excess / largest:.2f} of the largest tensor'
  )


def _peak() -> int:
  """Returns the peak memory of this process in bytes."""
  # ru_maxrss would include the peak of the parent process.
  with open('/proc/self/status') as file:
    return next(1024 * int(x.split()[1]) for x in file if 'VmHWM' in x)


def load(options: argparse.Namespace) -> None:
  """Writes a checkpoint and loads it in other processes."""
  model = published.SHAPES[options.shape]
  with tempfile.TemporaryDirectory() as options.path:
    huggingface.save(
      options.path, model, parameters.init(model, jax.random.key(0))
    )
    for devices in options.devices:
      print(
        _child(options, 'load', {'JAX_NUM_CPU_DEVICES': str(devices)}),
        flush=True,
      )


_MEASUREMENTS = {
  'programs': (compile_all, compile_all),
  'compile': (compile_twice, compile_once),
  'load': (load, load_once),
}


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=_MEASUREMENTS, default='compile')
  parser.add_argument(
    '--shape', choices=published.SHAPES, default='Qwen2.5-1.5B'
  )
  parser.add_argument('--devices', type=int, nargs='+', default=[1, 8])
  parser.add_argument('--path', default='', help=argparse.SUPPRESS)
  parser.add_argument('--here', action='store_true', help=argparse.SUPPRESS)
  options = parser.parse_args()
  _MEASUREMENTS[options.what][options.here](options)


if __name__ == '__main__':
  main()
