r"""Tunes the learning rate of each method over the same three values.

    python launch/sweep.py --sweep=configs/sweeps/tuning.py \
        --workdir=runs/tuning

Uses seed 100 and tasks that no other table uses. The best rate has the highest
mean success over the evaluations after the start; the last evaluation breaks
ties.
"""

from configs.sweeps import main

RATES = (7.5e-5, 1.5e-4, 3e-4)
SPLITS = {'alfworld': 'valid_seen', 'webshop': 'valid'}

RUNS = [
  {
    'name': f'{method} {rate:g}',
    'config': f'configs/{env}.py:mini{word}',
    'seed': 100,
    'overrides': {
      'optimizer.learning_rate': rate,
      'evaluation.split': SPLITS[env],
    },
  }
  for env in ('alfworld', 'webshop')
  for method, word in main.METHODS.items()
  for rate in RATES
]
