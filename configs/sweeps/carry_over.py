r"""What carrying groups over costs: GiGPO with and without.

    python launch/sweep.py --sweep=configs/sweeps/carry_over.py \
        --workdir=runs/credit --known=docs/results/credit.csv

Use the work directory of credit.py to reuse its runs of GiGPO. Without --known,
the command repeats those that are in the table.

With carry-over, an iteration runs each episode for 6 of 16 turns, as 20 of 50
turns in the paper's setting. Ratios are to the policy that sampled a turn, or
to the policy before the update, with importance weights. Two more iterations
make up for the first two, in which all groups wait. Each final policy plays 512
unseen games. Seeds 100 to 102 chose between the two; the one that they chose
also has seeds 5 to 9.
"""

_CARRIED = {'rollout.carry_over': 6, 'num_iterations': 58}
METHODS = {
  'gigpo': {},
  'gigpo carried over': _CARRIED | {'loss.old_log_probs': 'sampler'},
  'gigpo carried over weighted': _CARRIED
  | {'loss.old_log_probs': 'learner', 'loss.tis_clip': 2.0},
}
SEEDS = (0, 1, 2, 3, 4, 100, 101, 102)
FURTHER_SEEDS = (5, 6, 7, 8, 9)

RUNS = [
  {
    'name': name,
    'config': 'configs/alfworld.py:mini',
    'seed': seed,
    'overrides': overrides,
    'test': {'evaluation.num_tasks': 512},
  }
  for seed in (*SEEDS, *FURTHER_SEEDS)
  for name, overrides in METHODS.items()
  if seed in SEEDS or name != 'gigpo carried over weighted'
]
