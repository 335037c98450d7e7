r"""The main table: five methods, two environments, five seeds.

    python launch/sweep.py --sweep=configs/sweeps/main.py --workdir=runs/main

Learning rates are those that configs/sweeps/tuning.py found on another seed and
other tasks.
"""

METHODS = {
  'gigpo': '',
  'grpo': ',grpo',
  'rloo': ',rloo',
  'ppo': ',ppo',
  'strong': ',strong',
}
RATES = {
  'alfworld': dict.fromkeys(METHODS, 7.5e-5) | {'gigpo': 1.5e-4},
  'webshop': dict.fromkeys(METHODS, 7.5e-5) | {'ppo': 1.5e-4},
}


def run(env: str, name: str, word: str, seed: int, **overrides) -> dict:
  """Returns a run at the learning rate of its method, or of GiGPO."""
  rates = RATES[env]
  return {
    'name': name,
    'config': f'configs/{env}.py:mini{word}',
    'seed': seed,
    'overrides': {
      'optimizer.learning_rate': rates.get(name, rates['gigpo']),
      **overrides,
    },
  }


RUNS = [
  run(env, name, word, seed)
  for seed in range(5)
  for env in RATES
  for name, word in METHODS.items()
]
