"""Compiles an experiment for a TPU slice, without one.

python launch/tpu_compile.py --config=configs/alfworld.py:7b --topology=v5e:4x4
"""

import os

if __name__ == '__main__':
  # The compiler is libtpu's; chips, if there are any, are left alone.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  # Programs for devices that are not there cannot be read back.
  os.environ.setdefault('JAX_ENABLE_COMPILATION_CACHE', 'false')

  from absl import flags

  from gigpo_jax import tpu
  from launch import command

  topology = flags.DEFINE_string('topology', 'v5e:4x4', 'The slice.')
  shape = flags.DEFINE_string('shape', '', "Model shape, if not the config's.")
  command.run(
    lambda config, _: tpu.main(config, topology.value, shape=shape.value)
  )
