r"""What carrying groups over costs: GiGPO with and without, five seeds.

    python launch/sweep.py --sweep=configs/sweeps/carry_over.py \
        --workdir=runs/credit --known=docs/results/credit.csv

Use the work directory of credit.py to reuse its runs of GiGPO. Without --known,
the command repeats those that are in the table.

With carry-over, an iteration runs each episode for 6 of 16 turns, as 20 of 50
turns in the paper's setting. Two more iterations make up for the first two, in
which all groups wait. Each final policy plays 512 unseen games.
"""

METHODS = {
  'gigpo': {},
  'gigpo carried over': {
    'rollout.carry_over': 6,
    'loss.old_log_probs': 'learner',
    'loss.tis_clip': 2.0,
    'num_iterations': 58,
  },
}

RUNS = [
  {
    'name': name,
    'config': 'configs/alfworld.py:mini',
    'seed': seed,
    'overrides': overrides,
    'test': {'evaluation.num_tasks': 512},
  }
  for seed in range(5)
  for name, overrides in METHODS.items()
]
