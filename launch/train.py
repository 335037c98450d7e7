"""Trains a policy.

    python launch/train.py --config=configs/alfworld.py:tiny
    python launch/train.py --config=configs/webshop.py:tiny --workdir=runs/shop
    python launch/train.py --config=configs/alfworld.py:tiny --config.seed=1

Rerun a command to resume its run. After installation, `gigpo-train` is a short
form of `python launch/train.py`.
"""

from launch import interrupt


@interrupt.handle()
def main() -> None:
  """Parses the flags and trains."""
  from absl import flags

  from launch import command

  allow_config_change = flags.DEFINE_bool(
    'allow_config_change',
    False,
    'Whether a run may resume with a config other than its own.',
  )
  grace_secs = flags.DEFINE_float(
    'grace_secs',
    25.0,
    'Seconds from SIGTERM to the end of the machine; the run saves in time.',
    lower_bound=0.0,
    upper_bound=86_400.0,
  )

  def run(config, workdir: str) -> None:
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
    )

  command.run(run)


if __name__ == '__main__':
  main()
