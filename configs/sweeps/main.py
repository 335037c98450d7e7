r"""Runs of the main table: five methods, two environments, five seeds.

    python launch/sweep.py --sweep=configs/sweeps/main.py --workdir=runs/main

`:mini` uses learning rates that configs/sweeps/tuning.py selected on another
seed and other tasks.
"""

METHODS = {
  'gigpo': '',
  'grpo': ',grpo',
  'rloo': ',rloo',
  'ppo': ',ppo',
  'sampo': ',sampo',
}
RUNS = [
  {'name': name, 'config': f'configs/{env}.py:mini{word}', 'seed': seed}
  for seed in range(5)
  for env in ('alfworld', 'webshop')
  for name, word in METHODS.items()
]
