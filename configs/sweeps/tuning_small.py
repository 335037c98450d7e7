r"""Tunes the learning rates of `small.py`, on a seed that it does not use.

    python launch/sweep.py --sweep=configs/sweeps/tuning_small.py \
        --workdir=runs/tuning_small --at_once=6

The best rate has the highest `train/success_rate`, a mean over all iterations
(512 episodes, with the same tasks in all runs). If that differs by less than a
point, the last evaluation decides. This second rule was added after the runs.
"""

from configs.sweeps import small

RATES = (1e-5, 3e-5)
ITERATIONS = 4

RUNS = [
  {
    'experiment': small.EXPERIMENT,
    'name': f'{name} {rate:g}',
    'config': f'configs/alfworld.py:small{word}',
    'seed': 100,
    'overrides': small.fields(ITERATIONS) | {'optimizer.learning_rate': rate},
  }
  for name, word in small.METHODS.items()
  for rate in RATES
]
