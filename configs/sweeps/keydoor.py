r"""GiGPO, G2PO and GRPO on keys and doors, changing one property at a time.

    python launch/sweep.py --sweep=configs/sweeps/keydoor.py \
        --workdir=runs/keydoor

All runs start from the same policy. The levels are those of `:mini`, except for
the settings of decoys and traps. The settings `alias` hide parts of the state
from anchors only, so that the policy's task stays the same. GRPO, which has no
anchors, and G2PO, whose anchors are the full state, have no runs there. Each
method has the learning rate that was tuned on the levels of `:mini`. The runs
of the first setting are also runs of credit.py. benchmarks/predictors.py
measures each setting's predictors.
"""

METHODS = {'gigpo': '', 'grpo': ',grpo', 'g2po': ',g2po'}
SETTINGS = {
  '': {},
  'horizon 16': {'env.max_steps': 16},
  'horizon 48': {'env.max_steps': 48},
  'decoys 0': {'env.generator.decoys': 0},
  'decoys 4': {'env.generator.decoys': 4},
  'traps 0': {'env.generator.traps': 0.0},
  'traps 12': {'env.generator.traps': 0.12},
  'alias held': {'env.aliased': ('held',), 'env.alias_prompts': False},
  'alias position': {'env.aliased': ('position',), 'env.alias_prompts': False},
  'alias both': {
    'env.aliased': ('position', 'held'),
    'env.alias_prompts': False,
  },
}

RUNS = [
  {
    'name': f'{setting} {method}'.strip(),
    'config': f'configs/keydoor.py:mini{word}',
    'seed': seed,
    'overrides': overrides,
    'test': {'evaluation.num_tasks': 512},
  }
  for seed in range(5)
  for setting, overrides in SETTINGS.items()
  for method, word in METHODS.items()
  if method == 'gigpo' or 'env.aliased' not in overrides
]
