r"""Teachers inside RL, compared with RL alone: WebShop and the help desk.

    python launch/sft.py --config=configs/helpdesk.py:tiny
    for env in webshop:mini helpdesk:tiny; do
      python launch/train.py --config=configs/${env/:/.py:} --config.seed=100 \
          --config.episodes.every=1 --config.num_iterations=20 \
          --config.evaluation.every=0 --workdir=runs/recorded/${env%:*}
    done
    python launch/sweep.py --sweep=configs/sweeps/teachers.py \
        --workdir=runs/credit

Use the work directory of credit.py to reuse its runs of GiGPO. All methods
start from the same policy and play equally many episodes; they differ in the
rows that join their updates. The expert's 200 episodes and the recorded run,
whose seed no other run has, are not counted as environment steps of the table.
Each final policy plays 500 unseen goals or 512 unseen requests.

The weights of the teachers are not tuned. mu = 0.1 with the token weights
p (1 - p) is CHORD-phi as its authors run it; the other teachers have the same
mu. Distillation adds the solution to the prompt of a turn, so conversations,
as at the help desk, cannot have it.
"""

# What learns from: nothing else, the expert, recorded successes, the policy
# with the expert's solution in its prompt.
METHODS = {
  'gigpo': {},
  'chord': {'teacher.mu_peak': 0.1},
  'replay': {'teacher.mu_peak': 0.1, 'teacher.loss': 'replay'},
  'distillation': {'teacher.mu_peak': 0.1, 'teacher.loss': 'distillation'},
}
# Size, methods, test.
ENVIRONMENTS = {
  'webshop': ('mini', tuple(METHODS), {'evaluation.num_tasks': 500}),
  'helpdesk': (
    'tiny',
    ('gigpo', 'chord', 'replay'),
    {'evaluation.num_tasks': 512},
  ),
}


def _overrides(env: str, method: str) -> dict[str, object]:
  recorded = {'teacher.data': f'runs/recorded/{env}/episodes'}
  return METHODS[method] | (recorded if method == 'replay' else {})


RUNS = [
  {
    'name': method,
    'config': f'configs/{env}.py:{size}',
    'seed': seed,
    'overrides': _overrides(env, method),
    'test': test,
  }
  for seed in range(3)
  for env, (size, methods, test) in ENVIRONMENTS.items()
  for method in methods
]
