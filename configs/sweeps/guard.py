"""What a guard against large updates changes at a high learning rate.

    python launch/sweep.py --sweep=configs/sweeps/guard.py --workdir=runs/guard

GiGPO on ALFWorld with the tuned rate and with 2.7 times as much, with and
without a guard that halves the updates after an iteration above a level of
`ratio/kl`. The level was chosen with seed 0, which this sweep leaves out. Each
final policy plays 512 unseen games.
"""

_HIGH = {'optimizer.learning_rate': 4e-4}
METHODS = {
  'tuned rate': {},
  'high rate': _HIGH,
  'high rate, guarded': _HIGH
  | {'guard.action': 'shrink', 'guard.max_kl': 3e-3},
}
SEEDS = (1, 2, 3, 4)
ITERATIONS = 40

RUNS = [
  {
    'name': name,
    'config': 'configs/alfworld.py:mini',
    'seed': seed,
    'overrides': overrides
    | {'num_iterations': ITERATIONS, 'evaluation.every': ITERATIONS},
    'test': {'evaluation.num_tasks': 512},
  }
  for seed in SEEDS
  for name, overrides in METHODS.items()
]
