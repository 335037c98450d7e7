"""What the start of a large run costs: compiling, and reading a checkpoint.

    python benchmarks/startup.py --what compile --shape Qwen2.5-1.5B
    python benchmarks/startup.py --what load --shape Qwen2.5-0.5B

compile: the largest programs of sampler and learner as `configs/alfworld.py`
has them, for the devices at hand; in two processes one after the other, the
second with what the first left in the persistent cache.

load: a checkpoint of random bfloat16 numbers is written, and read in a process
of its own, onto `--devices` virtual ones. Of the peak of memory what is above
the parameters is shown in tensors of the largest, in the type that it is read
into. A first small transfer comes before, so that what jax itself takes is not
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

from gigpo_jax import experiment, mesh, tpu
from gigpo_jax.models import huggingface, published, qwen


def compile_once(options: argparse.Namespace) -> None:
  """Compiles the programs; prints seconds of each."""
  from configs import alfworld

  config = alfworld.get_config()
  devices = mesh.make_mesh(**config.mesh)
  model = dataclasses.replace(
    published.SHAPES[options.shape],
    **experiment.model_choices(config, devices),
  )
  engine = tpu.make_sampler(config, model, devices, devices.shape['tensor'])
  learner = experiment.make_learner(
    config,
    experiment.Policy(model, devices, None, None, None),
    experiment.policy_gradient(config),
  )
  begin = time.monotonic()
  state, base = learner.describe()
  lowered = engine.lower(state.params, base) | learner.lower()
  found = [f'traced {time.monotonic() - begin:.1f}']
  for name, program in lowered.items():
    begin = time.monotonic()
    program.compile()
    found.append(f'{name} {time.monotonic() - begin:.1f}')
  print(f'{model.num_layers} layers, seconds: ' + ', '.join(found))


def compile_twice(options: argparse.Namespace) -> None:
  """Compiles without and with a persistent cache."""
  with tempfile.TemporaryDirectory() as folder:
    cache = {
      'JAX_COMPILATION_CACHE_DIR': folder,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    for name in ('cold', 'from the cache'):
      print(f'{name}: {_child(options, "compile", cache)}', flush=True)


def _child(options: argparse.Namespace, what: str, environ: dict) -> str:
  """Returns the last line of this program in another process."""
  given = ['--what', what, '--shape', options.shape, '--here']
  done = subprocess.run(
    [sys.executable, __file__, *given, '--path', options.path],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | environ,
  )
  return done.stdout.splitlines()[-1]


def load_once(options: argparse.Namespace) -> None:
  """Reads a checkpoint; prints what it took above the parameters."""
  model = huggingface.read_config(options.path)
  devices = mesh.make_mesh(1, -1, 1)
  jax.block_until_ready(
    mesh.place_rows(devices, np.zeros((devices.size, 8), np.int32))
  )
  before = _peak()
  params = jax.block_until_ready(huggingface.load(options.path, model, devices))
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  largest = 4 * model.vocab_size * model.hidden_size
  above = _peak() - before - sum(sizes)
  print(
    f'{devices.size} devices: parameters {sum(sizes) / 2**30:.2f} GiB, above '
    f'them {above / 2**30:.2f} GiB: {above / largest:.2f} of the largest tensor'
  )


def _peak() -> int:
  """Returns the most memory so far, bytes."""
  # Not ru_maxrss, which begins at that of the process it was started from.
  with open('/proc/self/status') as file:
    return next(1024 * int(x.split()[1]) for x in file if 'VmHWM' in x)


def load(options: argparse.Namespace) -> None:
  """Writes a checkpoint and reads it in other processes."""
  model = published.SHAPES[options.shape]
  with tempfile.TemporaryDirectory() as options.path:
    huggingface.save(options.path, model, qwen.init(model, jax.random.key(0)))
    for devices in options.devices:
      print(
        _child(options, 'load', {'JAX_NUM_CPU_DEVICES': str(devices)}),
        flush=True,
      )


_WHAT = {'compile': (compile_twice, compile_once), 'load': (load, load_once)}


def main() -> None:
  """Measures."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=_WHAT, default='compile')
  parser.add_argument(
    '--shape', choices=published.SHAPES, default='Qwen2.5-1.5B'
  )
  parser.add_argument('--devices', type=int, nargs='+', default=[1, 8])
  parser.add_argument('--path', default='', help=argparse.SUPPRESS)
  parser.add_argument('--here', action='store_true', help=argparse.SUPPRESS)
  options = parser.parse_args()
  _WHAT[options.what][options.here](options)


if __name__ == '__main__':
  main()
