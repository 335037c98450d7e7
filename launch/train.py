r"""Trains a policy.

    python launch/train.py --config=configs/alfworld.py:tiny
    python launch/train.py --config=configs/webshop.py:tiny --workdir=runs/shop
    python launch/train.py --config=configs/alfworld.py:tiny --config.seed=1 \
        --workdir=runs/alfworld-tiny-1

Rerun a command to resume its run. After installation, `gigpo-train` is a short
form of `python launch/train.py`.
"""

from collections.abc import Callable
from typing import Any

from gigpo_jax.runtime import output
from launch import interrupt


@interrupt.handle()
@output.handle()
def main() -> None:
  """Parses the flags and trains."""
  from launch import command

  command.run(make_train())


def make_train() -> Callable[..., None]:
  """Defines the flags of training; returns a function that trains.

  The function takes a config, a work directory and further arguments of
  `gigpo_jax.train.train`.
  """
  from absl import flags

  from launch import lines

  allow_config_change = flags.DEFINE_bool(
    'allow_config_change',
    False,
    'Whether a run may resume with a config other than its own.',
  )
  grace_secs = flags.DEFINE_float(
    'grace_secs',
    25.0,
    'Seconds between SIGTERM and the end of the process, in which the run '
    'saves its state.',
    lower_bound=0.0,
    upper_bound=86_400.0,
  )
  lines.refuse_nan(grace_secs.name)

  def run(config, workdir: str, **options: Any) -> None:
    import pathlib

    # Worker processes import this file again and must not load jax: on a TPU
    # host, jax would claim the chips.
    from gigpo_jax import checkpoint, train

    folder = pathlib.Path(workdir) / 'checkpoints'
    interrupt.set_outlook(lambda: checkpoint.describe_resume(folder))
    train.train(
      config,
      workdir,
      allow_config_change=allow_config_change.value,
      grace_secs=grace_secs.value,
      **options,
    )

  return run


if __name__ == '__main__':
  main()
