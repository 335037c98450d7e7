"""Benchmark the start of a large run: compilation and loading.

    python benchmarks/startup.py --what compile --shape Qwen2.5-1.5B
    python benchmarks/startup.py --what load --shape Qwen2.5-0.5B

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
import dataclasses
import os
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from gigpo_jax import builders, mesh
from gigpo_jax.models import huggingface, parameters, published
from gigpo_jax.tools import tpu_compile


def compile_once(options: argparse.Namespace) -> None:
  """Compiles the programs; prints the seconds of each."""
  from configs import alfworld

  config = alfworld.get_config()
  shape = published.SHAPES[options.shape]
  devices = builders.make_mesh(
    config, shape, jax.devices(), mesh.device_bytes()
  )
  model = dataclasses.replace(
    shape,
    **builders.model_kwargs(config, devices),
  )
  engine = tpu_compile.make_sampler(
    config, model, devices, devices.shape['tensor']
  )
  learner = builders.make_learner(
    config,
    builders.ModelBundle(model, devices, None, None, None),
    builders.make_loss(config),
  )
  start = time.monotonic()
  state, base = learner.abstract_state()
  lowered = engine.lower(state.params, base) | learner.lower()
  timings = [f'traced {time.monotonic() - start:.1f}']
  for name, program in lowered.items():
    start = time.monotonic()
    program.compile()
    timings.append(f'{name} {time.monotonic() - start:.1f}')
  print(f'{model.num_layers} layers, seconds: ' + ', '.join(timings))


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
