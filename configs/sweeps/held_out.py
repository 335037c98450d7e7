r"""A test of the benchmark's conclusions in an environment that had no part.

    python launch/sweep.py --sweep=configs/sweeps/held_out.py \
        --workdir=runs/held_out

GRPO, GiGPO and G2PO at the help desk, and the last two with shuffled anchors.
tuning_others.py selected the learning rates there; each final policy plays 512
unseen requests. No method, option or claim of the benchmark had been chosen by
results at the help desk, and the expected differences were written down before
the runs (docs/results/history.md).
"""

from configs.sweeps import credit

# Number of seeds, as in credit.py.
METHODS = {
  'grpo': 10,
  'gigpo': 10,
  'gigpo shuffled': 10,
  'g2po': 10,
  'g2po shuffled': 5,
}
_ENV = 'helpdesk'
RUNS = [
  {
    'name': name,
    'config': credit.config_of(_ENV, credit.METHODS[name][0]),
    'seed': seed,
    'overrides': credit.METHODS[name][1],
    'test': {'evaluation.num_tasks': 512},
  }
  for seed in range(max(METHODS.values()))
  for name, seeds in METHODS.items()
  if seed < seeds
]
