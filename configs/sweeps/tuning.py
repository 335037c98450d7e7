r"""Which learning rate each method is given: the same three for all.

    python launch/sweep.py --sweep=configs/sweeps/tuning.py \
        --workdir=runs/tuning

One seed, 100, and tasks that no other table has. Taken is the rate with the
best mean of the evaluations after the start; of two that are equal, the one
that is better at the end.
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
