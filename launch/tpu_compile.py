"""Compiles an experiment for a TPU slice or for GPUs, without any.

python launch/tpu_compile.py --config=configs/alfworld.py:7b --topology=v5e:4x4
python launch/tpu_compile.py --config=configs/alfworld.py:7b --topology=h100:8
"""

import os

from gigpo_jax.runtime import output
from launch import interrupt


@interrupt.handle()
@output.handle()
def main() -> None:
  """Parses the flags and compiles."""
  # The compilers need no chip. This keeps jax off the chips of the host.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  # Programs for absent devices cannot be read back from the cache.
  os.environ.setdefault('JAX_ENABLE_COMPILATION_CACHE', 'false')

  from absl import flags

  from gigpo_jax.tools import tpu_compile
  from launch import command

  topology = flags.DEFINE_string(
    'topology', 'v5e:4x4', 'Type and number of TPUs or GPUs, such as h100:8.'
  )
  shape = flags.DEFINE_string(
    'shape',
    '',
    'Published model whose shape to compile, such as Qwen3-30B-A3B; default: '
    "the config's.",
  )

  def run(config, workdir: str) -> None:
    del workdir
    tpu_compile.main(config, topology.value, shape=shape.value)

  command.run(run, ending=None)


if __name__ == '__main__':
  main()
