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

METHODS = ('grpo', 'gigpo', 'gigpo shuffled', 'g2po', 'g2po shuffled')

# With as many seeds as in credit.py.
RUNS = [
  run
  for name in METHODS
  for run in credit.runs_of('helpdesk', name, {'evaluation.num_tasks': 512})
]
RUNS.sort(key=lambda run: run['seed'])
