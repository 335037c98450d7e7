r"""Which learning rate each method is given: the same three for all.

    python launch/sweep.py --sweep=configs/sweeps/tuning.py \
        --workdir=runs/tuning

Seeds 100 and 101, of which nothing else is reported.
"""

from configs.sweeps import main

RATES = (2e-4, 4e-4, 8e-4)

RUNS = [
  {
    'name': f'{method} {rate:g}',
    'config': f'configs/{env}.py:mini{word}',
    'seed': seed,
    'overrides': {'optimizer.learning_rate': rate},
  }
  for env in ('alfworld', 'webshop')
  for seed in (100, 101)
  for method, word in main.METHODS.items()
  for rate in RATES
]
