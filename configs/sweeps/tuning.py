r"""Which learning rate each method is given: the same three for all.

    python launch/sweep.py --sweep=configs/sweeps/tuning.py \
        --workdir=runs/tuning

Seed 100, of which nothing else is reported.
"""

from configs.sweeps import main

RATES = (3e-4, 6e-4, 1.2e-3)

RUNS = [
  {
    'name': f'{method} {rate:g}',
    'config': f'configs/{env}.py:mini{word}',
    'seed': 100,
    'overrides': {'optimizer.learning_rate': rate},
  }
  for env in ('alfworld', 'webshop')
  for method, word in main.METHODS.items()
  for rate in RATES
]
