"""Trains a policy.

    python launch/train.py --config=configs/alfworld.py:tiny
    python launch/train.py --config=configs/webshop.py:tiny --workdir=runs/shop
    python launch/train.py --config=configs/alfworld.py:tiny --config.seed=1

The same command resumes a run.
"""

if __name__ == '__main__':
  from absl import flags

  from launch import command, interrupt

  _ALLOW_CONFIG_CHANGE = flags.DEFINE_bool(
    'allow_config_change',
    False,
    'Whether a run may go on with another config than it was begun with.',
  )
  _GRACE_SECS = flags.DEFINE_float(
    'grace_secs',
    25.0,
    'Time between SIGTERM and the end of the machine, to save and leave in.',
    lower_bound=0.0,
    upper_bound=86_400.0,
  )

  def main(config, workdir: str) -> None:
    """Trains."""
    import pathlib

    # Here, because worker processes import this file again, and must not load
    # jax: on a TPU host it would seize the chips.
    from gigpo_jax import checkpoint, train

    folder = pathlib.Path(workdir) / 'checkpoints'
    interrupt.describe(lambda: checkpoint.describe_resume(folder))
    train.train(
      config,
      workdir,
      allow_config_change=_ALLOW_CONFIG_CHANGE.value,
      grace_secs=_GRACE_SECS.value,
    )

  command.run(main)
