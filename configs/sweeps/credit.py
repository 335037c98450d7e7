r"""The benchmark of step-level credit: methods and controls, environments.

    python launch/sweep.py --sweep=configs/sweeps/credit.py \
        --workdir=runs/credit

Each method starts from the same policy, trains on the same tasks for the same
number of episodes, and its final policy plays 512 unseen tasks (WebShop: 500).
The first method, GRPO, has no step-level credit; each other method is compared
with it by seed and task.

Number of seeds: in nine runs of earlier tables, the paired difference of GiGPO
and GRPO on ALFWorld has a standard deviation of 4.5 points between seeds
(WebShop, five runs: 3.1). `gigpo_jax.tools.paired.seeds_needed` gives the
difference that a two-sided t-test at 5 % detects with a probability of 80 %:
7.6 points (5.2) with 5 seeds and 4.5 points (3.1) with 10. SEEDS is therefore
10 for GRPO, GiGPO and the control with shuffled anchors, and 5 for the others.
G2PO, GraphGPO and PGPO have 10 since their first seeds were the best on
ALFWorld.
p-values are adjusted for the number of methods in the table of an environment
(Holm).

TextWorld, the slippery lake and ALFWorld with full rooms have few methods, so
that all runs take little more than a day: GRPO, GiGPO, the shuffled control and
G2PO, the best method elsewhere. The first runs of the former two could not
separate methods: TextWorld starts at 87 %, and runs of one method ended between
0 and 44 % on the lake. G2PO's control was added there after its results, with
ten seeds to decide whether it gains as much.
GiGPO with the states of G2PO, a control of G2PO's gain, runs on ALFWorld, where
this gain is. With `algorithm.anchor=group`, all states of a group are one:
GiGPO then compares each step with all steps of its group, and G2PO's step
advantage is that of the last step. These controls run on ALFWorld and on the
lake, with 10 seeds where they are to explain a gain. GiGPO's was added on
WebShop, keys and doors and Sokoban after it had ended on ALFWorld, and in full
rooms and on TextWorld after that, together with G2PO's shuffled anchors.

A further control is GRPO at the KL of GiGPO, in the environments of
MATCHED_RATES: with that learning rate, GRPO's updates move the policy as far
(`ratio/kl`). In the others GRPO's own rate does: they move it as far
within 10 %, or farther. Run tuning.py or tuning_others.py, find the rate with
`python -m gigpo_jax.tools.match_rate`, and add it.

There are 610 runs. Estimated at four minutes for a run and one for its test,
they take 25 hours on two cores. docs/results.md has those that have been run.
"""

# The word in the config's variant, and further fields.
METHODS = {
  'grpo': (',grpo', {}),
  'gigpo': ('', {}),
  'rloo': (',rloo', {}),
  'ppo': (',ppo', {}),
  'hgpo': (',hgpo', {}),
  'g2po': (',g2po', {}),
  'graphgpo': (',graphgpo', {}),
  'pgpo': (',pgpo', {}),
  'gagpo': (',gagpo', {}),
  'ecpo': (',ecpo', {}),
  # Controls.
  'gigpo steps only': ('', {'algorithm.episode_weight': 0.0}),
  'gigpo shuffled': ('', {'algorithm.anchor': 'shuffled'}),
  'gigpo discount 1': ('', {'algorithm.discount': 1.0}),
  'g2po shuffled': (',g2po', {'algorithm.anchor': 'shuffled'}),
  'gigpo state anchors': ('', {'algorithm.anchor': 'state'}),
  'gigpo one state': ('', {'algorithm.anchor': 'group'}),
  'g2po one state': (',g2po', {'algorithm.anchor': 'group'}),
}
SEEDS = {
  'grpo': 10,
  'gigpo': 10,
  'gigpo shuffled': 10,
  'g2po': 10,
  'graphgpo': 10,
  'pgpo': 10,
  # Of one environment, where the method's gain is to be explained.
  ('alfworld', 'gigpo one state'): 10,
  ('gymnasium', 'g2po one state'): 10,
  ('gymnasium', 'g2po shuffled'): 10,
  ('helpdesk', 'g2po shuffled'): 10,
}
# Environment: learning rate of GRPO at GiGPO's KL, measured on tuning seeds.
MATCHED_RATES = {'alfworld': 1.49e-4, 'sokoban': 8.76e-5}
_FULL = 'alfworld mini_full'
_MANY = ('alfworld', 'webshop', 'keydoor', 'sokoban')
_ALL = (*_MANY, 'textworld', 'gymnasium', _FULL)
# The environments of a method; those that are not listed run in _MANY.
RUNS_IN = {
  'grpo': _ALL,
  'gigpo': _ALL,
  'gigpo shuffled': _ALL,
  'g2po': _ALL,
  'g2po shuffled': _ALL,
  'gigpo one state': _ALL,
  'gigpo state anchors': ('alfworld',),
  'g2po one state': ('alfworld', 'gymnasium'),
}
_TEST = {'evaluation.num_tasks': 512}
ENVIRONMENTS = {
  'alfworld': _TEST,
  # All goals of the shop's test split.
  'webshop': {'evaluation.num_tasks': 500},
  'keydoor': _TEST,
  'sokoban': _TEST,
  'textworld': _TEST | {'env.num_games': 512},
  'gymnasium': _TEST,
  _FULL: _TEST,
}
# Configs of the environments that are not ENVIRONMENT.py:mini.
CONFIGS = {_FULL: 'alfworld.py:mini_full'}


def config_of(env: str, word: str) -> str:
  """Returns the config of an environment and a method's word in its variant."""
  return f'configs/{CONFIGS.get(env, f"{env}.py:mini")}{word}'


def runs_of(env: str, name: str, test: dict) -> list[dict]:
  """Returns a run for each seed of a method in an environment."""
  word, overrides = METHODS[name]
  return [
    {
      'experiment': env,
      'name': name,
      'config': config_of(env, word),
      'seed': seed,
      'overrides': overrides,
      'test': test,
    }
    for seed in range(SEEDS.get((env, name), SEEDS.get(name, 5)))
  ]


RUNS = [
  run
  for env, test in ENVIRONMENTS.items()
  for name in METHODS
  if env in RUNS_IN.get(name, _MANY)
  for run in runs_of(env, name, test)
]
# Seed by seed, so that an interrupted sweep has complete pairs.
RUNS.sort(key=lambda run: run['seed'])
RUNS += [
  {
    'name': 'grpo at matched kl',
    'config': config_of(env, ',grpo'),
    'seed': seed,
    'overrides': {'optimizer.learning_rate': rate},
    'test': ENVIRONMENTS[env],
  }
  for seed in range(5)
  for env, rate in MATCHED_RATES.items()
]
