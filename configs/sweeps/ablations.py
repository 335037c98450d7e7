r"""Ablations of GiGPO on ALFWorld, three seeds.

    python launch/sweep.py --sweep=configs/sweeps/ablations.py \
        --workdir=runs/main

Use the work directory of main.py to reuse its runs of GiGPO and GRPO.
"""

VARIANTS = {
  'gigpo': {},
  'grpo': {},
  'no std': {'algorithm.norm': 'mean'},
  'omega 0.4': {'algorithm.step_weight': 0.4},
  'omega 1.4': {'algorithm.step_weight': 1.4},
  'observation and actions': {'algorithm.anchor': 'observation_and_actions'},
  'similarity': {'algorithm.anchor': 'similarity'},
  'rows': {'algorithm.episode_stats': 'rows'},
  'hgpo': {},
}

RUNS = [
  {
    'name': name,
    'config': 'configs/alfworld.py:mini'
    + (f',{name}' if name in ('grpo', 'hgpo') else ''),
    'seed': seed,
    'overrides': overrides,
  }
  for seed in range(3)
  for name, overrides in VARIANTS.items()
]
