"""Trains: `python launch/train.py --config=configs/alfworld.py:tiny`."""

if __name__ == '__main__':
  # Here, because worker processes import this file again, and must not load
  # jax: on a TPU host it would seize the chips.
  from gigpo_jax import train
  from launch import command

  command.run(train.train)
